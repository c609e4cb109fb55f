"""The text service: questions in, pieces of text out, wherever the model is.

``service.VerifierService`` writes with a model of this process or of workers; ``client.VerifierClient`` has a verifier
of the cluster write. ``generate``, ``chat``, a verifier's connections and its HTTP endpoint all use this interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.serving import SamplingOptions


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What is to be written.

    Attributes:
        prompt: the text to go on from; or
        turns: a conversation, whose next turn is the assistant's. One of the two is empty.
        max_new_tokens: None: as many as the model's context has room for.
        stop: the text ends before the first of these.
        speculate: whether drafters may help.
    """

    prompt: str = ""
    turns: tuple[Turn, ...] = ()
    max_new_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, whole characters only, nothing of a stop string; and the tokens that came since the last piece."""

    text: str
    tokens: tuple[int, ...]


class Writing(Protocol):
    """A text under way.

    Attributes:
        prompt_tokens: of the prompt.
        left_out: turns of the conversation that did not fit the context.
        ended: ``stop``, ``end``, ``length``, ``cancelled``; empty while it goes on.
    """

    prompt_tokens: int
    left_out: int
    ended: str

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces as they come. Raises ``P2PTrainError`` where it cannot go on."""

    def stats(self) -> dict[str, Any]:
        """How it came about until now: tokens, seconds, acceptance, time by what it was spent on."""

    async def close(self) -> None:
        """End it, whether it is whole or not. Never raises."""


class TextService(Protocol):
    """Writes what is asked for.

    Attributes:
        model: its name. context: positions at most; None: not known. created: Unix seconds, of the model's files.
    """

    @property
    def model(self) -> str: ...
    @property
    def context(self) -> int | None: ...
    @property
    def created(self) -> int: ...

    async def write(self, request: TextRequest) -> Writing:
        """Begin.

        Raises:
            TooLong: prompt and new tokens are more than the context.
            UserError: what is asked for cannot be: empty, out of range.
            Refused: it is too busy; ``remedy`` says what to do.
            P2PTrainError: the model cannot.
        """


def failed(mistake: Exception) -> JobFailed:
    """Report a mistake of this program to the loop's exception handler; returns what the asker is told."""
    context = {"message": "a text failed", "exception": mistake}
    asyncio.get_running_loop().call_exception_handler(context)
    text = f"the verifier failed over this text: {type(mistake).__name__}: {mistake}"
    return JobFailed(text, remedy="this is a mistake in p2ptrain; the verifier's terminal tells more")
