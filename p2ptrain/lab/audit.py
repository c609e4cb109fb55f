"""``p2ptrain jobs audit``: reads the ledger of a job page by page, and checks it from the first step to the last.

``ring.ledger.Audit`` checks the rows; here the sampler's own arithmetic checks that each epoch used every sample
exactly once. Samples of private data cannot be checked: their numbers count in the text of the worker that computed
them. With strategy 'server' a contribution that was lost is left out of its epoch, so epochs are not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.compute.sampling import WindowSampler
from ring.ledger import Audit, LedgerFault, surviving_views
from wire.job_messages import SettingChange
from wire.records import ViewBegan

if TYPE_CHECKING:
    from configs.schema import Profile
    from wire.client import SeedClient


@dataclass
class AuditResult:
    """What an audit found.

    Attributes:
        steps: the newest step on record. first_step: the first one that still has a row of its own.
        epochs, samples: complete epochs, and all samples; 0 if the number of windows is unknown.
        computed: peer id → micro-batches; in a split model all those of its replica. ``total``: of all steps.
        layouts: parts of the model, and the step after which there were so many; more than one if a person changed it.
        staleness: with strategy 'server': peer id → accepted contributions, their mean and their greatest staleness.
        private: each worker has its own text, so samples were not checked.
        fault: the first one; None if there is none.
    """

    first_step: int
    steps: int
    views: int
    lineage: str
    windows: int
    epochs: int = 0
    samples: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    total: int = 0
    layouts: list[tuple[int, int]] = field(default_factory=list)
    private: bool = False
    staleness: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    fault: LedgerFault | None = None


class Epochs:
    """Checks that every window is used once per epoch. Takes global batches in order.

    Args:
        step: steps before the first batch. An epoch that began earlier never counts as complete.
    """

    def __init__(self, sampler: WindowSampler, *, batch: int, step: int) -> None:
        self.complete = self.samples = 0
        self._sampler, self._windows, self._batch = sampler, sampler.windows, batch
        self._used = np.zeros(self._windows, np.bool_)
        self._next = step * batch
        self._whole = self._next % self._windows == 0

    def take(self, steps: int) -> LedgerFault | None:
        """Check the next ``steps`` global batches."""
        last = self._next + steps * self._batch
        while self._next < last:
            epoch, position = divmod(self._next, self._windows)
            count = min(1 << 16, last - self._next, self._windows - position)
            windows = self._sampler.numbered(self._next, count)
            step = self._next // self._batch + 1
            if bool(self._used[windows].any()) or len(np.unique(windows)) != count:
                return LedgerFault(
                    step, "samples", f"a sample was seen twice in epoch {epoch}, at step {step} or soon after"
                )
            self._used[windows] = True
            self._next += count
            self.samples += count
            if position + count == self._windows:  # no window was used twice, so each was used once
                self._used[:] = False
                self.complete += self._whole
                self._whole = True
        return None


async def audit(
    seed: SeedClient,
    job: str,
    profile: Profile,
    progress: Callable[[int, int], None],
    changes: Sequence[SettingChange] = (),
) -> AuditResult:
    """Read and check a job's ledger.

    Args:
        profile: the job's, after ``changes`` of its settings. progress: called with the step and the last step.

    Raises:
        ProtocolError: the seed's answers are not a ledger.
    """
    verdict = None
    # a running job may take back steps that were just read; then read all again
    for _ in range(3):
        views = [replace(view, stages=view.stages or profile.stages) for view in await _views(seed, job)]
        verdict = await _audit_once(seed, job, profile, views, progress)
        newer = await _views(seed, job, views[-1].generation if views else 0)
        if not any(view.step <= verdict.steps for view in newer):
            verdict.fault = verdict.fault or check_changes(profile, changes, views)
            break
    assert verdict is not None
    return verdict


def check_changes(profile: Profile, changes: Sequence[SettingChange], views: Sequence[ViewBegan]) -> LedgerFault | None:
    """Take back the changes of settings, from the newest on, whose values must be those of ``profile`` and whose steps
    those of views."""
    values = {change.key: profile.value(change.key) for change in changes}
    begins = {view.step for view in views}
    for change in reversed(changes):
        if json.loads(change.value) != values[change.key]:
            text = f"{change.key} became {change.value}, but {values[change.key]} was used from there on"
            return LedgerFault(change.step + 1, "setting", text)
        if begins and change.step >= min(begins) and change.step not in begins:
            text = f"{change.key} changed in the middle of a view"
            return LedgerFault(change.step + 1, "setting", text)
        values[change.key] = json.loads(change.before)
    return None


async def _audit_once(
    seed: SeedClient, job: str, profile: Profile, views: list[ViewBegan], progress: Callable[[int, int], None]
) -> AuditResult:
    page = await seed.ledger(job, 0)
    head, private, asynchronous = page.head, profile.data.private, profile.job.strategy == "server"
    windows = 0 if private or asynchronous else page.windows
    if head is None:
        return AuditResult(1, 0, len(views), "", windows, private=private)
    verdict = AuditResult(head.base_step + 1, head.step, len(views), head.lineage, windows, private=private)
    for view in surviving_views(views):
        if view.stages not in (stages for _, stages in verdict.layouts[-1:]):
            verdict.layouts.append((view.step, view.stages))
    checks = Audit(
        base_step=head.base_step,
        base_lineage=head.base_lineage,
        micro_batches=profile.batch.micro_batches,
        views=views,
        server=(profile.server.buffer, profile.server.bound) if asynchronous else None,
    )
    batch = profile.batch.micro_batches * profile.batch.micro_batch_sequences
    sampler = WindowSampler(windows, profile.job.seed) if windows else None
    epochs = Epochs(sampler, batch=batch, step=head.base_step) if sampler else None
    fault = checks.begin_views()
    while fault is None and checks.step < head.step:
        before = checks.step
        for row in (row for run in page.runs for row in run.rows()):
            if row.step <= head.step and (fault := checks.take(row)):
                break
        if fault is None and epochs is not None:
            fault = epochs.take(checks.step - before)
        if fault is None and checks.step == before:
            break  # there are no more rows
        progress(checks.step, head.step)
        if fault is None and checks.step < head.step:
            page = await seed.ledger(job, checks.step)
    verdict.fault = fault or checks.finish(head.step, head.lineage)
    verdict.computed, verdict.total = dict(checks.computed), checks.total
    verdict.staleness = {
        peer_id: (found.total(), sum(steps * count for steps, count in found.items()) / found.total(), max(found))
        for peer_id, found in checks.staleness.items()
    }
    if epochs is not None:
        verdict.epochs, verdict.samples = epochs.complete, epochs.samples
    return verdict


async def _views(seed: SeedClient, job: str, after: int = 0) -> list[ViewBegan]:
    found: list[ViewBegan] = []
    while page := await seed.views(job, found[-1].generation if found else after):
        found += page
    return found
