"""Members of a ring as healing sees them, for tests: real sources and engines, whose steps are committed as one
says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import LoopClock, Network, World
from p2ptrain.lab.stand_in import StandInEngine
from ring.token import first_lineage, next_lineage
from ring.view import View
from roles.line import Line
from roles.snapshots import Snapshots, digest_of
from roles.worker.context import PeerContext
from roles.worker.heal_source import HealSource
from wire.connection import Connection
from wire.handshake import local_welcome, serve
from wire.job_messages import HealOffer, HealRequest, LedgerRow, MemberRecord, RangeRequest
from wire.messages import Hello, Message, Welcome

JOB = "job"
MOST_STEPS = 200
FIRST = first_lineage("spec")
ME = MemberRecord("me", "me", "d", 999, 0, 8, False)


class Inline:
    """A compute thread that computes at once."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def world_of(network: Network) -> World:
    return World(LoopClock(), network, RealDisk(), random.Random(1))


def around_of(world: World, told: list[tuple[str, str, str]], peer_id: str = "me", seed_host: str = "127.0.0.1") -> Any:
    """What a runner's parts need of their worker."""
    around = SimpleNamespace(
        world=world,
        compute=Inline(),
        peer_id=peer_id,
        name=peer_id,
        seed_host=seed_host,
        notify=lambda *notice: told.append(notice),
        notify_here=lambda *notice: told.append(notice),
    )
    around.hello, around.dial = partial(PeerContext.hello, around), partial(PeerContext.dial, around)
    return around


def engine_of(numel: int, like: StandInEngine | None = None) -> StandInEngine:
    engine = StandInEngine(Profile(), numel=numel)
    if like is None:
        engine.state.load_initial()
    for mine, its in zip(engine.state.blobs(), like.state.blobs() if like else [], strict=False):
        mine.view[:] = its.view
    return engine


@dataclass
class Member:
    """One source."""

    name: str
    engine: StandInEngine
    core: Any
    heal_source: HealSource
    snapshots: Snapshots
    record: MemberRecord
    served: list[Connection] = field(default_factory=list)
    wanted: list[None] = field(default_factory=list)

    def die(self) -> None:
        for connection in self.served:
            connection.abort()

    async def commit(self, *, snapshot: bool) -> None:
        """One step of the ring, with all micro-batches computed here: every member comes to the same sums."""
        engine, core = self.engine, self.core
        step = core.applied
        engine.begin_step(step)
        for index in range(Profile().batch.micro_batches):
            engine.micro_batch(step, index)
        engine.finish_gradients()
        digest = digest_of(memoryview(engine.reduce_buffer.tobytes()))
        await self.heal_source.keep(engine)
        core.square_sum = engine.partial_square_sum(0, engine.reduce_buffer.size)
        engine.apply(step, core.square_sum)
        core.applied, core.lineage = step + 1, next_lineage(core.lineage, digest)
        self.heal_source.log_step(LedgerRow(step + 1, core.view.generation, digest, b""))
        if snapshot:
            await self.heal_source.snapshot(engine, self.snapshots)


Serve = Callable[[Member, Connection, Hello], Awaitable[None]]


async def honest(member: Member, connection: Connection, hello: Hello) -> None:
    await member.heal_source.give(connection, hello, member.engine)


