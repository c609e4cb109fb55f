"""The client of a verifier: a question over a connection, and the text as it comes.

Which verifiers there are the seed knows (``serving.list``). One that is lost in the middle of a text cannot be taken up
by another: its client says how much had come, and asks again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from p2ptrain.core.activations import ID_BYTES, decode_ids
from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.ids import is_id
from p2ptrain.core.world import Network
from roles.background import Background
from roles.line import QUIET_S, Line
from roles.verifier.asking import Piece, Wish
from roles.verifier.door import MOST_BYTES, MOST_STOPS, MOST_TURNS, STOP_CHARS
from roles.verifier.refusals import error_untrusted
from wire import generate_messages as wire
from wire.address import is_loopback
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.messages import Message

DIAL_S = 5.0
VERIFIER = "verifier"
ENDS = ("stop", "end", "length", "cancelled")
MOST_PIECES = 1 << 16
"""That may wait here for who reads them, of one text: far more than a correct verifier sends to somebody who does."""

MOST_CHARS = 1 << 28
IF_LOST = "ask again when it is back, or ask another one: p2ptrain generate --verifier NAME"


@dataclass(frozen=True, slots=True)
class VerifierAt:
    """A verifier and where it listens. ``context``: 0 where nobody says; ``weights``: empty where nobody does."""

    id: str
    name: str
    host: str
    port: int
    model: str
    context: int
    sessions: int
    drafters: int
    weights: str = ""

    @property
    def writes(self) -> tuple[str, str]:
        """What it writes with: two of which this is equal write the same text."""
        return self.model, self.weights

    def dialled(self, seed_host: str) -> str:
        """The host to dial: where it told none that others can use, it is on the seed's machine."""
        return seed_host if not self.host or (is_loopback(self.host) and not is_loopback(seed_host)) else self.host


def verifiers_untrusted(answer: dict[str, Any]) -> list[VerifierAt]:
    """Those in the answer to ``serving.list``. Raises ``ProtocolError``."""
    items = answer.get("serving")
    if not isinstance(items, list):
        raise ProtocolError("serving.list was answered without a list")
    return [_verifier_untrusted(item) for item in items if isinstance(item, dict) and item.get("role") == VERIFIER]


def _verifier_untrusted(item: dict[str, Any]) -> VerifierAt:
    texts = {name: item.get(name, "") for name in ("id", "name", "host", "model", "weights")}
    numbers = {name: item.get(name) for name in ("port", "context", "sessions")}
    drafters = item.get("drafters")
    if not all(isinstance(value, str) and len(value) <= 4096 for value in texts.values()):
        raise ProtocolError("the seed tells of a verifier that has no name, or no place")
    if not all(type(value) is int and 0 <= value < 1 << 53 for value in numbers.values()):
        raise ProtocolError("the seed tells of a verifier with a number that cannot be")
    found = VerifierAt(**texts, **numbers, drafters=len(drafters) if isinstance(drafters, list) else 0)  # type: ignore[arg-type]
    if not is_id(found.id) or not 0 < found.port < 65536:
        raise ProtocolError("the seed tells of a verifier where nobody can be")
    return found


