"""What a worker does for one job: a core decides, a runner of its way to train computes, and this shell connects them.

``StepRunner`` runs the activities of ``ring.transaction``, ``VersionRunner`` those of ``ring.versions``.
"""

from __future__ import annotations

import asyncio
import gc
from functools import partial

from configs.schema import Profile
from p2ptrain.core.background import start_in
from p2ptrain.core.errors import NeighbourAway, NetworkError, P2PTrainError, PeerError, ProtocolError
from ring import member_events as ev
from ring.job_member import JobMember, MemberPhase
from ring.links import Topology
from ring.token import Flag
from ring.transaction import Transaction
from ring.versions import VersionMember
from ring.view import View
from roles.compute_thread import ComputeCall, HangDetector
from roles.engine import WHOLE, Stage
from roles.strategies import share_rule_of
from roles.worker.context import Context
from roles.worker.heal import Follower, Healer
from roles.worker.job_state import Activity, ActivityRunner, JobFiles, JobState, RestorePoint
from roles.worker.step_runner import StepRunner
from roles.worker.version_runner import VersionRunner
from roles.worker.view_connections import ViewConnections
from wire.chain_messages import HeldPart
from wire.connection import Connection
from wire.job_messages import CatchUp
from wire.messages import Hello, RefusalCode, Refuse

WATCH_S = 1.0


def _core_of(profile: Profile, job: str, peer_id: str) -> Transaction | VersionMember:
    options = {
        "job": job,
        "peer_id": peer_id,
        "steps_total": profile.job.steps,
        "checkpoint_every": profile.checkpoint.every,
    }
    if profile.job.strategy == "server":
        return VersionMember(**options)
    return Transaction(
        outlier_factor=profile.guard.outlier_factor,
        share_rule=share_rule_of(profile),
        robust=bool(profile.robust.rule),
        hidden_norms=profile.federated.secure or profile.privacy.epsilon > 0,
        **options,
    )


