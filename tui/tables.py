"""The panels that are tables: peers, jobs, checkpoints, events."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from rich.segment import Segment
from textual.app import ComposeResult
from textual.css.styles import RulesMap
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui import format as fmt
from tui.format import Row, Span
from tui.model import eta_s
from tui.panels import RECENT, Frame, Lines, Panel, seed_address
from tui.theme import Palette
from wire.address import how_to_join
from wire.messages import GpuInfo
from wire.records import CheckpointInfo, EventInfo, JobInfo, PeerInfo, ServingInfo

Cell = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a live table. ``width``: cells of its content. ``order``: columns of higher order are dropped first
    if room is scarce; 0 is always shown. ``most``: width to which it may grow; 0: fixed width."""

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
        needs = column.width + 2  # a blank on each side
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


class TableLine(Visual):
    """A row of spans on one line. Textual's own visuals also wrap, which takes several times as long."""

    def __init__(self, row: Row, palette: Palette) -> None:
        self.drawn = row, palette

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        row, palette = self.drawn
        segments = [Segment(span.text, palette.style(span.role)) for span in row]
        return [Strip(segments).adjust_cell_length(width).apply_style(style.rich_style)]

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return container_width

    def get_height(self, rules: RulesMap, width: int) -> int:
        return 1


class LiveTable(OptionList):
    """One line per record. The cursor stays on its record; only a person's move is told (``OptionHighlighted``)."""

    DEFAULT_CSS = "LiveTable { scrollbar-size-vertical: 1; }"

    def sync(self, rows: dict[str, Row], palette: Palette, at: str = "") -> None:
        """Show ``rows`` (key → spans) in their order, and go to the row ``at``; none if it is not among them."""
        place = None if at else self.highlighted or 0
        at, scrolled = at or self.key_at_cursor, self.scroll_offset.y
        keys = list(rows)
        with self.prevent(OptionList.OptionHighlighted):
            if keys != [option.id for option in self.options]:
                self.set_options(Option(TableLine(row, palette), id=key) for key, row in rows.items())
                self.scroll_to(y=scrolled, animate=False, immediate=True)
            for index, row in enumerate(rows.values()):
                if cast(TableLine, self.options[index].prompt).drawn != (row, palette):
                    self.replace_option_prompt_at_index(index, TableLine(row, palette))
            self.highlighted = keys.index(at) if at in rows else place

    @property
    def key_at_cursor(self) -> str:
        option = self.highlighted_option
        return (option.id if option is not None else None) or ""


def _line(cells: dict[str, Cell], columns: Sequence[tuple[Column, int]]) -> Row:
    line: Row = []
    for column, width in columns:
        cell = fmt.cut(cells[column.key], width)
        blank = Span(" " * (width - fmt.cells(cell)))
        line += [Span(" "), *([blank, *cell] if column.right else [*cell, blank]), Span(" ")]
    return line


