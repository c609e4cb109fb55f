"""The job controller: one job's record, its coordinator, and the task that carries out the coordinator's instructions.

The controller handles events strictly one after the other. It carries out all instructions of one event before it takes
the next event: it stores a view, then announces it. The queue needs no bound of its own. The sender of a report waits
until the report is handled, so the queue has at most one report per peer, and a few joins and losses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError, Refused
from ring import coordination as co
from ring.coordination import ENDED, JobPhase, JobWorker
from ring.coordinator import Coordinator
from ring.ledger import rows_untrusted
from ring.planning.measurements import LinkQuality, known_link
from ring.planning.ring_plan import RingOptions
from ring.recovery import Recorder
from ring.replicas import newest_kept
from ring.token import ShareRule
from ring.view import View
from roles.seed.ledger import Ledger
from roles.seed.peers import MAX_WHOLE, Link, announced_to, clipped, ring_beats, seen_from, whole
from roles.seed.store import JobRecord, Records
from roles.strategies import least_members, share_rule_of
from roles.training_shape import training_of
from wire.job_messages import (
    Assign,
    CatchUp,
    Hold,
    LedgerRows,
    MemberRecord,
    Release,
    SaveNow,
    StepMetrics,
    distance_key,
    excluded_key,
)
from wire.messages import EventNotice, Message
from wire.records import CheckpointInfo, JobInfo, LedgerHead, MemberScore, MetricRow

if TYPE_CHECKING:
    from roles.seed.server import Seed


def profile_of(spec: str) -> Profile | None:
    """The profile of a stored job; None if another release wrote it and this one cannot read it."""
    try:
        return Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return None


def seen_for(device: str, peer: JobWorker) -> JobWorker:
    """The worker as seen by a job that computes on ``device``. A job on the CPU ignores the figures of a GPU."""
    if device == "cpu" and not peer.on_host:
        return replace(peer, memory_bytes=0, flops=0.0, on_host=True)
    return peer


def in_shards(spec: str, shards: int) -> str:
    """The stored profile of a job whose model is from now on in so many shards; 1: whole. It keeps as many replicas as
    its number of workers allows. Raises ``Refused``."""
    profile = Profile.from_spec_untrusted(spec)
    if profile.job.strategy not in ("sync", "sharded"):
        text = f"a job of strategy {profile.job.strategy!r} keeps its layout; shards are for 'sharded' and 'sync'"
        raise Refused("wrong-strategy", text, remedy="leave --shards out, or start a new job from the checkpoint")
    tables = profile.model_dump()
    workers = shards * max(profile.job.workers // shards, 1)
    tables["job"] |= {"strategy": "sharded" if shards > 1 else "sync", "workers": workers}
    tables["sharded"]["shards"] = max(shards, 2)
    try:
        return Profile.from_spec_untrusted(json.dumps(tables)).to_spec()
    except ProtocolError as problem:
        raise Refused(
            "bad-parameter", f"{shards} shards: {problem.message}", remedy="choose another number"
        ) from problem


def assigned_spec(spec: str, cuts: Sequence[int], created_at: float) -> str:
    """The profile for a worker of the job: with its cuts, and with the date of its creation for chat templates."""
    profile, changes = profile_of(spec), dict[str, Any]()
    if profile is None:
        return spec  # the worker says that it cannot read it
    if cuts:
        changes["pipeline"] = profile.pipeline.model_copy(update={"cuts": list(cuts)})
    if profile.data.format == "chat" and not profile.data.date:
        day = datetime.fromtimestamp(created_at, UTC).date().isoformat()
        changes["data"] = profile.data.model_copy(update={"date": day})
    return profile.model_copy(update=changes).to_spec() if changes else spec


def _ring_options_of(profile: Profile) -> RingOptions:
    ring, exact = profile.ring, profile.job.exact
    return RingOptions(
        ring.order, ring.streams, ring.sub_chunk_bytes, "fp32" if exact else ring.codec, ring.error_budget
    )


_NOT_RUNNING = frozenset({str(phase) for phase in (*ENDED, JobPhase.PAUSED)})
_METRICS = {item.name for item in dataclasses.fields(MetricRow)} - {"job", "step", "wall", "generation", "members"}
_SHOWN = (
    "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "compute_ms", "communicate_ms", "wait_ms", "epsilon", "delta",
)  # fmt: skip


MAX_GAP = 512
"""Newest steps of which a row may still come after that of a later step: more than a member remembers."""
DISTANCES = 5
"""Window of the moving average of a member's distances. They are measured once in some steps."""
SETTLE_S = 30.0
"""How long a restored seed waits for the members of a job: as long as they may be away from a running seed."""


