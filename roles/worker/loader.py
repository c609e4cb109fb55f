"""Loading a part: each tensor that it owns, from this worker's own copy where that is the same, else from a giver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from p2ptrain.core.errors import ConfigError, ProtocolError, Refused, StorageError
from p2ptrain.core.ids import new_id
from p2ptrain.core.tensor_files import TensorTable
from p2ptrain.core.threads import Thread
from p2ptrain.core.world import World
from roles.compute_thread import ComputeThread
from roles.engine import BuildPart, PartBuilder
from roles.model_directory import table_of
from roles.model_table import FILE, digest_of
from roles.worker.parts import Part, PartKey, Shelf, part_key
from roles.worker.receiver import Receiver
from roles.worker.stage_requests import LoadRequest
from wire.chain_messages import PartLoading, TensorRecord
from wire.handshake import RefusalCode
from wire.messages import Message

MAX_LOADS = 4
"""Parts on their way at a time: each has, beside what it reserves, the tensors in memory that are being received."""
LOADING_S = 0.25
"""A client hears so often how far its part is."""

OnBytes = Callable[[int, int], None]
"""Told of (bytes placed, bytes in all)."""


@dataclass(slots=True)
class _UnderWay:
    """A part that is being loaded, and those who wait for it. ``told``: how far it is."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    told: list[OnBytes] = field(default_factory=list)

    def tell(self, done_bytes: int, total_bytes: int) -> None:
        for each in self.told:
            each(done_bytes, total_bytes)


