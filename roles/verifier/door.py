"""Callers that want text (purpose ``generate``): their questions in, pieces of text out, several at a time each.

A caller that goes away takes its texts with it. One that reads slowly is sent no faster than it reads; its texts wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.serving import SamplingWish
from p2ptrain.core.texts import shortened
from roles.background import Background
from roles.line import QUIET_S, Line
from roles.verifier.asking import Piece, Said, TextService, Wish, Writing
from roles.verifier.places import BUSY
from roles.verifier.refusals import failed, refused
from wire import generate_messages as wire
from wire.connection import Connection
from wire.messages import Hello, Message

MOST_BYTES = 4 << 20
"""Of a question: a prompt of a million tokens."""
MOST_TURNS = 1024
MOST_STOPS, STOP_CHARS = 16, 1024
MOST_ASKED = 16
"""Questions of one caller that are under way."""
UNSENT_BYTES = 1 << 16
"""That may wait for a slow reader, before the next piece does."""
READ_S = 60.0
"""Who takes nothing for so long is gone, whatever it says beside."""
SENT_CHARS = 8192
"""Of a piece, so that it fits a frame in any script."""


class Door:
    """``serve`` is run once for each caller."""

    def __init__(self, service: TextService) -> None:
        self._service = service

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Until the caller goes. Raises ``P2PTrainError`` where that was no goodbye."""
        caller = _Caller(self._service, connection)
        try:
            await caller.listen()
        finally:
            await caller.close()


class _Gone(Exception):
    """The caller; ``listen`` finds that, too. A model may lose connections of its own, and that is told."""


class _Caller:
    def __init__(self, service: TextService, connection: Connection) -> None:
        self._service, self._connection = service, connection
        self._line = Line(connection, QUIET_S)
        self._tasks = Background()
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._unwanted: set[int] = set()
        self._writings: dict[int, Writing] = {}

    async def listen(self) -> None:
        with suppress(ConnectionLost):
            async with self._line.alive():
                while True:
                    received = await self._line.frame()
                    await self._take(received.message, received.stream)

    async def close(self) -> None:
        await self._tasks.stop()

    async def _take(self, message: Message, stream: int) -> None:
        """Raises ``ProtocolError`` where no correct client says this."""
        match message:
            case wire.Ask():
                size_bytes = size_untrusted(message)
                if stream in self._asked:
                    raise ProtocolError(f"question {stream} is asked twice")
                data = await self._line.bulk(size_bytes, stream=stream)
                wish = wish_untrusted(message, data)
                if len(self._asked) >= MOST_ASKED:
                    error = Refused(BUSY, f"{MOST_ASKED} questions of yours are under way", remedy="wait for one")
                    self._connection.send(refused(error), stream=stream)  # ``listen`` expects its loss
                    return
                task = self._tasks.start(self._answer(stream, wish), f"question {stream}")
                self._asked[stream] = task
                task.add_done_callback(lambda _: self._asked.pop(stream))
            case wire.Stop():
                await self._stop(stream)
            case _:
                raise ProtocolError(f"a client does not say {type(message).__name__} to a verifier")

    async def _stop(self, stream: int) -> None:
        """Nothing where it has ended, which its asker could not know."""
        if (task := self._asked.get(stream)) is None or stream in self._unwanted:
            return
        self._unwanted.add(stream)
        if stream in self._writings:
            self._tasks.start(self._writings[stream].close(), f"stop {stream}")
        else:
            task.cancel()  # it waits for its turn

    async def _answer(self, stream: int, wish: Wish) -> None:
        try:
            try:
                writing = await self._service.write(wish)
            except asyncio.CancelledError:
                if stream not in self._unwanted:
                    raise
                self._say(wire.Written("cancelled", {}), stream)
                return
            self._writings[stream] = writing
            try:
                await self._send_all(stream, writing)
            finally:
                await writing.close()
        except _Gone:
            return
        except P2PTrainError as error:
            with suppress(_Gone):
                self._say(refused(error), stream)
        except Exception as mistake:  # of this program: nobody shall wait for the rest of its text  # noqa: BLE001
            with suppress(_Gone):
                self._say(refused(failed(mistake)), stream)
        finally:
            self._writings.pop(stream, None)
            self._unwanted.discard(stream)

    async def _send_all(self, stream: int, writing: Writing) -> None:
        """Raises ``_Gone``, and what the writing raises."""
        self._say(wire.Asked(writing.prompt_tokens, writing.left_out), stream)
        if stream in self._unwanted:
            await writing.close()
        async for piece in writing:
            for part in _frames(piece):
                self._say(part, stream)
            if self._connection.unsent_bytes > UNSENT_BYTES:
                await self._read()
        self._say(wire.Written(writing.ended, writing.stats()), stream)

    def _say(self, message: Message, stream: int) -> None:
        try:
            self._connection.send(message, stream=stream)
        except ConnectionLost as problem:
            raise _Gone from problem

    async def _read(self) -> None:
        """Wait until the caller has taken what was sent. Raises ``_Gone``: it does not."""
        try:
            await self._connection.flush(timeout_s=READ_S)
        except ConnectionLost as problem:
            raise _Gone from problem
        except DeadlineExceeded as problem:
            self._connection.abort(problem)
            raise _Gone from problem


