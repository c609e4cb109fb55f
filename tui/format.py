"""How values read: units, ages, bars, symbols. Pure; None, NaN and negative values read as unknown.

A *span* is a text and the role of its colour; ``tui.theme`` maps roles to colours. Colour alone carries no meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from p2ptrain.core.texts import human_time, three_digits
from tui.model import is_finite

UNKNOWN = "–"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


class Span(NamedTuple):
    """A piece of text and the role of its colour (a key of ``tui.theme.Palette.colours``; empty: plain foreground)."""

    text: str
    role: str = ""


Row = list[Span]


class Look(NamedTuple):
    """How a state is shown: a symbol of one cell, and a colour role."""

    symbol: str
    role: str


PEER_LOOKS = {
    "training": Look("●", "good"),
    "serving": Look("◆", "good"),
    "drafting": Look("◈", "good"),
    "healing": Look("✚", "busy"),
    "following": Look("◑", "busy"),
    "building": Look("◔", "busy"),
    "joining": Look("◌", "busy"),
    "waiting": Look("○", "calm"),
    "idle": Look("·", "dim"),
    "held": Look("□", "warn"),
    "paused": Look("■", "warn"),
    "leaving": Look("↗", "warn"),
    "failed": Look("!", "bad"),
    "away": Look("◇", "warn"),
    "lost": Look("✗", "bad"),
    "left": Look("–", "dim"),
    "evicted": Look("⊘", "bad"),
}
STEP_LOOKS = {
    "compute": Look("█", "compute"),
    "communicate": Look("▓", "communicate"),
    "wait": Look("░", "wait"),
}
"""Activities that take the time of a step."""
PHASE_LOOKS = {
    "detect": Look("░", "bad"),
    "agree": Look("▒", "busy"),
    "form": Look("▓", "communicate"),
    "transfer": Look("▚", "accent"),
    "commit": Look("█", "compute"),
}
JOB_LOOKS = {
    "running": Look("▶", "good"),
    "forming": Look("◔", "busy"),
    "waiting": Look("○", "busy"),
    "saving": Look("▲", "warn"),
    "queued": Look("○", "calm"),
    "paused": Look("■", "warn"),
    "done": Look("✓", "good"),
    "cancelled": Look("–", "dim"),
    "failed": Look("✗", "bad"),
}
LEVEL_LOOKS = {"info": Look("·", "dim"), "warning": Look("▲", "warn"), "error": Look("✗", "bad")}
WEIGHTS, CACHES, FREE = Look("█", "compute"), Look("▓", "communicate"), Look("·", "border")
BUSY, BUBBLE = Look("█", "good"), Look("░", "wait")
SLOWEST, ABSENT = Look("!", "warn"), Look("✗", "bad")
SPENT_LOOKS = {
    "verify": Look("█", "compute"),
    "draft": Look("▓", "communicate"),
    "wait": Look("▒", "warn"),
    "rest": Look("·", "border"),
}
"""Activities that take the time of a verifier's token."""


def look_in(looks: Mapping[str, Look], state: str) -> Look:
    return looks.get(state, Look("?", "dim"))


def _scale(value: float | None, units: Sequence[str], base: float) -> str:
    if not is_finite(value) or value < 0:
        return UNKNOWN
    for unit in units[:-1]:
        if value < base * 0.9995:
            return f"{_three_digits(value)}{unit}"
        value /= base
    return f"{_three_digits(min(value, 9999.0))}{units[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else three_digits(value)


def count(value: float | None) -> str:
    """``12.3k``: tokens, steps, tokens per second."""
    return _scale(value, ("", "k", "M", "G", "T"), 1000.0)


def plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size(value: float | None) -> str:
    """``1.50 GiB``. Binary units, as memory is sold."""
    return _scale(value, (" B", " KiB", " MiB", " GiB", " TiB"), 1024.0)


def used_of(used: float, total: float) -> str:
    """``9.1/12 GiB``, ``0.7/1.3 GiB``: both in the total's unit; the total is above 0."""
    number, _, unit = size(total).partition(" ")
    if not unit:
        return UNKNOWN
    whole = float(number)
    digits = 0 if whole >= 10 or whole == int(whole) else 1
    return f"{used * whole / total:.1f}/{whole:.{digits}f} {unit}"


