"""One view's ring, running: carries out the schedules of ``ring.collectives`` over connections to the neighbours.

Connections. Each member dials its right neighbour and is dialled by its left one. *Bulk* connections carry payloads in
one direction, left to right, one a stream (``ring.lanes``); the *beat* carries the left one's heartbeats and the right
one's acknowledgements. So a beat never waits behind a gigabyte, and the event loop answers it whatever the compute
thread does.

Operations. All members submit the same operations in the same order; each has the next stream number, so frames of
different operations cannot mix. Several may be under way: what the next one sends follows the last bytes of the one
before, so gradients can go into the ring while others are still computed. A small all-reduce is gathered whole and
summed by everybody in rank order: n - 1 hops instead of 2n - 2, and the same bits everywhere.

Ends. A session that lost a neighbour is *broken* for good, and says who it was (``ring.bonds``). A neighbour that is
still busy with the last operation, which a member that left has finished, may finish it too, for all that it needs from
the leaver lies ahead of the end of its connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from p2ptrain.core.errors import ConnectionLost, P2PTrainError
from p2ptrain.core.world import World
from ring import collectives
from ring.bonds import Bonds, RingBroken
from ring.codecs import Codec
from ring.collectives import Schedule
from ring.cutting import LEAST_SUB_CHUNK_BYTES, MOST_SUB_CHUNK_BYTES, cut
from ring.detector import Memory
from ring.dtypes import Array, storage_dtype, sum_into
from ring.lanes import Residual
from ring.links import Inbound, Kin
from ring.liveness import AT_WORK, Neighbour
from ring.meeting import Meeting
from ring.operations import Operation, Operations
from ring.view import MAX_STREAMS, MAX_SUB_CHUNK_BYTES, MIN_SUB_CHUNK_BYTES, View
from wire.connection import Connection

__all__ = ["Inbound", "RingBroken", "RingSession", "RingStats"]

PATIENCE_S = 120.0
SMALL_BYTES = 128 << 10
"""An all-reduce whose members' arrays together are no longer than this is gathered whole: hops cost more than bytes."""


@dataclass(frozen=True, slots=True)
class RingStats:
    """Running totals of all connections; ``rtt_ms`` is to the right neighbour, None before the first beat."""

    bytes_in: int
    bytes_out: int
    rtt_ms: float | None


