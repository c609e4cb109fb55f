"""What may be asked of a verifier, whoever asks: a client over the wire, or a program over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from p2ptrain.core.serving import SamplingWish


@dataclass(frozen=True, slots=True)
class Said:
    """One turn of a conversation. ``role``: ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be written.

    Attributes:
        prompt: the text to go on from; or
        turns: a conversation, whose next turn is the assistant's. One of the two is empty.
        max_new_tokens: None: as many as the model's context has room for.
        stop: the text ends before the first of these.
        speculate: ``auto``, or ``off``: the verifier by itself.
    """

    prompt: str = ""
    turns: tuple[Said, ...] = ()
    max_new_tokens: int | None = None
    sampling: SamplingWish = field(default_factory=SamplingWish)
    stop: tuple[str, ...] = ()
    speculate: str = "auto"


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
        ...

    def stats(self) -> dict[str, Any]:
        """How it came about until now: tokens, seconds, acceptance, time by what it was spent on."""
        ...

    async def close(self) -> None:
        """End it, whether it is whole or not. Never raises."""
        ...


class TextService(Protocol):
    """Writes what is asked for.

    Attributes:
        model: its name. context: positions at most; None: not known. created: Unix seconds, of the model's files.
    """

    model: str
    context: int | None
    created: int

    async def write(self, wish: Wish) -> Writing:
        """Begin.

        Raises:
            TooLong: prompt and new tokens are more than the context.
            UserError: what is asked for cannot be: empty, out of range.
            Refused: it is too busy; ``remedy`` says what to do.
            P2PTrainError: the model cannot.
        """
        ...
