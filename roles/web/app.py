"""The seed's HTTP API as an ASGI application: access, routes made of the declared endpoints, repeated requests, the
page, and the stream of one job.

A reader of ``metrics/stream/{job}`` is sent a snapshot, ``ready``, and then what changes: at most ten updates a second,
each with the newest state only. The server of ``roles.http`` cuts off one that does not read, as any client; one that
falls too far behind is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache, partial
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.texts import shortened
from roles.http.access import Keys, refuse_pages
from roles.http.answers import HEADERS, JsonApp, Problem, json_bytes, json_response, read_body, read_model, while_wanted
from roles.seed.overview import Overview
from roles.seed.server import Seed
from roles.web.endpoints import IDEMPOTENCY_KEY, READ, ROOT, AfterStep, Call, CreateJob, Endpoint, openapi, read_query
from roles.web.page import page
from roles.web.prometheus import CONTENT_TYPE, exposition
from roles.web.routes import ENDPOINTS
from roles.web.text_gateway import OTHER_PATHS, TextGateway
from wire import messages
from wire.client import SeedClient, SeedRequests
from wire.records import JobInfo

Connect = Callable[[], AbstractAsyncContextManager[SeedClient]]

PAGE_ROWS = 100
"""Rows of the record in one message."""
NO_ROW = (-1, -1)
_PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "metrics": lambda row: (row["generation"] or 0, row["step"]),
    "recoveries": lambda row: row["number"],
    "events": lambda row: row["id"],
}
"""Topic → the place of a row among its kind, which only grows. A job that goes back does so in a new generation."""


class LocalRequests(SeedRequests):
    """The requests of operators, without a connection. The seed's own deadlines limit them."""

    def __init__(self, seed: Seed) -> None:
        self._seed = seed

    async def request(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 20.0
    ) -> dict[str, Any]:
        if self._seed.acceptor.closed:
            raise ConnectionLost("the seed is stopping", remedy="try again when it is back")
        answer = await self._seed.operator_api.answer(messages.Request(1, method, params or {}))
        if answer.error_code:
            raise Refused(answer.error_code, answer.error_message, remedy=answer.error_remedy)
        return answer.result


async def follow(
    overview: Overview, client: SeedRequests, job: JobInfo, after_step: int, send: Callable[[str], Awaitable[None]]
) -> None:
    """Send messages for ever. Raises ``P2PTrainError``: the reader is too slow, or the seed stops."""
    last: dict[str, Any] = {"metrics": NO_ROW, "recoveries": -1, "events": -1}

    def is_new(topic: str, item: dict[str, Any]) -> bool:
        """Whether the reader lacks this row, which may have been on record already when it came."""
        if (topic != "events" and item["job"] != job.id) or (place := _PLACES[topic](item)) <= last[topic]:
            return False
        last[topic] = place
        return True

    async def tell(topic: str, items: Iterable[dict[str, Any]]) -> None:
        if news := [item for item in items if topic not in _PLACES or is_new(topic, item)]:
            await send(json_bytes({"topic": topic, "items": news}).decode())

    with overview.watching() as updates:
        for update in list(updates.drain()):
            await tell(update.topic, update.items)
        while rows := await client.metrics(job.id, after_step, PAGE_ROWS):
            after_step = rows[-1].step
            await tell("metrics", (row.to_map() for row in rows))
        if last["metrics"] == NO_ROW:
            last["metrics"] = job.generation, after_step
        await tell("recoveries", [row.to_map() for row in await client.recoveries(job.id, PAGE_ROWS)])
        await tell("events", [row.to_map() for row in await client.events(-PAGE_ROWS, PAGE_ROWS)])
        await send('{"topic":"ready","items":[]}')
        async for round_updates in updates.rounds():
            for update in round_updates:
                await tell(update.topic, update.items)


_WITHOUT_KEY = (f"{ROOT}/openapi.json", f"{ROOT}/docs")
_KEY_PREFIX = "bearer."
SUBPROTOCOL = "p2ptrain.v1"
TRY_AGAIN = 1013
"""Close code: the seed is away for a moment."""
MOST_BODY_BYTES = 128 << 10
"""Largest body: several times a job's settings. Malicious text of this size takes the parsers a tenth of a second."""
KEPT_ANSWERS = 1024
"""How many answers to requests with an Idempotency-Key are kept."""

_REFUSED = {
    **dict.fromkeys(("unknown-checkpoint", "unknown-experiment", "unknown-job", "unknown-peer", "unknown-ticket"), 404),
    **dict.fromkeys(("bad-parameter", "bad-setting", "bad-shape", "bad-spec"), 422),
    **dict.fromkeys(("failed", "unreachable"), 502),
    messages.RefusalCode.FULL: 503,
}
"""Code of a refusal → status; 409 for all others."""


def _problem_of(error: P2PTrainError) -> Problem:
    match error:
        case Refused():
            status, code = _REFUSED.get(error.code, 409), str(error.code)
        case UserError():
            status, code = 422, "invalid_value"
        case NetworkError():
            status, code = 503, "seed_unreachable"
        case ProtocolError():
            status, code = 502, "protocol"
        case _:
            status, code = 500, "failed"
    return Problem(status, shortened(error.message, 1000), code=code, remedy=shortened(error.remedy, 1000))


