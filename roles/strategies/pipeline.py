"""A model in stages: activations and their gradients travel along the replica's chain; gradients are summed per stage.

Each view has the ring of all members, the ring of this stage (``roles.strategies.parts``), and the replica's *chain*.

Schedule. Each step has its own. It is the same on all stages of a replica, because all derive it from the same figures:
the chain's round trips, how many micro-batches each stage has memory for, and how long the slowest stage takes for a
micro-batch, which travels with the digests. In every schedule backward passes run in the order of the micro-batches, so
the schedule changes no bit of a step's result.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError
from p2ptrain.core.training import OnFinal
from p2ptrain.core.world import LoopClock
from ring.chain import Chain, Payload
from ring.planning.schedule import (
    MAX_MICRO_BATCHES,
    OperationKind,
    StageOperation,
    StageSchedule,
    plan_extended,
    plan_forwards,
)
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import PipelineEngine
from roles.strategies.interface import ConnectPeers, Progress, StageLoad, Work

Pass = Callable[[int, Payload | None], Payload | None]
"""Takes the number of a micro-batch in the step, from 0, and a neighbour's payload. Returns that for the other one."""
QUEUED = 2  # operations on the compute thread: the running one and the next
_FIGURES = struct.Struct("!dI")


class StageRunner:
    """Runs the steps of one stage: operations on the compute thread, payloads on the event loop.

    While the thread runs one operation, the next one is queued, its payload arrives, and the last result leaves. A step
    that does not finish ends the chain, because receives and sends still use the step's memory. ``on_work`` is called
    after every operation.

    Attributes:
        step_s: of the newest step, from the first operation's turn to the last payload's departure.
        computed_s: its total on the compute thread, as the event loop sees it.
    """

    step_s = computed_s = 0.0

    def __init__(self, chain: Chain, compute: ComputeThread, *, on_work: Callable[[], None] = lambda: None) -> None:
        self._chain, self._compute = chain, compute
        self._on_work, self._clock = on_work, LoopClock().now
        self._problem: BaseException | None = None  # the first error, which ended the step and the chain
        self._failed = False  # on the compute thread: its queued calls are skipped
        self._ended_at = 0.0  # when the last call on the thread ended

    async def run(self, schedule: StageSchedule, forward: Pass, backward: Pass, *, patience_s: float) -> None:
        """Run forward and backward passes of all micro-batches of one step.

        Args:
            schedule: the same on all stages.
            forward, backward: called on the compute thread.
            patience_s: see ``Chain.receive``.

        Raises:
            ConnectionLost, DeadlineExceeded, ProtocolError: a neighbour is lost; ``Chain.broken`` names it.
            P2PTrainError: the engine's own. After any error the chain has ended.
        """
        chain = self._chain
        chain.begin(schedule)
        self._passes = {OperationKind.FORWARD: forward, OperationKind.BACKWARD: backward}
        began, self.computed_s = self._clock(), 0.0
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for operation in schedule.list_operations(chain.stage):
                payload = await chain.receive(operation.kind, operation.index, patience_s=patience_s)
                while len(under_way) >= QUEUED:
                    await under_way.popleft()
                under_way.append(asyncio.ensure_future(self._operate(operation, payload)))
            while under_way:
                await under_way.popleft()
            await chain.finish(patience_s=patience_s)
        except BaseException as error:
            self._give_up(error)
            assert self._problem is not None
            if isinstance(error, P2PTrainError) and self._problem is not error:
                raise self._problem from error  # an operation failed first and caused this error
            raise
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        self.step_s = self._clock() - began

    def _give_up(self, error: BaseException) -> None:
        self._failed = True
        if self._problem is None:
            self._problem = error
        what = error.message if isinstance(error, P2PTrainError) else "it was interrupted"
        self._chain.abandon(f"this stage gave up the step: {what}")  # has no effect on a broken chain

    async def _operate(self, operation: StageOperation, payload: Payload | None) -> None:
        """Run one operation when the thread is free, and send its result."""
        kind, index = operation.kind, operation.index
        try:
            result = await self._on_thread(self._passes[kind], index, payload)
            self._chain.release(kind, payload)
            if result is not None:
                self._chain.send(kind, index, result)
        except ProtocolError as error:
            if payload is None or self._chain.broken.done():
                self._give_up(error)
                raise
            self._chain.blame(kind, error)
            self._give_up(failure := self._chain.links.failure())
            raise failure from error
        except BaseException as error:
            self._give_up(error)  # at once: the step may wait for a payload that never comes
            raise
        self._chain.progress += 1
        self._on_work()

    async def _on_thread(self, run: Pass, index: int, payload: Payload | None) -> Payload | None:
        call = asyncio.ensure_future(self._compute.run(self._unless_failed, run, index, payload))
        queued_at = self._clock()
        try:
            ends: set[asyncio.Future[Any]] = {call, self._chain.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._chain.links.failure()
            now = self._clock()
            self.computed_s += now - max(queued_at, self._ended_at)
            self._ended_at = now
            return call.result()
        finally:
            call.cancel()

    def _unless_failed(self, run: Pass, index: int, payload: Payload | None) -> Payload | None:
        if self._failed:
            raise ConnectionLost("the step was given up")
        try:
            return run(index, payload)
        except BaseException:
            self._failed = True
            raise


def figures_untrusted(figures: bytes) -> tuple[float, int]:
    """Decode a stage's figures: seconds of the round trip to the next stage, and micro-batches that it has memory for;
    0: any number. Raises ``ProtocolError``."""
    round_trip_s, in_flight = _FIGURES.unpack(figures)
    if not (0 <= round_trip_s <= 3600 and in_flight <= MAX_MICRO_BATCHES):
        raise ProtocolError(f"a stage with a round trip of {round_trip_s:g} s and room for {in_flight} micro-batches")
    return round_trip_s, in_flight


class PipelinePasses(Work):
    """The passes of one stage. ``ahead``: micro-batches of one validation run along the chain, as many as in a step."""

    def __init__(
        self,
        engine: PipelineEngine,
        compute: ComputeThread,
        progress: Progress,
        *,
        ahead: int,
        tokens_per_micro_batch: int,
    ) -> None:
        self._engine, self._compute, self._progress = engine, compute, progress
        self._ahead, self._tokens = ahead, tokens_per_micro_batch
        self._chain: Chain | None = None
        self._figures: list[tuple[float, int]] = []  # of all stages of the replica
        self._period_s = math.inf  # time for a micro-batch at the slowest stage, in this view
        self._next = ""  # peer id of the next stage

    async def begin_view(self, session: RingSession, connect: ConnectPeers) -> None:
        self._chain, self._period_s, self.load = None, math.inf, None
        view, engine = session.view, self._engine
        stage = view.stage_of(session.rank)
        self._next = view.members[session.rank + 1].peer_id if stage + 1 < view.stages else ""
        self._chain = await connect.chain(
            view, activation_bytes=engine.activation_bytes, gradient_bytes=engine.gradient_bytes
        )
        own = _FIGURES.pack(self._chain.round_trip_s, min(engine.in_flight, MAX_MICRO_BATCHES))
        gathered = await session.all_gather(own, patience_s=session.patience_s, check=figures_untrusted)
        first = session.rank - stage
        self._figures = [figures_untrusted(figures) for figures in gathered[first : first + view.stages]]

    async def compute(self, step: int, first: int, count: int, on_final: OnFinal | None, *, patience_s: float) -> None:
        self.unit_s = 0.0
        if not count or on_final is None:
            return
        engine, last = self._engine, first + count - 1

        def forward(index: int, inputs: Payload | None) -> Payload | None:
            return engine.forward(step, first + index, inputs)

        def backward(index: int, gradient: Payload | None) -> Payload | None:
            return engine.backward(first + index, gradient, on_final if first + index == last else None)

        spent = await self._run(self._schedule(count), forward, backward, patience_s)
        self.unit_s = spent.computed_s / count
        both_ways_bytes = engine.activation_bytes + engine.gradient_bytes if self._next else 0
        self.load = StageLoad(
            *engine.layers,
            micro_batch_s=self.unit_s,
            busy=min(1.0, spent.computed_s / spent.step_s) if spent.step_s > 0 else 0.0,
            token_bytes=both_ways_bytes / self._tokens,
            next=self._next,
        )

    def on_replica_timed(self, units_s: Sequence[float]) -> None:
        slowest_s = max(units_s)
        if math.isfinite(slowest_s) and slowest_s > 0:
            self._period_s = min(self._period_s, slowest_s)  # longer times have other causes

    async def validate(self, first: int, count: int, *, patience_s: float) -> tuple[float, int]:
        total, targets = 0.0, 0  # those of the last stage

        def forward(start: int, index: int, inputs: Payload | None) -> Payload | None:
            nonlocal total, targets
            payload, loss, number = self._engine.validation_forward(start + index, inputs)
            total, targets = total + loss, targets + number
            return payload

        def backward(index: int, gradient: Payload | None) -> Payload | None:
            raise NotImplementedError("validation has no backward passes")

        for start in range(first, first + count, self._ahead):
            schedule = plan_forwards(self._replica_chain.stages, min(self._ahead, first + count - start))
            await self._run(schedule, partial(forward, start), backward, patience_s)
        return total, targets

    async def _run(self, schedule: StageSchedule, forward: Pass, backward: Pass, patience_s: float) -> StageRunner:
        runner = StageRunner(self._replica_chain, self._compute, on_work=self._progress)
        await runner.run(schedule, forward, backward, patience_s=patience_s)
        return runner

    def _schedule(self, count: int) -> StageSchedule:
        round_trips_s, in_flight = zip(*self._figures, strict=True)
        return plan_extended(count, round_trips_s[:-1], self._period_s, max_in_flight=in_flight)

    @property
    def _replica_chain(self) -> Chain:
        assert self._chain is not None, "no view has begun"
        return self._chain