@dataclass(frozen=True, slots=True)
class NewLayout:
    """A person's request to go on from a whole checkpoint with another number of parts: the new profile."""

    spec: str
    restore: co.Restore


@dataclass(frozen=True, slots=True)
class History:
    """What the store knows of a job apart from its record. ``reread``: the job is older than this run of the seed."""

    view: View | None = None
    row: MetricRow | None = None
    val_loss: float | None = None
    saved: co.CheckpointsSaved = field(default_factory=lambda: co.CheckpointsSaved({}))
    head: LedgerHead | None = None
    begins: Sequence[tuple[int, int, str]] = ()  # generation, step and lineage of each known view
    recoveries: int = 0
    step_ms: tuple[float, int] = (0.0, 0)  # as Records.mean_step_ms
    reread: bool = False


class JobController:
    def __init__(self, seed: Seed, record: JobRecord, spec: str, history: History) -> None:
        self.record = record
        self.spec = spec
        self._seed = seed
        self._events: asyncio.Queue[tuple[co.Event | NewLayout, asyncio.Future[bool]]] = asyncio.Queue()
        self._retired = asyncio.Event()
        self.settled = asyncio.Event()
        self._views_told: dict[str, View] = {}
        self._early_rows: list[LedgerRows] = []
        self._kept_out: dict[str, tuple[str, float]] = {}
        self.told_view = asyncio.Event()
        if not record.unsettled:  # else the seed was restored, and its members may be in a newer view
            self.settled.set()
        if record.restoring is not None:  # the seed died before it had carried out this request
            self.post(co.Restore(*record.restoring))
            if record.paused:  # after the restore
                self.post(co.Signal.PAUSE)
        self._begin(history)

    def _begin(self, history: History) -> None:
        record, view = self.record, history.view
        self.profile = profile_of(self.spec)
        self.stages = self.profile.stages if self.profile else 1
        self._asynchronous = self.profile is not None and self.profile.job.strategy == "server"
        minted_below = self._seed.minted_below  # the highest that an earlier term may have minted
        if view is not None and view.stages != self.stages:
            minted_below, view = max(minted_below, view.generation), None  # its members held other parts
        self._row, self._val_loss = history.row, history.val_loss
        # The steps up to ``_rows_to``, and those in ``_rows_beyond``, have their rows of metrics.
        self._rows_to, self._rows_beyond = history.row.step if history.row else 0, set[int]()
        self._mean_ms, self._timed = history.step_ms
        past = co.StoredJob(
            state=record.state,
            reason=record.reason,
            paused=record.paused,
            view=view,
            corpus=record.corpus,
            known_step=max(view.step if view else 0, history.row.step if history.row else 0),
            saved=history.saved,
            held=record.held,
            branch=frozenset(record.branch) if record.branch is not None else None,
            step_s=_step_s(history.row) if history.row else 0.0,
            reread=history.reread,
        )
        options = co.JobOptions(
            replicas=record.workers // self.stages,
            micro_batches=record.micro_batches,
            ring_options=_ring_options_of(self.profile) if self.profile else RingOptions(),
            minted_below=minted_below,
            share_rule=share_rule_of(self.profile) if self.profile else ShareRule(),
            parts=self.stages,
            least=least_members(self.profile) if self.profile else 1,
            asynchronous=self._asynchronous,
            training=training_of(self.profile, record.shape, record.cuts),
            least_steps=_least_steps(self.profile) if self.profile else 0,
            masked=self.profile is not None and self.profile.federated.secure,
        )
        self._links_seen = 0
        self._robust = self.profile is not None and bool(self.profile.robust.rule)
        self._scores: dict[str, MemberScore] = {}  # of the members of the present view, if ``_robust``
        self.ledger = Ledger(record.id, history.head, history.begins)
        self._recoveries = Recorder(record.id, number=history.recoveries, view=view)
        self.core = Coordinator(record.id, options, past=past, now=self._seed.world.clock.now())

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def live(self) -> bool:
        return self.core.phase not in ENDED

    @property
    def running_view(self) -> View | None:
        return self.core.view if self.core.phase in (JobPhase.RUNNING, JobPhase.STOPPING, JobPhase.PAUSED) else None

    @property
    def keeps_best(self) -> bool:
        return self.profile is not None and self.profile.checkpoint.best

    def peer(self, link: Link) -> co.JobWorker:
        peer = seen_for(self.profile.device.kind if self.profile else "", link.peer)
        # A newcomer of an asynchronous job pulls the state from the server, like all members.
        return replace(peer, follows=False) if self._asynchronous else peer

    def stage_of(self, peer_id: str) -> int | None:
        return self.core.part_of(peer_id) if self.stages > 1 else None

    def whole(self, peer_ids: Iterable[str]) -> bool:
        """Whether these workers together hold a whole model: for a split model, every stage of it."""
        stages = {self.stage_of(peer_id) for peer_id in peer_ids}
        return len(stages - {None}) == self.stages if self.stages > 1 else bool(stages)

    def holds(self, peer_id: str) -> bool:
        view = self.running_view
        return view is not None and view.rank_of(peer_id) is not None

    def post(self, event: co.Event | NewLayout) -> asyncio.Future[bool]:
        """Queue an event. The future is done when the event is handled; it is False if the job was forgotten."""
        handled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._retired.is_set():
            handled.set_result(False)
        else:
            self._events.put_nowait((event, handled))
        return handled

    async def run(self) -> None:
        """Handle events and deadlines until ``retire``, or cancelled. Raises ``StorageError``."""
        if not self.settled.is_set():
            await self._await_members()
        while not self._retired.is_set():
            handled: asyncio.Future[bool] | None = None
            event: co.Event | NewLayout = co.Signal.TICK
            try:
                async with asyncio.timeout_at(self.core.next_deadline()):
                    event, handled = await self._events.get()
            except TimeoutError:
                pass
            if self._retired.is_set():
                _tell(handled, False)
                break
            clock = self._seed.world.clock
            match event:
                case co.PeerLost(peer_id, reason, left):
                    self._recoveries.lost(peer_id, reason, clock.now(), clock.wall(), left=left)
                case co.PeerReported(peer_id, report):
                    self._recoveries.reported(peer_id, report, clock.now(), clock.wall())
            events = await self._begun_anew(event) if isinstance(event, NewLayout) else [event]
            for news in (*self._measured(), *events):
                instructions = self.core.handle(news, self._seed.world.clock.now())
                for it in instructions:  # first: a job's new state is shown while the store is still writing
                    if isinstance(it, co.Emit):
                        self._seed.note(it.level, it.kind, it.text, it.peer_id, self.id)
                self._seed.subscriptions.touch("jobs", self.id)
                await self._keep_wishes()  # durable before an instruction acts on them
                for instruction in instructions:
                    await self._carry_out(instruction)
            if self.record.restoring is not None and self.core.restore is None:
                await self._keep(restoring=None)
            self._tell_kept_out()
            _tell(handled, True)
            self._seed.subscriptions.touch("jobs", self.id)
            self._seed.assign_free()
        while not self._events.empty():
            _tell(self._events.get_nowait()[1], False)

    async def _begun_anew(self, new: NewLayout) -> list[co.Event]:
        """Begin anew with the workers that are here, whose parts are no longer those of the model. The events to go on
        with."""
        members = [link for link in self._seed.links.values() if link.job == self.id]
        for link in members:
            link.say(Release(self.id, "the job goes on with another number of parts"))
        self.spec, profile, restore = new.spec, Profile.from_spec_untrusted(new.spec), new.restore
        self.record = replace(
            self.record, strategy=profile.job.strategy, workers=profile.job.workers, held={}, state="waiting",
            paused=False, finished_at=None, restoring=[restore.step, restore.peer_id, restore.lineage],
        )  # fmt: skip
        await self._seed.store.call(Records.change_layout, self.record, self.spec)
        checkpoints = self._seed.checkpoints
        await checkpoints.drop([item.id for item in checkpoints.of(self.id) if item.stage is not None])
        self._begin(await self._seed.store.call(history, self.id))
        self._seed.copy_soon()
        return [restore, *(co.PeerOffered(self.peer(link)) for link in members)]

    def view_told(self, peer_id: str, view: View) -> None:
        """Take in a view that an earlier term minted. Raises ``ProtocolError`` if no such view can exist."""
        if view.job != self.id or view.rank_of(peer_id) is None or view.generation > self._seed.minted_below:
            raise ProtocolError(f"{peer_id} reported a view that the seed never minted: generation {view.generation}")
        self._views_told[peer_id] = view
        self.told_view.set()

    async def _await_members(self) -> None:
        """Wait until all members of the newest view are here, for ``SETTLE_S`` at most; then go on from that view.

        A member that reports an older view was lost before the newest view was announced to it.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                while not self._all_here():
                    await self.told_view.wait()
                    self.told_view.clear()
        except TimeoutError:
            pass
        newest, store = self._newest_told(), self._seed.store
        self.record = replace(self.record, unsettled=False)
        if newest is None:
            await store.call(Records.save_job, self.record)
        else:
            if self.stages > 1:
                held = {member.peer_id: newest.stage_of(rank) for rank, member in enumerate(newest.members)}
                self.record = replace(self.record, held=self.record.held | held)
            await store.call(Records.add_view, newest, self.record)
            text = f"continues from generation {newest.generation}, which its members reported"
            self._seed.note("info", "restored", text, job=self.id)
        self._begin(await store.call(history, self.id))
        early, self._early_rows = self._early_rows, []
        for message in early:
            self.told_rows(message)
        self.settled.set()
        self._seed.settled(self)

    def _newest_told(self) -> View | None:
        links = self._seed.links
        told = [
            view for peer_id, view in self._views_told.items() if peer_id in links and links[peer_id].job == self.id
        ]
        newest = max(told, key=lambda view: view.generation, default=None)
        known = self.core.view.generation if self.core.view else 0
        return newest if newest is not None and newest.generation > known else None

    def _all_here(self) -> bool:
        view = self._newest_told() or self.core.view
        here = [link for link in self._seed.links.values() if link.job == self.id]
        return (
            view is not None
            and {member.peer_id for member in view.members} <= {link.id for link in here}
            and all(link.hello.generation <= view.generation for link in here)
        )

    def _measured(self) -> list[co.Event]:
        table = self._seed.survey.table
        if table.changes == self._links_seen:
            return []
        self._links_seen = table.changes
        compute_ms = self._row.compute_ms if self._row else None
        return [co.LinksMeasured(table.known, max(compute_ms or 0.0, 0.0) / 1e3)]

    def edge_from(self, view: View, rank: int) -> LinkQuality | None:
        """The measured link of a view's member to its right neighbour."""
        if view.size < 2:
            return None
        return known_link(self._seed.survey.table.known, view.members[rank].peer_id, view.right_of(rank).peer_id)

    @property
    def queued(self) -> bool:
        """Whether it waits because other jobs have the workers."""
        if self.core.phase is not JobPhase.WAITING or self.core.peer_ids:
            return False
        return any(other.live and other.core.peer_ids for other in self._seed.controllers.values())

    def keeps_early(self, message: LedgerRows) -> bool:
        """Keep a member's rows until the job is settled, if there is room. Raises ``ProtocolError``."""
        fits = not self.settled.is_set() and message.job == self.id and len(self._early_rows) < 1024
        if fits:
            rows_untrusted(message, micro_batches=self.record.micro_batches, steps_total=self.record.steps_total)
            self._early_rows.append(message)
        return fits

    def retire(self) -> None:
        """Stop handling events of a job that has ended and will be forgotten."""
        assert not self.live
        self.post(co.Signal.TICK)  # wakes ``run``
        self._retired.set()

    async def _carry_out(self, instruction: co.Instruction) -> None:
        match instruction:
            case co.SendAssign(peer_id, corpus, restore_step, stage, stages, holders, lineage):
                self._seed.survey.drop(peer_id)  # its earlier report is out of date
                if self.record.held != self.core.held:  # its checkpoints will be of that stage
                    await self._keep(held=dict(self.core.held))
                spec = assigned_spec(self.spec, self.record.cuts, self.record.created_at)
                there = self._places_seen_by(peer_id, holders)
                self._say(peer_id, Assign(self.id, spec, corpus, restore_step, stage, stages, there, lineage))
            case co.CutsChosen(cuts):
                await self._keep(cuts=list(cuts))
            case co.SendSurvey(peer_ids):
                self._seed.survey.among(peer_ids, lambda: self.post(co.Signal.SURVEYED))
            case co.SendHold(peer_ids, generation, reason):
                for peer_id in peer_ids:
                    self._say(peer_id, Hold(self.id, generation, reason))
                self._recoveries.held(reason, self._seed.world.clock.now(), self._seed.world.clock.wall())
            case co.SendCatchUp(peer_id, generation, sources):
                if (link := self._seed.links.get(peer_id)) is not None:
                    self._say(peer_id, CatchUp(self.id, generation, seen_from(link.host, sources)))
            case co.SendSave(peer_ids):
                for peer_id in peer_ids:
                    self._say(peer_id, SaveNow(self.id))
            case co.SendRelease(peer_id, reason):
                self._say(peer_id, Release(self.id, reason))
                self._let_go(peer_id)
            case co.Mint(view, restored, branch):
                await self._mint(view, branch, restored=restored)
                self._recoveries.minted(view, self._seed.world.clock.now())
            case co.SetState(state, reason):
                await self._set_state(state, reason)
                if state in _NOT_RUNNING:
                    self._recoveries.abandon()
            case co.SetCorpus(digest):
                await self._keep(corpus=digest)

    def _say(self, peer_id: str, message: Message) -> None:
        link = self._seed.links.get(peer_id)
        if link is not None and link.job == self.id:
            link.say(message)

    def _tell_kept_out(self) -> None:
        """Tell workers in their own terminals why they do not train, when the reason changes."""
        before, self._kept_out = self._kept_out, self.core.kept_out()
        for peer_id, (why, until) in self._kept_out.items():
            if before.get(peer_id) != (why, until):
                left_s = until - self._seed.world.clock.now()
                limit = f" for up to {left_s:.0f} s" if 0 < left_s < math.inf else ""
                text = clipped(f"waiting{limit}: {why}")
                self._say(peer_id, EventNotice("info", "kept-out", text, self.id))

    def _places_seen_by(self, peer_id: str, peers: Iterable[co.JobWorker]) -> list[MemberRecord]:
        link = self._seed.links.get(peer_id)
        records = [MemberRecord(peer.peer_id, peer.name, peer.host, peer.port, 0, 0, True) for peer in peers]
        return seen_from(link.host, records) if link is not None else []

    def _let_go(self, peer_id: str) -> None:
        link = self._seed.links.get(peer_id)
        if link is not None and link.job == self.id:
            link.let_go()

    async def _mint(self, view: View, branch: frozenset[str] | None, *, restored: bool) -> None:
        seed = self._seed
        self.ledger.view_began(view)  # removes later steps
        self._rows_to = min(self._rows_to, view.step)
        self._rows_beyond = {step for step in self._rows_beyond if step <= view.step}
        # Read now: rows that arrive later are not stored with the view.
        ledger_step = min(self.ledger.step, self._rows_to)
        branch_kept = sorted(branch) if branch is not None else None
        self.record = replace(self.record, branch=branch_kept, restoring=None)
        if await seed.store.call(Records.add_view, view, self.record):
            self.ledger.began_anew(view)
            text = f"the members' state at step {view.step} does not follow from the recorded steps; the"
            seed.note("warning", "ledger", f"{text} record restarts there, without earlier steps", job=self.id)
        seed.copy_soon()
        if self._row is not None and self._row.step > view.step:
            self._row, self._val_loss = await seed.store.call(_last, self.id)
        links = [seed.links[member.peer_id] for member in view.members if member.peer_id in seed.links]
        ways = [self.edge_from(view, rank) for rank in range(view.size)]
        heartbeat_s, death_s = ring_beats(links, [way.latency_s if way else None for way in ways])
        # Neighbours must agree on the beats.
        view = replace(view, heartbeat_s=heartbeat_s, death_s=death_s, ledger_step=ledger_step)
        for link in links:
            link.detector.late_s = 0.0  # it has loaded its libraries; what it does next is learned anew
            self._say(link.id, announced_to(link.host, view))
        seed.subscriptions.touch("peers", *(member.peer_id for member in view.members))
        seed.survey.view_began(self.id, [member.peer_id for member in view.members])
        if restored:
            await seed.checkpoints.went_back(view)

    async def _set_state(self, state: str, reason: str) -> None:
        wall, record = self._seed.world.clock.wall(), self.record
        started = wall if state == "running" and record.started_at is None else record.started_at
        ended = state in ENDED
        finished = (record.finished_at or wall) if ended else None
        await self._keep(state=state, reason=reason, started_at=started, finished_at=finished)
        if ended:
            for link in self._seed.links.values():
                self._let_go(link.id)

    async def _keep_wishes(self) -> None:
        core, restore = self.core, self.core.restore
        restoring = [restore.step, restore.peer_id, restore.lineage] if restore else self.record.restoring
        if (self.record.paused, self.record.restoring) != (core.paused, restoring):
            await self._keep(paused=core.paused, restoring=restoring)

    async def keep_tracked(self, tracker: str, cursor: Sequence[object]) -> None:
        await self._keep(tracked=self.record.tracked | {tracker: list(cursor)})

    async def _keep(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        await self._seed.store.call(Records.save_job, self.record)

    # -------------------------------------------------------------------------------------------------------- metrics

    async def committed(self, message: StepMetrics) -> None:
        """Record a step that rank 0 reported. Steps that a later view took back are ignored."""
        view, seed = self.core.view, self._seed
        if view is None:
            return
        if message.generation != view.generation and message.step > view.step:
            return
        if self.ledger.begins.superseded(message.generation, message.step):
            return
        form_ms = message.values.get("form_ms")
        form_s = form_ms / 1e3 if form_ms is not None and math.isfinite(form_ms) and form_ms >= 0 else None
        ended = self._recoveries.committed(message.generation, message.step, seed.world.clock.now(), form_s)
        if ended is not None:
            ended = replace(ended, text=clipped(ended.text), fetched_bytes=whole(ended.fetched_bytes))
            seed.store.add(ended)
            seed.subscriptions.add(ended)
        row = self._row
        if not self._lacks(message.step):
            return  # members report steps again, in case the first reporter, or the seed, died
        known = {name: value for name, value in message.values.items() if name in _METRICS and math.isfinite(value)}
        row = MetricRow(
            job=self.id,
            step=message.step,
            wall=seed.world.clock.wall(),
            generation=message.generation,
            members=whole(message.values.get("members")),
            **known,
        )
        seed.store.add(row)
        seed.subscriptions.add(row)
        if message.generation == view.generation and message.step > view.step and self._robust:
            self._scored(view, message.values)
        if row.step_ms is not None:
            self._timed += 1
            self._mean_ms += (max(row.step_ms, 0.0) - self._mean_ms) / self._timed
        if self._row is None or row.step >= self._row.step:
            self._row = row
            self._val_loss = row.val_loss if row.val_loss is not None else self._val_loss
        await self.post(co.StepCommitted(message.step, _step_s(row)))
        if seed.store.crowded:
            await seed.store.flush()

    def _lacks(self, step: int) -> bool:
        """Whether the step has no row yet; notes that it has one now. The oldest lost steps are given up."""
        if step <= self._rows_to or step in self._rows_beyond:
            return False
        self._rows_beyond.add(step)
        if len(self._rows_beyond) > MAX_GAP:
            self._rows_to = min(self._rows_beyond) - 1
        while self._rows_to + 1 in self._rows_beyond:
            self._rows_to += 1
            self._rows_beyond.discard(self._rows_to)
        return True

    def _scored(self, view: View, values: Mapping[str, float]) -> None:
        """Count a step that a robust rule combined. Members that left the view are forgotten."""
        scores = {}
        for rank, member in enumerate(view.members):
            peer, out, far = member.peer_id, values.get(excluded_key(rank)), values.get(distance_key(rank))
            known = self._scores.get(peer, MemberScore(peer))
            distance = known.distance
            if far is not None and 0 <= far < math.inf:
                distance = far if distance is None else distance + (far - distance) / DISTANCES
            scores[peer] = MemberScore(peer, known.steps + (out is not None), known.excluded + (out == 1), distance)
        self._scores = scores

    def told_rows(self, message: LedgerRows) -> None:
        """Record a member's ledger rows. Raises ``ProtocolError``."""
        view = self.core.view
        if view is None:
            return
        links = [self._seed.links.get(member.peer_id) for member in view.members]
        held = [link.rows for link in links if link is not None and link.rows is not None]
        entries, problem = self.ledger.take_untrusted(
            message,
            view,
            micro_batches=self.record.micro_batches,
            steps_total=self.record.steps_total,
            held=held if len(held) == view.size else (),
        )
        for entry in entries:
            self._seed.store.add(entry)
        if problem:
            self._seed.note("warning", "ledger", problem, job=self.id)

    def shares(self, view: View) -> list[int]:
        """Micro-batches of each member in the newest step of a view; before its first step, as planned."""
        if self.ledger.generation == view.generation and len(self.ledger.counts) == view.size:
            return list(self.ledger.counts)
        return [member.count for member in view.members]

    async def told_windows(self, windows: int) -> None:
        if windows and not self.record.windows:  # training sequences in the corpus, as first reported
            await self._keep(windows=windows)

    def info(self) -> JobInfo:
        record, row, view, queued = self.record, self._row, self.running_view, self.queued
        edges = [self.edge_from(view, rank) for rank in range(view.size)] if view else []
        known = any(edges)
        shown = {name: getattr(row, name) for name in _SHOWN} if row else {}
        step = self.core.known_step
        each = (row.tokens_per_s or 0.0) * (row.step_ms or 0.0) / 1e3 if row else 0.0
        tokens = step * round(min(max(each, 0.0), 1e12))
        return JobInfo(
            id=record.id,
            name=record.name,
            profile=record.profile,
            strategy=record.strategy,
            state="queued" if queued else self.core.state,
            created_at=record.created_at,
            steps_total=record.steps_total,
            step=step,
            generation=self.core.view.generation if self.core.view else 0,
            members=[member.peer_id for member in view.members] if view else [],
            edge_ms=[edge.latency_s * 1e3 if edge else None for edge in edges] if known else [],
            edge_bps=[edge.bandwidth_bps if edge else None for edge in edges] if known else [],
            stages=self.stages,
            cuts=list(self.core.training.cuts) if self.core.training else [],
            streams=view.streams if view else 0,
            codec=view.codec if view else "",
            started_at=record.started_at,
            finished_at=record.finished_at,
            val_loss=self._val_loss,
            tokens_total=min(tokens, MAX_WHOLE),
            scores=list(self._scores.values()),
            trained_s=round(step * self._mean_ms / 1e3, 1),  # also of steps whose rows are gone
            reason="another job has the workers" if queued else self.core.reason,
            **shown,
        )


def _least_steps(profile: Profile) -> int:
    may_end_early = profile.validation.patience or profile.privacy.epsilon
    return 0 if may_end_early else profile.job.steps


def _step_s(row: MetricRow) -> float:
    return max(row.step_ms or 0.0, 0.0) / 1e3


def _last(records: Records, job: str) -> tuple[MetricRow | None, float | None]:
    return next(iter(records.last_metrics(job, 1)), None), records.last_val_loss(job)


def history(records: Records, job: str) -> History:
    """Read what the store knows of a job apart from its record. Runs on the store's thread."""
    row, val_loss = _last(records, job)
    view, saved = records.last_view(job), saved_of(records.checkpoints(job))
    newest = records.recoveries(job, 1)
    number = newest[-1].number if newest else 0
    head, begins, step_ms = records.ledger_head(job), records.begins(job), records.mean_step_ms(job)
    return History(view, row, val_loss, saved, head, begins, number, step_ms, reread=True)


def saved_of(checkpoints: Iterable[CheckpointInfo]) -> co.CheckpointsSaved:
    """The event that reports a job's checkpoints to its core."""
    wholes: dict[str, frozenset[int]] = {}
    parts: dict[tuple[str, int], frozenset[int]] = {}
    for item in checkpoints:
        if item.stage is None:
            wholes[item.peer_id] = wholes.get(item.peer_id, frozenset()) | {item.step}
        else:
            part = item.peer_id, item.stage
            parts[part] = parts.get(part, frozenset()) | {item.step}
    return co.CheckpointsSaved(wholes, parts)


def newest_of_all_stages(checkpoints: Collection[CheckpointInfo], stages: int) -> int:
    """The newest step of which every stage of a split model has a checkpoint at some worker; 0 if there is none."""
    by_stage = [[frozenset({item.step for item in checkpoints if item.stage == stage})] for stage in range(stages)]
    return newest_kept(by_stage, [frozenset({item.step for item in checkpoints if item.stage is None})])


def _tell(handled: asyncio.Future[bool] | None, result: bool) -> None:
    if handled is not None and not handled.done():
        handled.set_result(result)
