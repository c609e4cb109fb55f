"""A worker: one process that registers with a seed, trains the jobs that the seed assigns to it, and leaves cleanly.

- It trains one job at a time, with a ``JobRunner``. An ``Assign`` of another job, or of another part of the model,
  replaces the runner. Training goes on while the seed is away.
- It accepts connections on one port. The ``Hello``'s purpose says what the caller wants: a place beside this worker in
  a ring (``ring``), a link measurement (``probe``), the state of the job (``heal``), checkpoint files (``files``), or
  something of a split model (``roles.worker.stages``).
- While no job needs it, the seed may have it draft for verifiers, with its owner's draft model.
- To leave, it waits for a step boundary for a moment, and saves a state that no other worker keeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import Checkpoint, Profile
from p2ptrain.core.errors import NetworkError, P2PTrainError, ProtocolError, Refused, StorageError
from p2ptrain.core.ids import is_id
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import World
from ring.direct import CHANNEL
from ring.job_member import REASON_CHARS, MemberPhase
from ring.links import Inbound
from ring.token import Flag
from ring.view import View
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Stage
from roles.member import CallerService, Identity, MemberOptions, MemberProcess, allowed_kinds
from roles.seed_link import Notify
from roles.strategies import strategy_of
from roles.strategies.strategy import Factory
from roles.worker.checkpoint_assembler import FileSender, checkpoints_dir
from roles.worker.checkpoint_store import CheckpointFiles, lineage_of
from roles.worker.context import BuildEngine, Context
from roles.worker.drafts import OpenDrafter, WorkerDrafts
from roles.worker.job_state import JobFiles, RestorePoint
from roles.worker.links import Prober, ProbeResponder
from roles.worker.runner import JobRunner
from roles.worker.stages import PURPOSES, Holding, Stages
from wire.client import answer_request
from wire.connection import Connection
from wire.enrol import RunMembership
from wire.job_messages import (
    LEAVE,
    MEMBERS,
    Assign,
    CatchUp,
    Hold,
    JobMembers,
    MemberRecord,
    PartOfModel,
    Release,
    Report,
    SaveNow,
    ViewAnnounced,
)
from wire.messages import Heartbeat, Hello, Message, RefusalCode, Refuse, Request, Scalar, Welcome
from wire.schema import Count, Id, instance_untrusted
from wire.text_messages import DraftOrder

SAVE_S = 60.0  # how long a leaving worker may take to save a state that no other worker keeps
LEAVE_S = 1.2  # how long a leaving worker waits for the step boundary; with closing, Ctrl+C takes less than 2 s
MEMBERS_S = 10.0  # for the seed to list the workers of a job
JOBS = "jobs"  # directory of the jobs' checkpoints, in a worker's own
# Values of ``wire.records.PeerInfo.state``, for people. All other phases are shown as training.
_STATE_NAMES = {
    MemberPhase.EMPTY: "building",
    MemberPhase.IDLE: "waiting",
    MemberPhase.FORMING: "waiting",
    MemberPhase.HEALING: "healing",
    MemberPhase.HELD: "held",
    MemberPhase.DONE: "idle",
    MemberPhase.FAILED: "failed",
}


class CheckpointRequest(PartOfModel):
    """Parameters of ``checkpoint.verify`` and ``checkpoint.delete``."""

    job: Id
    step: Count


class Worker(MemberProcess):
    """One worker process; see the module's docstring.

    Args:
        build_engine, strategies, on_step, build_progress: as in ``Context``. inputs_dir: so, too; None: a worker's own.
        warm_up: blocking, called first on the compute thread, while the seed is dialled.
        holding: what is needed to measure its speed, and to hold parts of split models; None for neither.
        open_drafter: None: it has no draft model.
    """

    def __init__(
        self,
        world: World,
        identity: Identity,
        options: MemberOptions,
        *,
        build_engine: BuildEngine,
        warm_up: Callable[[], None] = lambda: None,
        notify: Notify = lambda level, kind, text: None,
        on_step: Callable[[int, int, dict[str, float]], None] = lambda applied, total, values: None,
        membership: RunMembership | None = None,
        holding: Holding | None = None,
        strategies: Callable[[Profile], Factory] = strategy_of,
        build_progress: Callable[[], str] = str,
        inputs_dir: Callable[[], Path] | None = None,
        open_drafter: OpenDrafter | None = None,
    ) -> None:
        super().__init__(world, identity, options, notify=notify, membership=membership)
        self._drafting = WorkerDrafts(open_drafter, self._link.send, self.notify)
        self._warm_up = warm_up
        self._probe_responder = ProbeResponder()
        self._file_sender = FileSender(world.disk, self._disk, identity.directory / JOBS, self._wait_for_save)
        self._runner: JobRunner | None = None
        self._earlier_jobs_bytes = 0  # sent in the rings of the jobs before this one
        self._job_task: asyncio.Task[None] | None = None
        self._context = Context(
            world=world,
            peer_id=self.peer_id,
            name=self.name,
            seed_at=lambda: self._link.host,
            inbound=Inbound(),
            compute=ComputeThread(world.threads),
            disk=self._disk,
            send=self._link.send,
            notify=self.notify,
            notify_here=notify,
            build_engine=build_engine,
            strategies=strategies,
            on_step=on_step,
            ask_members=self._ask_members,
            inputs_dir=inputs_dir or (lambda: identity.directory / "inputs"),
            build_progress=build_progress,
        )
        self._prober = Prober(self._context)
        self._stages: Stages | None = None
        self._measure_flops = holding.compute_flops if holding is not None else None
        self._compute_flops: float | None = None  # None: not measured yet; 0: it cannot be measured
        if holding is not None and self._may("serve"):
            limit_bytes = holding.limit_bytes
            self._stages = Stages(
                self._context,
                holding,
                self._prober,
                identity.directory,
                shown=str(options.capabilities.get("device", "")),
                training=lambda: self._runner.list_held_parts(limit_bytes) if self._runner is not None else [],
            )

    async def run(self, stop: asyncio.Event) -> None:
        try:
            await super().run(stop)
        finally:
            await self._drafting.end()
            if self._stages is not None:
                self._stages.close()
            self._context.compute.close()

    async def _run_role(self) -> None:
        await self._prepare_compute()
        await (self._stages.run() if self._stages is not None else asyncio.Event().wait())

    async def _prepare_compute(self) -> None:
        warm_up = self._context.compute.submit(self._warm_up)
        measurement = self._context.compute.submit(self._measure_flops) if self._measure_flops is not None else None
        await warm_up
        if measurement is None:
            return
        try:
            self._compute_flops = await measurement
        except P2PTrainError as problem:
            self._compute_flops = 0.0
            self.notify("warning", "speed", f"this machine's speed is not known: {problem.message}")

    # -------------------------------------------------------------------------------------------------- the seed link

    def _make_hello(self) -> Hello:
        hello, view = super()._make_hello(), self._runner.core.view if self._runner else None
        abilities: dict[str, Scalar] = {"measures": True, "gauges": self._measure_flops is not None}
        if self._runner is not None:
            abilities["stages"] = self._runner.stage.count
        generation = view.generation if view else 0
        return replace(hello, capabilities=hello.capabilities | abilities, job=self._job_id(), generation=generation)

    def _job_id(self) -> str:
        return self._runner.job if self._runner else ""

    def _continuing_work(self) -> str:
        return "training goes on" if self._runner and self._runner.core.running else ""

    def _make_heartbeat(self) -> Heartbeat:
        runner, stats = self._runner, self._machine_stats()
        received_bytes, sent_bytes = runner.connections.totals() if runner else (0, 0)
        sent_bytes += self._earlier_jobs_bytes
        if self._compute_flops is not None:
            stats["compute_flops"] = self._compute_flops
        stats["in_bps"] = 8 * self.gauges.rate("in", received_bytes)
        stats["out_bps"] = 8 * self.gauges.rate("out", sent_bytes)
        stats["sent_bytes"] = float(sent_bytes)
        if runner is None:
            serves = self._stages is not None and self._stages.requests.sessions
            state = "drafting" if self._drafting.server is not None else "serving" if serves else "idle"
            return Heartbeat(0, 0, 0, state, stats)
        stats["tokens_per_s"] = self.gauges.rate("tokens", runner.state.tokens)
        stats.update(runner.state.reports.clock.last_ms)
        stats.update(runner.activity_runner.contribution_stats())
        state = "following" if runner.follower.active else _STATE_NAMES.get(runner.core.phase, "training")
        if self._leaving:
            state = "leaving"
        return Heartbeat(0, runner.state.progress, runner.core.applied, state, stats)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._drafting.order("")  # a seed that was away orders anew
        if self._stages is not None:
            self._stages.report_anew()
        if (runner := self._runner) is None:
            return
        if (view := runner.core.view) and view.term < welcome.term:
            # The seed was restored, and its backup may be older than this view.
            self._link.send(view)
            runner.state.reports.tell_rows(restored=True)
        runner.on_seed_back()

    def _on_message(self, message: Message) -> None:
        match message:
            case Assign():
                self._on_assign(message)
            case DraftOrder(model):
                self._drafting.order(model)
            case Request():
                self._tasks.create_task(self._answer(message), name=f"answer {message.method}")
            case ViewAnnounced() | Hold() | SaveNow() | CatchUp() | Release():
                if (runner := self._find_runner(message.job)) is not None:
                    self._on_job_message(runner, message)
            case _:
                super()._on_message(message)

    def _on_job_message(self, runner: JobRunner, message: Message) -> None:
        match message:
            case ViewAnnounced() if not self._leaving:  # a leaving worker joins no further ring
                runner.announce_view(View.of(message))
            case Hold():
                runner.request(Flag.HOLD, message.generation)
            case SaveNow():
                runner.save()
            case CatchUp():
                runner.catch_up(message)
            case Release():
                self.notify("info", "released", f"released from the job: {message.reason}")
                runner.state.reports.tell_rows()
                self._release_runner(runner)

    def _may(self, kind: str) -> bool:
        """Whether its owner allows this kind of task."""
        return kind in allowed_kinds(self._options.capabilities)

    def _find_runner(self, job: str) -> JobRunner | None:
        return self._runner if self._job_id() == job else None

    def _release_runner(self, runner: JobRunner) -> None:
        self._earlier_jobs_bytes += runner.connections.totals()[1]
        runner.release()
        self._runner = None

    def _on_assign(self, message: Assign) -> None:
        if not is_id(message.job):
            raise ProtocolError(f"invalid job id {message.job[:40]!r}")
        stage = Stage(message.stage, message.stages)
        restore = RestorePoint(message.restore_step, message.holders, message.lineage)
        runner = self._runner
        if not self._may("train"):
            self._link.send(Report(message.job, 0, "failed", 0, 0, "", reason="its owner lets it train no job"))
            return
        self._drafting.order("")
        if runner is not None and (runner.job, runner.stage) == (message.job, stage):
            if message.restore_step >= 0:
                runner.restore(restore)
            else:
                runner.report_again()
            return
        if runner is not None:
            self._release_runner(runner)
        try:
            profile = Profile.from_spec_untrusted(message.spec)
        except ProtocolError as problem:  # the seed has another version: stay connected
            reason = f"this version cannot read the job's profile: {problem.message}"
            self._notify_here("error", "worker-failed", reason)
            self._link.send(Report(message.job, 0, "failed", 0, 0, "", reason=shortened(reason, REASON_CHARS)))
            return
        if self._stages is not None:
            self._tasks.create_task(self._stages.make_room_for_job(), name="make room for the job")
        self._runner = JobRunner(
            self._context,
            job=message.job,
            profile=profile,
            files=JobFiles(
                message.spec,
                self._make_checkpoint_files(message.job, stage, profile.checkpoint),
                self._make_checkpoint_files(message.job, WHOLE, profile.checkpoint) if stage.split else None,
            ),
            restore=restore,
            stage=stage,
        )
        part = f"{stage} of the model" if stage.split else "the model"
        self._notify_here("info", "building", f"building {part} of job {message.job}")
        self._job_task = self._tasks.create_task(self._runner.run(), name=f"job {message.job}")

    async def _ask_members(self) -> Sequence[MemberRecord]:
        answer = await self._link.ask(MEMBERS, {}, timeout_s=MEMBERS_S)
        return instance_untrusted(JobMembers, answer, lenient=True).members

    async def _answer(self, request: Request) -> None:
        self._link.send(await answer_request(request, self._carry_out_request(request)))

    async def _carry_out_request(self, request: Request) -> dict[str, Any]:
        if request.method == "links.measure":
            return await self._prober.answer(request.params)
        if request.method not in ("checkpoint.verify", "checkpoint.delete"):
            raise Refused("unknown-method", f"a worker does not support the request {request.method[:80]!r}")
        target = instance_untrusted(CheckpointRequest, request.params, lenient=True)
        stage = Stage(target.stage, target.stages)
        checkpoints = self._open_checkpoint_files(target.job, stage)
        if request.method == "checkpoint.verify":
            entry = await checkpoints.verify(target.step)
            self.world.probe.event("checkpoint-verified", step=entry.step, stage=stage)
            return {"step": entry.step, "lineage": lineage_of(entry)}
        if not await checkpoints.delete(target.step):
            raise Refused("not-here", f"{self.name} has no checkpoint of step {target.step}")
        return {"deleted": target.step}

    def _open_checkpoint_files(self, job: str, stage: Stage) -> CheckpointFiles:
        # A second store of files that the runner writes would delete its unfinished ones.
        if (runner := self._find_runner(job)) is not None:
            if runner.stage == stage:
                return runner.state.files.checkpoints
            if runner.state.assembler is not None and stage == WHOLE:
                return runner.state.assembler.whole
        return self._make_checkpoint_files(job, stage, Checkpoint())

    async def _wait_for_save(self, job: str, stage: Stage, step: int, lineage: str) -> None:
        if (runner := self._find_runner(job)) is not None and runner.stage == stage:
            await runner.state.saving.wait_for_save(step, lineage)

    def _make_checkpoint_files(self, job: str, stage: Stage, settings: Checkpoint) -> CheckpointFiles:
        root = checkpoints_dir(self.identity.directory / JOBS, job, stage)
        return CheckpointFiles(self._disk, self.world.disk, root, settings.keep, self.notify, best=settings.best)

    # --------------------------------------------------------------------------------------------------- other peers

    def _find_service(self, hello: Hello) -> CallerService | Refuse:
        runner, stages, drafts = self._find_runner(hello.job), self._stages, self._drafting.server
        match hello.purpose:
            case "probe":
                return self._probe_responder
            case "ring" if hello.capabilities.get("channel") == CHANNEL:
                messages = runner.connections.messages if runner is not None else None
                return messages or Refuse(RefusalCode.BUSY, "this member has not formed that view yet", "try again")
            case "ring":
                return self._context.inbound
            case "files":
                return self._file_sender
            case "heal" if runner is not None:
                return runner
            case "input" if runner is not None:
                return runner.state.inputs
            case "heal" | "input":
                return Refuse("not-here", "this worker is not on that job")
            case purpose if stages is not None and purpose in PURPOSES:
                return stages
            case "draft" if drafts is not None:
                return drafts
        text = f"this is a worker: it accepts no connection for {hello.purpose[:40]!r}"
        return Refuse(RefusalCode.ROLE, text, "use the seed's address")

    def _find_refusal(self, hello: Hello) -> Refuse | None:
        service = self._find_service(hello)
        return service if isinstance(service, Refuse) else service.decide(hello)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        if not isinstance(service := self._find_service(hello), Refuse):  # else it ended meanwhile
            await service.serve(connection, hello)

    # -------------------------------------------------------------------------------------------------------- leaving

    async def _leave(self) -> None:
        runner, self._leaving = self._runner, True
        if runner is not None and runner.core.running:
            self.notify("info", "leaving", "leaving at the next step boundary")
            runner.request(Flag.LEAVE | Flag.SAVE)
            # If the step is longer, the other members abort it and continue without this one.
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await runner.wait_until_stopped()
        if runner is not None and runner.has_unsaved_state and await self._is_last_holder():
            await self._save_last_copy(runner)
        await super()._leave()
        if self._job_task is not None:
            self._job_task.cancel()  # not awaited: the next start deletes unfinished files

    async def _save_last_copy(self, runner: JobRunner) -> None:
        text = f"saving step {runner.core.applied}, which no other worker keeps"
        self._notify_here("info", "leaving", f"{text}; press Ctrl+C again not to wait")
        cause = ""
        try:
            async with asyncio.timeout(SAVE_S):
                await runner.save_state()
        except TimeoutError:
            cause = f"it took longer than {SAVE_S:g} s"
        if runner.has_unsaved_state:
            text = f"step {runner.core.applied} is not saved here: {cause or runner.state.reports.unsaved()}"
            self._problem = self._problem or StorageError(text, remedy="the job goes on from its last checkpoint")

    async def _is_last_holder(self) -> bool:
        """Whether no remaining worker has the state in memory. The seed knows it; if it does not answer, assume so."""
        try:
            answer = await self._link.ask(LEAVE, {}, timeout_s=LEAVE_S)
        except (NetworkError, Refused):
            return True
        return answer.get("last") is not False
