"""The seed's HTTP API as an ASGI application: access, routes made of the declared endpoints, repeated requests, the
stream, and the page."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from p2ptrain.core.errors import DeadlineExceeded, NetworkError, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.texts import shortened
from roles.http.access import Keys, refuse_pages
from roles.http.answers import (
    HEADERS,
    NOT_HANDLED,
    RETRY_AFTER_S,
    Problem,
    json_response,
    read_body,
    read_model,
    shutting_down,
    tell,
)
from roles.web.endpoints import READ, ROOT, AfterStep, Call, CreateJob, Endpoint, Given, Page, read_query
from roles.web.experiments import Experiments
from roles.web.feed import Feed
from roles.web.page import page_answer
from roles.web.prometheus import CONTENT_TYPE, exposition
from roles.web.routes import ENDPOINTS, document
from roles.web.stream import serve_stream
from wire.messages import RefusalCode
from wire.records import JobInfo, PeerInfo, ServingInfo

OPEN_PATHS = frozenset({f"{ROOT}/openapi.json", f"{ROOT}/docs"})
STREAM = f"{ROOT}/metrics/stream/{{job}}"
KEPT_ANSWERS = 1024
"""How many answers to requests with an Idempotency-Key are kept."""
_KEY_PREFIX = "bearer."

_REFUSED = {
    **dict.fromkeys(("unknown-checkpoint", "unknown-experiment", "unknown-job", "unknown-peer", "unknown-ticket"), 404),
    **dict.fromkeys(("bad-parameter", "bad-shape", "bad-spec"), 422),
    **dict.fromkeys(("failed", "unreachable"), 502),
    RefusalCode.FULL: 503,
}
"""Code of a refusal → status; 409 for all others."""
_FAILED: list[tuple[type[P2PTrainError], int, str]] = [
    (UserError, 422, "invalid_value"),
    (DeadlineExceeded, 504, "timeout"),
    (NetworkError, 503, "seed_unreachable"),
    (ProtocolError, 502, "protocol"),
    (P2PTrainError, 500, "failed"),
]


def problem_of(error: Exception) -> Problem:
    """The ``Problem`` for ``error``. Unexpected errors show no details."""
    if isinstance(error, Problem):
        return error
    if not isinstance(error, P2PTrainError):
        return Problem(500, "internal error; the seed's terminal has the details", code="internal_error")
    if isinstance(error, Refused):
        status, code = _REFUSED.get(error.code, 409), error.code
    else:
        status, code = next((status, code) for kind, status, code in _FAILED if isinstance(error, kind))
    message, remedy = shortened(error.message, 1000), shortened(error.remedy, 1000)
    again = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return Problem(status, message, code=code, remedy=remedy, headers=again)


class Repeats:
    """Answers to requests with an Idempotency-Key, so that each is carried out once. Failures are not kept.

    A request that comes while the first one is under way gets the same answer; it is carried out though nobody waits.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, asyncio.Task[Response]]] = {}

    async def answer(
        self, key: str, request: bytes, carry_out: Callable[[], Coroutine[Any, Any, Response]]
    ) -> Response:
        """``request``: what must be the same. Raises ``Problem`` if it is not, and what ``carry_out`` raises."""
        digest = hashlib.sha256(request).digest()
        if key not in self._kept:
            while len(self._kept) >= KEPT_ANSWERS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = digest, asyncio.create_task(carry_out(), name="idempotent request")
            self._kept[key][1].add_done_callback(partial(self._ended, key))
        before, task = self._kept[key]
        if before != digest:
            text = "this Idempotency-Key was used for another request"
            raise Problem(422, text, code="idempotency_key_reused", remedy="use a new key for each request")
        return await asyncio.shield(task)

    def _ended(self, key: str, task: asyncio.Task[Response]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._kept.get(key, (b"", None))[1] is task:
            del self._kept[key]

    async def stop(self) -> None:
        if under_way := [task for _, task in self._kept.values() if not task.done()]:
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the API.

    Attributes:
        keys: with ``READ`` or ``OPERATE`` each; None: none is needed.
        names: of this machine; empty: only the loopback's.
    """

    keys: Keys | None = None
    names: Collection[str] = ()

    def judge(self, headers: Headers, path: str, permit: str, subprotocols: Sequence[str] = ()) -> None:
        """Raise ``Problem`` if the request is not allowed. ``permit``: what it needs."""
        remedy = "use an address or a name of this machine, and its own page"
        refuse_pages(headers, remedy, own_only=True, names=self.names)
        if self.keys is None or path in OPEN_PATHS or not path.startswith((ROOT, "/metrics")):
            return
        shown = next(
            (f"Bearer {name.removeprefix(_KEY_PREFIX)}" for name in subprotocols if name.startswith(_KEY_PREFIX)), ""
        )
        if self.keys.permit(headers.get("authorization", "") or shown) == READ != permit:
            raise Problem(403, "this key may only read", code="read_only", remedy="use the operator key")


class WebApp:
    """The application.

    Args:
        create_job: see ``CreateJob``.
    """

    def __init__(self, feed: Feed, access: Access, create_job: CreateJob, experiments: Experiments) -> None:
        self._feed, self._access, self._create_job, self._experiments = feed, access, create_job, experiments
        self._repeats = Repeats()
        self._stopping = asyncio.Event()
        routes: list[Any] = [
            Route(f"{ROOT}/{each.path}", partial(self._endpoint, each), methods=[each.method]) for each in ENDPOINTS
        ]
        routes += [
            Route(f"{ROOT}/openapi.json", self._openapi, methods=["GET"]),
            Route(f"{ROOT}/docs", _docs, methods=["GET"]),
            WebSocketRoute(STREAM, self._stream),
            Route("/metrics", self._prometheus, methods=["GET"]),
            Route("/{path:path}", _page, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {Problem: _told, P2PTrainError: _told, Exception: _told, **NOT_HANDLED}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._stopping.is_set():
                raise shutting_down()
            permit = READ if scope.get("method", "GET") in ("GET", "HEAD") else ""
            self._access.judge(Headers(scope=scope), scope["path"], permit, scope.get("subprotocols", ()))
            await self._app(scope, receive, send)
        except Problem as problem:
            if scope["type"] == "websocket":
                await WebSocket(scope, receive, send).send_denial_response(problem.response())
            else:
                await problem.response()(scope, receive, send)
        except Exception as error:  # a defect; Starlette has answered the client  # noqa: BLE001
            tell(error)

    async def stop(self) -> None:
        """End the streams, and refuse new requests."""
        self._stopping.set()
        await self._repeats.stop()

    # ---------------------------------------------------------------------------------------------------------- routes

    async def _endpoint(self, endpoint: Endpoint, request: Request) -> Response:
        query = read_query(endpoint.query, request.query_params.multi_items())
        raw = await read_body(request)
        body = None if endpoint.body is None else read_model(endpoint.body, raw or b"{}")
        carry_out = partial(self._carry_out, endpoint, request, query, body)
        key = request.headers.get("idempotency-key")
        if endpoint.method != "POST" or key is None:
            return await carry_out()
        if not 1 <= len(key) <= 128 or not all("!" <= letter <= "~" for letter in key):
            text = "an Idempotency-Key has 1 to 128 letters, digits and signs, and no spaces"
            raise Problem(400, text, code="invalid_value", param="Idempotency-Key")
        return await self._repeats.answer(key, f"{request.url.path}?{request.url.query}\n".encode() + raw, carry_out)

    async def _carry_out(self, endpoint: Endpoint, request: Request, query: Given, body: Given | None) -> Response:
        client = await self._feed.client()
        call = Call(self._feed, client, self._create_job, request.path_params, query, body, self._experiments)
        answer = await endpoint.handle(call)
        if isinstance(answer, Page):
            return json_response({"items": [item.to_map() for item in answer.items], "next": answer.next})
        return json_response(answer.to_map(), status=endpoint.status)

    async def _openapi(self, request: Request) -> Response:
        # Not before somebody asks, and in a thread: it takes some tenths of a second.
        return json_response(await asyncio.to_thread(document))

    async def _prometheus(self, request: Request) -> Response:
        client = await self._feed.client()
        of = self._feed.records
        text = exposition(await client.cluster(), of(JobInfo), of(PeerInfo), of(ServingInfo))
        return Response(text, 200, HEADERS | {"content-type": CONTENT_TYPE})

    async def _stream(self, socket: WebSocket) -> None:
        try:
            query = read_query(AfterStep, socket.query_params.multi_items())
            job, _ = await (await self._feed.client()).job(socket.path_params["job"])
        except P2PTrainError as error:
            raise problem_of(error) from error
        await serve_stream(socket, self._feed, job, query.after_step, self._stopping)


async def _told(request: Request, error: Exception) -> Response:
    return problem_of(error).response()


async def _docs(request: Request) -> Response:
    return Response(None, 302, {"location": "../../docs.html"})


async def _page(request: Request) -> Response:
    return page_answer(request.url.path, request.headers)
