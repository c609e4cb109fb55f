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
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from p2ptrain.core.background import Background
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

WINDOW = 2
"""Pieces asked of a source at a time: one travels while the one before is verified."""

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


@dataclass(slots=True)
class _Known:
    has: Container[Hashable] = ()
    under_way: list[Hashable] = field(default_factory=list)


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

    def want(self, key: Hashable, digest: bytes) -> None:
        if self._wanted.get(key) == digest:
            return
        fresh = key not in self._wanted or self.has(key)
        self._wanted[key] = digest
        if self.has(key):
            self._drop_from_queue(key)
        elif fresh:
            self._waiting.append(key)

    def forget(self, key: Hashable) -> None:
        self._wanted.pop(key, None)
        self._landed.pop(key, None)
        self._drop_from_queue(key)

    def offers(self, source: str, has: Container[Hashable]) -> list[RangeQuery]:
        self._sources.setdefault(source, _Known()).has = has
        return self.asks()

    def lost(self, source: str) -> list[RangeQuery]:
        former = self._sources.pop(source, None)
        if former is not None:
            self._give_back(former.under_way)
        return self.asks()

    def arrived(self, source: str, key: Hashable, digest: bytes) -> list[RangeQuery | GiveUp]:
        """Handle the arrival of a piece that was asked of ``source``; its bytes have ``digest``."""
        known = self._sources.get(source)
        if known is None or key not in known.under_way:
            return []  # the source was given up in the meantime
        known.under_way.remove(key)
        if key in self._wanted:
            self._landed[key] = digest
            if not self.has(key):
                self._give_back([key])
                return [GiveUp(source), *self.lost(source)]
        return list(self.asks())

    def asks(self) -> list[RangeQuery]:
        """Fill the sources' windows from the queue, first those with the fewest pieces under way."""
        asks: list[RangeQuery] = []
        while (ask := self._next()) is not None:
            self._sources[ask.source].under_way.append(ask.key)
            self._waiting.remove(ask.key)
            self._landed.pop(ask.key, None)  # it is being overwritten
            asks.append(ask)
        return asks

    def _next(self) -> RangeQuery | None:
        for source, known in sorted(self._sources.items(), key=lambda item: len(item[1].under_way)):
            if len(known.under_way) < WINDOW:
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


@dataclass(frozen=True, slots=True)
class _AskedRange:
    key: Hashable
    size_bytes: int
    deadline: asyncio.TimerHandle | None


class PieceSource:
    """A connection to a sender. ``name``: for people.

    Attributes:
        streams: number of ranges asked for so far; the number of each is its stream.
        asked: by stream, the ranges that have not arrived.
    """

    def __init__(self, id: str, name: str, line: Line) -> None:
        self.id, self.name, self.line = id, name, line
        self.streams = 0
        self.asked: dict[int, _AskedRange] = {}

    def end(self, reason: str) -> None:
        self.line.connection.abort(ProtocolError(reason))


S = TypeVar("S", bound=PieceSource)


