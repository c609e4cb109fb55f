"""The interface of a text service: a request in, pieces of text out, wherever the model is.

``roles.verifier.service`` writes with a model of this process or of its workers; ``roles.verifier.client`` has a
verifier of the cluster write. ``generate``, ``chat``, and a verifier's connections and HTTP endpoint use it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from p2ptrain.compute.text import ChatFormat, Turn
from p2ptrain.core.errors import JobFailed, P2PTrainError
from p2ptrain.core.serving import SamplingOptions, TokenLogprob
from wire.schema import Bound
from wire.text_messages import MOST_PRIORITY, MOST_STOPS, MOST_TURNS, STOP_CHARS


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What to write. Its bounds are for requests of peers.

    Attributes:
        prompt, ids, turns: the text to continue, or its token ids, or a conversation whose next turn is the
            assistant's. Exactly one of them is given.
        tools: of the conversation: JSON list of tools as in OpenAI's interface, for the chat template.
        max_new_tokens: None: as many as fit the model's context. 0 with ``prompt_logprobs``: nothing is written.
        stop: the text ends before the first of these strings.
        stop_ids: the text ends after one of these tokens, beside the model's own end tokens.
        ignore_end: the model's end tokens do not end the text.
        speculate: whether drafters may help.
        priority: among texts that wait for a place, those with a lower one begin first.
        logprobs: the log-probability of each new token is wanted, and of so many of the likeliest ones, up to
            ``MOST_TOP_LOGPROBS``. prompt_logprobs: of the prompt's tokens, too.
        grammar: the text must match this grammar of llguidance: its JSON form, or Lark.
    """

    prompt: str = ""
    turns: Annotated[tuple[Turn, ...], Bound(0, MOST_TURNS)] = ()
    max_new_tokens: Annotated[int, Bound(1, (1 << 31) - 1)] | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Annotated[tuple[Annotated[str, Bound(1, STOP_CHARS)], ...], Bound(0, MOST_STOPS)] = ()
    speculate: bool = True
    priority: Annotated[int, Bound(-MOST_PRIORITY, MOST_PRIORITY)] = 0
    ids: tuple[Annotated[int, Bound(0, (1 << 31) - 1)], ...] = ()
    tools: str = ""
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text in whole characters, without any stop string, and the tokens since the last piece.

    ``logprobs``: one for each token if they are wanted."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Writing(ABC):
    """A text under way, for its reader: pieces in order, then its error if there is one.

    Attributes:
        prompt_tokens: length of the prompt. prompt_ids: its tokens; empty if the text is written elsewhere.
        prompt_logprobs: if they are wanted, one for each token of the prompt, None for the first one. Complete before
            the first piece, or the end.
        left_out: turns of the conversation that did not fit the context.
        ended: ``stop`` (a stop string), ``end`` (an end token), ``length`` or ``cancelled``; empty while the text goes
            on.
        stop_reason: the stop string or the stop id that ended it.
    """

    def __init__(self, prompt_tokens: int = 0, left_out: int = 0, prompt_ids: Sequence[int] = ()) -> None:
        self.prompt_tokens, self.left_out = prompt_tokens, left_out
        self.prompt_ids = tuple(prompt_ids)
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.ended = ""
        self.stop_reason: str | int | None = None
        self._pieces: deque[TextPiece] = deque()
        self._error: P2PTrainError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[TextPiece]:
        return self

    async def __anext__(self) -> TextPiece:
        """The next piece. Raises ``P2PTrainError``: the text cannot go on."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()  # a silent verifier, or the deadline of a pass, ends this wait
        return self._pieces.popleft()

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Figures so far: tokens, seconds, acceptance, and where the time went."""

    @abstractmethod
    async def close(self) -> None:
        """End the text, complete or not. Never raises."""


class TextService(Protocol):
    """Writes texts on request.

    Attributes:
        model: its name. context: most positions; None: unknown.
    """

    @property
    def model(self) -> str: ...
    @property
    def context(self) -> int | None: ...

    async def write(self, request: TextRequest) -> Writing:
        """Begin a text.

        Raises:
            TooLong: prompt and new tokens exceed the context.
            UserError: an empty or invalid request.
            Refused: too busy; ``remedy`` says what to do.
            P2PTrainError: the model fails.
        """


class TokenizingService(TextService, Protocol):
    """A ``TextService`` with the model's tokenizer and chat template here.

    ``form``: of its conversations. ``created``: Unix time of the model's files."""

    @property
    def created(self) -> int: ...
    @property
    def form(self) -> ChatFormat: ...

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; ``add_special``: with those that the tokenizer adds to a prompt."""

    async def tokenize_turns(self, turns: Sequence[Turn], tools: str = "") -> list[int]:
        """Token ids of a conversation, up to where the assistant's turn begins. Raises ``UserError``: the template
        refuses it."""

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included. Raises ``UserError``: the model has no such id."""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character."""


def report_defect(mistake: Exception) -> JobFailed:
    """Report a defect to the loop's exception handler. Return the error that the client gets."""
    context = {"message": "a text failed", "exception": mistake}
    asyncio.get_running_loop().call_exception_handler(context)
    text = f"this text failed: {type(mistake).__name__}: {mistake}"
    return JobFailed(text, remedy="this is a bug in p2ptrain; the terminal of the process that writes has the details")
