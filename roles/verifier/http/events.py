"""What happens while the texts of a request are written, as all interfaces see it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from p2ptrain.core.serving import TokenLogprob


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """``index``: of the text, among all candidates of all prompts."""

    index: int


@dataclass(frozen=True, slots=True)
class ChoiceBegan(ChoiceEvent):
    pass


@dataclass(frozen=True, slots=True)
class TextAdded(ChoiceEvent):
    """``is_prompt``: it is the repeated prompt. ``logprobs``: one for each token if they are wanted; None for a
    prompt's first one."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class CallAdded(ChoiceEvent):
    """``number``: of the call in this text. ``ident``: digits that no other call has."""

    number: int
    ident: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChoiceEnded(ChoiceEvent):
    """``reason``: ``stop``, ``length`` or ``tool_calls``. ``stop_reason``: the stop string or id, if one ended it."""

    reason: str
    stop_reason: str | int | None = None


def mean_logprob(events: Iterable[ChoiceEvent]) -> float:
    """Of the new tokens of a text."""
    added = (event for event in events if isinstance(event, TextAdded) and not event.is_prompt)
    values = [each.logprob for event in added for each in event.logprobs if each]
    return math.fsum(values) / max(1, len(values))
