"""Answers clients that want text (purpose ``generate``), several questions of each at a time.

When a client leaves, its texts end. A slow client is sent no faster than it reads; its texts wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from roles.background import Background
from roles.line import QUIET_S, Line
from roles.serving.texts import TextPiece, TextRequest, TextService, Writing, report_defect
from roles.verifier.protocol import refused, request_untrusted
from wire import text_messages as wire
from wire.connection import Connection
from wire.messages import Hello, Message, RefusalCode

MOST_ASKED = 16
"""Most questions of one client under way."""
UNSENT_BYTES = 1 << 16
"""Unsent bytes above which the next piece waits for a slow client."""
READ_S = 60.0
"""A client that reads nothing for so long is disconnected."""
SENT_CHARS = 8192
"""Most characters in one message: a frame holds them in any script."""


async def serve_texts(service: TextService, connection: Connection, hello: Hello) -> None:
    """Answer one client until it leaves. Raises ``P2PTrainError``: it did not leave in order."""
    caller = _Caller(service, connection)
    try:
        await caller.listen()
    finally:
        await caller.tasks.stop()


class _CallerGone(Exception):
    """The client's connection is lost; ``listen`` notices it, too. (A model may lose connections of its own.)"""


class _Caller:
    def __init__(self, service: TextService, connection: Connection) -> None:
        self.tasks = Background()
        self._service, self._connection = service, connection
        self._line = Line(connection, QUIET_S)
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._stopped: set[int] = set()

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
                request = request_untrusted(message, data)
                if len(self._asked) >= MOST_ASKED:
                    text = f"this connection already has {MOST_ASKED} questions"
                    error = Refused(RefusalCode.BUSY, text, remedy="wait for an answer")
                    self._connection.send(refused(error), stream=stream)  # ``listen`` handles a lost connection
                    return
                self._asked[stream] = self.tasks.start(self._answer(stream, request), f"question {stream}")
                self._asked[stream].add_done_callback(lambda _: self._forget(stream))
            case wire.StreamClose():
                # The client may not know yet that the text has ended.
                if (task := self._asked.get(stream)) is not None and stream not in self._stopped:
                    self._stopped.add(stream)
                    task.cancel()
            case _:
                raise ProtocolError(f"a client sent an unexpected {type(message).__name__}")

    def _forget(self, stream: int) -> None:
        if self._asked.pop(stream).cancelled() and stream in self._stopped:  # cancelled before it began
            with suppress(_CallerGone):
                self._send(wire.TextWritten("cancelled", {}), stream)
        self._stopped.discard(stream)

    async def _answer(self, stream: int, request: TextRequest) -> None:
        last: Message
        writing: Writing | None = None
        try:
            try:
                writing = await self._service.write(request)
                await self._send_all(stream, writing)
                last = wire.TextWritten(writing.ended, writing.stats())
            except asyncio.CancelledError:
                if stream not in self._stopped or writing is None:
                    raise
                await writing.close()
                last = wire.TextWritten("cancelled", writing.stats())
            except P2PTrainError as error:
                last = refused(error)
            except _CallerGone:
                return
            except Exception as mistake:  # a defect of this program: the client must not wait  # noqa: BLE001
                last = refused(report_defect(mistake))
            with suppress(_CallerGone):
                self._send(last, stream)
        finally:
            if writing is not None:
                await writing.close()

    async def _send_all(self, stream: int, writing: Writing) -> None:
        self._send(wire.QuestionAccepted(writing.prompt_tokens, writing.left_out), stream)
        async for piece in writing:
            for part in _frames(piece):
                self._send(part, stream)
            if self._connection.unsent_bytes > UNSENT_BYTES:
                try:
                    await self._connection.flush(timeout_s=READ_S)
                except (ConnectionLost, DeadlineExceeded) as problem:
                    self._connection.abort(problem)
                    raise _CallerGone from problem

    def _send(self, message: Message, stream: int) -> None:
        try:
            self._connection.send(message, stream=stream)
        except ConnectionLost as problem:
            raise _CallerGone from problem


def _frames(piece: TextPiece) -> Iterator[wire.PieceWritten]:
    yield wire.PieceWritten(piece.text[:SENT_CHARS], encode_ids(piece.tokens))
    for start in range(SENT_CHARS, len(piece.text), SENT_CHARS):
        yield wire.PieceWritten(piece.text[start : start + SENT_CHARS], b"")
