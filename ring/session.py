"""The running ring of one view: carries out the schedules of ``ring.collectives`` over connections to the neighbours.

Connections. Each member dials its right neighbour and accepts its left one. *Bulk* connections carry payloads in one
direction, left to right, one per stream (``ring.lanes``). The *beat* connection carries heartbeats and their
acknowledgements. So a heartbeat never waits behind a gigabyte, or for the compute thread.

Operations. All members submit the same operations in the same order. Each has the next operation number (the frame's
``stream``), so frames of different operations cannot mix. Several may be in progress, so gradients enter the ring while
others are still computed. An operation is cut into *flows*, one for each lane that takes part. For a small all-reduce,
every member gathers all arrays and sums them in rank order: n - 1 hops instead of 2n - 2, and the same bits everywhere.

Groups. In a large ring small arrays are gathered in groups (``group_count``): the first member of each group, its
*leader*, collects those of the group before it (``collect``), the leaders gather them in a ring of their own
(``exchange``), and each passes all on through its group (``spread``). The leaders' ring ends with this one.

Ends. An operation that makes no progress within its patience ends the session. The suspect is the left neighbour if
anything is still to be received, else the right one, which does not take what is sent. A session that lost a neighbour
is *broken* for good and names the lost member (``ring.neighbours``). If a member leaves after the last operation, a
neighbour can still complete it: all that it needs from the leaver arrives before the end of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NeighbourAway, PeerError
from p2ptrain.core.world import World
from ring import collectives
from ring.codecs import Codec
from ring.collectives import MOST_SUB_CHUNK_BYTES, Schedule, Stripe, plan_stripes
from ring.detector import LEAST_WAIT_S
from ring.dtypes import Array, check_reduction, reduce_into
from ring.lanes import Flow, Lane, Residual
from ring.links import ThisMember, Topology, connect_neighbours
from ring.neighbours import AT_WORK, Neighbour, NeighbourLinks, cause_of
from ring.view import View
from wire.connection import Connection

PATIENCE_S = 120.0
LATER = 2
"""A member whose left neighbour waits, too, and has less gives it up after so many times the patience."""
SMALL_BYTES = 128 << 10
"""Limit of the small all-reduce, for the members' arrays together. Below it hops cost more than bytes."""


@dataclass(eq=False, slots=True)
class RingOperation:
    """A submitted operation. ``finish`` is called when all its flows are done, before ``future`` resolves. ``held``: at
    a leader, what it spreads, until it has it."""

    title: str
    patience_s: float
    began_at: float
    future: asyncio.Future[None]
    finish: Callable[[], None] | None = None
    held: Schedule | None = None
    flows: list[tuple[Lane, Flow]] = field(default_factory=list)
    received: int = 0
    first_received_at: float | None = None


