"""Answers clients that want text (purpose ``generate``), several questions of each at a time.

When a client leaves, its texts end. A slow client is sent no faster than it reads; its texts wait. The functions at
the end encode and decode questions and refusals (``wire.text_messages``), for ``client``, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import msgpack

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.background import Background
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    ProtocolError,
    Refused,
    UserError,
)
from roles.line import QUIET_S, Line
from roles.serving.texts import TextRequest, TextService, Writing, report_defect
from wire import text_messages as wire
from wire.codec import unpack_untrusted
from wire.connection import Connection
from wire.messages import Hello, Message, RefusalCode
from wire.schema import instance_untrusted
from wire.text_messages import MOST_BYTES, MOST_STOPS, MOST_TURNS, STOP_CHARS

MOST_ASKED = 16
"""Most questions of one client under way."""
UNSENT_BYTES = 1 << 16
"""Unsent bytes above which the next piece waits for a slow client."""
READ_S = 60.0
"""A client that reads nothing for so long is disconnected."""
SENT_CHARS = 8192
"""Most characters in one message: a frame holds them in any script."""


async def serve_texts(services: Sequence[TextService], connection: Connection, hello: Hello) -> None:
    """Answer one client until it leaves. ``services``: of one model each. Raises ``P2PTrainError``: it did not leave in
    order."""
    caller = _Caller(services, connection)
    try:
        await caller.listen()
    finally:
        await caller.tasks.stop()


class _Caller:
    def __init__(self, services: Sequence[TextService], connection: Connection) -> None:
        self.tasks = Background()
        self._services, self._connection = {service.model: service for service in services}, connection
        self._line = Line(connection, QUIET_S)
        self._asked: dict[int, asyncio.Task[None]] = {}

    async def listen(self) -> None:
        with suppress(ConnectionLost):
            async with self._line.keep_alive():
                while True:
                    received = await self._line.receive()
                    await self._take(received.message, received.stream)

    async def _take(self, message: Message, stream: int) -> None:
        match message:
            case wire.TextQuestion():
                if stream in self._asked:
                    raise ProtocolError(f"question {stream} was sent twice")
                data = await self._line.receive_bulk(message.size_bytes, stream=stream)
                request = request_untrusted(data)
                if len(self._asked) >= MOST_ASKED:
                    text = f"this connection already has {MOST_ASKED} questions"
                    error = Refused(RefusalCode.BUSY, text, remedy="wait for an answer")
                    self._connection.send(wire.encode_refusal(error), stream=stream)  # ``listen`` sees a lost one
                    return
                answer = self._answer(stream, message.model, request)
                self._asked[stream] = self.tasks.start(answer, f"question {stream}")
                self._asked[stream].add_done_callback(lambda _: self._asked.pop(stream))
            case wire.StreamClose():
                if (task := self._asked.get(stream)) is not None:  # else the text has just ended
                    task.cancel()
            case _:
                raise ProtocolError(f"a client sent an unexpected {type(message).__name__}")

    async def _answer(self, stream: int, model: str, request: TextRequest) -> None:
        last: Message
        writing: Writing | None = None
        try:
            if (service := self._services.get(model)) is None:
                here = ", ".join(self._services)
                raise UserError(f"the model {model} is not served here", remedy=f"name one of {here}")
            writing = await service.write(request)
            await self._send_all(stream, writing)
            last = wire.TextWritten(writing.ended, writing.stats())
        except P2PTrainError as error:
            last = wire.encode_refusal(error)
        except Exception as mistake:  # a defect of this program: the client must not wait  # noqa: BLE001
            last = wire.encode_refusal(report_defect(mistake))
        finally:
            if writing is not None:
                await writing.close()
        with suppress(ConnectionLost):
            self._connection.send(last, stream=stream)

    async def _send_all(self, stream: int, writing: Writing) -> None:
        self._connection.send(wire.QuestionAccepted(writing.prompt_tokens, writing.left_out), stream=stream)
        async for piece in writing:
            self._connection.send(wire.PieceWritten(piece.text[:SENT_CHARS], encode_ids(piece.tokens)), stream=stream)
            for start in range(SENT_CHARS, len(piece.text), SENT_CHARS):
                self._connection.send(wire.PieceWritten(piece.text[start : start + SENT_CHARS], b""), stream=stream)
            if self._connection.unsent_bytes > UNSENT_BYTES:
                try:
                    await self._connection.flush(timeout_s=READ_S)
                except DeadlineExceeded as problem:
                    self._connection.abort(problem)
                    raise


def encode_question(model: str, request: TextRequest) -> tuple[wire.TextQuestion, bytes]:
    """Encode a request of a model. Raises ``UserError``: it exceeds the limits."""
    try:
        data: bytes = msgpack.packb(asdict(request))
        if len(data) > MOST_BYTES:
            raise ProtocolError(f"it has {len(data)} bytes")
        request_untrusted(data)
    except (ProtocolError, ValueError, OverflowError) as problem:  # half a character, or a number of over 64 bits
        limits = f"{MOST_BYTES >> 20} MiB, {MOST_TURNS} turns and {MOST_STOPS} stop strings of {STOP_CHARS} characters"
        raise UserError(f"the question is not valid: {problem}", remedy=f"ask for less: {limits}") from None
    return wire.TextQuestion(model, len(data)), data


def request_untrusted(data: bytes | bytearray) -> TextRequest:
    """Decode a question. Raises ``ProtocolError``: no client sends it."""
    request = instance_untrusted(TextRequest, unpack_untrusted(data, most_bytes=MOST_BYTES))
    has_calls = any(turn.tool_calls for turn in request.turns)
    if has_calls or request.tools or request.grammar or request.prompt_logprobs or request.logprobs is not None:
        raise ProtocolError("tools, grammars and log-probabilities are for HTTP only")
    return request
