"""The panels that are tables: peers, jobs, checkpoints."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from tui import format as fmt
from tui.format import Span
from tui.model import Phase, eta_s
from tui.panels import READABLE_S, RECENT, Frame, lines, seed_address, set_title
from tui.table import Cell, Column, LiveTable
from tui.theme import Palette
from wire.records import CheckpointInfo, JobInfo, PeerInfo, ServingInfo


class TablePanel(Vertical):
    """A table under a title, with words in its place while it is empty."""

    TOPICS: ClassVar[frozenset[str]] = frozenset()
    TIMED = False
    EVERY_S = READABLE_S
    TITLE = ""
    NAME = ""
    TABLE: type[LiveTable] = LiveTable

    def __init__(self) -> None:
        super().__init__(id=self.NAME, classes="panel")
        self.border_title = self.TITLE
        self._detail: tuple[Palette, list[Span]] | None = None

    def compose(self) -> ComposeResult:
        yield Static(classes="empty")
        yield self.TABLE(id=f"{self.NAME}-table")
        yield Static(classes="detail")

    @property
    def table(self) -> LiveTable:
        return self.query_one(LiveTable)

    def show(self, frame: Frame) -> None:
        rows = self.rows(frame)
        set_title(self, f"{self.TITLE} · {len(rows)}" if rows else self.TITLE)
        self.set_class(not rows, "-empty")
        if rows:
            self.table.sync(rows, frame.palette)
            detail = self.detail(frame, self.table.key_at_cursor or "") if self.table.hides_columns else []
            if (frame.palette, detail) != self._detail:
                self._detail = (frame.palette, detail)
                self.query_one(".detail", Static).update(lines([detail], frame.palette), layout=False)
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


class PeersPanel(TablePanel):
    """Every peer that the seed knows."""

    TOPICS = frozenset({"peers", "serving", "link"})
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
        return [[Span("no peers yet: ", "strong"), Span(f"p2ptrain join {seed_address(frame)}", "accent")]]

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
    """How a verifier or a drafter fares, in a few words."""
    told = [f"{peer.sessions} session{'s' if peer.sessions != 1 else ''}"]
    if serving is None:
        return told
    alpha, speed_up = serving.stats.get("alpha"), serving.stats.get("speed_up")
    told += [f"{fmt.percent(alpha)} right"] if alpha is not None else []
    told += [f"{speed_up:.2f}× alone"] if speed_up is not None else []
    if serving.role == "verifier":
        told.append(f"{len(serving.drafters)} drafter{'s' if len(serving.drafters) != 1 else ''}")
    return told


def memory_cell(peer: PeerInfo) -> Cell:
    """``▐███  ▌ 9.1/12 GiB``: used and total in the total's unit."""
    used, total = peer.memory_bytes, peer.memory_total_bytes
    if total <= 0:
        return _plain(fmt.size(used) if used > 0 else fmt.UNKNOWN, "dim")
    part = used / total
    role = "bad" if part > 0.95 else "warn" if part > 0.85 else "dim"
    return (Span(fmt.bar(part, 5), role), Span(f"{fmt.used_of(used, total):>13}"))


class JobsTable(LiveTable):
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
        return [[Span("no jobs yet", "strong")], [], [Span("  p2ptrain jobs create --profile tiny", "accent")]]

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
        of = "" if item.stage is None else f"stage {item.stage}'s part "
        room = self.size.width - len(item.peer_name) - len(of) - 4
        path = item.path if len(item.path) <= room else f"…{item.path[1 - max(2, room) :]}"  # its end tells the step
        return [Span(f"{item.peer_name} ", "strong"), Span(of), Span(path, "dim")]