class RingSession:
    """A member's place in the ring of one view. ``form`` makes it; ``close`` or the loss of a neighbour ends it.

    Attributes:
        patience_s: of the owner, for operations whose callers know none.
        broken: resolves to ``RingBroken`` when the session has ended, for whatever reason.
    """

    def __init__(
        self,
        *,
        world: World,
        view: View,
        rank: int,
        left: Neighbour | None,
        right: Neighbour | None,
        leaders: RingSession | None = None,
        whole: View | None = None,
    ) -> None:
        self.view = view
        self.rank, self.size, self.patience_s = rank, view.size, PATIENCE_S
        self.world = world
        self._lanes: list[Lane] = []  # one per stream; a ring of one has none
        self._under_way: dict[int, RingOperation] = {}  # by stream, oldest first
        self._stream = 0
        self._waited_s = self._received_at = 0.0
        self._moved_at = 0.0  # the last progress
        self._judge_timer: asyncio.TimerHandle | None = None  # of ``_judge_progress``, for all operations
        self.links = NeighbourLinks(self, world.clock, view, rank, left=left, right=right, what="ring", whole=whole)
        self.broken = self.links.broken
        self._leaders = leaders
        if leaders is not None:
            leaders.broken.add_done_callback(lambda _: self._follow_leaders())
        if left is not None and right is not None:
            self._lanes = [
                Lane(self, incoming, outgoing) for incoming, outgoing in zip(left.bulks, right.bulks, strict=True)
            ]

    # ---------------------------------------------------------------------------------------------- forming and ending

    @classmethod
    async def form(
        cls,
        me: ThisMember,
        view: View,
        *,
        timeout_s: float,
        topology: Topology = Topology.RING,
        whole: View | None = None,
    ) -> RingSession:
        """Connect to both neighbours, and wait until every member of the view has done so.

        Args:
            view: has the same settings on every member; its heartbeats are set.
            topology: which ring, if a member is in several rings of one view.
            whole: of the leaders' ring: the view whose leaders they are.

        Raises:
            Refused: the right neighbour is in a newer view.
            NeighbourAway: the right neighbour was not reached within ``ring.links.DIAL_PART`` of ``timeout_s``, or the
                left one did not come in time, or a neighbour broke the protocol.
            ConnectionLost: a member went away meanwhile.
        """
        rank, now = view.rank_of(me.peer_id), me.world.clock.now
        assert rank is not None, "views are for their members"
        me.inbound.expect(view.job, view.generation)
        if view.size == 1:
            return cls(world=me.world, view=view, rank=0, left=None, right=None)
        deadline, dialled, dialling = now() + timeout_s, view.right_of(rank), view.left_of(rank)
        leaders: RingSession | None = None
        if view.groups > 1 and rank == collectives.group_of(rank, view.size, view.groups)[1]:
            leaders = await cls.form(me, view.leader_ring(), timeout_s=timeout_s, topology=topology, whole=view)
        try:
            to_right, from_left = await connect_neighbours(
                me, view, topology, dialled=dialled, dialling=dialling, timeout_s=deadline - now()
            )
        except BaseException:
            if leaders is not None:
                leaders.close("forming the ring failed at this member")
            raise
        ends = {"left": from_left, "right": to_right}
        session = cls(world=me.world, view=view, rank=rank, **ends, leaders=leaders, whole=whole)
        try:
            await session.barrier(patience_s=deadline - now())
        except BaseException as problem:
            # Also cancelled in the instant when all were there: nobody else could close it.
            session.close("forming the ring failed at this member")
            lost = session.broken.result()
            if isinstance(problem, DeadlineExceeded | PeerError) and lost.beside == me.peer_id:
                cause = cause_of(problem)
                raise NeighbourAway(
                    problem.message, peer_id=lost.suspect, remedy=problem.remedy, cause=cause
                ) from problem
            raise
        session.links.begin_beats()
        return session

    def close(self, reason: str = "the view ended") -> None:
        """Leave the ring without waiting (``links.wait_closed`` waits). Operations in progress fail on every member."""
        self.links.close(f"this member left the ring: {reason}", reason, orderly=not self._under_way)

    # ------------------------------------------------------------------------------------------------------ operations

    def submit(
        self,
        buffer: Array,
        dtype: str | None = None,
        *,
        codec: Codec | None = None,
        residual: Residual | None = None,
        reduction: np.ufunc = np.add,
        patience_s: float = PATIENCE_S,
    ) -> asyncio.Future[None]:
        """Begin an all-reduce: replace ``buffer`` by the sum over all members' buffers, bit-equal on all of them.

        Args:
            buffer: shape (numel,), contiguous and writable, the same size on every member. The caller must not touch it
                until the future is done. Cancelling the future breaks the session.
            dtype: the elements' type if it is not ``buffer.dtype``: ``"bfloat16"`` is stored as uint16.
            codec: how float32 elements are encoded, the same on every member; None: not at all. A small array is never
                encoded, nor is the array of a ring of one.
            residual: shape (numel,), float32: this member's error feedback. Afterwards it holds what the codec lost of
                the buffer and the old residual, for the next sum of the same elements.

        Returns:
            A future. It fails with Stalled after ``patience_s`` without progress, and with ConnectionLost or
            ProtocolError if the session broke. ``broken`` names the suspect.

        Raises:
            ValueError: elements of this type have no such reduction.
            ConnectionLost, ProtocolError, DeadlineExceeded: the session was broken before.
        """
        dtype = dtype or buffer.dtype.name
        check_reduction(dtype, reduction)
        operation = self._begin("all-reduce", patience_s)
        if self._is_small(buffer):

            def reduce(parts: Array) -> None:
                for part in parts[1:]:
                    reduce_into(parts[0], parts[0], part, dtype, reduction)
                buffer[:] = parts[0]

            return self._gather_small(operation, buffer, reduce)
        stripes = self._plan(buffer, len(self._lanes), codec.block_numel if codec is not None else 1)
        for lane, (start, stop, sub_chunk_numel, depth) in zip(self._lanes, stripes, strict=False):
            schedule = collectives.all_reduce(self.rank, self.size, stop - start, sub_chunk_numel, depth)
            feedback = residual[start:stop] if residual is not None else None
            parts = (buffer[start:stop], dtype, sub_chunk_numel)
            self._add(operation, lane, schedule, *parts, codec=codec, residual=feedback, reduction=reduction)
        return self._start(operation)

    def reduce_scatter(
        self,
        source: Array,
        into: Array,
        dtype: str | None = None,
        *,
        reduction: np.ufunc = np.add,
        patience_s: float = PATIENCE_S,
    ) -> asyncio.Future[None]:
        """Begin a reduce-scatter: ``into`` becomes this member's part of the sum over all members' ``source``.

        Args:
            source: shape (size * numel,), where part r is for rank r. It stays unchanged, and must until the end.
            into: shape (numel,). All other arguments, and the errors, are as of ``submit``.
        """
        dtype = dtype or source.dtype.name
        check_reduction(dtype, reduction)
        operation = self._begin("reduce-scatter", patience_s)
        sums = np.empty_like(source) if self._lanes else source
        start = self.rank * into.size

        def finish() -> None:
            into[:] = sums[start : start + into.size]

        operation.finish = finish
        for lane in self._lanes[:1]:
            plan = self._plan(source)[0]
            schedule = collectives.reduce_scatter(self.rank, self.size, source.size, plan.sub_chunk_numel, plan.depth)
            self._add(operation, lane, schedule, sums, dtype, plan.sub_chunk_numel, reduction=reduction, source=source)
        return self._start(operation)

    def gather(self, buffer: Array, *, patience_s: float = PATIENCE_S) -> asyncio.Future[None]:
        """Begin an all-gather in place: part r of ``buffer``, shape (size * numel,), becomes that of rank r. Each
        member has its own part there. Other arguments and errors as ``submit``."""
        return self._on_one_lane("all-gather", buffer, patience_s)

    def broadcast(self, buffer: Array, root: int, *, patience_s: float = PATIENCE_S) -> asyncio.Future[None]:
        """Begin a broadcast: replace ``buffer`` by that of ``root``, which has the same size. It ends after every
        member has begun it, so that ``root`` may leave then. Other arguments and errors as ``submit``."""
        operation = self._begin("broadcast", patience_s)
        if self._is_small(buffer):

            def take(parts: Array) -> None:
                buffer[:] = parts[root]

            return self._gather_small(operation, buffer, take)
        for lane in self._lanes[:1]:
            sub_chunk_numel = self._plan(buffer)[0].sub_chunk_numel
            schedule = collectives.broadcast(self.rank, self.size, root, buffer.size, sub_chunk_numel)
            self._add(operation, lane, schedule, buffer, "uint8", sub_chunk_numel)
            barrier = collectives.all_gather(self.rank, self.size, self.size, 1)
            self._add(operation, lane, barrier, np.zeros(self.size, np.uint8), "uint8", 1)
        return self._start(operation)

    async def all_gather(
        self, mine: bytes, *, patience_s: float = PATIENCE_S, check: Callable[[bytes], object] | None = None
    ) -> list[bytes]:
        """Every member's bytes, in rank order; all have the same length. Errors as ``submit``.

        ``check``: raises ``ProtocolError`` for invalid bytes. It is called before they are passed on, so the neighbour
        that sent them is the one to blame.
        """
        part_bytes = len(mine)
        gathered = np.empty(self.size * part_bytes, np.uint8)
        gathered[self.rank * part_bytes : (self.rank + 1) * part_bytes] = np.frombuffer(mine, np.uint8)
        await self._on_one_lane("all-gather", gathered, patience_s, least_numel=part_bytes, check=check)
        return [gathered[rank * part_bytes : (rank + 1) * part_bytes].tobytes() for rank in range(self.size)]

    async def barrier(self, *, patience_s: float = PATIENCE_S) -> None:
        """Return only after every member has called it. Errors as ``submit``."""
        await self._on_one_lane("barrier", np.zeros(self.size, np.uint8), patience_s)

    # --------------------------------------------------------------------------------------------------------- figures

    def is_busy(self) -> bool:
        return bool(self._under_way)

    def expects(self, connection: Connection) -> bool:
        return any(lane.expects for lane in self._lanes if lane.left is connection)

    @property
    def waited_s(self) -> float:
        """Total seconds of waiting for the first sub-chunk of an operation, which the left neighbour had not begun."""
        oldest = next(iter(self._under_way.values()), None)
        if oldest is None or oldest.first_received_at is not None:
            return self._waited_s
        return self._waited_s + self.world.clock.now() - max(oldest.began_at, self._received_at)

    # ---------------------------------------------------------------------------------------------- running operations

    def _on_one_lane(
        self, title: str, array: Array, patience_s: float, least_numel: int = 1, **settings: Any
    ) -> asyncio.Future[None]:
        """Begin an all-gather in place. ``least_numel``: of a sub-chunk. ``settings``: further fields of ``Flow``."""
        operation = self._begin(title, patience_s)
        sub_chunk_numel = max((self.view.sub_chunk_bytes or MOST_SUB_CHUNK_BYTES) // array.itemsize, least_numel)
        self._add_gather(operation, array, sub_chunk_numel, **settings)
        return self._start(operation)

    def _add_gather(
        self,
        operation: RingOperation,
        array: Array,
        sub_chunk_numel: int,
        check: Callable[[bytes], object] | None = None,
    ) -> None:
        """Add the flows of an all-gather in place: part r of ``array``, shape (size * numel,), is that of rank r."""
        if self.view.groups > 1 and 0 < array.nbytes <= SMALL_BYTES:
            self._add_grouped(operation, array.view(f"V{array.nbytes // self.size}"), check)
            return
        schedule = collectives.all_gather(self.rank, self.size, array.size, sub_chunk_numel)
        for lane in self._lanes[:1]:
            self._add(operation, lane, schedule, array, "uint8", sub_chunk_numel, check=check)

    def _add_grouped(self, operation: RingOperation, parts: Array, check: Callable[[bytes], object] | None) -> None:
        """The same in groups. ``parts``: shape (size,), an element for each rank."""
        lane, leaders, place = self._lanes[0], self._leaders, (self.rank, self.size, self.view.groups)
        outwards = collectives.spread(*place)

        def check_each(data: bytes) -> None:
            for start in range(0, len(data), parts.itemsize):
                assert check is not None
                check(data[start : start + parts.itemsize])

        def release(exchanged: asyncio.Future[None]) -> None:
            if exchanged.cancelled() or exchanged.exception() is not None:
                self._follow_leaders(at_once=True)
                return
            operation.held, outwards.held = None, False
            lane.pump()

        def exchange() -> None:
            if leaders is not None and not leaders.broken.done():
                # Longer than the members' patience: they know better who is at fault.
                exchanged = leaders._exchange(parts, LATER * operation.patience_s, settings["check"])
                exchanged.add_done_callback(release)
            elif leaders is not None:
                self._follow_leaders(at_once=True)

        if leaders is not None:
            operation.held, outwards.held = outwards, True
        settings: dict[str, Any] = {"check": check_each if check is not None else None}
        self._add(operation, lane, collectives.collect(*place), parts, "uint8", 1, then=exchange, **settings)
        self._add(operation, lane, outwards, parts, "uint8", 1, **settings)

    def _exchange(
        self, parts: Array, patience_s: float, check: Callable[[bytes], object] | None
    ) -> asyncio.Future[None]:
        operation = self._begin("exchange between groups", patience_s)
        schedule = collectives.exchange(self.rank, parts.size, self.size)
        self._add(operation, self._lanes[0], schedule, parts, "uint8", 1, check=check)
        return self._start(operation)

    def _follow_leaders(self, *, at_once: bool = False) -> None:
        """End the session after that of the leaders. If a leader only left, operations may complete without it, unless
        ``at_once``."""
        assert self._leaders is not None
        broken = self._leaders.broken.result()
        if self.broken.done() or (broken.left and self.is_busy() and not at_once):
            return
        if not self.links.follow_loss(broken):
            self.links.close(broken.cause.message, broken.cause.message, orderly=False)

    def _is_small(self, buffer: Array) -> bool:
        return self.size * buffer.nbytes <= min(SMALL_BYTES, self.view.sub_chunk_bytes or SMALL_BYTES)

    def _plan(self, array: Array, lanes: int = 1, block_numel: int = 1) -> list[Stripe]:
        sizes = {"members": self.size, "lanes": lanes, "sub_chunk_bytes": self.view.sub_chunk_bytes}
        return plan_stripes(array.size, array.itemsize, block_numel=block_numel, **sizes)

    def _gather_small(
        self, operation: RingOperation, buffer: Array, take: Callable[[Array], None]
    ) -> asyncio.Future[None]:
        """Gather the small buffers of all members, shape (size, numel), and call ``take`` with them."""
        parts = np.empty((self.size, buffer.size), buffer.dtype)
        parts[self.rank] = buffer
        operation.finish = lambda: take(parts)
        self._add_gather(operation, parts.reshape(-1), max(buffer.size, 1))
        return self._start(operation)

    def _begin(self, title: str, patience_s: float) -> RingOperation:
        """Begin the next operation. ``_add`` adds its flows, then ``_start`` starts it, before the next one begins. Its
        stream number is the same on every member, since all begin the operations in the same order."""
        if self.broken.done():
            raise self.links.failure()
        self._stream += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return RingOperation(title, patience_s, self.world.clock.now(), future)

    def _add(
        self,
        operation: RingOperation,
        lane: Lane,
        schedule: Schedule,
        array: Array,
        dtype: str,
        sub_chunk_numel: int,
        then: Callable[[], None] | None = None,
        **settings: Any,
    ) -> None:
        """``then`` is called when the flow is done. ``settings``: further fields of ``Flow``."""

        def done() -> None:
            if then is not None:
                then()
            if all(other.finished for _, other in operation.flows):
                self._complete(stream, operation)

        stream = self._stream
        flow = Flow(schedule, array, dtype, stream, sub_chunk_numel, done, **settings)
        operation.flows.append((lane, flow))

    def _start(self, operation: RingOperation) -> asyncio.Future[None]:
        if not operation.flows:
            self._complete(0, operation)
            return operation.future
        self._under_way[self._stream] = operation
        operation.future.add_done_callback(self._abandoned)
        if len(self._under_way) == 1:
            self._moved_at = operation.began_at
        if self._judge_timer is None or operation.began_at + operation.patience_s < self._judge_timer.when():
            self._judge_in(operation.patience_s)
        for lane, flow in operation.flows:
            lane.submit(flow)
        return operation.future

    def _complete(self, stream: int, operation: RingOperation) -> None:
        if operation.finish is not None:
            operation.finish()
        self._under_way.pop(stream, None)
        if not operation.future.done():
            operation.future.set_result(None)
        if not self._under_way and self.links.parted is not None:
            self.links.give_up(self.links.parted, ConnectionLost("it left the ring"))
        if self._leaders is not None and self._leaders.broken.done():
            self._follow_leaders()

    def _abandoned(self, future: asyncio.Future[None]) -> None:
        """End the session if the caller cancelled an operation: its memory is still posted and borrowed."""
        if future.cancelled():
            self.links.give_up(None, ConnectionLost("this member cancelled an operation"))

    def moved(self, flow: Flow | None) -> None:
        """Note progress: a sub-chunk of ``flow`` arrived or, if ``flow`` is None, the kernel took what was sent."""
        self._moved_at = now = self.world.clock.now()
        if flow is None:
            return
        operation = self._under_way.get(flow.stream)
        if operation is not None:
            operation.received += 1
        if operation is not None and operation.first_received_at is None:
            operation.first_received_at = now
            self._waited_s += now - max(operation.began_at, self._received_at)
        self._received_at = now

    def _judge_in(self, seconds: float) -> None:
        if self._judge_timer is not None:
            self._judge_timer.cancel()
        self._judge_timer = asyncio.get_running_loop().call_later(max(seconds, LEAST_WAIT_S), self._judge_progress)

    def _judge_progress(self) -> None:
        """Break the session if nothing moved for the patience of the oldest operation. The timer outlives operations:
        one for each would cost a small operation a tenth of its time."""
        if not self._under_way:
            self._judge_timer = None
            return
        stream, oldest = next(iter(self._under_way.items()))
        title, patience_s = oldest.title, oldest.patience_s
        still_s = self.world.clock.now() - self._moved_at
        if still_s < patience_s:
            self._judge_in(patience_s - still_s)
            return
        starving = any(lane.expects for lane in self._lanes)
        leaders = self._leaders
        if leaders is not None and (leaders.is_busy() or leaders.broken.done()):  # that ring knows who is at fault
            self._judge_in(patience_s)
            return
        left = self.links.beats.newest_of_left
        waits = left is not None and left.state != AT_WORK and left.progress < (stream << 20) + oldest.received
        if starving and waits and still_s < LATER * patience_s:  # a member before it is the cause
            self._judge_in(LATER * patience_s - still_s)
            return
        neighbour, what = (self.links.left, "sent") if starving else (self.links.right, "took")
        self.links.give_up_stuck(neighbour, f"{what} no part of the {title} for {patience_s:g} s")

    # -------------------------------------------------------------------------------------------------------- breaking

    def status(self) -> tuple[int, str]:
        """This member's progress and state, for its heartbeats. The progress is the number of the operation, and how
        many sub-chunks of it arrived. A correct member has sent more of them, so its right neighbour has more."""
        for stream, operation in self._under_way.items():
            # A leader that waits for the other leaders has sent less than its right neighbour has received.
            return (stream << 20) + (operation.received if operation.held is None else 0), operation.title
        return self._stream << 20, AT_WORK

    def settle(self) -> None:
        for lane in self._lanes:
            lane.stop()
        if self._judge_timer is not None:
            self._judge_timer.cancel()
        if self._leaders is not None and not self._leaders.links.follow_loss(self.broken.result()):
            self._leaders.close(self.broken.result().cause.message)
        operations, self._under_way = self._under_way, {}
        for operation in operations.values():
            if not operation.future.done():
                operation.future.set_exception(self.links.failure())
                operation.future.exception()  # marks it as retrieved: ``broken`` reports the error, too
