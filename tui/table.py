"""A table that follows a list of records: columns chosen to fit its width, lines redrawn only where they changed.

Textual's ``DataTable`` renders every visible cell anew when one changes, through Rich's console: with 64 peers that
costs much of a core, on a machine that should train. Here a line is a strip of segments, built once per change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.format import Span, fit
from tui.theme import DARK, Palette

Cell = tuple[Span, ...]
CELL_PADDING = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a live table.

    Attributes:
        width: cells of its content, without padding.
        order: the lower, the longer it stays when room is scarce; 0 is always shown.
        most: it grows to this width where there is room; 0 for a fixed one.
    """

    key: str
    label: str
    width: int
    order: int
    right: bool = False
    most: int = 0


def choose(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit into ``width`` cells in their order, and how wide each is drawn. Pure."""
    room = width
    chosen: set[str] = set()
    for column in sorted(columns, key=lambda item: item.order):
        needs = column.width + 2 * CELL_PADDING
        if column.order and needs > room:
            break  # not a less important one instead: the set should grow steadily with the width
        chosen.add(column.key)
        room -= needs
    result = []
    for column in columns:
        if column.key in chosen:
            extra = min(max(room, 0), max(0, column.most - column.width))
            room -= extra
            result.append((column, column.width + extra))
    return result


class LiveTable(ScrollView, can_focus=True):
    """One line per record under a header line, with a row cursor that stays on its record."""

    DEFAULT_CSS = "LiveTable { overflow-x: hidden; scrollbar-size-vertical: 1; }"
    COLUMNS: tuple[Column, ...] = ()
    COMPONENT_CLASSES: ClassVar[set[str]] = {"livetable--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
    ]

    class Moved(Message):
        """A person moved the cursor to the row of ``key``."""

        def __init__(self, table: LiveTable, key: str) -> None:
            super().__init__()
            self.table, self.key = table, key

        @property
        def control(self) -> LiveTable:
            return self.table

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._rows: dict[str, dict[str, Cell]] = {}
        self._keys: list[str] = []
        self._places: dict[str, int] = {}
        self._strips: dict[str, Strip] = {}
        self._palette: Palette = DARK
        self._laid_out_for: tuple[int, Palette] | None = None
        self._chosen: list[tuple[Column, int]] = []
        self._cursor = 0

    def sync(self, rows: dict[str, dict[str, Cell]], palette: Palette) -> None:
        """Show ``rows`` (row key → column key → cell), in their order; columns that do not fit are left out."""
        at = self.key_at_cursor
        before, keys = self._rows, list(rows)
        self._rows, self._palette = rows, palette
        if keys != self._keys:
            self._keys, self._places = keys, {key: place for place, key in enumerate(keys)}
            self._strips.clear()
            self._cursor = self._places.get(at or "", min(self._cursor, max(0, len(keys) - 1)))
            self.virtual_size = Size(self.size.width, len(keys) + 1)
            self.refresh(layout=True)
        elif self._laid_out_for != (self.size.width, palette):
            self.refresh()
        else:
            for place, key in enumerate(keys):
                if before[key] != rows[key]:
                    self._strips.pop(key, None)
                    self._refresh_row(place)

    @property
    def key_at_cursor(self) -> str | None:
        """Key of the row under the cursor, None in an empty table."""
        return self._keys[self._cursor] if self._cursor < len(self._keys) else None

    @property
    def chosen(self) -> list[tuple[Column, int]]:
        """The columns that are drawn, and how wide."""
        self._lay_out()
        return self._chosen

    @property
    def hides_columns(self) -> bool:
        """Whether the width leaves some columns out."""
        return len(self.chosen) < len(self.COLUMNS)

    def go_to(self, key: str) -> None:
        """Put the cursor on a row, where it is shown."""
        if key in self._places and key != self.key_at_cursor:
            self._set_cursor(self._places[key])

    # -------------------------------------------------------------------------------------------------------- drawing

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._keys) + 1

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()

    def render_line(self, y: int) -> Strip:
        self._lay_out()
        place = y - 1 + self.scroll_offset.y
        if y == 0:
            return self._strip({column.key: (Span(column.label, "dim"),) for column in self.COLUMNS})
        if not 0 <= place < len(self._keys):
            return Strip.blank(self.size.width, self.rich_style)
        key = self._keys[place]
        strip = self._strips.get(key)
        if strip is None:
            strip = self._strips[key] = self._strip(self._rows[key], cursor=place == self._cursor)
        return strip

    def _lay_out(self) -> None:
        layout = (self.size.width, self._palette)
        if layout != self._laid_out_for:
            self._laid_out_for = layout
            self._chosen = choose(self.COLUMNS, self.size.width)
            self._strips.clear()

    def _strip(self, cells: dict[str, Cell], *, cursor: bool = False) -> Strip:
        base = self.get_component_rich_style("livetable--cursor") if cursor else self.rich_style
        pad = Segment(" " * CELL_PADDING)
        segments: list[Segment] = []
        for column, width in self._chosen:
            segments += [pad, *_segments(cells[column.key], column, width, self._palette), pad]
        return Strip(segments).adjust_cell_length(self.size.width).apply_style(base)

    def _refresh_row(self, place: int) -> None:
        y = place + 1 - self.scroll_offset.y
        if 0 < y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    # --------------------------------------------------------------------------------------------------------- moving

    def action_move(self, by: int) -> None:
        self._move_to(self._cursor + by)

    def action_move_page(self, pages: int) -> None:
        self._move_to(self._cursor + pages * max(1, self.size.height - 2))

    def on_click(self, event: events.Click) -> None:
        place = event.y - 1 + self.scroll_offset.y
        if event.y > 0 and place < len(self._keys):
            self._move_to(place)

    def _move_to(self, place: int) -> None:
        place = min(max(place, 0), len(self._keys) - 1)
        if place >= 0 and place != self._cursor:
            self._set_cursor(place)
            self.post_message(self.Moved(self, self._keys[place]))

    def _set_cursor(self, place: int) -> None:
        for changed in (self._cursor, place):
            if changed < len(self._keys):
                self._strips.pop(self._keys[changed], None)
                self._refresh_row(changed)
        self._cursor = place
        self.call_after_refresh(self._show_cursor)  # rows that came just now can be scrolled to after the layout only

    def _show_cursor(self) -> None:
        first, rows = self.scroll_offset.y, max(1, self.size.height - 1)
        if not first <= self._cursor < first + rows:
            self.scroll_to(y=self._cursor if self._cursor < first else self._cursor - rows + 1, animate=False)


def _segments(cell: Cell, column: Column, width: int, palette: Palette) -> list[Segment]:
    """A cell in exactly ``width`` columns, cut with an ellipsis."""
    segments, room = [], width
    for span in cell:
        text = fit(span.text, room)
        room -= cell_len(text)
        segments.append(Segment(text, palette.style(span.role)))
    blank = Segment(" " * room)
    return [blank, *segments] if column.right else [*segments, blank]
