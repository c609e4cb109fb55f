"""One worker's copy of a job: the engine that holds the state, its checkpoints, and who else gets it.

``JobRunner`` owns it. The runners of both kinds of steps (``ActivityRunner``) change the state through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from configs.schema import Profile
from p2ptrain.core.errors import JobFailed, P2PTrainError
from p2ptrain.core.plugins import load
from p2ptrain.core.training import Applied, SettingsPeriod
from ring import member_events as ev
from ring.job_member import JobMember, MemberPhase
from ring.session import RingSession
from ring.token import Flag
from ring.view import View
from roles.engine import Engine, Stage
from roles.snapshots import Snapshots, state_bytes
from roles.worker.boundary import BoundaryWork, Losses
from roles.worker.checkpoint_assembler import CheckpointAssembler
from roles.worker.checkpoint_store import CheckpointFiles, Checkpointing
from roles.worker.context import Context
from roles.worker.early_stop import EarlyStop
from roles.worker.heal_source import HealSource
from roles.worker.job_inputs import JobInputs
from roles.worker.privacy import Budget
from roles.worker.reports import LEDGER_FILE, LEDGER_FILE_BYTES, METRICS_FILE, METRICS_FILE_BYTES, Reports
from wire.job_messages import MemberRecord, SettingChange

BUILD_PROGRESS_S = 10.0
"""Between two reports to the seed of how far a long build is."""
Activity = Callable[[], Coroutine[Any, Any, object]]
"""What a runner does at a time; it returns the event at its end."""


class ActivityRunner(Protocol):
    """Runs the activities of one way to train, one at a time.

    Attributes:
        activities: by the type of the instruction that begins it.
    """

    activities: Mapping[type, Callable[[Any], Coroutine[Any, Any, object]]]

    def build(self) -> None:
        """Make what it needs for the engine, which is built."""

    async def begin_view(self, session: RingSession) -> None:
        """Form further connections, and agree with the other members. Raises as ``RingSession``."""

    def carry_out(self, instruction: object) -> None:
        """Carry out an instruction that takes no time."""

    def contribution_stats(self) -> dict[str, float]:
        """What is shown of this worker's contributions to the job."""
        return {}

    def close(self) -> None:
        """Free the memory for the next job."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint to begin with. ``step`` -1: the newest. ``holders``: workers that have it."""

    step: int = -1
    holders: Sequence[MemberRecord] = ()
    lineage: str = ""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """``spec``: the profile as the seed sent it. ``whole``: the checkpoints of all parts, of a split model."""

    spec: str
    checkpoints: CheckpointFiles
    whole: CheckpointFiles | None = None


class JobSettings:
    """A job's settings, as its views change them.

    Attributes:
        first, now: the profile at the job's beginning, and after the newest change.
        periods: for the engine.
    """

    def __init__(self, profile: Profile) -> None:
        self.first = self.now = profile
        self.periods = [SettingsPeriod(0, profile.optimizer.model_dump(), profile.job.steps)]
        self._known: Sequence[SettingChange] = ()

    def take_untrusted(self, changes: Sequence[SettingChange]) -> None:
        """Take the changes of a view, in place of those that are known. Raises ``ProtocolError``."""
        if tuple(changes) == self._known:
            return
        periods = []
        for first_step in sorted({0, *(change.step for change in changes)}):
            made = [(change.key, change.value) for change in changes if change.step <= first_step]
            changed = self.first.with_changes_untrusted(made)
            periods.append(SettingsPeriod(first_step, changed.optimizer.model_dump(), changed.job.steps))
        self.now = self.first.with_changes_untrusted((change.key, change.value) for change in changes)
        self.periods, self._known = periods, tuple(changes)


