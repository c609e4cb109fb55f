"""One view's ring, running: carries out the schedules of ``ring.collectives`` over connections to the neighbours.

Connections. Each member dials its right neighbour twice and is dialled twice by its left one: *bulk* carries payloads
in one direction, left to right; *beat* carries the left one's heartbeats and the right one's acknowledgements. So a
beat never waits behind a gigabyte, and the event loop answers it whatever the compute thread does.

Operations. One at a time, the same on every member in the same order; each has the next stream number, so frames of
different operations cannot mix. Received sub-chunks are handled in the callback of their arrival; sending is done by
the calling task, one sub-chunk after the other, each flushed before the next is handed over: there is no task or
future per sub-chunk, and what the transport holds is bounded whatever the size of the array.

Ends. A session that lost a neighbour is *broken* for good: it closes all its connections, which breaks the neighbours'
sessions, and so the news goes round the ring as fast as the wires are, with no timeout involved. A member that leaves
on purpose says so first (``Leave``): a neighbour that is still busy with the last operation, which the leaver has
finished, may finish it too, for all that it needs from the leaver lies ahead of the end of its connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    Refused,
)
from p2ptrain.core.world import World
from ring import collectives
from ring.collectives import SCRATCH_SLOTS, Done, Instruction, Post, Reduce, Schedule, Send
from ring.dtypes import Array, storage_dtype, sum_into
from ring.links import CHANNELS, Inbound, dial_patiently
from ring.liveness import Neighbour, Watch
from ring.view import View
from wire.connection import Connection
from wire.handshake import local_hello
from wire.messages import Leave

__all__ = ["Inbound", "RingBroken", "RingSession", "RingStats"]

PATIENCE_S = 120.0
MAX_SUB_CHUNK_BYTES = 64 << 20
DIAL_PART = 0.4
"""Of the time to form: for dialling. Who knows which link is missing says so before all others' time is up."""

_LISTEN_S = 3600.0  # a quiet control connection is no fault: silence is judged by the detector


@dataclass(frozen=True, slots=True)
class RingBroken:
    """Why a session ended. ``suspect`` is the peer id of the lost neighbour, empty where this side ended it."""

    suspect: str
    cause: P2PTrainError


@dataclass(frozen=True, slots=True)
class RingStats:
    """Running totals of all connections; ``rtt_ms`` is to the right neighbour, None before the first beat."""

    bytes_in: int
    bytes_out: int
    rtt_ms: float | None


class _Operation:
    """One schedule under way: its memory, what is still to be sent, and the event that wakes the sending task."""

    def __init__(self, title: str, schedule: Schedule, array: Array, dtype: str, stream: int) -> None:
        self.title = title
        self.schedule = schedule
        self.array = array
        self.dtype = dtype
        self.stream = stream
        self.outgoing: deque[Send] = deque()
        self.news = asyncio.Event()
        self.received = 0
        self.first_received_at: float | None = None
        self._bytes = array.view(np.uint8).data

    def payload(self, start: int, stop: int) -> memoryview:
        """The memory of elements [start, stop)."""
        itemsize = self.array.itemsize
        return self._bytes[start * itemsize : stop * itemsize]