class JobRunner:
    """One worker's part in one job, from ``Assign`` to ``Release``."""

    def __init__(
        self,
        context: Context,
        *,
        job: str,
        profile: Profile,
        files: JobFiles,
        restore: RestorePoint,
        stage: Stage = WHOLE,
    ) -> None:
        self.job, self.stage, self._context = job, stage, context
        self._tasks = asyncio.TaskGroup()
        core = _core_of(profile, job, context.peer_id)
        self.core: JobMember = core
        self.state = JobState(context, core, profile, stage, files, self._tasks, request=self.request)
        self._restore = restore  # where the next load begins
        self.connections = ViewConnections(context, on_broken=self._handle)
        healer = Healer(context, core, progress=self.state.count_progress, stage=stage)
        self.activity_runner: ActivityRunner
        if isinstance(core, VersionMember):
            self.activity_runner = VersionRunner(context, core, self.state, self.connections)
        else:
            self.activity_runner = StepRunner(context, core, self.state, self.connections, healer)
        self.follower = Follower(
            context,
            core,
            healer,
            report=self.state.reports.send,
            handle=self._on_followed,
            use_settings=self.state.use_settings,
            tasks=self._tasks,
        )
        self._activity: asyncio.Task[None] | None = None
        self._result: asyncio.Task[None] | None = None  # saves the state after the last step
        self._released, self._standing = asyncio.Event(), asyncio.Event()

    # ------------------------------------------------------------------------------------------- what the worker calls

    async def run(self) -> None:
        try:
            async with self._tasks:
                watch = self._tasks.create_task(self._watch_compute(), name=f"job {self.job}: watch")
                self._start(self._load)
                await self._released.wait()
                watch.cancel()
                self.follower.end()
                if self.state.assembler is not None:
                    await self.state.assembler.stop()  # frees memory that the next job may need
                self._disband("the job was released")
        finally:
            self._disband("this worker ended")
            self.activity_runner.close()
            self.state.close()
            gc.collect()  # a strategy, and the modules of FSDP2, refer to themselves

    def release(self) -> None:
        self._released.set()

    def announce_view(self, view: View) -> None:
        rank = view.rank_of(self._context.peer_id)
        if view.stages != self.stage.count or (rank is not None and view.stage_of(rank) != self.stage.index):
            raise ProtocolError(f"this worker holds {self.stage}, but has rank {rank} in a view of {view.stages} parts")
        self.state.change_settings_untrusted(view.changes)
        if rank is not None:
            self._context.inbound.announced(view, Topology.RING, view.left_of(rank).peer_id)
        self.follower.end(partial(self._handle, ev.ViewArrived(view)))

    def catch_up(self, message: CatchUp) -> None:
        if self.core.phase is MemberPhase.IDLE and self.state.is_built:
            self.state.change_settings_untrusted(message.changes)
            if not self.follower.active:  # it may give its state to others, and that state is about to change
                self.state.heal_source.cut("the source itself fetches a state")
            self.follower.begin(message, self.state.engine)

    def request(self, flag: Flag, generation: int = 0) -> None:
        self._handle(ev.FlagRequested(flag, generation))

    def restore(self, point: RestorePoint) -> None:
        """Go back to a checkpoint. If neither this member nor the holders have it, load an older one; the member is
        then healed."""
        self._restore = point
        self.follower.end(partial(self._handle, ev.StateDiscarded("the job goes back to a checkpoint")))

    def report_again(self) -> None:
        """Assigned again: stop following, then report the state held here."""

        def report() -> None:
            if self.core.torn and self.core.phase is MemberPhase.IDLE:
                self._handle(ev.StateDiscarded("the state fetched beside the ring is incomplete"))
            else:
                self.on_seed_back()

        self.follower.end(report)

    def on_seed_back(self) -> None:
        self.state.reports.report_state(follows=self.follower.active, level=self.follower.is_level)

    def list_held_parts(self, limit_bytes: int) -> list[HeldPart]:
        return self.state.reports.list_held_parts(state_bytes=self.connections.state_bytes, limit_bytes=limit_bytes)

    async def wait_until_stopped(self) -> None:
        while self.core.running:
            self._standing.clear()
            await self._standing.wait()

    def save(self) -> None:
        """Save the state at the next step boundary; after the last step now, because no boundary follows."""
        if self.core.phase is not MemberPhase.DONE:
            self.request(Flag.SAVE)
        elif self._result is None or self._result.done():
            self._result = start_in(self._tasks, self._save_result(), f"job {self.job}: result")

    async def _save_result(self) -> None:
        await self.save_state()
        await self.state.report_result()

    @property
    def has_unsaved_state(self) -> bool:
        return self.state.has_unsaved and not self.follower.active

    async def save_state(self) -> None:
        """Stop in the ring, and save the state that this member holds. Failures are only reported."""
        if self.core.running and self.core.view is not None:
            self._handle(ev.ViewBroken(self.core.view.generation, "", "this worker leaves"))
            await self.wait_until_stopped()
        await self.state.save(is_due=self.has_unsaved_state)

    def decide(self, hello: Hello) -> Refuse | None:
        """Decide on a peer that asks for the state."""
        view = self.core.view
        if view is None or view.generation < hello.generation:
            return Refuse(RefusalCode.STALE_GENERATION, "this member is not in that view")
        return None if "worker" in hello.roles else Refuse(RefusalCode.ROLE, "only workers can fetch a state")

    async def serve(self, connection: Connection, hello: Hello) -> None:
        if not self.state.is_built or self.follower.active:
            raise PeerError("this member has no state to send")
        await self.state.heal_source.give(connection, hello, self.state.engine)

    # ------------------------------------------------------------------------------------------------ core and shell

    def _handle(self, event: object) -> None:
        probe = self._context.world.probe
        event = probe.alter("member-event", event)
        try:
            instructions = self.core.handle(event)
        except PeerError as problem:  # a member sent an invalid token
            generation = self.core.view.generation if self.core.view else 0
            instructions = self.core.handle(ev.ViewBroken(generation, "", problem.message))
        probe.event("member-handled", core=self.core, event=event, instructions=instructions)
        for instruction in instructions:
            self._carry_out(instruction)
        if not self.core.running:
            self._standing.set()

    def _on_followed(self, event: object) -> None:
        self._handle(event)
        if self.core.torn:
            self.state.reports.steps.forget()
        if isinstance(event, ev.StateFollowed):
            self.state.early.resume_from({})
            self.state.reports.ledger.stands_at(event.applied, event.lineage)
            self.state.count_progress()

    def _carry_out(self, instruction: object) -> None:
        match instruction:
            case ev.SendReport(report):
                self.state.reports.announce(report)
            case ev.CloseRing(reason):
                self._disband(reason)
            case ev.Reload():
                self._start(self._load)
            case ev.FormRing():
                self._start(partial(self._form, instruction))
            case _ if (activity := self.activity_runner.activities.get(type(instruction))) is not None:
                self._start(partial(activity, instruction))
            case _:
                self.activity_runner.carry_out(instruction)

    def _start(self, activity: Activity) -> None:
        work = self._guarded(activity)
        self._activity = start_in(self._tasks, work, f"job {self.job}") or self._activity

    async def _guarded(self, activity: Activity) -> None:
        generation = self.core.view.generation if self.core.view else 0
        try:
            event = await activity()
        except NeighbourAway as problem:
            event = ev.ViewBroken(generation, problem.peer_id, problem.message, cause=problem.cause)
        except (NetworkError, PeerError) as problem:
            event = self.connections.failure(generation) or ev.ViewBroken(generation, "", problem.message)
        except P2PTrainError as problem:
            event = ev.MemberFailed(self.state.reports.report_failure(problem))
        self._handle(event)

    def _disband(self, reason: str) -> None:
        if self._activity is not None:
            self._activity.cancel()
            self._activity = None
        self.state.heal_source.end_view(reason)
        self.connections.close()

    async def _load(self) -> ev.StateLoaded:
        state = self.state
        state.heal_source.cut("another state is loaded")
        if state.early.budget is not None:
            await state.early.budget.load()
        if not state.is_built:
            await state.build()
            self.activity_runner.build()
        restore, self._restore = self._restore, RestorePoint()
        loaded = await state.load(restore)
        self.connections.state_bytes = state.heal_source.state_bytes
        return loaded

    async def _form(self, form: ev.FormRing) -> ev.ActivityFinished:
        context, state = self._context, self.state
        form_began = context.world.clock.now()
        session = await self.connections.form(form.view)
        here = form.view.members[session.rank].host
        neighbours = sum(member.host == here for member in form.view.members)
        await context.compute.run(state.engine.share_cores, neighbours)
        await state.use_settings()
        state.reports.steps.steps_total = self.core.steps_total
        await self.activity_runner.begin_view(session)
        state.heal_source.ask_for_snapshot()
        state.reports.begin_view(form.view, formed_s=context.world.clock.now() - form_began)
        return ev.ActivityFinished(form.ticket)

    async def _watch_compute(self) -> None:
        """Report a call on the compute thread that hangs while other members wait for it. The seed then removes this
        worker from the ring, and it joins again when the call has ended."""
        compute, detector = self._context.compute, HangDetector()
        compute.known.clear()  # another job's calls take other times
        reported: ComputeCall | None = None
        while True:
            await asyncio.sleep(WATCH_S)
            call, view = compute.call, self.core.view
            hung_s = detector.waited(WATCH_S, call, compute.known, for_others=self.connections.busy)
            if call is not None and hung_s and self.core.running and view is not None and view.size > 1:
                text = f"its computing has not moved for {hung_s:.0f} s ({call.name})"
                self.state.reports.report_hang(text, first=call is not reported)
                reported = call
