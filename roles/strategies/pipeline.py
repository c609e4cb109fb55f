"""One step of one stage of a pipeline: the schedule's operations on the compute thread, payloads on the event loop.

While the thread works on one micro-batch, others arrive and leave: the chain posts buffers ahead and sends from its own
queue, so between two operations lies one turn of the loop. What a stage waits for is told apart from what it computes.

A step that does not come to its end ends the chain: its memory is posted and borrowed. A call that is on the compute
thread by then runs to its end there, and whatever is asked of that thread next comes after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.core.errors import P2PTrainError, ProtocolError
from ring.chain import Chain
from ring.schedule import Kind, Operation, Schedule
from roles.compute_thread import ComputeThread
from roles.part_engine import PartEngine

T = TypeVar("T")


@dataclass(slots=True)
class StageStep:
    """Where the time of one step of one stage went, in seconds.

    Attributes:
        step_s: from its first operation's turn to the last payload's departure.
        forward_s, backward_s: on the compute thread, in all.
        waited_s: for neighbours.
    """

    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    waited_s: float = 0.0


class StageRunner:
    """Runs the steps of one stage.

    Args:
        on_work: called after every operation: the heartbeat tells a slow peer from a stuck one by it.
        clock: seconds; another one where time is virtual.
    """

    def __init__(
        self,
        engine: PartEngine,
        chain: Chain,
        compute: ComputeThread,
        *,
        on_work: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        sizes = (engine.activation_bytes, engine.gradient_bytes)
        if sizes != (chain.activation_bytes, chain.gradient_bytes):
            raise ValueError(f"an engine whose payloads have {sizes} bytes in a chain of others")
        self._engine, self._chain, self._compute = engine, chain, compute
        self._on_work = on_work
        self._clock = clock

    async def run(self, step: int, schedule: Schedule, *, patience_s: float) -> StageStep:
        """All micro-batches of step ``step``, forward and backward.

        Args:
            schedule: the same on all stages.
            patience_s: see ``Chain.receive``.

        Raises:
            ConnectionLost, DeadlineExceeded, ProtocolError: a neighbour is lost; ``Chain.broken`` says who.
            P2PTrainError: the engine's own. In every case the chain has ended.
        """
        chain, spent = self._chain, StageStep()
        began, waited_s = self._clock(), chain.waited_s
        chain.begin(schedule)
        try:
            for operation in schedule.order(chain.stage):
                await self._operate(step, operation, spent, patience_s)
            await chain.finish(patience_s=patience_s)
        except BaseException as error:
            what = error.message if isinstance(error, P2PTrainError) else "it was interrupted"
            chain.abandon(f"this stage gave up step {step + 1}: {what}")  # no more than a word where it is broken
            raise
        spent.step_s, spent.waited_s = self._clock() - began, chain.waited_s - waited_s
        return spent

    async def _operate(self, step: int, operation: Operation, spent: StageStep, patience_s: float) -> None:
        chain, kind, index = self._chain, operation.kind, operation.index
        payload = await chain.receive(kind, index, patience_s=patience_s)
        try:
            if kind is Kind.FORWARD:
                made, took_s = await self._on_thread(self._engine.forward, step, index, payload)
                spent.forward_s += took_s
            else:
                made, took_s = await self._on_thread(self._engine.backward, index, payload)
                spent.backward_s += took_s
        except ProtocolError as error:
            if payload is None:
                raise
            chain.blame(kind, error)
            raise chain.failure() from error
        chain.release(kind, payload)
        if made is not None:
            chain.send(kind, index, made)
        chain.progress += 1
        self._on_work()

    async def _on_thread(self, function: Callable[..., T], *args: Any) -> tuple[T, float]:
        """What the call gives, and how long it took; given up at once where the chain breaks meanwhile."""

        def timed() -> tuple[T, float]:
            began = self._clock()
            result = function(*args)
            return result, self._clock() - began

        call = asyncio.ensure_future(self._compute.run(timed))
        try:
            ends: set[asyncio.Future[Any]] = {call, self._chain.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise self._chain.failure()
        finally:
            call.cancel()