def rate(per_s: float | None, unit: str = "bit/s") -> str:
    """``98.2 Mbit/s``, ``12.5 MB/s``. Decimal units, as links are sold."""
    return _scale(per_s, (f" {unit}", f" k{unit}", f" M{unit}", f" G{unit}"), 1000.0)


def link_texts(latency_ms: float | None, bits_per_s: float | None, way: str = "") -> tuple[str, ...]:
    """Texts for a link, the longest first: ``98.2 Mbit/s · 20 ms``, ``98.2M 20 ms``, ``98.2M``, each also with its
    way; empty if nothing is known."""
    figures: tuple[str, ...] = ()
    if latency_ms is not None:
        late = millis(latency_ms)
        short = rate(bits_per_s, "").replace(" ", "")
        figures = (f"{rate(bits_per_s)} · {late}", f"{short} {late}", short) if bits_per_s is not None else (late,)
    if not way:
        return figures
    return (*(f"{text} {way}" for text in figures), way, way.split(" ", 1)[0])


def millis(value: float | None) -> str:
    """``0.42 ms``, ``87.1 ms``, ``1.24 s``."""
    if not is_finite(value) or value < 0:
        return UNKNOWN
    if value < 999.5:
        return f"{_three_digits(value)} ms"
    return f"{_three_digits(value / 1000)} s" if value < 60_000 else duration(value / 1000)