class Ring:
    """Members that commit when they are told to."""

    def __init__(self, world: World, members: list[Member]) -> None:
        self.world, self.members = world, members
        self.told: list[tuple[str, str, str]] = []
        self.problems: list[P2PTrainError] = []

    @property
    def view(self) -> View:
        view: View = self.members[0].core.view
        return view

    @property
    def records(self) -> list[MemberRecord]:
        return [member.record for member in self.members]

    async def step(self) -> None:
        """All members commit a step; where one of them asked for a snapshot, those who want it take it."""
        wanted = any(member.wanted for member in self.members)
        for member in self.members:
            member.wanted.clear()
            await member.commit(snapshot=wanted)

    async def steps_until(self, satisfied: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if satisfied():
                return
            await self.step()
            await asyncio.sleep(0.05)  # virtual: time for what was asked to arrive
        raise AssertionError(f"not in {MOST_STEPS} steps: {self.told}")

    def digests(self) -> set[str]:
        return {member.engine.state.digest() for member in self.members}


@asynccontextmanager
async def ring_of(
    network: Network, count: int, *, numel: int = 700_001, behaviour: Mapping[int, Serve] | None = None, host: str = "d"
) -> AsyncIterator[Ring]:
    """``count`` members that stand at step 0, and serve whoever heals; ``behaviour`` of some differs."""
    world, told = world_of(network), []  # type: ignore[var-annotated]
    ring = Ring(world, [])
    ring.told = told
    servers = []

    for number in range(count):
        name = f"source-{number}"

        async def decide(hello: Hello, connection: Connection, name: str = name) -> Welcome:
            return local_welcome(peer_id=name, name=name, wall=0.0)

        core = SimpleNamespace(
            job=JOB, applied=0, lineage=FIRST, square_sum=1.0, torn=False, may_give=True, view=None, phase=None
        )
        wanted: list[None] = []
        context = around_of(world, told, name)
        heal_source = HealSource(context, core, want_snapshot=lambda wanted=wanted: wanted.append(None))  # type: ignore[arg-type, misc]
        engine = engine_of(numel, ring.members[0].engine if ring.members else None)
        heal_source.state_bytes = sum(blob.view.nbytes for blob in engine.state.blobs())
        snapshots = Snapshots(Inline())  # type: ignore[arg-type]
        record = MemberRecord(name, name, host, 1, 0, 8, True)
        member = Member(name, engine, core, heal_source, snapshots, record, wanted=wanted)

        async def answer(connection: Connection, hello: Hello, member: Member = member, number: int = number) -> None:
            member.served.append(connection)
            await (behaviour or {}).get(number, honest)(member, connection, hello)

        server = await serve(
            network, host, 0, decide=decide, serve=answer, on_problem=lambda error, _: ring.problems.append(error)
        )
        servers.append(server)
        member.record = MemberRecord(name, name, host, server.address[1], 0, 8, True)
        ring.members.append(member)
    set_view(ring, 3)
    try:
        yield ring
    finally:
        for member in ring.members:
            member.heal_source.cut("the test ended")
        for server in servers:
            await server.close()


def set_view(ring: Ring, generation: int) -> None:
    """A view that begins where the members stand, and has the healing member in it."""
    core = ring.members[0].core
    view = View(JOB, generation, core.applied, core.lineage, (*ring.records, ME), core.square_sum)
    for member in ring.members:
        member.core.view = view


# ---------------------------------------------------------------------------------------- sources that do not do well


TABLE_BYTES = 4096
"""Most that a source's table has; chunks have more."""
Change = Callable[[Connection, memoryview, int], memoryview | None]


def changes(change: Change) -> Serve:
    """Sends what ``change`` makes of each payload, of which it is told the number; None: nothing."""

    async def serve(member: Member, connection: Connection, hello: Hello) -> None:
        send, numbers = connection.send_bulk, count(1)

        def send_changed(payload: memoryview, **how: Any) -> None:
            if (changed := change(connection, payload, next(numbers))) is not None:
                send(changed, **how)

        connection.send_bulk = send_changed  # type: ignore[method-assign]
        await honest(member, connection, hello)

    return serve


def dies_after(chunks: int) -> Serve:
    """Gives so many chunks, then is killed in the middle of the next one."""
    given = 0

    def change(connection: Connection, payload: memoryview, number: int) -> memoryview:
        nonlocal given
        given += payload.nbytes >= TABLE_BYTES
        if given > chunks:
            asyncio.get_running_loop().call_soon(connection.abort)
        return payload

    return changes(change)


def gives_once_all_have_offered(count: int) -> Serve:
    """Whoever heals has heard each of ``count`` sources before it has everything: it begins when most have offered."""
    offers, held = 0, list[Callable[[], None]]()

    async def serve(member: Member, connection: Connection, hello: Hello) -> None:
        send, send_bulk = connection.send, connection.send_bulk

        def said(message: Message, **how: Any) -> int:
            nonlocal offers
            size = send(message, **how)
            if isinstance(message, HealOffer):
                offers += 1
                while offers == count and held:
                    held.pop(0)()
            return size

        def given(payload: memoryview, **how: Any) -> None:
            if offers < count:
                held.append(partial(send_bulk, payload, **how))
            else:
                send_bulk(payload, **how)

        connection.send, connection.send_bulk = said, given  # type: ignore[method-assign]
        await honest(member, connection, hello)

    return serve


def flip_bit(connection: Connection, payload: memoryview, number: int) -> memoryview:
    copy = bytearray(payload)
    copy[len(copy) // 2] ^= 1
    return memoryview(copy)


async def another_state(member: Member, connection: Connection, hello: Hello) -> None:
    member.engine.state.blobs()[0].view[5] ^= 1
    await honest(member, connection, hello)


async def is_silent(member: Member, connection: Connection, hello: Hello) -> None:
    await connection.closed.wait()


async def offers_nothing(member: Member, connection: Connection, hello: Hello) -> None:
    """Lives, and never has a state to offer."""
    async with Line(connection).keep_alive():
        await connection.closed.wait()


async def goes_silent(member: Member, connection: Connection, hello: Hello) -> None:
    """Offers what it has, gives its table, and freezes."""
    say, frozen = connection.send, False

    def freeze(connection: Connection, payload: memoryview, number: int) -> memoryview | None:
        nonlocal frozen
        frozen = frozen or payload.nbytes > TABLE_BYTES
        return None if frozen else payload

    connection.send = lambda message, **how: 0 if frozen else say(message, **how)  # type: ignore[method-assign, assignment]
    await changes(freeze)(member, connection, hello)


async def speaks_nonsense(member: Member, connection: Connection, hello: Hello) -> None:
    await connection.expect(HealRequest, timeout_s=5)
    connection.send(RangeRequest("#table", 0, 1, 1))
    await connection.flush(timeout_s=5)


async def has_another_model(member: Member, connection: Connection, hello: Hello) -> None:
    member.engine = engine_of(10)
    await honest(member, connection, hello)


async def stands_elsewhere(member: Member, connection: Connection, hello: Hello) -> None:
    member.core.view = replace(member.core.view, step=8)
    await honest(member, connection, hello)
