"""A table that follows a list of records: columns chosen to fit its width, cells written only where they changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from textual import events
from textual.widgets import DataTable

from tui.format import Span
from tui.theme import Palette

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


class LiveTable(DataTable[Text]):
    """A ``DataTable`` of one line per record, with a row cursor."""

    COLUMNS: tuple[Column, ...] = ()

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", cursor_foreground_priority="renderable", cell_padding=CELL_PADDING)
        self._layout_for = -1
        self._chosen: list[tuple[Column, int]] = []
        self._drawn: dict[str, dict[str, Cell]] = {}
        self._wanted: dict[str, dict[str, Cell]] = {}
        self._palette: Palette | None = None

    def sync(self, rows: dict[str, dict[str, Cell]], palette: Palette) -> None:
        """Show ``rows`` (row key → column key → cell), in their order; columns that do not fit are left out."""
        self._wanted = rows
        if palette != self._palette:
            self._palette, self._layout_for = palette, -1
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        self._draw()

    @property
    def key_at_cursor(self) -> str | None:
        """Key of the row under the cursor."""
        keys = list(self._drawn)
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None

    @property
    def chosen(self) -> list[tuple[Column, int]]:
        """The columns that are drawn, and how wide."""
        return self._chosen

    @property
    def hides_columns(self) -> bool:
        """Whether the width leaves some columns out."""
        return len(self._chosen) < len(self.COLUMNS)

    def go_to(self, key: str) -> None:
        """Put the cursor on a row, where it is shown."""
        if key in self._drawn and key != self.key_at_cursor:
            with self.prevent(DataTable.RowHighlighted):  # only a person's move is told
                self.move_cursor(row=list(self._drawn).index(key), animate=False)

    def _draw(self) -> None:
        if self._palette is None or self.size.width == 0:
            return
        if self._layout_for != self.size.width:
            self._lay_out(self._palette)
        if list(self._drawn) != list(self._wanted):
            self._refill(self._palette)
        for key, wanted in self._wanted.items():
            drawn = self._drawn[key]
            for column, _ in self._chosen:
                cell = wanted[column.key]
                if drawn[column.key] != cell:
                    drawn[column.key] = cell
                    self.update_cell(key, column.key, self._palette.text(cell, right=column.right))

    def _lay_out(self, palette: Palette) -> None:
        self._layout_for = self.size.width
        at = self.key_at_cursor
        self.clear(columns=True)
        self._drawn = {}
        self._chosen = choose(self.COLUMNS, self.size.width)
        for column, width in self._chosen:
            label = palette.text((Span(column.label, "dim"),), right=column.right)
            self.add_column(label, key=column.key, width=width)
        self._refill(palette, at)

    def _refill(self, palette: Palette, at: str | None = None) -> None:
        """Rows came, went or changed places: rare, so all are written anew; the cursor stays on its record."""
        at = at or self.key_at_cursor
        offset = self.scroll_offset
        with self.prevent(DataTable.RowHighlighted):  # nobody moved the cursor
            self.clear()
            self._drawn = {}
            for key, cells in self._wanted.items():
                line = (palette.text(cells[column.key], right=column.right) for column, _ in self._chosen)
                self.add_row(*line, key=key)
                self._drawn[key] = dict(cells)
        if at in self._drawn:
            self.go_to(at)
            self.scroll_to(y=offset.y, animate=False)
