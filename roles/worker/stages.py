"""A worker's side of split models: it holds parts, computes forward requests as a stage, and sends models.

The ``Hello``'s purpose says which peer dials, and for what:

``chain``   a client: requests parts and sessions, sends the first stage its forward requests, receives tokens.
``stage``   the stage before this one in a client's sessions, of which ``Hello.job`` is one; ``Hello.generation`` is the
            index of this stage.
``model``   a worker or client that fetches a model (``Hello.job``) which this worker sends on behalf of a client.
``give``    a client, to send the tensors of a model (``Hello.job``) over this second connection.

When a client's ``chain`` connection ends, so do its sessions and its right to send a model. Parts stay
(``roles.worker.part_cache``).

A session's id is a secret between a client and its stages: a worker that knows one may send the stage requests of it
and of others whose ids it knows, as long as the client is connected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConfigError, NetworkError, ProtocolError, Refused
from roles.engine import BuildPart
from roles.line import QUIET_S, Line
from roles.worker.context import PeerContext
from roles.worker.forward_requests import ForwardRequests, of_session
from roles.worker.links import Prober
from roles.worker.model_loading import Loader, SharedModels
from roles.worker.part_cache import MAX_PARTS, MAX_SESSIONS, Part, PartCache
from roles.worker.stage_links import StageClient
from roles.worker.stage_requests import (
    CloseRequest,
    FreeRequest,
    LoadRequest,
    MeasureRequest,
    ModelRequest,
    OpenRequest,
    ResumeRequest,
    request_untrusted,
)
from wire.chain_messages import UNKNOWN_SESSION, ForwardBatch, HeldPart, PartLoading, PartsHeld
from wire.client import answer_request
from wire.connection import Connection
from wire.messages import Hello, Message, RefusalCode, Refuse, Request, Response

PURPOSES = frozenset({"chain", "stage", "model", "give"})
MAX_CLIENTS = 64
"""Most clients."""
MAX_REQUESTS = 8 * MAX_SESSIONS
"""Requests of one client that are answered at a time. After a loss all of its sessions ask at once; some wait for
memory."""
BEAT_S = 0.5
"""Heartbeat interval to a client that has not stated its silence limit yet."""
REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Holding:
    """What a worker needs to hold parts.

    Attributes:
        measure: returns the bytes of a model's layers and caches, by its ``config.json``, dtype and weights; called
            on the compute thread.
        limit_bytes: memory for parts and their caches.
        stream_bps, compute_flops: as in ``compute.device``; each is called once, on the compute thread.
    """

    build_part: BuildPart
    measure: Callable[[str, str, str], dict[str, Any]]
    limit_bytes: int
    stream_bps: Callable[[], float]
    device: str = "auto"
    compute_flops: Callable[[], float] | None = None


@dataclass(eq=False)
class _Client(StageClient):
    """A client and the parts it holds. It loads one at a time."""

    parts: set[Part] = field(default_factory=set)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
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
        self.requests = ForwardRequests(context, self.cache)
        self._models = SharedModels(context, directory)
        self._loader = Loader(
            context,
            self.cache,
            self._models.disk,
            holding.build_part,
            holding.device,
            self.requests.unload,
        )
        self._clients: set[_Client] = set()
        self._stream_bps = 0.0
        self._reported = list[HeldPart]()

    # --------------------------------------------------------------------------------------------------- for the worker

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.requests.run(), name="forward requests")
            tasks.create_task(self._tend(), name="parts")

    def close(self) -> None:
        self._models.close()

    def report_anew(self) -> None:
        self._reported = []

    async def make_room_for_job(self) -> None:
        """Unload idle parts: the job may need their memory."""
        await self.requests.unload(self.cache.expired(self._now(), idle_s=0.0))

    def decide(self, hello: Hello) -> Refuse | None:
        match hello.purpose:
            case "chain" if len(self._clients) >= MAX_CLIENTS:
                return Refuse(
                    RefusalCode.BUSY, f"{MAX_CLIENTS} clients are connected to this worker", "try another one"
                )
            case "stage" if "worker" not in hello.roles:
                return Refuse(RefusalCode.ROLE, "only workers can connect as a stage")
            case "stage" if of_session(hello) not in self.requests.sessions:
                return Refuse(UNKNOWN_SESSION, "that session is not open here", "open it on the last stage first")
        return self._models.decide(hello, {client.peer_id for client in self._clients})

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Serve an accepted peer until it is gone. Raises ``P2PTrainError``: the peer's error."""
        match hello.purpose:
            case "chain":
                await self._serve_client(connection, hello)
            case "stage" if (session := self.requests.sessions.get(of_session(hello))) is not None:
                with suppress(NetworkError):  # the client repairs the chain
                    await self.requests.serve_stage(connection, session)
            case "model" if (model := self._models.find(hello.job)) is not None:
                await self._models.send(connection, model)
            case "give":
                await self._models.serve_sender(connection, hello)

    # --------------------------------------------------------------------------------------------------------- clients

    async def _serve_client(self, connection: Connection, hello: Hello) -> None:
        client = _Client(Line(connection, QUIET_S, beat_s=BEAT_S), hello.peer_id, self._context.world.clock.wall())
        self._clients.add(client)
        try:
            async with client.line.keep_alive():
                async for message in client.line.messages():
                    await self._take(client, message)
        except NetworkError:
            return  # the usual end: the client closes the connection
        finally:
            self._clients.discard(client)
            try:
                await client.answers.stop()  # first: they may open sessions, which must not outlive the client
            finally:
                self._models.forget(client)
                self.requests.close_all_of(client)
                for part in client.parts:
                    self.cache.leave(part, client, self._now())

    async def _take(self, client: _Client, message: Message) -> None:
        match message:
            case ForwardBatch():
                await self.requests.take(client.line, message, client)
            case Request() if len(client.answers) >= MAX_REQUESTS:
                client.send(Response(message.id, {}, RefusalCode.BUSY, "too many requests at a time"))
            case Request():
                client.answers.start(self._answer(client, message), f"answer {message.method[:40]}")
            case _:
                raise ProtocolError(f"unexpected message {type(message).__name__} from a client")

    async def _answer(self, client: _Client, request: Request) -> None:
        client.send(await answer_request(request, self._requested(client, request.method, request.params)))

    async def _requested(self, client: _Client, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "part.offer":
            return await self._offer()
        if method == "links.measure":
            return await self._prober.answer(params)
        match request_untrusted(method, params):
            case LoadRequest() as request:
                return await self._load(client, request)
            case MeasureRequest() as request:
                return await self._measure(request)
            case FreeRequest(part):
                await self._free(client, part)
            case ModelRequest(path):
                model = await self._models.open(client, path)
                return {"model": model.model, "config": model.config}
            case OpenRequest() as request:
                return {"position": await self.requests.open(client, request)}
            case ResumeRequest() as request:
                return {"position": await self.requests.resume(client, request)}
            case CloseRequest() as request:
                self.requests.close(self.requests.find(client, request))
        return {}

    # ----------------------------------------------------------------------------------------------------------- parts

    async def _offer(self) -> dict[str, Any]:
        if not self._stream_bps:
            self._stream_bps = await self._context.compute.run(self._holding.stream_bps)
        return {
            "memory_bytes": self.cache.free_bytes,
            "stream_bps": self._stream_bps,
            "device": self._shown,
            "parts": [
                {
                    "model": part.model,
                    "start": part.spec.start,
                    "stop": part.spec.stop,
                    "layers": part.spec.layers,
                    "dtype": part.spec.dtype,
                    "weights": part.spec.weights,
                    "weights_bytes": part.engine.weights_bytes,
                }
                for part in self.cache.parts.values()
            ],
        }

    async def _measure(self, request: MeasureRequest) -> dict[str, Any]:
        try:
            measure = partial(self._holding.measure, request.config, request.dtype, request.weights)
            return await self._context.compute.run(measure)
        except ConfigError as problem:  # the model's fault, and not this worker's
            raise Refused("bad-spec", problem.message, remedy=problem.remedy) from problem

    async def _load(self, client: _Client, request: LoadRequest) -> dict[str, Any]:
        read_bytes = received_bytes = 0

        def report(done_bytes: int, total_bytes: int) -> None:
            client.send(PartLoading(done_bytes, total_bytes))

        async with client.loading, self._loader.turn(request):
            part = self.cache.find(request.model, request.spec(self._holding.device))
            if part is None:
                async with self._models.receiver(client.peer_id, request) as receiver:
                    part, read_bytes, received_bytes = await self._loader.load(request, receiver, on_bytes=report)
                    unloaded = self.cache.use(part, client, request.positions)
            else:
                unloaded = self.cache.use(part, client, request.positions)
            client.parts.add(part)
            await self.requests.reserve(part, unloaded)
        engine = part.engine
        return {
            "part": part.id,
            "width": engine.width,
            "vocab_size": engine.vocab_size,
            "encoding": engine.encoding,
            "weights_bytes": engine.weights_bytes,
            "read_bytes": read_bytes,
            "received_bytes": received_bytes,
            "resident_bytes": psutil.Process(os.getpid()).memory_info().rss,
            "device": engine.device,
        }

    async def _free(self, client: _Client, part_id: str) -> None:
        part = self.cache.parts.get(part_id)
        if part is None or part not in client.parts:
            return
        client.parts.discard(part)
        client.close_links(part_id)
        self.cache.leave(part, client, self._now())
        if not part.users:
            del self.cache.parts[part_id]
            unloaded = [part]
            del part
            await self.requests.unload(unloaded)

    # ------------------------------------------------------------------------------------------------------- reporting

    async def _tend(self) -> None:
        """Every second, unload idle parts, and report the parts to the seed if they changed."""
        while True:
            await self.requests.unload(self.cache.expired(self._now()))
            self._report()
            await asyncio.sleep(REPORT_S)

    def _report(self) -> None:
        now = self._now()
        held = [self.cache.describe(part, now, self.requests.count(part)) for part in self.cache.parts.values()]
        parts = [*self._training(), *held][:MAX_PARTS]
        if parts != self._reported:
            self._reported = parts
            self._context.send(PartsHeld(parts))
