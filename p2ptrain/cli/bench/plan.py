"""What is asked for, checked before anything starts, and the arithmetic of samples. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.texts import size_of

MAX_PEERS = 16
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
"""Element types that the ring can sum (``ring.dtypes``; a test compares them), known here without numpy."""

MEMBER_BYTES = 400 << 20
"""Resident memory of a member that has loaded torch, before it holds any tensor."""
COPIES = 3
"""Tensors of the size in a member: its own, and what Gloo keeps beside it while it reduces (two, measured)."""


SAMPLE_S = 0.005
"""A sample is at least so long: shorter operations are repeated in it, for the clock and the barrier cost some µs."""
MOST_REPEATS = 32
LEAST_ROUNDS = 5
MOST_ROUNDS = 60
BUDGET_S = 60.0
"""For the rounds of a whole run; starting, warming up and checking come on top, and all stays below 90 s."""

MIN_SUB_CHUNK_BYTES = 1 << 10
MAX_SUB_CHUNK_BYTES = 64 << 20  # that of ring.session

_MILLISECONDS = re.compile(r"\d{1,4}(?:\.\d{1,3})?", re.ASCII)


def peer_id(rank: int) -> str:
    """What the member of this rank is called, in the ring and in its certificate."""
    return f"member-{rank}"


def sizes_of(text: str, item_bytes: int) -> list[int]:
    """The sizes in a comma-separated list, ascending, each once. Raises ``UserError``."""
    sizes = sorted({size_of(part) for part in text.split(",") if part.strip()})
    if not sizes:
        raise UserError("no size was given", remedy="such as --sizes 64K,1M,16M")
    for size_bytes in sizes:
        if size_bytes % item_bytes:
            raise UserError(
                f"{size_bytes} bytes are no whole number of elements of {item_bytes} bytes",
                remedy="use multiples of it",
            )
    return sizes


def sub_chunk_of(text: str) -> int:
    """Bytes of a sub-chunk; 0, for "by itself", where none is given. Raises ``UserError``."""
    if not text:
        return 0
    size_bytes = size_of(text)
    if size_bytes % 8 or not MIN_SUB_CHUNK_BYTES <= size_bytes <= MAX_SUB_CHUNK_BYTES:
        raise UserError(
            f"a sub-chunk of {size_bytes} bytes: a multiple of 8, from 1K to 64M, is possible", remedy="such as 256K"
        )
    return size_bytes


def milliseconds_of(text: str) -> list[float]:
    """The times in a comma-separated list, ascending, each once. Raises ``UserError``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(_MILLISECONDS.fullmatch(part) for part in parts):
        raise UserError(f"{text!r} is no list of milliseconds", remedy="such as --rtt 0,20,80.5, up to 9999")
    return sorted({float(part) for part in parts})


def check_peers(peers: int, what: str = "peers") -> None:
    """Raises ``UserError``."""
    if not 2 <= peers <= MAX_PEERS:
        raise UserError(f"{peers} {what}: this compares rings of 2 to {MAX_PEERS}", remedy=f"give 2 to {MAX_PEERS}")


def check_memory(peers: int, largest_bytes: int, available_bytes: int) -> None:
    """Refuse tensors that would not fit. Raises ``ResourceError``."""
    need_bytes = peers * (MEMBER_BYTES + COPIES * largest_bytes)
    check_fits(f"{peers} peers with tensors of {largest_bytes / 2**20:,.0f} MiB", need_bytes, available_bytes)


def check_fits(what: str, need_bytes: int, available_bytes: int) -> None:
    """Raises ``ResourceError``."""
    if need_bytes > available_bytes:
        raise ResourceError(
            f"{what} need {need_bytes / 2**30:.1f} GiB, {available_bytes / 2**30:.1f} GiB are free",
            remedy="choose less: see --help",
        )


def repeats_for(operation_s: float) -> int:
    """How often an operation is repeated in one sample, the same for all contenders."""
    return max(1, min(MOST_REPEATS, math.ceil(SAMPLE_S / max(operation_s, 1e-9))))


def rounds_for(round_s: float, budget_s: float) -> int:
    """How many rounds fit into the budget, within ``LEAST_ROUNDS`` and ``MOST_ROUNDS``."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_s / max(round_s, 1e-9))))


def rotated(items: Sequence[str], by: int) -> list[str]:
    """The same items, beginning with another one: in each round another contender goes first."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


@dataclass(slots=True)
class Samples:
    """Seconds of one contender's operations.

    Attributes:
        title: for people. method: how, where there were several ways.
    """

    title: str
    method: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def quantile_s(self, part: float) -> float:
        """The sample below which ``part`` of all lie, interpolated."""
        ordered = sorted(self.seconds)
        place = part * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    def to_json(self, amount: float, unit: str) -> dict[str, Any]:
        """For programs. ``amount`` of something is done in each operation: ``unit`` names the rate."""
        document: dict[str, Any] = {"title": self.title}
        if self.method:
            document["method"] = self.method
        if self.seconds:
            document |= {
                "samples": len(self.seconds),
                "median_s": self.median_s,
                "p10_s": self.quantile_s(0.1),
                "p90_s": self.quantile_s(0.9),
                "min_s": min(self.seconds),
                "max_s": max(self.seconds),
                unit: amount / self.median_s,
            }
        return document | {"seconds": self.seconds}


def ratio(upper: Samples | None, lower: Samples | None) -> float | None:
    """The quotient of two medians, None where either is missing."""
    if upper is None or lower is None or not upper.seconds or not lower.seconds:
        return None
    return upper.median_s / lower.median_s