class Repeats:
    """Answers to requests with an Idempotency-Key, so that each is carried out once. Failures are not kept. A request
    that comes while the first one is under way waits for the same task."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, asyncio.Task[Response]]] = {}

    async def answer(
        self, key: str, request: bytes, carry_out: Callable[[], Coroutine[Any, Any, Response]]
    ) -> Response:
        """``request``: what must be the same. Raises ``Problem`` if it is not, and what ``carry_out`` raises."""
        digest = hashlib.sha256(request).digest()
        before, task = self._kept.get(key, (b"", None))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(carry_out(), name="idempotent request")
            self._kept[key] = digest, task
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.pop(next(iter(self._kept)))
        elif before != digest:
            text = "this Idempotency-Key was used for another request"
            raise Problem(422, text, code="idempotency_key_reused", remedy="use a new key for each request")
        return await task


class WebApp(JsonApp):
    """The application.

    Args:
        create_job: see ``CreateJob``.
        more: endpoints besides those of every seed.
        keys: with ``READ`` or ``OPERATE`` each; None: none is needed.
        names: of this machine; empty: only the loopback's.
        texts: passes requests for texts on; None: they are refused.
    """

    def __init__(
        self,
        overview: Overview,
        client: SeedRequests,
        create_job: CreateJob,
        more: Sequence[Endpoint] = (),
        keys: Keys | None = None,
        names: Collection[str] = (),
        texts: TextGateway | None = None,
    ) -> None:
        self._overview, self._client, self._keys, self._names = overview, client, keys, names
        self._call = partial(Call, overview, client, create_job)
        self._repeats = Repeats()
        endpoints = [*ENDPOINTS, *more]
        self._document = cache(partial(openapi, endpoints))
        declared = [
            Route(f"{ROOT}/{endpoint.path}", partial(self._endpoint, endpoint), methods=[endpoint.method])
            for endpoint in endpoints
        ]
        others = [
            Route(f"{ROOT}/openapi.json", self._openapi, methods=["GET"]),
            Route(f"{ROOT}/docs", RedirectResponse("../../docs.html", 302), methods=["GET"]),
            WebSocketRoute(f"{ROOT}/metrics/stream/{{job}}", self._stream),
            Route("/metrics", self._prometheus, methods=["GET"]),
            *(texts.routes(self) if texts is not None else ()),
            Mount("/", page()),
        ]
        super().__init__([*declared, *others], _problem_of)

    def let_in(self, asked: HTTPConnection) -> None:
        remedy = "use an address or a name of this machine, and its own page"
        refuse_pages(asked.headers, remedy, own_only=True, names=self._names)
        path, offered = asked.scope["path"], asked.scope.get("subprotocols", ())
        writes = path.startswith(("/v1/", *OTHER_PATHS))
        if self._keys is None or path in _WITHOUT_KEY or not (writes or path.startswith((ROOT, "/metrics"))):
            return
        shown = (name.removeprefix(_KEY_PREFIX) for name in offered if name.startswith(_KEY_PREFIX))
        permit, reads = self._keys.permit(asked.headers, next(shown, "")), ("GET", "HEAD")
        if permit == READ and (writes or asked.scope.get("method", "GET") not in reads):
            raise Problem(403, "this key may only look", code="read_only", remedy="use the operator key")

    async def _endpoint(self, endpoint: Endpoint, request: Request) -> Response:
        query = read_query(endpoint.query, request.query_params)
        raw = await read_body(request, MOST_BODY_BYTES)
        body = None if endpoint.body is None else read_model(endpoint.body, raw or b"{}")

        async def carry_out() -> Response:
            answer = await endpoint.handle(self._call(request.path_params, query, body))
            return json_response(answer.to_map(), status=endpoint.status)

        key = request.headers.get("idempotency-key")
        if endpoint.method != "POST" or key is None:
            return await carry_out()
        if not re.fullmatch(IDEMPOTENCY_KEY, key):
            text = "an Idempotency-Key has 1 to 128 letters, digits and signs, and no spaces"
            raise Problem(400, text, code="invalid_value", param="Idempotency-Key")
        return await self._repeats.answer(key, f"{request.url.path}?{request.url.query}\n".encode() + raw, carry_out)

    async def _openapi(self, request: Request) -> Response:
        # Not before somebody asks, and in a thread: it takes some tenths of a second.
        return json_response(await asyncio.to_thread(self._document))

    async def _prometheus(self, request: Request) -> Response:
        show = self._overview
        text = exposition(show.cluster_info(), show.job_infos(), show.peer_infos(), show.serving_infos())
        return Response(text, 200, HEADERS | {"content-type": CONTENT_TYPE})

    async def _stream(self, socket: WebSocket) -> None:
        """Serve one reader until it leaves. What it says is ignored."""
        query = read_query(AfterStep, socket.query_params)
        job, _ = await self._client.job(socket.path_params["job"])
        await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in socket.scope["subprotocols"] else None)
        following = follow(self._overview, self._client, job, query.after_step, socket.send_text)
        try:
            await while_wanted(socket.receive, following, self.stopping)
        except WebSocketDisconnect:
            pass
        except (Problem, P2PTrainError) as error:
            await socket.close(TRY_AGAIN, error.message[:100])
