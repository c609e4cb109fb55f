"""What is done to a cluster, to whom and when: a pure function of a number. The same number, the same schedule.

A schedule names *turns*, not processes: ``order`` says in which order workers are tried for a fault, and the first that
is whole takes it. So the schedule does not depend on how fast a machine is, and who is really hit may.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from p2ptrain.core.errors import UserError

KINDS = ("kill", "two", "freeze", "cut", "slow", "corrupt", "seed", "disk", "leave", "join")
DONOR = "donor"
BY_NAME = (DONOR,)
"""Kinds that are done only where a person names them: a transfer takes a model that is not the least one."""
NONE = "none"
CUTS = ("ring reset", "ring silent", "seed reset", "seed silent", "all silent")
"""Which of a worker's links, and how: a reset is known at once, a silent one is a pulled cable."""
LASTS_S: dict[str, tuple[float, float]] = {
    "kill": (0.5, 3.0),
    "two": (0.5, 3.0),
    "freeze": (0.5, 6.0),
    "cut": (0.5, 6.0),
    "slow": (2.0, 8.0),
    "corrupt": (1.0, 1.0),
    "seed": (0.2, 5.0),
    "disk": (2.0, 6.0),
    "leave": (0.5, 3.0),
    "join": (3.0, 10.0),
    "donor": (0.0, 0.5),
}
"""Seconds from a fault to its end (of the dead: to their restart). Silences lie on both sides of the 2 s after which a
LAN peer counts as dead: shorter ones must cost nobody its place."""
SLOW_BPS = (1e5, 1e7)
"""Bytes per second of a slow link, drawn on a logarithmic scale: a poor uplink to a good one."""
SLOW_DELAY_S = (0.005, 0.1)  # one way: another town to another continent
DAMAGE_BYTES = 1 << 20
"""A byte within so many of the next ones is damaged: less than a step sends, so that it comes soon."""

_UNITS_S = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|min|m|h|)\s*", re.ASCII)
_SPAN = re.compile(r"\s*([0-9.]+)\s*-\s*([0-9.]+)\s*(ms|s|min|m|h|)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One fault.

    Attributes:
        number: 1, 2, ...
        at_s: seconds after the faults began, where they go by the clock.
        gap_s: the same, after the one before.
        order: numbers of workers, whom to try first.
        lasts_s: seconds until it is mended, or the dead are started again.
        cut: one of ``CUTS``.
        rate_bps, delay_s: of a slow link, bytes per second.
        skip_bytes: so many pass before one is damaged.
        share: of a transfer's time, after which one of its donors is hit.
    """

    number: int
    at_s: float
    gap_s: float
    kind: str
    order: tuple[int, ...]
    lasts_s: float
    cut: str
    rate_bps: float
    delay_s: float
    skip_bytes: int
    share: float


def schedule(seed: int, *, workers: int, kinds: Sequence[str], every_s: tuple[float, float]) -> Iterator[Action]:
    """Faults without end.

    Every action draws the same numbers whatever its kind, and draws are ``random()`` alone, whose sequence Python
    promises to keep from version to version.

    Args:
        workers: they are numbered from 1.
        kinds: of ``KINDS`` and ``BY_NAME``; each is as frequent as it is named.
        every_s: least and most seconds from one to the next.
    """
    if not kinds:
        return
    draw = random.Random(seed).random  # noqa: S311 - a schedule, no secret
    draw_share = random.Random(f"{seed}: share").random  # noqa: S311 - its own: schedules of before stay as they were

    def between(least: float, most: float) -> float:
        return least + (most - least) * draw()

    at_s = 0.0
    number = 0
    while True:
        number += 1
        gap_s = between(*every_s)
        at_s += gap_s
        kind = kinds[int(draw() * len(kinds))]
        order = tuple(sorted(range(1, workers + 1), key=lambda _: draw()))
        yield Action(
            number=number,
            at_s=at_s,
            gap_s=gap_s,
            kind=kind,
            order=order,
            lasts_s=between(*LASTS_S[kind]),
            cut=CUTS[int(draw() * len(CUTS))],
            rate_bps=SLOW_BPS[0] * (SLOW_BPS[1] / SLOW_BPS[0]) ** draw(),
            delay_s=between(*SLOW_DELAY_S),
            skip_bytes=int(draw() * DAMAGE_BYTES),
            share=draw_share(),
        )


# ---------------------------------------------------------------------------------------------- what a person writes


def seconds_of(text: str) -> float:
    """``60``, ``60s``, ``500ms``, ``30m``, ``1h``. Raises ``UserError``."""
    if not (match := _TIME.fullmatch(text)):
        raise UserError(f"{text!r} is not a duration", remedy="write 60s, 30m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def span_of(text: str) -> tuple[float, float]:
    """``0.5-2s``, or one duration for both ends. Raises ``UserError``."""
    if match := _SPAN.fullmatch(text):
        least, most = seconds_of(match[1] + match[3]), seconds_of(match[2] + match[3])
    else:
        least = most = seconds_of(text)
    if least > most:
        raise UserError(f"{text!r} ends before it begins", remedy=f"write {most:g}-{least:g}s")
    return least, most


def kinds_of(text: str, *, workers: int, tls: bool, here: Sequence[str]) -> tuple[str, ...]:
    """The kinds that a person named, or by itself (an empty text) all that make sense.

    Args:
        here: those that this system can do.

    Raises:
        UserError: one is not known, or cannot be.
    """
    if not text:
        left_out = {"corrupt"} if not tls else set()
        left_out |= {"two"} if workers < 3 else set()
        return tuple(kind for kind in KINDS if kind in here and kind not in left_out)
    named = tuple(part.strip() for part in text.split(",") if part.strip())
    if named == (NONE,):
        return ()
    known = (*KINDS, *BY_NAME)
    for kind in named:
        if kind not in known:
            raise UserError(f"{kind!r} is no kind of fault", remedy=f"use some of {', '.join(known)}, or {NONE} alone")
        if kind not in here:
            raise UserError(f"this system has no way to do {kind!r} to a process", remedy="leave it out")
    if "two" in named and workers < 3:
        raise UserError("two of them cannot die: one must live on", remedy="give --workers 3 or more, or leave out two")
    if not named:
        raise UserError("no kind of fault is named", remedy=f"use some of {', '.join(known)}, or {NONE}")
    return named
