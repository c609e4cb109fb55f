"""Models of a worker: it sends and receives their tensors, and loads parts from them.

A model travels as a table of its tensors, in pages, and as ranges of their bytes.

The receiver verifies every range against a table, and the table by the model's id. For a part it reads this worker's
own copy if that has the same bytes, and fetches the rest from a sender. A client dials and then sends (purpose
``give``); a worker sends to peers that dial it (purpose ``model``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
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
from p2ptrain.core.ids import is_id, new_id
from p2ptrain.core.serving import round_to_blocks
from p2ptrain.core.tensor_files import TensorTable
from p2ptrain.core.texts import shortened
from p2ptrain.core.threads import Thread
from roles.engine import BuildPart, PartBuilder
from roles.line import QUIET_S, Line
from roles.model_directory import (
    CACHE_FILE,
    DIGEST_BYTES,
    FILE,
    DigestCache,
    ModelDirectory,
    TableReceiver,
    compute_model_id,
    hash_ranges,
    make_page,
    open_model,
)
from roles.worker.context import PeerContext
from roles.worker.part_cache import Part, PartCache, PartKey, part_key
from roles.worker.stage_requests import LoadRequest, printable
from roles.worker.transfer import PieceSource, Receiver, TransferPiece, most_frequent, send_range
from wire.chain_messages import TensorRecord, TensorsPage, TensorsRequest
from wire.connection import Connection
from wire.job_messages import RANGE_BYTES, RangeGone, RangeRequest
from wire.messages import Hello, Message, RefusalCode, Refuse

SLOWEST_BYTES_S = 64 << 10
"""A slower sender is dropped: it keeps memory and a place from others. 10 Mbit/s serve 16 loads at this rate."""
BEHIND_S = QUIET_S + RANGE_BYTES / SLOWEST_BYTES_S
"""Deadline for a range, and for a model's table."""
MAX_PEERS = 64
"""Limit for model senders, and for model receivers. Each has one range in memory at a time."""
MAX_MODELS = 16
"""Model directories that one client may have open for sending."""
GIVE_WAIT_S = 10.0
"""How long a load waits for the client's ``give`` connection."""
MAX_LOADS = 4
"""Parts loaded at a time. Beside its reserved memory, each keeps the tensors that are being received."""
SENDER = "sender"
"""Refusal code: the sender of the tensors is at fault."""
NO_LONGER_OPEN = "the model is no longer available here: the client that opened it, or its job, has left"

OnBytes = Callable[[int, int], None]
"""Called with (bytes placed, bytes in all)."""


# -------------------------------------------------------------------------------------------------------------- sending


