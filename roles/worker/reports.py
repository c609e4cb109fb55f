"""Reports of one job's member: its state, steps and ledger rows to the seed; progress and its stage to people."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from statistics import median_low

from configs.schema import Profile
from p2ptrain.core.checkpoints import Meta
from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.core.texts import shortened
from p2ptrain.core.training import Applied, FilePlan
from ring.job_member import REASON_CHARS, JobMember, MemberPhase
from ring.session import RingSession
from ring.token import next_lineage
from ring.view import View
from roles.engine import Engine, Stage
from roles.strategies.interface import StageLoad
from roles.worker.context import Context
from roles.worker.early_stop import EarlyStop
from roles.worker.heal import FetchResult
from wire.chain_messages import HeldPart
from wire.job_messages import LedgerRow, LedgerRows, Report, StepMetrics
from wire.messages import Message
from wire.records import LedgerHead, LedgerPage, runs_of
from wire.schema import instance_untrusted

ROWS = 4096
"""Newest rows kept. A seed that is away for more steps misses the older ones."""
BATCH_BYTES = 32 << 10
"""Size of one message: half the limit of a control frame."""
LEDGER_FILE = "ledger.json"
"""File of a checkpoint with its writer's rows: after a restart the worker tells the seed what the seed lacks."""
LEDGER_FILE_BYTES = 2 << 20
METRICS_FILE, METRICS_FILE_BYTES = "metrics.json", 1 << 20
"""The same with the metrics of its newest steps."""


