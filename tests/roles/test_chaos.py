"""Seeded chaos: real seed, real workers, and a schedule of faults that one number decides.

A *moment* is a piece of bytes that arrives anywhere in the cluster: frames of every phase (forming, healing, reducing,
voting, beats) are moments, so a fault at a random moment meets every phase sooner or later, without a clock. Replay one
schedule with ``P2PTRAIN_CHAOS_SEED=17 pytest tests/roles/test_chaos.py``; run more with ``P2PTRAIN_CHAOS_RUNS=500``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import NetworkError, P2PTrainError
from p2ptrain.core.world import Listener, LoopClock, Network, ProtocolFactory, World
from roles.identity import claim
from roles.seed import run_seed
from roles.stand_in import StandInEngine
from roles.worker.worker import Worker, WorkerOptions
from wire.client import SeedClient
from wire.memory import MemoryNetwork

SEED_HOST = "seed"
MOST_WORKERS = 4
STEPS = 60
DEADLINE_S = 60.0
BEAT_S, DEATH_S = 0.1, 0.6
TICK_S = 0.02
FIRST_RUN = int(os.environ.get("P2PTRAIN_CHAOS_SEED", "4"))
RUNS = int(os.environ.get("P2PTRAIN_CHAOS_RUNS", "1" if "P2PTRAIN_CHAOS_SEED" in os.environ else "10"))
ACTIONS = {
    "kill": 6,
    "kill_most": 1,
    "leave": 3,
    "join": 7,
    "restart_seed": 2,
    "kill_seed": 2,
    "pause_resume": 2,
    "save": 1,
    "silence": 1,
    "cut": 3,
}


class Moments:
    """Counts what arrives, and wakes whoever waits for the n-th moment from now."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, number: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self.count + number, future))
        await future

    def happened(self) -> None:
        self.count += 1
        for due, future in self._waiting:
            if due <= self.count and not future.done():
                future.set_result(None)
        self._waiting = [item for item in self._waiting if not item[1].done()]


class WatchedNetwork:
    """A network that tells of everything that arrives."""

    def __init__(self, inner: Network, moments: Moments) -> None:
        self._inner, self._moments = inner, moments

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        await self._inner.connect(host, port, self._watched(factory), timeout_s=timeout_s)

    async def listen(self, host: str, port: int, factory: ProtocolFactory, on_problem: Any = None) -> Listener:
        return await self._inner.listen(host, port, self._watched(factory), on_problem)

    def _watched(self, factory: ProtocolFactory) -> ProtocolFactory:
        def make() -> asyncio.BufferedProtocol:
            protocol: Any = factory()
            take = protocol.buffer_updated

            def buffer_updated(nbytes: int) -> None:
                take(nbytes)
                self._moments.happened()

            protocol.buffer_updated = buffer_updated
            return protocol

        return make


class Member:
    """A worker on a host of its own."""

    def __init__(self, chaos: Chaos, slot: int) -> None:
        self.slot, self.host = slot, f"host-{slot}"
        self.engines: list[StandInEngine] = []
        self.told: list[tuple[str, str]] = []
        self.stop = asyncio.Event()
        self._chaos = chaos
        self.identity = claim(RealDisk(), chaos.root, role="worker", slot=slot, name="")
        self.task = asyncio.create_task(self._run(), name=f"worker {slot}")

    async def _run(self) -> None:
        """A worker whose first call finds no seed says so and ends; its person tries again a moment later."""
        while not self.stop.is_set():
            self.worker = Worker(
                self._chaos.world(self.host),
                self.identity,
                WorkerOptions(seed=self._chaos.address, listen=("127.0.0.1", 0), advertise=("", 0), capabilities={}),
                build_engine=self._build,
                warm_up=lambda: None,
                notify=lambda level, kind, text: self.told.append((kind, text)),
                on_step=lambda applied, total, values: None,
            )
            try:
                await self.worker.run(self.stop)
            except P2PTrainError as problem:
                if any(kind == "joined" for kind, _ in self.told):
                    raise
                self.told.append(("not-joined", problem.message))
                await self._chaos.moments.wait(5)

    def _build(self, profile: Profile) -> StandInEngine:
        self.engines.append(StandInEngine(profile))
        return self.engines[-1]


