"""Sending and receiving a model's tensors: its table in pages, its bytes in ranges; and loading parts from them.

The receiver verifies every range against a table, and the table by the model's id. For a part it reads this worker's
own copy if that has the same bytes, and fetches the rest from a sender. A client dials and then sends (purpose
``give``); a worker sends to peers that dial it (purpose ``model``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from p2ptrain.core.errors import (
    ConfigError,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
    ResourceError,
    StorageError,
)
from p2ptrain.core.ids import new_id
from p2ptrain.core.tensor_files import TensorTable
from p2ptrain.core.texts import shortened
from p2ptrain.core.threads import Thread
from roles.engine import BuildPart, PartBuilder
from roles.line import QUIET_S, Line
from roles.model_directory import (
    DIGEST_BYTES,
    FILE,
    ModelDirectory,
    TableReceiver,
    digest_of,
    model_id,
    page_of,
    table_of,
)
from roles.worker.context import PeerContext
from roles.worker.part_cache import Part, PartCache, PartKey, part_key
from roles.worker.stage_requests import LoadRequest
from roles.worker.transfer import AllPieces, Receiver, Source, TransferPiece, send_range
from wire.chain_messages import TensorRecord, TensorsPage, TensorsRequest
from wire.connection import Connection
from wire.job_messages import RANGE_BYTES, RangeGone, RangeRequest
from wire.messages import Message, RefusalCode

SLOWEST_BYTES_S = 64 << 10
"""A slower sender is dropped: it keeps memory and a place from others. 10 Mbit/s serve 16 loads at this rate."""
BEHIND_S = QUIET_S + RANGE_BYTES / SLOWEST_BYTES_S
"""Deadline for a range, and for a model's table."""
MAX_LOADS = 4
"""Parts loaded at a time. Beside its reserved memory, each keeps the tensors that are being received."""
SENDER = "sender"
"""Refusal code: the sender of the tensors is at fault."""
NO_LONGER_OPEN = "the model is no longer available here: the client that opened it has left"

OnBytes = Callable[[int, int], None]
"""Called with (bytes placed, bytes in all)."""


# -------------------------------------------------------------------------------------------------------------- sending


async def give(
    connection: Connection,
    model: ModelDirectory,
    disk: Thread,
    *,
    silence_s: float = QUIET_S,
    is_open: Callable[[], bool] = lambda: True,
) -> int:
    """Answer one receiver until it closes. Returns the bytes of tensors sent.

    Args:
        disk: the thread that reads.
        is_open: whether the model may still be sent; later requests are refused.

    Raises:
        ProtocolError: the receiver sent an invalid request.
        DeadlineExceeded: it was silent for too long, or accepts no bytes.
    """
    line, sent_bytes = Line(connection, silence_s), 0

    async def read(asked: RangeRequest) -> bytearray:
        return await disk.submit(partial(model.read, asked.name, asked.start, asked.stop))

    async with line.keep_alive():
        async for message in line.messages():
            match message:
                case TensorsRequest() if not is_open():
                    connection.send(TensorsPage(0, [], NO_LONGER_OPEN))
                case RangeRequest() if not is_open():
                    connection.send(RangeGone(message.stream, NO_LONGER_OPEN))
                case TensorsRequest(name, first) if name == model.model and 0 <= first < len(model.records):
                    connection.send(page_of(model.records, first))
                case TensorsRequest(name):
                    connection.send(TensorsPage(0, [], f"this connection does not send model {name[:40]}"))
                case RangeRequest():
                    sent_bytes += await send_range(line, message, read)
                case _:
                    raise ProtocolError(f"unexpected message {type(message).__name__} from a receiver of tensors")
    return sent_bytes


# ------------------------------------------------------------------------------------------------------------ receiving


