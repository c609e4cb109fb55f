"""Texts for people: formatted sizes and ranges, short, printable versions of a peer's texts, and commands to copy."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from p2ptrain.core.errors import UserError

TEXT_CHARS = 1000
"""Longest message or remedy, in characters: enough for a path. A control frame holds sixteen in any script."""


def shortened(text: str, most_chars: int = TEXT_CHARS) -> str:
    return text if len(text) <= most_chars else text[: most_chars - 1] + "…"


def printable(text: str, most_chars: int = TEXT_CHARS) -> str:
    """``shortened`` text, without control characters for a terminal."""
    short = shortened(text, most_chars)
    return short if short.isprintable() else "".join(letter if letter.isprintable() else "�" for letter in short)


_ON_TERMINAL = "\n\t\u200c\u200d"  # with the zero-width joiners of compound letters and emoji


def on_terminal(text: str) -> str:
    """A model's text, of any length, with � for control characters."""
    return "".join(letter if letter.isprintable() or letter in _ON_TERMINAL else "�" for letter in text)


def human_bytes(size_bytes: float) -> str:
    """A size with a binary unit: ``3.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def human_duration(seconds: float) -> str:
    """Three digits and a unit: ``61.2 µs``, ``1.31 s``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= factor:
            return f"{three_digits(seconds / factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def human_seconds(seconds: float) -> str:
    """A duration in its two largest units: ``2 h 5 min``."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def human_time(wall: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in this machine's zone. ``wall`` is Unix seconds from another machine, so it may be any number."""
    try:
        return time.strftime(form, time.localtime(wall))
    except (ValueError, OverflowError, OSError):
        return "?"


def time_left(share: float, spent_s: float) -> str:
    """``, 5 min 3 s left``, at the pace so far, when ``share`` is done; empty at the beginning and at the end."""
    return f", {human_seconds(spent_s * (1 - share) / share)} left" if 0 < share < 1 else ""


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def join_some(names: Sequence[object], between: str = ", ", most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return between.join([*map(str, names[:most]), *more])


def layers_text(start: int, stop: int) -> str:
    """``0–11`` for the layers [0, 12), ``3`` for the layers [3, 4)."""
    return f"{start}–{stop - 1}" if stop - start > 1 else str(start)


_TIME = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|min|m|h|d)\s*", re.ASCII)
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(text: str, option: str = "") -> float:
    """Seconds of ``60s``, ``500ms``, ``30m``, ``1.5h``, ``7d``. Raises ``UserError``, which names the ``option``."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"{option} {text!r} is not a duration".lstrip(), remedy="write 60s, 30m, 12h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size_of(text: str, option: str = "") -> int:
    """Bytes of ``4096``, ``64K``, ``1.5M``, ``4GiB``; units are binary. Raises ``UserError``; it names ``option``."""
    match = _SIZE.fullmatch(text.strip())
    size_bytes = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size_bytes < 1:
        raise UserError(f"{option} {text.strip()!r} is not a size".lstrip(), remedy="write bytes, or 64K, 1.5M, 4GiB")
    return size_bytes


def check_one_of(option: str, value: str, values: Sequence[str], more: str = "") -> None:
    """Raises ``UserError`` if an option's value is not one of ``values``. ``more`` ends its remedy."""
    if value not in values:
        remedy = f"{did_you_mean(value, values)}use {', '.join(values)}{more}"
        raise UserError(f"{option} {value} is not a valid value", remedy=remedy)


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """The beginning of a remedy: the most similar of some names, and a space; empty if none is similar."""
    import difflib

    near = difflib.get_close_matches(shortened(text, 100), names, n=1)
    return f"did you mean {near[0]}? " if near else ""


def install_command(extra: str, *others: str) -> str:
    """The command that installs ``others``, or the packages of an extra of ``pyproject.toml``, for this interpreter.

    p2ptrain is on no package index, so ``pip install 'p2ptrain[extra]'`` would find nothing.
    """
    try:
        listed = importlib.metadata.requires("p2ptrain") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        listed = []
    marks = [needed.partition("; extra == ") for needed in listed]
    packages = others or [name for name, _, mark in marks if mark.strip("\"'") == extra] or [f"PACKAGES-OF-{extra}"]
    if Path(sys.prefix, "pipx_metadata.json").exists():
        command = ["pipx", "inject", "p2ptrain"]
    elif find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install"]
    else:  # made by uv
        command = ["uv", "pip", "install", "--python", sys.executable]
    if sys.platform == "win32":
        return " ".join(f'"{word}"' if set(word) & set(" <>=") else word for word in [*command, *packages])
    return shlex.join([*command, *packages])