class Receiver(Generic[S]):
    """Receives pieces from several sources.

    Args:
        digest: hashes a piece that has landed, as ``TransferPiece.digest``.
        on_landed: called with the source and the key of each verified piece.
        slowest_bytes_s: a source that sends less is given up; 0: no limit.

    Attributes:
        problems: source's name → why it stopped sending.
    """

    def __init__(
        self,
        digest: Callable[[memoryview], Awaitable[bytes]],
        *,
        on_landed: Callable[[S, Hashable], None] = lambda source, key: None,
        slowest_bytes_s: float = 0.0,
    ) -> None:
        self._digest, self._on_landed = digest, on_landed
        self._slowest_bytes_s = slowest_bytes_s
        self._core = Transfer()
        self._pieces: dict[Hashable, TransferPiece] = {}
        self._verifying = Background()
        self.sources: dict[str, S] = {}
        self.problems: dict[str, str] = {}
        self.changed = asyncio.Event()

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

    def offers(self, source: S, has: Container[Hashable] | None = None) -> None:
        """Ask ``source`` for pieces that it has. None: it has the whole object."""
        if source.id in self.sources:
            self._carry_out(self._core.offers(source.id, self._pieces if has is None else has))

    async def serve(self, source: S, heard: Callable[[Message], None]) -> None:
        """Listen to ``source`` until it is gone. Then its missing pieces are asked of other sources. ``heard`` handles
        all other messages and raises ``ProtocolError`` if no correct source sends them."""
        self.sources[source.id] = source
        connection, problem = source.line.connection, "it closed the connection"
        try:
            async with source.line.keep_alive():
                async for message in source.line.messages():
                    if isinstance(message, RangeGone):
                        raise ProtocolError(f"it cannot send what it offered: {shortened(message.reason)}")
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
            for stream in list(source.asked):
                self._end_request(source, stream)
            if problem:
                self.problems[source.name] = problem
            self._carry_out(self._core.lost(source.id))
            self.changed.set()

    @asynccontextmanager
    async def attached(self, source: S, heard: Callable[[Message], None]) -> AsyncIterator[None]:
        """Run ``serve`` in the background while the context is open."""
        serving = asyncio.create_task(self.serve(source, heard), name="receive")
        await asyncio.sleep(0)  # lets ``serve`` register the source
        try:
            yield
        finally:
            source.line.connection.abort()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def fetch(self, keys: Sequence[Hashable]) -> None:
        """Ask all sources for these pieces, which are wanted, wait for them, and forget them. Raises as ``until``."""
        for source in list(self.sources.values()):
            self.offers(source)
        await self.until(lambda: all(map(self.has, keys)))
        for key in keys:
            self.forget(key)

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
                source.end("the bytes that it sent have another digest")
            else:
                self._ask(source, instruction.key)

    def _ask(self, source: S, key: Hashable) -> None:
        piece = self._pieces[key]
        source.streams += 1
        stream = source.streams
        with suppress(ConnectionLost):  # ``serve`` notices too, and the piece goes back to the queue
            connection = source.line.connection
            connection.post(piece.into, generation=0, stream=stream, done=partial(self._take, source, stream))
            connection.send(RangeRequest(piece.name, piece.start, piece.stop, stream))
            deadline = None
            if self._slowest_bytes_s:
                owed_bytes = sum(asked.size_bytes for asked in source.asked.values()) + piece.into.nbytes
                patience_s = QUIET_S + owed_bytes / self._slowest_bytes_s
                slow = f"it sends less than {self._slowest_bytes_s / 1024:.0f} KiB a second"
                deadline = asyncio.get_running_loop().call_later(patience_s, connection.abort, DeadlineExceeded(slow))
            source.asked[stream] = _AskedRange(key, piece.into.nbytes, deadline)

    def _end_request(self, source: PieceSource, stream: int) -> Hashable | None:
        asked = source.asked.pop(stream, None)
        if asked is not None and asked.deadline is not None:
            asked.deadline.cancel()
        return asked.key if asked is not None else None

    def _take(self, source: S, stream: int) -> None:
        key = self._end_request(source, stream)
        self._verifying.start(self._verify(source, key, self._pieces.get(key)), "verify")

    async def _verify(self, source: S, key: Hashable, piece: TransferPiece | None) -> None:
        digest = await self._digest(piece.into) if piece is not None and piece.digest else b""
        instructions = self._core.arrived(source.id, key, digest)
        if self._core.has(key):
            self._on_landed(source, key)
        self._carry_out([*instructions, *self._core.asks()])
        self.changed.set()


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
        line.connection.send(RangeGone(shortened(problem.message)))
        return 0
    line.connection.send_bulk(memoryview(data), generation=0, stream=asked.stream)
    await line.wait_sent()  # waits for a slow receiver, as long as it accepts something
    return size