class JobState:
    """The module's docstring describes it.

    Args:
        request: asks the ring for something at the next step boundary.

    Attributes:
        progress: rises with every finished piece of work: a slow member is not stuck.
        tokens: computed so far.
    """

    def __init__(
        self,
        context: Context,
        core: JobMember,
        profile: Profile,
        stage: Stage,
        files: JobFiles,
        tasks: asyncio.TaskGroup,
        *,
        request: Callable[[Flag], None],
    ) -> None:
        self._context, self._core, self.files, self._tasks = context, core, files, tasks
        self._settings, self.stage = JobSettings(profile), stage
        self.progress = self.tokens = 0
        budget = Budget(profile.privacy, files.checkpoints) if profile.privacy.epsilon else None
        self.early = EarlyStop(profile.validation.patience, budget)
        self.reports = Reports(context, core, job=core.job, stage=stage, profile=profile, early=self.early)
        self.snapshots = Snapshots(context.compute)
        self.saving = Checkpointing(
            context,
            job=core.job,
            files=files.checkpoints,
            snapshots=self.snapshots,
            tasks=tasks,
            stage=stage,
            extra_files=self.reports.files,
            where=lambda: (core.applied, self.progress),
            save_soon=lambda: request(Flag.SAVE),
        )
        self.reports.unsaved = lambda: self.saving.problem or (self.assembler.problem if self.assembler else "")
        self.assembler: CheckpointAssembler | None = None
        if files.whole is not None:
            self.assembler = CheckpointAssembler(
                context,
                job=core.job,
                stage=stage,
                parts=files.checkpoints,
                whole=files.whole,
                checkpoints=self.saving,
                on_progress=self.count_progress,
            )
        self.inputs = JobInputs(context, core.job, files.checkpoints.root.parent)
        self.boundary = BoundaryWork(context, profile=profile, checkpoints=self.saving, early=self.early)
        self.heal_source = HealSource(context, core, want_snapshot=lambda: request(Flag.SNAPSHOT), stage=stage)

    def count_progress(self) -> None:
        self.progress += 1

    @property
    def profile(self) -> Profile:
        """As it is now."""
        return self._settings.now

    def change_settings_untrusted(self, changes: Sequence[SettingChange]) -> None:
        """Take the settings of a view, or of a ring that this member follows. Raises ``ProtocolError``."""
        self._settings.take_untrusted(changes)
        self.boundary.profile = self.profile

    async def use_settings(self) -> None:
        """Let the engine compute with the settings that were taken."""
        await self._context.compute.run(self.engine.use_settings, self._settings.periods)

    @property
    def engine(self) -> Engine:
        """Raises ``JobFailed`` before the model is built."""
        if self.reports.engine is None:
            raise JobFailed("a view came before the model was built")
        return self.reports.engine

    @property
    def is_built(self) -> bool:
        return self.reports.engine is not None

    async def build(self) -> None:
        context, profile, stage = self._context, self._settings.first, self.stage
        notify = context.notify_here if profile.data.private else context.notify  # it names files

        async def tell_progress() -> None:
            while True:
                await asyncio.sleep(BUILD_PROGRESS_S)
                if text := self.inputs.progress or context.build_progress():
                    notify("info", "building", text)

        telling = self._tasks.create_task(tell_progress(), name="progress of building")
        try:
            for key, package in profile.needs.items():
                await context.compute.run(partial(load, key, package=package))
            profile = await self.inputs.bring(profile)
            self.inputs.serve_from(profile, None)  # others need no text that is tokenized for the rest
            self.reports.engine = engine = await context.compute.run(context.build_engine, profile, stage)
        finally:
            telling.cancel()
        self.inputs.serve_from(profile, engine.data.store)
        if engine.data.note:
            notify("warning", "data", engine.data.note)

    async def load(self, restore: RestorePoint) -> ev.StateLoaded:
        """Load the state of ``restore``, an older one, or the initial one, into the engine."""
        context, files, engine = self._context, self.files.checkpoints, self.engine
        if self.assembler is not None:
            await self.assembler.stop()
            await self.saving.wait_written()
            await self.assembler.bring(restore.step, restore.holders, restore.lineage)
        applied, lineage, square_sum, entry = await files.load(
            engine, context.compute, spec=self.files.spec, restore_step=restore.step, split=self.stage.split
        )
        context.world.probe.event("state-loaded", entry=entry, restore_step=restore.step)
        self.heal_source.state_bytes = await context.compute.run(lambda: state_bytes(engine.state.blobs()))
        rows = await files.small_file(entry, LEDGER_FILE, LEDGER_FILE_BYTES)
        metrics = await files.small_file(entry, METRICS_FILE, METRICS_FILE_BYTES)
        self.reports.resume_from(applied, lineage, rows, metrics, wanted=restore.step)
        await self.saving.begin_from(entry)
        self.early.resume_from(entry.meta if entry is not None else {})
        return ev.StateLoaded(applied, lineage, square_sum)

    async def apply(self, commit: Callable[[], Awaitable[Applied]]) -> None:
        """Apply a step with ``commit``."""
        with self.reports.clock.phase("compute"):
            await self.heal_source.keep(self.engine)
            self.reports.steps.applied(await commit())
        self.count_progress()
        self.tell_notices()

    def tell_notices(self) -> None:
        """Tell the person what the engine has to tell."""
        while self.engine.notices:
            level, text = self.engine.notices.pop(0)
            self._context.notify(level, "compiling", text)

    async def finish_step(
        self, boundary: ev.Boundary, session: RingSession, losses: Losses, validators: RingSession, *, patience_s: float
    ) -> bool:
        """Validate, report the step, and save or copy the state, if they are due. Returns whether a save was begun.

        Args:
            session: the ring of all members. validators: of those that validate, by ``losses``.
        """
        core, engine = self._core, self.engine
        val_loss = await self.boundary.validate(boundary, engine, losses, validators, patience_s=patience_s)
        self.reports.report_step(boundary.applied, session, val_loss)
        replica, meta = validators.view.replica_of(validators.rank), self.reports.meta()
        is_saving = await self.boundary.keep(boundary, engine, replica, meta, stopping=core.stopping)
        if boundary.snapshot:
            await self.heal_source.snapshot(engine, self.snapshots)
        return is_saving

    @property
    def has_unsaved(self) -> bool:
        """Whether this member holds a state of its job's last view that it has not saved."""
        core = self._core
        if not self.is_built or core.view is None or core.torn or core.reloaded:
            return False
        return core.applied >= max(core.view.step, 1) and not self.saving.has_saved(core.applied, core.lineage)

    async def save(self, *, is_due: bool) -> None:
        """Save the state, while no ring runs, or report the checkpoints again. Failures are only reported."""
        try:
            if is_due:
                now = ev.Boundary(0, self._core.applied, save=True, last=True)
                await self.boundary.keep(now, self.engine, 0, self.reports.meta(), stopping=True)
            else:
                await self.saving.announce_all()
        except P2PTrainError as problem:
            self._context.notify("error", "checkpoint-failed", problem.message)

    async def report_result(self) -> None:
        """Report that the job is done, after the checkpoints of all parts are joined here."""
        core, view, assembler = self._core, self._core.view, self.assembler
        rank = view.rank_of(self._context.peer_id) if view is not None else None
        if assembler is not None and view is not None and rank is not None and core.phase is MemberPhase.DONE:
            self.assemble(view, rank)
            await assembler.wait_settled()
        if core.phase is MemberPhase.DONE:
            self.reports.send(core.report("done"))

    def assemble(self, view: View, rank: int) -> None:
        """Begin to collect the checkpoints of all parts of the newest step."""
        if self.assembler is not None:
            self.assembler.want(view, rank, self._core.applied, self._core.lineage, self._tasks.create_task)

    def close(self) -> None:
        """Free the memory for the next job."""
        self.heal_source.cut("this worker ended")
        self.inputs.close()
        self.reports.engine = None
        self.snapshots.close()
