"""Chains in one process, over memory and over real TCP: payloads, round trips, deaths, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Stalled
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from ring.chain import EXTRA_PATIENCE, Chain, Payload
from ring.links import Topology
from ring.planning.schedule import OperationKind, StageSchedule, plan_extended, plan_gpipe, plan_one_f_one_b
from tests.ring.local import RingMember, listening, local_chain, networks_apart
from tests.wire.doubles import on_virtual_time
from wire.emulate import EmulatedNetwork, LinkPreset

F, B = OperationKind.FORWARD, OperationKind.BACKWARD
AT_ONCE_S = 5.0  # generous for a slow machine, far below every deadline that could otherwise have ended a wait
ACTIVATION_BYTES, GRADIENT_BYTES = 64, 40
SIZES = {"activation_bytes": ACTIVATION_BYTES, "gradient_bytes": GRADIENT_BYTES}


def content(kind: OperationKind, step: int, index: int, stage: int, nbytes: int) -> Payload:
    """What the stage makes: nothing else has these bytes."""
    return np.random.default_rng([kind is F, step, index, stage]).integers(0, 256, nbytes, np.uint8)


async def run_step(chain: Chain, schedule: StageSchedule, step: int = 0, *, patience_s: float = 30.0) -> None:
    """All operations of one stage, without any computing; what comes must be what the neighbour sent."""
    chain.begin(schedule)
    for operation in schedule.list_operations(chain.stage):
        kind, index = operation.kind, operation.index
        sender = chain.stage + (-1 if kind is F else 1)
        payload = await chain.receive(kind, index, patience_s=patience_s)
        if payload is not None:
            assert np.array_equal(payload, content(kind, step, index, sender, payload.size)), f"{operation} is another"
        chain.release(kind, payload)
        if 0 <= 2 * chain.stage - sender < chain.stages:
            nbytes = chain.activation_bytes if kind is F else chain.gradient_bytes
            chain.send(kind, index, content(kind, step, index, chain.stage, nbytes))
    await chain.finish(patience_s=patience_s)


async def everyone(members: list[RingMember], act: Callable[[Chain], Coroutine[Any, Any, Any]]) -> list[Any]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        tasks = [group.create_task(act(member.chain)) for member in members]
    return [task.result() for task in tasks]


# ------------------------------------------------------------------------------------------------------------ payloads


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_every_payload_arrives_where_it_belongs_step_after_step(count: int, network: Network) -> None:
    schedules = [
        plan_gpipe(count, 7),
        plan_one_f_one_b(count, 5),
        plan_extended(9, [0.3] * (count - 1), 0.1),
        plan_one_f_one_b(count, 1),
    ]
    async with local_chain(count, network, **SIZES) as members:

        async def act(chain: Chain) -> None:
            for step, schedule in enumerate(schedules):
                await run_step(chain, schedule, step)

        await everyone(members, act)
        assert [member.chain.stage for member in members] == list(range(count))
        assert not any(member.chain.broken.done() for member in members)
        assert [member.chain.round_trip_s > 0 for member in members] == [True] * (count - 1) + [False]


async def test_no_more_buffers_are_held_than_the_schedule_says() -> None:
    """A stage that takes nothing: the sender's payloads wait on its own side."""
    async with local_chain(2, MemoryNetwork(), **SIZES) as members:
        first, last = (member.chain for member in members)
        schedule = plan_gpipe(2, 16)
        first.begin(schedule)
        last.begin(schedule)
        for index in range(16):
            first.send(F, index, content(F, 0, index, 0, ACTIVATION_BYTES))
        held = [await last.receive(F, index, patience_s=30) for index in range(schedule.count_receive_buffers(0))]
        finishing = asyncio.create_task(first.finish(patience_s=30))
        with pytest.raises(DeadlineExceeded, match="this stage waited for activations of micro-batch 3"):
            await last.receive(F, schedule.count_receive_buffers(0), patience_s=0.2)
        assert (
            len({payload.ctypes.data for payload in held if payload is not None})
            == schedule.count_receive_buffers(0)
            == 3
        )
        with pytest.raises(ConnectionLost):
            await finishing


async def test_sent_memory_is_borrowed_until_the_step_is_finished() -> None:
    async with local_chain(2, MemoryNetwork(), **SIZES) as members:
        first, last = (member.chain for member in members)
        bulk = last.links.neighbours[0].bulks[0]
        bulk._transport.pause_reading()
        schedule = plan_gpipe(2, 2)
        first.begin(schedule)
        last.begin(schedule)
        sent = [np.full(ACTIVATION_BYTES, index + 1, np.uint8) for index in range(2)]
        for index, payload in enumerate(sent):
            first.send(F, index, payload)
        finishing = asyncio.create_task(first.finish(patience_s=30))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not finishing.done(), "the memory is still in use"
        bulk._transport.resume_reading()
        async with asyncio.timeout(AT_ONCE_S):
            await finishing
        for payload in sent:
            payload[:] = 99
        for index in range(2):
            assert (await last.receive(F, index, patience_s=30) == index + 1).all()


# --------------------------------------------------------------------------------------------------------- round trips


@on_virtual_time
async def test_round_trips_are_those_of_the_links() -> None:
    one_way_ms = [10.0, 100.0, 0.0, 40.0]
    async with local_chain(5, networks_apart([ms / 1e3 for ms in one_way_ms]), hosts=True, **SIZES) as members:
        round_trips_s = [member.chain.round_trip_s for member in members]
        assert round_trips_s == pytest.approx([*(2 * ms / 1e3 for ms in one_way_ms), 0.0])


