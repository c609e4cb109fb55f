"""A worker: one process that registers with a seed, computes its part of the jobs it is given, and leaves cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from configs.schema import Checkpoint, Profile
from p2ptrain.core.errors import NetworkError, P2PTrainError, ProtocolError, Refused, StorageError
from p2ptrain.core.ids import is_id
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import World
from ring.direct import CHANNEL, DirectMessages
from ring.job_member import REASON_CHARS, MemberPhase
from ring.links import Inbound
from ring.token import Flag
from ring.view import View
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Stage
from roles.member import Identity, MemberOptions, MemberProcess
from roles.seed_link import Notify
from roles.strategies import strategy_of
from roles.strategies.strategy import Factory
from roles.worker.checkpoint_assembler import FileSender, checkpoints_dir
from roles.worker.checkpoint_store import CheckpointFiles, lineage_of
from roles.worker.context import BuildEngine, Context
from roles.worker.job_state import JobFiles, RestorePoint
from roles.worker.links import Prober, ProbeResponder
from roles.worker.runner import JobRunner
from roles.worker.stages import PURPOSES, Holding, Stages
from wire.client import answer_request
from wire.connection import Connection
from wire.enrol import RunMembership
from wire.job_messages import LEAVE, MAX_STAGES, Assign, CatchUp, Hold, Release, Report, SaveNow, ViewAnnounced
from wire.messages import Heartbeat, Hello, Message, RefusalCode, Refuse, Request, Scalar, Welcome
from wire.schema import Bound, Count, Id, instance_untrusted

SAVE_S = 60.0  # how long a leaving worker may take to save a state that no other worker keeps
LEAVE_S = 1.2  # how long a leaving worker waits for the step boundary; with closing, Ctrl+C takes less than 2 s
JOBS = "jobs"  # directory of the jobs' checkpoints, in a worker's own
# What people are shown (``wire.records.PeerInfo.state``). All other phases are shown as training.
_SHOWN = {
    MemberPhase.EMPTY: "building",
    MemberPhase.IDLE: "waiting",
    MemberPhase.FORMING: "waiting",
    MemberPhase.HEALING: "healing",
    MemberPhase.HELD: "held",
    MemberPhase.DONE: "idle",
    MemberPhase.FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Parameters of ``checkpoint.verify`` and ``checkpoint.delete``."""

    job: Id
    step: Count
    stage: Count = 0
    stages: Annotated[int, Bound(1, MAX_STAGES)] = 1

    def check(self) -> None:
        if self.stage >= self.stages:
            raise ProtocolError(f"invalid stage {self.stage} of {self.stages}")


