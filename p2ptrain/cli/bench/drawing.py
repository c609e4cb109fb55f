"""Pictures of a report: bars for a terminal of 80 columns, told apart without colour, and a chart as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_EIGHTHS = " ▏▎▍▌▋▊▉"
FILLS = ("█", "▒", "░", "▚")
"""One a series: they differ on paper and without colour."""
MARK = "┃"


@dataclass(frozen=True, slots=True)
class Bar:
    """One line: ``value`` draws it, ``text`` says what it is; ``mark`` is a value that it is held against."""

    label: str
    value: float
    text: str
    fill: str = FILLS[0]
    mark: float | None = None

    @property
    def reach(self) -> float:
        return max(self.value, self.mark or 0.0)


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, width: int = 80, common: bool = False) -> list[str]:
    """Lines of a bar chart, at most ``width`` columns.

    Args:
        groups: title and bars; each group is drawn against its own longest bar.
        common: all are drawn against the longest bar of all.
    """
    longest_of_all = max((bar.reach for _, items in groups for bar in items), default=0.0)
    title_width = max((len(title) for title, _ in groups), default=0)
    label_width = max((len(bar.label) for _, items in groups for bar in items), default=0)
    text_width = max((len(bar.text) for _, items in groups for bar in items), default=0)
    room = max(8, width - title_width - label_width - text_width - 4)
    lines: list[str] = []
    for title, items in groups:
        longest = (longest_of_all if common else max((bar.reach for bar in items), default=0.0)) or 1.0
        for number, bar in enumerate(items):
            head = title if not number else ""
            drawn = _bar(bar.value / longest * room, bar.fill)
            if bar.mark is not None:
                at = min(int(bar.mark / longest * room), room - 1)
                drawn = f"{drawn[:at]:<{at}}{MARK}{drawn[at + 1 :]}"
            lines.append(f"{head:>{title_width}}  {bar.label:<{label_width}} {drawn} {bar.text}".rstrip())
    return lines


def _bar(cells: float, fill: str) -> str:
    whole = int(cells)
    rest = _EIGHTHS[int((cells - whole) * 8)] if fill == FILLS[0] else ""
    return (fill * whole + rest.strip()) or "▏"


# ------------------------------------------------------------------------------------------------------------------ SVG


@dataclass(frozen=True, slots=True)
class Point:
    """A median, and the spread around it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """One series: a point for each label of the horizontal axis, None where there is none."""

    title: str
    points: Sequence[Point | None]


_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 40, 92, 84
_COLOURS = ("#0b6e99", "#c2571a", "#6b7280", "#6d3fa0")  # told apart by people who see no red or no green
_DASHES = ("", "7 4", "2 4", "10 3 2 3")


def chart_svg(
    title: str,
    subtitle: str,
    footer: Sequence[str],
    labels: Sequence[str],
    lines: Sequence[Line],
    *,
    unit: str,
    joined: bool = True,
) -> str:
    """A chart, one SVG document: medians as dots and lines, the spread as a band behind each line.

    Args:
        joined: whether there is anything between two labels; else there are dots only.
    """
    top = _nice_top(max((point.high for line in lines for point in line.points if point), default=1.0))
    room = _WIDTH - _LEFT - _RIGHT

    def x(index: int) -> float:
        if joined and len(labels) > 1:
            return _LEFT + index * room / (len(labels) - 1)
        return _LEFT + (index + 0.5) * room / len(labels)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 30, title, size=18, weight=600),
        _text(_LEFT, 50, subtitle, colour="#4b5563", size=12),
    ]
    for value in _ticks(top):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(_text(_LEFT - 8, y(value) + 4, f"{value:g}", anchor="end", colour="#4b5563", size=11))
    parts.append(_text(_LEFT - 8, _TOP - 14, unit, anchor="end", colour="#4b5563", size=11))
    for index, label in enumerate(labels):
        parts.append(_text(x(index), _HEIGHT - _BOTTOM + 18, label, anchor="middle", colour="#4b5563", size=11))
    for number, line in enumerate(lines):
        known = [(x(index), point) for index, point in enumerate(line.points) if point is not None]
        places = [(at, y(point.value), y(point.low), y(point.high)) for at, point in known]
        beside = 14 * (number - (len(lines) - 1) / 2)
        parts += _series(number, places) if joined else [_mark(number, at + beside, up) for at, up, *_ in places]
    parts += _legend([line.title for line in lines], joined=joined)
    for number, text in enumerate(footer):
        parts.append(_text(_LEFT, _HEIGHT - 34 + 15 * number, text, colour="#6b7280", size=10))
    return "\n".join([*parts, "</svg>", ""])


def _series(number: int, places: Sequence[tuple[float, float, float, float]]) -> list[str]:
    """Band, line and dots through (x, median, low, high)."""
    if not places:
        return []
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    band = [f"{x:.1f},{high:.1f}" for x, _, _, high in places] + [f"{x:.1f},{low:.1f}" for x, _, low, _ in places[::-1]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
    return [
        f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.14"/>',
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y, _, _ in places),
    ]


def _mark(number: int, x: float, y: float) -> str:
    """A disc, a square, a circle or a hollow square: told apart without colour."""
    colour = _COLOURS[number % len(_COLOURS)]
    paint = f'fill="{colour}"' if number % 4 < 2 else f'fill="#ffffff" stroke="{colour}" stroke-width="2"'
    if number % 2:
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" {paint}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" {paint}/>'


def _legend(titles: Sequence[str], *, joined: bool) -> list[str]:
    parts, x = [], float(_LEFT)
    for number, title in enumerate(titles):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        line = (
            f'<line x1="{x:.0f}" x2="{x + 26:.0f}" y1="66" y2="66" stroke="{colour}" stroke-width="2.6" '
            f'stroke-dasharray="{dash}"/>'
        )
        parts.append(line if joined else _mark(number, x + 16, 66))
        parts.append(_text(x + 33, 70, title, size=12))
        x += 33 + 6.8 * len(title) + 22
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#111827", size: int, weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _step(top: float) -> float:
    """A round step that cuts ``top`` into three to seven parts."""
    rough = top / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(step for step in (unit, 2 * unit, 5 * unit, 10 * unit) if step >= rough * 0.999)


def _nice_top(highest: float) -> float:
    step = _step(highest if highest > 0 else 1.0)
    return math.ceil((highest or 1.0) / step - 1e-9) * step


def _ticks(top: float) -> list[float]:
    step = _step(top)
    return [round(index * step, 12) for index in range(round(top / step) + 1)]
