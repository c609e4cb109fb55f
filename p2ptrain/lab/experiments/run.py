"""The runs of an experiment, one after another: each job is created, followed to its end, and measured, over a seed's
requests.

What the program does about a job is a result: a refusal, too little memory, a loss that is not finite, a time limit.
The end of the seed and workers that do not come are errors, and the next start repeats the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from statistics import mean, median

import numpy as np

from p2ptrain.cluster.jobs import JobObserver
from p2ptrain.core.errors import P2PTrainError, Refused, UserError
from p2ptrain.lab.experiments.grid import GridPlan, GridRun
from p2ptrain.lab.experiments.results import ALONE, DONE, Result, Results, Row, bytes_to, time_to
from wire.client import SeedClient
from wire.records import ABSENT_STATES, FINISHED_STATES, EventInfo, JobInfo, MetricRow, PeerInfo
from wire.schema import Record

START_S = 600.0
"""How long the workers of a job may take until they are ready."""
SETTLE_S = 15.0
"""How long a job may take to be cancelled, and its workers to report the bytes of its last steps."""
RECOVERIES = 256

Show = Callable[[str], None]
Execute = Callable[[GridRun, Show], Awaitable[Result]]
"""Carries out a run. Its errors end the experiment."""


async def carry_out(
    results: Results,
    execute: Execute,
    on_progress: Callable[[str, float | None], object],
    on_row: Callable[[GridRun, Row], None],
) -> None:
    """Carry out the runs that have no result yet. Raises what ``execute`` raises, and ``StorageError``.

    ``on_progress``: called with what happens, and the seconds that are left; None before a run has ended.
    """
    # Not of the loop, whose time is virtual in simulations: a person waits for the end.
    missing, total, began = results.missing(), len(results.plan.runs), time.monotonic()
    for done, run in enumerate(missing):
        left = len(missing) - done
        left_s = (time.monotonic() - began) / done * left if done else None
        about = f"run {total - left + 1} of {total}: {run}, repeat {run.repeat}"

        def show(text: str, about: str = about, left_s: float | None = left_s) -> None:
            on_progress(f"{about}: {text}", left_s)

        show("begins")
        on_row(run, results.add(run, await execute(run, show)))


async def measure(client: SeedClient, run: GridRun, plan: GridPlan, show: Show) -> Result:
    """Run a job and measure it. ``client``: not subscribed yet.

    Raises:
        NetworkError: the seed is lost.
        UserError: its workers did not become ready.
    """
    name = f"{plan.grid.name}-{run.id}"
    for job in await client.jobs():
        if job.name == name and job.state not in FINISHED_STATES:  # of a run that was interrupted
            await client.tell_job(job.id, "cancel")
    before = await client.peers()
    try:
        job_id = await client.create_job(name, "experiment", run.profile.to_spec())
    except Refused as refusal:
        return Result("refused", refusal.message)
    followed = FollowedJob(job_id, before, show)
    await followed.reach(client, _WAITING, None)
    has_begun = await followed.reach(client, _BEGUN, START_S)
    in_time = has_begun and await followed.reach(client, _OVER, plan.limit_s)
    late = f"it was {followed.description}"
    with suppress(Refused):  # it has ended
        await client.tell_job(job_id, "cancel")
    if not has_begun:
        text = f"{run}: its job did not begin within {START_S:g} s: {late}"
        raise UserError(text, remedy="start the workers that are missing, and then the experiment again")
    await followed.reach(client, _SETTLED, SETTLE_S)
    info, _ = await client.job(job_id)
    rows = [row async for row in client.all_metrics(info.id)]
    recoveries = len(await client.recoveries(info.id, RECOVERIES))
    for saved in await client.checkpoints(info.id):
        with suppress(P2PTrainError):  # a result needs none
            await client.delete_checkpoint(saved.id)
    began = rows[0].wall if rows and info.started_at is None else info.started_at or 0.0
    steps = [row.step for row in rows]
    times_s = [round(max(row.wall - began, 0.0), 3) for row in rows]
    batch = run.profile.batch
    step_tokens = batch.micro_batches * batch.micro_batch_sequences * run.profile.data.sequence_tokens
    tokens = [step * step_tokens for step in steps]
    # Between two reports of a worker, which are half a second or more apart, its bytes grow evenly.
    reports = followed.sent_bytes
    sent_bytes = [round(total) for total in np.interp(steps, list(reports), list(reports.values()))]
    losses, val_losses = [row.loss for row in rows], [row.val_loss for row in rows]
    known, val_known = ([loss for loss in all_losses if loss is not None] for all_losses in (losses, val_losses))
    steps_ms = [row.step_ms for row in rows if row.step_ms]
    computed_ms = [row.compute_ms for row in rows if row.compute_ms]
    members = [row.members for row in rows if row.members]
    figures = {
        "duration_s": max(times_s, default=0.0),
        "steps": max(steps, default=0),
        "tokens": max(tokens, default=0),
        "tokens_per_s": round(tokens[-1] / times_s[-1], 1) if rows and times_s[-1] else None,
        "step_ms": round(median(steps_ms), 2) if steps_ms else None,
        "compute_ms": round(median(computed_ms), 2) if computed_ms else None,
        "sent_bytes": max(followed.sent_bytes.values()),
        "loss": known[-1] if known else None,
        "best_loss": min(known, default=None),
        "val_loss": val_known[-1] if val_known else None,
        "best_val_loss": min(val_known, default=None),
        "memory_bytes": followed.memory_bytes or None,
        "members_mean": round(mean(members), 3) if members else None,
        "members_min": min(members, default=None),
        "generation_changes": max(len({row.generation for row in rows}) - 1, 0),
        "recoveries": recoveries,
        "rejected": sum(followed.refused.values()) + sum(score.excluded for score in info.scores),
        "epsilon": info.epsilon,
    }
    for target in plan.grid.loss_targets:
        known_at = zip(times_s, sent_bytes, val_losses, strict=True)
        reached = ((at_s, sent) for at_s, sent, loss in known_at if loss is not None and loss <= target)
        figures[time_to(target)], figures[bytes_to(target)] = next(reached, (None, None))
    curve = list(zip(steps, times_s, tokens, sent_bytes, losses, val_losses, strict=True))
    if info.state == "done":
        away = members_away(members, run.machine.workers)
        state = ALONE if away and min(members) == 1 else DONE
        return Result(state, "; ".join(filter(None, (away, info.reason))), figures, curve)
    if not in_time:
        return Result("time-limit", f"{late} after {plan.limit_s:g} s", figures, curve)
    reason = followed.trouble or info.reason or info.state
    return Result(failure(reason), reason, figures, curve)


def members_away(members: Sequence[int], workers: int) -> str:
    """Say in how many steps members were away; empty: in none. ``members``: of each step."""
    away = [count for count in members if count < workers]
    if not away:
        return ""
    return f"{len(away)} of {len(members)} steps had fewer than {workers} workers, {min(away)} at the least"


def failure(reason: str) -> str:
    """The state of a run that ended with this error."""
    lower = reason.lower()
    if "memory" in lower or "killed by sigkill" in lower:
        return "out-of-memory"
    return "diverged" if "not finite" in lower else "failed"


_QUEUED, _WAITING, _BEGUN, _OVER, _SETTLED = range(5)
"""Phases of a job: behind another job; for workers; it had a view; no step is to come; all bytes are reported."""


class FollowedJob(JobObserver):
    """The job of a run: what the seed and the job's workers report of it, and what that means for the run.

    Args:
        before: the seed's peers before the job was created.

    Attributes:
        trouble: why a worker cannot go on; empty: all can.
        memory_bytes: most of one worker. refused: gradients, by worker.
        sent_bytes: step → what all workers had sent by their last reports when it was the newest step.
    """

    def __init__(self, job: str, before: Sequence[PeerInfo], show: Show) -> None:
        super().__init__(job, on_step=self._show_step)
        self.trouble = ""
        self.memory_bytes, self.refused, self.sent_bytes = 0, dict[str, int](), {0: 0}
        self._show, self._unsaved = show, dict[str, str]()
        self._workers = set[str]()  # of the job
        self._active = set[str]()  # those that were seen at work
        self._sent_by = dict[str, int]()
        for peer in before:
            self.take(peer)

    @property
    def description(self) -> str:
        """Its state, and why."""
        reason = self.info.reason if self.info else ""
        return f"{self.state or 'waiting'}{': ' * bool(reason)}{reason}"

    @property
    def phase(self) -> int:
        info = self.info
        if info is None or info.state == "queued":
            return _QUEUED
        if self.is_finished:
            return _SETTLED if self._is_settled(info) else _OVER
        return _OVER if self.trouble else _WAITING if info.started_at is None else _BEGUN

    def _is_settled(self, job: JobInfo) -> bool:
        """Whether each worker has reported all bytes of a job that is over.

        Each was idle before it, too: so it must have been seen at work, or have sent something, unless it was alone.
        """
        were_active = self._active >= self._workers or len(self._workers) == 1 or not job.step
        states = {self.peers[peer_id].state for peer_id in self._workers & self.peers.keys()}
        return were_active and states <= {"idle", *ABSENT_STATES}

    async def reach(self, client: SeedClient, phase: int, seconds: float | None) -> bool:
        """Wait for a phase or a later one, so long at most; return whether it came. Raises ``NetworkError``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if self.phase < phase:
                    async for _ in self.follow(client):
                        if self.phase >= phase:
                            break
        return self.phase >= phase

    def _show_step(self, row: MetricRow) -> None:
        total = self.info.steps_total if self.info else 0
        self._show(f"step {row.step}/{total}" + ("" if row.loss is None else f"  loss {row.loss:.3f}"))

    def take(self, record: Record) -> None:
        super().take(record)
        info, peers = self.info, self.peers
        match record:
            case JobInfo() if record.id == self.job:
                self._workers.update(record.members)
                if not record.step:
                    self._show(self.description)
            case EventInfo() if record.job == self.job and record.kind == "member-failed":
                self.trouble = self.trouble or record.text
            case EventInfo() if record.job == self.job and record.kind == "checkpoint-failed":
                self._unsaved[record.peer] = record.text
            case PeerInfo():
                self._take_peer(record)
        if info is not None and info.state == "saving":
            there = [peer_id for peer_id in self._workers & peers.keys() if peers[peer_id].state not in ABSENT_STATES]
            if there and all(f"step {info.step}:" in self._unsaved.get(peer, "") for peer in there):
                self.trouble = self.trouble or self._unsaved[there[0]]  # each has tried to save the result

    def _take_peer(self, peer: PeerInfo) -> None:
        if peer.job == self.job:
            self._workers.add(peer.id)
        if peer.state in ABSENT_STATES:  # it says nothing now
            return
        known, self._sent_by[peer.id] = self._sent_by.get(peer.id, 0), peer.sent_bytes
        if peer.id not in self._workers:
            return
        self.memory_bytes = max(self.memory_bytes, peer.memory_bytes)
        self.refused[peer.id] = max(self.refused.get(peer.id, 0), peer.refused)
        more = peer.sent_bytes - known if peer.sent_bytes >= known else peer.sent_bytes  # a new process
        if more:
            self.sent_bytes[self.step] = max(self.sent_bytes.values()) + more
        if more or peer.state != "idle":
            self._active.add(peer.id)