def _frames(piece: Piece) -> Iterator[wire.Piece]:
    tokens = encode_ids(piece.tokens)
    yield wire.Piece(piece.text[:SENT_CHARS], tokens)
    for start in range(SENT_CHARS, len(piece.text), SENT_CHARS):
        yield wire.Piece(piece.text[start : start + SENT_CHARS], b"")


def size_untrusted(ask: wire.Ask) -> int:
    """Bytes of the texts behind a question, before they are allocated. Raises ``ProtocolError``."""
    if not (len(ask.sizes) == len(ask.roles) <= MOST_TURNS or (len(ask.sizes) == 1 and not ask.roles)):
        raise ProtocolError(f"a question of {len(ask.sizes)} texts and {len(ask.roles)} turns")
    if not ask.sizes or min(ask.sizes) < 0 or (size_bytes := sum(ask.sizes)) > MOST_BYTES:
        raise ProtocolError(f"a question of more than {MOST_BYTES >> 20} MiB, or of no text")
    return size_bytes


def wish_untrusted(ask: wire.Ask, data: bytes | bytearray) -> Wish:
    """What a client wants; ``data`` has ``size_untrusted`` bytes. Raises ``ProtocolError``: no client asks for that."""
    if len(ask.stop) > MOST_STOPS or not all(0 < len(text) <= STOP_CHARS for text in ask.stop):
        raise ProtocolError(f"{len(ask.stop)} stop strings; {MOST_STOPS} of {STOP_CHARS} characters are the most")
    if not 0 <= ask.max_new_tokens < 1 << 31:
        raise ProtocolError(f"{ask.max_new_tokens} new tokens")
    if ask.speculate not in ("auto", "off"):
        raise ProtocolError("speculate is neither auto nor off")
    try:
        sampling = SamplingWish(ask.temperature, ask.top_k, ask.top_p, ask.seed)
        texts = list(_cut(data, ask.sizes))
    except (UserError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a question that cannot be: {shortened(str(error), 200)}") from error
    said = tuple(Said(role[:40], text) for role, text in zip(ask.roles, texts, strict=False))
    return Wish(
        prompt="" if said else texts[0],
        turns=said,
        max_new_tokens=ask.max_new_tokens or None,
        sampling=sampling,
        stop=tuple(ask.stop),
        speculate=ask.speculate,
    )


def _cut(data: bytes | bytearray, sizes: list[int]) -> Iterator[str]:
    start = 0
    for size_bytes in sizes:
        yield data[start : start + size_bytes].decode()
        start += size_bytes
