"""Taking a model's tensors from a giver: each verified against a table that leads to the model's id.

Little more than one tensor is in memory: the one that is being placed, and behind it as many as fit
``AHEAD_BYTES``, so that the wire is busy while one is placed and many small ones do not cost a round trip each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from p2ptrain.core.errors import (
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    PeerError,
    ProtocolError,
    Refused,
    ResourceError,
)
from p2ptrain.core.texts import shortened
from roles.model_table import RANGE_BYTES, TableTaker, model_id
from roles.worker.stage_links import QUIET_S, Line
from wire.chain_messages import TensorGone, TensorRecord, TensorRequest, TensorsPage, TensorsRequest
from wire.connection import Connection
from wire.heal_messages import FilesOffer, FilesRequest

AHEAD_BYTES = 32 << 20
SLOWEST_BYTES_S = 64 << 10
"""Bytes a second that a giver gives at least. An uplink of 10 Mbit/s gives so much to 16 receivers at once; at less, a
gigabyte takes longer than 4.5 hours, and who gives so little only keeps memory, and a place, from others."""
BEHIND_S = QUIET_S + RANGE_BYTES / SLOWEST_BYTES_S
"""So far a giver may fall behind that rate: the time of one range, and of a silence that is no death yet."""
T = TypeVar("T")
GIVER = "giver"
"""Code of the refusal that says that whoever gives the tensors is at fault."""


@dataclass(slots=True, eq=False)
class _Wanted:
    record: TensorRecord
    data: bytearray
    parts: list[asyncio.Future[None]] = field(default_factory=list)


class Receiver:
    """One connection to a giver, for one load at a time.

    Args:
        giver: who it is, for people. what: it gives.

    Attributes:
        received_bytes: of tensors.
        turn: held by the load that uses it.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        giver: str,
        *,
        silence_s: float = QUIET_S,
        what: str = "the model",
    ) -> None:
        self._model, self._giver, self._what = model, giver, what
        self._line = Line(connection, silence_s)
        self._page: asyncio.Future[TensorsPage] | None = None
        self._offer: asyncio.Future[FilesOffer] | None = None
        self._streams = 0
        self._left_s = BEHIND_S  # it earns by what it gives, and spends while it is waited for
        self.received_bytes = 0
        self.turn = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Receiver]:
        """Listen inside; afterwards the connection is closed."""
        async with self._line.alive():
            listening = asyncio.create_task(self._listen(), name="receive tensors")
            try:
                yield self
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def closed(self) -> None:
        """Wait until the giver is gone."""
        await self._line.connection.closed.wait()

    def abort(self) -> None:
        """The giver is at fault."""
        self._line.connection.abort()

    def settle(self) -> None:
        """The load ended. Where something that it asked for may still come, the connection is of no more use."""
        if self._line.waits:
            self._line.connection.abort()

    async def table(self, config: str) -> dict[str, TensorRecord]:
        """What the giver has, by name, verified by the model's id.

        Raises:
            Refused: it lies, refuses, or is gone; the giver is named.
        """
        taker = TableTaker()
        with self._named():
            while not taker.complete:
                self._page = self._line.pending()
                self._line.connection.send(TensorsRequest(self._model, len(taker.records)))
                page = await self._given(self._page, 0)
                if page.error:
                    raise ProtocolError(shortened(page.error))
                taker.take_untrusted(page)
                self._earn(sum(len(record.name) for record in page.tensors))
            found = model_id(config, taker.records.values())
            if found != self._model:
                raise ProtocolError(f"its table is that of model {found}, not of {self._model}")
        return taker.records

    async def tensors(self, records: Sequence[TensorRecord]) -> AsyncIterator[tuple[TensorRecord, bytearray]]:
        """The bytes of each, in order. The caller verifies them, on a thread of its own.

        Raises:
            Refused: the giver has them no more, or is gone; it is named.
            ResourceError: no memory for one.
        """
        ahead: deque[_Wanted] = deque()
        rest, ahead_bytes = deque(records), 0
        while rest or ahead:
            with self._named():
                while rest and (not ahead or ahead_bytes + rest[0].size_bytes <= AHEAD_BYTES):
                    ahead.append(self._ask(rest.popleft()))
                    ahead_bytes += ahead[-1].record.size_bytes
                wanted = ahead.popleft()
                for part in wanted.parts:
                    await self._given(part, wanted.record.size_bytes // len(wanted.parts))
            ahead_bytes -= wanted.record.size_bytes
            self.received_bytes += wanted.record.size_bytes
            yield wanted.record, wanted.data

    async def files(self, request: FilesRequest) -> FilesOffer:
        """What a worker has of a checkpoint, as soon as it is durable there. Raises ``Refused`` as ``table``."""
        with self._named():
            self._offer = self._line.pending()
            self._line.connection.send(request)
            offer = await self._line.landed(self._offer)
            if offer.reason:
                raise ProtocolError(shortened(offer.reason))
        return offer

    async def pieces(self, name: str, size_bytes: int, piece_bytes: Callable[[], int]) -> AsyncIterator[bytearray]:
        """The bytes of a file, in order, one piece on its way at most. Raises ``Refused`` as ``tensors``.

        Args:
            piece_bytes: of the next one.
        """
        coming = self._piece(name, 0, min(piece_bytes(), size_bytes)) if size_bytes else None
        while coming is not None:
            data, landing, stop = coming
            with self._named():
                await self._given(landing, len(data))
                coming = self._piece(name, stop, min(stop + piece_bytes(), size_bytes)) if stop < size_bytes else None
            self.received_bytes += len(data)
            yield data

    def _piece(self, name: str, start: int, stop: int) -> tuple[bytearray, asyncio.Future[None], int]:
        self._streams += 1
        data = bytearray(stop - start)
        landing = self._line.post(memoryview(data), stream=self._streams)
        self._line.connection.send(TensorRequest(self._model, name, start, stop, self._streams))
        return data, landing, stop

    def lied(self, record: TensorRecord) -> Refused:
        """The error that tells that other bytes came than the table says."""
        return self._refusal(f"{record.name[:200]} is not what its table says: the bytes have another digest")

    def _ask(self, record: TensorRecord) -> _Wanted:
        try:
            wanted = _Wanted(record, bytearray(record.size_bytes))
        except MemoryError:
            raise ResourceError(f"no memory for {record.name[:80]}: {record.size_bytes} bytes") from None
        view = memoryview(wanted.data)
        for start in range(0, record.size_bytes, RANGE_BYTES):
            stop = min(start + RANGE_BYTES, record.size_bytes)
            self._streams += 1
            wanted.parts.append(self._line.post(view[start:stop], stream=self._streams))
            self._line.connection.send(TensorRequest(self._model, record.name, start, stop, self._streams))
        return wanted

    async def _given(self, waiting: asyncio.Future[T], size_bytes: int) -> T:
        """What was asked for. Raises as ``Line.landed``, and ``DeadlineExceeded`` where the giver is too slow."""
        now = asyncio.get_running_loop().time
        began = now()
        try:
            async with asyncio.timeout(self._left_s):
                found = await self._line.landed(waiting)
        except TimeoutError:
            raise DeadlineExceeded(f"it gives less than {SLOWEST_BYTES_S >> 10} KiB a second") from None
        self._left_s -= now() - began
        self._earn(size_bytes)
        return found

    def _earn(self, size_bytes: int) -> None:
        self._left_s = min(BEHIND_S, self._left_s + size_bytes / SLOWEST_BYTES_S)

    async def _listen(self) -> None:
        try:
            async for message in self._line.messages():
                match message:
                    case TensorsPage() if self._page is not None and not self._page.done():
                        self._page.set_result(message)
                    case FilesOffer() if self._offer is not None and not self._offer.done():
                        self._offer.set_result(message)
                    case TensorGone(_, reason):
                        raise ProtocolError(f"it cannot give what it promised: {shortened(reason)}")
                    case _:
                        raise ProtocolError(f"a giver of tensors sent {type(message).__name__}")
        except P2PTrainError as problem:
            self._line.connection.abort(problem)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (PeerError, NetworkError) as problem:
            raise self._refusal(problem.message) from problem

    def _refusal(self, text: str) -> Refused:
        return Refused(GIVER, f"{self._giver}, who gives {self._what}: {text}", remedy="load it from another copy")