class RingSession:
    """A member's place in the ring of one view. Made by ``form``; ended by ``close``, or by the loss of a neighbour.

    Attributes:
        rank, size: this member's, and how many there are.
        broken: resolves to ``RingBroken`` as soon as the session can do no more, for whatever reason.
        progress: sub-chunks received so far; it goes out with every beat.
        waited_s: how long the last operation waited for the left neighbour's first sub-chunk.
    """

    def __init__(
        self,
        *,
        world: World,
        view: View,
        rank: int,
        left: Neighbour | None,
        right: Neighbour | None,
        sub_chunk_bytes: int,
    ) -> None:
        self.view = view
        self.rank, self.size = rank, view.size
        self.broken: asyncio.Future[RingBroken] = asyncio.get_running_loop().create_future()
        self.progress = 0
        self.waited_s = 0.0
        self._world = world
        self._left, self._right = left, right
        self._sub_chunk_bytes = sub_chunk_bytes
        self._scratch = np.empty((0, 0), np.uint8)
        self._operation: _Operation | None = None
        self._stream = 0
        self._parted: Neighbour | None = None  # it left while the last operation could still end well
        self._farewells: set[asyncio.Task[None]] = set()
        self._watch: Watch | None = None
        if left is not None and right is not None:
            self._watch = Watch(
                clock=world.clock,
                generation=view.generation,
                left=left,
                right=right,
                status=self._status,
                on_end=self._ended,
                on_silent=self._break,
            )
        for neighbour in self.neighbours:
            neighbour.bulk.fence = view.generation

    # ---------------------------------------------------------------------------------------------- forming and ending

    @classmethod
    async def form(
        cls,
        *,
        world: World,
        view: View,
        peer_id: str,
        name: str,
        seed_host: str,
        inbound: Inbound,
        heartbeat_s: float,
        death_s: float,
        sub_chunk_bytes: int = 1 << 20,
        timeout_s: float,
    ) -> RingSession:
        """Connect to both neighbours, and wait until every member of the view has done so.

        Args:
            seed_host: dialled for members whose own host is empty.
            heartbeat_s, death_s: beat interval, and the silence after which a neighbour counts as dead.
            sub_chunk_bytes: the same on every member.

        Raises:
            ValueError: ``peer_id`` is no member, or ``sub_chunk_bytes`` is not in 8 .. 64 MiB.
            Refused: the right neighbour is in a newer view.
            NeighbourAway: the right neighbour could not be reached within ``DIAL_PART`` of ``timeout_s``.
            DeadlineExceeded: a member was not there within ``timeout_s``.
            ConnectionLost, ProtocolError: a member went away meanwhile, or spoke nonsense.
        """
        rank = view.rank_of(peer_id)
        if rank is None:
            raise ValueError(f"{peer_id} is no member of generation {view.generation}")
        if not 8 <= sub_chunk_bytes <= MAX_SUB_CHUNK_BYTES:
            raise ValueError(f"sub-chunks of {sub_chunk_bytes} bytes, 8 to {MAX_SUB_CHUNK_BYTES} are possible")
        inbound.expect(view.job, view.generation)
        if view.size == 1:
            return cls(world=world, view=view, rank=0, left=None, right=None, sub_chunk_bytes=sub_chunk_bytes)
        began = world.clock.now()
        deadline, dial_deadline = began + timeout_s, began + DIAL_PART * timeout_s
        opened: list[Connection] = []
        right, left = view.right_of(rank), view.left_of(rank)
        try:
            for channel in CHANNELS:
                hello = local_hello(
                    peer_id=peer_id,
                    name=name,
                    roles=["worker"],
                    purpose="ring",
                    capabilities={"channel": channel},
                    job=view.job,
                    generation=view.generation,
                )
                opened.append(await dial_patiently(world, right, seed_host, hello, deadline=dial_deadline))
            for channel in CHANNELS:
                remaining_s = deadline - world.clock.now()
                opened.append(
                    await inbound.take(view.job, view.generation, left.peer_id, channel, timeout_s=remaining_s)
                )
        except BaseException:
            for connection in opened:
                connection.abort()
            raise
        session = cls(
            world=world,
            view=view,
            rank=rank,
            left=Neighbour("left", left, opened[2], opened[3]),
            right=Neighbour("right", right, opened[0], opened[1]),
            sub_chunk_bytes=sub_chunk_bytes,
        )
        await session.barrier(patience_s=deadline - world.clock.now())
        assert session._watch is not None
        session._watch.begin_beats(heartbeat_s, death_s)
        return session

    def close(self, reason: str = "the view ended") -> None:
        """Leave the ring, without waiting (``wait_closed`` does). An operation under way fails, here and everywhere."""
        if self.broken.done():
            return
        orderly = self._operation is None
        self._settle(RingBroken("", ConnectionLost(f"this member left the ring: {reason}")))
        for neighbour in self.neighbours:
            for connection in neighbour.connections:
                if orderly and neighbour.say(connection, Leave(reason[:200]), self.view.generation):
                    farewell = asyncio.get_running_loop().create_task(connection.close())
                    self._farewells.add(farewell)
                    farewell.add_done_callback(self._farewells.discard)
                else:
                    connection.abort()

    async def wait_closed(self) -> None:
        """After ``close`` or a break: wait until nothing of the session is left, a second at most."""
        if self._watch is not None:
            await self._watch.wait_stopped()
        await asyncio.gather(*self._farewells)
        for neighbour in self.neighbours:
            for connection in neighbour.connections:
                await connection.closed.wait()

    @property
    def broken_by(self) -> RingBroken | None:
        """Why the session ended, None while it lives."""
        return self.broken.result() if self.broken.done() else None

    # ------------------------------------------------------------------------------------------------------ operations

    async def all_reduce(self, buffer: Array, dtype: str | None = None, *, patience_s: float = PATIENCE_S) -> None:
        """Replace ``buffer`` by the sum over all members' buffers, bit-equal on all of them.

        Args:
            buffer: shape (numel,), contiguous and writable, the same on every member. Not to be touched meanwhile.
            dtype: the elements' type where it is not ``buffer.dtype``: ``"bfloat16"`` is stored as uint16.
            patience_s: without any sub-chunk for so long the ring counts as broken.

        Raises:
            ValueError: the buffer is not as described.
            DeadlineExceeded: no progress for ``patience_s``; names the neighbour.
            ConnectionLost, ProtocolError: the session broke. ``broken_by`` tells by whom.
        """
        dtype = dtype or buffer.dtype.name
        _check_buffer(buffer, storage_dtype(dtype))
        sub_chunk_numel = self._sub_chunk_bytes // buffer.itemsize
        schedule = collectives.all_reduce(self.rank, self.size, buffer.size, sub_chunk_numel)
        await self._run("all-reduce", schedule, buffer, dtype, patience_s)

    async def broadcast(self, buffer: Array, root: int, *, patience_s: float = PATIENCE_S) -> None:
        """Replace every member's ``buffer``, of any type, by the one of rank ``root``. Otherwise as ``all_reduce``."""
        _check_buffer(buffer, buffer.dtype)
        raw = buffer.view(np.uint8)
        schedule = collectives.broadcast(self.rank, self.size, raw.size, self._sub_chunk_bytes, root=root)
        await self._run("broadcast", schedule, raw, "uint8", patience_s)

    async def all_gather(self, mine: bytes, *, patience_s: float = PATIENCE_S) -> list[bytes]:
        """Every member's bytes, in rank order; all bring equally many. Errors as ``all_reduce``."""
        each = len(mine)
        gathered = np.empty(self.size * each, np.uint8)
        gathered[self.rank * each : (self.rank + 1) * each] = np.frombuffer(mine, np.uint8)
        schedule = collectives.all_gather(self.rank, self.size, gathered.size, self._sub_chunk_bytes)
        await self._run("all-gather", schedule, gathered, "uint8", patience_s)
        return [gathered[rank * each : (rank + 1) * each].tobytes() for rank in range(self.size)]

    async def barrier(self, *, patience_s: float = PATIENCE_S) -> None:
        """Return only after every member has called it. Errors as ``all_reduce``."""
        schedule = collectives.barrier(self.rank, self.size)
        await self._run("barrier", schedule, np.zeros(self.size, np.uint8), "uint8", patience_s)

    # ------------------------------------------------------------------------------------------------------ for people

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Left and right; none in a ring of one."""
        return (self._left, self._right) if self._left is not None and self._right is not None else ()

    @property
    def bytes_in(self) -> int:
        return sum(connection.bytes_in for neighbour in self.neighbours for connection in neighbour.connections)

    @property
    def bytes_out(self) -> int:
        return sum(connection.bytes_out for neighbour in self.neighbours for connection in neighbour.connections)

    @property
    def stats(self) -> RingStats:
        return RingStats(self.bytes_in, self.bytes_out, self._watch.rtt_ms if self._watch is not None else None)

    # ---------------------------------------------------------------------------------------------- running a schedule

    async def _run(self, title: str, schedule: Schedule, array: Array, dtype: str, patience_s: float) -> None:
        """Carry out ``schedule``. Whatever else ends it breaks the session, for memory is posted and borrowed."""
        if self.broken.done():
            raise self._failure()
        if self._operation is not None:
            raise RuntimeError(f"{title} while {self._operation.title} is under way")
        self._stream += 1
        operation = self._operation = _Operation(title, schedule, array, dtype, self._stream)
        began = self._world.clock.now()
        try:
            self._carry_out(operation, schedule.start())
            while operation.outgoing or not schedule.done:
                if operation.outgoing:
                    await self._send(operation, patience_s)
                else:
                    await self._next_arrival(operation, patience_s)
                if self.broken.done():
                    raise self._failure()
        except P2PTrainError as error:
            self._break(self._left, error)  # only posting to the left has not said so itself
            raise self._failure() from error
        except BaseException:
            self._break(None, ConnectionLost(f"the {title} was abandoned by this member"))
            raise
        finally:
            self._operation = None
        self.waited_s = max((operation.first_received_at or began) - began, 0.0)
        if self._parted is not None:
            self._break(self._parted, ConnectionLost("it left the ring"))

    async def _send(self, operation: _Operation, patience_s: float) -> None:
        """Hand over the next sub-chunk, and wait until the kernel has it: its buffer keeps the link busy meanwhile."""
        right, item = self._right, operation.outgoing.popleft()
        assert right is not None, "a ring of one sends nothing"
        payload = operation.payload(item.start, item.stop)
        try:
            right.bulk.send_bulk(payload, generation=self.view.generation, stream=operation.stream)
            await right.bulk.flush(timeout_s=patience_s)
        except P2PTrainError as error:
            self._break(right, error)
            raise

    async def _next_arrival(self, operation: _Operation, patience_s: float) -> None:
        """Wait until a sub-chunk was handled or the session broke."""
        try:
            async with asyncio.timeout(patience_s):
                await operation.news.wait()
        except TimeoutError:
            silence = DeadlineExceeded(
                f"sent no part of the {operation.title} for {patience_s:g} s",
                remedy="it may be stuck or very slow: look at its log",
            )
            self._break(self._left, silence)
            raise silence from None
        operation.news.clear()

    def _arrived(self) -> None:
        """The oldest posted sub-chunk is here: reduce it, queue what follows. Called by the connection."""
        operation = self._operation
        if operation is None or self.broken.done():
            return
        if operation.first_received_at is None:
            operation.first_received_at = self._world.clock.now()
        index, operation.received = operation.received, operation.received + 1
        self.progress += 1
        try:
            self._carry_out(operation, operation.schedule.on_received(index))
        except P2PTrainError as error:
            self._break(self._left, error)
        operation.news.set()

    def _carry_out(self, operation: _Operation, instructions: list[Instruction]) -> None:
        for item in instructions:
            match item:
                case Send():
                    operation.outgoing.append(item)
                case Post():
                    self._post(operation, item)
                case Reduce(start, stop, slot):
                    received = self._slot(operation, slot, stop - start).view(operation.array.dtype)
                    sum_into(operation.array[start:stop], received, operation.dtype)
                case Done():
                    pass  # ``schedule.done`` tells

    def _post(self, operation: _Operation, post: Post) -> None:
        assert self._left is not None, "a ring of one receives nothing"
        if post.slot is None:
            into = operation.payload(post.start, post.stop)
        else:
            into = self._slot(operation, post.slot, post.stop - post.start).data
        bulk = self._left.bulk
        bulk.post(into, generation=self.view.generation, stream=operation.stream, done=self._arrived)

    def _slot(self, operation: _Operation, slot: int, numel: int) -> Array:
        """The first ``numel`` elements' bytes of a scratch slot. Both slots are made when first used, and kept."""
        if not self._scratch.size:
            self._scratch = np.empty((SCRATCH_SLOTS, -(-self._sub_chunk_bytes // 64) * 64), np.uint8)
        return self._scratch[slot, : numel * operation.array.itemsize]

    # -------------------------------------------------------------------------------------------------------- breaking

    def _status(self) -> tuple[int, int, str]:
        return self.progress, self.view.step, self._operation.title if self._operation else "between operations"

    def _ended(self, neighbour: Neighbour, connection: Connection, error: P2PTrainError) -> None:
        """A connection is gone. That breaks the session, unless the operation under way can still end well without
        it.
        """
        if not neighbour.leaving:
            self._break(neighbour, error)
            return
        operation, starving = self._operation, neighbour is self._left and connection is neighbour.bulk
        if operation is None or (starving and not operation.schedule.done):
            self._break(neighbour, ConnectionLost("it left the ring"))
        elif self._parted is None:
            self._parted = neighbour

    def _break(self, neighbour: Neighbour | None, error: P2PTrainError) -> None:
        """End the session because of ``neighbour``, or of nobody but this member. The first cause counts."""
        if neighbour is not None:
            kind = ConnectionLost if isinstance(error, Refused) else type(error)
            error = kind(f"lost {neighbour.title}: {error.message}", remedy=error.remedy)
        self._settle(RingBroken(neighbour.peer_id if neighbour is not None else "", error))
        for lost in self.neighbours:
            lost.abort()

    def _settle(self, broken: RingBroken) -> None:
        if self.broken.done():
            return
        self.broken.set_result(broken)
        if self._operation is not None:
            self._operation.news.set()
        if self._watch is not None:
            self._watch.stop()

    def _failure(self) -> P2PTrainError:
        """The error of an operation on a broken session: a new one each time, for each grows its own traceback."""
        cause = self.broken.result().cause
        return type(cause)(cause.message, remedy=cause.remedy)


def _check_buffer(buffer: Array, storage: np.dtype[Any]) -> None:
    if buffer.ndim != 1 or buffer.dtype != storage or not buffer.flags.c_contiguous or not buffer.flags.writeable:
        raise ValueError(f"the buffer must be a contiguous, writable array of shape (numel,) and type {storage}")
