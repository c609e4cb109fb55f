"""The ring as a drawing: boxes in rank order on a loop for up to eight members, a compact chain for more. Pure.

╭ 0 ● ────────╮      ╭ 1 ● ────────╮
│ atlas       │─────▶│ borea       │      ranks go right along the top row,
╰─────────────╯      ╰─────────────╯      and left along the bottom row
       ▲                    │
       │   generation 7     ▼
╭ 3 ● ────────╮      ╭ 2 ● ────────╮
│ delos       │◀─────│ castor      │
╰─────────────╯      ╰ 98M 20 ms ──╯

A box's lower edge tells what is known of the way from there to the right neighbour. The slowest way has a mark there,
and a dashed arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len

from tui.format import Look, Span, fit

MAX_BOXES = 8
MAX_BOX_WIDTH = 26
MIN_BOX_WIDTH = 10
MIN_GAP = 3
MAX_GAP = 9
SLOWEST = Look("!", "warn")
_DASHED = str.maketrans("─│", "╌╎")


@dataclass(frozen=True, slots=True)
class Seat:
    """One member as it is drawn.

    Attributes:
        symbol, role: of its state, and the role of its colour.
        lines: up to three, the most important first.
        ways: what is known of the way to its right neighbour, in words, the longest first: the one that fits is shown.
        slowest: that way is the slowest one of the ring.
    """

    symbol: str
    role: str
    lines: tuple[str, ...]
    ways: tuple[str, ...] = ()
    slowest: bool = False


class Canvas:
    """A grid of cells, each a character and a colour role. What lies outside is not drawn.

    Attributes:
        dashed: lines are drawn dashed.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self.dashed = False
        self._cells = [[(" ", "")] * width for _ in range(height)]

    def put(self, x: int, y: int, text: str, role: str = "") -> None:
        """Write ``text`` from (x, y) to the right. A character two cells wide takes its two cells."""
        for char in text.translate(_DASHED) if self.dashed else text:
            columns = cell_len(char)
            if columns and 0 <= y < self.height and x >= 0 and x + columns <= self.width:
                self._cells[y][x : x + columns] = [(char, role)] + [("", role)] * (columns - 1)
            x += columns

    def box(self, x: int, y: int, width: int, height: int, role: str) -> None:
        edge = "─" * (width - 2)
        self.put(x, y, f"╭{edge}╮", role)
        for row in range(y + 1, y + height - 1):
            self.put(x, row, "│", role)
            self.put(x + width - 1, row, "│", role)
        self.put(x, y + height - 1, f"╰{edge}╯", role)

    def spans(self) -> list[list[Span]]:
        """One list of spans per row, trailing blanks cut."""
        rows = []
        for cells in self._cells:
            row = [
                Span("".join(char for char, _ in run), role) for role, run in groupby(cells, key=lambda cell: cell[1])
            ]
            while row and not row[-1].text.strip():
                row.pop()
            rows.append(row)
        return rows


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the boxes of a drawing go: left edges of the rows (in drawing order, left to right), and their tops."""

    box_width: int
    box_height: int
    top_xs: tuple[int, ...]
    bottom_xs: tuple[int, ...]
    top_y: int
    bottom_y: int


def draw_ring(
    seats: Sequence[Seat], width: int, height: int, *, pulse: int | None = None, centre: Sequence[str] = ()
) -> list[list[Span]]:
    """At most ``height`` rows of spans, each at most ``width`` cells.

    Args:
        pulse: the arrow that leaves this rank (modulo the size) is lit: it walks on with every committed step.
        centre: lines to write inside the loop where there is room.
    """
    frame = _frame(len(seats), width, height) if 0 < len(seats) <= MAX_BOXES else None
    if frame is None:
        return _chain(seats, width, height)
    canvas = Canvas(width, height)
    size = len(seats)
    lit = None if pulse is None else pulse % size
    for rank in range(size):
        canvas.dashed = seats[rank].slowest
        _arrow(canvas, frame, rank, size, "accent" if rank == lit else SLOWEST.role if canvas.dashed else "dim")
    canvas.dashed = False
    for rank, seat in enumerate(seats):
        x, y = _place(frame, rank)
        _draw_seat(canvas, frame, x, y, rank, seat)
    if size > 1:
        _write_centre(canvas, frame, centre)
    return canvas.spans()


def _frame(size: int, width: int, height: int) -> _Frame | None:
    """The largest boxes that fit; None where even the smallest do not."""
    top = max(1, (size + 1) // 2) if size > 2 else size
    bottom = size - top
    margin = 2 * MIN_GAP if size == 1 else 0  # a ring of one closes around its own box
    room = width - margin
    box_width = min(MAX_BOX_WIDTH, (room - (top - 1) * MIN_GAP) // top)
    if box_width < MIN_BOX_WIDTH:
        return None
    for box_height in (5, 4, 3):
        spare = height - box_height * (2 if bottom else 1)
        if spare >= 2:
            break
    else:
        return None
    gap = min(MAX_GAP, (room - top * box_width) // (top - 1)) if top > 1 else 0
    used = top * box_width + (top - 1) * gap
    left = (width - used) // 2
    top_xs = tuple(left + index * (box_width + gap) for index in range(top))
    bottom_xs = _spread(left, left + used - box_width, bottom)
    between = min(spare, 5) if bottom else 2
    top_y = (height - box_height * (2 if bottom else 1) - between) // 2
    return _Frame(box_width, box_height, top_xs, bottom_xs, top_y, top_y + box_height + between)


def _spread(first: int, last: int, count: int) -> tuple[int, ...]:
    if count < 2:
        return ((first + last) // 2,) * count
    return tuple(round(first + index * (last - first) / (count - 1)) for index in range(count))


def _place(frame: _Frame, rank: int) -> tuple[int, int]:
    top = len(frame.top_xs)
    if rank < top:
        return frame.top_xs[rank], frame.top_y
    return frame.bottom_xs[len(frame.bottom_xs) - 1 - (rank - top)], frame.bottom_y


def _draw_seat(canvas: Canvas, frame: _Frame, x: int, y: int, rank: int, seat: Seat) -> None:
    pad = 2 if frame.box_width >= 14 else 1
    inner = frame.box_width - 2 * pad
    canvas.box(x, y, frame.box_width, frame.box_height, seat.role)
    canvas.put(x + 1, y, f" {rank} {seat.symbol} ", seat.role)
    for row, line in enumerate(seat.lines[: frame.box_height - 2]):
        canvas.put(x + pad, y + 1 + row, fit(line, inner), "strong" if row == 0 else "dim")
    mark = f"{SLOWEST.symbol} " if seat.slowest else ""
    room = frame.box_width - 4 - len(mark)
    way = next((text for text in seat.ways if cell_len(text) <= room), None)
    if way is not None:
        role = SLOWEST.role if seat.slowest else "dim"
        canvas.put(x + 1, y + frame.box_height - 1, f" {mark}{way} ", role)


def _arrow(canvas: Canvas, frame: _Frame, rank: int, size: int, role: str) -> None:
    """The arrow from ``rank`` to its right neighbour."""
    top = len(frame.top_xs)
    x, y = _place(frame, rank)
    to_x, to_y = _place(frame, (rank + 1) % size)
    middle, mid_row = frame.box_width // 2, frame.box_height // 2
    right_edge = x + frame.box_width
    if rank + 1 < top:
        canvas.put(right_edge, y + mid_row, "─" * (to_x - right_edge - 1) + "▶", role)
    elif rank >= top and rank + 1 < size:
        start = to_x + frame.box_width
        canvas.put(start, y + mid_row, "◀" + "─" * (x - start - 1), role)
    elif size == 1:
        _loop_around(canvas, frame, x, y + mid_row, role)
    elif not frame.bottom_xs:
        _loop_below(canvas, frame, x + middle, to_x + middle, role)
    elif rank + 1 == top:
        _descend(canvas, frame, x + middle, to_x, to_y + mid_row, role)
    else:
        _ascend(canvas, frame, x, y + mid_row, to_x + middle, role)


def _column(canvas: Canvas, x: int, first: int, last: int, role: str) -> None:
    for row in range(first, last + 1):
        canvas.put(x, row, "│", role)


def _loop_around(canvas: Canvas, frame: _Frame, x: int, mid_row: int, role: str) -> None:
    below, right = frame.top_y + frame.box_height, x + frame.box_width
    canvas.put(x - 3, mid_row, "╭─▶", role)
    canvas.put(right, mid_row, "──╮", role)
    _column(canvas, x - 3, mid_row + 1, below - 1, role)
    _column(canvas, right + 2, mid_row + 1, below - 1, role)
    canvas.put(x - 3, below, "╰" + "─" * (frame.box_width + 4) + "╯", role)


def _loop_below(canvas: Canvas, frame: _Frame, from_x: int, to_x: int, role: str) -> None:
    below = frame.top_y + frame.box_height
    canvas.put(from_x, below, "│", role)
    canvas.put(to_x, below, "▲", role)
    canvas.put(to_x, below + 1, "╰" + "─" * (from_x - to_x - 1) + "╯", role)


def _descend(canvas: Canvas, frame: _Frame, from_x: int, to_x: int, to_row: int, role: str) -> None:
    first = frame.top_y + frame.box_height
    if to_x <= from_x < to_x + frame.box_width:
        _column(canvas, from_x, first, frame.bottom_y - 2, role)
        canvas.put(from_x, frame.bottom_y - 1, "▼", role)
    else:
        edge = to_x + frame.box_width
        _column(canvas, from_x, first, to_row - 1, role)
        canvas.put(edge, to_row, "◀" + "─" * (from_x - edge - 1) + "╯", role)


def _ascend(canvas: Canvas, frame: _Frame, from_x: int, from_row: int, to_x: int, role: str) -> None:
    first = frame.top_y + frame.box_height
    canvas.put(to_x, first, "▲", role)
    if from_x <= to_x < from_x + frame.box_width:
        _column(canvas, to_x, first + 1, frame.bottom_y - 1, role)
    else:
        _column(canvas, to_x, first + 1, from_row - 1, role)
        canvas.put(to_x, from_row, "╰" + "─" * (from_x - to_x - 1), role)


def _write_centre(canvas: Canvas, frame: _Frame, centre: Sequence[str]) -> None:
    first, last = frame.top_y + frame.box_height, frame.bottom_y - 1
    left, right = frame.top_xs[0] + frame.box_width // 2 + 2, frame.top_xs[-1] + frame.box_width // 2 - 2
    if not frame.bottom_xs:
        last = first
    room = last - first + 1 - (2 if frame.bottom_xs and last - first >= 3 else 0)
    lines = [fit(line, right - left + 1) for line in centre[:room]]
    start = first + (last - first + 1 - len(lines)) // 2
    for row, line in enumerate(lines):
        canvas.put((left + right + 1 - cell_len(line)) // 2, start + row, line, "accent" if row == 0 else "dim")


def _chain(seats: Sequence[Seat], width: int, height: int) -> list[list[Span]]:
    """``0 ● atlas → 1 ● borea → … ↩ 0`` in columns, as many as fit; the last row counts those that do not."""
    if not seats or width < 8 or height < 1:
        return []
    number = len(str(len(seats) - 1))
    longest = max(cell_len(seat.lines[0]) if seat.lines else 0 for seat in seats)
    for name_width in (18, 12, 8, 5):  # shorter names rather than fewer
        cell = min(width, number + 6 + max(4, min(longest, name_width)))
        columns = width // cell
        capacity = columns * height
        if capacity >= len(seats):
            break
    cell = width // columns
    shown = len(seats) if len(seats) <= capacity else max(0, columns * (height - 1))
    rows: list[list[Span]] = []
    for start in range(0, shown, columns):
        row: list[Span] = []
        for rank in range(start, min(start + columns, shown)):
            seat, room = seats[rank], cell - number - 6
            name = _padded(fit(seat.lines[0] if seat.lines else "", room), room)
            arrow = "→" if rank + 1 < len(seats) else "↩"
            row += [Span(f"{rank:>{number}} ", "dim"), Span(f"{seat.symbol} ", seat.role), Span(name)]
            row += [Span(f"{SLOWEST.symbol}{arrow} ", SLOWEST.role) if seat.slowest else Span(f" {arrow} ", "dim")]
        rows.append(row)
    if shown < len(seats):
        rows.append([Span(fit(f"… and {len(seats) - shown} more, then back to 0", width), "dim")])
    return rows


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))