class VerifierClient:
    """A connection to a verifier, for any number of questions.

    Attributes:
        verifier: who it is.
    """

    def __init__(self, verifier: VerifierAt, connection: Connection, if_lost: str = IF_LOST) -> None:
        self.verifier = verifier
        self._if_lost = if_lost
        self._connection = connection
        self._line = Line(connection, QUIET_S)
        self._texts: dict[int, Text] = {}
        self._next = 1
        self._problem: P2PTrainError | None = None
        self._tasks = Background()
        self._hearing = self._tasks.start(self._hear(), f"verifier {verifier.name}")

    @classmethod
    async def dial(
        cls,
        network: Network,
        verifier: VerifierAt,
        *,
        seed_host: str,
        peer_id: str,
        name: str,
        if_lost: str = IF_LOST,
    ) -> Self:
        """``if_lost``: what a person can do where it is lost. Raises as ``wire.handshake.dial``."""
        hello = local_hello(peer_id=peer_id, name=name, roles=["operator"], purpose="generate")
        connection, welcome = await dial(
            network,
            verifier.dialled(seed_host),
            verifier.port,
            hello,
            timeout_s=DIAL_S,
            expect_peer=verifier.id,
            expect_role=VERIFIER,
        )
        if welcome.peer_id != verifier.id:
            connection.abort()
            raise Refused("wrong-identity", f"another peer answers where {verifier.name} should be")
        return cls(verifier, connection, if_lost)

    @property
    def lost(self) -> bool:
        return self._problem is not None

    async def ask(self, wish: Wish) -> Text:
        """Ask, and wait until it begins to write: others may be in front.

        Raises:
            UserError: the question is too large; or what the verifier says of it.
            Refused, ResourceError, ...: what it answered. NetworkError: it is lost.
        """
        if self._problem is not None:
            raise self._lost(None)
        ask, data = question(wish)
        stream = self._next
        self._next += 1
        text = self._texts[stream] = Text(self, stream)
        try:
            self._connection.send(ask, stream=stream)
            self._connection.send_bulk(memoryview(data), generation=0, stream=stream)
            await text.began()
        except ConnectionLost as problem:
            self._end(problem)
            raise self._lost(None) from problem
        except BaseException:
            await text.close()
            raise
        return text

    async def close(self) -> None:
        """Its texts end. Never raises."""
        self._end(ConnectionLost("this client closed the connection"))
        await self._connection.close(timeout_s=0.5)
        await self._tasks.stop()

    # ------------------------------------------------------------------------------------------------------ for texts

    def stop(self, stream: int) -> None:
        """No more of it is wanted."""
        with suppress(ConnectionLost):  # then nothing comes, either
            self._connection.send(wire.Stop(), stream=stream)

    def forget(self, stream: int) -> None:
        """Nobody reads it any more."""
        self._texts.pop(stream, None)

    def _lost(self, text: Text | None) -> NetworkError:
        assert self._problem is not None
        name, why = self.verifier.name, self._problem.message
        if text is None:
            remedy = self._problem.remedy or self._if_lost
            return NetworkError(f"the verifier {name} is lost: {why}", remedy=remedy)
        made = f"{text.count} tokens ({text.chars} characters) of its text had come"
        return NetworkError(
            f"the verifier {name} was lost in the middle of a text: {why}; {made}", remedy=self._if_lost
        )

    # ------------------------------------------------------------------------------------------------------ internals

    async def _hear(self) -> None:
        problem: P2PTrainError = ConnectionLost("it closed the connection")
        try:
            async with self._line.alive():
                while True:
                    received = await self._line.frame()
                    self._take_untrusted(received.message, received.stream)
        except P2PTrainError as error:
            problem = error
        finally:
            self._end(problem)

    def _end(self, problem: P2PTrainError) -> None:
        if self._problem is None:
            self._problem = problem
            self._connection.abort(problem)
            for text in list(self._texts.values()):
                text.fail(self._lost(text))

    def _take_untrusted(self, message: Message, stream: int) -> None:
        """Raises ``ProtocolError`` where no correct verifier says this."""
        if not isinstance(message, wire.Asked | wire.Piece | wire.Written | wire.AskRefused):
            raise ProtocolError(f"a verifier does not say {type(message).__name__} to a client")
        if not 0 < stream < self._next:
            raise ProtocolError(f"an answer to question {stream}, which was not asked")
        if (text := self._texts.get(stream)) is not None:  # else nobody reads it any more
            text.take_untrusted(message)


