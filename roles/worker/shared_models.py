"""The models that a worker sends on behalf of its clients, and those that clients send to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.ids import is_id
from roles.model_directory import CACHE_FILE, DigestCache, ModelDirectory, open_model
from roles.worker.context import PeerContext
from roles.worker.model_loading import SENDER, ModelReceiver, give
from roles.worker.stage_requests import LoadRequest, printable
from wire.connection import Connection
from wire.messages import Hello, RefusalCode, Refuse

MAX_PEERS = 64
"""Limit for model senders, and for model receivers. Each has one range in memory at a time."""
MAX_MODELS = 16
"""Model directories that one client may have open for sending."""
GIVE_WAIT_S = 10.0


class SharedModels:
    """See the module's docstring.

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
            case "give" if sum(each.sources for each in self._senders.values()) >= MAX_PEERS:
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
        receiver = ModelReceiver(self._context.world.clock.now, model, self.disk)
        async with receiver.taking(connection, printable(welcome.name)):
            yield receiver

    async def _receiver_from(self, client_id: str, model: str) -> ModelReceiver:
        """Return the receiver for the client's ``give`` connections; waits until the first one. Raises ``Refused``.

        Several programs may share a client id. If one stops sending, the others continue.
        """
        try:
            async with asyncio.timeout(GIVE_WAIT_S), self._sender_came:
                await self._sender_came.wait_for(lambda: (client_id, model) in self._senders)
        except TimeoutError:
            text = f"the client did not connect to send model {model} within {GIVE_WAIT_S:g} s"
            raise Refused(SENDER, text, remedy="dial with purpose give, and the model as job") from None
        return self._senders[client_id, model]

    async def serve_sender(self, connection: Connection, hello: Hello) -> None:
        """Take what a client sends over its ``give`` connection, until it ends."""
        key = hello.peer_id, hello.job
        now = self._context.world.clock.now
        receiver = self._senders.setdefault(key, ModelReceiver(now, hello.job, self.disk))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receiver.serve(connection, printable(hello.name)))
                await asyncio.sleep(0)  # lets ``serve`` register the source
                async with self._sender_came:
                    self._sender_came.notify_all()
        finally:
            if not receiver.sources and self._senders.get(key) is receiver:
                del self._senders[key]