class ModelReceiver:
    """Receives one model's tensors from its senders, for several loads at a time. ``thread`` hashes the bytes."""

    def __init__(self, now: Callable[[], float], model: str, thread: Thread) -> None:
        self._model = model

        async def digest(data: memoryview) -> bytes:
            return await thread.submit(partial(digest_of, data))

        self._receiver = Receiver(now, digest, slowest_bytes_s=SLOWEST_BYTES_S)
        self._pages: dict[str, asyncio.Future[TensorsPage]] = {}
        self._loads = 0

    @property
    def sources(self) -> int:
        return len(self._receiver.sources)

    async def serve(self, connection: Connection, sender: str) -> None:
        await self._receiver.serve(*self._source(connection, sender))

    @asynccontextmanager
    async def taking(self, connection: Connection, sender: str) -> AsyncIterator[ModelReceiver]:
        async with self._receiver.attached(*self._source(connection, sender)):
            yield self

    def _source(self, connection: Connection, sender: str) -> tuple[Source, Callable[[Message], None]]:
        self._loads += 1
        source = Source(f"{sender} {self._loads}", sender, Line(connection, QUIET_S))

        def heard(message: Message) -> None:
            page = self._pages.get(source.id)
            if not isinstance(message, TensorsPage) or page is None or page.done():
                raise ProtocolError(f"unexpected message {type(message).__name__} from a sender of tensors")
            page.set_result(message)

        return source, heard

    async def table(self, config: str) -> dict[str, TensorRecord]:
        """Return the model's table, by tensor name, verified by the model's id. Raises ``Refused`` if every sender
        failed or refused; the message names them."""
        while self._receiver.sources:
            source = next(iter(self._receiver.sources.values()))
            try:
                async with asyncio.timeout(BEHIND_S):
                    return await self._table_of(source, config)
            except TimeoutError:
                problem: P2PTrainError = DeadlineExceeded(f"it sends less than {SLOWEST_BYTES_S >> 10} KiB a second")
            except (NetworkError, ProtocolError) as error:
                problem = error
            finally:
                self._pages.pop(source.id, None)
            source.line.connection.abort(problem)
            await self._receiver.until(partial(self._without, source), waits=lambda: True)
            self._receiver.problems.setdefault(source.name, problem.message)
        raise self._refusal()

    async def _table_of(self, source: Source, config: str) -> dict[str, TensorRecord]:
        recipient = TableReceiver()
        while not recipient.complete:
            waiting = self._pages[source.id] = source.line.new_waiter()
            source.line.connection.send(TensorsRequest(self._model, len(recipient.records)))
            page = await source.line.wait_for(waiting)
            if page.error:
                raise ProtocolError(shortened(page.error))
            recipient.take_untrusted(page)
        found = model_id(config, recipient.records.values())
        if found != self._model:
            raise ProtocolError(f"its table is that of model {found}, not of {self._model}")
        return recipient.records

    async def tensors(self, records: Sequence[TensorRecord]) -> AsyncIterator[tuple[TensorRecord, bytearray]]:
        """Yield each record and its verified bytes, in order.

        Raises:
            Refused: every sender failed or no longer has the bytes; the message names them.
            ResourceError: no memory for a tensor.
        """
        self._loads += 1
        load, receiver = self._loads, self._receiver
        ahead: deque[tuple[TensorRecord, bytearray, list[tuple[int, str, int]]]] = deque()
        rest, ahead_bytes = deque(records), 0
        try:
            while rest or ahead:
                # Request up to 32 MiB beyond the tensor that is placed next, which keeps the link busy.
                while rest and (not ahead or ahead_bytes + rest[0].size_bytes <= (32 << 20)):
                    record = rest.popleft()
                    ahead.append((record, *self._wanted(load, record)))
                    ahead_bytes += record.size_bytes
                for source in list(receiver.sources.values()):
                    receiver.offers(source, AllPieces())
                record, data, keys = ahead[0]
                try:
                    await receiver.until(lambda keys=keys: all(map(receiver.has, keys)))  # type: ignore[misc]
                except NetworkError:
                    raise self._refusal() from None
                for key in keys:
                    receiver.forget(key)
                ahead.popleft()
                ahead_bytes -= record.size_bytes
                yield record, data
        finally:
            for _, _, keys in ahead:
                for key in keys:
                    receiver.forget(key)

    def _wanted(self, load: int, record: TensorRecord) -> tuple[bytearray, list[tuple[int, str, int]]]:
        try:
            data = bytearray(record.size_bytes)
        except MemoryError:
            raise ResourceError(f"no memory for {record.name[:80]}: {record.size_bytes} bytes") from None
        keys = []
        for number, start in enumerate(range(0, record.size_bytes, RANGE_BYTES)):
            stop = min(start + RANGE_BYTES, record.size_bytes)
            digest = record.digest[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
            keys.append((load, record.name, start))
            self._receiver.want(keys[-1], TransferPiece(record.name, start, stop, memoryview(data)[start:stop], digest))
        return data, keys

    def _without(self, source: Source) -> bool:
        return source.id not in self._receiver.sources

    def _refusal(self) -> Refused:
        reasons = "; ".join(f"the sender {name}: {why}" for name, why in self._receiver.problems.items())
        return Refused(SENDER, reasons or "the model has no sender", remedy="load it from another copy")


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(slots=True)
class _UnderWay:
    """A part that is being loaded. ``listeners``: progress callbacks of all clients that wait for it."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    listeners: list[OnBytes] = field(default_factory=list)

    def report(self, done_bytes: int, total_bytes: int) -> None:
        for each in self.listeners:
            each(done_bytes, total_bytes)


class Loader:
    """Loads parts. Different parts load at the same time, because the sender decides how long one takes. A client whose
    part is already being loaded waits for it, as long as its sender is fast enough.

    Args:
        disk: the thread that reads and hashes.
        device: the device on which parts compute.
        unload: frees parts that are in the way.
    """

    def __init__(
        self,
        context: PeerContext,
        cache: PartCache,
        disk: Thread,
        build_part: BuildPart,
        device: str,
        unload: Callable[[list[Part]], Awaitable[None]],
    ) -> None:
        self._cache, self._compute, self._disk, self._now = cache, context.compute, disk, context.world.clock.now
        self._build_part, self._device, self._unload = build_part, device, unload
        self._under_way: dict[PartKey, _UnderWay] = {}

    @asynccontextmanager
    async def turn(self, request: LoadRequest, on_bytes: OnBytes) -> AsyncIterator[OnBytes]:
        """Serialize the loads of one part. A load before may have finished it: check the cache inside.

        Args:
            on_bytes: gets the progress of this part, whichever client loads it.

        Yields:
            the callback that the loading client calls with its progress.

        Raises:
            Refused: ``MAX_LOADS`` other parts are being loaded.
        """
        key = part_key(request.model, request.spec(self._device))
        if key not in self._under_way and len(self._under_way) >= MAX_LOADS:
            raise Refused(
                RefusalCode.BUSY, f"{MAX_LOADS} other parts are being loaded by this worker", remedy="try again later"
            )
        under_way = self._under_way.setdefault(key, _UnderWay())
        under_way.listeners.append(on_bytes)
        try:
            async with under_way.turn:
                yield under_way.report
        finally:
            under_way.listeners.remove(on_bytes)
            if not under_way.listeners:
                del self._under_way[key]

    async def load(self, request: LoadRequest, receiver: ModelReceiver, *, on_bytes: OnBytes) -> tuple[Part, int, int]:
        """Put the part into the cache. Returns it, the bytes read from the own copy, and the bytes received.

        The caller must hold the part before it awaits anything, because an idle part may be unloaded.

        Raises:
            Refused: no room; the sender failed; the model does not fit its config.
            ConfigError, ResourceError: as ``roles.engine.BuildPart``.
        """
        spec = request.spec(self._device)
        what = f"layers {spec.start} to {spec.stop - 1} of {request.title}"
        records = await receiver.table(spec.config)
        names = tuple(name for name, record in records.items() if record.dtype != FILE)
        builder = await self._compute.run(self._build_part, spec, names)
        wanted = _owned_untrusted(builder, records)
        need_bytes = builder.weights_bytes + request.positions * builder.cache_position_bytes
        me = object()
        try:
            # Before the first byte is received, so that no load fails late for lack of room; and before parts are
            # unloaded, because others ask for memory meanwhile.
            unloaded = self._cache.make_room(need_bytes, f"{what} and {request.positions} positions of sessions")
            self._cache.reserve(me, need_bytes)
            await self._unload(unloaded)
            own = await self._own(request.path)
            read_bytes, received_bytes = await self._place_all(builder, wanted, own, receiver, on_bytes)
            engine = await self._compute.run(builder.finish)
        finally:
            self._cache.release(me)
        part = Part(new_id(), request.model, request.title, spec, engine, self._now())
        self._cache.parts[part.id] = part
        return part, read_bytes, received_bytes

    async def _place_all(
        self,
        builder: PartBuilder,
        wanted: list[TensorRecord],
        own: TensorTable | None,
        receiver: ModelReceiver,
        on_bytes: OnBytes,
    ) -> tuple[int, int]:
        total_bytes = sum(record.size_bytes for record in wanted)
        done_bytes = read_bytes = 0
        from_sender: list[TensorRecord] = []
        for record in wanted:
            data = await self._read(own, record) if own is not None else None
            if data is None:
                from_sender.append(record)
                continue
            await self._compute.run(builder.place, record.name, record.dtype, memoryview(data))
            read_bytes += record.size_bytes
            done_bytes += record.size_bytes
            on_bytes(done_bytes, total_bytes)
        async for record, data in receiver.tensors(from_sender):
            await self._compute.run(builder.place, record.name, record.dtype, memoryview(data))
            done_bytes += record.size_bytes
            on_bytes(done_bytes, total_bytes)
        return read_bytes, total_bytes - read_bytes

    async def _own(self, path: str) -> TensorTable | None:
        if not path:
            return None
        with suppress(StorageError, ConfigError):
            return await self._disk.submit(partial(table_of, Path(path)))
        return None

    async def _read(self, own: TensorTable, record: TensorRecord) -> bytearray | None:
        entry = own.entries.get(record.name)
        if entry is None or (entry.dtype, list(entry.shape)) != (record.dtype, record.shape):
            return None

        def read() -> bytearray | None:
            data = own.read(record.name)
            return data if digest_of(data) == record.digest else None

        with suppress(StorageError):
            return await self._disk.submit(read)
        return None


def _owned_untrusted(builder: PartBuilder, records: dict[str, TensorRecord]) -> list[TensorRecord]:
    """Return the records of the tensors that ``builder`` wants. Allocates nothing for them. Raises ``ProtocolError`` if
    the model's tensors do not fit its config."""
    owned = []
    for name, shape in builder.wanted.items():
        record = records.get(name)
        if record is None or record.dtype == FILE or tuple(record.shape) != tuple(shape):
            found = "is missing" if record is None else f"has shape {record.shape}"
            text = f"{name[:80]} {found}, but the model's config requires shape {list(shape)}"
            raise ProtocolError(text, remedy="check that config.json belongs to these weights")
        owned.append(record)
    return owned