class Worker(MemberProcess):
    """One worker process. The module's docstring describes it.

    Args:
        build_engine, strategies: as in ``Context``.
        warm_up: blocking, called first on the compute thread, while the seed is dialled.
        holding: what is needed to hold parts of split models; None if this worker holds none.
    """

    def __init__(
        self,
        world: World,
        identity: Identity,
        options: MemberOptions,
        *,
        build_engine: BuildEngine,
        warm_up: Callable[[], None],
        notify: Notify,
        on_step: Callable[[int, int, dict[str, float]], None],
        membership: RunMembership | None = None,
        holding: Holding | None = None,
        strategies: Callable[[Profile], Factory] = strategy_of,
    ) -> None:
        super().__init__(world, identity, options, notify=notify, membership=membership)
        self._warm_up = warm_up
        self._inbound = Inbound()
        self._sink = ProbeResponder()
        self._compute = ComputeThread(world.threads)
        self._files = FileSender(world.disk, self._disk, identity.directory / JOBS, self._saving)
        self._beats = (0.5, 2.0)  # heartbeat_s, death_s between neighbours until the seed sends its own
        self._runner: JobRunner | None = None
        self._sent_before = 0  # bytes, in the jobs before this one
        self._job_task: asyncio.Task[None] | None = None
        self._context = Context(
            world=world,
            peer_id=self.peer_id,
            name=self.name,
            seed_at=lambda: self._link.host,
            beats=lambda: self._beats,
            inbound=self._inbound,
            compute=self._compute,
            disk=self._disk,
            send=self._link.send,
            notify=self.notify,
            tell=notify,
            build_engine=build_engine,
            strategies=strategies,
            on_step=on_step,
        )
        self._prober = Prober(self._context)
        self._stages: Stages | None = None
        self._gauge: Callable[[], float] | None = None
        if holding is not None:
            limit_bytes, self._gauge = holding.limit_bytes, holding.compute_flops
            self._stages = Stages(
                self._context,
                holding,
                self._prober,
                identity.directory,
                shown=str(options.capabilities.get("device", "")),
                training=lambda: self._runner.held(limit_bytes) if self._runner is not None else [],
            )
        self._flops: float | None = None

    async def run(self, stop: asyncio.Event) -> None:
        try:
            await super().run(stop)
        finally:
            if self._stages is not None:
                self._stages.close()
            self._compute.close()

    async def _live(self) -> None:
        await self._warm()
        await (self._stages.run() if self._stages is not None else asyncio.Event().wait())

    async def _warm(self) -> None:
        loading = self._compute.submit(self._warm_up)
        gauging = self._compute.submit(self._gauge) if self._gauge is not None else None
        await loading
        if gauging is None:
            return
        try:
            self._flops = await gauging
        except P2PTrainError as problem:
            self._flops = 0.0
            self.notify("warning", "speed", f"this machine's speed is not known: {problem.message}")

    # -------------------------------------------------------------------------------------------------- the seed link

    def _hello(self) -> Hello:
        hello, view = super()._hello(), self._runner.core.view if self._runner else None
        more: dict[str, Scalar] = {"measures": True, "follows": True, "gauges": self._gauge is not None}
        if self._runner is not None:
            more["stages"] = self._runner.stage.count
        generation = view.generation if view else 0
        return replace(hello, capabilities=hello.capabilities | more, job=self._job(), generation=generation)

    def _job(self) -> str:
        return self._runner.job if self._runner else ""

    def _continuing_work(self) -> str:
        return "training goes on" if self._runner and self._runner.core.running else ""

    def _pulse(self) -> Heartbeat:
        runner, stats = self._runner, self._machine_stats()
        bytes_in, bytes_out = runner.connections.totals() if runner else (0, 0)
        if self._flops is not None:
            stats["compute_flops"] = self._flops
        stats["in_bps"] = 8 * self.gauges.rate("in", bytes_in)
        bytes_out += self._sent_before
        stats["out_bps"] = 8 * self.gauges.rate("out", bytes_out)
        stats["sent_bytes"] = float(bytes_out)
        if runner is None:
            return Heartbeat(0, 0, 0, "idle", stats)
        stats["tokens_per_s"] = self.gauges.rate("tokens", runner.state.tokens)
        stats.update(runner.state.reports.clock.last_ms)
        stats.update(runner.way.figures())
        state = "following" if runner.follower.active else _SHOWN.get(runner.core.phase, "training")
        return Heartbeat(0, runner.state.progress, runner.core.applied, "leaving" if self._leaving else state, stats)

    def _seed_up(self, welcome: Welcome) -> None:
        self._beats = (welcome.heartbeat_s, welcome.death_s)
        if self._stages is not None:
            self._stages.seed_up()
        if self._runner is not None and (view := self._runner.core.view) and view.term < welcome.term:
            # The seed was restored, and its backup may be older than this view.
            self._link.send(view)
            self._runner.state.reports.tell_rows(restored=True)
        if self._runner is not None:
            self._runner.on_seed_back()

    def _message(self, message: Message) -> None:
        match message:
            case Assign():
                self._assigned(message)
            case Request():
                self._tasks.create_task(self._answer(message), name=f"answer {message.method}")
            case ViewAnnounced() | Hold() | SaveNow() | CatchUp() | Release():
                if self._runner is not None and message.job == self._runner.job:
                    self._obey(self._runner, message)
            case _:
                super()._message(message)

    def _obey(self, runner: JobRunner, message: Message) -> None:
        match message:
            case ViewAnnounced() if not self._leaving:  # else it saves its state
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
                self._retire(runner)
                self._runner = None

    def _retire(self, runner: JobRunner) -> None:
        self._sent_before += runner.connections.totals()[1]
        runner.release()

    def _assigned(self, message: Assign) -> None:
        if not is_id(message.job):
            raise ProtocolError(f"invalid job id {message.job[:40]!r}")
        stage = Stage(message.stage, message.stages)
        if self._runner is not None and (self._runner.job, self._runner.stage) == (message.job, stage):
            if message.restore_step >= 0:
                self._runner.restore(RestorePoint(message.restore_step, message.holders, message.lineage))
            else:
                self._runner.call_back()
            return
        if self._runner is not None:
            self._retire(self._runner)
        try:
            profile = Profile.from_spec_untrusted(message.spec)
        except ProtocolError as problem:  # the seed has another version: stay connected
            reason = f"this version cannot read the job's profile: {problem.message}"
            self._notify_person("error", "worker-failed", reason)
            self._link.send(Report(message.job, 0, "failed", 0, 0, "", reason=shortened(reason, REASON_CHARS)))
            return
        if self._stages is not None:
            self._tasks.create_task(self._stages.job_assigned(), name="make room for the job")
        self._runner = JobRunner(
            self._context,
            job=message.job,
            profile=profile,
            files=JobFiles(
                message.spec,
                self._checkpoints(message.job, stage, profile.checkpoint),
                self._checkpoints(message.job, WHOLE, profile.checkpoint) if stage.split else None,
            ),
            restore=RestorePoint(message.restore_step, message.holders, message.lineage),
            stage=stage,
        )
        what = f"{stage} of the model" if stage.split else "the model"
        self._notify_person("info", "building", f"building {what} of job {message.job}")
        self._job_task = self._tasks.create_task(self._runner.run(), name=f"job {message.job}")

    async def _answer(self, request: Request) -> None:
        self._link.send(await answer_request(request, self._requested(request)))

    async def _requested(self, request: Request) -> dict[str, Any]:
        if request.method == "links.measure":
            return await self._prober.answer(request.params)
        if request.method not in ("checkpoint.verify", "checkpoint.delete"):
            raise Refused("unknown-method", f"a worker does not support the request {request.method[:80]!r}")
        asked = instance_untrusted(CheckpointRequest, request.params, lenient=True)
        stage = Stage(asked.stage, asked.stages)
        checkpoints = self._in_use(asked.job, stage) or self._checkpoints(asked.job, stage, Checkpoint())
        if request.method == "checkpoint.verify":
            entry = await checkpoints.verify(asked.step)
            self.world.probe.event("checkpoint-verified", step=entry.step, stage=stage)
            return {"step": entry.step, "lineage": lineage_of(entry)}
        if not await checkpoints.delete(asked.step):
            raise Refused("not-here", f"{self.name} has no checkpoint of step {asked.step}")
        return {"deleted": asked.step}

    def _in_use(self, job: str, stage: Stage) -> CheckpointFiles | None:
        """Return the store of a job that runs here. A second store would delete the first one's unfinished writes."""
        runner = self._runner if self._runner is not None and self._runner.job == job else None
        if runner is None or runner.stage == stage:
            return runner.state.files.checkpoints if runner is not None else None
        return runner.state.assembler.whole if runner.state.assembler is not None and stage == WHOLE else None

    async def _saving(self, job: str, stage: Stage, step: int, lineage: str) -> None:
        if self._runner is not None and (self._runner.job, self._runner.stage) == (job, stage):
            await self._runner.state.saving.wait_for_save(step, lineage)

    def _checkpoints(self, job: str, stage: Stage, settings: Checkpoint) -> CheckpointFiles:
        root = checkpoints_dir(self.identity.directory / JOBS, job, stage)
        return CheckpointFiles(self._disk, self.world.disk, root, settings.keep, self.notify, best=settings.best)

    # --------------------------------------------------------------------------------------------------- other peers

    def _refusal(self, hello: Hello) -> Refuse | None:
        match hello.purpose:
            case "probe" if self._sink.full and "worker" in hello.roles:
                return Refuse(RefusalCode.BUSY, "others measure links to this worker", "try again in a second")
            case "probe":
                return None
            case "ring" if hello.capabilities.get("channel") == CHANNEL:
                messages = self._messages_of(hello)
                busy = Refuse(RefusalCode.BUSY, "this member has not formed that view yet", "try again")
                return messages.decide(hello) if messages is not None else busy
            case "ring":
                return self._inbound.decide(hello)
            case "heal":
                view = self._runner.core.view if self._runner and self._runner.job == hello.job else None
                if view is None or view.generation < hello.generation:
                    return Refuse(RefusalCode.STALE_GENERATION, "this member is not in that view")
                return None if "worker" in hello.roles else Refuse(RefusalCode.ROLE, "only workers can fetch a state")
            case "files":
                return self._files.decide(hello)
            case purpose if self._stages is not None and purpose in PURPOSES:
                return self._stages.decide(hello)
        text = f"this is a worker: it accepts no connection for {hello.purpose[:40]!r}"
        return Refuse(RefusalCode.ROLE, text, "use the seed's address")

    def _messages_of(self, hello: Hello) -> DirectMessages | None:
        return self._runner.connections.messages if self._runner is not None and self._runner.job == hello.job else None

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        match hello.purpose:
            case "ring" if hello.capabilities.get("channel") == CHANNEL:
                if (messages := self._messages_of(hello)) is not None:
                    await messages.serve(connection, hello)
            case "ring":
                await self._inbound.offer(connection, hello)
            case "probe":
                await self._sink.serve(connection, hello)
            case "heal" if self._runner is not None:
                await self._runner.give_state(connection, hello)
            case "files":
                await self._files.serve(connection, hello)
            case purpose if self._stages is not None and purpose in PURPOSES:
                await self._stages.serve(connection, hello)

    # -------------------------------------------------------------------------------------------------------- leaving

    async def _leave(self) -> None:
        runner, self._leaving = self._runner, True
        if runner is not None and runner.core.running:
            self.notify("info", "leaving", "leaving at the next step boundary")
            runner.request(Flag.LEAVE | Flag.SAVE)
            try:
                async with asyncio.timeout(LEAVE_S):
                    await runner.stand_still()
            except TimeoutError:
                pass  # the step is long: the other members abort it and continue without this one
        if runner is not None and runner.has_unsaved_state and await self._is_last_holder():
            text = f"saving step {runner.core.applied}, which no other worker keeps"
            self._notify_person("info", "leaving", f"{text}; press Ctrl+C again not to wait")
            why = ""
            try:
                async with asyncio.timeout(SAVE_S):
                    await runner.save_state()
            except TimeoutError:
                why = f"it took longer than {SAVE_S:g} s"
            if runner.has_unsaved_state:
                text = f"step {runner.core.applied} is not saved here: {why or runner.state.reports.unsaved()}"
                self._problem = self._problem or StorageError(text, remedy="the job goes on from its last checkpoint")
        await super()._leave()
        if self._job_task is not None:
            self._job_task.cancel()  # not awaited: the next start deletes unfinished files

    async def _is_last_holder(self) -> bool:
        """Whether no worker that stays keeps the state in memory, as the seed knows; without a seed it may be so."""
        try:
            answer = await self._link.ask(LEAVE, {}, timeout_s=LEAVE_S)
        except (NetworkError, Refused):
            return True
        return answer.get("last") is not False