class RingSession:
    """A member's place in the ring of one view. Made by ``form``; ended by ``close``, or by the loss of a neighbour.

    Attributes:
        rank, size: this member's, and how many there are.
        broken: resolves to ``RingBroken`` as soon as the session can do no more, for whatever reason.
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
        memory: Memory | None = None,
    ) -> None:
        self.view = view
        self.rank, self.size = rank, view.size
        self._world = world
        self._sub_chunk_bytes = sub_chunk_bytes
        self._spare: list[npt.NDArray[np.uint8]] = []  # memory of small operations, as many as were ever under way
        self._operations = Operations(
            clock=world.clock,
            generation=view.generation,
            left=left,
            right=right,
            give_up=self._give_up,
            lost=self._lost,
        )
        self._bonds = Bonds(
            clock=world.clock,
            view=view,
            rank=rank,
            left=left,
            right=right,
            memory=memory or Memory(),
            status=self._status,
            on_end=self._ended,
            on_beat=self._operations.judge_pace,
            on_broken=self._settle,
        )
        self.broken = self._bonds.broken

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
        sub_chunk_bytes: int = 0,
        streams: int = 1,
        timeout_s: float,
        kin: Kin = Kin.RING,
    ) -> RingSession:
        """Connect to both neighbours, and wait until every member of the view has done so.

        Args:
            seed_host: dialled for members whose own host is empty.
            heartbeat_s, death_s: beat interval, and the silence after which a neighbour counts as dead.
            sub_chunk_bytes: reduced and passed on as one piece, the same on every member, over far links; 0: near ones,
                chosen by the size of each array.
            streams: bulk connections to a neighbour, the same on every member.
            kin: which of the rings in which a member may be in one view.

        Raises:
            ValueError: ``peer_id`` is no member, or a number is not possible.
            Refused: the right neighbour is in a newer view.
            NeighbourAway: the right neighbour could not be reached within ``ring.meeting.DIAL_PART`` of ``timeout_s``.
            DeadlineExceeded: a member was not there within ``timeout_s``.
            ConnectionLost, ProtocolError: a member went away meanwhile, or spoke nonsense.
        """
        rank = view.rank_of(peer_id)
        if rank is None:
            raise ValueError(f"{peer_id} is no member of generation {view.generation}")
        if sub_chunk_bytes and not MIN_SUB_CHUNK_BYTES <= sub_chunk_bytes <= MAX_SUB_CHUNK_BYTES:
            raise ValueError(f"sub-chunks of {sub_chunk_bytes} bytes, 8 to {MAX_SUB_CHUNK_BYTES} are possible")
        if not 1 <= streams <= MAX_STREAMS:
            raise ValueError(f"{streams} streams, 1 to {MAX_STREAMS} are possible")
        inbound.expect(view.job, view.generation)
        if view.size == 1:
            return cls(world=world, view=view, rank=0, left=None, right=None, sub_chunk_bytes=sub_chunk_bytes)
        deadline = world.clock.now() + timeout_s
        meeting = Meeting(world, view, peer_id, name, seed_host, inbound, kin, streams)
        right, left = view.right_of(rank), view.left_of(rank)
        to_right, from_left = await meeting.neighbours(right, left, timeout_s=timeout_s)
        session = cls(
            world=world,
            view=view,
            rank=rank,
            left=from_left,
            right=to_right,
            sub_chunk_bytes=sub_chunk_bytes,
            memory=inbound.memory,
        )
        try:
            await session.barrier(patience_s=deadline - world.clock.now())
        except BaseException:  # cancelled, perhaps in the instant when all were there: nobody else knows of the session
            session.close("the member gave up")
            raise
        assert session._bonds.watch is not None
        session._bonds.watch.begin_beats(heartbeat_s, death_s)
        return session

    def close(self, reason: str = "the view ended") -> None:
        """Leave the ring, without waiting (``wait_closed`` does). Operations under way fail, here and everywhere."""
        self._bonds.close(f"this member left the ring: {reason}", reason, orderly=not self._operations.under_way)

    def lost_elsewhere(self, broken: RingBroken) -> None:
        """Another ring of this view broke, and this one ends with it: its neighbours hear who was lost there, or they
        would take this member for it."""
        if not self._bonds.lost_elsewhere(broken):
            self.close(broken.cause.message)

    async def wait_closed(self) -> None:
        """After ``close`` or a break: wait until nothing of the session is left, a second at most."""
        await self._bonds.wait_closed()

    @property
    def broken_by(self) -> RingBroken | None:
        """Why the session ended, None while it lives."""
        return self.broken.result() if self.broken.done() else None

    # ------------------------------------------------------------------------------------------------------ operations

    def submit(
        self,
        buffer: Array,
        dtype: str | None = None,
        *,
        codec: Codec | None = None,
        residual: Residual | None = None,
        patience_s: float = PATIENCE_S,
    ) -> asyncio.Future[None]:
        """Replace ``buffer`` by the sum over all members' buffers, bit-equal on all of them. Does not wait.

        Args:
            buffer: shape (numel,), contiguous and writable, the same on every member. Not to be touched until the
                future is done. To cancel the future breaks the session.
            dtype: the elements' type where it is not ``buffer.dtype``: ``"bfloat16"`` is stored as uint16.
            codec: how elements travel, the same on every member; None: as they are. For float32 only. A small array, or
                that of a ring of one, travels as it is.
            residual: shape (numel,), float32: this member's error feedback. What the codec lost of it and of the
                buffer is in it afterwards, and goes into the next sum of the same elements.
            patience_s: without any progress for so long the ring counts as broken.

        Returns:
            a future that fails with DeadlineExceeded, naming the neighbour, where there was no progress for
            ``patience_s``; with ConnectionLost or ProtocolError where the session broke. ``broken_by`` tells by whom.

        Raises:
            ValueError: the buffer is not as described.
            ConnectionLost, ProtocolError, DeadlineExceeded: the session was broken before.
        """
        dtype = dtype or buffer.dtype.name
        _check_buffer(buffer, storage_dtype(dtype))
        if codec is not None and dtype != "float32":
            raise ValueError(f"codec {codec.name} is for float32, the buffer's elements are {dtype}")
        if residual is not None:
            _check_buffer(residual, np.dtype(np.float32))
            if residual.size != buffer.size:
                raise ValueError(f"a residual of {residual.size} elements for a buffer of {buffer.size}")
        operation = self._begin("all-reduce", patience_s)
        if self.size * buffer.nbytes <= min(SMALL_BYTES, self._sub_chunk_bytes or SMALL_BYTES):
            return self._gathered(operation, buffer, dtype)
        lanes = self._operations.lanes
        cuts = cut(
            buffer.size,
            buffer.itemsize,
            members=self.size,
            lanes=len(lanes),
            sub_chunk_bytes=self._sub_chunk_bytes,
            block_numel=codec.block_numel if codec is not None else 1,
        )
        for lane, (start, stop, sub_chunk_numel, depth) in zip(lanes, cuts, strict=False):
            schedule = collectives.all_reduce(self.rank, self.size, stop - start, sub_chunk_numel, depth)
            feedback = residual[start:stop] if residual is not None else None
            self._operations.add(operation, lane, schedule, buffer[start:stop], dtype, sub_chunk_numel, codec, feedback)
        return self._operations.start(operation)

    async def all_reduce(
        self,
        buffer: Array,
        dtype: str | None = None,
        *,
        codec: Codec | None = None,
        residual: Residual | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``submit``, and wait. What that says of the future's errors is raised here."""
        await self.submit(buffer, dtype, codec=codec, residual=residual, patience_s=patience_s)

    async def broadcast(self, buffer: Array, root: int, *, patience_s: float = PATIENCE_S) -> None:
        """Replace every member's ``buffer``, of any type, by the one of rank ``root``. Otherwise as ``all_reduce``."""
        _check_buffer(buffer, buffer.dtype)
        raw = buffer.view(np.uint8)
        sub_chunk_numel = self._sub_chunk_bytes or min(max(raw.size // 16, LEAST_SUB_CHUNK_BYTES), MOST_SUB_CHUNK_BYTES)
        schedule = collectives.broadcast(self.rank, self.size, raw.size, sub_chunk_numel, root=root)
        await self._run("broadcast", schedule, raw, sub_chunk_numel, patience_s)

    async def all_gather(self, mine: bytes, *, patience_s: float = PATIENCE_S) -> list[bytes]:
        """Every member's bytes, in rank order; all bring equally many. Errors as ``all_reduce``."""
        each = len(mine)
        gathered = np.empty(self.size * each, np.uint8)
        gathered[self.rank * each : (self.rank + 1) * each] = np.frombuffer(mine, np.uint8)
        sub_chunk_numel = self._sub_chunk_bytes or MOST_SUB_CHUNK_BYTES
        schedule = collectives.all_gather(self.rank, self.size, gathered.size, sub_chunk_numel)
        await self._run("all-gather", schedule, gathered, sub_chunk_numel, patience_s)
        return [gathered[rank * each : (rank + 1) * each].tobytes() for rank in range(self.size)]

    async def barrier(self, *, patience_s: float = PATIENCE_S) -> None:
        """Return only after every member has called it. Errors as ``all_reduce``."""
        schedule = collectives.barrier(self.rank, self.size)
        await self._run("barrier", schedule, np.zeros(self.size, np.uint8), 1, patience_s)

    def audit(self) -> None:
        """Hash all bytes of the operations to come. All members call it between the same two operations."""
        for lane in self._operations.lanes:
            lane.audit()

    def take_hop_sums(self) -> tuple[int, int]:
        """Sums (xxh3-64) of all bytes sent to the right, and of those received from the left, since the last time.

        Where all members ask between the same two operations, the left neighbour's first is this one's second, or the
        hop between them spoils what it carries. (0, 0) where nothing is audited.
        """
        pairs = [lane.take_sums() for lane in self._operations.lanes]
        sent, received = b"".join(pair[0] for pair in pairs), b"".join(pair[1] for pair in pairs)
        return (xxhash.xxh3_64_intdigest(sent), xxhash.xxh3_64_intdigest(received)) if sent else (0, 0)

    # ------------------------------------------------------------------------------------------------------ for people

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Left and right; none in a ring of one."""
        return self._bonds.neighbours

    @property
    def progress(self) -> int:
        """Sub-chunks received so far, and whatever else the owner counts; it goes out with every beat."""
        return self._operations.progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._operations.progress = value

    @property
    def waited_s(self) -> float:
        """Running total: how long the left neighbour sent nothing, for what comes next had not begun at its side."""
        return self._operations.waited_s

    @property
    def bytes_in(self) -> int:
        return sum(connection.bytes_in for neighbour in self.neighbours for connection in neighbour.connections)

    @property
    def bytes_out(self) -> int:
        return sum(connection.bytes_out for neighbour in self.neighbours for connection in neighbour.connections)

    @property
    def stats(self) -> RingStats:
        watch = self._bonds.watch
        return RingStats(self.bytes_in, self.bytes_out, watch.rtt_ms if watch is not None else None)

    # ---------------------------------------------------------------------------------------------- running operations

    async def _run(self, title: str, schedule: Schedule, array: Array, sub_chunk_numel: int, patience_s: float) -> None:
        """One schedule over bytes, on the first lane."""
        operation = self._begin(title, patience_s)
        for lane in self._operations.lanes[:1]:
            self._operations.add(operation, lane, schedule, array, "uint8", sub_chunk_numel)
        await self._operations.start(operation)

    def _gathered(self, operation: Operation, buffer: Array, dtype: str) -> asyncio.Future[None]:
        """A small all-reduce: every member gets all arrays and adds them up in rank order."""
        memory = (
            self._spare.pop() if self._spare else np.empty(SMALL_BYTES, np.uint8)
        )  # new pages cost as much as a hop
        parts = memory[: self.size * buffer.nbytes].view(buffer.dtype).reshape(self.size, buffer.size)
        parts[self.rank] = buffer

        def finish() -> None:
            for part in parts[1:]:
                sum_into(parts[0], part, dtype)
            buffer[:] = parts[0]
            self._spare.append(memory)

        operation.finish = finish
        schedule = collectives.all_gather(self.rank, self.size, parts.size, max(buffer.size, 1))
        for lane in self._operations.lanes[:1]:
            self._operations.add(operation, lane, schedule, parts.reshape(-1), dtype, max(buffer.size, 1))
        return self._operations.start(operation)

    def _begin(self, title: str, patience_s: float) -> Operation:
        if self.broken.done():
            raise self._bonds.failure()
        return self._operations.begin(title, patience_s)

    # -------------------------------------------------------------------------------------------------------- breaking

    def _status(self) -> tuple[int, int, str]:
        return self.progress, self.view.step, self._operations.title or AT_WORK

    def _ended(self, neighbour: Neighbour, connection: Connection, error: P2PTrainError) -> None:
        """A connection is gone. That breaks the session, unless the operations under way can still end well without
        it.
        """
        if not neighbour.leaving:
            self._bonds.lost(neighbour, connection, error)
        elif not self._operations.ends_without(neighbour, connection):
            self._give_up(neighbour, ConnectionLost("it left the ring"))

    def _lost(self, connection: Connection, error: P2PTrainError) -> None:
        self._bonds.lost(self._bonds.whose(connection), connection, error)

    def _give_up(self, neighbour: Neighbour | None, error: P2PTrainError) -> None:
        self._bonds.give_up(neighbour, error)

    def _settle(self) -> None:
        self._operations.settle(self._bonds.failure)


def _check_buffer(buffer: Array, storage: np.dtype[Any]) -> None:
    if buffer.ndim != 1 or buffer.dtype != storage or not buffer.flags.c_contiguous or not buffer.flags.writeable:
        raise ValueError(f"the buffer must be a contiguous, writable array of shape (numel,) and type {storage}")
