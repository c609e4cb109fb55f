from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from tui.format import Span
from tui.tables import Cell, Column, LiveTable, PeersPanel, choose
from tui.theme import DARK, LIGHT

COLUMNS = (Column("name", "name", 6, 0, most=10), Column("value", "value", 5, 1, right=True))


class TableApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[str] = []

    def compose(self) -> ComposeResult:
        yield LiveTable(COLUMNS, id="t")

    def on_live_table_cursor_moved(self, event: LiveTable.CursorMoved) -> None:
        self.moved.append(event.key)


def rows(*keys: str, value: str = "1") -> dict[str, dict[str, Cell]]:
    return {key: {"name": (Span(key),), "value": (Span(value),)} for key in keys}


def text(table: LiveTable) -> list[str]:
    return [table.render_line(y).text.rstrip() for y in range(table.size.height)]


@asynccontextmanager
async def shown(size: tuple[int, int] = (24, 5)) -> AsyncIterator[tuple[TableApp, LiveTable, Pilot[None]]]:
    app = TableApp()
    async with app.run_test(size=size) as pilot:
        yield app, app.query_one(LiveTable), pilot


@given(st.integers(0, 300))
def test_columns_come_in_the_order_of_their_weight_and_fit(width: int):
    chosen = choose(PeersPanel.COLUMNS, width)
    always = [column for column in PeersPanel.COLUMNS if column.order == 0]
    assert all(any(column is other for column, _ in chosen) for other in always)
    used = sum(wide + 2 for _, wide in chosen)
    assert used <= max(width, sum(column.width + 2 for column in always))
    assert all(column.width <= wide <= max(column.width, column.most) for column, wide in chosen)
    wider = choose(PeersPanel.COLUMNS, width + 1)
    assert {column.key for column, _ in chosen} <= {column.key for column, _ in wider}


async def test_only_changed_lines_are_drawn_again(monkeypatch):
    async with shown() as (_, table, pilot):
        table.sync(rows("a", "b", "c"), DARK)
        await pilot.pause()
        text(table)
        drawn = []
        monkeypatch.setattr(table, "_refresh_row", drawn.append)
        table.sync(rows("a", "b", "c") | rows("b", value="2"), DARK)
        assert drawn == [1]
        assert text(table)[2].endswith("2")
        table.sync(rows("a", "b", "c") | rows("b", value="2"), DARK)
        assert drawn == [1]


async def test_the_cursor_stays_on_its_record():
    async with shown() as (app, table, pilot):
        table.focus()
        table.sync(rows("a", "b", "c"), DARK)
        await pilot.press("down")
        assert table.key_at_cursor == "b"
        table.sync(rows("z", "a", "b"), DARK)
        assert table.key_at_cursor == "b"
        table.sync(rows("z"), DARK)
        assert table.key_at_cursor == "z"
        table.sync({}, DARK)
        assert table.key_at_cursor is None
        await pilot.press("down", "end", "pageup")
        assert app.moved == ["b"]  # only what a person did is told


async def test_the_cursor_scrolls_and_stops_at_the_ends():
    async with shown() as (app, table, pilot):
        table.focus()
        table.sync(rows(*(f"r{n}" for n in range(20))), DARK)
        await pilot.press("end")
        await pilot.pause()
        assert text(table)[-1].startswith(" r19")
        await pilot.press("pageup", "down", "home", "up")
        await pilot.pause()
        assert text(table)[1].startswith(" r0")
        assert app.moved == ["r19", "r16", "r17", "r0"]
        await pilot.click(table, offset=(3, 3))
        assert table.key_at_cursor == "r2"
        await pilot.click(table, offset=(3, 0))
        assert table.key_at_cursor == "r2"


async def test_another_palette_or_width_draws_everything_anew():
    async with shown() as (_, table, pilot):
        table.sync(rows("a"), DARK)
        await pilot.pause()
        dark = table.render_line(1)
        table.sync(rows("a"), LIGHT)
        await pilot.pause()
        assert table.render_line(1) != dark
        assert not table.hides_columns
        await pilot.resize_terminal(12, 5)
        assert table.hides_columns
        assert text(table)[0] == " name"
