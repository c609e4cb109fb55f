"""The client of a verifier: sends questions over a connection and receives the text as it is written.

The seed lists the verifiers (``serving.list``). If a verifier is lost in the middle of a text, no other one can
continue that text. The client reports how much arrived, and the person asks again.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Self

from p2ptrain.core.activations import ID_BYTES, decode_ids
from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError
from roles.line import QUIET_S, Line
from roles.serving.texts import TextPiece, TextRequest, Writing
from roles.serving.worker_peer import ClientContext, WorkerAddress
from roles.verifier.server import encode_question
from wire import text_messages as wire
from wire.connection import Connection, Received
from wire.records import ServingInfo

VERIFIER = "verifier"
MOST_PIECES = 1 << 16
"""Most unread pieces of one text: far more than a correct verifier sends ahead of the reader."""
MOST_CHARS = 1 << 28
_IF_LOST = "ask again when it is back, or use another one: --verifier NAME"


class VerifierClient:
    """A ``TextService``: a connection to one verifier, for any number of questions of one of its models."""

    def __init__(self, verifier: ServingInfo, connection: Connection) -> None:
        self.verifier = verifier
        self._connection = connection
        self._line = Line(connection, QUIET_S)
        self._texts: dict[int, RemoteText] = {}
        self._next = 1
        self._problem: P2PTrainError | None = None
        self._tasks = Background()
        self._tasks.start(self._line.run(self._take_untrusted, self._end), f"verifier {verifier.name}")

    @classmethod
    async def dial(cls, context: ClientContext, verifier: ServingInfo) -> Self:
        """Connect to the verifier. Raises as ``wire.handshake.dial``."""
        at = WorkerAddress(verifier.peer, verifier.name, verifier.host, verifier.port)
        return cls(verifier, await context.dial(at, "generate", role=VERIFIER))

    @property
    def model(self) -> str:
        return self.verifier.model

    @property
    def context(self) -> int | None:
        return self.verifier.context or None

    @property
    def lost(self) -> bool:
        return self._problem is not None

    async def write(self, request: TextRequest) -> RemoteText:
        """Ask, and wait until the verifier begins to write; others may come first. Raises ``UserError``: the question
        is too large. ``NetworkError``: the verifier is lost. ``P2PTrainError``: its answer."""
        if self._problem is not None:
            raise self._lost(None)
        ask, data = encode_question(self.model, request)
        stream = self._next
        self._next += 1
        text = self._texts[stream] = RemoteText(self, stream)
        try:
            self._connection.send(ask, stream=stream)
            self._connection.send_bulk(memoryview(data), generation=0, stream=stream)
            await text.begun()
        except ConnectionLost as problem:
            self._end(problem)
            raise self._lost(None) from problem
        except BaseException:
            await text.close()
            raise
        return text

    async def close(self) -> None:
        """End all texts and disconnect. Never raises."""
        self._end(ConnectionLost("this client closed the connection"))
        await self._connection.close(timeout_s=0.5)
        await self._tasks.stop()

    def stop(self, stream: int) -> None:
        if self._texts.pop(stream, None) is not None:
            with suppress(ConnectionLost):  # a lost verifier sends nothing
                self._connection.send(wire.StreamClose(), stream=stream)

    def _lost(self, text: RemoteText | None) -> NetworkError:
        assert self._problem is not None
        name, why = self.verifier.name, self._problem.message
        if text is None:
            remedy = self._problem.remedy or _IF_LOST
            return NetworkError(f"the verifier {name} is lost: {why}", remedy=remedy)
        made = f"{text.count} tokens ({text.chars} characters) of its text had arrived"
        return NetworkError(f"the verifier {name} was lost in the middle of a text: {why}; {made}", remedy=_IF_LOST)

    def _end(self, problem: P2PTrainError) -> None:
        if self._problem is None:
            self._problem = problem
            self._connection.abort(problem)
            for text in list(self._texts.values()):
                text.fail(self._lost(text))

    def _take_untrusted(self, received: Received) -> None:
        message, stream = received.message, received.stream
        if not isinstance(message, wire.QuestionAccepted | wire.PieceWritten | wire.TextWritten | wire.StreamRefused):
            raise ProtocolError(f"the verifier sent an unexpected {type(message).__name__}")
        if not 0 < stream < self._next:
            raise ProtocolError(f"an answer to question {stream}, which was not asked")
        if (text := self._texts.get(stream)) is None:  # the text was closed
            return
        text.take_untrusted(message)
        if isinstance(message, wire.TextWritten | wire.StreamRefused):
            self._texts.pop(stream, None)


class RemoteText(Writing):
    """A text that a verifier writes.

    Attributes:
        chars: characters that arrived. count: tokens of them.
    """

    def __init__(self, client: VerifierClient, stream: int) -> None:
        super().__init__()
        self.chars = self.count = 0
        self._client, self._stream = client, stream
        self._stats: dict[str, Any] = {}
        self._began = False

    def stats(self) -> dict[str, Any]:
        return self._stats

    async def close(self) -> None:
        self._client.stop(self._stream)

    async def begun(self) -> None:
        """Wait until the text begins. Raises as ``VerifierClient.write``."""
        while not self._began:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()  # a silent verifier ends this wait

    def fail(self, error: P2PTrainError) -> None:
        self._error = error
        self._news.set()

    def take_untrusted(
        self, message: wire.QuestionAccepted | wire.PieceWritten | wire.TextWritten | wire.StreamRefused
    ) -> None:
        """Process a message of a text that goes on. Raises ``ProtocolError``: no correct verifier sends it."""
        match message:
            case wire.QuestionAccepted(prompt_tokens, left_out):
                self._began, self.prompt_tokens, self.left_out = True, prompt_tokens, left_out
            case wire.PieceWritten():
                if len(message.tokens) % ID_BYTES:
                    raise ProtocolError("a piece has invalid tokens")
                if len(self._pieces) >= MOST_PIECES or self.chars > MOST_CHARS:
                    raise ProtocolError("the text exceeds the size limit")
                tokens = decode_ids(message.tokens)
                if tokens and min(tokens) < 0:
                    raise ProtocolError("a token id is negative")
                self._pieces.append(TextPiece(message.text, tokens))
                self.chars += len(message.text)
                self.count += len(tokens)
            case wire.TextWritten(ended, stats):
                self._began, self.ended, self._stats = True, ended, _plain(stats)
            case wire.StreamRefused():
                so_far = f" (after {self.count} tokens of the text)" if self._began else ""
                self.fail(wire.error_untrusted(message, self._client.verifier.name, so_far))
        self._news.set()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
