"""The panels of the app. Each shows a part of the store when told to; none asks for anything by itself."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult, RenderResult
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static
from textual_plotext import PlotextPlot

from tui import format as fmt
from tui.format import Span
from tui.model import Phase, Store, eta_s, split
from tui.ring_art import Seat, draw_ring
from tui.table import Cell, Column, LiveTable
from tui.theme import Palette
from wire.records import CheckpointInfo, EventInfo, JobInfo, MetricRow, PeerInfo

RECENT = 30
"""Rows that the split and the time left are averaged over: long enough to read, short enough to follow a change."""


class Frame:
    """What panels are shown from: the store, the job in view, the time and the colours."""

    def __init__(
        self, store: Store, job: JobInfo | None, now: float, wall: float, palette: Palette, address: str
    ) -> None:
        self.store, self.job, self.now, self.wall = store, job, now, wall
        self.palette, self.address = palette, address

    def recent(self, count: int = RECENT) -> list[MetricRow]:
        series = self.store.series.get(self.job.id) if self.job else None
        return list(series.recent(count)) if series else []


def lines(rows: list[list[Span]], palette: Palette) -> Text:
    """Rows of spans as one text."""
    return Text("\n").join(palette.text(row) for row in rows)


class HeaderBar(Widget):
    """One line: what cluster this is, and whether what is shown is live."""

    TOPICS: ClassVar[frozenset[str]] = frozenset({"cluster", "link", "peers", "jobs"})
    TIMED = True

    def __init__(self) -> None:
        super().__init__(id="header")
        self._text = Text()

    def show(self, frame: Frame) -> None:
        left, right = self._left(frame), self._right(frame)
        gap = self.size.width - 2 - sum(Text(span.text).cell_len for span in (*left, *right))
        if gap < 1:
            left, gap = left[:2], max(1, gap + sum(Text(span.text).cell_len for span in left[2:]))
        self._text = frame.palette.text([*left, Span(" " * gap), *right])
        self.refresh()

    def render(self) -> RenderResult:
        return self._text

    def _left(self, frame: Frame) -> list[Span]:
        cluster = frame.store.cluster
        spans = [Span("◆ p2ptrain ", "accent")]
        if cluster is None:
            return spans
        spans.append(Span(f" {fmt.fit(cluster.name, 24)}", "strong"))
        spans.append(Span(f"  {cluster.address or frame.address}", "dim"))
        spans.append(
            Span(f"  {_plural(len(frame.store.peers), 'peer')} · {_plural(len(frame.store.jobs), 'job')}", "dim")
        )
        spans.append(Span(f"  up {fmt.duration(frame.wall - cluster.started_at)}", "dim"))
        return spans

    def _right(self, frame: Frame) -> list[Span]:
        store, link = frame.store, frame.store.link
        spans = [Span(f"▲ {store.malformed} malformed  ", "warn")] if store.malformed else []
        if link.phase is Phase.LIVE:
            rtt = f" {fmt.millis(link.rtt_ms)}" if link.rtt_ms is not None else ""
            return [*spans, Span("● live", "good"), Span(rtt, "dim")]
        if link.phase is Phase.CONNECTING:
            return [*spans, Span(f"◌ connecting to {frame.address}", "busy")]
        silent = fmt.duration(frame.now - link.since)
        soon = (
            "dialling"
            if link.retry_at is None
            else f"retry in {fmt.duration(max(0.0, link.retry_at - frame.now) + 0.5)}"
        )
        return [*spans, Span(f"✗ lost since {silent}", "bad"), Span(f" · {soon}", "dim")]


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class RingPanel(Widget, can_focus=True):
    """The ring of the job in view, drawn, and who is not in it."""

    TOPICS: ClassVar[frozenset[str]] = frozenset({"peers", "jobs", "link"})
    TIMED = False

    def __init__(self) -> None:
        super().__init__(id="ring", classes="panel")
        self.border_title = "Ring"
        self._frame: Frame | None = None

    def show(self, frame: Frame) -> None:
        self._frame = frame
        job = frame.job
        ringed = job is not None and job.members
        self.border_title = f"Ring · {len(job.members)}" if job is not None and ringed else "Ring"
        self.refresh()

    def render(self) -> RenderResult:
        if self._frame is None:
            return ""
        frame, width, height = self._frame, self.size.width, self.size.height
        job = frame.job
        if job is None or not job.members:
            return lines(_no_ring(frame), frame.palette)
        outside = self._outside(frame, job, width)
        below = 2 if outside and height > 8 else 0
        seats = [_seat(job, rank, peer, frame.store) for rank, peer in enumerate(frame.store.members(job))]
        drawing = draw_ring(
            seats,
            width,
            height - below,
            pulse=job.step if job.state == "running" else None,
            centre=(f"generation {job.generation}", f"step {job.step:,}"),
        )
        drawing += [[] for _ in range(height - below - len(drawing))]
        return lines(drawing + ([[], outside] if below else []), frame.palette)

    def _outside(self, frame: Frame, job: JobInfo, width: int) -> list[Span]:
        others = [peer for peer in frame.store.peers_in_order() if peer.id not in job.members]
        if not others:
            return []
        spans = [Span("not in the ring: ", "dim")]
        room = width - 17
        for index, peer in enumerate(others):
            look = fmt.peer_look(peer.state)
            text = f"{fmt.fit(peer.name, 18)} ({fmt.fit(peer.state, 10)})  "
            if Text(text).cell_len + 8 > room:
                return [*spans, Span(f"+{len(others) - index}", "dim")]
            spans += [Span(f"{look.symbol} ", look.role), Span(text)]
            room -= Text(text).cell_len + 2
        return spans


def _seat(job: JobInfo, rank: int, peer: PeerInfo | None, store: Store) -> Seat:
    if peer is None:
        look = fmt.peer_look("lost")
        return Seat(look.symbol, look.role, (job.members[rank], "gone"))
    look = fmt.peer_look(peer.state)
    share = f" ×{peer.share}" if peer.share else ""
    return Seat(look.symbol, look.role, (peer.name, f"{peer.state}{share}", f"{fmt.count(peer.tokens_per_s)} tok/s"))


def _no_ring(frame: Frame) -> list[list[Span]]:
    """What to do next while there is nothing to draw."""
    store = frame.store
    if store.link.phase is not Phase.LIVE and store.cluster is None:
        return not_connected(frame)
    address = store.cluster.address if store.cluster and store.cluster.address else frame.address
    if not store.peers:
        return [
            [Span("no peers yet", "strong")],
            [],
            [Span("On each machine that should train:")],
            [Span(f"  p2ptrain join {address}", "accent")],
        ]
    if frame.job is None:
        many = _plural(len(store.peers), "peer")
        return [
            [Span(f"{many} ready, no job yet", "strong")],
            [],
            [Span("Give them something to train:")],
            [Span("  p2ptrain jobs create", "accent")],
        ]
    look = fmt.job_look(frame.job.state)
    return [
        [Span(f"{look.symbol} ", look.role), Span(f"{frame.job.name} is {frame.job.state}", "strong")],
        [],
        [Span(frame.job.reason or "It has no ring at this moment.", "dim")],
    ]


def not_connected(frame: Frame) -> list[list[Span]]:
    """Why nothing is known, and what to do about it."""
    link = frame.store.link
    rows = [[Span(f"no connection to the seed at {frame.address} yet", "strong")], []]
    if link.problem:
        rows += [[Span(link.problem, "bad")]]
    rows += [[Span(link.remedy or "It is dialled again until it answers. Is the seed running?  p2ptrain seed", "dim")]]
    return rows


class LossPlot(PlotextPlot):
    """Training and validation loss over the steps."""

    def draw(self, frame: Frame) -> None:
        plt = self.plt
        plt.clear_figure()
        series = frame.store.series.get(frame.job.id) if frame.job else None
        if series is not None:
            # Braille cells are two dots wide: more points than dots cost time and show nothing.
            steps, losses = fmt.downsample(*series.curve("loss"), buckets=max(16, 2 * self.size.width))
            if steps:
                plt.plot(steps, losses, marker="braille", color=frame.palette.rgb("train"))
            at, validations = series.validation_curve()
            if at:
                plt.scatter(at, validations, marker="◆", color=frame.palette.rgb("validation"))
            if steps or at:
                xs, ys = [*steps, *at], [*losses, *validations]
                x_ticks = fmt.ticks(min(xs), max(xs), max(2, min(8, self.size.width // 14)))
                y_ticks = fmt.ticks(min(ys), max(ys), max(2, min(7, self.size.height // 3)))
                plt.xticks(x_ticks, [f"{tick:,.0f}" for tick in x_ticks])
                plt.yticks(y_ticks, [f"{tick:.2f}" for tick in y_ticks])
        self.refresh()


class TrainingPanel(Vertical, can_focus=True):
    """Loss, learning rate, throughput, and where the time of a step goes."""

    TOPICS: ClassVar[frozenset[str]] = frozenset({"metrics", "jobs", "link"})
    TIMED = False

    def __init__(self) -> None:
        super().__init__(id="training", classes="panel")
        self.border_title = "Training"

    def compose(self) -> ComposeResult:
        yield Static(id="training-empty")
        yield LossPlot(id="loss")
        yield Static(id="numbers")

    def show(self, frame: Frame) -> None:
        job = frame.job
        self.border_title = f"Training · {fmt.fit(job.name, 30)}" if job else "Training"
        self.border_subtitle = "loss: ─ training  ◆ validation" if job else ""
        drawn = job is not None and bool(frame.recent(1))
        self.set_class(not drawn, "-empty")
        if not drawn or job is None:
            empty = [
                [Span("no steps yet", "strong")],
                [],
                [Span("The loss is drawn from the first committed step on.", "dim")],
            ]
            waiting = frame.store.cluster is None and frame.store.link.phase is not Phase.LIVE
            self.query_one("#training-empty", Static).update(
                lines(not_connected(frame) if waiting else empty, frame.palette)
            )
            return
        self.query_one(LossPlot).draw(frame)
        width = max(20, self.size.width - 2)
        self.query_one("#numbers", Static).update(lines(training_numbers(frame, job, width), frame.palette))


def training_numbers(frame: Frame, job: JobInfo, width: int) -> list[list[Span]]:
    """The four lines under the curve, at most ``width`` cells each."""
    recent = frame.recent()
    last = recent[-1]
    loss_value = last.loss if last.loss is not None else job.loss
    first: list[Span] = []
    for label, value, role in (
        ("loss", fmt.loss(loss_value), "train"),
        ("val", fmt.loss(job.val_loss), "validation"),
        ("lr", fmt.scientific(last.lr if last.lr is not None else job.lr), "strong"),
        ("grad", fmt.count(last.grad_norm), "strong"),
        ("step", f"{job.step:,}/{job.steps_total:,}", "strong"),
        ("left", fmt.duration(eta_s(job, recent)), "strong"),
    ):
        if sum(len(span.text) for span in first) + len(label) + len(value) + 1 <= width:
            first += [Span(f"{label} ", "dim"), Span(f"{value}   ", role)]
    rates = [row.tokens_per_s for row in frame.recent(max(1, width - 22))]
    pace = f" {fmt.count(rates[-1]):>5} tok/s"
    second = [
        Span("tokens   ", "dim"),
        Span(fmt.sparkline(rates, min(len(rates), width - 9 - len(pace))), "busy"),
        Span(pace, "strong"),
    ]
    parts = split(recent)
    if parts is None:
        return [first, second]
    total = f" {fmt.millis(parts.step_ms):>7}"
    bar = [Span("a step   ", "dim"), *fmt.split_bar(parts, max(4, width - 9 - len(total) - 6)), Span(total, "strong")]
    legend: list[Span] = [Span(" " * 9)]
    for texture, label, part_ms in (
        ("█", "compute", parts.compute_ms),
        ("▓", "communicate", parts.communicate_ms),
        ("░", "wait", parts.wait_ms),
    ):
        legend += [
            Span(f"{texture} ", label),
            Span(f"{label} "),
            Span(f"{fmt.percent(part_ms / parts.step_ms)}   ", "strong"),
        ]
    return [first, second, bar, legend]


class TablePanel(Vertical):
    """A table under a title, with words in its place while it is empty."""

    TOPICS: ClassVar[frozenset[str]] = frozenset()
    TIMED = False
    TITLE = ""
    NAME = ""
    TABLE: type[LiveTable] = LiveTable

    def __init__(self) -> None:
        super().__init__(id=self.NAME, classes="panel")
        self.border_title = self.TITLE

    def compose(self) -> ComposeResult:
        yield Static(classes="empty")
        yield self.TABLE(id=f"{self.NAME}-table")
        yield Static(classes="detail")

    @property
    def table(self) -> LiveTable:
        return self.query_one(LiveTable)

    def show(self, frame: Frame) -> None:
        rows = self.rows(frame)
        self.border_title = f"{self.TITLE} · {len(rows)}" if rows else self.TITLE
        self.set_class(not rows, "-empty")
        if rows:
            self.table.sync(rows, frame.palette)
            detail = self.detail(frame, self.table.key_at_cursor or "") if self.table.hides_columns else []
            self.query_one(".detail", Static).update(lines([detail], frame.palette) if detail else "")
            self.set_class(bool(detail), "-detailed")
        else:
            waiting = frame.store.cluster is None and frame.store.link.phase is not Phase.LIVE
            self.query_one(".empty", Static).update(
                lines([[Span("…", "dim")]] if waiting else self.empty(frame), frame.palette)
            )

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        """Row key → column key → cell, in order."""
        raise NotImplementedError

    def empty(self, frame: Frame) -> list[list[Span]]:
        """What to say, and what to do next, while there is nothing."""
        raise NotImplementedError

    def detail(self, frame: Frame, key: str) -> list[Span]:
        """What the row under the cursor has besides, where the width hides columns."""
        return []


def _plain(text: str, role: str = "") -> Cell:
    return (Span(text, role),)


class PeersTable(LiveTable):
    COLUMNS = (
        Column("rank", "#", 2, 0, right=True),
        Column("state", "state", 10, 0),
        Column("name", "name", 12, 0, most=20),
        Column("role", "role", 6, 8, most=12),
        Column("device", "device", 22, 9, most=40),
        Column("beat", "beat", 6, 1, right=True),
        Column("rtt", "rtt", 7, 2, right=True),
        Column("in", "in", 9, 4, right=True),
        Column("out", "out", 9, 5, right=True),
        Column("tokens", "tok/s", 6, 3, right=True),
        Column("share", "share", 5, 7, right=True),
        Column("memory", "memory", 18, 6, right=True),
        Column("gpu", "GPU", 4, 6, right=True),
    )


class PeersPanel(TablePanel):
    """Every peer that the seed knows."""

    TOPICS = frozenset({"peers", "link"})
    TIMED = True
    TITLE, NAME, TABLE = "Peers", "peers", PeersTable

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {peer.id: self._row(peer, frame) for peer in frame.store.peers_in_order()}

    def _row(self, peer: PeerInfo, frame: Frame) -> dict[str, Cell]:
        look = fmt.peer_look(peer.state)
        return {
            "rank": _plain(fmt.UNKNOWN if peer.rank is None else str(peer.rank), "dim"),
            "state": (Span(f"{look.symbol} ", look.role), Span(peer.state, look.role)),
            "name": _plain(peer.name, "strong"),
            "role": _plain(", ".join(peer.roles), "dim"),
            "device": _plain(peer.device, "dim"),
            "beat": _plain(fmt.age(frame.store.heartbeat_age_s(peer, frame.now))),
            "rtt": _plain(fmt.millis(peer.rtt_ms)),
            "in": _plain(fmt.rate(peer.in_bps)),
            "out": _plain(fmt.rate(peer.out_bps)),
            "tokens": _plain(fmt.count(peer.tokens_per_s), "accent" if peer.tokens_per_s > 0 else "dim"),
            "share": _plain(f"×{peer.share}" if peer.share else fmt.UNKNOWN, "dim"),
            "memory": memory_cell(peer),
            "gpu": _plain(fmt.percent(peer.gpu_load), "" if peer.gpu_load is not None else "dim"),
        }

    def empty(self, frame: Frame) -> list[list[Span]]:
        return _no_ring(frame)

    def detail(self, frame: Frame, key: str) -> list[Span]:
        peer = frame.store.peers.get(key)
        if peer is None:
            return []
        parts = [
            peer.address,
            peer.device,
            f"memory {fmt.size(peer.memory_bytes)} of {fmt.size(peer.memory_total_bytes)}",
        ]
        parts += [f"GPU {fmt.percent(peer.gpu_load)}"] if peer.gpu_load is not None else []
        return [Span(f"{peer.name}  ", "strong"), Span(" · ".join(parts), "dim")]


def memory_cell(peer: PeerInfo) -> Cell:
    """``▐███  ▌ 9.1/12 GiB``: used and total in the total's unit."""
    used, total = peer.memory_bytes, peer.memory_total_bytes
    if total <= 0:
        return _plain(fmt.size(used) if used > 0 else fmt.UNKNOWN, "dim")
    part = used / total
    text, _, unit = fmt.size(total).partition(" ")
    number = float(text)
    scale = total / number
    role = "bad" if part > 0.95 else "warn" if part > 0.85 else "dim"
    return (Span(fmt.bar(part, 5), role), Span(f"{f'{used / scale:.1f}/{number:.0f} {unit}':>13}"))


