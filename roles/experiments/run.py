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
from dataclasses import replace
from statistics import median

import numpy as np

from p2ptrain.core.errors import P2PTrainError, Refused, UserError
from roles.experiments.grid import Plan, Run
from roles.experiments.results import DONE, Result, Results, Row, time_to
from wire.client import SeedClient
from wire.records import ABSENT_STATES, FINISHED_STATES, EventInfo, JobInfo, MetricRow, PeerInfo
from wire.schema import Record

START_S = 600.0
"""How long the workers of a job may take until they are ready."""
SETTLE_S = 15.0
"""How long a job may take to be cancelled, and its workers to report the bytes of its last steps."""
RECOVERIES = 256

Show = Callable[[str], None]
Execute = Callable[[Run, Show], Awaitable[Result]]
"""Carries out a run. Its errors end the experiment."""


async def carry_out(
    results: Results,
    execute: Execute,
    on_progress: Callable[[str, float | None], object],
    on_row: Callable[[Row], None],
) -> None:
    """Carry out the runs that have no result yet. Raises what ``execute`` raises, and ``StorageError``.

    ``on_progress``: called with what happens, and the seconds that are left; None before a run has ended.
    """
    missing, total, began = results.missing(), len(results.plan.runs), time.monotonic()
    for done, run in enumerate(missing):
        left = len(missing) - done
        left_s = (time.monotonic() - began) / done * left if done else None
        about = f"run {total - left + 1} of {total}: {run}, repeat {run.repeat}"

        def show(text: str, about: str = about, left_s: float | None = left_s) -> None:
            on_progress(f"{about}: {text}", left_s)

        show("begins")
        on_row(results.add(run, await execute(run, show)))


async def measure(client: SeedClient, run: Run, plan: Plan, show: Show) -> Result:
    """Run a job and measure it. ``client``: not subscribed yet.

    Raises:
        NetworkError: the seed is lost.
        UserError: its workers did not become ready.
    """
    name = f"{plan.grid.name}-{run.id}"
    for job in await client.jobs():
        if job.name == name and job.state not in FINISHED_STATES:  # of a run that was interrupted
            await client.tell_job(job.id, "cancel")
    followed = _Followed(client, run, await client.clock() - asyncio.get_running_loop().time(), show)
    for peer in await client.peers():
        followed.take(peer)
    try:
        followed.job = await client.create_job(name, "experiment", run.profile.to_spec())
    except Refused as refusal:
        return Result("refused", refusal.message)
    await followed.until(_WAITING, None)
    has_begun = await followed.until(_BEGUN, START_S)
    in_time = has_begun and await followed.until(_OVER, plan.limit_s)
    late = f"it was {followed.state}"
    with suppress(Refused):  # it has ended
        await client.tell_job(followed.job, "cancel")
    if not has_begun:
        text = f"{run}: its job did not begin within {START_S:g} s: {late}"
        raise UserError(text, remedy="start the workers that are missing, and then the experiment again")
    await followed.until(_SETTLED, SETTLE_S)
    info, _ = await client.job(followed.job)
    rows = [row async for row in client.all_metrics(info.id)]
    recoveries = len(await client.recoveries(info.id, RECOVERIES))
    for saved in await client.checkpoints(info.id):
        with suppress(P2PTrainError):  # a result needs none
            await client.delete_checkpoint(saved.id)
    curve = followed.curve(info, rows)
    figures = followed.figures(info, rows, curve) | {"recoveries": recoveries}
    for target in plan.grid.loss_targets:
        reached = (time_s for _, time_s, *_, loss in curve if loss is not None and loss <= target)
        figures[time_to(target)] = next(reached, None)
    if info.state == "done":
        return Result(DONE, info.reason, figures, curve)
    if not in_time:
        return Result("time-limit", f"{late} after {plan.limit_s:g} s", figures, curve)
    reason = followed.trouble or info.reason or info.state
    return Result(failure(reason), reason, figures, curve)


def failure(reason: str) -> str:
    """The state of a run that ended with this error."""
    lower = reason.lower()
    if "memory" in lower or "killed by sigkill" in lower:
        return "out-of-memory"
    return "diverged" if "not finite" in lower else "failed"


_QUEUED, _WAITING, _BEGUN, _OVER, _SETTLED = range(5)
"""Phases of a job: behind another job; for workers; it had a view; no step is to come; all bytes are reported."""