async def give(
    connection: Connection,
    model: ModelDirectory,
    disk: Thread,
    *,
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
    line, sent_bytes = Line(connection), 0

    async def read(asked: RangeRequest) -> bytearray:
        return await disk.submit(partial(model.read, asked.name, asked.start, asked.stop))

    async with line.keep_alive():
        async for message in line.messages():
            match message:
                case TensorsRequest() if not is_open():
                    connection.send(TensorsPage(0, [], NO_LONGER_OPEN))
                case RangeRequest() if not is_open():
                    connection.send(RangeGone(NO_LONGER_OPEN))
                case TensorsRequest(name, first) if name == model.model and 0 <= first < len(model.records):
                    connection.send(make_page(model.records, first))
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

    def __init__(self, model: str, thread: Thread) -> None:
        self._model = model

        async def digest(data: memoryview) -> bytes:
            return await thread.submit(partial(hash_ranges, data))

        self._receiver: Receiver[PieceSource] = Receiver(digest, slowest_bytes_s=SLOWEST_BYTES_S)
        self._table_turn = asyncio.Lock()  # a page does not say for which load it is
        self._page: tuple[str, asyncio.Future[TensorsPage]] | None = None  # the sender that was asked, and its answer
        self._loads = 0

    @property
    def sources(self) -> list[str]:
        """Names of the senders that are connected."""
        return [source.name for source in self._receiver.sources.values()]

    async def serve(self, connection: Connection, sender: str) -> None:
        await self._receiver.serve(*self._source(connection, sender))

    @asynccontextmanager
    async def taking(self, connection: Connection, sender: str) -> AsyncIterator[ModelReceiver]:
        async with self._receiver.attached(*self._source(connection, sender)):
            yield self

    def _source(self, connection: Connection, sender: str) -> tuple[PieceSource, Callable[[Message], None]]:
        self._loads += 1
        source = PieceSource(f"{sender} {self._loads}", sender, Line(connection))

        def heard(message: Message) -> None:
            asked, page = self._page or (None, None)
            if not isinstance(message, TensorsPage) or asked != source.id or page is None or page.done():
                raise ProtocolError(f"unexpected message {type(message).__name__} from a sender of tensors")
            page.set_result(message)

        return source, heard

    async def table(self, config: str) -> dict[str, TensorRecord]:
        """Return the model's table, by tensor name, verified by the model's id. Raises ``Refused`` if every sender
        failed or refused; the message names them."""
        failed: set[str] = set()
        while source := next((each for id, each in self._receiver.sources.items() if id not in failed), None):
            records = await self._table_of(source)
            if records is not None:
                if (model_id := compute_model_id(config, records.values())) == self._model:
                    return records
                self._drop(source, ProtocolError(f"its table is that of model {model_id}, not of {self._model}"))
            failed.add(source.id)
        raise self._refusal()

    async def common_table(self) -> dict[str, TensorRecord]:
        """The table that most senders have, of what has no id. The other senders are dropped. Raises as ``table``."""
        found = list[tuple[PieceSource, str, dict[str, TensorRecord]]]()
        for source in list(self._receiver.sources.values()):
            if (records := await self._table_of(source)) is not None:
                found.append((source, compute_model_id("", records.values()), records))
        if (common := most_frequent(table_id for _, table_id, _ in found)) is None:
            raise self._refusal()
        for source, table_id, _ in found:
            if table_id != common:
                self._drop(source, ProtocolError("its files are not those that most workers have"))
        return next(records for _, table_id, records in found if table_id == common)

    def _drop(self, source: PieceSource, problem: P2PTrainError) -> None:
        source.line.connection.abort(problem)
        self._receiver.problems[source.name] = problem.message

    async def _table_of(self, source: PieceSource) -> dict[str, TensorRecord] | None:
        """None: the source does not send one, and is dropped."""
        try:
            async with self._table_turn, asyncio.timeout(BEHIND_S):
                return await self._read_table(source)
        except TimeoutError:
            self._drop(source, DeadlineExceeded(f"it sends less than {SLOWEST_BYTES_S >> 10} KiB a second"))
        except (NetworkError, ProtocolError) as problem:
            self._drop(source, problem)
        return None

    async def _read_table(self, source: PieceSource) -> dict[str, TensorRecord]:
        recipient = TableReceiver()
        while not recipient.is_complete:
            waiter: asyncio.Future[TensorsPage] = source.line.new_waiter()
            self._page = source.id, waiter
            source.line.connection.send(TensorsRequest(self._model, len(recipient.records)))
            page = await source.line.wait_for(waiter)
            if page.error:
                raise ProtocolError(shortened(page.error))
            recipient.take_untrusted(page)
        return recipient.records

    async def tensors(
        self, records: Sequence[TensorRecord], *, ahead_bytes: int = 32 << 20
    ) -> AsyncIterator[tuple[TensorRecord, bytearray]]:
        """Yield each record and its verified bytes, in order. ``ahead_bytes``: requested beyond the tensor that is
        placed next, which keeps the link busy.

        Raises:
            Refused: every sender failed or no longer has the bytes; the message names them.
            ResourceError: no memory for a tensor.
        """
        self._loads += 1
        load = self._loads
        ahead: deque[tuple[TensorRecord, bytearray, list[tuple[int, str, int]]]] = deque()
        rest, asked_bytes = deque(records), 0
        try:
            while rest or ahead:
                while rest and (not ahead or asked_bytes + rest[0].size_bytes <= ahead_bytes):
                    record = rest.popleft()
                    ahead.append((record, *self._wanted(load, record)))
                    asked_bytes += record.size_bytes
                record, data, keys = ahead[0]
                try:
                    await self._receiver.fetch(keys)
                except NetworkError:
                    raise self._refusal() from None
                ahead.popleft()
                asked_bytes -= record.size_bytes
                yield record, data
        finally:
            for _, _, keys in ahead:
                for key in keys:
                    self._receiver.forget(key)

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

    def _refusal(self) -> Refused:
        reasons = "; ".join(f"the sender {name}: {why}" for name, why in self._receiver.problems.items())
        return Refused(SENDER, reasons or "the model has no sender", remedy="load it from another copy")


# ------------------------------------------------------------------------------------------------------------- loading


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
        self._under_way: dict[PartKey, asyncio.Event] = {}  # set when a load ends

    @asynccontextmanager
    async def turn(self, request: LoadRequest) -> AsyncIterator[None]:
        """Serialize the loads of one part. A load before may have finished it: check the cache inside.

        Raises:
            Refused: ``MAX_LOADS`` other parts are being loaded.
        """
        key = part_key(request.model, request.spec(self._device))
        while (other := self._under_way.get(key)) is not None:
            await other.wait()
        if len(self._under_way) >= MAX_LOADS:
            text = f"{MAX_LOADS} other parts are being loaded by this worker"
            raise Refused(RefusalCode.BUSY, text, remedy="try again later")
        self._under_way[key] = asyncio.Event()
        try:
            yield
        finally:
            self._under_way.pop(key).set()

    async def load(self, request: LoadRequest, receiver: ModelReceiver, *, on_bytes: OnBytes) -> tuple[Part, int, int]:
        """Put the part into the cache. Returns it, and the bytes that were read from the worker's own copy, and those
        that were received. The caller must hold the part before it awaits anything, because an idle part may be
        unloaded.

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
        need_bytes = builder.weights_bytes + round_to_blocks(request.positions) * builder.cache_position_bytes
        reservation = object()
        try:
            # Before the first byte is received, so that no load fails late for lack of room; and before parts are
            # unloaded, because others ask for memory meanwhile.
            unloaded = self._cache.make_room(need_bytes, f"{what} and {request.positions} positions of sessions")
            self._cache.reserve(reservation, need_bytes)
            await self._unload(unloaded)
            own = await self._own(request.path)
            read_bytes, received_bytes = await self._place_all(builder, wanted, own, receiver, on_bytes)
            engine = await self._compute.run(builder.finish)
        finally:
            self._cache.release(reservation)
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
        """Returns the bytes that were read, and those that were received."""
        total_bytes, done_bytes = sum(record.size_bytes for record in wanted), 0
        from_sender: list[TensorRecord] = []

        async def place(record: TensorRecord, data: bytearray) -> None:
            nonlocal done_bytes
            await self._compute.run(builder.place, record.name, record.dtype, memoryview(data))
            done_bytes += record.size_bytes
            on_bytes(done_bytes, total_bytes)

        for record in wanted:
            data = await self._read(own, record) if own is not None else None
            if data is not None:
                await place(record, data)
            else:
                from_sender.append(record)
        read_bytes = done_bytes
        async for record, data in receiver.tensors(from_sender):
            await place(record, data)
        return read_bytes, total_bytes - read_bytes

    async def _own(self, path: str) -> TensorTable | None:
        if not path:
            return None
        with suppress(StorageError, ConfigError):
            return await self._disk.submit(partial(TensorTable, Path(path)))
        return None

    async def _read(self, own: TensorTable, record: TensorRecord) -> bytearray | None:
        entry = own.entries.get(record.name)
        if entry is None or (entry.dtype, list(entry.shape)) != (record.dtype, record.shape):
            return None

        def read() -> bytearray | None:
            data = own.read(record.name)
            return data if hash_ranges(data) == record.digest else None

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


# ------------------------------------------------------------------------------------------------- a worker's models


class SharedModels:
    """The models that a worker sends on behalf of its clients, and those that clients send to it.

    Args:
        directory: the worker's own.

    Attributes:
        disk: the thread that reads models and hashes what is received.
    """

    def __init__(self, context: PeerContext, directory: Path) -> None:
        self._context = context
        self.disk = context.world.threads.start("model files")
        self._hasher = context.world.threads.start("model digests")  # apart, because hashing takes minutes
        self._hashing = asyncio.Lock()
        self._digests = DigestCache(context.world.disk, directory / CACHE_FILE)
        self._opened: dict[Hashable, dict[str, ModelDirectory]] = {}  # by client, and by the model's id
        self._recipients = 0
        self._senders: dict[tuple[str, str], ModelReceiver] = {}  # by the client's peer id and the model's id
        self._sender_came = asyncio.Condition()

    def close(self) -> None:
        self.disk.close()
        self._hasher.close()

    def decide(self, hello: Hello, client_ids: set[str]) -> Refuse | None:
        """Decide on a peer of purpose ``model`` or ``give``. ``client_ids``: peer ids of the connected clients."""
        match hello.purpose:
            case "model" if self.find(hello.job) is None:
                return Refuse("unknown-model", f"model {hello.job[:40]!r} is not open here", "first send model.open")
            case "model" if self._recipients >= MAX_PEERS:
                return Refuse(RefusalCode.BUSY, f"{MAX_PEERS} peers fetch models from this worker", "try again later")
            case "give" if hello.peer_id not in client_ids:
                return Refuse(RefusalCode.NOT_A_MEMBER, "a peer that sends a model must be a client of this worker")
            case "give" if not is_id(hello.job):
                return Refuse(RefusalCode.PROTOCOL, f"invalid model id {hello.job[:40]!r}")
            case "give" if sum(len(receiver.sources) for receiver in self._senders.values()) >= MAX_PEERS:
                return Refuse(RefusalCode.BUSY, f"{MAX_PEERS} connections send models to this worker", "close some")
        return None

    # --------------------------------------------------------------------------------------------------------- sending

    async def open(self, client: Hashable, path: str) -> ModelDirectory:
        """Open the model at ``path`` for a client. Raises ``P2PTrainError``: there is none, or too many are open."""
        async with self._hashing:
            opened = self._opened.setdefault(client, {})
            if len(opened) >= MAX_MODELS:  # checked under the lock: earlier requests are counted
                raise Refused(RefusalCode.FULL, f"this client has opened {MAX_MODELS} models already, the limit")
            model = await self._hasher.submit(partial(open_model, Path(path), self._digests))
            opened[model.model] = model
        return model

    def find(self, model: str) -> ModelDirectory | None:
        return next((opened[model] for opened in self._opened.values() if model in opened), None)

    def forget(self, client: Hashable) -> None:
        """A client has left: nothing is sent for it any more."""
        self._opened.pop(client, None)

    async def send(self, connection: Connection, model: ModelDirectory) -> None:
        self._recipients += 1
        try:
            await give(connection, model, self.disk, is_open=lambda: self.find(model.model) is not None)
        finally:
            self._recipients -= 1

    # ------------------------------------------------------------------------------------------------------- receiving

    @asynccontextmanager
    async def receiver(self, client_id: str, request: LoadRequest) -> AsyncIterator[ModelReceiver]:
        """Receive the tensors of a load from the sender that it names, or from the client. Raises ``Refused``."""
        model, place = request.model, request.sender
        if place is None:
            yield await self._receiver_from(client_id, model)
            return
        hello = self._context.hello("model", model)
        try:
            connection, welcome = await self._context.dial(place.peer, place.host, place.port, hello)
        except P2PTrainError as problem:
            text = f"cannot reach the sender of the model: {problem.message}"
            raise Refused(SENDER, text, remedy=problem.remedy or "load it from another copy") from problem
        receiver = ModelReceiver(model, self.disk)
        async with receiver.taking(connection, printable(welcome.name)):
            yield receiver

    async def _receiver_from(self, client_id: str, model: str) -> ModelReceiver:
        """Return the receiver for the client's ``give`` connections; waits until the first one. Raises ``Refused``.

        Several programs may share a client id. If one stops sending, the others continue.
        """
        key = client_id, model
        try:
            async with asyncio.timeout(GIVE_WAIT_S), self._sender_came:
                await self._sender_came.wait_for(lambda: key in self._senders and self._senders[key].sources)
        except TimeoutError:
            text = f"the client did not connect to send model {model} within {GIVE_WAIT_S:g} s"
            raise Refused(SENDER, text, remedy="dial with purpose give, and the model as job") from None
        return self._senders[key]

    async def serve_sender(self, connection: Connection, hello: Hello) -> None:
        """Take what a client sends over its ``give`` connection, until it ends."""
        key = hello.peer_id, hello.job
        receiver = self._senders.setdefault(key, ModelReceiver(hello.job, self.disk))
        try:
            async with self._sender_came:
                self._sender_came.notify_all()  # who waits runs after ``serve`` has registered the source
            await receiver.serve(connection, printable(hello.name))
        finally:
            if not receiver.sources and self._senders.get(key) is receiver:
                del self._senders[key]
