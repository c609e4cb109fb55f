"""Verified transfer: pieces of a named object from several sources, a digest for each, resumable.

``Transfer`` is the pure core. It knows no clock, sockets or memory. All wanted pieces wait in one queue that serves
every source, so a faster source sends more. A piece counts when its bytes have the wanted digest. When a source is lost
or sent wrong bytes, the pieces asked of it go back to the front of the queue.

``Receiver`` is the shell. It asks sources for ranges of bytes (``RangeRequest``), which land in their destination.
``send_range`` is the sending side. Healing, models and checkpoint files differ in what they want and whom they trust.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Hashable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    StorageError,
)
from p2ptrain.core.texts import shortened
from roles.line import QUIET_S, Line
from wire.job_messages import RANGE_BYTES, RangeGone, RangeRequest
from wire.messages import Message

WINDOW = 4
"""Pieces asked of the fastest source at a time: they keep its link busy for a round trip."""

V = TypeVar("V", bound=Hashable)


def most_frequent(values: Iterable[V]) -> V | None:
    """The most frequent value, of a tie the first one. None if there are no values."""
    counted = Counter(values).most_common(1)  # which keeps the order of insertion
    return counted[0][0] if counted else None


# ------------------------------------------------------------------------------------------------------------- the core


@dataclass(frozen=True, slots=True)
class RangeQuery:
    source: str
    key: Hashable


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Close the connection to ``source``, which sent wrong bytes."""

    source: str
    reason: str


@dataclass(slots=True)
class _Known:
    has: Container[Hashable] = ()
    under_way: list[Hashable] = field(default_factory=list)  # in the order of asking
    piece_s: float = 0.0  # moving average of the time between two arrivals; 0: none arrived yet
    busy_since: float = 0.0  # when the source began to send the next piece


class Transfer:
    def __init__(self) -> None:
        self._wanted: dict[Hashable, bytes] = {}
        self._landed: dict[Hashable, bytes] = {}  # digests of the bytes that landed, right or wrong
        self._waiting: deque[Hashable] = deque()
        self._sources: dict[str, _Known] = {}

    @property
    def complete(self) -> bool:
        return not self._waiting and not any(known.under_way for known in self._sources.values())

    def has(self, key: Hashable) -> bool:
        wanted = self._wanted.get(key)
        return wanted is not None and key in self._landed and wanted in (b"", self._landed[key])

    def validate(self) -> None:
        under_way = [key for known in self._sources.values() for key in known.under_way if key in self._wanted]
        queued = [*under_way, *self._waiting]
        assert len(queued) == len(set(queued)), "a piece is asked for twice"
        assert set(queued) == {key for key in self._wanted if not self.has(key)}, "a piece was forgotten"
        assert all(len(known.under_way) <= WINDOW for known in self._sources.values())

    def want(self, key: Hashable, digest: bytes) -> None:
        if self._wanted.get(key) == digest:
            return
        fresh = key not in self._wanted or self.has(key)
        self._wanted[key] = digest
        if fresh and not self.has(key):
            self._waiting.append(key)
        elif self.has(key):
            self._drop_from_queue(key)

    def forget(self, key: Hashable) -> None:
        self._wanted.pop(key, None)
        self._landed.pop(key, None)
        self._drop_from_queue(key)

    def offers(self, source: str, has: Container[Hashable], now: float) -> list[RangeQuery]:
        self._sources.setdefault(source, _Known()).has = has
        return self.asks(now)

    def lost(self, source: str, now: float) -> list[RangeQuery]:
        former = self._sources.pop(source, None)
        if former is not None:
            self._give_back(former.under_way)
        return self.asks(now)

    def drop_request(self, source: str, key: Hashable) -> None:
        known = self._sources.get(source)
        if known is not None and key in known.under_way:
            known.under_way.remove(key)
            self._give_back([key])

    def arrived(self, source: str, key: Hashable, digest: bytes, now: float) -> list[RangeQuery | GiveUp]:
        """Handle the arrival of a piece that was asked of ``source``; its bytes have ``digest``."""
        known = self._sources.get(source)
        if known is None or key not in known.under_way:
            return []  # the source was given up in the meantime
        known.under_way.remove(key)
        took_s = max(now - known.busy_since, 0.0)
        known.piece_s = (3 * known.piece_s + took_s) / 4 if known.piece_s else took_s
        known.busy_since = now
        if key in self._wanted:
            self._landed[key] = digest
            if not self.has(key):
                self._give_back([key])
                return [
                    GiveUp(source, "the bytes that it sent have another digest"),
                    *self.lost(source, now),
                ]
        return list(self.asks(now))

    def asks(self, now: float) -> list[RangeQuery]:
        """Fill the sources' windows from the queue: each piece goes to the source that would finish it first."""
        asks: list[RangeQuery] = []
        while (ask := self._next()) is not None:
            known = self._sources[ask.source]
            if not known.under_way:
                known.busy_since = now
            known.under_way.append(ask.key)
            self._waiting.remove(ask.key)
            self._landed.pop(ask.key, None)  # it is being overwritten
            asks.append(ask)
        return asks

    def _next(self) -> RangeQuery | None:
        fastest_s = min((known.piece_s for known in self._sources.values() if known.piece_s), default=0.0)
        order = sorted(self._sources.items(), key=lambda item: (len(item[1].under_way) + 1) * item[1].piece_s)
        for source, known in order:
            # A slow or unknown source has one piece under way, so the end of the transfer does not wait long for it.
            window = max(1, round(WINDOW * fastest_s / known.piece_s)) if known.piece_s else 1
            if len(known.under_way) < window:
                key = next((key for key in self._waiting if key in known.has), None)
                if key is not None:
                    return RangeQuery(source, key)
        return None

    def _give_back(self, keys: list[Hashable]) -> None:
        self._waiting.extendleft(key for key in reversed(keys) if key in self._wanted and not self.has(key))

    def _drop_from_queue(self, key: Hashable) -> None:
        if key in self._waiting:
            self._waiting.remove(key)


