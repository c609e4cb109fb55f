"""OpenAI's HTTP interface over ``TextService``s: its server, routes, access, and answers.

A text is written while its client is connected. When the connection ends, its work is cancelled and its ``Writing``
closed at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from p2ptrain import __version__
from p2ptrain.core.errors import P2PTrainError, UserError
from p2ptrain.core.world import World
from roles.background import Background
from roles.http.access import Keys, read_key, refuse_pages
from roles.http.answers import (
    HEADERS,
    JsonApp,
    Problem,
    json_bytes,
    json_response,
    read_body,
    shutting_down,
    tell,
    while_wanted,
)
from roles.http.server import STOP_S, serving
from roles.serving.texts import TextRequest, TextService, Writing
from roles.verifier.http_requests import HttpTextRequest, problem_of, read_chat, read_completion
from wire.address import is_loopback
from wire.transport import TcpNetwork

_HEALTH, _CHAT = "/health", "/v1/chat/completions"

_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
"""Headers of a stream. The second one tells proxies not to buffer events."""
DONE = b"data: [DONE]\n\n"
MOST_BODY_BYTES = 2 << 20
"""Largest body: a prompt of half a million tokens. Malicious JSON of this size takes some tenths of a second."""
_ENDED = {"stop": "stop", "end": "stop", "length": "length"}
"""``Writing.ended`` → OpenAI's reason, which is the same for a stop string and the model's own end."""


@asynccontextmanager
async def serving_http(
    services: Sequence[TextService], host: str, port: int, key: str | None = None, *, world: World
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


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


def fingerprint(service: TextService) -> str:
    """A digest of what may change the text: the model's files and the version of this program."""
    identity = f"{__version__}\n{service.model}\n{service.created}"
    return "fp_" + hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def model_card(service: TextService) -> dict[str, Any]:
    """The model as in ``GET /v1/models``; ``context_length`` is an extension."""
    card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "p2ptrain"}
    return card | {"context_length": service.context}


class HttpApp(JsonApp):
    """The application.

    Args:
        key: API key of clients; None: none is needed.
        local: only this machine reaches it. Without a key, browsers' requests for foreign pages are then refused.
        world: its randomness seeds requests without a seed.
    """

    def __init__(self, services: Sequence[TextService], world: World, *, key: str | None, local: bool) -> None:
        self.world = world
        self._services = {service.model: service for service in services}
        self._keys = None if key is None else Keys({key: "write"})
        self._pages_refused = local and key is None
        self._closing = Background()
        routes = [
            Route(_HEALTH, self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
            Route("/v1/completions", self._write, methods=["POST"]),
            Route(_CHAT, self._write, methods=["POST"]),
        ]
        super().__init__(routes, problem_of)

    async def settle(self, *, timeout_s: float) -> None:
        await self._closing.settle(timeout_s=timeout_s)
        await self._closing.stop()

    def let_in(self, asked: HTTPConnection) -> None:
        if self._pages_refused:
            refuse_pages(asked.headers, "to allow it, start the endpoint with an API key")
        if self._keys is not None and asked.scope["path"] != _HEALTH:
            self._keys.permit(asked.headers.get("authorization", ""))

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [model_card(each) for each in self._services.values()]})

    async def _one_model(self, request: HttpRequest) -> Response:
        return json_response(model_card(self._service(request.path_params["model"])))

    async def _write(self, request: HttpRequest) -> _Reply:
        chat = request.url.path == _CHAT
        read = read_chat if chat else read_completion
        body = await read_body(request, MOST_BODY_BYTES)
        asked = await asyncio.to_thread(read, body, lambda: self.world.random.getrandbits(63))
        return _Reply(self, self._service(asked.model), asked, chat=chat)

    def _service(self, model: str) -> TextService:
        if (service := self._services.get(model)) is None:
            here = f"this endpoint has only the model{'s' * (len(self._services) > 1)} {', '.join(self._services)}"
            raise Problem(404, here, code="model_not_found", param="model")
        return service

    async def close(self, writing: Writing) -> None:
        await asyncio.wait({self._closing.start(writing.close(), "close a writing")})


class _Reply:
    """The answer to one request, an ASGI application. Its client may leave at any point."""

    def __init__(self, app: HttpApp, service: TextService, asked: HttpTextRequest, *, chat: bool) -> None:
        self._app, self._service, self._asked, self._chat = app, service, asked, chat
        self._created = int(app.world.clock.wall())
        self._ident = f"{'chatcmpl' if chat else 'cmpl'}-{app.world.random.getrandbits(96):024x}"
        self._began = False
        self._prompt_tokens = self._new_tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._send_stream(send) if self._asked.stream else self._send_whole(scope, receive, send)
        try:
            await while_wanted(receive, work, self._app.stopping)
        except Exception as error:
            if not self._began:
                raise
            if not isinstance(error, P2PTrainError | Problem):
                tell(error)
            # No [DONE]: the text is incomplete.
            await _send(send, event(self._app.problem(error).as_json()), more=False)

    @asynccontextmanager
    async def _writing(self, text: TextRequest) -> AsyncIterator[Writing]:
        writing = await self._service.write(text)
        self._prompt_tokens += writing.prompt_tokens
        try:
            yield writing
        finally:
            await self._app.close(writing)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: list[dict[str, Any]] = []
        headers: dict[str, str] = {}
        for index, request in enumerate(self._asked.texts):
            async with self._writing(request) as writing:
                headers |= _left_out(writing)
                text = ""
                async for piece in writing:
                    text += piece.text
                    self._new_tokens += len(piece.tokens)
                reason = _reason(writing)
            written = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": index, **written, "logprobs": None, "finish_reason": reason})
        self._began = True
        body = self._frame("chat.completion") | {"choices": choices, "usage": self._usage()}
        await json_response(body, headers=headers)(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        for index, request in enumerate(self._asked.texts):
            async with self._writing(request) as writing:
                if not self._began:  # only now is it certain that the text begins
                    self._began = True
                    headers = HEADERS | _EVENTS | _left_out(writing)
                    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": encoded})
                if self._chat:
                    await _send(send, self._event(index, {"role": "assistant", "content": ""}))
                async for piece in writing:
                    self._new_tokens += len(piece.tokens)
                    if piece.text:
                        await _send(send, self._event(index, {"content": piece.text} if self._chat else piece.text))
                reason = _reason(writing)
            await _send(send, self._event(index, {} if self._chat else "", reason))
        if self._asked.include_usage:
            usage = {"choices": [], "usage": self._usage()}
            await _send(send, event(self._frame("chat.completion.chunk") | usage))
        await _send(send, DONE, more=False)

    def _usage(self) -> dict[str, int]:
        prompt, new = self._prompt_tokens, self._new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _event(self, index: int, content: str | dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": index, "delta" if self._chat else "text": content, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._asked.include_usage else {}
        return event(self._frame("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _frame(self, chat_kind: str) -> dict[str, Any]:
        return {
            "id": self._ident,
            "object": chat_kind if self._chat else "text_completion",
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": fingerprint(self._service),
        }


def _reason(writing: Writing) -> str:
    """OpenAI's reason for the end of the text. Raises ``Problem``: the text was cancelled."""
    reason = _ENDED.get(writing.ended)
    if reason is None:
        raise shutting_down()
    return reason


def _left_out(writing: Writing) -> dict[str, str]:
    return {"p2ptrain-turns-left-out": str(writing.left_out)} if writing.left_out else {}


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
