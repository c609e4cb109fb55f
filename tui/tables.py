"""The panels that are tables: peers, jobs, checkpoints.

Textual's ``DataTable`` renders every visible cell anew when one changes, through Rich's console. With 64 peers that
takes much of a core on a machine that should train. Here a line is a strip of segments, built once per change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from tui import format as fmt
from tui.format import Span, fit
from tui.model import eta_s
from tui.panels import RECENT, Frame, Panel, lines, seed_address, set_title
from tui.theme import DARK, Palette
from wire.address import how_to_join
from wire.records import CheckpointInfo, JobInfo, PeerInfo, ServingInfo

Cell = tuple[Span, ...]
CELL_PADDING = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a live table.

    Attributes:
        width: cells of its content, without padding.
        order: columns of higher order are dropped first if room is scarce; 0 is always shown.
        most: width to which it may grow; 0: fixed width.
    """

    key: str
    label: str
    width: int
    order: int
    right: bool = False
    most: int = 0


def choose(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit into ``width`` cells, in their order, with their drawn widths. Pure."""
    room = width
    chosen: set[str] = set()
    for column in sorted(columns, key=lambda item: item.order):
        needs = column.width + 2 * CELL_PADDING
        if column.order and needs > room:
            break  # a less important column must not replace it: the set only grows with the width
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
    """One line per record under a header line. The row cursor stays on its record."""

    DEFAULT_CSS = "LiveTable { overflow-x: hidden; scrollbar-size-vertical: 1; }"
    COMPONENT_CLASSES: ClassVar[set[str]] = {"livetable--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
    ]

    class CursorMoved(Message):
        """The user moved the cursor to the row of ``key``."""

        def __init__(self, table: LiveTable, key: str) -> None:
            super().__init__()
            self.table, self.key = table, key

    def __init__(self, columns: Sequence[Column], *, id: str) -> None:
        super().__init__(id=id)
        self._columns = columns
        self._rows: dict[str, dict[str, Cell]] = {}
        self._keys: list[str] = []
        self._places: dict[str, int] = {}
        self._strips: dict[str, Strip] = {}
        self._palette: Palette = DARK
        self._laid_out_for: tuple[int, Palette] | None = None
        self._chosen: list[tuple[Column, int]] = []
        self._cursor = 0

    def sync(self, rows: dict[str, dict[str, Cell]], palette: Palette) -> None:
        """Show ``rows`` (row key → column key → cell) in their order. Columns that do not fit are left out."""
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
        return self._keys[self._cursor] if self._cursor < len(self._keys) else None

    @property
    def chosen(self) -> list[tuple[Column, int]]:
        self._lay_out()
        return self._chosen

    @property
    def hides_columns(self) -> bool:
        return len(self.chosen) < len(self._columns)

    def go_to(self, key: str) -> None:
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
            return self._strip({column.key: (Span(column.label, "dim"),) for column in self._columns})
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
            self._chosen = choose(self._columns, self.size.width)
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

    # --------------------------------------------------------------------------------------------------------- cursor

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
            self.post_message(self.CursorMoved(self, self._keys[place]))

    def _set_cursor(self, place: int) -> None:
        for changed in (self._cursor, place):
            if changed < len(self._keys):
                self._strips.pop(self._keys[changed], None)
                self._refresh_row(changed)
        self._cursor = place
        self.call_after_refresh(self._show_cursor)  # new rows can be scrolled to only after the layout

    def _show_cursor(self) -> None:
        first, rows = self.scroll_offset.y, max(1, self.size.height - 1)
        if not first <= self._cursor < first + rows:
            self.scroll_to(y=self._cursor if self._cursor < first else self._cursor - rows + 1, animate=False)


def _segments(cell: Cell, column: Column, width: int, palette: Palette) -> list[Segment]:
    segments, room = [], width
    for span in cell:
        text = fit(span.text, room)
        room -= cell_len(text)
        segments.append(Segment(text, palette.style(span.role)))
    blank = Segment(" " * room)
    return [blank, *segments] if column.right else [*segments, blank]


class TablePanel(Panel):
    COLUMNS: tuple[Column, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._detail: tuple[Palette, list[Span]] | None = None

    def compose(self) -> ComposeResult:
        yield Static(classes="empty")
        yield LiveTable(self.COLUMNS, id=f"{self.NAME}-table")
        yield Static(classes="detail")

    @property
    def table(self) -> LiveTable:
        return self.query_one(LiveTable)

    def show(self, frame: Frame) -> None:
        rows = self.rows(frame)
        title = self.NAME.capitalize()
        set_title(self, f"{title} · {len(rows)}" if rows else title)
        self.set_class(not rows, "-empty")
        if rows:
            self.table.sync(rows, frame.palette)
            detail = self.detail(frame, self.table.key_at_cursor or "") if self.table.hides_columns else []
            if (frame.palette, detail) != self._detail:
                self._detail = (frame.palette, detail)
                self.query_one(".detail", Static).update(lines([detail], frame.palette), layout=False)
            self.set_class(bool(detail), "-detailed")
        else:
            told = [[Span("…", "dim")]] if frame.unconnected else self.empty(frame)
            self.query_one(".empty", Static).update(lines(told, frame.palette))

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        """Row key → column key → cell, in order."""
        raise NotImplementedError

    def empty(self, frame: Frame) -> list[list[Span]]:
        """The text for an empty table, with what to do next."""
        raise NotImplementedError

    def detail(self, frame: Frame, key: str) -> list[Span]:
        """What else to show of the row under the cursor if the width hides columns."""
        return []


def _plain(text: str, role: str = "") -> Cell:
    return (Span(text, role),)


class PeersPanel(TablePanel):
    TOPICS = frozenset({"peers", "serving", "link"})
    TIMED = True
    NAME = "peers"
    COLUMNS = (
        Column("rank", "#", 2, 0, right=True),
        Column("state", "state", 11, 0),
        Column("name", "name", 12, 0, most=22),
        Column("role", "role", 8, 8, most=28),
        Column("device", "device", 22, 9, most=46),
        Column("beat", "beat", 6, 1, right=True),
        Column("rtt", "rtt", 7, 2, right=True),
        Column("in", "in", 9, 4, right=True),
        Column("out", "out", 9, 5, right=True),
        Column("tokens", "tok/s", 6, 3, right=True),
        Column("share", "share", 5, 7, right=True),
        Column("memory", "memory", 18, 6, right=True),
        Column("gpu", "GPU", 4, 6, right=True),
    )

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {peer.id: self._row(peer, frame) for peer in frame.store.peers_in_order()}

    def _row(self, peer: PeerInfo, frame: Frame) -> dict[str, Cell]:
        look = fmt.look_in(fmt.PEER_LOOKS, peer.state)
        return {
            "rank": _plain(fmt.UNKNOWN if peer.rank is None else str(peer.rank), "dim"),
            "state": (Span(f"{look.symbol} ", look.role), Span(peer.state, look.role)),
            "name": _plain(peer.name, "strong"),
            "role": _plain(" · ".join(filter(None, [", ".join(peer.roles), peer.model])), "dim"),
            "device": _plain(peer.device, "dim"),
            "beat": _plain(fmt.age(frame.store.heartbeat_age_s(peer, frame.now))),
            "rtt": _plain(fmt.millis(peer.rtt_ms)),
            "in": _plain(fmt.rate(peer.in_bps / 8)),
            "out": _plain(fmt.rate(peer.out_bps / 8)),
            "tokens": _plain(fmt.count(peer.tokens_per_s), "accent" if peer.tokens_per_s > 0 else "dim"),
            "share": _plain(f"×{peer.share}" if peer.share else fmt.UNKNOWN, "dim"),
            "memory": memory_cell(peer),
            "gpu": _plain(fmt.percent(peer.gpu_load), "" if peer.gpu_load is not None else "dim"),
        }

    def empty(self, frame: Frame) -> list[list[Span]]:
        return [[Span("no peers yet: ", "strong"), Span(how_to_join(seed_address(frame)), "accent")]]

    def detail(self, frame: Frame, key: str) -> list[Span]:
        peer = frame.store.peers.get(key)
        if peer is None:
            return []
        parts = [peer.device, f"{fmt.size(peer.memory_bytes)} of {fmt.size(peer.memory_total_bytes)}"]
        parts += [f"GPU {fmt.percent(peer.gpu_load)}"] if peer.gpu_load is not None else []
        parts += [f"×{peer.share}"] if peer.share else []
        if peer.model:
            serving = frame.store.serving.get(key)
            parts = [f"{', '.join(peer.roles)} of {peer.model}", *_served(peer, serving), *parts[:2]]
        return [Span(f"{peer.name}  ", "strong"), Span(" · ".join([*parts, peer.address]), "dim")]


def _served(peer: PeerInfo, serving: ServingInfo | None) -> list[str]:
    told = [fmt.plural(peer.sessions, "session")]
    if serving is None:
        return told
    alpha, speed_up = serving.stats.get("alpha"), serving.stats.get("speed_up")
    told += [f"{fmt.percent(alpha)} right"] if alpha is not None else []
    told += [f"{speed_up:.2f}× alone"] if speed_up is not None else []
    if serving.role == "verifier":
        told.append(fmt.plural(len(serving.drafters), "drafter"))
    return told


def memory_cell(peer: PeerInfo) -> Cell:
    """``▐███  ▌ 9.1/12 GiB``: used and total in the total's unit."""
    used, total = peer.memory_bytes, peer.memory_total_bytes
    if total <= 0:
        return _plain(fmt.size(used) if used > 0 else fmt.UNKNOWN, "dim")
    part = used / total
    role = "bad" if part > 0.95 else "warn" if part > 0.85 else "dim"
    return (Span(fmt.bar(part, 5), role), Span(f"{fmt.used_of(used, total):>13}"))


class JobsPanel(TablePanel):
    """The jobs. The one under the cursor is shown, and the keys act on it."""

    TOPICS = frozenset({"jobs", "metrics"})
    NAME = "jobs"
    COLUMNS = (
        Column("state", "state", 11, 0),
        Column("name", "name", 10, 0, most=24),
        Column("progress", "progress", 8, 1, most=24),
        Column("percent", "", 4, 1, right=True),
        Column("eta", "left", 7, 2, right=True),
        Column("step", "step", 13, 3, right=True),
        Column("loss", "loss", 7, 4, right=True),
        Column("pace", "tok/s", 6, 5, right=True),
        Column("profile", "profile", 10, 6, most=16),
        Column("reason", "why", 20, 7, most=60),
    )

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {job.id: self._row(job, frame) for job in frame.store.jobs_in_order()}

    def _row(self, job: JobInfo, frame: Frame) -> dict[str, Cell]:
        look = fmt.look_in(fmt.JOB_LOOKS, job.state)
        part = job.step / job.steps_total if job.steps_total > 0 else 0.0
        series = frame.store.series.get(job.id)
        bar_width = {column.key: width for column, width in self.table.chosen}.get("progress", 10)
        filled = fmt.bar(part, bar_width).rstrip()
        viewed = frame.job is not None and frame.job.id == job.id
        return {
            "state": (Span(f"{look.symbol} ", look.role), Span(job.state, look.role)),
            "name": _plain(job.name, "strong" if viewed else ""),
            "progress": (Span(filled, look.role), Span("·" * (bar_width - len(filled)), "border")),
            "percent": _plain(fmt.percent(part)),
            "eta": _plain(fmt.duration(eta_s(job, series.recent(RECENT)) if series else None), "dim"),
            "step": _plain(f"{job.step:,}/{job.steps_total:,}", "dim"),
            "loss": _plain(fmt.loss(job.loss)),
            "pace": _plain(fmt.count(job.tokens_per_s if job.state == "running" else None), "dim"),
            "profile": _plain(job.profile, "dim"),
            "reason": _plain(job.reason, "dim"),
        }

    def empty(self, frame: Frame) -> list[list[Span]]:
        return [[Span("no jobs yet", "strong")], [], [Span("  p2ptrain jobs create --profile tiny", "accent")]]

    def detail(self, frame: Frame, key: str) -> list[Span]:
        job = frame.store.jobs.get(key)
        if job is None:
            return []
        parts = [f"profile {job.profile}", f"step {job.step:,}/{job.steps_total:,}", f"val {fmt.loss(job.val_loss)}"]
        parts = [job.reason, *parts] if job.reason else parts
        return [Span(f"{job.name}  ", "strong"), Span(" · ".join(parts), "dim")]


class CheckpointsPanel(TablePanel):
    TOPICS = frozenset({"checkpoints", "jobs"})
    TIMED = True
    NAME = "checkpoints"
    COLUMNS = (
        Column("step", "step", 7, 0, right=True),
        Column("val", "val", 7, 0, right=True),
        Column("peer", "on", 8, 1, most=16),
        Column("age", "age", 7, 2, right=True),
        Column("size", "size", 9, 3, right=True),
        Column("job", "job", 12, 4, most=20),
        Column("path", "path", 24, 5, most=80),
    )

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {
            item.id: self._row(item, frame)
            for item in frame.store.checkpoints_in_order(frame.job.id if frame.job else "")
        }

    def _row(self, item: CheckpointInfo, frame: Frame) -> dict[str, Cell]:
        job = frame.store.jobs.get(item.job)
        return {
            "step": _plain(f"{item.step:,}", "strong"),
            "val": _plain(fmt.loss(item.val_loss), "validation"),
            "peer": _plain(item.peer_name),
            "age": _plain(fmt.duration(max(0.0, frame.wall - item.created_at)), "dim"),
            "size": _plain(fmt.size(item.size_bytes), "dim"),
            "job": _plain(job.name if job else item.job, "dim"),
            "path": _plain(item.path, "dim"),
        }

    def empty(self, frame: Frame) -> list[list[Span]]:
        return [
            [Span("no checkpoints yet", "strong")],
            [],
            [Span("s", "accent"), Span(" saves one after the next step", "dim")],
        ]

    def detail(self, frame: Frame, key: str) -> list[Span]:
        item = frame.store.checkpoints.get(key)
        if item is None:
            return []
        of = "" if item.stage is None else f"stage {item.stage}'s part "
        room = self.size.width - len(item.peer_name) - len(of) - 4
        path = item.path if len(item.path) <= room else f"…{item.path[1 - max(2, room) :]}"  # its end has the step
        return [Span(f"{item.peer_name} ", "strong"), Span(of), Span(path, "dim")]
