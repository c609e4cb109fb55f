"""What one job's member tells of itself: the seed, where it stands, what its steps were and who computed them; people,
what it does and which stage it trains. It decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

from configs.schema import Profile
from p2ptrain.core.checkpoints import Meta
from p2ptrain.core.errors import P2PTrainError
from ring.session import RingSession
from ring.transaction import Phase, Transaction
from ring.view import View
from roles.engine import Applied, Engine, Stage
from roles.strategies import Strategy
from roles.worker.context import Context
from roles.worker.heal import Fetched
from roles.worker.ledger import Ledger
from roles.worker.metrics import StepTeller, described, held
from roles.worker.timing import StepClock, UnitTime
from wire.chain_messages import HeldPart
from wire.job_messages import LedgerRow, Report


class Reports:
    """One job's.

    Args:
        core: what it tells of.

    Attributes:
        engine: None before the model is built, and after the job.
        clock: where the time of a step goes. unit: how long a micro-batch takes here.
    """

    def __init__(self, around: Context, core: Transaction, *, job: str, stage: Stage, profile: Profile) -> None:
        self.engine: Engine | None = None
        self.clock = StepClock(around.world.clock.now)
        self.unit = UnitTime()
        self._around, self._core = around, core
        self._job, self._stage, self._profile = job, stage, profile
        self._ledger = Ledger(job, around.say)
        self._steps = StepTeller(job=job, steps_total=profile.job.steps, say=around.say, on_step=around.on_step)
        self._timing: dict[str, float] = {}
        self._tokens_per_s = 0.0  # of this member's crew, in the newest step
        self._fetched: Fetched | None = None  # by the last heal
        self._done_told = False
        self._trouble: Report | None = None  # the last report, for a seed that was away when it was made

    # -------------------------------------------------------------------------------------------------- where it stands

    def send(self, report: Report) -> None:
        """To the seed, with what it is to know of the engine."""
        if self.engine is not None:
            report = replace(
                report,
                corpus=self.engine.corpus_digest,
                reduce_bytes=self.engine.reduce_buffer.nbytes,
                windows=self.engine.windows,
                unit_us=self.unit.us,
            )
        self._around.say(report)

    def say(self, report: Report) -> None:
        """What the core says as it stops, or was healed."""
        self._trouble = report
        if report.status == "healed" and self._fetched is not None:
            report = self._fetched.told_in(report)
        if report.status == "done" and self._rank():
            self.tell_ledger()  # no view follows in which it would be, had rank 0 not told
        self.send(report)
        if report.status == "done" and not self._done_told:  # (a seed that was away may ask again)
            self._done_told = True
            self._around.tell("info", "done", f"the job is done: all {report.applied:,} steps; waits for another one")
        if report.status == "broken":
            self._around.notify("warning", "ring-broken", f"step {report.applied + 1} aborted: {report.reason}")

    def seed_is_back(self, *, follows: bool, level: bool) -> None:
        """Tell a seed that was away where this member stands.

        Args:
            follows: it fetches the state beside the ring. level: and is level with it.
        """
        core, view = self._core, self._core.view
        match core.phase:
            case Phase.EMPTY:
                return  # the report follows when the state is loaded
            case Phase.IDLE if level:
                status = "following"
            case Phase.IDLE if core.torn or follows:
                return  # the report follows when the state is whole, or level with the ring's
            case Phase.HELD:
                status = "held"
            case Phase.DONE:
                status = "done"
            case Phase.IDLE if view and not core.anew:
                status = "broken"
            case Phase.IDLE:
                status = "ready"
            case Phase.FAILED:
                status = "failed"
            case _:
                status = "training"
        trouble = self._trouble if status in ("broken", "failed") else None
        words = {name: getattr(trouble, name) for name in ("suspect", "reason", "cause", "beside")} if trouble else {}
        self.send(core.report(status, **words))
        if view is not None and (not core.running or self._rank() == 0):
            self.tell_ledger()  # what was told while it was away is lost

    def cannot_go_on(self, problem: P2PTrainError) -> str:
        """Tell people why; the reason."""
        text = f"{problem.message}; {problem.remedy}" if problem.remedy else problem.message
        self._around.notify("error", "worker-failed", text)
        return text

    def _rank(self) -> int | None:
        return self._core.view.rank_of(self._around.peer_id) if self._core.view is not None else None

    # -------------------------------------------------------------------------------------------------------- its state

    def loaded(self, applied: int, lineage: str, *, wanted: int) -> None:
        """The state is that of a checkpoint, or that of step 0. ``wanted``: the step that it should be of; -1: any."""
        if self._stage.split and applied < wanted:
            text = f"no checkpoint of step {wanted} of {self._stage} is here: begins with that of step {applied}"
            self._around.notify("warning", "no-checkpoint", text)
        self.forget_steps()
        self.stands_at(applied, lineage)

    def stands_at(self, applied: int, lineage: str) -> None:
        """The state is that one now, by another way than a step."""
        self._ledger.stands_at(applied, lineage)

    def forget_steps(self) -> None:
        """The state was replaced: what the newest steps were is no news of it."""
        self._steps.forget()

    def healed(self, view: View, done: Fetched) -> None:
        """The state of the view's start was fetched."""
        self._fetched = done
        if not done.steps:
            self.forget_steps()
        what = f"what it lacked (steps: {done.steps}) up to step" if done.steps else "the state of step"
        self._around.notify("info", "healed", f"fetched {what} {view.step}: {done}")

    def meta(self, val_loss: float | None) -> Meta:
        """What a checkpoint of the present state says of itself."""
        core = self._core
        assert self.engine is not None
        return {
            "job": self._job,
            "lineage": core.lineage,
            "square_sum": core.square_sum,
            "generation": core.view.generation if core.view else 0,
            "corpus": self.engine.corpus_digest,
            "val_loss": val_loss,
            "loss": self._steps.loss(core.applied),
            **({"stage": self._stage.index, "stages": self._stage.count} if self._stage.split else {}),
        }

    # -------------------------------------------------------------------------------------------------------- its steps

    def view_began(self, view: View, *, formed_s: float) -> None:
        self.clock.view_began(formed_s=formed_s)
        self._around.tell("info", "view", described(view, self._around.peer_id))
        self._ledger.tell_beyond(view.ledger_step)

    def step_begins(self, session: RingSession) -> None:
        self._steps.tell_what_was_cut_off(session.view, session.rank)

    def applied(self, last: Applied) -> None:
        self._steps.applied(last)

    def step_done(self, step: int, *, redone: bool) -> None:
        """``step`` is counted from 0."""
        if redone:
            self._around.notify("info", "redo", f"redid step {step + 1} from the redo buffer")
        else:
            self._timing = self.clock.step_done()

    def recorded(self, row: LedgerRow, lineage: str) -> None:
        """Who computed the step that was applied."""
        self._ledger.add(row, lineage)
        view = self._core.view
        if view is not None and view.generation == row.generation and self._rank() == 0:
            self._ledger.tell_last()

    def tell_ledger(self, *, restored: bool = False) -> None:
        """Tell the seed who computed the steps that it did not know of as this view began; all, if it was restored."""
        if self._core.view is not None:
            self._ledger.tell_beyond(0 if restored else self._core.view.ledger_step)

    def step_over(self, applied: int, session: RingSession, val_loss: float | None) -> None:
        """Tell of step ``applied``, which all have confirmed."""
        assert self.engine is not None
        timing, self._timing = self._timing, {}
        values = {"members": float(session.size), **timing}
        if timing.get("step_ms"):
            micro_batches = self._profile.batch.micro_batches
            values["tokens_per_s"] = micro_batches * self.engine.tokens_per_micro_batch / timing["step_ms"] * 1e3
            share = session.view.crew(session.rank)[0].count / micro_batches
            self._tokens_per_s = share * values["tokens_per_s"]
        if val_loss is not None:
            values["val_loss"] = val_loss
        self._steps.tell(applied, session.view, session.rank, values)

    def held(self, strategy: Strategy | None, *, state_bytes: int, limit_bytes: int) -> list[HeldPart]:
        """The stage of a pipeline that trains here, for people, who see it beside what this worker gives to parts."""
        load = strategy.stage_load() if strategy is not None and self.engine is not None else None
        if load is None:
            return []
        assert self.engine is not None
        return [
            held(
                self._job,
                self._stage,
                load,
                dtype=self._profile.pipeline.activations,
                state_bytes=state_bytes + self.engine.reduce_buffer.nbytes,
                limit_bytes=limit_bytes,
                tokens_per_s=self._tokens_per_s,
            )
        ]