def duration(seconds: float | None) -> str:
    """``7 s``, ``4m 05s``, ``3h 12m``, ``2d 7h``."""
    if not is_finite(seconds) or seconds < 0:
        return UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{min(whole // 86400, 9999)}d {whole % 86400 // 3600}h"


def age(seconds: float | None) -> str:
    """As ``duration``, with tenths below ten seconds, for heartbeats."""
    if is_finite(seconds) and 0 <= seconds < 9.95:
        return f"{seconds:.1f} s"
    return duration(seconds)


def percent(part: float | None) -> str:
    """``0.27`` → ``27%``."""
    return f"{min(max(part, 0.0), 1.0):.0%}" if is_finite(part) else UNKNOWN


def loss(value: float | None) -> str:
    return f"{value:.4f}" if is_finite(value) and abs(value) < 1e5 else UNKNOWN


def scientific(value: float | None) -> str:
    """``3.0e-4``, for learning rates."""
    if not is_finite(value):
        return UNKNOWN
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def waits_in_words(stats: Mapping[str, float]) -> list[str]:
    """How long texts wait for a verifier, and what it saves, from what it reports (``ServingInfo.stats``)."""
    parts: list[str] = []
    for name, words in (("first", "first token after {}"), ("between", "{} between tokens")):
        if (median_ms := stats.get(f"{name}_ms")) is not None:
            parts.append(f"{words.format(millis(median_ms))} (95 %: {millis(stats.get(f'{name}_p95_ms'))})")
    if per_s := stats.get("prompt_tokens_per_s"):
        parts.append(f"{count(per_s)} tok/s of prompts")
    if (share := stats.get("cached_share")) is not None:
        parts.append(f"{percent(share)} cached")
    if preemptions := stats.get("preemptions"):
        parts.append(f"{count(preemptions)} preempted")
    return parts


def clock(wall: float) -> str:
    return f"{human_time(wall, '%H:%M:%S'):<8}"


def bar(part: float, width: int) -> str:
    if not is_finite(part) or width <= 0:
        return " " * max(width, 0)
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest ``width`` values as a line of blocks; an unknown value leaves a gap.

    The baseline is as far below the least value as the greatest is above it, but not below zero: small changes are
    visible, and noise does not look like a collapse.
    """
    newest = list(values[-width:]) if width > 0 else []
    known = [value for value in newest if is_finite(value)]
    top = max(known, default=0.0)
    floor = max(0.0, 2 * min(known, default=0.0) - top)
    span = top - floor
    parts = (None if not is_finite(value) else (value - floor) / span if span > 0 else 0.5 for value in newest)
    cells = [" " if part is None else _LEVELS[int(min(max(part, 0.0), 1.0) * 7.999)] for part in parts]
    return "".join(cells).rjust(max(width, 0))


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` round numbers (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``, for an axis."""
    if not (is_finite(low) and is_finite(high)) or high <= low or most < 2:
        return [low] if is_finite(low) else []
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            break
    return [index * step for index in range(first, last + 1)]


def stacked_bar(parts: Sequence[tuple[Look, float]], whole: float, width: int) -> list[Span]:
    """Parts of ``whole`` in ``width`` cells, each with its own texture; the rest is dotted."""
    known = [(look, max(0.0, value) if is_finite(value) else 0.0) for look, value in parts]
    taken = sum(value for _, value in known)
    rest = max(0.0, whole - taken) if is_finite(whole) else 0.0
    return filled_bar([*known, (FREE, rest if taken + rest > 0 else 1.0)], width)


def filled_bar(parts: Sequence[tuple[Look, float]], width: int) -> list[Span]:
    """As ``stacked_bar``, without a rest: the parts fill ``width`` cells."""
    cells = _largest_remainder([value for _, value in parts], width)
    return [Span(look.symbol * count_, look.role) for (look, _), count_ in zip(parts, cells, strict=True) if count_]


def _largest_remainder(values: Sequence[float], total: int) -> list[int]:
    whole = sum(values)
    if whole <= 0 or total <= 0:
        return [0] * len(values)
    exact = [value * total / whole for value in values]
    cells = [int(value) for value in exact]
    order = sorted(range(len(values)), key=lambda index: cells[index] - exact[index])
    for index in order[: total - sum(cells)]:
        cells[index] += 1
    return cells


def fit(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, with an ellipsis if it was cut."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def cells(row: Sequence[Span]) -> int:
    return sum(cell_len(span.text) for span in row)


def cut(row: Sequence[Span], width: int) -> Row:
    kept: Row = []
    for span in row:
        text = fit(span.text, width)
        if text:
            kept.append(Span(text, span.role))
        width -= cell_len(text)
    return kept


def fitting(first: Sequence[Span], more: Sequence[Span], width: int) -> Row:
    """``first``, and those of ``more`` that fit."""
    row = list(first)
    for span in more:
        if cells(row) + cell_len(span.text) <= width:
            row.append(span)
    return row


def list_items(label: str, items: Sequence[tuple[Look, str]], width: int) -> Row:
    """``label``, and the items behind their symbols; ``+3`` stands for those that do not fit."""
    row = [Span(label, "dim")]
    for index, (look, text) in enumerate(items):
        item = [Span(f"{look.symbol} ", look.role), Span(text)]
        if cells(row) + cells(item) + 6 > width:  # leaves room for the count of the others
            row.append(Span(f"+{len(items) - index}", "dim"))
            break
        row += item
    return cut(row, width)


WayOf = Callable[[str, str], str]
"""The ids of two peers → the way of the circuit from one to the other; empty for none."""
WAY_COLUMN = ("way", 22)


def table(columns: Sequence[tuple[str, int]], rows: Sequence[Sequence[Row]], width: int) -> list[Row]:
    """Lines of cells under labels (``columns``: label, width), one blank between; columns that do not fit are left
    out."""
    shown, room = 0, width + 1
    while shown < len(columns) and columns[shown][1] < room:
        room -= columns[shown][1] + 1
        shown += 1
    lines: list[Row] = []
    for cells_ in ([[Span(label, "dim")] for label, _ in columns], *rows):
        line: Row = []
        for (_, column), cell in zip(columns[:shown], cells_, strict=False):
            kept = cut(cell, column)
            line += [*([Span(" ")] if line else []), *kept, Span(" " * (column - cells(kept)))]
        lines.append(line)
    return lines


def downsample(steps: Sequence[int], values: Sequence[float], buckets: int) -> tuple[list[float], list[float]]:
    """At most ``buckets`` points, each the mean of equally many neighbours, for a plot of that width."""
    if buckets <= 0 or not steps:
        return [], []
    per = -(-len(steps) // buckets)
    runs = [(steps[start : start + per], values[start : start + per]) for start in range(0, len(steps), per)]
    return [sum(xs) / len(xs) for xs, _ in runs], [sum(ys) / len(ys) for _, ys in runs]
