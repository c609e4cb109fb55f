"""Parameters of requests, checked one by one. What cannot be is ``Refused``, with what it must be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from p2ptrain.core.errors import Refused
from roles.seed.peers import NAME_CHARS, clipped

Params = dict[str, Any]
Result = dict[str, Any]


def text_of(params: Params, name: str, limit: int) -> str:
    """Not empty, and at most ``limit`` bytes."""
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise Refused("bad-parameter", f"{name} must be text", remedy=f"give {name}")
    if len(value) > limit or len(value.encode(errors="replace")) > limit:
        raise Refused("bad-parameter", f"{name} has more than {limit} bytes", remedy="make it shorter")
    return value


def label_of(params: Params, name: str) -> str:
    """A name to show: one printable line."""
    label = clipped(text_of(params, name, NAME_CHARS), NAME_CHARS)
    if not label:
        raise Refused("bad-parameter", f"{name} has nothing that can be shown", remedy=f"give {name}")
    return label


def whole_of(params: Params, name: str, default: int | None, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``; ``default``, where that is not None, if it is not given."""
    value = params.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise Refused("bad-parameter", f"{name} must be a whole number from {least} to {most}", remedy=f"change {name}")
    return value


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """What to add to a refusal of ``text``, which is none of ``known``; empty where none is like it."""
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
