"""A worker beside the ring: it fetches a snapshot, replays the log, follows; and whatever happens to ring or
sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from ring import member_events as ev
from ring.job_member import MemberPhase
from ring.transaction import Transaction
from roles.worker.heal import FetchResult, Follower, Healer
from roles.worker.heal_source import MAX_FOLLOWERS, Recipient, log_limit_bytes
from tests.invariants import check_invariants
from tests.roles.heal_doubles import (
    JOB,
    Ring,
    around_of,
    changes,
    dies_after,
    engine_of,
    goes_silent,
    ring_of,
    set_view,
)
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.job_messages import CatchUp, HealOffer, HealRequest, Report, SettingChange

pytestmark = pytest.mark.virtual_time

NUMEL = 400_001


@dataclass
class Newcomer:
    """A worker that stands ready beside the ring."""

    core: Transaction
    engine: StandInEngine
    follower: Follower
    said: list[Report] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    told: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self.told]


async def no_change() -> None:
    """The settings of the job are as at its beginning."""


@asynccontextmanager
async def newcomer_to(ring: Ring, *, at: int = 0, numel: int = NUMEL) -> AsyncIterator[Newcomer]:
    """One that holds another state of step ``at`` than the ring."""
    core = Transaction(job=JOB, peer_id="me", steps_total=10_000)
    core.handle(ev.StateLoaded(at, "cd" * 16))
    engine = engine_of(numel)
    engine.state.blobs()[0].view[3] ^= 1
    told: list[tuple[str, str, str]] = []
    context: Any = around_of(ring.world, told)
    made: Newcomer

    def handle(event: object) -> None:
        made.events.append(event)
        core.handle(event)
        check_invariants(core)

    async with asyncio.TaskGroup() as tasks:
        healer = Healer(context, core, progress=lambda: None)
        said: list[Report] = []
        follower = Follower(
            context, core, healer, report=said.append, handle=handle, use_settings=no_change, tasks=tasks
        )
        made = Newcomer(core, engine, follower, said, told=told)
        yield made
        follower.end()


def begin(newcomer: Newcomer, ring: Ring) -> None:
    newcomer.follower.begin(CatchUp(JOB, ring.view.generation, ring.records), newcomer.engine)


def is_level(newcomer: Newcomer, ring: Ring) -> Callable[[], bool]:
    return lambda: newcomer.follower.is_level


async def heal(ring: Ring, newcomer: Newcomer, have: tuple[int, str] | None = None) -> FetchResult:
    """As the member of the ring's view that it has become."""
    core: Any = SimpleNamespace(job=JOB, applied=have[0] if have else 0, lineage=have[1] if have else "")
    healer = Healer(around_of(ring.world, ring.told), core, progress=lambda: None)
    return await healer.within(ev.Heal(1, ring.view, torn=have is None), newcomer.engine)


async def quiet_until(satisfied: Callable[[], bool]) -> None:
    """The ring commits nothing meanwhile."""
    async with asyncio.timeout(60):
        while not satisfied():  # noqa: ASYNC110 - on virtual time, that passes
            await asyncio.sleep(0.001)


async def test_a_newcomer_follows_the_ring_and_holds_its_bits_at_every_step() -> None:
    async with ring_of(MemoryNetwork(), 3, numel=NUMEL) as ring, newcomer_to(ring) as newcomer:
        for _ in range(3):
            await ring.step()
        begin(newcomer, ring)
        await ring.steps_until(is_level(newcomer, ring))
        assert [report.status for report in newcomer.said] == ["following"]
        report, core = newcomer.said[0], ring.members[0].core
        assert core.applied - report.applied <= 1
        assert report.generation == 0
        assert report.sources > 1
        for _ in range(5):
            await ring.step()
            await quiet_until(lambda: newcomer.core.applied == core.applied)
            assert newcomer.core.lineage == core.lineage
            assert {newcomer.engine.state.digest()} == ring.digests()
        assert "following" in newcomer.kinds
        newcomer.follower.end()
        await quiet_until(lambda: not newcomer.follower.active)
    assert all(member.heal_source.followers == 0 for member in ring.members)


