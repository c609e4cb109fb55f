"""Messages between a client and a verifier (purpose ``generate``), as those of ``wire.messages``.

::

    client → verifier    Ask, then one bulk frame (UTF-8: the prompt, or what the turns say) → Asked | AskRefused
    verifier → client    Piece, as text comes; in the end Written, or AskRefused
    client → verifier    Stop: no more is wanted
    both ways when idle  StillHere

The ``stream`` of a frame's header is the client's number of its question, so several may be under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from wire.messages import Message


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """Go on from the prompt in the bulk frame behind it.

    Attributes:
        sizes: bytes of each text in that frame. roles: whose turn each of them is; empty: there is one, a prompt.
        max_new_tokens: 0: as many as the model's context has room for.
        temperature, top_k, top_p: None: what the model says.
        stop: the text ends before the first of these.
        speculate: whether drafters may help.
    """

    KIND: ClassVar[int] = 69
    sizes: list[int]
    roles: list[str]
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    stop: list[str]
    speculate: bool


@dataclass(frozen=True, slots=True)
class Asked(Message):
    """It will be written. ``prompt_tokens``: of the prompt; ``left_out``: turns that did not fit."""

    KIND: ClassVar[int] = 70
    prompt_tokens: int
    left_out: int


@dataclass(frozen=True, slots=True)
class AskRefused(Message):
    """It is not written, or no further. ``code``, ``reason``, ``remedy``: as of ``Refuse``."""

    KIND: ClassVar[int] = 71
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Piece(Message):
    """New text, whole characters only, and the tokens (int32, little-endian) that came since the last piece."""

    KIND: ClassVar[int] = 72
    text: str
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Written(Message):
    """The text is whole. ``ended``: ``stop``, ``end``, ``length``, ``cancelled``; ``stats``: how it came about."""

    KIND: ClassVar[int] = 73
    ended: str
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """No more of it is wanted."""

    KIND: ClassVar[int] = 74
