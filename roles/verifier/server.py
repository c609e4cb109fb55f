"""Answers clients that want text (purpose ``generate``), one question on each connection (``wire.text_messages``).

The functions at the end encode and decode questions, for ``client``, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgpack
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from p2ptrain.core.errors import ProtocolError, UserError
from roles.http.answers import send_head, send_part
from roles.serving.texts import TextRequest, TextService
from wire.codec import unpack_untrusted
from wire.http_messages import MOST_HTTP_BYTES, HttpRequest
from wire.schema import instance_untrusted
from wire.text_messages import MOST_STOPS, MOST_TURNS, STOP_CHARS

MOST_AT_ONCE = 2048
"""Most characters and tokens in one ``TextNews``: a part of an answer holds them in any script."""


def text_app(services: Sequence[TextService]) -> ASGIApp:
    """The application that answers questions. ``services``: of one model each."""
    by_model = {service.model: service for service in services}

    async def write(scope: Scope, receive: Receive, send: Send) -> None:
        request = request_untrusted(await Request(scope, receive).body())
        if (service := by_model.get(model := scope["state"]["model"])) is None:
            raise UserError(f"the model {model} is not served here", remedy=f"name one of {', '.join(by_model)}")
        writing = await service.write(request)
        try:
            await send_head(send, 200, {})
            await send_part(send, _packed(prompt_tokens=writing.prompt_tokens, left_out=writing.left_out))
            async for piece in writing:
                for start in range(0, max(len(piece.text), len(piece.tokens)), MOST_AT_ONCE):
                    part = slice(start, start + MOST_AT_ONCE)
                    await send_part(send, _packed(text=piece.text[part], tokens=piece.tokens[part]))
            await send_part(send, _packed(ended=writing.ended, stats=writing.stats()), more=False)
        finally:
            await writing.close()

    return write


def _packed(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def encode_question(model: str, request: TextRequest) -> tuple[HttpRequest, bytes]:
    """Encode a request of a model. Raises ``UserError``: it exceeds the limits."""
    try:
        data = _packed(**asdict(request))
        if len(data) > MOST_HTTP_BYTES:
            raise ProtocolError(f"it has {len(data)} bytes")
        request_untrusted(data)
    except (ProtocolError, ValueError, OverflowError) as problem:  # half a character, or a number of over 64 bits
        limits = (
            f"{MOST_HTTP_BYTES >> 20} MiB, {MOST_TURNS} turns, {MOST_STOPS} stop strings of {STOP_CHARS} characters"
        )
        raise UserError(f"the question is not valid: {problem}", remedy=f"ask for less: {limits}") from None
    return HttpRequest("POST", "/", size_bytes=len(data), model=model), data


def request_untrusted(data: bytes) -> TextRequest:
    """Decode a question. Raises ``ProtocolError``: no client sends it."""
    request = instance_untrusted(TextRequest, unpack_untrusted(data, most_bytes=MOST_HTTP_BYTES))
    has_calls = any(turn.tool_calls for turn in request.turns)
    if has_calls or request.tools or request.grammar or request.prompt_logprobs or request.logprobs is not None:
        raise ProtocolError("tools, grammars and log-probabilities are for HTTP only")
    return request