class Chaos:
    """One cluster over memory, every process on a host of its own, and what may happen to it."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.random = random.Random(number)
        self.moments = Moments()
        self.network = MemoryNetwork()
        self.members: dict[int, Member] = {}
        self.address = (SEED_HOST, 0)
        self.job = ""
        self.story: list[str] = []
        self._seed: asyncio.Task[None] | None = None
        self._seed_stop = asyncio.Event()
        self._later: list[asyncio.Task[None]] = []
        self.unexpected: list[BaseException] = []
        self.gaps: list[int] = []  # steps that the seed has no metrics of: they died with their rank 0

    def world(self, host: str) -> World:
        network = WatchedNetwork(self.network.at(host), self.moments)
        return World(LoopClock(), network, RealDisk(), random.Random(7))

    def tell(self, what: str) -> None:
        self.story.append(f"@{self.moments.count} {what}")

    # ------------------------------------------------------------------------------------------------------- the seed

    async def start_seed(self) -> None:
        ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._seed_stop = asyncio.Event()
        self._seed = asyncio.create_task(
            run_seed(
                self.world(SEED_HOST),
                state_dir=self.root / "seed",
                host="127.0.0.1",
                port=self.address[1],
                name="chaos",
                heartbeat_s=BEAT_S,
                death_s=DEATH_S,
                on_ready=ready.set_result,
                stop=self._seed_stop,
            ),
            name="seed",
        )
        futures: set[asyncio.Future[Any]] = {self._seed, ready}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._seed
        self.address = (SEED_HOST, ready.result()[1])

    async def restart_seed(self) -> None:
        assert self._seed is not None
        self._seed_stop.set()
        await self._seed
        await self.start_seed()

    async def kill_seed(self) -> None:
        assert self._seed is not None
        self._unplug(SEED_HOST)
        self._seed.cancel()
        await asyncio.gather(self._seed, return_exceptions=True)
        self._plug_in(SEED_HOST)
        await self.start_seed()

    # ---------------------------------------------------------------------------------------------------- the workers

    @property
    def hosts(self) -> list[str]:
        return [SEED_HOST, *(f"host-{slot}" for slot in range(1, MOST_WORKERS + 1))]

    @property
    def live(self) -> list[Member]:
        return list(self.members.values())

    def join(self) -> None:
        free = [slot for slot in range(1, MOST_WORKERS + 1) if slot not in self.members]
        if free:
            slot = self.random.choice(free)
            self.members[slot] = Member(self, slot)

    async def kill(self, member: Member) -> None:
        """As the kernel does it with a killed process: every connection is reset, nothing is said."""
        del self.members[member.slot]
        self._unplug(member.host)
        member.task.cancel()
        await self._ended(member)
        self._plug_in(member.host)

    async def leave(self, member: Member) -> None:
        del self.members[member.slot]
        member.stop.set()
        async with asyncio.timeout(5):
            await self._ended(member)

    async def _ended(self, member: Member) -> None:
        (result,) = await asyncio.gather(member.task, return_exceptions=True)
        member.identity.release()
        if result is not None and not isinstance(result, asyncio.CancelledError):
            self.unexpected.append(result)

    def _unplug(self, host: str) -> None:
        for other in self.hosts:
            if other != host:
                self.network.cut(host, other)

    def _plug_in(self, host: str) -> None:
        for other in self.hosts:
            if other != host:
                self.network.mend(host, other)

    # ------------------------------------------------------------------------------------------------------- schedule

    async def act(self) -> None:
        """Something happens."""
        name = self.random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        victims = self.random.sample(self.live, len(self.live))
        match name:
            case "kill" if len(victims) > 1:
                self.tell(f"kill {victims[0].host}")
                await self.kill(victims[0])
            case "kill_most" if len(victims) > 1:
                self.tell(f"kill {[victim.host for victim in victims[1:]]}")
                for victim in victims[1:]:
                    await self.kill(victim)
            case "leave" if len(victims) > 1:
                self.tell(f"{victims[0].host} leaves")
                await self.leave(victims[0])
            case "join":
                self.join()
                self.tell(f"join, now {sorted(self.members)}")
            case "restart_seed":
                self.tell("restart the seed")
                await self.restart_seed()
            case "kill_seed":
                self.tell("kill the seed")
                await self.kill_seed()
            case "pause_resume":
                self.tell("pause")
                await self.ask("jobs.pause", job=self.job)
                await self.moments.wait(self.random.randrange(1, 60))
                self.tell("resume")
                await self.ask("jobs.resume", job=self.job)
            case "save":
                self.tell("save")
                await self.ask("jobs.save", job=self.job)
            case "silence" | "cut":
                one, other = self.random.sample([SEED_HOST, *(member.host for member in victims)], 2)
                self.tell(f"{name} {one} {other}")
                getattr(self.network, name)(one, other)
                self._later.append(asyncio.create_task(self._mend(one, other)))

    async def _mend(self, one: str, other: str) -> None:
        await self.moments.wait(self.random.randrange(1, 150))
        self.tell(f"mend {one} {other}")
        self.network.mend(one, other)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A person's request. Where the job ended before, or the seed is out of reach, nothing happens."""
        try:
            client = await SeedClient.connect(self.network.at("person"), *self.address, name="person")
        except NetworkError:
            return {}
        try:
            return await client.request(method, params)
        except P2PTrainError as problem:
            self.tell(f"{method}: {problem.message}")
            return {}
        finally:
            await client.close()

    async def until(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        client = await SeedClient.connect(self.network.at("person"), *self.address, name="person")
        try:
            await client.request("subscribe")
            async for update in client.updates():
                for item in update.items if update.topic == "jobs" else []:
                    if item["id"] == self.job and fits(item):
                        return item
        finally:
            await client.close()
        raise AssertionError("the updates ended")

    async def _tick(self) -> None:
        """Where nobody is there to say anything, moments pass, too."""
        while True:
            await asyncio.sleep(TICK_S)
            self.moments.happened()

    async def run(self, profile: Profile) -> dict[str, Any]:
        """The schedule, then calm; the job's record when it is done."""
        self._later.append(asyncio.create_task(self._tick()))
        await self.start_seed()
        client = await SeedClient.connect(self.network.at("person"), *self.address, name="person")
        created = await client.request("jobs.create", {"name": "chaos", "profile": "chaos", "spec": profile.to_spec()})
        await client.close()
        self.job = str(created["job"])
        for _ in range(self.random.randrange(2, MOST_WORKERS + 1)):
            self.join()
        self.tell(f"begin with {sorted(self.members)}")
        for _ in range(self.random.randrange(2, 9)):
            await self.moments.wait(self.random.choice((1, 5, 25, 100, 400)))
            await self.act()
        for mending in self._later[1:]:
            await mending
        while len(self.members) < 2:  # as many as the first view waits for
            self.join()
        self.tell("calm")
        await self.ask("jobs.resume", job=self.job)
        return await self.until(lambda item: item["state"] == "done")

    async def close(self) -> None:
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
        for one in self.hosts:
            self._plug_in(one)
        for member in self.live:
            await self.leave(member)
        if self._seed is not None:
            self._seed_stop.set()
            await self._seed


def undisturbed(profile: Profile) -> list[float]:
    """The loss of every step, of one process alone."""
    engine = StandInEngine(profile)
    engine.load_initial()
    losses = []
    for step in range(profile.job.steps):
        engine.begin_step(step)
        for index in range(profile.batch.micro_batches):
            engine.micro_batch(step, index)
        losses.append(engine.apply(step, engine.partial_square_sum(0, engine.reduce_buffer.size)).loss)
    return losses


PROFILE = Profile.model_validate(
    {
        "job": {"steps": STEPS, "workers": 2},
        "batch": {"micro_batches": 8},
        "validation": {"every": 7, "batches": 3},
        "checkpoint": {"every": 4},
        "membership": {"heartbeat_s": BEAT_S, "death_s": DEATH_S},
        "ring": {"bucket_bytes": 1024},  # two buckets, the first of which is sent while the step is being computed
    }
)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[list[str]]:
    """Fails where tasks or threads outlive the block, or where anything reached the loop's exception handler."""
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(repr(context)))
    before = asyncio.all_tasks()
    yield complaints
    gc.collect()  # a task whose exception nobody took says so when it is collected
    left = asyncio.all_tasks() - before
    loop.set_exception_handler(None)
    assert not complaints, complaints
    assert not left, left
    for thread in threading.enumerate():
        if thread.name == "compute":
            await asyncio.to_thread(thread.join, 5)
            assert not thread.is_alive(), "a compute thread lives on"


