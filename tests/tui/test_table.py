from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import OptionList

from tui.format import Row, Span
from tui.tables import LiveTable, PeersPanel, choose
from tui.theme import DARK


class TableApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[str | None] = []

    def compose(self) -> ComposeResult:
        yield LiveTable(id="t", compact=True)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self.moved.append(event.option_id)


def rows(*keys: str, value: str = "1") -> dict[str, Row]:
    return {key: [Span(f"{key} {value}")] for key in keys}


def text(table: LiveTable) -> list[str]:
    return [table.render_line(y).text.rstrip() for y in range(table.size.height)]


@asynccontextmanager
async def shown() -> AsyncIterator[tuple[TableApp, LiveTable, Pilot[None]]]:
    app = TableApp()
    async with app.run_test(size=(24, 4)) as pilot:
        table = app.query_one(LiveTable)
        table.focus()
        yield app, table, pilot


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


async def test_the_cursor_stays_on_its_record():
    async with shown() as (app, table, pilot):
        table.sync(rows("a", "b", "c"), DARK)
        await pilot.press("down")
        table.sync(rows("a", "b", "c") | rows("b", value="2"), DARK)
        assert text(table)[:3] == ["a 1", "b 2", "c 1"]
        table.sync(rows("z", "a", "b"), DARK)
        assert table.key_at_cursor == "b"
        table.sync(rows("z"), DARK)
        assert table.key_at_cursor == "z"
        table.sync({}, DARK)
        assert not table.key_at_cursor
        await pilot.press("down", "end", "pageup")
        assert app.moved == ["b"]  # only what a person did is told


async def test_new_rows_keep_what_is_in_view():
    async with shown() as (app, table, pilot):
        many = [f"r{number}" for number in range(20)]
        table.sync(rows(*many), DARK)
        await pilot.pause()
        await pilot.press("end")
        await pilot.pause()
        table.sync(rows(*many, "new"), DARK)
        await pilot.pause()
        assert "r19 1" in text(table)
        assert app.moved == ["r19"]
