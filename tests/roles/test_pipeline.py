"""Steps of a pipeline: the same numbers as one process, the ideal schedule's time, and what ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from p2ptrain.core.errors import ConnectionLost, ProtocolError
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from ring.chain import Payload
from ring.planning.schedule import StageSchedule, plan_extended, plan_gpipe, plan_one_f_one_b
from roles.compute_thread import ComputeFailed, ComputeThread
from roles.strategies.pipeline import StageRunner
from tests.ring.local import RingMember, local_chain
from wire.transport import TcpNetwork

from .arithmetic_part import ArithmeticPart

AT_ONCE_S = 5.0
LAYERS = 6
CUTS = {1: [0, 6], 2: [0, 2, 6], 3: [0, 3, 4, 6], 4: [0, 1, 3, 5, 6]}


class Stage:
    """A part, and what runs its steps."""

    def __init__(self, part: ArithmeticPart, runner: StageRunner) -> None:
        self.part, self.runner = part, runner

    async def run(self, step: int, schedule: StageSchedule, *, patience_s: float) -> None:
        forward = partial(self.part.forward, step)
        await self.runner.run(schedule, forward, self.part.backward, patience_s=patience_s)


@asynccontextmanager
async def runners(members: Sequence[RingMember], engines: Sequence[ArithmeticPart]) -> AsyncIterator[list[Stage]]:
    threads = [ComputeThread() for _ in members]
    try:
        yield [
            Stage(engine, StageRunner(member.chain, thread))
            for member, engine, thread in zip(members, engines, threads, strict=True)
        ]
    finally:
        for thread in threads:
            thread.close()


async def all_run(stages: Sequence[Stage], step: int, schedule: StageSchedule) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for stage in stages:
            group.create_task(stage.run(step, schedule, patience_s=30))


def in_one_process(step: int, micro_batches: int) -> ArithmeticPart:
    """All layers, one micro-batch after the other."""
    whole = ArithmeticPart(0, LAYERS, LAYERS)
    for index in range(micro_batches):
        assert whole.forward(step, index, None) is None
        assert whole.backward(index, None) is None
    return whole


def schedules(stages: int, micro_batches: int) -> list[StageSchedule]:
    far = [0.2 + 0.1 * hop for hop in range(stages - 1)]
    return [
        plan_gpipe(stages, micro_batches),
        plan_one_f_one_b(stages, micro_batches),
        plan_extended(micro_batches, far, 0.12),
    ]


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("network", [MemoryNetwork(), TcpNetwork()], ids=["memory", "tcp"])
async def test_every_schedule_gives_the_numbers_of_one_process(count: int, network: Network) -> None:
    parts = [ArithmeticPart(start, stop, LAYERS) for start, stop in zip(CUTS[count], CUTS[count][1:], strict=False)]
    sizes = {"activation_bytes": parts[0].activation_bytes, "gradient_bytes": parts[0].gradient_bytes}
    async with local_chain(count, network, **sizes) as members, runners(members, parts) as stages:
        for micro_batches in range(1, 17):
            whole = in_one_process(micro_batches, micro_batches)
            for schedule in schedules(count, micro_batches):
                for part in parts:
                    part.gradients[:], part.most_kept = 0, 0
                await all_run(stages, micro_batches, schedule)
                together = np.concatenate([part.gradients for part in parts])
                assert together.tobytes() == whole.gradients.tobytes(), schedule
                assert [parts[-1].losses[index] for index in range(micro_batches)] == list(whole.losses.values())
                assert [part.most_kept for part in parts] == [schedule.count_in_flight(stage) for stage in range(count)]
                assert all(part.kept == 0 for part in parts)
        assert not any(member.chain.broken.done() for member in members)


class Late(ArithmeticPart):
    """Reads what it is given only when all that can arrive meanwhile has arrived."""

    loop: asyncio.AbstractEventLoop

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        self._let_others_come()
        return super().forward(step, index, inputs)

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        self._let_others_come()
        return super().backward(index, gradient)

    def _let_others_come(self) -> None:
        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(turns(), self.loop).result(30)


async def test_what_is_computed_on_is_not_received_into() -> None:
    parts: list[ArithmeticPart] = [ArithmeticPart(0, 2, LAYERS), Late(2, 4, LAYERS), ArithmeticPart(4, 6, LAYERS)]
    Late.loop = asyncio.get_running_loop()
    whole = in_one_process(0, 16)
    async with (
        local_chain(3, MemoryNetwork(), activation_bytes=64, gradient_bytes=64) as members,
        runners(members, parts) as stages,
    ):
        for schedule in schedules(3, 16):
            for part in parts:
                part.gradients[:] = 0
            await all_run(stages, 0, schedule)
            assert np.concatenate([part.gradients for part in parts]).tobytes() == whole.gradients.tobytes()


# ---------------------------------------------------------------------------------------------------------------- time


# ---------------------------------------------------------------------------------------------------------------- ends


class Held(ArithmeticPart):
    """Its backward of micro-batch 0 takes until it is let go."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.begun, self.let_go = threading.Event(), threading.Event()

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        self.begun.set()
        assert self.let_go.wait(30)
        return super().backward(index, gradient)