class TablePanel(Panel):
    COLUMNS: tuple[Column, ...] = ()
    _detail_rows = 0

    def compose(self) -> ComposeResult:
        yield Lines(classes="empty")
        yield Lines(classes="labels")
        yield LiveTable(id=f"{self.NAME}-table")
        yield Lines(classes="detail")

    @property
    def table(self) -> LiveTable:
        return self.query_one(LiveTable)

    @property
    def chosen(self) -> list[tuple[Column, int]]:
        return choose(self.COLUMNS, self.table.scrollable_content_region.width)

    def show(self, frame: Frame) -> None:
        every, table, columns = self.rows(frame), self.table, self.chosen
        texts = {key: " ".join(span.text for cell in row.values() for span in cell) for key, row in every.items()}
        words = frame.pattern.casefold().split()
        rows = {key: every[key] for key, text in texts.items() if all(word in text.casefold() for word in words)}
        self.set_title(f"{len(rows)} of {len(every)} with {frame.pattern}" if frame.pattern else len(rows))
        self.set_class(not rows, "-empty")
        if not rows:
            nothing = [[Span(f"no row has {frame.pattern}; / changes it, esc shows all", "dim")]]
            rows_shown = nothing if every else [[Span("…", "dim")]] if frame.unconnected else self.empty(frame)
            self.query_one(".empty", Lines).draw(rows_shown, frame.palette)
            return
        labels = {column.key: _plain(column.label, "dim") for column in self.COLUMNS}
        self.query_one(".labels", Lines).draw([_line(labels, columns)], frame.palette, layout=False)
        lines = {key: _line(cells, columns) for key, cells in rows.items()}
        table.sync(lines, frame.palette, self.cursor(frame))
        detail = self.detail(frame, table.key_at_cursor)
        self.query_one(".detail", Lines).draw(detail, frame.palette, layout=len(detail) != self._detail_rows)
        self._detail_rows = len(detail)
        self.set_class(bool(detail), "-detailed")

    def cursor(self, frame: Frame) -> str:
        """The key of the row to go to; empty: the cursor stays on its record."""
        return ""

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        """Row key → column key → cell, in order."""
        raise NotImplementedError

    def empty(self, frame: Frame) -> list[list[Span]]:
        """The text for an empty table, with what to do next."""
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        return len(self.chosen) < len(self.COLUMNS)

    def detail(self, frame: Frame, key: str) -> list[Row]:
        """Lines with what the table hides of the row under the cursor."""
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
            "role": _plain(" · ".join(filter(None, [", ".join(peer.roles), peer.group, peer.model])), "dim"),
            "device": _plain(peer.device, "dim"),
            "beat": _plain(fmt.age(frame.store.heartbeat_age_s(peer, frame.now))),
            "rtt": _plain(fmt.millis(peer.rtt_ms)),
            "in": _plain(fmt.rate(peer.in_bps / 8, "B/s")),
            "out": _plain(fmt.rate(peer.out_bps / 8, "B/s")),
            "tokens": _plain(fmt.count(peer.tokens_per_s), "accent" if peer.tokens_per_s > 0 else "dim"),
            "share": _plain(f"×{peer.share}" if peer.share else fmt.UNKNOWN, "dim"),
            "memory": memory_cell(peer),
            "gpu": _plain(fmt.percent(peer.gpu_load), "" if peer.gpu_load is not None else "dim"),
        }

    def empty(self, frame: Frame) -> list[list[Span]]:
        return [[Span("no peers yet: ", "strong"), Span(how_to_join(seed_address(frame)), "accent")]]

    def detail(self, frame: Frame, key: str) -> list[Row]:
        peer = frame.store.peers.get(key)
        if peer is None or not self.is_cut:
            return []
        known = peer.memory_total_bytes > 0  # an absent peer reports none
        parts = [peer.device, *([f"{fmt.size(peer.memory_bytes)} of {fmt.size(peer.memory_total_bytes)}"] * known)]
        parts += [_gpu(gpu) for gpu in peer.gpus]
        parts += [f"×{peer.share}"] if peer.share else []
        if peer.model:
            serving = [info for info in frame.store.serving.values() if info.peer == key]
            parts = [f"{', '.join(peer.roles)} of {peer.model}", *_serving_words(peer, serving), *parts[:2]]
        return [[Span(f"{peer.name}  ", "strong"), Span(" · ".join([*parts, peer.place]), "dim")]]


def _gpu(gpu: GpuInfo) -> str:
    memory = f"{fmt.size(gpu.memory_bytes)} of {fmt.size(gpu.memory_total_bytes)}"
    heat = f", {gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else ""
    power = f", {gpu.power_w:.0f} W" if gpu.power_w is not None else ""
    return f"GPU {gpu.index} {fmt.percent(gpu.load)}, {memory}{heat}{power}"


