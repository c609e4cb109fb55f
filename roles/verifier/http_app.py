"""OpenAI's HTTP interface over a ``TextService``: its server, routes, access, and answers.

A text is written while its client is connected. When the connection ends, its work is cancelled and its ``Writing``
closed at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from collections.abc import AsyncIterator
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
from p2ptrain.core.world import Clock, World
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
from roles.serving.texts import TextService, Writing
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
    service: TextService, host: str, port: int, key: str | None = None, *, world: World
) -> AsyncIterator[tuple[str, int]]:
    """Answer HTTP on ``host:port`` while the body runs. Yields the bound address. Port 0: any free port.

    At the end texts under way are ended and their clients told, within ``STOP_S``.

    Args:
        key: API key of clients, as from ``read_key``. None is allowed on the loopback only.

    Raises:
        UserError: the address cannot be used, or needs a key.
    """
    sock = await listening(host, port, key)
    address: tuple[str, int] = sock.getsockname()[:2]
    app = HttpApp(service, key=key, local=is_loopback(address[0]), clock=world.clock, random=world.random)
    try:
        async with serving(app, sock):
            try:
                yield address
            finally:
                app.stop()
    finally:
        await app.settle(timeout_s=STOP_S)


async def listening(host: str, port: int, key: str | None) -> socket.socket:
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
    (await listening(host, port, None if key_file is None else read_key(key_file, lambda _: None))).close()


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


def usage_of(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class HttpApp(JsonApp):
    """The application.

    Args:
        key: API key of clients; None: none is needed.
        local: only this machine reaches it. Without a key, browsers' requests for foreign pages are then refused.
        random: source of seeds for requests without one.
    """

    def __init__(
        self, service: TextService, *, key: str | None, local: bool, clock: Clock, random: random.Random
    ) -> None:
        self.service, self._clock, self._random = service, clock, random
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
        super().__init__(routes)

    def draw_number(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    async def settle(self, *, timeout_s: float) -> None:
        await self._closing.settle(timeout_s=timeout_s)
        await self._closing.stop()

    # access

    def let_in(self, asked: HTTPConnection) -> None:
        if self._pages_refused:
            refuse_pages(asked.headers, "to allow it, start the endpoint with an API key")
        if self._keys is not None and asked.scope["path"] != _HEALTH:
            self._keys.permit(asked.headers.get("authorization", ""))

    def problem_of(self, error: P2PTrainError) -> Problem:
        return problem_of(error)

    # routes

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [model_card(self.service)]})

    async def _one_model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["model"])
        return json_response(model_card(self.service))

    async def _write(self, request: HttpRequest) -> _Reply:
        chat = request.url.path == _CHAT
        read = read_chat if chat else read_completion
        body = await read_body(request, MOST_BODY_BYTES)
        asked = await asyncio.to_thread(read, body, lambda: self.draw_number(63))
        self._check_model(asked.model)
        return _Reply(self, asked, chat=chat, created=int(self._clock.wall()))

    def _check_model(self, name: str) -> None:
        if name != self.service.model:
            here = f"this endpoint has only the model {self.service.model}"
            raise Problem(404, here, code="model_not_found", param="model")

    # writing

    async def close(self, writing: Writing) -> None:
        await asyncio.wait({self._closing.start(writing.close(), "close a writing")})


class _Reply:
    """The answer to one request, an ASGI application. Its client may leave at any point. ``created``: Unix seconds."""

    def __init__(self, app: HttpApp, asked: HttpTextRequest, *, chat: bool, created: int) -> None:
        self._app, self._asked, self._chat, self._created = app, asked, chat, created
        self._ident = f"{'chatcmpl' if chat else 'cmpl'}-{app.draw_number(96):024x}"
        self._began = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._streamed(send) if self._asked.stream else self._whole(scope, receive, send)
        try:
            await while_wanted(receive, work, self._app.stopping)
        except Exception as error:
            if not self._began:
                raise
            if not isinstance(error, P2PTrainError | Problem):
                tell(error)
            # No [DONE]: the text is incomplete.
            await _send(send, event(self._app.problem(error).as_json()), more=False)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[tuple[str, str]] = []
        prompt, new, headers = 0, 0, dict[str, str]()
        for text in self._asked.texts:
            writing = await self._app.service.write(text)
            try:
                headers |= _left_out(writing)
                prompt += writing.prompt_tokens
                pieces: list[str] = []
                async for piece in writing:
                    pieces.append(piece.text)
                    new += len(piece.tokens)
                texts.append(("".join(pieces), _reason(writing)))
            finally:
                await self._app.close(writing)
        self._began = True
        await json_response(self._whole_body(texts, usage_of(prompt, new)), headers=headers)(scope, receive, send)

    async def _streamed(self, send: Send) -> None:
        prompt = new = 0
        for index, text in enumerate(self._asked.texts):
            writing = await self._app.service.write(text)
            try:
                if not self._began:  # only now is it certain that the text begins
                    self._began = True
                    headers = HEADERS | _EVENTS | _left_out(writing)
                    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": encoded})
                prompt += writing.prompt_tokens
                if self._chat:
                    await _send(send, self._event(index, {"role": "assistant", "content": ""}))
                async for piece in writing:
                    new += len(piece.tokens)
                    if piece.text:
                        await _send(send, self._event(index, {"content": piece.text} if self._chat else piece.text))
                reason = _reason(writing)
            finally:
                await self._app.close(writing)
            await _send(send, self._event(index, {} if self._chat else "", reason))
        if self._asked.include_usage:
            usage = {"choices": [], "usage": usage_of(prompt, new)}
            await _send(send, event(self._frame("chat.completion.chunk") | usage))
        await _send(send, DONE, more=False)

    # formats

    def _whole_body(self, texts: list[tuple[str, str]], usage: dict[str, int]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(texts):
            written = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": index, **written, "logprobs": None, "finish_reason": reason})
        return self._frame("chat.completion") | {"choices": choices, "usage": usage}

    def _event(self, index: int, content: str | dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": index, "delta" if self._chat else "text": content, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._asked.include_usage else {}
        return event(self._frame("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _frame(self, chat_kind: str) -> dict[str, Any]:
        return {
            "id": self._ident,
            "object": chat_kind if self._chat else "text_completion",
            "created": self._created,
            "model": self._app.service.model,
            "system_fingerprint": fingerprint(self._app.service),
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