async def test_newcomer_stops_following_at_a_change_of_settings_that_it_does_not_know() -> None:
    async with ring_of(MemoryNetwork(), 2, numel=NUMEL) as ring, newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await ring.steps_until(is_level(newcomer, ring))
        for member in ring.members:
            changes = (SettingChange(member.core.applied, "optimizer.lr", "0.1", "0.2"),)
            member.core.view = replace(member.core.view, changes=changes)
        await ring.steps_until(lambda: not newcomer.follower.active)
        assert newcomer.core.applied < ring.members[0].core.applied
        assert newcomer.said[-1].status == "following"


async def test_sources_are_killed_one_after_the_other_while_it_follows() -> None:
    async with ring_of(MemoryNetwork(), 3, numel=NUMEL) as ring, newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await ring.steps_until(is_level(newcomer, ring))
        core = ring.members[2].core
        for victim in ring.members[:2]:
            victim.die()
            await ring.step()
            await quiet_until(lambda: newcomer.core.applied == core.applied)
            assert {newcomer.engine.state.digest()} == ring.digests()


async def test_a_ring_that_dies_leaves_the_follower_with_what_it_came_to() -> None:
    async with ring_of(MemoryNetwork(), 2, numel=NUMEL) as ring, newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await ring.steps_until(is_level(newcomer, ring))
        core = ring.members[0].core
        await quiet_until(lambda: newcomer.core.applied == core.applied)
        for member in ring.members:
            member.die()
        await quiet_until(lambda: not newcomer.follower.active)
        assert not newcomer.core.torn
        assert [report.status for report in newcomer.said] == ["following", "following"]
        assert (newcomer.said[-1].applied, newcomer.said[-1].lineage) == (core.applied, core.lineage)
        assert {newcomer.engine.state.digest()} == ring.digests()


async def test_a_fetch_that_fails_in_the_middle_gives_up_a_torn_state() -> None:
    bad = {0: dies_after(0), 1: dies_after(0)}
    async with ring_of(MemoryNetwork(), 2, numel=NUMEL, behaviour=bad) as ring, newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await ring.steps_until(lambda: not newcomer.follower.active)
        assert isinstance(newcomer.events[-1], ev.StateDiscarded)
        assert newcomer.core.phase is MemberPhase.EMPTY
        assert newcomer.said == []


async def test_a_view_that_comes_while_it_fetches_is_entered_at_once_and_healed_within() -> None:
    frozen = {0: goes_silent, 1: goes_silent}
    async with ring_of(MemoryNetwork(), 3, numel=NUMEL, behaviour=frozen) as ring, newcomer_to(ring) as newcomer:
        newcomer.follower.begin(CatchUp(JOB, 3, ring.records[:2]), newcomer.engine)
        await ring.steps_until(lambda: newcomer.core.torn)
        set_view(ring, 4)
        newcomer.follower.end(partial(newcomer.core.handle, ev.ViewArrived(ring.view)))
        await quiet_until(lambda: not newcomer.follower.active)
        assert newcomer.core.phase is MemberPhase.FORMING
        assert newcomer.core.torn
        await heal(ring, newcomer)
        assert {newcomer.engine.state.digest()} == ring.digests()


