"""The HTTP server of ``TokenizingService``s: its routes and access, and how answers are delivered.

A text is written while its client is connected. When the connection ends, its work is cancelled and its ``Writing``
closed at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, Refused, ResourceError, TooLong, UserError
from p2ptrain.core.world import World
from roles.http.access import Keys, read_key, refuse_pages
from roles.http.answers import (
    HEADERS,
    MESSAGES,
    RETRY_AFTER_S,
    Delivery,
    JsonApp,
    Problem,
    json_bytes,
    json_response,
    model_card,
    read_body,
    send_head,
    send_part,
)
from roles.http.server import serving
from roles.serving.texts import TokenizingService
from roles.verifier.http.answer import AnswerOrigin, HttpAnswer, Question
from roles.verifier.http.chat import ChatAnswer
from roles.verifier.http.completions import CompletionAnswer
from roles.verifier.http.events import ChoiceEvent, TextAdded
from roles.verifier.http.messages import MessageAnswer, read_count
from roles.verifier.http.responses import ResponseAnswer
from roles.verifier.http.tokens import read_detokenize, read_tokenize
from wire.address import is_loopback
from wire.transport import TcpNetwork

_HEALTH = "/health"
_INTERFACES: dict[str, Callable[[bytes, AnswerOrigin], HttpAnswer]] = {
    "/v1/completions": CompletionAnswer,
    "/v1/chat/completions": ChatAnswer,
    "/v1/responses": ResponseAnswer,
    MESSAGES: MessageAnswer,
}

_QUESTIONS: dict[str, Callable[[bytes], Question]] = {
    f"{MESSAGES}/count_tokens": read_count,
    "/tokenize": read_tokenize,
    "/detokenize": read_detokenize,
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

    At the end texts under way are ended and their clients told.

    Args:
        services: of one model each.
        key: API key of clients, as from ``read_key``. None is allowed on the loopback only.

    Raises:
        UserError: the address cannot be used, or needs a key.
    """
    sock = await open_socket(host, port, key)
    address: tuple[str, int] = sock.getsockname()[:2]
    async with serving(HttpApp(services, world, key=key, local=is_loopback(address[0])), sock):
        yield address


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
        return Problem(503, message, code="overloaded", retry_after_s=error.retry_after_s or RETRY_AFTER_S)
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
        routes = [
            Route(_HEALTH, self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
            *(Route(path, self._write, methods=["POST"]) for path in _INTERFACES),
            *(Route(path, self._answer, methods=["POST"]) for path in _QUESTIONS),
        ]
        super().__init__(routes, problem_of)

    def let_in(self, asked: HTTPConnection) -> None:
        if self._pages_refused:
            refuse_pages(asked.headers, "to allow it, start the endpoint with an API key")
        if self._keys is not None and asked.scope["path"] != _HEALTH:
            self._keys.permit(asked.headers)

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [_card(each) for each in self._services.values()]})

    async def _one_model(self, request: HttpRequest) -> Response:
        return json_response(_card(self._service(request.path_params["model"])))

    async def _write(self, request: HttpRequest) -> Delivery:
        interface, random = _INTERFACES[request.url.path], self.world.random
        origin = AnswerOrigin(f"{random.getrandbits(96):024x}", random.getrandbits(63), int(self.world.clock.wall()))
        answer = await self._read(request, lambda body: interface(body, origin))
        answer.service = self._service(answer.model)
        work = partial(_send_stream if answer.is_stream else _send_whole, answer)
        return Delivery(work, self, answer.error_frame)

    async def _answer(self, request: HttpRequest) -> Response:
        model, ask = await self._read(request, _QUESTIONS[request.url.path])
        return json_response(await ask(self._service(model)))

    async def _read(self, request: HttpRequest, read: Callable[[bytes], _Body]) -> _Body:
        return await asyncio.to_thread(read, await read_body(request, MOST_BODY_BYTES))

    def _service(self, model: str | None) -> TokenizingService:
        """The service of a model; None: of the first one. Raises ``Problem``."""
        service = next(iter(self._services.values())) if model is None else self._services.get(model)
        if service is None:
            here = f"this endpoint has only the model{'s' * (len(self._services) > 1)} {', '.join(self._services)}"
            raise Problem(404, here, code="model_not_found", param="model")
        return service


def _headers(answer: HttpAnswer) -> dict[str, str]:
    return HEADERS | ({"p2ptrain-turns-left-out": str(answer.left_out)} if answer.left_out else {})


async def _send_whole(answer: HttpAnswer, send: Send) -> None:
    choices = await answer.write_best()
    # The log-probabilities of a long prompt take seconds.
    body = await asyncio.to_thread(lambda: json_bytes(answer.whole(choices)))
    about = {"content-type": "application/json", "content-length": str(len(body))}
    await send_head(send, 200, _headers(answer) | about)
    await send_part(send, body, more=False)


async def _send_stream(answer: HttpAnswer, send: Send) -> None:
    has_begun, sending = False, asyncio.Lock()  # texts that are written at the same time share a stream

    async def take(event: ChoiceEvent) -> None:
        nonlocal has_begun
        async with sending:
            if not has_begun:  # only now is it certain that a text begins
                has_begun = True
                await send_head(send, 200, _EVENTS | _headers(answer))
            frames = answer.frames(event)
            if isinstance(event, TextAdded) and event.is_prompt:  # as above
                frames = iter(await asyncio.to_thread(list, frames))
            for frame in frames:
                await send_part(send, frame)

    await answer.write(take)
    await send_part(send, b"".join(answer.last_frames()), more=False)
