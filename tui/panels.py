"""The panels of the app. Each draws a part of the store when ``show`` is called; none requests data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.markup import escape
from textual.widgets import Static
from textual_plotext import PlotextPlot

from tui import format as fmt
from tui.format import SLOWEST, Look, Row, Span
from tui.model import LinkPhase, RecordStore, eta_s, split
from tui.theme import Palette
from wire.address import how_to_join
from wire.records import JobInfo, MemberScore, MetricRow, PeerInfo, RecoveryInfo, recovery_spread

READABLE_S = 0.5
"""Least time between two redraws of numbers. Faster changes are unreadable and take CPU time from training."""
ROOMY = 100
"""From this width on there are no tabs, so a subtitle names the key to go back (``tui.app.WIDE_COLUMNS``, less
borders)."""
OFF = 14
"""Width of the column with what a robust rule made of the members."""
RECENT = 30
"""Metric rows that averages use: enough to be steady, few enough to follow a change."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What panels draw from: the store, the job in view, the viewer's clocks, the colours, the seed's address, and the
    words of the rows to show."""

    store: RecordStore
    job: JobInfo | None
    now: float
    wall: float
    palette: Palette
    address: str
    pattern: str = ""

    def look_of(self, peer_id: str) -> Look:
        peer = self.store.peers.get(peer_id)
        return fmt.look_in(fmt.PEER_LOOKS, peer.state if peer else "")

    @property
    def unconnected(self) -> bool:
        return self.store.cluster is None and self.store.link.phase is not LinkPhase.LIVE

    def recent(self, count: int = RECENT) -> list[MetricRow]:
        series = self.store.series.get(self.job.id) if self.job else None
        return list(series.recent(count)) if series else []


class Lines(Static):
    """Rows of spans, drawn again only if they changed."""

    _drawn: Text | None = None

    def draw(self, rows: list[Row], palette: Palette, *, layout: bool = True) -> None:
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(palette.text(row) for row in rows)
        text.no_wrap = True
        if text != self._drawn:
            self._drawn = text
            self.update(text, layout=layout)


class HeaderBar(Lines):
    TOPICS: ClassVar[frozenset[str]] = frozenset({"cluster", "link", "peers", "jobs", "parts", "serving"})
    TIMED = True
    EVERY_S = 0.0

    def __init__(self) -> None:
        super().__init__(id="header")

    def show(self, frame: Frame) -> None:
        left, right = self._left_spans(frame), self._right_spans(frame)
        gap = self.size.width - 2 - sum(Text(span.text).cell_len for span in (*left, *right))
        while gap < 1 and len(left) > 1:
            gap += Text(left.pop().text).cell_len
        self.draw([[*left, Span(" " * gap), *right]], frame.palette, layout=False)

    def _left_spans(self, frame: Frame) -> list[Span]:
        cluster = frame.store.cluster
        spans = [Span("◆ p2ptrain ", "accent")]
        if cluster is None:
            return spans
        spans.append(Span(f" {fmt.fit(cluster.name, 24)}", "strong"))
        spans.append(Span(f"  {cluster.address or frame.address}", "dim"))
        peers, jobs = fmt.plural(len(frame.store.peers), "peer"), fmt.plural(len(frame.store.jobs), "job")
        spans.append(Span(f"  {peers} · {jobs}", "dim"))
        spans.append(Span(f"  up {fmt.duration(frame.wall - cluster.started_at)}", "dim"))
        if models := len({part.model for part in frame.store.parts.values()}):
            spans.append(Span(f"  {fmt.plural(models, 'model')} split", "dim"))
        if models := len({info.model for info in frame.store.serving.values() if info.role == "verifier"}):
            spans.append(Span(f"  {fmt.plural(models, 'model')} served", "dim"))
        return spans

    def _right_spans(self, frame: Frame) -> list[Span]:
        store, link = frame.store, frame.store.link
        spans = [Span(f"▲ {store.malformed} malformed  ", "warn")] if store.malformed else []
        if link.phase is LinkPhase.LIVE:
            rtt = f" {fmt.millis(link.rtt_ms)}" if link.rtt_ms is not None else ""
            return [*spans, Span("● live", "good"), Span(rtt, "dim")]
        if link.phase is LinkPhase.CONNECTING:
            return [*spans, Span(f"◌ connecting to {frame.address}", "busy")]
        what = f"seed away {fmt.duration(frame.now - link.since)}" if store.cluster else fmt.fit(link.problem, 48)
        wait_s = None if link.retry_at is None else max(0.0, link.retry_at - frame.now) + 0.5
        soon = "dialling" if wait_s is None else f"retry in {fmt.duration(wait_s)}"
        return [*spans, Span(f"✗ {what}", "bad"), Span(f" · {soon}", "dim")]


class Panel(Vertical):
    """A part of the store under a title. ``EVERY_S``: least seconds between redraws; ``TIMED``: it shows ages."""

    NAME = ""
    TOPICS: ClassVar[frozenset[str]] = frozenset()
    TIMED = False
    EVERY_S = READABLE_S

    def __init__(self) -> None:
        super().__init__(id=self.NAME, classes="panel")
        self.border_title = self.NAME.capitalize()

    def set_title(self, more: object = "", subtitle: str = "") -> None:
        """Show ``more`` after the name, and the subtitle. Only changed texts are set, because that draws the panel."""
        title = escape(f"{self.NAME.capitalize()} · {more}" if more else self.NAME.capitalize())
        if (self.border_title, self.border_subtitle or "") != (title, subtitle):
            self.border_title, self.border_subtitle = title, subtitle


class TextPanel(Panel, VerticalScroll, can_focus=True):
    """Scrolling rows under a title."""

    DEFAULT_CSS = "TextPanel { overflow-y: auto; scrollbar-size-vertical: 1; }"

    def compose(self) -> ComposeResult:
        yield Lines(classes="text")

    def draw(self, rows: list[Row], frame: Frame) -> None:
        self.query_one(Lines).draw(rows, frame.palette)


class RingPanel(TextPanel):
    """The ring of the job in view, and the workers outside it."""

    NAME = "ring"
    TOPICS = frozenset({"peers", "jobs", "parts", "serving", "link"})

    def show(self, frame: Frame) -> None:
        elsewhere = (("5: split models", frame.store.parts), ("6: serving", frame.store.serving))
        job = frame.job if frame.job is not None and frame.job.members else None
        self.set_title(len(job.members) if job else "", "  ".join(text for text, there in elsewhere if there))
        self.draw(ring_rows(frame, job, self.size.width) if job else what_next(frame), frame)


def ring_rows(frame: Frame, job: JobInfo, width: int) -> list[Row]:
    edges, slowest = job.edges() or [(None, None)] * len(job.members), job.slowest_edge()
    peers = [frame.store.peers.get(peer_id) for peer_id in job.members]  # None: the seed does not list it
    names = min(22, max([len(peer.name) if peer else len(id_) for peer, id_ in zip(peers, job.members, strict=True)]))
    room = max(10, min(30, width - names - 28 - (OFF + 1 if job.scores else 0)))
    rows: list[list[Row]] = []
    scores = {score.peer: score for score in job.scores}
    for rank, (peer, id_) in enumerate(zip(peers, job.members, strict=True)):
        look = fmt.look_in(fmt.PEER_LOOKS, peer.state if peer else "lost")
        name = peer.name if peer else id_
        state = "gone" if peer is None else f"{peer.state} ×{peer.share}" if peer.share else peer.state
        way = frame.store.way(id_, job.members[(rank + 1) % len(peers)])
        link_text = next((text for text in fmt.link_texts(*edges[rank], way) if len(text) + 4 <= room), "")
        mark = SLOWEST if rank == slowest else None
        member = [Span(f"{rank:>2} ", "dim"), Span(f"{look.symbol} ", look.role), Span(name, "strong")]
        pace = [Span(f"{fmt.count(peer.tokens_per_s) if peer else fmt.UNKNOWN:>6}")]
        edge = [Span("→ " if rank + 1 < len(peers) else "↩ ", "dim"), Span(link_text, mark.role if mark else "")]
        edge += [Span(f" {mark.symbol}", mark.role)] if mark else []
        off = [_score_cell(scores.get(id_))] if scores else []
        rows.append([member, [Span(state, look.role)], *off, pace, edge])
    title = [Span(f"generation {job.generation}", "accent"), Span(f" · step {job.step:,}", "dim")]
    columns = [(" # member", 5 + names), ("state", 12), (" tok/s", 6), ("to the next", room)]
    columns[2:2] = [("off   left out", OFF)] if scores else []
    others = [peer for peer in frame.store.peers_in_order() if peer.id not in job.members and _trains(peer)]
    parts = [(frame.look_of(peer.id), f"{fmt.fit(peer.name, 18)} ({fmt.fit(peer.state, 10)})  ") for peer in others]
    outside = [fmt.list_items("not in the ring: ", parts, width)] if parts else []
    return [title, *outside, [], *fmt.table(columns, rows, width)]


def _score_cell(score: MemberScore | None) -> list[Span]:
    """How many times as far from the aggregate as usual, and in which share of the steps it was left out."""
    if score is None:
        return []
    role = "warn" if score.is_far else "dim"
    out = fmt.percent(score.excluded / score.steps) if score.steps else fmt.UNKNOWN
    return [Span(f"{fmt.UNKNOWN if score.distance is None else f'{score.distance:.1f}×':<6}{out:>8}", role)]


def _trains(peer: PeerInfo) -> bool:
    return not peer.roles or "worker" in peer.roles


def what_next(frame: Frame) -> list[list[Span]]:
    store = frame.store
    if frame.unconnected:
        return explain_connection(frame)
    if not store.peers:
        return advice("no peers yet", "On each machine that should train:", how_to_join(seed_address(frame)))
    workers = sum(map(_trains, store.peers.values()))
    if frame.job is None and not workers:
        writing = fmt.plural(len(store.peers), "peer")
        text = f"{writing} write text: 6 shows them. On each machine that should train:"
        return advice("no peer here trains", text, how_to_join(seed_address(frame)))
    if frame.job is None:
        title = f"{fmt.plural(workers, 'worker')} ready, no job yet"
        return advice(title, "Give them something to train:", "p2ptrain jobs create --profile tiny")
    look = fmt.look_in(fmt.JOB_LOOKS, frame.job.state)
    return [
        [Span(f"{look.symbol} ", look.role), Span(f"{frame.job.name} is {frame.job.state}", "strong")],
        [],
        [Span(frame.job.reason or "It has no ring at this moment.", "dim")],
    ]


def advice(title: str, text: str, *commands: str) -> list[Row]:
    return [[Span(title, "strong")], [], [Span(text)], *([Span(f"  {command}", "accent")] for command in commands)]


def seed_address(frame: Frame) -> str:
    """The address for a new peer to dial: the one that the seed reports, else the one that this viewer dialled."""
    cluster = frame.store.cluster
    return cluster.address if cluster and cluster.address else frame.address


def explain_connection(frame: Frame) -> list[list[Span]]:
    link = frame.store.link
    title = Span(f"no connection to the seed at {frame.address} yet", "strong")
    problem = [[Span(link.problem, "bad")]] if link.problem else []
    remedy = link.remedy or "It is dialled again until it answers. Is the seed running?  p2ptrain seed"
    return [[title], [], *problem, [Span(remedy, "dim")]]


class LossPlot(PlotextPlot):
    def draw(self, frame: Frame) -> None:
        plt = self.plt
        plt.clear_figure()
        series = frame.store.series.get(frame.job.id) if frame.job else None
        if series is not None:
            # Braille cells are two dots wide: more points than dots take time and show nothing.
            steps, losses = fmt.downsample(*series.curve("loss"), buckets=max(16, 2 * self.size.width))
            if steps:
                plt.plot(steps, losses, marker="braille", color=frame.palette.rgb("train"))
            at, validations = series.validation_curve()
            if at:
                plt.scatter(at, validations, marker="◆", color=frame.palette.rgb("validation"))
            for change in frame.job.changes if frame.job else ():
                if steps and steps[0] <= change.step <= steps[-1]:
                    plt.vline(change.step + 0.5, color=frame.palette.rgb("dim"))
            if steps or at:
                xs, ys = [*steps, *at], [*losses, *validations]
                x_ticks = fmt.ticks(min(xs), max(xs), max(2, min(8, self.size.width // 14)))
                y_ticks = fmt.ticks(min(ys), max(ys), max(3, min(7, self.size.height // 2)))
                plt.xticks(x_ticks, [f"{tick:,.0f}" for tick in x_ticks])
                plt.yticks(y_ticks, [f"{tick:.2f}" for tick in y_ticks])
        self.refresh()


class TrainingPanel(Panel, can_focus=True):
    NAME = "training"
    TOPICS = frozenset({"metrics", "jobs", "link"})

    def compose(self) -> ComposeResult:
        yield Lines(id="training-empty")
        yield LossPlot(id="loss")
        yield Lines(id="numbers")

    def show(self, frame: Frame) -> None:
        job, drawn = frame.job, bool(frame.recent(1))
        rests = f" · {job.state}" if job is not None and job.state != "running" else ""
        self.set_title(f"{fmt.fit(job.name, 30)}{rests}" if job else "", "loss: ─ training  ◆ validation" * drawn)
        self.set_class(not drawn, "-empty")
        if not drawn or job is None:
            why = Span("The loss is drawn from the first committed step on.", "dim")
            empty = [[Span("no steps yet", "strong")], [], [why]]
            rows = explain_connection(frame) if frame.unconnected else empty
            self.query_one("#training-empty", Lines).draw(rows, frame.palette)
            return
        self.query_one(LossPlot).draw(frame)
        numbers = training_numbers(frame, job, max(20, self.size.width - 2))
        self.query_one("#numbers", Lines).draw(numbers, frame.palette, layout=False)


def training_numbers(frame: Frame, job: JobInfo, width: int) -> list[list[Span]]:
    recent = frame.recent()
    last = recent[-1]
    loss_value = last.loss if last.loss is not None else job.loss
    first: list[Span] = []
    for label, value, role in (
        ("loss", fmt.loss(loss_value), "train"),
        ("val", fmt.loss(job.val_loss), "validation"),
        *([("epsilon", f"{job.epsilon:.2f}", "strong")] if job.epsilon else []),
        ("step", f"{job.step:,}/{job.steps_total:,}", "strong"),
        ("left", fmt.duration(eta_s(job, recent)), "strong"),
        ("lr", fmt.scientific(last.lr if last.lr is not None else job.lr), "strong"),
        ("grad", fmt.count(last.grad_norm), "strong"),
    ):
        if sum(len(span.text) for span in first) + len(label) + len(value) + 1 <= width:
            first += [Span(f"{label} ", "dim"), Span(f"{value}  ", role)]
    rates = [row.tokens_per_s for row in frame.recent(max(1, width - 22))]
    pace = f" {fmt.count(rates[-1] if job.state == 'running' else None):>6} tok/s"
    second = [
        Span("tokens   ", "dim"),
        Span(fmt.sparkline(rates, min(len(rates), width - 9 - len(pace))), "calm"),
        Span(pace, "strong"),
    ]
    parts = split(recent)
    if parts is None:
        return [first, second]
    step_ms = sum(parts.values())
    total = f" {fmt.millis(step_ms):>9}   "
    looks = fmt.STEP_LOOKS
    filled = fmt.filled_bar([(looks[name], ms) for name, ms in parts.items()], max(4, width - 9 - len(total)))
    bar = [Span("a step   ", "dim"), *filled, Span(total, "strong")]
    legend: list[Span] = [Span(" " * 9)]
    for name, ms in parts.items():
        share = Span(f"{fmt.percent(ms / step_ms)}   ", "strong")
        legend += [Span(f"{looks[name].symbol} ", looks[name].role), Span(f"{name} "), share]
    return [first, second, bar, legend]


class RecoveriesPanel(TextPanel, can_focus=False):
    """Interruptions of the ring of the job in view: how long, why, and what took the time."""

    NAME = "recoveries"
    TOPICS = frozenset({"recoveries", "jobs"})

    def show(self, frame: Frame) -> None:
        found = frame.store.recoveries_in_order(frame.job.id) if frame.job else []
        middle_s, high_s = recovery_spread(found)["total"] if found else (0.0, 0.0)
        spread = f"p50 {fmt.millis(1e3 * middle_s)}  p99 {fmt.millis(1e3 * high_s)}"
        self.set_title(found[-1].number if found else "", spread if found else "")
        self.set_class(not found, "-empty")
        self.draw(recovery_lines(found, self.size.width), frame)


def recovery_lines(found: list[RecoveryInfo], width: int) -> list[list[Span]]:
    if not found:
        return [[Span("no interruption yet", "dim")]]
    last = found[-1]
    total = f" {fmt.millis(1e3 * last.total_s):>8}"
    head = f"{fmt.clock(last.wall)} {last.kind}, step {last.step:,}  "
    parts = [(fmt.PHASE_LOOKS[name], seconds) for name, seconds in last.phases()]
    rows = [
        [Span(head, "strong"), Span(fmt.fit(last.text, max(0, width - len(head))), "dim")],
        [*fmt.filled_bar(parts, max(4, width - len(total))), Span(total, "strong")],
    ]
    legend: list[list[Span]] = [[]]
    for name, seconds in last.phases():
        look, text = fmt.PHASE_LOOKS[name], f"{name} {fmt.millis(1e3 * seconds)}  "
        if sum(len(span.text) for span in legend[-1]) + len(text) + 2 > width:
            legend.append([])
        legend[-1] += [Span(f"{look.symbol} ", look.role), Span(text)]
    return rows + legend