def _serving_words(peer: PeerInfo, serving: list[ServingInfo]) -> list[str]:
    parts = [fmt.plural(peer.sessions, "session")]
    if len(serving) != 1:  # the serving view has the figures of each model
        return parts
    alpha, speed_up = (serving[0].stats.get(name) for name in ("alpha", "speed_up"))
    parts += [f"{fmt.percent(alpha)} right"] if alpha is not None else []
    parts += [f"{speed_up:.2f}× alone"] if speed_up is not None else []
    if serving[0].role == "verifier":
        parts.append(fmt.plural(len(serving[0].drafters), "drafter"))
    return parts


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

    def cursor(self, frame: Frame) -> str:
        return frame.job.id if frame.job is not None else ""

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {job.id: self._row(job, frame) for job in frame.store.jobs_in_order()}

    def _row(self, job: JobInfo, frame: Frame) -> dict[str, Cell]:
        look = fmt.look_in(fmt.JOB_LOOKS, job.state)
        part = job.step / job.steps_total if job.steps_total > 0 else 0.0
        series = frame.store.series.get(job.id)
        bar_width = {column.key: width for column, width in self.chosen}.get("progress", 10)
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

    def detail(self, frame: Frame, key: str) -> list[Row]:
        job = frame.store.jobs.get(key)
        if job is None or not self.is_cut:
            return []
        parts = [f"profile {job.profile}", f"step {job.step:,}/{job.steps_total:,}", f"val {fmt.loss(job.val_loss)}"]
        parts = [job.reason, *parts] if job.reason else parts
        return [[Span(f"{job.name}  ", "strong"), Span(" · ".join(parts), "dim")]]


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
        found = frame.store.checkpoints_in_order(frame.job.id if frame.job else "")
        return {item.id: self._row(item, frame) for item in found}

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
        return [[Span("no checkpoints yet", "strong")], [], [Span("s", "accent"), Span(" saves one", "dim")]]

    def detail(self, frame: Frame, key: str) -> list[Row]:
        item = frame.store.checkpoints.get(key)
        if item is None or not self.is_cut:
            return []
        of = "" if item.stage is None else f"part {item.stage} "
        room = self.size.width - len(item.peer_name) - len(of) - 4
        path = item.path if len(item.path) <= room else f"…{item.path[1 - max(2, room) :]}"  # its end has the step
        return [[Span(f"{item.peer_name} ", "strong"), Span(of), Span(path, "dim")]]


class EventsPanel(TablePanel):
    """The cluster's event log, the newest first, one line each. Below it: the whole text under the cursor."""

    NAME = "events"
    TOPICS = frozenset({"events"})
    EVERY_S = 0.0
    COLUMNS = (Column("time", "time", 8, 0), Column("level", "", 1, 0), Column("text", "event", 20, 0, most=1000))

    def cursor(self, frame: Frame) -> str:
        """The newest event, unless a person reads."""
        newest = frame.store.events_in_order()[:1]
        return "" if self.table.has_focus or not newest else str(newest[0].id)

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {str(event.id): self._row(event) for event in frame.store.events_in_order()}

    def _row(self, event: EventInfo) -> dict[str, Cell]:
        look = fmt.look_in(fmt.LEVEL_LOOKS, event.level)
        return {
            "time": _plain(fmt.clock(event.wall), "dim"),
            "level": _plain(look.symbol, look.role),
            "text": _plain(" ".join(event.text.split()), look.role if event.level in ("warning", "error") else ""),
        }

    def empty(self, frame: Frame) -> list[list[Span]]:
        return [[Span("nothing happened yet", "dim")]]

    def detail(self, frame: Frame, key: str) -> list[Row]:
        event = next((event for event in frame.store.events_in_order() if str(event.id) == key), None)
        room = {column.key: width for column, width in self.chosen}.get("text", 0)
        if event is None or len(event.text) <= room:
            return []
        return [[Span(line)] for line in textwrap.wrap(event.text, max(20, self.size.width - 4))]