async def test_stages_that_expect_other_sizes_are_told(network: Network) -> None:
    async with listening("ab", network) as (members, view):
        forming = [
            member.form_chain(view, activation_bytes=nbytes, gradient_bytes=8)
            for member, nbytes in zip(members, (64, 65), strict=True)
        ]
        async with asyncio.timeout(AT_ONCE_S):
            ends = await asyncio.gather(*forming, return_exceptions=True)
        assert any(isinstance(end, ProtocolError) and "65 were planned" in end.message for end in ends), ends


# ------------------------------------------------------------------------------------------------------------- meeting


async def test_a_ring_and_a_chain_of_the_same_members_in_the_same_view(network: Network) -> None:
    """The stages in another order than the ranks; whoever comes early is held by both names."""
    async with listening("abc", network) as (members, view):
        for rank, member in enumerate(members):
            member.inbound.announced(view, Topology.RING, view.left_of(rank).peer_id)
        stages = replace(view, members=(view.members[2], *view.members[:2]))
        early = [asyncio.create_task(member.form_chain(stages, **SIZES)) for member in members[:2]]
        early += [asyncio.create_task(member.form(view)) for member in members[:2]]  # type: ignore[arg-type]
        for _ in range(50):
            await asyncio.sleep(0)
        async with asyncio.timeout(AT_ONCE_S):
            await asyncio.gather(members[2].form(view), members[2].form_chain(stages, **SIZES), *early)
            await asyncio.gather(*(member.session.barrier() for member in members))
        assert [member.chain.stage for member in members] == [1, 2, 0]
        await everyone(members, lambda chain: run_step(chain, plan_one_f_one_b(3, 4)))
        members[0].chain.close("a new schedule")
        async with asyncio.timeout(AT_ONCE_S):
            assert (await members[1].chain.broken).suspect == "a"
            await asyncio.gather(*(member.session.barrier() for member in members))


@on_virtual_time
async def test_a_stage_that_does_not_come_is_named() -> None:
    async with listening("abc", MemoryNetwork()) as (members, view):
        forming = [member.form_chain(view, **SIZES) for member in members if member.peer_id != "b"]
        ends = await asyncio.gather(*forming, return_exceptions=True)
        assert all(isinstance(end, DeadlineExceeded) for end in ends)
        assert (
            ends[0].message
            == "lost the next stage b: nothing came for 11 s while this stage waited for the answer to its ping"
        )
        assert "the previous stage b has not connected" in ends[1].message


# -------------------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize(("count", "victim"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 1), (4, 3)])
async def test_a_death_in_a_step_ends_every_stage_at_once_and_names_it(
    count: int, victim: int, network: Network
) -> None:
    async with local_chain(count, network, **SIZES) as members:
        others = [member for stage, member in enumerate(members) if stage != victim]
        tasks = [
            asyncio.create_task(run_step(member.chain, plan_one_f_one_b(count, 8), patience_s=3600))
            for member in others
        ]
        for _ in range(20):
            await asyncio.sleep(0)  # let them begin; without the victim none of them comes to an end
        members[victim].die()
        async with asyncio.timeout(AT_ONCE_S):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            causes = [await member.chain.broken for member in others]
        assert all(isinstance(end, ConnectionLost) for end in ends), ends
        name = members[victim].peer_id
        assert {cause.suspect for cause in causes} == {name}
        assert all(f" {name}: " in cause.cause.message for cause in causes), causes
        with pytest.raises(ConnectionLost, match=f" {name}: "):
            others[0].chain.begin(plan_gpipe(count, 1))


@on_virtual_time
async def test_of_several_that_wait_who_stands_beside_the_stuck_one_gives_up_first() -> None:
    """c beats and reads, and computes nothing: a, b and d all wait, and the first word is of c."""
    async with local_chain(4, MemoryNetwork(), **SIZES) as members:
        running = [member for member in members if member.peer_id != "c"]
        members[2].chain.begin(plan_one_f_one_b(4, 4))
        began = asyncio.get_running_loop().time()
        steps = [run_step(member.chain, plan_one_f_one_b(4, 4), patience_s=20) for member in running]
        ends = await asyncio.gather(*steps, return_exceptions=True)
        took_s = asyncio.get_running_loop().time() - began
        assert 20 * (1 + EXTRA_PATIENCE) <= took_s < 20 * (1 + 2 * EXTRA_PATIENCE)
        suspects = [(await member.chain.broken).suspect for member in running]
        assert suspects == ["c", "c", "b"], "behind c it is heard from c itself that b is gone"
        assert [type(end) for end in ends].count(Stalled) == 1


@on_virtual_time
async def test_a_payload_that_dribbles_in_is_no_silence() -> None:
    preset = LinkPreset("slow", 1e-3, rate_bps=8 * 128 << 10)
    network = EmulatedNetwork(MemoryNetwork(), preset, seed=0)
    async with local_chain(2, network, activation_bytes=256 << 10, gradient_bytes=8) as members:
        began = asyncio.get_running_loop().time()
        await everyone(members, lambda chain: run_step(chain, plan_gpipe(2, 2), patience_s=1.5))
        assert asyncio.get_running_loop().time() - began > 3.5, "each takes longer than the patience"


# ------------------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_who_leaves_after_its_step_does_not_spoil_it_for_the_others(count: int, network: Network) -> None:
    for _ in range(5):
        async with local_chain(count, network, **SIZES) as members:

            async def act(chain: Chain) -> None:
                await run_step(chain, plan_one_f_one_b(chain.stages, 3))
                chain.close("done")

            await everyone(members, act)
