"""What the seed knows of a job's past: rows of metrics and of the ledger, interruptions, and its members' view.

If the seed was restored from a backup, the backup may lack the newest views. The members report their view when they
connect. The job decides nothing before all members of the newest view are here, or ``SETTLE_S`` is over. Until then
messages about its steps wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from p2ptrain.core.errors import ProtocolError
from ring.coordination import CheckpointsSaved
from ring.recovery import Recorder
from ring.view import View
from roles.seed.checkpoints import checkpoints_event
from roles.seed.ledger import JobLedger
from roles.seed.peers import MAX_WHOLE, ConnectedPeer, PeerTable, clip, whole
from roles.seed.store import Records
from wire.job_messages import StepMetrics, distance_key, excluded_key
from wire.messages import Message
from wire.records import LedgerHead, MemberScore, MetricRow, RecoveryInfo

_METRICS = {item.name for item in dataclasses.fields(MetricRow)} - {"job", "step", "wall", "generation", "members"}
_SHOWN = (
    "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "compute_ms", "communicate_ms", "wait_ms", "epsilon", "delta",
)  # fmt: skip
MAX_GAP = 512
"""Newest steps of which a row may still come after that of a later step: more than a member remembers."""
DISTANCES = 5
"""Window of the moving average of a member's distances. They are measured once in some steps."""


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """What the store knows of a job apart from its record."""

    view: View | None = None
    row: MetricRow | None = None
    val_loss: float | None = None
    saved: CheckpointsSaved = field(default_factory=lambda: CheckpointsSaved({}))
    head: LedgerHead | None = None
    begins: Sequence[tuple[int, int, str]] = ()  # generation, step and lineage of each known view
    recoveries: int = 0
    mean_step_ms: float = 0.0
    timed_steps: int = 0


def read_history(records: Records, job: str) -> StoredHistory:
    """Runs on the store's thread."""
    row, val_loss = newest_row(records, job)
    mean_step_ms, timed_steps = records.mean_step_ms(job)
    return StoredHistory(
        view=records.last_view(job),
        row=row,
        val_loss=val_loss,
        saved=checkpoints_event(records.checkpoints(job)),
        head=records.ledger_head(job),
        begins=records.begins(job),
        recoveries=max((newest.number for newest in records.recoveries(job, 1)), default=0),
        mean_step_ms=mean_step_ms,
        timed_steps=timed_steps,
    )


def newest_row(records: Records, job: str) -> tuple[MetricRow | None, float | None]:
    """The newest row of metrics, and the newest validation loss. Runs on the store's thread."""
    return next(iter(records.last_metrics(job, 1)), None), records.last_val_loss(job)


def step_s(row: MetricRow | None) -> float:
    return max(row.step_ms or 0.0, 0.0) / 1e3 if row else 0.0