@pytest.mark.parametrize("lost_steps", [False, True])
async def test_a_member_that_lacks_a_step_is_given_it_alone_or_the_whole_state(lost_steps: bool) -> None:
    loses_steps = False

    def lose(connection: Connection, payload: memoryview, number: int) -> memoryview | None:
        if loses_steps and payload.nbytes == newcomer.engine.reduce_buffer.nbytes:
            connection.abort()
            return None
        return payload

    behaviour = dict.fromkeys(range(3), changes(lose))
    async with ring_of(MemoryNetwork(), 3, numel=NUMEL, behaviour=behaviour) as ring, newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await ring.steps_until(is_level(newcomer, ring))
        core = ring.members[0].core
        await quiet_until(lambda: newcomer.core.applied == core.applied)
        newcomer.follower.end()
        await quiet_until(lambda: not newcomer.follower.active)
        have = (newcomer.core.applied, newcomer.core.lineage)
        another = _nobody()
        for member in ring.members:
            member.heal_source._recipients.append(another)  # it follows, too
        await ring.step()
        set_view(ring, 4)
        loses_steps = lost_steps
        done = await heal(ring, newcomer, have)
        assert done.steps == (0 if lost_steps else 1)
        if not lost_steps:
            assert done.size_bytes == newcomer.engine.reduce_buffer.nbytes
        assert {newcomer.engine.state.digest()} == ring.digests()
        for member in ring.members:
            member.heal_source._recipients.remove(another)


def _nobody() -> Any:
    connection = SimpleNamespace(send=lambda *args, **more: None, abort=lambda *args: None)
    return Recipient(SimpleNamespace(connection=connection), "nobody", inside=False)  # type: ignore[arg-type]


async def test_who_is_too_slow_is_told_so_and_the_log_stays_bounded() -> None:
    async with ring_of(MemoryNetwork(), 2, numel=NUMEL) as ring, newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await ring.steps_until(is_level(newcomer, ring))
        gate = asyncio.Event()
        run = newcomer.follower._context.compute.run

        async def held(*args: Any, **kwargs: Any) -> Any:
            await gate.wait()
            return await run(*args, **kwargs)

        newcomer.follower._context.compute.run = held  # type: ignore[method-assign]
        heal_source = ring.members[0].heal_source
        limit = log_limit_bytes(heal_source.state_bytes, newcomer.engine.reduce_buffer.nbytes)
        for _ in range(24):
            await ring.step()
            await asyncio.sleep(0.001)
            assert heal_source._log.held_bytes <= limit
        gate.set()
        await quiet_until(lambda: not newcomer.follower.active)
        assert "not-following" in newcomer.kinds
        assert not newcomer.core.torn
        assert newcomer.said[-1].status == "following"
        assert newcomer.said[-1].applied < ring.members[0].core.applied


async def test_a_source_serves_only_so_many_and_gives_back_what_it_copied() -> None:
    async with ring_of(MemoryNetwork(), 1, numel=NUMEL) as ring:
        member = ring.members[0]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_FOLLOWERS + 1):
                tasks.create_task(_follow_for_a_while(ring))
            await quiet_until(lambda: member.heal_source.followers == MAX_FOLLOWERS)
            await ring.steps_until(lambda: not member.heal_source.followers)
        await ring.step()
        assert member.heal_source._log.held_bytes == 0
        assert all(not each.holders for each in member.snapshots._made)


async def _follow_for_a_while(ring: Ring) -> None:
    async with newcomer_to(ring) as newcomer:
        begin(newcomer, ring)
        await quiet_until(lambda: bool(newcomer.said) or not newcomer.follower.active)


async def test_a_copy_that_nobody_holds_any_more_is_not_offered_again() -> None:
    async with ring_of(MemoryNetwork(), 1, numel=NUMEL) as ring:
        (member,) = ring.members

        async def asked() -> Connection:
            hello = local_hello(peer_id="me", name="me", roles=["worker"], purpose="heal", job=JOB, generation=3)
            connection, _ = await dial(ring.world.network, "d", ring.records[0].port, hello, timeout_s=5)
            connection.send(HealRequest(JOB, -1, "", 2.0))
            await quiet_until(lambda: member.heal_source.followers == 1)
            return connection

        first = await asked()
        await quiet_until(lambda: bool(member.wanted))
        await ring.step()
        await first.expect(HealOffer, timeout_s=5)
        first.abort()
        await quiet_until(lambda: not member.heal_source.followers)
        second = await asked()  # its memory may be another state's by now
        await quiet_until(lambda: bool(member.wanted))
        await ring.step()
        assert (await second.expect(HealOffer, timeout_s=5)).step == 2