class _Followed:
    """What the seed said of a job and its workers.

    Args:
        offset_s: the seed's wall clock minus the loop's.

    Attributes:
        trouble: why a worker cannot go on; empty: all can. state: of the job, and why.
    """

    def __init__(self, client: SeedClient, run: Run, offset_s: float, show: Show) -> None:
        self.job, self.trouble, self.state = "", "", "waiting"
        self._client, self._run, self._offset_s, self._show = client, run, offset_s, show
        self._info: JobInfo | None = None
        self._peers: dict[str, PeerInfo] = {}
        self._ours, self._active = set[str](), set[str]()  # the job's workers; those that were seen at work
        self._refused: dict[str, int] = {}
        self._memory_bytes = 0
        self._sent = [(0.0, 0)]  # time on the seed's clock, bytes of all workers

    @property
    def phase(self) -> int:
        info = self._info
        if info is None or info.state == "queued":
            return _QUEUED
        if info.state in FINISHED_STATES:
            # Each was idle before, too: so it must have been seen at work, or have sent something, unless it was alone.
            told = self._active >= self._ours or len(self._ours) == 1 or not info.step
            states = {self._peers[peer].state for peer in self._ours if peer in self._peers}
            return _SETTLED if told and states <= {"idle", *ABSENT_STATES} else _OVER
        return _OVER if self.trouble else _WAITING if info.started_at is None else _BEGUN

    async def until(self, phase: int, seconds: float | None) -> bool:
        """Wait for a phase or a later one, so long at most; return whether it came. Raises ``NetworkError``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if self.phase < phase:
                    async for records in self._client.news():
                        for record in records:
                            self.take(record)
                        if self.phase >= phase:
                            break
        return self.phase >= phase

    def take(self, item: Record) -> None:
        match item:
            case JobInfo() if item.id == self.job:
                self._info = item
                self._ours.update(item.members)
                self.state = f"{item.state}{': ' * bool(item.reason)}{item.reason}"
                if not item.step:
                    self._show(self.state)
            case MetricRow() if item.job == self.job:
                loss = "" if item.loss is None else f"  loss {item.loss:.3f}"
                self._show(f"step {item.step}/{self._run.profile.job.steps}{loss}")
            case EventInfo() if item.job == self.job and item.kind == "worker-failed":
                self.trouble = self.trouble or item.text
            case PeerInfo():
                self._take_peer(item)

    def _take_peer(self, peer: PeerInfo) -> None:
        before = self._peers.get(peer.id)
        known = before.sent_bytes if before is not None else 0
        is_here = peer.state not in ABSENT_STATES  # else it says nothing now
        self._peers[peer.id] = peer if is_here else replace(peer, sent_bytes=known)
        if self.job and peer.job == self.job:
            self._ours.add(peer.id)
        if peer.id not in self._ours or not is_here:
            return
        self._memory_bytes = max(self._memory_bytes, peer.memory_bytes)
        self._refused[peer.id] = max(self._refused.get(peer.id, 0), peer.refused)
        if peer.sent_bytes != known:
            more = peer.sent_bytes - known if peer.sent_bytes > known else peer.sent_bytes  # a new process
            self._sent.append((asyncio.get_running_loop().time() + self._offset_s, self._sent[-1][1] + more))
        if peer.state != "idle" or peer.sent_bytes != known:
            self._active.add(peer.id)

    def curve(self, info: JobInfo, rows: Sequence[MetricRow]) -> list[tuple[float | None, ...]]:
        """A row for each step, with the columns ``results.POINT``. Between two reports of a worker, which are half a
        second or more apart, its bytes grow evenly."""
        if not rows:
            return []
        began = info.started_at if info.started_at is not None else rows[0].wall
        times, totals = [began, *(at for at, _ in self._sent[1:])], [total for _, total in self._sent]
        sent = np.interp([row.wall for row in rows], times, totals).tolist()
        sent[-1] = totals[-1]  # the last report is later than the last step
        return [
            (row.step, round(max(row.wall - began, 0.0), 3), row.step * self._run.step_tokens, round(total), row.loss,
             row.val_loss)
            for row, total in zip(rows, sent, strict=True)
        ]  # fmt: skip

    def figures(
        self, info: JobInfo, rows: Sequence[MetricRow], curve: Sequence[Sequence[float | None]]
    ) -> dict[str, float | None]:
        losses = [row.loss for row in rows if row.loss is not None]
        val_losses = [row.val_loss for row in rows if row.val_loss is not None]
        steps, times_ms = rows[-1].step if rows else 0, [row.step_ms for row in rows if row.step_ms]
        computed_ms = [row.compute_ms for row in rows if row.compute_ms]
        duration_s, tokens = (curve[-1][1] if curve else None) or 0.0, steps * self._run.step_tokens
        return {
            "duration_s": duration_s,
            "steps": steps,
            "tokens": tokens,
            "tokens_per_s": round(tokens / duration_s, 1) if duration_s else None,
            "step_ms": round(median(times_ms), 2) if times_ms else None,
            "compute_ms": round(median(computed_ms), 2) if computed_ms else None,
            "sent_bytes": self._sent[-1][1] if self._ours else None,
            "loss": losses[-1] if losses else None,
            "best_loss": min(losses, default=None),
            "val_loss": val_losses[-1] if val_losses else None,
            "best_val_loss": min(val_losses, default=None),
            "memory_bytes": self._memory_bytes or None,
            "rejected": sum(self._refused.values()) + sum(score.excluded for score in info.scores),
            "epsilon": info.epsilon,
        }