@pytest.mark.parametrize("number", range(FIRST_RUN, FIRST_RUN + RUNS))
async def test_a_run_survives_whatever_happens(tmp_path: Path, number: int) -> None:
    await survive(tmp_path, number)


async def survive(root: Path, number: int) -> Chaos:
    """Run one schedule and check what must be true of every run."""
    chaos = Chaos(root, number)
    async with nothing_left():
        try:
            async with asyncio.timeout(DEADLINE_S):
                ended = await chaos.run(PROFILE)
                rows = (await chaos.ask("metrics.history", job=chaos.job, after_step=0, limit=200))["rows"]
            assert (ended["step"], ended["steps_total"]) == (STEPS, STEPS)
            finished = [m for m in chaos.live if m.worker._runner and m.worker._runner.core.applied == STEPS]
            assert len({member.engines[-1].digest() for member in finished}) <= 1
            losses = undisturbed(PROFILE)
            for row in rows:
                assert row["loss"] == pytest.approx(losses[row["step"] - 1], rel=1e-4), row["step"]
            chaos.gaps = sorted(set(range(1, STEPS + 1)) - {row["step"] for row in rows})
        except (AssertionError, TimeoutError) as problem:
            told = "\n".join(f"{m.host}: {m.told[-15:]}" for m in chaos.live)
            raise AssertionError(f"chaos {number}: {problem!r}\n" + "\n".join(chaos.story) + "\n" + told) from problem
        finally:
            await chaos.close()
        assert not chaos.unexpected, (number, chaos.unexpected, chaos.story)
    hub = chaos.network._hub
    assert not hub.transports, (number, list(hub.transports))
    assert not hub.listeners, (number, hub.listeners)
    return chaos
