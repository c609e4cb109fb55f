"""The client of a verifier: sends it a question over a connection, and receives the text as it is written.

The seed lists the verifiers (``serving.list``). If a verifier is lost in the middle of a text, no other one can
continue that text. The client reports how much arrived, and the person asks again.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NetworkError, P2PTrainError, ProtocolError
from roles.http.passed_requests import pass_request
from roles.serving.texts import TextPiece, TextRequest, Writing
from roles.serving.worker_peer import ClientContext, WorkerAddress
from roles.verifier.server import encode_question
from wire.codec import unpack_untrusted
from wire.connection import Connection
from wire.http_messages import HttpRequest
from wire.records import ServingInfo
from wire.text_messages import TextNews

VERIFIER = "verifier"
MOST_PIECES = 1 << 16
"""Most unread pieces of one text: far more than a correct verifier sends ahead of the reader."""
MOST_CHARS = 1 << 28
_IF_LOST = "ask again when it is back, or use another one: --verifier NAME"


class VerifierClient:
    """A ``TextService``: a model of a verifier, which is dialled for each text."""

    def __init__(self, context: ClientContext, verifier: ServingInfo) -> None:
        self.verifier, self._context = verifier, context
        self.model, self.context = verifier.model, verifier.context or None

    async def write(self, request: TextRequest) -> RemoteText:
        """Ask, and wait until the verifier begins to write; others may come first. Raises ``UserError``: the question
        is too large. ``NetworkError``: the verifier is lost. ``P2PTrainError``: its answer, or as
        ``wire.handshake.dial``."""
        question, body = encode_question(self.model, request)
        at = WorkerAddress(self.verifier.peer, self.verifier.name, self.verifier.host, self.verifier.port)
        text = RemoteText(at.name, await self._context.dial(at, "generate", role=VERIFIER), question, body)
        try:
            await text.begun()
        except BaseException:
            await text.close()
            raise
        return text


class RemoteText(Writing):
    """A text that the verifier ``name`` writes.

    Attributes:
        chars: characters that arrived. count: tokens of them.
    """

    def __init__(self, name: str, connection: Connection, question: HttpRequest, body: bytes) -> None:
        super().__init__()
        self.chars = self.count = 0
        self._name, self._connection = name, connection
        self._stats: dict[str, Any] = {}
        self._tasks = Background()
        self._tasks.start(self._receive(question, body), f"text of {name}")

    def stats(self) -> dict[str, Any]:
        return self._stats

    async def close(self) -> None:
        self._connection.abort()  # ends the task, too
        await self._tasks.stop()

    async def begun(self) -> None:
        """Wait until the text begins. Raises as ``VerifierClient.write``."""
        while not self.prompt_tokens:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()  # a silent verifier ends this wait

    async def _receive(self, question: HttpRequest, body: bytes) -> None:
        problem: P2PTrainError = ProtocolError("it ended its answer before the text")
        try:
            async with aclosing(pass_request(self._connection, question, body)) as parts:
                async for part in parts:
                    self.take_untrusted(part.data)
        except P2PTrainError as error:
            problem = error
        finally:
            if not self.ended:
                self._error = self._explain(problem)
            self._news.set()

    def _explain(self, problem: P2PTrainError) -> P2PTrainError:
        """Say of which verifier a problem is, and how much of the text there is."""
        if not isinstance(problem, ConnectionLost | DeadlineExceeded | ProtocolError):  # a refusal
            so_far = f" (after {self.count} tokens of the text)" if self.prompt_tokens else ""
            problem.message = f"{self._name}: {problem.message}{so_far}"
            return problem
        if not self.prompt_tokens:
            text = f"the verifier {self._name} is lost: {problem.message}"
            return NetworkError(text, remedy=problem.remedy or _IF_LOST)
        made = f"{self.count} tokens ({self.chars} characters) of its text had arrived"
        text = f"the verifier {self._name} was lost in the middle of a text: {problem.message}; {made}"
        return NetworkError(text, remedy=_IF_LOST)

    def take_untrusted(self, data: bytes) -> None:
        """Process a part of the answer. Raises ``ProtocolError``: no correct verifier sends it."""
        news = TextNews.from_map_untrusted(unpack_untrusted(data))
        if self.ended or bool(self.prompt_tokens) == bool(news.prompt_tokens):
            raise ProtocolError("a text begins once, and nothing follows its end")
        if len(self._pieces) >= MOST_PIECES or self.chars > MOST_CHARS:
            raise ProtocolError("the text exceeds the size limit")
        if news.prompt_tokens:
            self.prompt_tokens, self.left_out = news.prompt_tokens, news.left_out
        if news.text or news.tokens:
            self._pieces.append(TextPiece(news.text, news.tokens))
            self.chars += len(news.text)
            self.count += len(news.tokens)
        # JSON has neither NaN nor infinities.
        self._stats = json.loads(json.dumps(news.stats), parse_constant=lambda _: None)
        self.ended = news.ended
        self._news.set()
