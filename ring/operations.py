"""A session's operations under way: what of them its lanes have still to do, who waits, and for how long nothing moves.

An operation is cut into *flows*, one for each lane that takes part (``ring.lanes``). It is done when all of them are.
An operation that stands still for as long as it may ends the session: because of the left neighbour where something is
to be received, because of the right one where it does not take what is sent. A left neighbour that beats, waits for
nobody and gets nowhere is given up sooner, by its pace (``ring.detector``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError
from p2ptrain.core.world import Clock
from ring.codecs import Codec
from ring.collectives import Schedule
from ring.dtypes import Array
from ring.lanes import Flow, Lane, Residual
from ring.liveness import Neighbour
from wire.connection import Connection


@dataclass(eq=False, slots=True)
class Operation:
    """What was submitted and is under way.

    Attributes:
        flows_left: of its flows, those that are not done.
        finish: called when all are, before ``future`` resolves.
    """

    title: str
    patience_s: float
    began_at: float
    future: asyncio.Future[None]
    finish: Callable[[], None] | None = None
    flows: list[tuple[Lane, Flow]] = field(default_factory=list)
    flows_left: int = 0
    first_received_at: float | None = None


class Operations:
    """See the module's docstring.

    Args:
        left, right: None in a ring of one, which has no lanes: there an operation is done as it starts.
        give_up: called with the neighbour because of which the session is to end, None where it is this member, and
            with what it did.
        lost: called with a connection that failed, and why.

    Attributes:
        lanes: one a stream between neighbours.
        progress: sub-chunks received so far, and whatever the owner adds.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        generation: int,
        left: Neighbour | None,
        right: Neighbour | None,
        give_up: Callable[[Neighbour | None, P2PTrainError], None],
        lost: Callable[[Connection, P2PTrainError], None],
    ) -> None:
        self.lanes: list[Lane] = []
        self.progress = 0
        self._clock, self._left, self._right, self._give_up = clock, left, right, give_up
        self._under_way: dict[int, Operation] = {}  # by stream, oldest first
        self._stream = 0
        self._waited_s = 0.0
        self._received_at = 0.0
        self._moved_at = 0.0  # when anything last went forward
        self._patience: asyncio.TimerHandle | None = None
        self._judged_at = 0.0  # when it fires
        self._parted: Neighbour | None = None  # it left while the last operation could still end well
        if left is not None and right is not None:
            self.lanes = [
                Lane(incoming, outgoing, generation, on_progress=self._moved, on_error=lost)
                for incoming, outgoing in zip(left.bulks, right.bulks, strict=True)
            ]

    @property
    def under_way(self) -> int:
        """How many."""
        return len(self._under_way)

    @property
    def title(self) -> str:
        """What the oldest one is; empty where there is none."""
        return next((operation.title for operation in self._under_way.values()), "")

    @property
    def waited_s(self) -> float:
        """Running total: how long the left neighbour sent nothing, for what comes next had not begun at its side."""
        oldest = next(iter(self._under_way.values()), None)
        if oldest is None or oldest.first_received_at is not None:
            return self._waited_s
        return self._waited_s + self._clock.now() - max(oldest.began_at, self._received_at)

    def begin(self, title: str, patience_s: float) -> Operation:
        """The next one, with a stream of its own: the same on every member, for all begin the same in the same order.

        Its flows follow with ``add``, and then ``start``, before the next one begins.
        """
        self._stream += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return Operation(title, patience_s, self._clock.now(), future)

    def add(
        self,
        operation: Operation,
        lane: Lane,
        schedule: Schedule,
        array: Array,
        dtype: str,
        sub_chunk_numel: int,
        codec: Codec | None = None,
        residual: Residual | None = None,
    ) -> None:
        """One more flow of ``operation``, on ``lane``; see ``ring.lanes.Flow``."""

        def done() -> None:
            operation.flows_left -= 1
            if not operation.flows_left:
                self._complete(stream, operation)

        stream = self._stream
        flow = Flow(schedule, array, dtype, stream, sub_chunk_numel, done, codec, residual)
        operation.flows.append((lane, flow))

    def start(self, operation: Operation) -> asyncio.Future[None]:
        """Put its flows under way; the future is done when all of them are."""
        operation.flows_left = len(operation.flows)
        if not operation.flows:
            self._complete(0, operation)
            return operation.future
        self._under_way[self._stream] = operation
        operation.future.add_done_callback(self._abandoned)
        if len(self._under_way) == 1:
            self._moved_at = operation.began_at
        if self._patience is None or operation.began_at + operation.patience_s < self._judged_at:
            self._await_progress(operation.patience_s)
        for lane, flow in operation.flows:
            lane.submit(flow)
        return operation.future

    def _complete(self, stream: int, operation: Operation) -> None:
        """All of the operation was received and flushed."""
        if operation.finish is not None:
            operation.finish()
        self._under_way.pop(stream, None)
        if not operation.future.done():
            operation.future.set_result(None)
        if not self._under_way and self._parted is not None:
            self._give_up(self._parted, ConnectionLost("it left the ring"))

    def _abandoned(self, future: asyncio.Future[None]) -> None:
        """Whoever waited for an operation does so no more: memory is posted and borrowed, so the session must end."""
        if future.cancelled():
            self._give_up(None, ConnectionLost("an operation was abandoned by this member"))

    def _moved(self, flow: Flow | None) -> None:
        """A sub-chunk of ``flow`` arrived, or, where that is None, the kernel took what was sent."""
        self._moved_at = now = self._clock.now()
        if flow is None:
            return
        self.progress += 1
        operation = self._under_way.get(flow.stream)
        if operation is not None and operation.first_received_at is None:
            operation.first_received_at = now
            self._waited_s += now - max(operation.began_at, self._received_at)
        self._received_at = now

    def _await_progress(self, in_s: float) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._judged_at = self._clock.now() + in_s
        self._patience = asyncio.get_running_loop().call_later(in_s, self._judge_progress)

    def _judge_progress(self) -> None:
        """Break where nothing moved for as long as the oldest operation may stand still.

        The timer outlives operations: to set and cancel one for each would cost a small operation a tenth of its time.
        """
        if not self._under_way:
            self._patience = None
            return
        title, patience_s = next((item.title, item.patience_s) for item in self._under_way.values())
        still_s = self._clock.now() - self._moved_at
        if still_s < patience_s:
            self._await_progress(patience_s - still_s)
            return
        starving = any(lane.expects for lane in self.lanes)
        what = f"sent no part of the {title}" if starving else f"took no part of the {title}"
        remedy = "it may be stuck or very slow: look at its log"
        silence = DeadlineExceeded(f"{what} for {patience_s:g} s", remedy=remedy)
        self._give_up(self._left if starving else self._right, silence)

    def judge_pace(self, left: Neighbour) -> None:
        """Break where the left neighbour beats, waits for nobody, and gets nowhere while this member waits for it."""
        operation = next(iter(self._under_way.values()), None)
        if operation is None or left.pace is None or not any(lane.expects for lane in self.lanes):
            return
        now = self._clock.now()
        stuck_at = left.pace.stuck_at(operation.patience_s, max(operation.began_at, self._moved_at))
        if stuck_at is not None and now >= stuck_at:
            what = (
                f"it beats, but has got nowhere since the {operation.title} wanted it {now - self._moved_at:.0f} s ago"
            )
            remedy = "it is stuck, not slow: look at its log, restart it"
            self._give_up(left, DeadlineExceeded(what, remedy=remedy))

    def ends_without(self, neighbour: Neighbour, connection: Connection) -> bool:
        """A neighbour that leaves has closed ``connection``: whether what is under way can still end well. Then it is
        given up when all of that has ended."""
        lanes = [lane for lane, bulk in zip(self.lanes, neighbour.bulks, strict=True) if bulk is connection]
        starving = neighbour is self._left and any(lane.expects for lane in lanes)
        if not self._under_way or starving:
            return False
        if self._parted is None:
            self._parted = neighbour
        return True

    def settle(self, failure: Callable[[], P2PTrainError]) -> None:
        """The end has come: nothing of an operation is touched any more."""
        for lane in self.lanes:
            lane.stop()
        if self._patience is not None:
            self._patience.cancel()
        operations, self._under_way = self._under_way, {}
        for operation in operations.values():
            if not operation.future.done():
                operation.future.set_exception(failure())
                operation.future.exception()  # it may be that nobody waits any more; ``broken`` tells, too
