"""The control link: found again after losses and refusals, with nothing forgotten that must not be."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused, Unreachable
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.seed_link import KnownSeeds, RetryTimeS, SeedLink, is_transient, no_retry
from tests.fake_seed import FakeSeed
from wire.connection import Connection
from wire.handshake import local_hello, local_welcome
from wire.job_messages import SaveNow, StepMetrics
from wire.messages import EventNotice, Heartbeat, HeartbeatAck, Hello, Message, RefusalCode, Refuse, Welcome

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")


class Box(Generic[T]):
    """What a callback was given, and a way to wait for more."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._news = asyncio.Event()

    def put(self, item: T) -> None:
        self.items.append(item)
        self._news.set()

    async def until(self, count: int = 1) -> list[T]:
        async with asyncio.timeout(600):
            while len(self.items) < count:
                self._news.clear()
                await self._news.wait()
        return self.items


@dataclass
class Linked:
    """A link that runs, and what it told."""

    link: SeedLink
    downs: Box[P2PTrainError]
    messages: Box[Message]
    running: asyncio.Task[None]


class LinkedSeed(FakeSeed):
    """Keeps what workers say, and refuses as ``refusals`` tell it to."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.heard: list[Message] = []
        self.refusals: list[Refuse] = []
        self.connections: list[Connection] = []
        self.news = asyncio.Event()

    async def listen(self) -> None:
        await self.start(self.world.network, "seed", 1)

    async def until(self, count: int, kind: type[Message]) -> list[Message]:
        async with asyncio.timeout(600):
            while len(found := [message for message in self.heard if isinstance(message, kind)]) < count:
                self.news.clear()
                await self.news.wait()
        return found

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if self.refusals:
            return self.refusals.pop(0)
        self.connections.append(connection)
        return local_welcome(peer_id="seed", name="seed", wall=0.0, cluster_id="c", heartbeat_s=1.0, death_s=3.0)

    def take(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Heartbeat):
            connection.send(HeartbeatAck(message.seq))
        self.heard.append(message)
        self.news.set()


def metrics(step: int) -> StepMetrics:
    return StepMetrics("job", 1, step, {"loss": 1.0})


@asynccontextmanager
async def linked(seed: LinkedSeed, retry_time_s: RetryTimeS = no_retry) -> AsyncIterator[Linked]:
    downs, messages = Box[P2PTrainError](), Box[Message]()
    network = seed.world.network

    def heard(message: Message) -> None:
        if isinstance(message, Refuse):  # as members do
            raise Refused(message.code, message.message)
        messages.put(message)

    assert isinstance(network, MemoryNetwork)
    link = SeedLink(
        world=replace(seed.world, network=network.at("worker")),
        seeds=KnownSeeds([("seed", 1)], {}, lambda: None),
        retry_time_s=retry_time_s,
        hello=lambda: local_hello(peer_id="w", name="w", roles=["worker"], purpose="peer", port=5),
        pulse=lambda: Heartbeat(0, 1, 2, "training", {}),
        on_message=heard,
        on_up=lambda welcome: None,
        on_down=downs.put,
    )
    running = asyncio.create_task(link.run())
    yield Linked(link, downs, messages, running)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def running_seed() -> AsyncIterator[LinkedSeed]:
    seed = LinkedSeed(world())
    await seed.listen()
    yield seed
    await seed.stop()


def world(seed: int = 3) -> World:
    return World(LoopClock(), MemoryNetwork(), RealDisk(), random.Random(seed))


async def test_what_was_said_while_the_seed_was_away_arrives_and_so_does_what_may_have_been_lost() -> None:
    async with running_seed() as seed, linked(seed) as here:
        await seed.until(1, Heartbeat)
        here.link.send(metrics(1))
        await seed.until(1, StepMetrics)
        await seed.stop()
        await here.downs.until()
        here.link.send(metrics(2))
        here.link.send(SaveNow("job"))  # of no use later
        here.link.send(EventNotice("warning", "hot", "the fan is loud"))
        await asyncio.sleep(40)
        seed.heard.clear()
        await seed.listen()
        again = await seed.until(2, StepMetrics)
        assert [message.step for message in again if isinstance(message, StepMetrics)] == [1, 2]
        assert not any(isinstance(message, SaveNow) for message in seed.heard)
        (notice,) = await seed.until(1, EventNotice)
        assert isinstance(notice, EventNotice)
        assert 40 <= notice.age_s < 60, "it tells when it was, and not when it came"
        assert len(here.downs.items) == 1
        seed.connections[-1].send(SaveNow("job"))
        assert await here.messages.until() == [SaveNow("job")]
        assert here.link.rtt_ms is not None


@pytest.mark.parametrize("code", [RefusalCode.UNREACHABLE, RefusalCode.BUSY, RefusalCode.DUPLICATE_PEER])
async def test_a_refusal_after_the_first_join_is_told_and_tried_again(code: RefusalCode) -> None:
    async with running_seed() as seed, linked(seed) as here:
        await seed.until(1, Heartbeat)
        seed.refusals = [Refuse(code, "not now"), Refuse(code, "not now")]
        seed.connections[-1].abort()
        seed.heard.clear()
        await seed.until(1, Heartbeat)
        assert not here.running.done()
        assert any(isinstance(problem, Refused) and problem.code == code for problem in here.downs.items)


async def test_another_protocol_after_a_restart_ends_the_worker() -> None:
    async with running_seed() as seed, linked(seed) as here:
        await seed.until(1, Heartbeat)
        seed.refusals = [Refuse(RefusalCode.VERSION, "another protocol")]
        seed.connections[-1].abort()
        with pytest.raises(Refused, match="another protocol"):
            await here.running


async def test_the_first_join_must_succeed() -> None:
    seed = LinkedSeed(world())
    async with linked(seed) as here:
        with pytest.raises(Unreachable):
            await here.running
    await seed.listen()
    seed.refusals = [Refuse(RefusalCode.UNREACHABLE, "cannot reach you")]
    async with linked(seed) as here:
        with pytest.raises(Refused, match="cannot reach you"):
            await here.running


async def test_a_newcomer_waits_for_a_seed_that_is_not_there_yet() -> None:
    seed, told = LinkedSeed(world()), Box[P2PTrainError]()

    def retry_time_s(problem: P2PTrainError) -> float:
        told.put(problem)
        return math.inf

    async with linked(seed, retry_time_s) as here:
        assert all(isinstance(problem, Unreachable) for problem in await told.until(5))
        seed.refusals = [Refuse(RefusalCode.SHUTTING_DOWN, "not now")]
        await seed.listen()
        await seed.until(1, Heartbeat)
        assert isinstance(told.items[-1], Refused)
        assert not here.downs.items


async def test_waiting_ends_in_time() -> None:
    now = asyncio.get_running_loop().time
    async with linked(LinkedSeed(world()), lambda _: 30 - now()) as here:
        with pytest.raises(Unreachable):
            await here.running
        assert now() == pytest.approx(30)


def test_most_refusals_are_not_waited_out() -> None:
    passing = {code for code in RefusalCode if is_transient(Refused(code, ""))}
    assert passing == {RefusalCode.BUSY, RefusalCode.SHUTTING_DOWN, RefusalCode.TOO_SLOW}
    assert is_transient(Unreachable("nobody answers"))
    assert not is_transient(ProtocolError("garbage"))


async def test_who_was_evicted_is_told_so_and_does_not_search() -> None:
    async with running_seed() as seed, linked(seed) as here:
        await seed.until(1, Heartbeat)
        seed.connections[-1].send(Refuse(RefusalCode.EVICTED, "an operator evicted w"))
        with pytest.raises(Refused, match="an operator evicted w"):
            await here.running
        assert not here.downs.items


@pytest.mark.parametrize("drawn", range(8))
@pytest.mark.parametrize("away_s", [1.0, 40.0, 3600.0])
async def test_seed_that_comes_back_is_found_within_a_second_and_a_half(away_s: float, drawn: int) -> None:
    seed = LinkedSeed(world(drawn))
    await seed.listen()
    async with linked(seed) as here:
        await seed.until(1, Heartbeat)
        await seed.stop()
        await here.downs.until()
        await asyncio.sleep(away_s)
        began = asyncio.get_running_loop().time()
        again = LinkedSeed(seed.world)
        await again.listen()
        await again.until(1, Heartbeat)
        # The first beat of the new link comes after one interval.
        assert asyncio.get_running_loop().time() - began < 1.5 + 1.1
    await again.stop()


async def test_a_seed_that_falls_silent_is_given_up_after_its_death_time() -> None:
    async with running_seed() as seed, linked(seed) as here:
        await seed.until(1, Heartbeat)
        assert isinstance(seed.world.network, MemoryNetwork)
        seed.world.network.silence("seed", "worker")
        began = asyncio.get_running_loop().time()
        await here.downs.until()
        assert asyncio.get_running_loop().time() - began < 6


async def test_a_worker_that_slept_itself_does_not_blame_the_seed() -> None:
    async with running_seed() as seed, linked(seed) as here:
        await seed.until(3, Heartbeat)
        loop: Any = asyncio.get_running_loop()
        for _ in range(20):
            await asyncio.sleep(0.3)
            loop._now += 20.0  # stopped: acknowledgements lie unread
        await seed.until(30, Heartbeat)
        assert not here.downs.items
