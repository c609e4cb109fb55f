"""A worker's side of split models: it holds parts, computes forward requests as a stage, and sends models.

The ``Hello``'s purpose says which peer dials, and for what:

``chain``   a client: requests parts and sessions, sends the first stage its forward requests, receives tokens.
``stage``   the stage before this one in a session (``Hello.job``); ``Hello.generation`` is the index of this stage.
``model``   a worker or client that fetches a model (``Hello.job``) which this worker sends on behalf of a client.
``give``    a client, to send the tensors of a model (``Hello.job``) over this second connection.

When a client's ``chain`` connection ends, so do its sessions and its right to send a model. Parts stay
(``roles.worker.part_cache``).

A session's id is a secret between a client and its stages: a worker that knows it may send the stage requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.core.errors import ConfigError, NetworkError, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.ids import is_id
from roles.background import Background
from roles.engine import BuildPart
from roles.line import QUIET_S, Line
from roles.model_directory import CACHE_FILE, DigestCache, ModelDirectory, open_model
from roles.worker.context import PeerContext
from roles.worker.forward_requests import ForwardRequests, StageClient, of_session
from roles.worker.links import Prober
from roles.worker.model_loading import SENDER, Loader, ModelReceiver, OnBytes, give
from roles.worker.part_cache import MAX_PARTS, Part, PartCache
from roles.worker.stage_requests import (
    CloseRequest,
    FreeRequest,
    LoadRequest,
    MeasureRequest,
    ModelRequest,
    OpenRequest,
    ResumeRequest,
    printable,
    request_untrusted,
)
from wire.chain_messages import UNKNOWN_SESSION, ForwardRequest, HeldPart, PartLoading, PartsHeld
from wire.client import answer_to
from wire.connection import Connection
from wire.messages import Hello, Message, RefusalCode, Refuse, Request, Response

PURPOSES = frozenset({"chain", "stage", "model", "give"})
MAX_CALLERS = 64
"""Limit for each kind of peer: clients, model senders, model receivers. Each has one range in memory at a time."""
MAX_REQUESTS = 32
"""Requests of one client that are answered at a time."""
MAX_MODELS = 16
"""Model directories that one client may have open for sending."""
BEAT_S = 0.5
"""Heartbeat interval to a client that has not stated its silence limit yet."""
GIVE_WAIT_S = 10.0
TELL_S = 1.0


@dataclass(frozen=True, slots=True)
class Holding:
    """What a worker needs to hold parts.

    Attributes:
        measure: returns the bytes of a model's layers and caches, by its ``config.json`` and dtype; called on the
            compute thread.
        limit_bytes: memory for parts and their caches.
        stream_bps, compute_flops: as in ``compute.device``; each is called once, on the compute thread.
        free_bytes: of the device.
    """

    build_part: BuildPart
    measure: Callable[[str, str], dict[str, Any]]
    limit_bytes: int
    stream_bps: Callable[[], float]
    free_bytes: Callable[[], int]
    device: str = "auto"
    compute_flops: Callable[[], float] | None = None


@dataclass(eq=False)
class _Client(StageClient):
    """A client, the parts it holds, and the directories that are sent for it. It loads and measures one at a time."""

    parts: set[Part] = field(default_factory=set)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    models: dict[str, ModelDirectory] = field(default_factory=dict)
    answers: Background = field(default_factory=Background)


class Stages:
    """A worker's parts and sessions, and its clients.

    Args:
        directory: the worker's own.
        shown: the device, for people.
        training: returns the stages that train here; they are reported to the seed with the parts.
    """

    def __init__(
        self,
        context: PeerContext,
        holding: Holding,
        prober: Prober,
        directory: Path,
        *,
        shown: str = "",
        training: Callable[[], list[HeldPart]] = list,
    ) -> None:
        self._context, self._holding, self._prober = context, holding, prober
        self._shown, self._training = shown, training
        self._now = context.world.clock.now
        self.cache = PartCache(holding.limit_bytes)
        self.works = ForwardRequests(context, self.cache)
        self._disk = context.world.threads.start("model files")
        self._hasher = context.world.threads.start("model digests")  # apart, because hashing takes minutes
        self._loader = Loader(
            context,
            self.cache,
            self._disk,
            holding.build_part,
            holding.device,
            self.works.unload,
        )
        self._digests = DigestCache(context.world.disk, directory / CACHE_FILE)
        self._hashing = asyncio.Lock()
        self._clients: set[_Client] = set()
        self._senders: dict[tuple[str, str], ModelReceiver] = {}  # by the client's id and the model's
        self._sender_came = asyncio.Condition()
        self._recipients = 0
        self._stream_bps = 0.0
        self._told = list[HeldPart]()

    # --------------------------------------------------------------------------------------------------- for the worker

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.works.run(), name="works")
            tasks.create_task(self._tend(), name="parts")

    def close(self) -> None:
        self._disk.close()
        self._hasher.close()

    def seed_up(self) -> None:
        self._told = []

    async def job_assigned(self) -> None:
        """Unload idle parts for a job if the device's free memory is less than half of the limit for parts."""
        if self._holding.free_bytes() < self.cache.limit_bytes / 2:
            await self.works.unload(self.cache.expired(self._now(), idle_s=0.0))

    def decide(self, hello: Hello) -> Refuse | None:
        match hello.purpose:
            case "chain" if len(self._clients) >= MAX_CALLERS:
                return Refuse(
                    RefusalCode.BUSY, f"{MAX_CALLERS} clients are connected to this worker", "try another one"
                )
            case "stage" if "worker" not in hello.roles:
                return Refuse(RefusalCode.ROLE, "only workers can connect as a stage")
            case "stage" if of_session(hello) not in self.works.sessions:
                return Refuse(UNKNOWN_SESSION, "that session is not open here", "open it on the last stage first")
            case "model" if self._given(hello.job) is None:
                return Refuse("unknown-model", f"model {hello.job[:40]!r} is not open here", "first send model.open")
            case "model" if self._recipients >= MAX_CALLERS:
                return Refuse(RefusalCode.BUSY, f"{MAX_CALLERS} peers fetch models from this worker", "try again later")
            case "give" if hello.peer_id not in {client.peer_id for client in self._clients}:
                return Refuse(RefusalCode.NOT_A_MEMBER, "a peer that sends a model must be a client of this worker")
            case "give" if not is_id(hello.job):
                return Refuse(RefusalCode.PROTOCOL, f"invalid model id {hello.job[:40]!r}")
            case "give" if sum(each.sources for each in self._senders.values()) >= MAX_CALLERS:
                return Refuse(RefusalCode.BUSY, f"{MAX_CALLERS} connections send models to this worker", "close some")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Serve an accepted peer until it is gone. Raises ``P2PTrainError``: the peer's error."""
        match hello.purpose:
            case "chain":
                await self._serve_client(connection, hello)
            case "stage" if (session := self.works.sessions.get(of_session(hello))) is not None:
                connection.tune_for_bulk()
                with suppress(NetworkError):  # the client repairs the chain
                    await self.works.serve_stage(connection, session)
            case "model" if (model := self._given(hello.job)) is not None:
                await self._give(connection, model)
            case "give":
                await self._take_sender(connection, hello)

    # --------------------------------------------------------------------------------------------------------- clients

    async def _serve_client(self, connection: Connection, hello: Hello) -> None:
        client = _Client(Line(connection, QUIET_S, beat_s=BEAT_S), hello.peer_id)
        self._clients.add(client)
        try:
            async with client.line.alive():
                async for message in client.line.messages():
                    await self._heard(client, message)
        except NetworkError:
            return  # the usual end: the client closes the connection
        finally:
            self._clients.discard(client)
            try:
                await client.answers.stop()  # first: they may open sessions, which must not outlive the client
            finally:
                self.works.close_all_of(client)
                for part in client.parts:
                    self.cache.leave(part, client, self._now())

    async def _heard(self, client: _Client, message: Message) -> None:
        match message:
            case ForwardRequest():
                session = self.works.sessions.get((message.session, 0))
                if session is not None and session.caller is not client:
                    raise ProtocolError(f"session {message.session[:64]!r} belongs to another client")
                await self.works.take(client.line, message, session)
            case Request() if len(client.answers) >= MAX_REQUESTS:
                client.say(Response(message.id, {}, RefusalCode.BUSY, "too many requests at a time"))
            case Request():
                client.answers.start(self._answer(client, message), f"answer {message.method[:40]}")
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a client")

    async def _answer(self, client: _Client, request: Request) -> None:
        client.say(await answer_to(request, self._requested(client, request.method, request.params)))

    async def _requested(self, client: _Client, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "part.offer":
            return await self._offer()
        if method == "links.measure":
            return await self._prober.answer(params)
        match request_untrusted(method, params):
            case LoadRequest() as request:
                return await self._load(client, request)
            case MeasureRequest(config, dtype):
                return await self._measure(client, config, dtype)
            case FreeRequest(part):
                await self._free(client, part)
            case ModelRequest(path):
                return await self._open_model(client, path)
            case OpenRequest() as request:
                await self.works.open(client, request)
            case ResumeRequest() as request:
                return {"position": await self.works.resume(client, request)}
            case CloseRequest() as request:
                self.works.close_of(client, request)
        return {}

    # ----------------------------------------------------------------------------------------------------------- parts

    async def _offer(self) -> dict[str, Any]:
        if not self._stream_bps:
            self._stream_bps = await self._context.compute.run(self._holding.stream_bps)
        return {
            "memory_bytes": self.cache.free_bytes,
            "limit_bytes": self.cache.limit_bytes,
            "stream_bps": self._stream_bps,
            "device": self._shown,
            "parts": [
                {
                    "model": part.model,
                    "start": part.spec.start,
                    "stop": part.spec.stop,
                    "layers": part.spec.layers,
                    "dtype": part.spec.dtype,
                    "weights_bytes": part.engine.weights_bytes,
                }
                for part in self.cache.parts.values()
            ],
        }

    async def _measure(self, client: _Client, config: str, dtype: str) -> dict[str, Any]:
        try:
            async with client.measuring:
                return await self._context.compute.run(self._holding.measure, config, dtype)
        except ConfigError as problem:  # the model's fault, and not this worker's
            raise Refused("bad-spec", problem.message, remedy=problem.remedy) from problem

    async def _load(self, client: _Client, request: LoadRequest) -> dict[str, Any]:
        read_bytes = received_bytes = 0
        progress = self._progress_of(client)
        async with client.loading, self._loader.turn(request, progress) as tell:
            part = self.cache.find(request.model, request.spec(self._holding.device))
            if part is None:
                async with self._receiver(client, request) as receiver:
                    part, read_bytes, received_bytes = await self._loader.load(request, receiver, on_bytes=tell)
                    self._hold(client, part)
            else:
                need_bytes = request.positions * part.engine.cache_position_bytes
                gone = self.cache.make_room(need_bytes, f"{request.positions} positions of sessions", keep=part)
                self._hold(client, part)
                await self.works.unload(gone)
        engine = part.engine
        return {
            "part": part.id,
            "width": engine.width,
            "vocab_size": engine.vocab_size,
            "encoding": engine.encoding,
            "weights_bytes": engine.weights_bytes,
            "cache_position_bytes": engine.cache_position_bytes,
            "read_bytes": read_bytes,
            "received_bytes": received_bytes,
            "resident_bytes": psutil.Process(os.getpid()).memory_info().rss,
            "device": engine.device,
        }

    def _progress_of(self, client: _Client) -> OnBytes:
        every_s = 0.25
        told_at = -every_s

        def tell(done_bytes: int, total_bytes: int) -> None:
            nonlocal told_at
            if self._now() - told_at >= every_s or done_bytes == total_bytes:
                told_at = self._now()
                client.say(PartLoading(done_bytes, total_bytes))

        return tell

    def _hold(self, client: _Client, part: Part) -> None:
        part.users.add(client)
        client.parts.add(part)

    async def _free(self, client: _Client, part_id: str) -> None:
        part = self.cache.parts.get(part_id)
        if part is None or part not in client.parts:
            return
        client.parts.discard(part)
        self.cache.leave(part, client, self._now())
        if not part.users:
            del self.cache.parts[part_id]
            gone = [part]
            del part
            await self.works.unload(gone)

    @asynccontextmanager
    async def _receiver(self, client: _Client, request: LoadRequest) -> AsyncIterator[ModelReceiver]:
        model, place = request.model, request.sender
        if place is None:
            yield await self._given_by(client, model)
            return
        hello = self._context.hello("model", model)
        try:
            connection, welcome = await self._context.dial(place.peer, place.host, place.port, hello)
        except P2PTrainError as problem:
            text = f"cannot reach the sender of the model: {problem.message}"
            raise Refused(SENDER, text, remedy=problem.remedy or "load it from another copy") from problem
        receiver = ModelReceiver(self._now, model, self._disk)
        async with receiver.taking(connection, printable(welcome.name)):
            yield receiver

    async def _given_by(self, client: _Client, model: str) -> ModelReceiver:
        """Return the receiver for the client's ``give`` connections; waits until the first one. Raises ``Refused``.

        Several programs may share a client id. If one stops sending, the others continue.
        """
        try:
            async with asyncio.timeout(GIVE_WAIT_S), self._sender_came:
                await self._sender_came.wait_for(lambda: (client.peer_id, model) in self._senders)
        except TimeoutError:
            text = f"the client did not connect to send model {model} within {GIVE_WAIT_S:g} s"
            raise Refused(SENDER, text, remedy="dial with purpose give, and the model as job") from None
        return self._senders[client.peer_id, model]

    async def _take_sender(self, connection: Connection, hello: Hello) -> None:
        connection.tune_for_bulk()
        key = hello.peer_id, hello.job
        receiver = self._senders.setdefault(key, ModelReceiver(self._now, hello.job, self._disk))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receiver.serve(connection, printable(hello.name)))
                await asyncio.sleep(0)  # lets ``serve`` register the source
                async with self._sender_came:
                    self._sender_came.notify_all()
        finally:
            if not receiver.sources and self._senders.get(key) is receiver:
                del self._senders[key]

    # --------------------------------------------------------------------------------------------------------- sending

    async def _open_model(self, client: _Client, path: str) -> dict[str, Any]:
        async with self._hashing:
            if len(client.models) >= MAX_MODELS:  # checked under the lock: earlier requests are counted
                raise Refused(RefusalCode.FULL, f"this client has opened {MAX_MODELS} models already, the limit")
            model = await self._hasher.submit(partial(open_model, Path(path), self._digests))
            client.models[model.model] = model
        return {"model": model.model, "config": model.config, "total": len(model.records)}

    async def _give(self, connection: Connection, model: ModelDirectory) -> None:
        self._recipients += 1
        try:
            await give(connection, model, self._disk, still=lambda: self._given(model.model) is not None)
        finally:
            self._recipients -= 1

    def _given(self, model: str) -> ModelDirectory | None:
        return next((client.models[model] for client in self._clients if model in client.models), None)

    # ------------------------------------------------------------------------------------------------------- reporting

    async def _tend(self) -> None:
        """Every second, unload idle parts, and report the parts to the seed if they changed."""
        while True:
            await self.works.unload(self.cache.expired(self._now()))
            self._tell()
            await asyncio.sleep(TELL_S)

    def _tell(self) -> None:
        now = self._now()
        held = [self.cache.told(part, now, self.works.count(part)) for part in self.cache.parts.values()]
        parts = [*self._training(), *held][:MAX_PARTS]
        if parts != self._told:
            self._told = parts
            self._context.send(PartsHeld(parts))
