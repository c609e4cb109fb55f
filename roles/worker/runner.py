"""Shell of the step transaction: carries out its instructions for one job and feeds the outcomes back as events."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, cast

from configs.schema import Profile
from p2ptrain.compute.noise import KEY_BYTES
from p2ptrain.core.errors import JobFailed, NeighbourAway, NetworkError, P2PTrainError, PeerError, ProtocolError
from ring.chain import Chain
from ring.direct import DirectMessages
from ring.links import Topology
from ring.neighbours import RingBroken, cause_of
from ring.session import RingSession
from ring.token import Flag, Token, check_untrusted
from ring.transaction import (
    Adopt,
    Apply,
    Boundary,
    Broken,
    CloseRing,
    Compute,
    Confirm,
    EndCompute,
    Event,
    Exchange,
    Exchanged,
    Failed,
    Finished,
    FlagRequested,
    Followed,
    FormRing,
    Gathered,
    Heal,
    Instruction,
    Loaded,
    Phase,
    Record,
    Reduce,
    Reduced,
    Reload,
    SendReport,
    Transaction,
    Unloaded,
    ViewArrived,
    Vote,
)
from ring.view import View
from roles.background import started_in
from roles.compute_thread import ComputeCall, HangDetector
from roles.engine import WHOLE, Engine, Stage
from roles.snapshots import Snapshots, state_bytes
from roles.strategies.federated import share_rule, slots
from roles.strategies.interface import Strategy
from roles.strategies.server import ServerStrategy
from roles.worker.boundary import BoundaryWork
from roles.worker.checkpoint_assembler import CheckpointAssembler, assembles
from roles.worker.checkpoint_store import STANDSTILL_S, CheckpointFiles, Checkpointing
from roles.worker.context import Context
from roles.worker.early_stop import EarlyStop
from roles.worker.heal import Follower, Healer
from roles.worker.heal_source import HealSource
from roles.worker.privacy import Budget
from roles.worker.reports import LEDGER_FILE, LEDGER_FILE_BYTES, METRICS_FILE, METRICS_FILE_BYTES, Reports
from wire.chain_messages import HeldPart
from wire.connection import Connection
from wire.job_messages import CatchUp, MemberRecord
from wire.messages import Hello

WATCH_S = 1.0
STILL_S, NEW_S = 12.0, 60.0
"""Part of the patience with members, and with new ones. It is longer than a hang takes to be noticed."""
FORM_TIMEOUT_S = 20.0  # a neighbour may have to abort a long micro-batch before it joins the new view

P = ParamSpec("P")


def broken_by(lost: RingBroken, generation: int) -> Broken:
    return Broken(generation, lost.suspect, lost.cause.message, cause=cause_of(lost.cause), beside=lost.beside)


class JobRunner:
    """One worker's part in one job, from ``Assign`` to ``Release``."""

    def __init__(
        self,
        context: Context,
        *,
        job: str,
        profile: Profile,
        spec: str,
        checkpoints: CheckpointFiles,
        restore_step: int,
        stage: Stage = WHOLE,
        whole: CheckpointFiles | None = None,
        holders: Sequence[MemberRecord] = (),
        lineage: str = "",
    ) -> None:
        self.job = job
        self.stage = stage
        self.profile = profile
        self.progress = 0
        self._asynchronous = profile.job.strategy == "server"
        self.core = Transaction(
            job=job,
            peer_id=context.peer_id,
            steps_total=profile.job.steps,
            checkpoint_every=profile.checkpoint.every,
            # The strategy refuses an outlier before it becomes part of a version.
            outlier_factor=0.0 if self._asynchronous else profile.guard.outlier_factor,
            share_rule=share_rule(profile),
            robust=bool(profile.robust.rule),
            hidden_norms=profile.federated.secure or profile.privacy.epsilon > 0,
            asynchronous=self._asynchronous,
        )
        self._budget = Budget(profile.privacy, checkpoints) if profile.privacy.epsilon else None
        self._early = EarlyStop(profile.validation.patience, self._budget)
        self._is_last = False  # the step under way is the job's last, by what all members know
        self.reports = Reports(context, self.core, job=job, stage=stage, profile=profile, early=self._early)
        self.clock = self.reports.clock
        self.bytes_in = self.bytes_out = self.tokens = 0
        self._context = context
        self._spec = spec
        self.checkpoints = checkpoints
        self._restore_step, self._holders, self._restore_lineage = restore_step, holders, lineage
        self._engine: Engine | None = None
        self._strategy: Strategy | None = None
        self._session: RingSession | None = None
        self._beside: list[RingSession | Chain] = []  # further rings and the chain that the strategy asked for
        self._alone: RingSession | None = None  # of an asynchronous view: this member's vote is the only one
        self.messages: DirectMessages | None = None  # between the members of the view, if the strategy asked for them
        self._digests = (b"", b"")  # of the step reduced last: the joined digest, and the digests of all stages
        self._activity: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()
        self._released = asyncio.Event()
        self._standing = asyncio.Event()
        self.snapshots = Snapshots(context.compute)
        self._saving = Checkpointing(
            context,
            job=job,
            files=checkpoints,
            snapshots=self.snapshots,
            tasks=self._tasks,
            stage=stage,
            extra_files=self.reports.files,
            where=lambda: (self.core.applied, self.progress),
            save_soon=lambda: self.wish(Flag.SAVE),
        )
        self.reports.unsaved = lambda: self._saving.problem or (self.assembler.problem if self.assembler else "")
        self.assembler: CheckpointAssembler | None = None
        if whole is not None:
            self.assembler = CheckpointAssembler(
                context,
                job=job,
                stage=stage,
                parts=checkpoints,
                files=whole,
                checkpoints=self._saving,
                did_something=self._did_something,
            )
        self._between = BoundaryWork(context, profile=profile, checkpoints=self._saving, early=self._early)
        self.heal_source = HealSource(context, self.core, want_snapshot=lambda: self.wish(Flag.SNAPSHOT), stage=stage)
        self._healer = Healer(context, self.core, progress=self._did_something, stage=stage)
        self.follower = Follower(
            context, self.core, self._healer, report=self.reports.send, handle=self._brought_on, tasks=self._tasks
        )
        self._state_bytes = 0
        self._trained: set[str] = set()  # members of the newest step
        self._result: asyncio.Task[None] | None = None  # saves the state after the last step

    # ------------------------------------------------------------------------------------------- what the worker calls

    async def run(self) -> None:
        try:
            async with self._tasks:
                watch = self._tasks.create_task(self._watch_compute(), name=f"job {self.job}: watch")
                self._start(self._load)
                await self._released.wait()
                watch.cancel()
                self.follower.end()
                if self.assembler is not None:
                    await self.assembler.stop()  # frees memory that the next job may need
                self._disband("the job was released")
        finally:
            self._disband("this worker ended")
            self.heal_source.cut("this worker ended")
            self._engine = self._strategy = self.reports.engine = None  # free the memory for the next job
            self.snapshots.close()
            gc.collect()  # a strategy, and the modules of FSDP2, refer to themselves

    def release(self) -> None:
        self._released.set()

    def view_announced(self, view: View) -> None:
        rank = view.rank_of(self._context.peer_id)
        if view.stages != self.stage.count or (rank is not None and view.stage_of(rank) != self.stage.index):
            raise ProtocolError(f"this worker holds {self.stage}, but has rank {rank} in a view of {view.stages} parts")
        if rank is not None:
            self._context.inbound.announced(view, Topology.RING, view.left_of(rank).peer_id)
        self._after_following(ViewArrived(view))

    def catch_up(self, message: CatchUp) -> None:
        if self.core.phase is Phase.IDLE and self._engine is not None:
            if not self.follower.active:  # it may give its state to others, and that state is about to change
                self.heal_source.cut("the source itself fetches a state")
            self.follower.begin(message, self._engine)

    def wish(self, flag: Flag, generation: int = 0) -> None:
        self._handle(FlagRequested(flag, generation))

    def restore(self, step: int, holders: Sequence[MemberRecord] = (), lineage: str = "") -> None:
        """Go back to the checkpoint of ``step`` and ``lineage``. If neither this member nor ``holders`` have it, load
        an older one; the member is then healed."""
        self._restore_step, self._holders, self._restore_lineage = step, holders, lineage
        self._after_following(Unloaded("the job goes back to a checkpoint"))

    def called_back(self) -> None:
        """Assigned again: stop following, then report the state held here."""
        if self.follower.active:
            self.follower.end(then=self._tell_what_it_has)
        else:
            self.seed_is_back()

    def _tell_what_it_has(self) -> None:
        if self.core.torn:
            self._handle(Unloaded("the state fetched beside the ring is incomplete"))
        else:
            self.seed_is_back()

    def seed_is_back(self) -> None:
        self.reports.seed_is_back(follows=self.follower.active, level=self.follower.reported)

    def held(self, limit_bytes: int) -> list[HeldPart]:
        return self.reports.held(self._strategy, state_bytes=self._state_bytes, limit_bytes=limit_bytes)

    def figures(self) -> dict[str, float]:
        """What is shown of this worker's contributions to an asynchronous job."""
        if not self._asynchronous or self._strategy is None:
            return {}
        return self._server_strategy.figures()

    async def stand_still(self) -> None:
        while self.core.running:
            self._standing.clear()
            await self._standing.wait()

    async def saved(self, step: int, lineage: str) -> None:
        await self._saving.outcome(step, lineage)

    def save(self) -> None:
        """Save the state at the next step boundary; after the last step now, because no boundary follows."""
        if self.core.phase is not Phase.DONE:
            self.wish(Flag.SAVE)
        elif self._result is None or self._result.done():
            self._result = started_in(self._tasks, self._save_result(), f"job {self.job}: result")

    async def _save_result(self) -> None:
        await self.save_state()
        core, view, assembler = self.core, self.core.view, self.assembler
        rank = view.rank_of(self._context.peer_id) if view is not None else None
        if assembler is not None and view is not None and rank is not None and core.phase is Phase.DONE:
            assembler.want(view, rank, core.applied, core.lineage, self._tasks.create_task)
            while not await assembler.settled(STANDSTILL_S):
                pass
        if core.phase is Phase.DONE:
            self.reports.send(core.report("done"))

    @property
    def has_unsaved_state(self) -> bool:
        """Whether this member holds a state of its job's last view that it has not saved."""
        core = self.core
        if self._engine is None or core.view is None or core.torn or core.anew or self.follower.active:
            return False
        return core.applied >= max(core.view.step, 1) and not self._saving.has_saved(core.applied, core.lineage)

    async def save_state(self) -> None:
        """Stop in the ring, and save the state that this member holds. Failures are only reported."""
        if self.core.running and self.core.view is not None:
            self._handle(Broken(self.core.view.generation, "", "this worker leaves"))
            await self.stand_still()
        try:
            if self.has_unsaved_state:
                now = Boundary(0, self.core.applied, save=True, last=True)
                await self._between.keep(now, self._ready_engine(), 0, self.reports.meta(), stopping=True)
            else:
                await self._saving.announce_all()
        except P2PTrainError as problem:
            self._context.notify("error", "checkpoint-failed", problem.message)

    async def give_state(self, connection: Connection, hello: Hello) -> None:
        if self._engine is None or self.follower.active:
            raise PeerError("this member has no state to send")
        await self.heal_source.give(connection, hello, self._engine)

    # ------------------------------------------------------------------------------------------------ core and shell

    def _handle(self, event: Event) -> None:
        try:
            instructions = self.core.handle(event)
        except PeerError as problem:  # a member sent an invalid token
            generation = self.core.view.generation if self.core.view else 0
            instructions = self.core.handle(Broken(generation, "", problem.message))
        for instruction in instructions:
            self._carry_out(instruction)
        if not self.core.running:
            self._standing.set()

    def _after_following(self, event: Event) -> None:
        if self.follower.active:
            self.follower.end(event)
        else:
            self._handle(event)

    def _brought_on(self, event: Event) -> None:
        self._handle(event)
        if self.core.torn:
            self.reports.steps.forget()
        if isinstance(event, Followed):
            self._early.resumed({})
            self.reports.ledger.stands_at(event.applied, event.lineage)
            self._did_something()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case SendReport(report):
                self.reports.say(report)
            case CloseRing(reason):
                self._disband(reason)
            case Reload():
                self._start(self._load)
            case FormRing():
                self._start(self._form, instruction)
            case Heal():
                self._start(self._heal, instruction)
            case Compute():
                self._start(self._compute, instruction)
            case Exchange():
                self._start(self._exchange, instruction)
            case Adopt():
                self._start(self._adopt, instruction)
            case EndCompute():
                self._server_strategy.end()
            case Reduce():
                self._start(self._reduce, instruction)
            case Vote():
                self._start(self._vote, instruction)
            case Apply():
                self._start(self._apply, instruction)
            case Confirm():
                self._start(self._confirm, instruction)
            case Boundary():
                self._start(self._boundary, instruction)
            case Record(row, lineage):
                joined, digests = self._digests
                self.heal_source.committed(row, digests if joined == row.digest else b"")
                self.reports.recorded(row, lineage)

    def _start(self, activity: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs) -> None:
        work = self._guarded(activity, *args, **kwargs)
        self._activity = started_in(self._tasks, work, f"job {self.job}") or self._activity

    async def _guarded(
        self, activity: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        generation = self.core.view.generation if self.core.view else 0
        try:
            await activity(*args, **kwargs)
        except NeighbourAway as problem:
            self._handle(Broken(generation, problem.peer_id, problem.message, cause=problem.cause))
        except (NetworkError, PeerError) as problem:
            ended = [session.broken.result() for session in self._sessions() if session.broken.done()]
            broken = next((broken for broken in ended if broken.suspect), None)
            if broken is not None:
                self._handle(broken_by(broken, generation))
            else:
                self._handle(Broken(generation, "", problem.message))
        except P2PTrainError as problem:
            self._handle(Failed(self.reports.cannot_go_on(problem)))

    def _disband(self, reason: str) -> None:
        if self._activity is not None:
            self._activity.cancel()
            self._activity = None
        self.heal_source.view_ended(reason)
        self.bytes_in, self.bytes_out = self.totals()
        sessions, self._session, self._alone, self._beside = self._sessions(), None, None, []
        messages, self.messages = self.messages, None
        if messages is not None:
            messages.close()
        for session in sessions:
            session.close()

    def _sessions(self) -> list[RingSession | Chain]:
        return [*([self._session] if self._session is not None else []), *self._beside]

    def totals(self) -> tuple[int, int]:
        """Bytes received and sent in this job."""
        used: list[Any] = [session.links for session in self._sessions()]
        if self.messages is not None:
            used.append(self.messages)
        return (
            self.bytes_in + sum(each.bytes_in for each in used), self.bytes_out + sum(each.bytes_out for each in used)
        )  # fmt: skip

    async def _watch_compute(self) -> None:
        """Report a call on the compute thread that hangs while other members wait for it. The seed then removes this
        worker from the ring, and it joins again when the call has ended."""
        compute, detector = self._context.compute, HangDetector()
        compute.known.clear()  # another job's calls take other times
        told: ComputeCall | None = None
        while True:
            await asyncio.sleep(WATCH_S)
            call, view = compute.call, self.core.view
            waits = any(isinstance(ring, RingSession) and ring.busy for ring in self._sessions())
            hung_s = detector.waited(WATCH_S, call, compute.known, for_others=waits)
            if call is not None and hung_s and self.core.running and view is not None and view.size > 1:
                text = f"its computing has not moved for {hung_s:.0f} s ({call.name})"
                self.reports.hung(text, first=call is not told)
                told = call

    def _did_something(self) -> None:
        self.progress += 1

    # ----------------------------------------------------------------------------------------------------- activities

    async def _load(self) -> None:
        context = self._context
        self.heal_source.cut("another state is loaded")
        if self._budget is not None:
            await self._budget.load()
        if self._engine is None:
            self._engine = await context.compute.run(context.build_engine, self.profile, self.stage)
            factory = context.strategies(self.profile)
            ring = self.profile.ring
            self.reports.engine = self._engine
            if self._engine.data.note:
                say = context.tell if self.profile.data.private else context.notify  # it names files
                say("warning", "data", self._engine.data.note)
            self._strategy = factory(self._engine, context.compute, self._did_something, ring.bucket_bytes)
        restore_step, self._restore_step = self._restore_step, -1
        if self.assembler is not None:
            await self.assembler.stop()
            await self._saving.settled()
            await self.assembler.bring(restore_step, self._holders, self._restore_lineage)
        applied, lineage, square_sum, entry = await self.checkpoints.load(
            self._engine, context.compute, spec=self._spec, restore_step=restore_step, split=self.stage.split
        )
        self._state_bytes = await context.compute.run(lambda: state_bytes(self._ready_engine().state.blobs()))
        self.heal_source.state_bytes = self._state_bytes
        rows = await self.checkpoints.beside(entry, LEDGER_FILE, LEDGER_FILE_BYTES)
        metrics = await self.checkpoints.beside(entry, METRICS_FILE, METRICS_FILE_BYTES)
        self.reports.loaded(applied, lineage, rows, metrics, wanted=restore_step)
        await self._saving.resumed(entry)
        self._early.resumed(entry.meta if entry is not None else {})
        self._handle(Loaded(applied, lineage, square_sum))

    async def _form(self, form: FormRing) -> None:
        context = self._context
        form_began = context.world.clock.now()
        self._session = session = await self._meet(form.view, Topology.RING)
        if self.profile.job.exact:  # every member would hold the same wrong sum, so equal digests prove nothing
            session.audit()
        here = form.view.members[session.rank].host
        beside = sum(member.host == here for member in form.view.members)
        await context.compute.run(self._ready_engine().share_cores, beside)
        session.broken.add_done_callback(lambda _: self._session_broke(session, form.view.generation))
        session.patience_s = self._patience_s()
        if self._asynchronous:
            only = replace(form.view, members=(form.view.members[session.rank],))
            self._alone = await RingSession.form(context, only, timeout_s=FORM_TIMEOUT_S)
        await self._ready_strategy().begin(session, self)
        if self._budget is not None:
            await self._budget.view_began(session, patience_s=self._patience_s())
        if self.profile.validation.patience and not self._asynchronous:
            told = await session.all_gather(self._early.told(), patience_s=self._patience_s())
            healthy = [it for it, member in zip(told, form.view.members, strict=True) if member.healthy]
            self._early.agree_untrusted(healthy, form.view.step)
        self.heal_source.view_began()
        self.reports.view_began(form.view, formed_s=context.world.clock.now() - form_began)
        self._handle(Finished(form.ticket))

    async def ring(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        session = await self._meet(view, topology)
        self._joined_beside(session)
        return session

    async def chain(
        self, view: View, order: Sequence[str], *, activation_bytes: int, gradient_bytes: int, in_flight: int
    ) -> Chain:
        chain = await Chain.form(
            self._context,
            self._with_beats(view),
            order=order,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
            in_flight=in_flight,
            timeout_s=self._forming_s(view),
        )
        self._joined_beside(chain)
        return chain

    def direct(self, session: RingSession) -> DirectMessages:
        self.messages = DirectMessages(self._context, session.view, session.rank)
        self.messages.attach(session)
        return self.messages

    async def _meet(self, view: View, topology: Topology) -> RingSession:
        timeout_s = self._forming_s(view)
        return await RingSession.form(self._context, self._with_beats(view), timeout_s=timeout_s, topology=topology)

    def _with_beats(self, view: View) -> View:
        membership, usual_s = self.profile.membership, self._context.beats()
        return replace(
            view,
            heartbeat_s=membership.heartbeat_s or view.heartbeat_s or usual_s[0],
            death_s=membership.death_s or view.death_s or usual_s[1],
        )

    def _forming_s(self, view: View) -> float:
        # A neighbour may be redoing a step: allow four times what the optimizer takes on one thread.
        return FORM_TIMEOUT_S + max(self._state_bytes, view.state_bytes) / 100e6

    def _joined_beside(self, session: RingSession | Chain) -> None:
        self._beside.append(session)
        session.broken.add_done_callback(lambda _: self._session_broke(session, session.view.generation))

    def _session_broke(self, session: RingSession | Chain, generation: int) -> None:
        if session in self._sessions() and not session.broken.cancelled():
            broken = session.broken.result()
            for other in self._sessions():
                if other is not session and not other.links.lost_elsewhere(broken):
                    other.close(broken.cause.message)
            self._handle(broken_by(broken, generation))

    async def _heal(self, instruction: Heal) -> None:
        self.heal_source.cut("it is healed itself")
        done = await self._healer.within(instruction, self._ready_engine())
        self.reports.healed(instruction.view, done)
        self._handle(Finished(instruction.ticket))

    async def _compute(self, instruction: Compute) -> None:
        step, first, count = instruction.step, instruction.first, instruction.count
        session, patience_s = self._ready_session(), self._patience_s()
        if step == session.view.step:
            self.reports.steps.tell_beyond(session.view, step)
        began, self._is_last = self._context.world.clock.now(), self._early.due
        if self._budget is not None:
            await self._spend(self._budget, session.size)
        if slots(self.profile):
            taken = sum(map(bool, self.core.shares.counts[: session.rank]))  # by members before this one
            slot = self._ready_engine().slots
            assert slot is not None
            await self._context.compute.run(slot.use_slot, taken if count else 0)  # without a share it adds zeros
        if self._asynchronous:
            await self._publish()
        with self.clock.phase("compute"):
            await self._ready_strategy().compute(step, first, count, session, patience_s=patience_s)
        if step > session.view.step or not self.clock.unit_us:  # the first one may wait for an aborted micro-batch
            self.clock.computed(self._context.world.clock.now() - began, count)
        self.tokens += instruction.count * self._ready_engine().data.tokens_per_micro_batch
        self._handle(Finished(instruction.ticket))

    async def _spend(self, budget: Budget, members: int) -> None:
        """Count the step that begins, and give the engine a key for its noise. If the budget does not allow the step,
        such as a repeated one, it changes nothing."""
        key = self._context.world.entropy(KEY_BYTES) if await budget.spend() else b""
        noise = self._ready_engine().noise
        assert noise is not None
        await self._context.compute.run(noise.use_noise, budget.noise_std / math.sqrt(members), key)

    async def _reduce(self, instruction: Reduce) -> None:
        session, strategy = self._ready_session(), self._ready_strategy()
        with self._communicating(session):
            contribution = await strategy.reduce(session)
        self._digests = contribution.digest, contribution.digests
        self.clock.exchanged(exposed_s=strategy.exposed_s, communicating_s=strategy.communicating_s)
        sent, received = session.take_hop_sums()
        reduced = Reduced(
            instruction.ticket,
            contribution.digest,
            contribution.part,
            own=contribution.own,
            unit_us=self.clock.unit_us,
            sent=sent,
            received=received,
            counts=contribution.counts,
            made_of=contribution.made_of,
            stop=self._is_last,
        )
        self._handle(reduced)

    async def _vote(self, instruction: Vote) -> None:
        session = self._voters()
        with self._communicating(session):
            check = partial(check_untrusted, mine=Token.decode_untrusted(instruction.token))
            tokens = await session.all_gather(instruction.token, patience_s=self._patience_s(), check=check)
        self._handle(Gathered(instruction.ticket, tuple(tokens)))

    @contextmanager
    def _communicating(self, session: RingSession) -> Iterator[None]:
        waited_s = session.waited_s
        with self.clock.phase("communicate"):
            yield
        self.clock.waited(session.waited_s - waited_s)

    async def _apply(self, instruction: Apply) -> None:
        with self.clock.phase("compute"):
            await self.heal_source.keep(self._ready_engine())
            self.reports.steps.applied(await self._ready_strategy().commit(instruction.step, instruction.square_sum))
        self._did_something()
        self._trained = {member.peer_id for member in self._session.view.members} if self._session else set()
        self.reports.step_done(instruction.step, self._ready_strategy().scores, redone=instruction.redo)
        self._handle(Finished(instruction.ticket))

    async def _confirm(self, instruction: Confirm) -> None:
        engine, session = self._ready_engine(), self._voters()
        if instruction.applied == session.view.step:  # the view begins after the last step
            self.reports.steps.tell_beyond(session.view, instruction.applied)
        digests = await self._between.compare(engine, session, patience_s=self._patience_s() + NEW_S)
        self._handle(Gathered(instruction.ticket, digests))

    async def _boundary(self, instruction: Boundary) -> None:
        engine, session, applied = self._ready_engine(), self._ready_session(), instruction.applied
        strategy, patience_s = self._ready_strategy(), self._patience_s() + NEW_S
        if self._asynchronous:
            await self._publish(over=self.core.stopping, last=instruction.last)
        val_loss = await self._between.validate(instruction, engine, strategy, self._voters(), patience_s=patience_s)
        self.reports.step_over(applied, session, val_loss)
        replica, meta = session.view.replica_of(session.rank), self.reports.meta()
        saves = await self._between.keep(instruction, engine, replica, meta, stopping=self.core.stopping)
        if (
            saves
            and self.assembler is not None
            and assembles(session.view, session.rank, self.profile.checkpoint.copies)
        ):
            self.assembler.want(session.view, session.rank, applied, self.core.lineage, self._tasks.create_task)
        if instruction.last and self.assembler is not None:
            await self._between.gathered(self.assembler, session, patience_s=patience_s)
        if instruction.snapshot:
            await self.heal_source.snapshot(engine, self.snapshots)
        self._handle(Finished(instruction.ticket))

    async def _publish(self, *, over: bool = False, last: bool = False) -> None:
        core, rows = self.core, self.reports.ledger
        await self._server_strategy.publish(core.applied, core.lineage, core.square_sum, rows, over=over, last=last)

    async def _exchange(self, instruction: Exchange) -> None:
        core, began, computes = self.core, self._context.world.clock.now(), self._server_strategy.share
        reply = await self._server_strategy.exchange(core.applied, core.lineage)
        if reply.verdict:
            self.clock.computed(self._context.world.clock.now() - began, computes)
            self.tokens += computes * self._ready_engine().data.tokens_per_micro_batch
        self._did_something()
        version = reply.version, reply.lineage, reply.square_sum
        self._handle(Exchanged(instruction.ticket, *version, over=reply.over, last=reply.last))

    async def _adopt(self, instruction: Adopt) -> None:
        core, strategy = self.core, self._server_strategy
        await strategy.adopt(instruction.applied)
        self.reports.steps.forget()
        # First, as the report that may follow drops rows that do not lead to its state.
        self.reports.ledger.take_up_untrusted(instruction.applied, instruction.lineage, strategy.rows)
        self._did_something()
        self._handle(Finished(instruction.ticket))
        self._context.on_step(core.applied, core.steps_total, {})

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def _server_strategy(self) -> ServerStrategy:
        return cast(ServerStrategy, self._ready_strategy())

    def _voters(self) -> RingSession:
        return self._alone or self._ready_session()

    def _patience_s(self) -> float:
        """Longest time a collective may make no progress. Heartbeats prove that a peer lives; this bounds a stuck one.

        Three causes of slowness are allowed for. A member computes: 5 times the longest step seen, or 600 s before the
        first one. A member copies its state, at 100 MB/s. In the first step of a view, a member that was not in the
        last step is new: it loads libraries and heals, the whole state (of a split model, the largest stage's) at 1
        MB/s.
        """
        core, view = self.core, self.core.view
        usual_s = 5.0 * self.clock.longest_s if self.clock.longest_s else 600.0
        state_bytes = max(self._state_bytes, view.state_bytes if view else 0)
        known = {member.peer_id for member in view.members if member.healthy} & self._trained if view else set()
        if view is not None and (core.applied > view.step or len(known) == view.size):
            return STILL_S + usual_s + state_bytes / 100e6
        return NEW_S + usual_s + state_bytes / 1e6

    def _ready_engine(self) -> Engine:
        if self._engine is None:
            raise JobFailed("a view came before the model was built")
        return self._engine

    def _ready_strategy(self) -> Strategy:
        if self._strategy is None:
            raise JobFailed("a view came before the model was built")
        return self._strategy

    def _ready_session(self) -> RingSession:
        if self._session is None:
            raise NetworkError("the ring has ended")
        return self._session
