"""``p2ptrain jobs audit``: the ledger of a job, read page by page and checked from the first step to the last.

What is checked: every step stands in the surviving course exactly once; the shares of each cover the global batch; the
digests chain from each view's lineage to the next one's; each step was computed by the view that ran then; and with the
sampler's own arithmetic, that no sample was seen twice in an epoch and none was left out. Nothing of it is taken from
the job's progress, metrics or events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.core.errors import ProtocolError
from ring.ledger import DIGEST_BYTES, MAX_MEMBERS, Audit, Began, Fault, Head, pack_counts
from ring.token import is_lineage
from wire.job_messages import LedgerRow

if TYPE_CHECKING:
    from configs.schema import Profile

SAMPLES_AT_ONCE = 1 << 16
ATTEMPTS = 3
"""A job that runs may take steps back while they are read, or its ledger begin anew: then all is read again."""

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class Verdict:
    """What an audit found.

    Attributes:
        steps: the newest step on record. first: the first one that still has a row of its own.
        epochs, samples: complete ones, and all; 0 where the number of windows is not known.
        computed: peer id → micro-batches; of a split model, those of its crew, each of which it computed a stage of.
        stages: of the model.
        fault: the first one; None where all is well.
    """

    first: int
    steps: int
    views: int
    lineage: str
    windows: int
    epochs: int = 0
    samples: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    stages: int = 1
    fault: Fault | None = None

    def to_map(self) -> dict[str, Any]:
        fault = {"step": self.fault.step, "kind": self.fault.kind, "text": self.fault.text} if self.fault else None
        return {
            "ok": self.fault is None,
            "first_step": self.first,
            "steps": self.steps,
            "views": self.views,
            "lineage": self.lineage,
            "windows": self.windows,
            "epochs": self.epochs,
            "samples": self.samples,
            "computed": self.computed,
            "stages": self.stages,
            "fault": fault,
        }


class Epochs:
    """Were all windows read once an epoch? Takes global batches in order.

    Args:
        step: steps before the first batch that will come: an epoch that began earlier is not judged complete.
    """

    def __init__(self, *, windows: int, seed: int, batch: int, step: int) -> None:
        self.complete = self.samples = 0
        self._windows, self._batch = windows, batch
        self._sampler = WindowSampler(windows=windows, seed=seed, micro_batches=1, sequences=batch)
        self._seen = np.zeros(windows, np.bool_)
        self._next = step * batch
        self._whole = self._next % windows == 0

    def take(self, steps: int) -> Fault | None:
        """The next ``steps`` global batches."""
        last = self._next + steps * self._batch
        while self._next < last:
            epoch, position = divmod(self._next, self._windows)
            count = min(SAMPLES_AT_ONCE, last - self._next, self._windows - position)
            windows = self._sampler.numbered(self._next, count)
            step = self._next // self._batch + 1
            if bool(self._seen[windows].any()) or len(np.unique(windows)) != count:
                return Fault(step, "samples", f"a sample was seen twice in epoch {epoch}, at step {step} or soon after")
            self._seen[windows] = True
            self._next += count
            self.samples += count
            if position + count == self._windows and (fault := self._epoch_ends(epoch, step)):
                return fault
        return None

    def _epoch_ends(self, epoch: int, step: int) -> Fault | None:
        missing = int(self._windows - np.count_nonzero(self._seen))
        self._seen[:] = False
        whole, self._whole = self._whole, True
        if whole and missing:
            return Fault(step, "samples", f"epoch {epoch} left out {missing} of {self._windows} samples")
        self.complete += whole
        return None


async def audit(ask: Ask, job: str, profile: Profile, progress: Callable[[int, int], None]) -> Verdict:
    """Read and check a job's ledger.

    Args:
        ask: (method, parameters) → the seed's answer. profile: the job's. progress: (step, of).

    Raises:
        ProtocolError: the seed's answers are no ledger.
    """
    verdict = None
    for _ in range(ATTEMPTS):
        views = [view async for view in _views(ask, job)]
        verdict = await _audit_once(ask, job, profile, views, progress)
        newer = [view async for view in _views(ask, job, views[-1].generation if views else 0)]
        if not any(view.step <= verdict.steps for view in newer):
            break
    assert verdict is not None
    return verdict


async def _audit_once(
    ask: Ask, job: str, profile: Profile, views: list[Began], progress: Callable[[int, int], None]
) -> Verdict:
    page = await _page(ask, job, 0)
    head, windows = page.head, page.windows
    if head is None:
        return Verdict(1, 0, len(views), "", windows)
    verdict = Verdict(head.base_step + 1, head.step, len(views), head.lineage, windows, stages=profile.stages)
    checks = Audit(
        base_step=head.base_step,
        base_lineage=head.base_lineage,
        micro_batches=profile.batch.micro_batches,
        views=views,
        stages=profile.stages,
    )
    batch = profile.batch.micro_batches * profile.batch.micro_batch_sequences
    epochs = Epochs(windows=windows, seed=profile.job.seed, batch=batch, step=head.base_step) if windows else None
    fault = checks.begin()
    while fault is None and checks.step < head.step:
        before = checks.step
        for row in page.rows:
            if row.step <= head.step and (fault := checks.take(row)):
                break
        if fault is None and epochs is not None:
            fault = epochs.take(checks.step - before)
        if fault is None and checks.step == before:
            break  # nothing further stands there
        progress(checks.step, head.step)
        if fault is None and checks.step < head.step:
            page = await _page(ask, job, checks.step)
    verdict.fault = fault or checks.finish(head.step, head.lineage)
    verdict.computed = dict(checks.computed)
    if epochs is not None:
        verdict.epochs, verdict.samples = epochs.complete, epochs.samples
    return verdict


# ------------------------------------------------------------------------------------------- what the seed answers


@dataclass(frozen=True, slots=True)
class _Page:
    head: Head | None
    rows: list[LedgerRow]
    windows: int


async def _page(ask: Ask, job: str, after_step: int) -> _Page:
    return page_untrusted(await ask("jobs.ledger", {"job": job, "after_step": after_step}))


def page_untrusted(answer: dict[str, Any]) -> _Page:
    """What a seed answers to ``jobs.ledger``. Raises ``ProtocolError``."""
    head, runs, windows = answer.get("head"), answer.get("runs"), answer.get("windows")
    if not isinstance(runs, list) or type(windows) is not int or not 0 <= windows < 2**40:
        raise ProtocolError("the answer holds no ledger")
    rows = [row for run in runs for row in _rows_untrusted(run)]
    return _Page(None if head is None else _head_untrusted(head), rows, windows)


def _head_untrusted(head: object) -> Head:
    if not isinstance(head, dict):
        raise ProtocolError("a ledger's head is none")
    steps = head.get("base_step"), head.get("step")
    lineages = head.get("base_lineage"), head.get("lineage")
    if not all(type(step) is int and 0 <= step < 2**53 for step in steps):
        raise ProtocolError("a ledger of steps that cannot be")
    if not all(isinstance(lineage, str) and is_lineage(lineage) for lineage in lineages):
        raise ProtocolError("a ledger of lineages that are none")
    return Head(steps[0], lineages[0], steps[1], lineages[1])  # type: ignore[arg-type]


def _rows_untrusted(run: object) -> Iterator[LedgerRow]:
    if not isinstance(run, dict):
        raise ProtocolError("a run of steps is none")
    first, generation, counts, text = (run.get(key) for key in ("first", "generation", "counts", "digests"))
    if type(first) is not int or type(generation) is not int or not 1 <= first < 2**53 or not 0 < generation < 2**53:
        raise ProtocolError("a run of steps that cannot be")
    if not isinstance(counts, list) or not 1 <= len(counts) <= MAX_MEMBERS:
        raise ProtocolError("a run of steps without shares")
    if not all(type(count) is int and 0 <= count < 2**32 for count in counts):
        raise ProtocolError("a run of steps with shares that cannot be")
    try:
        digests = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digests = b""
    if not digests or len(digests) % DIGEST_BYTES:
        raise ProtocolError("a run of steps without digests")
    packed = pack_counts(counts)
    for number in range(len(digests) // DIGEST_BYTES):
        digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        yield LedgerRow(first + number, generation, digest, packed)


async def _views(ask: Ask, job: str, after: int = 0) -> AsyncIterator[Began]:
    while True:
        page = views_untrusted(await ask("jobs.views", {"job": job, "after_generation": after}), after)
        for view in page:
            yield view
        if not page:
            return
        after = page[-1].generation


def views_untrusted(answer: dict[str, Any], after: int) -> list[Began]:
    """What a seed answers to ``jobs.views``: views of growing generations, all after ``after``. Raises
    ``ProtocolError``."""
    views = answer.get("views")
    if not isinstance(views, list):
        raise ProtocolError("the answer holds no views")
    found: list[Began] = []
    for item in views:
        if not isinstance(item, dict):
            raise ProtocolError("a view is none")
        generation, step, lineage, members = (item.get(key) for key in ("generation", "step", "lineage", "members"))
        if type(generation) is not int or type(step) is not int or not after < generation < 2**53 or step < 0:
            raise ProtocolError("views that are not in order")
        if not isinstance(lineage, str) or not is_lineage(lineage) or not isinstance(members, list):
            raise ProtocolError("a view without a lineage or members")
        if not all(isinstance(member, str) for member in members):
            raise ProtocolError("a view whose members are none")
        found.append(Began(generation, step, lineage, tuple(members)))
        after = generation
    return found