class WorkerLedger:
    """One job's ledger rows, in order and without a gap, each with the lineage before it."""

    def __init__(self, job: str, send: Callable[[LedgerRows], None]) -> None:
        self._job, self._send = job, send
        self._rows: deque[tuple[str, LedgerRow]] = deque(maxlen=ROWS)

    def add(self, row: LedgerRow, lineage: str) -> None:
        self.stands_at(row.step - 1, lineage)
        self._rows.append((lineage, row))

    def stands_at(self, applied: int, lineage: str) -> None:
        while self._rows and self._rows[-1][1].step > applied:
            self._rows.pop()
        if self._rows:
            before, row = self._rows[-1]
            if row.step != applied or next_lineage(before, row.digest) != lineage:
                self._rows.clear()

    def first_row(self, applied: int, lineage: str) -> int:
        """The oldest step whose row is here, of those that lead to this state; ``applied + 1``: there is none."""
        self.stands_at(applied, lineage)
        return self._rows[0][1].step if self._rows else applied + 1

    def files(self) -> list[FilePlan]:
        """The rows as a file of a checkpoint of the newest step: the newest that fit into ``LEDGER_FILE_BYTES``."""
        return [FilePlan(LEDGER_FILE, (self.since(-1),))] if self._rows else []

    def since(self, step: int) -> bytes:
        """The same of the rows after ``step``; empty if there are none."""
        rows = [(lineage, row) for lineage, row in self._rows if row.step > step]
        if not rows:
            return b""
        # At most, with a head of its own:
        row_bytes = 192 + max(3 * len(row.counts) + 2 * len(row.made_of) for _, row in rows)
        kept = rows[-(LEDGER_FILE_BYTES // row_bytes) :]
        (before, first), (lineage, last) = kept[0], kept[-1]
        head = LedgerHead(first.step - 1, before, last.step, next_lineage(lineage, last.digest))
        page = LedgerPage(head, runs_of(row for _, row in kept))
        return json.dumps(page.to_map()).encode()

    def made_of(self) -> list[bytes]:
        return [row.made_of for _, row in self._rows]

    def loaded_untrusted(self, applied: int, lineage: str, kept: bytes) -> None:
        """Go on from a loaded state. Drops rows that do not lead to it, and a file that ``files`` did not make.

        ``kept``: content of the file ``LEDGER_FILE`` of the state's checkpoint; empty if there is none.
        """
        self.stands_at(applied, lineage)
        if not self._rows:
            self.take_up_untrusted(applied, lineage, kept)

    def take_up_untrusted(self, applied: int, lineage: str, kept: bytes) -> None:
        """Add the rows that lead on to a state; else as ``loaded_untrusted``."""
        try:
            page = LedgerPage.from_map_untrusted(json.loads(kept))
        except (ValueError, RecursionError, ProtocolError):
            return
        before = page.head.base_lineage if page.head else ""
        for row in (row for run in page.runs for row in run.rows()) if before else ():
            self.add(row, before)
            before = next_lineage(before, row.digest)
        self.stands_at(applied, lineage)

    def tell_last(self) -> None:
        if self._rows:
            lineage, row = self._rows[-1]
            self._send(LedgerRows(self._job, lineage, [row]))

    def tell_beyond(self, step: int) -> None:
        """Send all rows after ``step``, in messages of bounded size."""
        rows = [(lineage, row) for lineage, row in self._rows if row.step > step]
        # Keys, numbers and the digest of a row take at most 112 bytes.
        row_bytes = 112 + max((len(row.counts) + len(row.made_of) for _, row in rows), default=0)
        batch_rows = max(1, BATCH_BYTES // row_bytes)
        for start in range(0, len(rows), batch_rows):
            batch = rows[start : start + batch_rows]
            self._send(LedgerRows(self._job, batch[0][0], [row for _, row in batch]))


class StepClock:
    """Adds up the phases of the current step, and measures how long a micro-batch takes here."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spent: dict[str, float] = {}
        self._units_s: deque[float] = deque(maxlen=5)
        self.longest_s = 0.0
        self.last_ms: dict[str, float] = {}
        self.begin_view()

    @property
    def unit_us(self) -> int:
        """Microseconds per micro-batch: the median of the last measurements; 0 before the first one."""
        return max(1, round(median_low(self._units_s) * 1e6)) if self._units_s else 0

    def computed(self, seconds: float, count: int) -> None:
        if count:
            self._units_s.append(seconds / count)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + self._now() - start

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def exchanged(self, *, exposed_s: float, communicating_s: float) -> None:
        """Record how long the gradients were on their way, and how much of that came after the own share."""
        self._hidden_s = max(0.0, communicating_s - exposed_s)

    def begin_view(self, *, formed_s: float | None = None) -> None:
        """Start measuring anew: a step that spans two views is not measured. ``formed_s``: how long the ring took to
        form; reported with the view's first step."""
        self._formed_s = formed_s
        self._spent.clear()
        self._waited_s = 0.0
        self._hidden_s = 0.0
        self._began = self._now()

    def step_done(self) -> dict[str, float]:
        """Return the times of the step just applied, in milliseconds.

        ``step_ms``; ``compute_ms``; ``communicate_ms`` and ``wait_ms``: the ring's cost after the computing;
        ``hidden_ms``: its cost beside the computing, not part of ``step_ms``; ``form_ms``, in a view's first step: how
        long the ring took to form.
        """
        now = self._now()
        step_s = now - self._began
        communicate_s = self._spent.get("communicate", 0.0)
        wait_s = min(self._waited_s, communicate_s)
        self.last_ms = {
            "step_ms": step_s * 1e3,
            "compute_ms": self._spent.get("compute", 0.0) * 1e3,
            "communicate_ms": (communicate_s - wait_s) * 1e3,
            "wait_ms": wait_s * 1e3,
            "hidden_ms": self._hidden_s * 1e3,
        }
        if self._formed_s is not None:
            self.last_ms["form_ms"] = self._formed_s * 1e3
        self.longest_s = max(self.longest_s, step_s)
        self.begin_view()
        return self.last_ms


KEPT = 256
"""Newest steps that a member remembers."""


class StepReporter:
    """Reports steps, and remembers the newest: rank 0, or the seed, may die before a reported one is recorded.

    ``send`` sends to the seed. ``on_step`` shows (applied, total, values) to the person.
    """

    def __init__(
        self,
        *,
        job: str,
        steps_total: int,
        send: Callable[[Message], None],
        on_step: Callable[[int, int, dict[str, float]], None],
    ) -> None:
        self.steps_total = steps_total
        self._job = job
        self._send, self._on_step = send, on_step
        self._last: Applied | None = None
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT)  # steps and their values

    def forget(self) -> None:
        self._last = None
        self._rows.clear()

    def files(self) -> list[FilePlan]:
        rows = [asdict(StepMetrics(self._job, 0, step, values)) for step, values in self._rows]
        content = json.dumps(rows).encode()
        return [FilePlan(METRICS_FILE, (content,))] if rows and len(content) <= METRICS_FILE_BYTES else []

    def loaded_untrusted(self, applied: int, kept: bytes) -> None:
        """Go on from a loaded state. ``kept``: content of the file ``METRICS_FILE`` of its checkpoint; one that
        ``files`` did not make is dropped."""
        self.forget()
        try:
            rows = [instance_untrusted(StepMetrics, row) for row in json.loads(kept)]
        except (ValueError, TypeError, RecursionError, ProtocolError):
            return
        self._rows.extend((row.step, row.values) for row in rows if row.job == self._job and row.step <= applied)

    def applied(self, last: Applied) -> None:
        self._last = last
        values = {"loss": last.loss, "lr": last.lr, "grad_norm": last.grad_norm}
        if math.isnan(last.loss):  # withheld (``compute.local``)
            del values["loss"]
        self._rows.append((last.step, values))

    def loss(self, applied: int) -> float | None:
        return self._rows[-1][1].get("loss") if self._last is not None and self._last.step == applied else None

    def tell(self, applied: int, view: View, rank: int, values: dict[str, float]) -> None:
        """Report step ``applied`` when it is over. ``values`` are added to the engine's own."""
        if self._last is None or self._last.step != applied:
            return  # this member was healed to this step and did not compute it
        row = self._rows[-1][1]
        row |= values
        if rank == 0:
            self._send_row(applied, row, view)
        self._on_step(applied, self.steps_total, row)

    def tell_beyond(self, view: View, last: int) -> None:
        """Report the steps up to ``last`` that the seed lacked when the view was minted. All members do: rank 0 may be
        new, or lost. The seed ignores steps that it has."""
        for step, values in self._rows:
            if view.ledger_step < step <= last:
                self._send_row(step, values, view)

    def _send_row(self, step: int, values: dict[str, float], view: View) -> None:
        self._send(StepMetrics(self._job, view.generation, step, values))


_STATUSES = {MemberPhase.HELD: "held", MemberPhase.DONE: "done", MemberPhase.FAILED: "failed"}


def describe_view(view: View, peer_id: str) -> str:
    names = " → ".join(member.name for member in view.members)
    rank = view.rank_of(peer_id)
    share = view.members[rank].count if rank is not None else 0
    return (
        f"trains from step {view.step}: rank {rank} of {view.size}, {share} micro-batches a step, "
        f"{names} (generation {view.generation})"
    )


class Reports:
    """All reports of one job. ``engine``: None before the model is built, and after the job."""

    def __init__(
        self, context: Context, core: JobMember, *, job: str, stage: Stage, profile: Profile, early: EarlyStop
    ) -> None:
        self.engine: Engine | None = None
        self.clock = StepClock(context.world.clock.now)
        self._context, self._core = context, core
        self._job, self._stage, self._profile, self._early = job, stage, profile, early
        self.ledger = WorkerLedger(job, context.send)
        self.steps = StepReporter(job=job, steps_total=profile.job.steps, send=context.send, on_step=context.on_step)
        self._timing: dict[str, float] = {}
        self._validated: tuple[int, float | None] = 0, None  # step and loss
        self._tokens_per_s = 0.0  # of this member's replica, in the newest step
        self.stage_load: StageLoad | None = None  # as ``Work.load``
        self._fetch: FetchResult | None = None  # result of the last heal
        self._is_done_reported = False
        self.unsaved: Callable[[], str] = str  # as ``Report.unsaved``
        self._trouble: Report | None = None  # the last report; sent again to a seed that was away

    # ---------------------------------------------------------------------------------------------- reports to the seed

    def send(self, report: Report) -> None:
        report = replace(report, first_row=self.ledger.first_row(report.applied, report.lineage))
        if report.status == "done":
            unsaved = shortened(self.unsaved(), REASON_CHARS)
            report = replace(report, reason=self._stopped_early(), unsaved=unsaved)
        if self.engine is not None:
            report = replace(
                report,
                corpus=self.engine.data.digest,
                reduce_bytes=self.engine.reduce_buffer.nbytes,
                windows=self.engine.data.windows,
                unit_us=self.clock.unit_us,
            )
        self._context.send(report)

    def announce(self, report: Report) -> None:
        self._trouble = report
        if report.status == "healed" and self._fetch is not None:
            report = self._fetch.add_to(report)
        if report.status == "done" and self._rank():
            self.tell_rows()  # no view follows in which a missing row of rank 0 would be sent
        self.send(report)
        if report.status == "done" and not self._is_done_reported:  # once: a returning seed asks again
            self._is_done_reported = True
            every = "all " * (report.applied >= self._core.steps_total)
            how = self._stopped_early() or f"{every}{report.applied:,} steps"
            done = f"the job is done: {how}; waits for a new job"
            self._context.notify_here("info", "done", f"trained: {how}; not saved here" if self.unsaved() else done)
        if report.status == "broken":
            self._context.notify("warning", "ring-broken", f"step {report.applied + 1} aborted: {report.reason}")

    def report_state(self, *, follows: bool, level: bool) -> None:
        """Report this member's state to a seed that was away. ``follows``: it fetches the state beside the ring.
        ``level``: it follows and is level with the ring."""
        core, view, phase = self._core, self._core.view, self._core.phase
        is_idle = phase is MemberPhase.IDLE
        if phase is MemberPhase.EMPTY or (is_idle and not level and (core.torn or follows)):
            return  # the report follows when the state is loaded, complete, or level with the ring's
        status = _STATUSES.get(phase, "training")
        if is_idle:
            status = "following" if level else "broken" if view and not core.reloaded else "ready"
        trouble = self._trouble if status in ("broken", "failed") else None
        words = {name: getattr(trouble, name) for name in ("suspect", "reason", "cause", "beside")} if trouble else {}
        self.send(core.report(status, **words))
        if view is not None and (not core.running or self._rank() == 0):
            self.tell_rows()  # messages sent while the seed was away are lost

    def report_hang(self, text: str, *, first: bool) -> None:
        self.send(self._core.report("hung", reason=text))
        if first:
            self._context.notify("warning", "hung", f"{text}; restart this worker if it does not end")

    def report_failure(self, problem: P2PTrainError) -> str:
        text = problem.with_remedy
        self._context.notify_here("error", "worker-failed", text)  # the seed hears it in a report
        if self._profile.data.private:  # it may quote the text, or name files
            return "the terminal of this worker says why: its data is private"
        return text

    def _stopped_early(self) -> str:
        return self._early.reason if self._core.applied < self._core.steps_total else ""

    def _rank(self) -> int | None:
        return self._core.view.rank_of(self._context.peer_id) if self._core.view is not None else None

    # -------------------------------------------------------------------------------------------------------- its state

    def files(self) -> list[FilePlan]:
        """What a checkpoint of the newest step has beside the state."""
        # Times differ between members, so one part of a split model has them: the files of all parts are joined.
        return self.ledger.files() + (self.steps.files() if self._stage.index == 0 else [])

    def resume_from(self, applied: int, lineage: str, rows: bytes, metrics: bytes, *, wanted: int) -> None:
        if self._stage.split and applied < wanted:
            text = f"no checkpoint of step {wanted} of {self._stage} is here: starting from that of step {applied}"
            self._context.notify("warning", "no-checkpoint", text)
        self.steps.loaded_untrusted(applied, metrics)
        self.ledger.loaded_untrusted(applied, lineage, rows)

    def report_heal(self, view: View, fetch: FetchResult) -> None:
        self._fetch = fetch
        if not fetch.steps:
            self.steps.forget()
        what = f"the missing steps ({fetch.steps} in all) up to step" if fetch.steps else "the state of step"
        self._context.notify("info", "healed", f"fetched {what} {view.step}: {fetch}")

    def meta(self) -> Meta:
        core, (validated, val_loss) = self._core, self._validated
        assert self.engine is not None
        return {
            "job": self._job,
            "lineage": core.lineage,
            "square_sum": core.square_sum,
            "generation": core.view.generation if core.view else 0,
            "corpus": self.engine.data.digest,
            "sequence_tokens": self._profile.data.sequence_tokens,
            "val_loss": val_loss if validated == core.applied else None,
            "loss": self.steps.loss(core.applied),
            **self._early.meta(),
            **({"stage": self._stage.index, "stages": self._stage.count} if self._stage.split else {}),
        }

    # -------------------------------------------------------------------------------------------------------- its steps

    def begin_view(self, view: View, *, formed_s: float) -> None:
        self.clock.begin_view(formed_s=formed_s)
        self._context.notify_here("info", "view", describe_view(view, self._context.peer_id))
        self.ledger.tell_beyond(view.ledger_step)

    def report_applied(self, step: int, scores: dict[str, float], *, redone: bool) -> None:
        """``scores``: see ``Strategy``. Those of a redone step are of the ranks of another view."""
        if redone:
            self._context.notify("info", "redo", f"applied step {step + 1} from the gradients summed before the break")
        else:
            self._timing = self.clock.step_done() | scores
            self._context.world.probe.event("step-applied", step=step, scores=scores)

    def add_row(self, row: LedgerRow, lineage: str) -> None:
        self.ledger.add(row, lineage)
        view = self._core.view
        if view is not None and view.generation == row.generation and self._rank() == 0:
            self.ledger.tell_last()

    def tell_rows(self, *, restored: bool = False) -> None:
        view = self._core.view
        if view is not None:
            self.ledger.tell_beyond(0 if restored else view.ledger_step)
            self.steps.tell_beyond(view, self._core.applied)

    def report_step(self, applied: int, session: RingSession, val_loss: float | None) -> None:
        """Report the committed step ``applied`` at the boundary after it."""
        assert self.engine is not None
        self._validated = applied, val_loss
        timing, self._timing = self._timing, {}
        values = {"members": float(session.size), **timing}
        if timing.get("step_ms"):
            micro_batches = self._profile.batch.micro_batches
            values["tokens_per_s"] = micro_batches * self.engine.data.tokens_per_micro_batch / timing["step_ms"] * 1e3
            share = session.view.replica(session.rank)[0].count / micro_batches
            self._tokens_per_s = share * values["tokens_per_s"]
        if val_loss is not None:
            values["val_loss"] = val_loss
        values |= self._early.spent_privacy()
        self.steps.tell(applied, session.view, session.rank, values)

    def list_held_parts(self, *, state_bytes: int, limit_bytes: int) -> list[HeldPart]:
        load = self.stage_load
        if load is None or self.engine is None:
            return []
        return [
            HeldPart(
                part=f"{self._job}.{self._stage.index}",
                model=self._job,
                name=self._job,
                start=load.start,
                stop=load.stop,
                layers=load.layers,
                dtype=self._profile.pipeline.activations,
                weights_bytes=state_bytes + self.engine.reduce_buffer.nbytes,
                cache_bytes=0,
                limit_bytes=limit_bytes,
                sessions=0,
                compute_ms=1e3 * load.micro_batch_s,
                busy=load.busy,
                tokens_per_s=self._tokens_per_s,
                out_position_bytes=load.token_bytes,
                next=load.next,
            )
        ]