class Loader:
    """Makes parts. Loads of different parts do not wait for one another, for how long one takes its giver decides; who
    wants a part that is on its way waits for it, as long as its giver is fast enough (``receiver.SLOWEST_BYTES_S``).

    Args:
        disk: the thread that reads and hashes.
        unload: lets parts go that are in the way.
    """

    def __init__(
        self,
        world: World,
        shelf: Shelf,
        compute: ComputeThread,
        disk: Thread,
        build_part: BuildPart,
        unload: Callable[[list[Part]], Awaitable[None]],
    ) -> None:
        self._world, self._shelf, self._compute, self._disk = world, shelf, compute, disk
        self._build_part, self._unload = build_part, unload
        self._under_way: dict[PartKey, _UnderWay] = {}

    @asynccontextmanager
    async def turn(self, request: LoadRequest, on_bytes: OnBytes) -> AsyncIterator[OnBytes]:
        """Nobody else loads the same part inside: who came first may have done so, meanwhile.

        Args:
            on_bytes: told of the part while it is on its way, whoever loads it.

        Yields:
            what is to be told by who loads it.

        Raises:
            Refused: ``MAX_LOADS`` other parts are on their way.
        """
        key = part_key(request.model, request.spec)
        if key not in self._under_way and len(self._under_way) >= MAX_LOADS:
            raise Refused(
                RefusalCode.BUSY, f"{MAX_LOADS} other parts are being loaded by this worker", remedy="try again later"
            )
        under_way = self._under_way.setdefault(key, _UnderWay())
        under_way.told.append(on_bytes)
        try:
            async with under_way.turn:
                yield under_way.tell
        finally:
            under_way.told.remove(on_bytes)
            if not under_way.told:
                del self._under_way[key]

    async def load(
        self, request: LoadRequest, receiver: Receiver, *, on_bytes: OnBytes, on_shelf: Callable[[Part], None]
    ) -> int:
        """Put the part on the shelf; how many bytes were read from this worker's own copy.

        Args:
            on_shelf: called with the part in the moment in which it is there: it must be held, or may go again.

        Raises:
            Refused: no room; the giver lies or is gone; the model is another one than the config says.
            ConfigError, ResourceError: as ``roles.engine.BuildPart``.
        """
        spec, what = request.spec, f"layers {request.spec.start} to {request.spec.stop} of {request.name}"
        records = await receiver.table(spec.config)
        names = tuple(name for name, record in records.items() if record.dtype != FILE)
        builder = await self._compute.run(self._build_part, spec, names)
        wanted = _owned_untrusted(builder, records)
        need_bytes = builder.weights_bytes + request.sessions_bytes(builder.cache_position_bytes)
        me = object()
        try:
            # All of it before the first byte is taken: who hears later that the caches have no room loaded in vain.
            await self._make_room(me, need_bytes, f"{what} and {request.positions} positions of sessions")
            own = await self._own(request.path)
            read_bytes = await self._place_all(builder, wanted, own, receiver, on_bytes)
            engine = await self._compute.run(builder.finish)
        finally:
            self._shelf.release(me)
        part = Part(new_id(), request.model, request.name, spec, engine, self._world.clock.now())
        self._shelf.parts[part.id] = part
        on_shelf(part)
        return read_bytes

    async def _make_room(self, who: object, need_bytes: int, what: str) -> None:
        """Room for ``who``, in place of what it had reserved. It is reserved at once: others ask for memory, too, while
        parts that are in the way are let go."""
        self._shelf.release(who)
        gone = self._shelf.check_number()
        try:
            gone += self._shelf.make_room(need_bytes, what)
            self._shelf.reserve(who, need_bytes)
        finally:
            await self._unload(gone)

    async def _place_all(
        self,
        builder: PartBuilder,
        wanted: list[TensorRecord],
        own: TensorTable | None,
        receiver: Receiver,
        on_bytes: OnBytes,
    ) -> int:
        total_bytes = sum(record.size_bytes for record in wanted)
        done_bytes = read_bytes = 0
        from_giver: list[TensorRecord] = []
        for record in wanted:
            data = await self._read(own, record) if own is not None else None
            if data is None:
                from_giver.append(record)
                continue
            await self._compute.run(builder.place, record.name, record.dtype, memoryview(data))
            read_bytes += record.size_bytes
            done_bytes += record.size_bytes
            on_bytes(done_bytes, total_bytes)
        async for record, data in receiver.tensors(from_giver):
            if await self._disk.submit(partial(digest_of, data)) != record.digest:
                receiver.abort()
                raise receiver.lied(record)
            await self._compute.run(builder.place, record.name, record.dtype, memoryview(data))
            done_bytes += record.size_bytes
            on_bytes(done_bytes, total_bytes)
        return read_bytes

    async def _own(self, path: str) -> TensorTable | None:
        """This worker's copy, where it has one that can be read."""
        if not path:
            return None
        with suppress(StorageError, ConfigError):
            return await self._disk.submit(partial(table_of, Path(path)))
        return None

    async def _read(self, own: TensorTable, record: TensorRecord) -> bytearray | None:
        """The tensor from the own copy; None where that is not the same tensor."""
        entry = own.entries.get(record.name)
        if entry is None or (entry.dtype, list(entry.shape)) != (record.dtype, record.shape):
            return None

        def read() -> bytearray | None:
            data = own.read(record.name)
            return data if digest_of(data) == record.digest else None

        with suppress(StorageError):
            return await self._disk.submit(read)
        return None


class Progress:
    """Tells a client how far its part is, now and then."""

    def __init__(self, say: Callable[[Message], None], now: Callable[[], float]) -> None:
        self._say, self._now = say, now
        self._told_at = -LOADING_S

    def tell(self, done_bytes: int, total_bytes: int) -> None:
        if self._now() - self._told_at >= LOADING_S or done_bytes == total_bytes:
            self._told_at = self._now()
            self._say(PartLoading(done_bytes, total_bytes))


def _owned_untrusted(builder: PartBuilder, records: dict[str, TensorRecord]) -> list[TensorRecord]:
    """The records of what ``builder`` wants.

    Raises:
        ProtocolError: the model has other tensors than its config says. No memory was taken for them.
    """
    owned = []
    for name, shape in builder.wanted.items():
        record = records.get(name)
        if record is None or record.dtype == FILE or tuple(record.shape) != tuple(shape):
            found = "is missing" if record is None else f"has shape {record.shape}"
            text = f"{name[:80]} {found}, and by its config the model has it with {list(shape)}"
            raise ProtocolError(text, remedy="is config.json that of these weights?")
        owned.append(record)
    return owned
