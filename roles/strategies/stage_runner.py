"""One step of one stage of a pipeline: the schedule's operations on the compute thread, payloads on the event loop.

While the thread works on one operation, what the next one works on arrives, what the last one made leaves, and the next
one is queued behind it as soon as it can run: between two operations the thread waits for nobody, nor for the loop.

A step that does not come to its end ends the chain: its memory is posted and borrowed. A call that is on the compute
thread by then runs to its end there, one that is queued is skipped, and whatever is asked of that thread next comes
after them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError
from p2ptrain.core.world import LoopClock
from ring.chain import Chain
from ring.schedule import Kind, Operation, Schedule
from roles.compute_thread import ComputeThread
from roles.engine import PartEngine, Payload

T = TypeVar("T")


QUEUED = 2  # on the compute thread: one that it works on, and the next


@dataclass(slots=True)
class StageStep:
    """Where the time of one step of one stage went, in seconds.

    Attributes:
        step_s: from its first operation's turn to the last payload's departure.
        forward_s, backward_s: on the compute thread, in all, as the event loop saw it.
        waited_s: nothing could be computed: what was next had not come.
    """

    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    waited_s: float = 0.0


class StageRunner:
    """Runs the steps of one stage.

    Args:
        on_work: called after every operation.
    """

    def __init__(
        self,
        engine: PartEngine,
        chain: Chain,
        compute: ComputeThread,
        *,
        on_work: Callable[[], None] = lambda: None,
    ) -> None:
        sizes = (engine.activation_bytes, engine.gradient_bytes)
        if sizes != (chain.activation_bytes, chain.gradient_bytes):
            raise ValueError(f"an engine whose payloads have {sizes} bytes in a chain of others")
        self._engine, self._chain, self._compute = engine, chain, compute
        self._on_work = on_work

    async def run(self, step: int, schedule: Schedule, *, patience_s: float) -> StageStep:
        """All micro-batches of step ``step``, forward and backward.

        Args:
            schedule: the same on all stages.
            patience_s: see ``Chain.receive``.

        Raises:
            ConnectionLost, DeadlineExceeded, ProtocolError: a neighbour is lost; ``Chain.broken`` says who.
            P2PTrainError: the engine's own. In every case the chain has ended.
        """
        chain = self._chain
        chain.begin(schedule)
        running = _Running(self._engine, chain, self._compute, self._on_work, step)
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for operation in schedule.order(chain.stage):
                payload = await chain.receive(operation.kind, operation.index, patience_s=patience_s)
                while len(under_way) >= QUEUED:
                    await under_way.popleft()
                under_way.append(asyncio.ensure_future(running.operate(operation, payload)))
            while under_way:
                await under_way.popleft()
            await chain.finish(patience_s=patience_s)
        except BaseException as error:
            running.give_up(error)
            assert running.problem is not None
            if isinstance(error, P2PTrainError) and running.problem is not error:
                raise running.problem from error  # an operation failed first, and this is what came of it
            raise
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        return running.ended()


class _Running:
    """One step under way.

    Attributes:
        problem: what ended it before its time: the first one.
    """

    def __init__(
        self,
        engine: PartEngine,
        chain: Chain,
        compute: ComputeThread,
        on_work: Callable[[], None],
        step: int,
    ) -> None:
        self.problem: BaseException | None = None
        self._engine, self._chain, self._compute = engine, chain, compute
        self._on_work, self._clock = on_work, LoopClock().now
        self._step = step
        self._spent = StageStep()
        self._began = self._idle_since = self._clock()
        self._ended_at = 0.0  # the last call on the thread
        self._queued = 0
        self._failed = False  # on the compute thread: what is queued there is skipped

    def ended(self) -> StageStep:
        """Where the time went."""
        now = self._clock()
        self._spent.waited_s += now - self._idle_since
        self._spent.step_s = now - self._began
        return self._spent

    def give_up(self, error: BaseException) -> None:
        """The step cannot end well any more."""
        self._failed = True
        if self.problem is None:
            self.problem = error
        what = error.message if isinstance(error, P2PTrainError) else "it was interrupted"
        self._chain.abandon(f"this stage gave up step {self._step + 1}: {what}")  # where it is not broken already

    async def operate(self, operation: Operation, payload: Payload | None) -> None:
        """One operation, as soon as the thread is free; what it made is on its way when this returns."""
        kind, index = operation.kind, operation.index
        try:
            if kind is Kind.FORWARD:
                made, took_s = await self._on_thread(self._engine.forward, self._step, index, payload)
                self._spent.forward_s += took_s
            else:
                made, took_s = await self._on_thread(self._engine.backward, index, payload)
                self._spent.backward_s += took_s
            self._chain.release(kind, payload)
            if made is not None:
                self._chain.send(kind, index, made)
        except ProtocolError as error:
            if payload is None or self._chain.broken.done():
                self.give_up(error)
                raise
            self._chain.blame(kind, error)
            self.give_up(failure := self._chain.failure())
            raise failure from error
        except BaseException as error:
            self.give_up(error)  # at once: the step may wait for what never comes
            raise
        self._chain.progress += 1
        self._on_work()

    async def _on_thread(self, function: Callable[..., T], *args: Any) -> tuple[T, float]:
        """What the call gives, and how long it took; given up at once where the chain breaks meanwhile."""
        call, queued_at = asyncio.ensure_future(self._compute.run(self._unless_failed, function, *args)), self._clock()
        if not self._queued:
            self._spent.waited_s += queued_at - self._idle_since
        self._queued += 1
        try:
            ends: set[asyncio.Future[Any]] = {call, self._chain.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._chain.failure()
            now = self._clock()
            begun, self._ended_at = max(queued_at, self._ended_at), now
            return call.result(), now - begun
        finally:
            call.cancel()
            self._queued -= 1
            if not self._queued:
                self._idle_since = self._clock()

    def _unless_failed(self, function: Callable[..., T], *args: Any) -> T:
        """On the compute thread."""
        if self._failed:
            raise ConnectionLost("the step was given up")
        try:
            return function(*args)
        except BaseException:
            self._failed = True
            raise