class JobRows:
    """The newest rows of one job, and which rows are still missing. Pure.

    Attributes:
        newest: the newest row of metrics; None before the first.
        val_loss: the newest validation loss.
        scores: of the members of the present view, if a robust rule combines their gradients.
        pause_s: how long the job stood still when its members last changed in good order; 0: not measured.
    """

    def __init__(self, job: str, history: StoredHistory) -> None:
        self.job = job
        self.ledger = JobLedger(job, history.head, history.begins)
        self.recoveries = Recorder(job, number=history.recoveries, view=history.view)
        self.newest, self.val_loss = history.row, history.val_loss
        self.scores: dict[str, MemberScore] = {}
        self.pause_s = 0.0
        # The steps up to ``_complete_to``, and those in ``_beyond``, have their rows of metrics.
        self._complete_to, self._beyond = history.row.step if history.row else 0, set[int]()
        self._mean_ms, self._timed_steps = history.mean_step_ms, history.timed_steps

    def view_began(self, view: View) -> int:
        """Take back the steps after the view's. Returns the step up to which all rows are recorded."""
        self.ledger.view_began(view)
        self._complete_to = min(self._complete_to, view.step)
        self._beyond = {step for step in self._beyond if step <= view.step}
        return min(self.ledger.step, self._complete_to)

    def counts_in(self, view: View, message: StepMetrics) -> bool:
        """Whether the step counts in this view: a later view did not take it back."""
        is_current = message.generation == view.generation or message.step <= view.step
        return is_current and not self.ledger.begins.superseded(message.generation, message.step)

    def end_recovery(self, message: StepMetrics, now: float) -> RecoveryInfo | None:
        """The record of the interruption that this step ends, if it ends one."""
        form_ms = message.values.get("form_ms")
        form_s = form_ms / 1e3 if form_ms is not None and math.isfinite(form_ms) and form_ms >= 0 else None
        ended = self.recoveries.committed(message.generation, message.step, now, form_s)
        if ended is not None and ended.kind in ("held", "left"):
            self.pause_s = sum(filter(None, (ended.agree_s, ended.form_s, ended.transfer_s, ended.commit_s)))
        return replace(ended, text=clip(ended.text), fetched_bytes=whole(ended.fetched_bytes)) if ended else None

    def add_step(self, message: StepMetrics, wall: float) -> MetricRow | None:
        """The new row of metrics. None if the step has one: members repeat reports, because the first reporter, or the
        seed, may have died."""
        if not self._mark_recorded(message.step):
            return None
        known = {name: value for name, value in message.values.items() if name in _METRICS and math.isfinite(value)}
        members = whole(message.values.get("members"))
        row = MetricRow(self.job, message.step, wall, generation=message.generation, members=members, **known)
        if row.step_ms is not None:
            self._timed_steps += 1
            self._mean_ms += (max(row.step_ms, 0.0) - self._mean_ms) / self._timed_steps
        if self.newest is None or row.step >= self.newest.step:
            self.newest = row
            self.val_loss = row.val_loss if row.val_loss is not None else self.val_loss
        return row

    def _mark_recorded(self, step: int) -> bool:
        """Note that the step has a row; False if it had one before. The oldest missing rows are given up."""
        if step <= self._complete_to or step in self._beyond:
            return False
        self._beyond.add(step)
        if len(self._beyond) > MAX_GAP:
            self._complete_to = min(self._beyond) - 1
        while self._complete_to + 1 in self._beyond:
            self._complete_to += 1
            self._beyond.discard(self._complete_to)
        return True

    def count_scores(self, view: View, values: Mapping[str, float]) -> None:
        """Count a step that a robust rule combined. Members that left the view are forgotten."""
        scores = {}
        for rank, member in enumerate(view.members):
            excluded, newest = values.get(excluded_key(rank)), values.get(distance_key(rank))
            score = self.scores.get(member.peer_id, MemberScore(member.peer_id))
            distance = score.distance
            if newest is not None and 0 <= newest < math.inf:
                distance = newest if distance is None else distance + (newest - distance) / DISTANCES
            counts = score.steps + (excluded is not None), score.excluded + (excluded == 1)
            scores[member.peer_id] = MemberScore(member.peer_id, *counts, distance)
        self.scores = scores

    def shares(self, view: View) -> list[int]:
        """Micro-batches of each member in the newest step of a view; before its first step, as planned."""
        if self.ledger.generation == view.generation and len(self.ledger.counts) == view.size:
            return list(self.ledger.counts)
        return [member.count for member in view.members]

    def figures(self, step: int) -> dict[str, Any]:
        """Fields of ``JobInfo`` for a job that has committed ``step``."""
        row = self.newest
        shown = {name: getattr(row, name) for name in _SHOWN} if row else {}
        step_tokens = (row.tokens_per_s or 0.0) * (row.step_ms or 0.0) / 1e3 if row else 0.0
        tokens = step * round(min(max(step_tokens, 0.0), 1e12))
        return shown | {
            "val_loss": self.val_loss,
            "tokens_total": min(tokens, MAX_WHOLE),
            "scores": list(self.scores.values()),
            "trained_s": round(step * self._mean_ms / 1e3, 1),  # also of steps whose rows are deleted
        }


SETTLE_S = 30.0
"""How long a restored seed waits for the members of a job: as long as they may be away from a running seed."""


class ViewCensus:
    """The views that the members of one job report.

    Attributes:
        settled: set once the job goes on. over: set once no message waits any more, either. Both are set from the
            start unless the seed was restored.
        changed: set when a member connected, or reported its view.
        early_messages: messages of workers, the oldest first, that wait until the job is settled.
    """

    def __init__(self, job: str, peers: PeerTable, *, minted_below: int, unsettled: bool) -> None:
        self.settled, self.over, self.changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.early_messages: deque[tuple[ConnectedPeer, Message]] = deque()
        self._job, self._peers, self._minted_below = job, peers, minted_below
        self._reported: dict[str, View] = {}
        if not unsettled:
            self.settled.set()
            self.over.set()

    def report(self, peer_id: str, view: View) -> None:
        """Take in a view that an earlier term minted. Raises ``ProtocolError`` if no such view can exist."""
        if view.job != self._job or view.rank_of(peer_id) is None or view.generation > self._minted_below:
            raise ProtocolError(f"{peer_id} reported a view that the seed never minted: generation {view.generation}")
        self._reported[peer_id] = view
        self.changed.set()

    async def wait(self, known: View | None) -> View | None:
        """Wait until all members of the newest view are here, for ``SETTLE_S`` at most. Returns the newest view that
        they reported; None if none is newer than ``known``, which is stored."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not self._is_complete(known):
                    await self.changed.wait()
                    self.changed.clear()
        return self.newest_view(known)

    def newest_view(self, known: View | None) -> View | None:
        reported = [view for peer_id, view in self._reported.items() if self._peers.in_job(peer_id, self._job)]
        newest = max(reported, key=lambda view: view.generation, default=None)
        return newest if newest is not None and newest.generation > (known.generation if known else 0) else None

    def _is_complete(self, known: View | None) -> bool:
        """A member that reports an older view was lost before the newest view was announced to it."""
        view, connected = self.newest_view(known) or known, self._peers.of_job(self._job)
        return (
            view is not None
            and {member.peer_id for member in view.members} <= {peer.id for peer in connected}
            and all(peer.hello.generation <= view.generation for peer in connected)
        )