# ------------------------------------------------------------------------------------------------------------ receiving


@dataclass(frozen=True, slots=True)
class TransferPiece:
    """Bytes [start, stop) of ``name``, and where they land. An empty ``digest``: a larger unit is verified instead."""

    name: str
    start: int
    stop: int
    into: memoryview
    digest: bytes = b""


class AllPieces:
    """The pieces of a source that has the whole object."""

    def __contains__(self, key: object) -> bool:
        return True


class Source:
    """A connection to a sender. ``name``: for people."""

    def __init__(self, id: str, name: str, line: Line) -> None:
        self.id, self.name, self.line = id, name, line
        self.streams = 0
        self.asked: dict[int, tuple[Hashable, int, asyncio.TimerHandle | None]] = {}  # stream → key, bytes, deadline

    def end(self, reason: str) -> None:
        self.line.connection.abort(ProtocolError(reason))


class Receiver:
    """Receives pieces from several sources.

    Args:
        now: seconds.
        digest: hashes a piece that has landed, as ``TransferPiece.digest``.
        on_landed: called with the source and the key of each verified piece.
        on_dropped: called when a source no longer has a piece. Without it, such a source is at fault.
        slowest_bytes_s: a source that sends less is given up; 0: no limit.

    Attributes:
        problems: source's name → why it stopped sending.
    """

    def __init__(
        self,
        now: Callable[[], float],
        digest: Callable[[memoryview], Awaitable[bytes]],
        *,
        on_landed: Callable[[Source, Hashable], None] = lambda source, key: None,
        on_dropped: Callable[[Source, Hashable], None] | None = None,
        slowest_bytes_s: float = 0.0,
    ) -> None:
        self._now, self._digest, self._on_landed, self._on_dropped = now, digest, on_landed, on_dropped
        self._slowest_bytes_s = slowest_bytes_s
        self._core = Transfer()
        self._pieces: dict[Hashable, TransferPiece] = {}
        self._judging: set[asyncio.Task[None]] = set()
        self._ended_bytes = 0
        self.sources: dict[str, Source] = {}
        self.problems: dict[str, str] = {}
        self.changed = asyncio.Event()

    @property
    def received_bytes(self) -> int:
        return self._ended_bytes + sum(each.line.connection.bytes_in for each in self.sources.values())

    @property
    def complete(self) -> bool:
        return self._core.complete

    def has(self, key: Hashable) -> bool:
        return self._core.has(key)

    def want(self, key: Hashable, piece: TransferPiece) -> None:
        self._pieces[key] = piece
        self._core.want(key, piece.digest)

    def forget(self, key: Hashable) -> None:
        self._core.forget(key)
        self._pieces.pop(key, None)

    def offers(self, source: Source, has: Container[Hashable]) -> None:
        if source.id in self.sources:
            self._carry_out(self._core.offers(source.id, has, self._now()))

    def ask(self) -> None:
        self._carry_out(self._core.asks(self._now()))

    async def serve(self, source: Source, heard: Callable[[Message], None]) -> None:
        """Listen to ``source`` until it is gone. Then its missing pieces are asked of other sources. ``heard`` handles
        all other messages and raises ``ProtocolError`` if no correct source sends them."""
        self.sources[source.id] = source
        connection, problem = source.line.connection, "it closed the connection"
        try:
            async with source.line.keep_alive():
                async for message in source.line.messages():
                    if isinstance(message, RangeGone):
                        self.dropped_untrusted(source, message)
                    else:
                        heard(message)
                    self.changed.set()
                cause = connection.close_cause
            if cause is not None and not isinstance(cause, ConnectionLost):
                problem = cause.message
        except P2PTrainError as error:
            problem = error.message
        except asyncio.CancelledError:
            problem = ""  # the caller has enough
            raise
        finally:
            del self.sources[source.id]
            self._ended_bytes += connection.bytes_in
            for _, _, timer in source.asked.values():
                if timer is not None:
                    timer.cancel()
            if problem:
                self.problems[source.name] = problem
            self._carry_out(self._core.lost(source.id, self._now()))
            self.changed.set()

    @asynccontextmanager
    async def attached(self, source: Source, heard: Callable[[Message], None]) -> AsyncIterator[None]:
        """Run ``serve`` in the background while the context is open."""
        serving = asyncio.create_task(self.serve(source, heard), name="receive")
        await asyncio.sleep(0)  # lets ``serve`` register the source
        try:
            yield
        finally:
            source.line.connection.abort()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def until(self, satisfied: Callable[[], bool], *, waits: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``satisfied`` returns True. Raises ``NetworkError`` with each source's problem if no source is
        left. ``waits``: whether a source may still come while there is none."""
        while not satisfied():
            if not self.sources and not waits():
                reasons = "; ".join(f"{name}: {problem}" for name, problem in self.problems.items())
                raise NetworkError(reasons or "there is no source")
            self.changed.clear()
            await self.changed.wait()

    def _carry_out(self, instructions: Iterable[RangeQuery | GiveUp]) -> None:
        for instruction in instructions:
            source = self.sources.get(instruction.source)
            if source is None:
                continue
            if isinstance(instruction, GiveUp):
                source.end(instruction.reason)
            else:
                self._ask(source, instruction.key)

    def _ask(self, source: Source, key: Hashable) -> None:
        piece = self._pieces[key]
        source.streams += 1
        stream = source.streams
        with suppress(ConnectionLost):  # ``serve`` notices too, and the piece goes back to the queue
            connection = source.line.connection
            landed = partial(self._landed, source, stream)
            connection.post(piece.into, generation=0, stream=stream, done=landed)
            connection.send(RangeRequest(piece.name, piece.start, piece.stop, stream))
            timer = None
            if self._slowest_bytes_s:
                owed_bytes = sum(size for _, size, _ in source.asked.values()) + piece.into.nbytes
                patience_s = QUIET_S + owed_bytes / self._slowest_bytes_s
                slow = f"it sends less than {self._slowest_bytes_s / 1024:.0f} KiB a second"
                timer = asyncio.get_running_loop().call_later(patience_s, connection.abort, DeadlineExceeded(slow))
            source.asked[stream] = key, piece.into.nbytes, timer

    def _taken(self, source: Source, stream: int) -> Hashable | None:
        key, _, timer = source.asked.pop(stream, (None, 0, None))
        if timer is not None:
            timer.cancel()
        return key

    def _landed(self, source: Source, stream: int) -> None:
        key = self._taken(source, stream)
        piece = self._pieces.get(key)
        if piece is not None and piece.digest:
            task = asyncio.create_task(self._judge(source, key, piece), name="judge")
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)
        else:
            self._arrived(source, key, b"")

    async def _judge(self, source: Source, key: Hashable, piece: TransferPiece) -> None:
        self._arrived(source, key, await self._digest(piece.into))

    def _arrived(self, source: Source, key: Hashable, digest: bytes) -> None:
        instructions = self._core.arrived(source.id, key, digest, self._now())
        if self._core.has(key):
            self._on_landed(source, key)
        self._carry_out(instructions)
        self.ask()
        self.changed.set()

    def dropped_untrusted(self, source: Source, message: RangeGone) -> None:
        key = self._taken(source, message.stream)
        if key is None or self._on_dropped is None:
            raise ProtocolError(f"it cannot send what it offered: {shortened(message.reason)}")
        self._core.drop_request(source.id, key)
        self._on_dropped(source, key)
        self.ask()


# -------------------------------------------------------------------------------------------------------------- sending


async def send_range(
    line: Line,
    asked: RangeRequest,
    read: Callable[[RangeRequest], Awaitable[bytes | bytearray | memoryview]],
    *,
    most_bytes: int = RANGE_BYTES,
) -> int:
    """Send the requested range, which ``read`` returns. Returns its size, or 0 if the bytes are no longer there.

    Raises:
        ProtocolError: the request is out of bounds.
        DeadlineExceeded: the receiver accepts no bytes.
    """
    size = asked.stop - asked.start
    if not 0 <= asked.start < asked.stop or size > most_bytes or not 0 <= asked.stream < 1 << 31:
        raise ProtocolError(f"invalid range: bytes {asked.start} to {asked.stop}; the limit is {most_bytes} at a time")
    try:
        data = await read(asked)
    except StorageError as problem:
        line.connection.send(RangeGone(asked.stream, shortened(problem.message)))
        return 0
    line.connection.send_bulk(memoryview(data), generation=0, stream=asked.stream)
    await line.wait_sent()  # waits for a slow receiver, as long as it accepts something
    return size