class JobsTable(LiveTable):
    COLUMNS = (
        Column("state", "state", 11, 0),
        Column("name", "name", 12, 0, most=24),
        Column("progress", "progress", 10, 1, most=24),
        Column("percent", "", 4, 1, right=True),
        Column("eta", "left", 7, 2, right=True),
        Column("step", "step", 13, 3, right=True),
        Column("loss", "loss", 7, 4, right=True),
        Column("pace", "tok/s", 6, 5, right=True),
        Column("profile", "profile", 10, 6, most=16),
        Column("reason", "why", 20, 7, most=60),
    )


class JobsPanel(TablePanel):
    """The jobs; the one under the cursor is the one that is shown and that the keys act on."""

    TOPICS = frozenset({"jobs", "metrics"})
    TITLE, NAME, TABLE = "Jobs", "jobs", JobsTable

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {job.id: self._row(job, frame) for job in frame.store.jobs_in_order()}

    def _row(self, job: JobInfo, frame: Frame) -> dict[str, Cell]:
        look = fmt.job_look(job.state)
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
        return [[Span("no jobs yet", "strong")], [], [Span("  p2ptrain jobs create", "accent")]]

    def detail(self, frame: Frame, key: str) -> list[Span]:
        job = frame.store.jobs.get(key)
        if job is None:
            return []
        parts = [f"profile {job.profile}", f"step {job.step:,}/{job.steps_total:,}", f"val {fmt.loss(job.val_loss)}"]
        parts = [job.reason, *parts] if job.reason else parts
        return [Span(f"{job.name}  ", "strong"), Span(" · ".join(parts), "dim")]