def thirds(*kinds: Callable[..., ArithmeticPart]) -> list[ArithmeticPart]:
    return [kind(2 * stage, 2 * stage + 2, LAYERS) for stage, kind in enumerate(kinds)]


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_stage_killed_in_mid_step_ends_the_others_at_once_and_is_named(victim: int) -> None:
    """Though one of them computes, and would for long."""
    parts = thirds(ArithmeticPart, ArithmeticPart, Held)
    held = parts[2]
    assert isinstance(held, Held)
    async with (
        local_chain(3, TcpNetwork(), activation_bytes=64, gradient_bytes=64) as members,
        runners(members, parts) as stages,
    ):
        running = [asyncio.create_task(stage.run(0, plan_one_f_one_b(3, 8), patience_s=3600)) for stage in stages]
        assert await asyncio.to_thread(held.begun.wait, 30)
        members[victim].die()
        others = [task for stage, task in enumerate(running) if stage != victim]
        try:
            async with asyncio.timeout(AT_ONCE_S):
                ends = await asyncio.gather(*others, return_exceptions=True)
        finally:
            held.let_go.set()
        name = "abc"[victim]
        assert all(isinstance(end, ConnectionLost) and f" {name}: " in end.message for end in ends), ends
        left = [member for member in members if member.peer_id != name]
        assert [(await member.chain.broken).suspect for member in left] == [name, name]
        await asyncio.gather(running[victim], return_exceptions=True)


class Broken(ArithmeticPart):
    """Its second forward fails."""

    error: BaseException = MemoryError("no room")
    failed = False

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        assert not self.failed
        if index == 1:
            self.failed = True
            raise self.error
        return super().forward(step, index, inputs)

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        if self.failed:
            self.went_on = True
        return super().backward(index, gradient)

    went_on = False


async def test_an_engine_that_fails_ends_the_step_of_all() -> None:
    async with (
        local_chain(3, MemoryNetwork(), activation_bytes=64, gradient_bytes=64) as members,
        runners(members, thirds(ArithmeticPart, Broken, ArithmeticPart)) as stages,
    ):
        running = [stage.run(0, plan_one_f_one_b(3, 4), patience_s=3600) for stage in stages]
        async with asyncio.timeout(AT_ONCE_S):
            ends = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(ends[1], ComputeFailed)
        assert "no room" in ends[1].message
        assert all(isinstance(end, ConnectionLost) and " b: " in end.message for end in (ends[0], ends[2]))


class Picky(Broken):
    error = ProtocolError("these are no activations")


async def test_who_sends_what_cannot_be_read_is_blamed() -> None:
    async with (
        local_chain(3, MemoryNetwork(), activation_bytes=64, gradient_bytes=64) as members,
        runners(members, thirds(ArithmeticPart, Picky, ArithmeticPart)) as stages,
    ):
        running = [stage.run(0, plan_one_f_one_b(3, 4), patience_s=3600) for stage in stages]
        async with asyncio.timeout(AT_ONCE_S):
            ends = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(ends[1], ProtocolError)
        assert ends[1].message == "lost the previous stage a: these are no activations"
        assert members[2].chain.broken.result().suspect == "a"
        assert members[1].chain.broken.result().suspect == "a"


async def test_a_step_that_is_given_up_ends_the_chain() -> None:
    parts = thirds(ArithmeticPart, ArithmeticPart, Held)
    held = parts[2]
    assert isinstance(held, Held)
    async with (
        local_chain(3, MemoryNetwork(), activation_bytes=64, gradient_bytes=64) as members,
        runners(members, parts) as stages,
    ):
        running = [asyncio.create_task(stage.run(0, plan_one_f_one_b(3, 8), patience_s=3600)) for stage in stages]
        assert await asyncio.to_thread(held.begun.wait, 30)
        running[2].cancel()
        try:
            async with asyncio.timeout(AT_ONCE_S):
                ends = await asyncio.gather(*running, return_exceptions=True)
        finally:
            held.let_go.set()
        assert [type(end) for end in ends] == [ConnectionLost, ConnectionLost, asyncio.CancelledError]
        assert "gave up the step" in members[2].chain.broken.result().cause.message