class Text:
    """What a verifier writes: an async iterator of pieces.

    Attributes:
        prompt_tokens, left_out, ended: as of ``asking.Writing``.
        chars: that came. count: tokens of them.
    """

    def __init__(self, client: VerifierClient, stream: int) -> None:
        self.prompt_tokens = self.left_out = 0
        self.ended, self.chars, self.count = "", 0, 0
        self._client, self._stream = client, stream
        self._pieces: deque[Piece] = deque()
        self._stats: dict[str, Any] = {}
        self._news = asyncio.Event()
        self._began = False
        self._error: P2PTrainError | None = None

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        """Raises as ``VerifierClient.ask``."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            await self._more()
        return self._pieces.popleft()

    def stats(self) -> dict[str, Any]:
        """What the verifier says of how it came about; empty before the end."""
        return self._stats

    def cancel(self) -> None:
        """No more is wanted; what comes of it until the verifier heard this is still given out."""
        if not self.ended and self._error is None:
            self._client.stop(self._stream)

    async def close(self) -> None:
        """End it. Never raises."""
        self.cancel()
        self._client.forget(self._stream)

    # --------------------------------------------------------------------------------------------------- for the client

    async def began(self) -> None:
        """Raises as ``VerifierClient.ask``."""
        while not self._began:
            if self._error is not None:
                raise self._error
            await self._more()

    def fail(self, error: P2PTrainError) -> None:
        """No more comes."""
        self._error = error
        self._news.set()

    def take_untrusted(self, message: wire.Asked | wire.Piece | wire.Written | wire.AskRefused) -> None:
        """Raises ``ProtocolError`` where no correct verifier says this."""
        if self.ended or self._error is not None:
            raise ProtocolError(f"{type(message).__name__} after the end of a text")
        match message:
            case wire.Asked(prompt_tokens, left_out):
                if self._began or prompt_tokens < 1 or left_out < 0:
                    raise ProtocolError("a text that begins twice, or after no prompt")
                self._began, self.prompt_tokens, self.left_out = True, prompt_tokens, left_out
            case wire.Piece():
                self._take_piece_untrusted(message)
            case wire.Written(ended, stats):
                if ended not in ENDS or not (self._began or ended == "cancelled"):
                    raise ProtocolError(f"a text that ends by {ended[:40]!r}")
                self._began, self.ended, self._stats = True, ended, _plain(stats)
                self._client.forget(self._stream)
            case wire.AskRefused():
                so_far = f" (after {self.count} tokens of the text)" if self._began else ""
                self.fail(error_untrusted(message, self._client.verifier.name, so_far))
                self._client.forget(self._stream)
        self._news.set()

    def _take_piece_untrusted(self, piece: wire.Piece) -> None:
        if not self._began or len(piece.tokens) % ID_BYTES:
            raise ProtocolError("a piece of no text")
        if len(self._pieces) >= MOST_PIECES or self.chars > MOST_CHARS:
            raise ProtocolError("more text than a verifier writes")
        tokens = decode_ids(piece.tokens)
        if tokens and min(tokens) < 0:
            raise ProtocolError("a token below 0")
        self._pieces.append(Piece(piece.text, tokens))
        self.chars += len(piece.text)
        self.count += len(tokens)

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()  # silence of the verifier ends it


def _plain(value: Any) -> Any:
    """Figures without those that are not numbers: JSON knows none of them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def question(wish: Wish) -> tuple[wire.Ask, bytes]:
    """As it travels. Raises ``UserError`` where it is more than a verifier takes."""
    texts = [turn.content.encode() for turn in wish.turns] or [wish.prompt.encode()]
    if (size_bytes := sum(map(len, texts))) > MOST_BYTES or len(texts) > MOST_TURNS:
        raise UserError(
            f"the question has {size_bytes} bytes in {len(texts)} parts",
            remedy=f"ask a shorter one: at most {MOST_BYTES >> 20} MiB in {MOST_TURNS} parts",
        )
    if len(wish.stop) > MOST_STOPS or any(len(text) > STOP_CHARS for text in wish.stop):
        raise UserError(f"a verifier takes {MOST_STOPS} stop strings of {STOP_CHARS} characters", remedy="give fewer")
    wanted = wish.sampling
    ask = wire.Ask(
        sizes=[len(text) for text in texts],
        roles=[turn.role for turn in wish.turns],
        max_new_tokens=wish.max_new_tokens or 0,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        seed=wanted.seed,
        stop=list(wish.stop),
        speculate=wish.speculate,
    )
    return ask, b"".join(texts)