class CheckpointsTable(LiveTable):
    COLUMNS = (
        Column("step", "step", 7, 0, right=True),
        Column("val", "val", 7, 0, right=True),
        Column("peer", "on", 8, 1, most=16),
        Column("age", "age", 7, 2, right=True),
        Column("size", "size", 9, 3, right=True),
        Column("job", "job", 12, 4, most=20),
        Column("path", "path", 24, 5, most=80),
    )


class CheckpointsPanel(TablePanel):
    """The durable checkpoints, the newest first."""

    TOPICS = frozenset({"checkpoints", "jobs"})
    TIMED = True
    TITLE, NAME, TABLE = "Checkpoints", "checkpoints", CheckpointsTable

    def rows(self, frame: Frame) -> dict[str, dict[str, Cell]]:
        return {item.id: self._row(item, frame) for item in frame.store.checkpoints_in_order()}

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
        room = self.size.width - len(item.peer_name) - 4
        path = item.path if len(item.path) <= room else f"…{item.path[1 - max(2, room) :]}"  # its end tells the step
        return [Span(f"{item.peer_name} ", "strong"), Span(path, "dim")]


class EventsPanel(VerticalScroll):
    """The cluster's diary, the newest first."""

    TOPICS: ClassVar[frozenset[str]] = frozenset({"events"})
    TIMED = False

    def __init__(self) -> None:
        super().__init__(id="events", classes="panel")
        self.border_title = "Events"

    def compose(self) -> ComposeResult:
        yield Static(id="events-text")

    def show(self, frame: Frame) -> None:
        found = frame.store.events_in_order()
        text = Text("\n").join(_event_line(event, frame.palette, self.size.width - 5) for event in found)
        if not found:
            text = lines([[Span("nothing happened yet", "dim")]], frame.palette)
        self.query_one("#events-text", Static).update(text)


def _event_line(event: EventInfo, palette: Palette, width: int) -> Text:
    look = fmt.level_look(event.level)
    line = Text()
    line.append(f"{fmt.clock(event.wall)} ", palette.style("dim"))
    line.append(f"{look.symbol} ", palette.style(look.role))
    told = textwrap.fill(event.text, max(20, width - 11), subsequent_indent=" " * 11)
    line.append(told, palette.style(look.role if event.level in ("warning", "error") else ""))
    return line
