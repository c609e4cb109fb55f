"""The model that a chain serves, and who gives its tensors to the stages that lack them: this client, or a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from p2ptrain.core.errors import P2PTrainError, UserError
from p2ptrain.core.threads import Thread
from roles.chain.around import Around, WorkerAt
from roles.model_directory import CACHE_FILE, DigestCache, ModelDirectory, open_model
from roles.model_table import FILE, digest_of
from roles.worker.giver import give
from roles.worker.receiver import Receiver
from wire.chain_messages import TensorRecord
from wire.handshake import dial, local_hello

DIAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the client of a chain knows it.

    Attributes:
        id: hex of blake2b over its config and the name, dtype, shape and digest of each tensor.
        name: for people.
        config: its ``config.json``.
        source: of this machine, from which this client gives; None where ``giver`` does.
        giver: the worker that gives, for as long as this client is connected to it.
        path: where workers may have it themselves, which saves the wire; empty where nobody says so.
    """

    id: str
    name: str
    config: str
    source: ModelDirectory | None = None
    giver: WorkerAt | None = None
    path: str = ""

    def load_params(self, worker: WorkerAt) -> dict[str, Any]:
        """Of ``part.load``: what the model is, and who gives it to ``worker``."""
        about = {"model": self.id, "name": self.name, "config": self.config, "path": self.path}
        if self.giver is None:
            return about | {"giver": "caller", "giver_peer": "", "giver_host": "", "giver_port": 0}
        place = {"giver_peer": self.giver.peer_id, "giver_host": self.giver.seen_from(worker)}
        return about | {"giver": "peer", **place, "giver_port": self.giver.port}


async def local_model(around: Around, directory: Path) -> Model:
    """The model in a directory of this machine; this client gives its tensors to the stages that lack them.

    Its tensors are hashed, once: digests are kept in ``around.state`` by size and time of the files.

    Raises:
        ConfigError: there is no model in safetensors. StorageError: it cannot be read.
    """
    state = around.state
    cache = DigestCache(around.world.disk, state / CACHE_FILE) if state is not None else _Forgetful()
    thread = around.world.threads.start("model files")
    try:
        source = await thread.submit(lambda: open_model(directory.resolve(), cache))
    finally:
        thread.close()
    return Model(source.model, source.name, source.config, source=source, path=str(source.directory))


class _Forgetful(DigestCache):
    """Where nothing is kept."""

    def __init__(self) -> None:
        self._files = {}

    def put(self, path: Path, stamp: tuple[int, int], digests: Any) -> None:
        """Nothing."""


class Gives:
    """This client's own copy of a model, given to the workers that load parts of it."""

    def __init__(self, around: Around, source: ModelDirectory) -> None:
        self._around, self._source = around, source
        self._disk: Thread = around.world.threads.start("model files")

    def close(self) -> None:
        """Let the thread end."""
        self._disk.close()

    @asynccontextmanager
    async def to(self, worker: WorkerAt) -> AsyncIterator[None]:
        """Give to ``worker`` inside. Raises as ``wire.handshake.dial``."""
        around = self._around
        hello = local_hello(
            peer_id=around.peer_id, name=around.name, roles=[around.role], purpose="give", job=self._source.model
        )
        host = worker.dialled(around.seed_host)
        connection, _ = await dial(
            around.world.network, host, worker.port, hello, timeout_s=DIAL_S, expect_peer=worker.peer_id
        )
        connection.tune_for_bulk()
        giving = asyncio.create_task(give(connection, self._source, self._disk), name=f"give to {worker.name}")
        try:
            yield
        finally:
            giving.cancel()
            with suppress(P2PTrainError, asyncio.CancelledError):  # the load that wanted it tells what went wrong
                await giving
            connection.abort()


async def small_files(around: Around, model: Model, names: Sequence[str]) -> dict[str, bytes]:
    """Files that come with a model, such as its tokenizer's; those that it does not have are not in the answer.

    Raises:
        NetworkError, PeerError: the worker that gives them cannot, or lies. StorageError: they cannot be read here.
    """
    if model.source is not None:
        return await _read(around, model.source, names)
    found: dict[str, bytes] = {}
    async with _receiving(around, model) as receiver:
        table = await receiver.table(model.config)
        wanted = [table[name] for name in names if name in table and table[name].dtype == FILE]
        async for record, data in receiver.tensors(wanted):
            if digest_of(data) != record.digest:
                raise receiver.lied(record)
            found[record.name] = bytes(data)
    return found


async def tensor_table(around: Around, model: Model) -> Mapping[str, TensorRecord]:
    """All tensors of a model and its small files, by name. Raises ``NetworkError``, ``PeerError``, ``UserError``."""
    if model.source is not None:
        return {record.name: record for record in model.source.records}
    async with _receiving(around, model) as receiver:
        return await receiver.table(model.config)


@asynccontextmanager
async def _receiving(around: Around, model: Model) -> AsyncIterator[Receiver]:
    """From the worker that gives a model."""
    if model.giver is None:
        raise UserError(f"nobody gives {model.name}", remedy="name its directory")
    worker = model.giver
    hello = local_hello(peer_id=around.peer_id, name=around.name, roles=[around.role], purpose="model", job=model.id)
    connection, _ = await dial(
        around.world.network,
        worker.dialled(around.seed_host),
        worker.port,
        hello,
        timeout_s=DIAL_S,
        expect_peer=worker.peer_id,
    )
    async with Receiver(connection, model.id, worker.name).running() as receiver:
        yield receiver


async def _read(around: Around, source: ModelDirectory, names: Sequence[str]) -> dict[str, bytes]:
    records = {record.name: record for record in source.records if record.dtype == FILE}
    thread = around.world.threads.start("model files")
    try:
        return {
            name: bytes(await thread.submit(partial(source.read, name, 0, records[name].size_bytes)))
            for name in names
            if name in records
        }
    finally:
        thread.close()
