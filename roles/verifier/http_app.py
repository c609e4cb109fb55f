"""The HTTP server of ``TokenizingService``s: its routes and access, and how answers are delivered.

A text is written while its client is connected. When the connection ends, its work is cancelled and its ``Writing``
closed at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, Refused, ResourceError, TooLong, UserError
from p2ptrain.core.world import World
from roles.background import Background
from roles.http.access import Keys, read_key, refuse_pages
from roles.http.answers import (
    HEADERS,
    RETRY_AFTER_S,
    JsonApp,
    Problem,
    json_response,
    model_card,
    read_body,
    send_head,
    send_part,
    tell,
    while_wanted,
)
from roles.http.server import STOP_S, serving
from roles.serving.texts import TokenizingService, Writing
from roles.verifier.http.answer import AnswerOrigin, AnswerWriter, HttpAnswer
from roles.verifier.http.chat import ChatAnswer
from roles.verifier.http.completions import CompletionAnswer
from roles.verifier.http.events import ChoiceBegan, ChoiceEvent, TextAdded
from roles.verifier.http.messages import MessageAnswer, error_document, read_count
from roles.verifier.http.responses import ResponseAnswer
from roles.verifier.http.tokens import count_conversation, detokenize, read_detokenize, read_tokenize, tokenize
from wire.address import is_loopback
from wire.transport import TcpNetwork

_HEALTH, _MESSAGES = "/health", "/v1/messages"
_INTERFACES: dict[str, Callable[[bytes, AnswerOrigin], HttpAnswer]] = {
    "/v1/completions": CompletionAnswer,
    "/v1/chat/completions": ChatAnswer,
    "/v1/responses": ResponseAnswer,
    _MESSAGES: MessageAnswer,
}

_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
"""Headers of a stream. The second one tells proxies not to buffer events."""
MOST_BODY_BYTES = 2 << 20
"""Largest body: a prompt of half a million tokens. Malicious JSON of this size takes some tenths of a second."""
_Body = TypeVar("_Body")


@asynccontextmanager
async def serving_http(
    services: Sequence[TokenizingService], host: str, port: int, key: str | None = None, *, world: World
) -> AsyncIterator[tuple[str, int]]:
    """Answer HTTP on ``host:port`` while the body runs. Yields the bound address. Port 0: any free port.

    At the end texts under way are ended and their clients told, within ``STOP_S``.

    Args:
        services: of one model each.
        key: API key of clients, as from ``read_key``. None is allowed on the loopback only.

    Raises:
        UserError: the address cannot be used, or needs a key.
    """
    sock = await open_socket(host, port, key)
    address: tuple[str, int] = sock.getsockname()[:2]
    app = HttpApp(services, world, key=key, local=is_loopback(address[0]))
    try:
        async with serving(app, sock):
            yield address
    finally:
        await app.settle(timeout_s=STOP_S)


async def open_socket(host: str, port: int, key: str | None) -> socket.socket:
    """A listening socket. Arguments and errors as of ``serving_http``."""
    # The kernel gives up a machine that no longer answers after a minute.
    sock = await TcpNetwork(user_timeout_s=60.0).bound(host, port, option="--http")
    if not is_loopback(sock.getsockname()[0]) and key is None:
        sock.close()
        raise UserError(
            f"HTTP on {host} needs an API key: without it, everyone who reaches the port can use the model",
            remedy="give --api-key-file FILE, or listen on 127.0.0.1",
        )
    return sock


async def check_place(host: str, port: int, key_file: Path | None) -> None:
    """Raise ``UserError`` if ``host:port`` cannot be served with the key in this file. None: without a key."""
    (await open_socket(host, port, None if key_file is None else read_key(key_file, lambda _: None))).close()


def problem_of(error: P2PTrainError) -> Problem:
    message = f"{error.message}: {error.remedy}" if error.remedy else error.message
    if isinstance(error, TooLong):
        return Problem(400, message, code="context_length_exceeded")
    if isinstance(error, UserError):
        return Problem(400, message, code="invalid_value")
    if isinstance(error, Refused | ResourceError):
        after_s = error.retry_after_s if isinstance(error, Refused) else 0
        return Problem(503, message, code="overloaded", retry_after_s=after_s or RETRY_AFTER_S)
    if isinstance(error, NetworkError | PeerError):
        return Problem(503, message, code="model_unreachable")
    return Problem(500, message, code="model_failed")


def _card(service: TokenizingService) -> dict[str, Any]:
    return model_card(service.model, created=service.created, context=service.context)


class HttpApp(JsonApp):
    """The application.

    Args:
        key: API key of clients; None: none is needed.
        local: only this machine reaches it. Without a key, browsers' requests for foreign pages are then refused.
        world: its randomness seeds requests without a seed.
    """

    def __init__(self, services: Sequence[TokenizingService], world: World, *, key: str | None, local: bool) -> None:
        self.world = world
        self._services = {service.model: service for service in services}
        self._keys = None if key is None else Keys({key: "write"})
        self._pages_refused = local and key is None
        self._closing = Background()
        routes = [
            Route(_HEALTH, self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
            *(Route(path, self._write, methods=["POST"]) for path in _INTERFACES),
            Route(f"{_MESSAGES}/count_tokens", self._count, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        super().__init__(routes, problem_of)

    async def settle(self, *, timeout_s: float) -> None:
        await self._closing.settle(timeout_s=timeout_s)
        await self._closing.stop()

    def let_in(self, asked: HTTPConnection) -> None:
        if self._pages_refused:
            refuse_pages(asked.headers, "to allow it, start the endpoint with an API key")
        if self._keys is not None and asked.scope["path"] != _HEALTH:
            key = asked.headers.get("x-api-key")  # of Anthropic's clients
            self._keys.permit(asked.headers.get("authorization") or (f"Bearer {key}" if key else ""))

    def error_response(self, problem: Problem, path: str) -> Response:
        return problem.response(error_document(problem) if path.startswith(_MESSAGES) else None)

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [_card(each) for each in self._services.values()]})

    async def _one_model(self, request: HttpRequest) -> Response:
        return json_response(_card(self._service(request.path_params["model"])))

    async def _write(self, request: HttpRequest) -> _Reply:
        interface = _INTERFACES[request.url.path]
        random = self.world.random
        origin = AnswerOrigin(f"{random.getrandbits(96):024x}", random.getrandbits(63), int(self.world.clock.wall()))
        answer = await self._read(request, lambda body: interface(body, origin))
        answer.service = self._service(answer.request.model)
        return _Reply(self, answer)

    async def _count(self, request: HttpRequest) -> Response:
        model, text, use = await self._read(request, read_count)
        ids = await count_conversation(self._service(model), text.turns, use)
        return json_response({"input_tokens": len(ids)})

    async def _tokenize(self, request: HttpRequest) -> Response:
        fields = await self._read(request, read_tokenize)
        return json_response(await tokenize(self._service(fields.model), fields))

    async def _detokenize(self, request: HttpRequest) -> Response:
        fields = await self._read(request, read_detokenize)
        return json_response(await detokenize(self._service(fields.model), fields))

    async def _read(self, request: HttpRequest, read: Callable[[bytes], _Body]) -> _Body:
        return await asyncio.to_thread(read, await read_body(request, MOST_BODY_BYTES))

    def _service(self, model: str | None) -> TokenizingService:
        """The service of a model; None: of the first one. Raises ``Problem``."""
        service = next(iter(self._services.values())) if model is None else self._services.get(model)
        if service is None:
            here = f"this endpoint has only the model{'s' * (len(self._services) > 1)} {', '.join(self._services)}"
            raise Problem(404, here, code="model_not_found", param="model")
        return service

    async def close(self, writing: Writing) -> None:
        await asyncio.wait({self._closing.start(writing.close(), "close a writing")})


class _Reply:
    """The answer to one request, an ASGI application. Its client may leave at any point."""

    def __init__(self, app: HttpApp, answer: HttpAnswer) -> None:
        self._app, self._answer = app, answer
        random = app.world.random
        self._writer = AnswerWriter(
            answer.service, answer.request, close=app.close, draw_id=lambda: f"{random.getrandbits(96):024x}"
        )
        self._headers = dict[str, str]()
        self._began = False
        self._sending = asyncio.Lock()  # texts that are written at the same time share a stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._send_stream(send) if self._answer.request.is_stream else self._send_whole(scope, receive, send)
        try:
            await while_wanted(receive, work, self._app.stopping)
        except Exception as error:
            if not self._began:
                raise
            if not isinstance(error, P2PTrainError | Problem):
                tell(error)
            # The stream ends without its usual end: the text is incomplete.
            await send_part(send, self._answer.error_frame(self._app.problem(error)), more=False)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = await self._writer.write_best(self._count)
        # The log-probabilities of a long prompt take seconds.
        response = await asyncio.to_thread(lambda: json_response(self._answer.whole(choices), headers=self._headers))
        self._began = True
        await response(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        async def take(event: ChoiceEvent) -> None:
            self._count(event)
            async with self._sending:
                if not self._began:  # only now is it certain that a text begins
                    self._began = True
                    await send_head(send, 200, HEADERS | _EVENTS | self._headers)
                frames = self._answer.frames(event)
                if isinstance(event, TextAdded) and event.is_prompt:  # as above
                    frames = iter(await asyncio.to_thread(list, frames))
                for frame in frames:
                    await send_part(send, frame)

        await self._writer.write(take)
        await send_part(send, b"".join(self._answer.last_frames()), more=False)

    def _count(self, event: ChoiceEvent) -> None:
        self._answer.count(event)
        if isinstance(event, ChoiceBegan) and event.left_out:
            self._headers["p2ptrain-turns-left-out"] = str(event.left_out)
