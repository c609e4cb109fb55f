"""The job controller: one job's record, its coordinator, and the task that carries out the coordinator's instructions.

The controller handles events strictly one after the other. It carries out all instructions of one event before it takes
the next event: it stores a view, then announces it. The queue needs no bound of its own. The sender of a report waits
until the report is handled, so the queue has at most one report per peer, and a few joins and losses.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from configs.schema import Membership, Profile
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.plugins import lacking
from p2ptrain.core.world import Clock, Probe
from ring import coordination as co
from ring.coordination import ENDED, JobOptions, JobPhase, JobWorker
from ring.coordinator import Coordinator
from ring.planning.measurements import LinkQuality, known_link
from ring.planning.ring_plan import RingOptions
from ring.view import View
from roles.seed.checkpoints import CheckpointCatalogue
from roles.seed.events import Announcements
from roles.seed.job_history import JobRows, StoredHistory, ViewCensus, newest_row, read_history, step_s
from roles.seed.links import Survey
from roles.seed.peers import (
    ConnectedPeer,
    PeerTable,
    addresses_of,
    clip,
    ring_beats,
)
from roles.seed.store import JobRecord, Records, SeedStore
from roles.strategies import least_members, share_rule_of
from roles.training_shape import training_of
from wire.job_messages import (
    MAX_CHANGES,
    Assign,
    CatchUp,
    Hold,
    LedgerRows,
    Release,
    Report,
    SaveNow,
    SettingChange,
    StepMetrics,
)
from wire.messages import EventNotice, Message
from wire.records import JobInfo

NOTICES_S = 1.0
"""Least time between two notices of why workers wait. While many join, the reason changes with each of them."""
_NOT_RUNNING = frozenset({str(phase) for phase in (*ENDED, JobPhase.PAUSED)})


@dataclass(frozen=True, slots=True)
class NewLayout:
    """A person's request to go on from a whole checkpoint with another number of parts: the new profile."""

    spec: str
    restore: co.Restore


@dataclass(frozen=True, slots=True)
class JobPorts:
    """What a job uses of its seed. All jobs of a seed share one.

    Attributes:
        minted_below: generations up to this one may be of an earlier term.
        request_backup: asks for a backup of the store soon.
        new_id: makes an identifier.
        assign_workers: gives free workers to jobs.
        take_early_messages: handles the messages of the job's workers that waited for the end of its census.
    """

    clock: Clock
    store: SeedStore
    announcements: Announcements
    peers: PeerTable
    survey: Survey
    checkpoints: CheckpointCatalogue
    minted_below: int
    request_backup: Callable[[], None]
    assign_workers: Callable[[], None]
    take_early_messages: Callable[[str], None]
    new_id: Callable[[], str]
    probe: Probe


class JobController:
    """One job. ``rows``: what is recorded of its steps. ``census``: which view its members are in after a restore of
    the seed."""

    def __init__(self, ports: JobPorts, record: JobRecord, spec: str, history: StoredHistory) -> None:
        self.record = record
        self.spec = spec
        self._ports = ports
        self._events: asyncio.Queue[tuple[co.Event | NewLayout, asyncio.Future[bool]]] = asyncio.Queue()
        self._retired = asyncio.Event()
        self.planning = asyncio.Lock()
        self._kept_out: dict[str, tuple[str, float]] = {}
        self._notices_due: float | None = None  # None: at the next event
        self.census = ViewCensus(record.id, ports.peers, minted_below=ports.minted_below, unsettled=record.unsettled)
        if record.restoring is not None:  # the seed died before it had carried out this request
            self.post(co.Restore(*record.restoring))
            if record.paused:  # after the restore
                self.post(co.Signal.PAUSE)
        self._begin(history)

    def _begin(self, history: StoredHistory) -> None:
        record, view, minted_below = self.record, history.view, self._ports.minted_below
        self.profile = self._profile_after(record.changes)
        if view is not None and view.stages != self.stages:  # its members held other parts
            minted_below, history = max(minted_below, view.generation), replace(history, view=None)
        self.rows = JobRows(record.id, history)
        past = co.StoredJob(
            state=record.state,
            reason=record.reason,
            paused=record.paused,
            view=history.view,
            corpus=record.corpus,
            known_step=max(item.step if item else 0 for item in (history.view, history.row)),
            saved=history.saved,
            held=record.held,
            branch=frozenset(record.branch) if record.branch is not None else None,
            step_s=step_s(history.row),
            changes=tuple(SettingChange(*values) for values in record.changes),
        )
        options = options_of(record, self.profile, minted_below=minted_below)
        self._used_links = 0  # the version of the link table that the coordinator knows
        self.core = Coordinator(record.id, options, past=past, now=self._ports.clock.now())

    def _profile_after(self, changes: Iterable[Sequence[Any]]) -> Profile | None:
        """The profile after changes of its settings, as they are stored; None if this release cannot read it."""
        profile = profile_of(self.spec)
        with suppress(ProtocolError):
            return profile and profile.with_changes_untrusted((key, value) for _, key, value, _ in changes)
        return None

    def _stored_request(self) -> list[co.ChangeSettings]:
        """The event of the changes that were asked for and that no view has begun with."""
        asked = tuple(SettingChange(*values) for values in self.record.asked_changes)
        profile = self._profile_after([*self.record.changes, *self.record.asked_changes])
        return [co.ChangeSettings(asked, least_steps(profile))] if asked and profile else []

    def plan_changes(self, values: Mapping[str, str]) -> co.ChangeSettings:
        """The event that changes settings to ``values``, as JSON. Hold ``planning`` until it is handled: the next plan
        goes on from it. Raises ``ProtocolError``."""
        made = [*self.record.changes, *self.record.asked_changes]
        now = self._profile_after(made)
        if now is None:
            raise ProtocolError("this release cannot read the job's profile")
        after = now.with_changes_untrusted(values.items())
        if len(made) + len(values) > MAX_CHANGES:
            raise ProtocolError(f"a job can have at most {MAX_CHANGES} changes of settings")
        if "job.steps" in values and after.job.steps <= self.core.known_step:
            raise ProtocolError(f"job.steps = {after.job.steps}, but step {self.core.known_step} is done")
        changed = [key for key in values if after.value(key) != now.value(key)]
        asked = (SettingChange(0, key, json.dumps(after.value(key)), json.dumps(now.value(key))) for key in changed)
        return co.ChangeSettings(tuple(asked), least_steps(after))

    def check_changes_untrusted(self, changes: Iterable[SettingChange]) -> None:
        """Raise ``ProtocolError`` if no view of this job has such changes."""
        if (profile := profile_of(self.spec)) is not None:
            profile.with_changes_untrusted((change.key, change.value) for change in changes)

    @property
    def effective_spec(self) -> str:
        """The profile as it is now."""
        return self.profile.to_spec() if self.profile and self.record.changes else self.spec

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def live(self) -> bool:
        return self.core.phase not in ENDED

    @property
    def stages(self) -> int:
        return self.profile.stages if self.profile else 1

    @property
    def running_view(self) -> View | None:
        return self.core.view if self.core.phase in (JobPhase.RUNNING, JobPhase.STOPPING, JobPhase.PAUSED) else None

    def lacking(self, peer: ConnectedPeer) -> str:
        """The plugins of the job that the worker lacks, and how it gets them; empty if it has all."""
        needs = self.profile.needs if self.profile else {}
        return lacking(needs, str(peer.hello.capabilities.get("plugins", "")))

    def _reason(self) -> str:
        free = self._ports.peers.of_job("") if self.core.phase is JobPhase.WAITING else []
        lacks = [f"; {peer.name} {self.lacking(peer)}" for peer in free if peer.trains and self.lacking(peer)]
        return self.core.reason + "".join(lacks[:1])

    def offer_of(self, peer: ConnectedPeer) -> co.JobWorker:
        return offer_to(self.profile.device.kind if self.profile else "", peer.offer)

    def stage_of(self, peer_id: str) -> int | None:
        return self.core.part_of(peer_id) if self.stages > 1 else None

    def has_whole_model(self, peer_ids: Iterable[str]) -> bool:
        """Whether these workers together hold a whole model: for a split model, every stage of it."""
        stages = {self.stage_of(peer_id) for peer_id in peer_ids}
        return len(stages - {None}) == self.stages if self.stages > 1 else bool(stages)

    def holds(self, peer_id: str) -> bool:
        view = self.running_view
        return view is not None and view.rank_of(peer_id) is not None

    def take_back(self, peer: ConnectedPeer) -> None:
        """Take back a worker of this job that connected again."""
        peer.job = self.id
        self.post(co.PeerReturned(self.offer_of(peer), peer.hello.generation))
        self.census.changed.set()

    def is_last_holder(self, peer: ConnectedPeer) -> bool:
        """Whether no worker that stays would have the newest state if this one left."""
        others = [other.id for other in self._ports.peers.of_job(self.id) if not other.is_leaving]
        return self.core.is_last_holder(peer.id, others)

    def edge_from(self, view: View, rank: int) -> LinkQuality | None:
        """The measured link of a view's member to its right neighbour."""
        if view.size < 2:
            return None
        known = self._ports.survey.table.known
        return known_link(known, view.members[rank].peer_id, view.right_of(rank).peer_id)

    # ----------------------------------------------------------------------------------------------------- events

    def post(self, event: co.Event | NewLayout) -> asyncio.Future[bool]:
        """Queue an event. The future is done when the event is handled; it is False if the job was forgotten."""
        handled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._retired.is_set():
            handled.set_result(False)
        else:
            self._events.put_nowait((event, handled))
        return handled

    def retire(self) -> None:
        """Stop handling events of a job that has ended and will be forgotten."""
        assert not self.live
        self.post(co.Signal.TICK)  # wakes ``run``
        self._retired.set()

    async def run(self) -> None:
        """Handle events and deadlines until ``retire``, or cancelled. Raises ``StorageError``."""
        if not self.census.settled.is_set():
            await self._settle()
        for request in self._stored_request():
            self.post(request)
        while not self._retired.is_set():
            handled: asyncio.Future[bool] | None = None
            event: co.Event | NewLayout = co.Signal.TICK
            try:
                due = [time for time in (self.core.next_deadline(), self._notices_due) if time is not None]
                async with asyncio.timeout_at(min(due, default=None)):
                    event, handled = await self._events.get()
            except TimeoutError:
                pass
            if self._retired.is_set():
                _resolve(handled, False)
                break
            self._note_interruption(event)
            events = await self._begin_anew(event) if isinstance(event, NewLayout) else [event]
            for event in (*self._new_measurements(), *events):
                await self._handle(event)
            if self.record.restoring is not None and self.core.restore is None:
                await self._save(restoring=None)
            _resolve(handled, True)
            self._touch()
            if self._events.empty():  # once for many reports at a time
                self._notify_kept_out()
                self._ports.assign_workers()
        while not self._events.empty():
            _resolve(self._events.get_nowait()[1], False)

    async def _handle(self, event: co.Event) -> None:
        instructions = self.core.handle(event, self._ports.clock.now())
        self._ports.probe.event("job-handled", core=self.core, instructions=instructions)
        for instruction in instructions:  # first: a job's new state is shown while the store is still writing
            if isinstance(instruction, co.Emit):
                level, kind, text, peer_id = instruction.level, instruction.kind, instruction.text, instruction.peer_id
                self._ports.announcements.note(level, kind, text, peer_id, self.id)
        self._touch()
        await self._save_requests()  # durable before an instruction acts on them
        for instruction in instructions:
            await self._carry_out(instruction)

    def _note_interruption(self, event: co.Event | NewLayout) -> None:
        clock, recoveries = self._ports.clock, self.rows.recoveries
        match event:
            case co.PeerLost(peer_id, reason, left):
                recoveries.lost(peer_id, reason, clock.now(), clock.wall(), left=left)
            case co.PeerReported(peer_id, report):
                recoveries.reported(peer_id, report, clock.now(), clock.wall())

    def _touch(self) -> None:
        self._ports.announcements.touch("jobs", self.id)

    def _note(self, level: str, kind: str, text: str) -> None:
        self._ports.announcements.note(level, kind, text, job=self.id)

    def _new_measurements(self) -> list[co.Event]:
        table = self._ports.survey.table
        if table.changes == self._used_links:
            return []
        self._used_links = table.changes
        compute_ms = self.rows.newest.compute_ms if self.rows.newest else None
        return [co.LinksMeasured(table.known, max(compute_ms or 0.0, 0.0) / 1e3)]

    async def _begin_anew(self, new: NewLayout) -> list[co.Event]:
        """Begin anew with the workers that are here, whose parts are no longer those of the model. Returns the events
        to go on with."""
        members, store, checkpoints = self._ports.peers.of_job(self.id), self._ports.store, self._ports.checkpoints
        for peer in members:
            peer.send(Release(self.id, "the job goes on with another number of parts"))
        self.spec, profile, restore = new.spec, Profile.from_spec_untrusted(new.spec), new.restore
        self.record = replace(
            self.record, strategy=profile.job.strategy, workers=profile.job.workers, held={}, state="waiting",
            paused=False, finished_at=None, restoring=[restore.step, restore.peer_id, restore.lineage],
        )  # fmt: skip
        await store.call(Records.change_layout, self.record, self.spec)
        await checkpoints.drop([item.id for item in checkpoints.of_job(self.id) if item.stage is not None])
        self._begin(await store.call(read_history, self.id))
        self._ports.request_backup()
        asked = self._stored_request()
        return [restore, *asked, *(co.PeerOffered(self.offer_of(peer)) for peer in members)]

    async def _settle(self) -> None:
        """After a restore of the seed, go on from the newest view that the members report."""
        newest, store = await self.census.wait(self.core.view), self._ports.store
        self.record = replace(self.record, unsettled=False)
        if newest is None:
            await store.call(Records.save_job, self.record)
        else:
            if self.stages > 1:
                held = {member.peer_id: newest.stage_of(rank) for rank, member in enumerate(newest.members)}
                self.record = replace(self.record, held=self.record.held | held)
            self._take_changes(newest)
            await store.call(Records.add_view, newest, self.record)
            text = f"continues from generation {newest.generation}, which its members reported"
            self._note("info", "restored", text)
        self._begin(await store.call(read_history, self.id))
        for _, message in self.census.early_messages:
            if isinstance(message, LedgerRows) and message.job == self.id:
                with suppress(ProtocolError):  # it is handled again, if its sender is still here
                    self.record_rows(message)
        self.census.settled.set()
        self._ports.take_early_messages(self.id)

    # ----------------------------------------------------------------------------------------------- instructions

    async def _carry_out(self, instruction: co.Instruction) -> None:
        ports = self._ports
        match instruction:
            case co.SendAssign(peer_id, corpus, restore_step, stage, stages, holders, lineage):
                ports.survey.drop(peer_id)  # its earlier report is out of date
                if self.record.held != self.core.held:  # its checkpoints will be of that stage
                    await self._save(held=dict(self.core.held))
                if (peer := ports.peers.in_job(peer_id, self.id)) is not None:
                    # as the job began: views tell what changed since
                    spec = assigned_spec(self.spec, self.record.cuts, self.record.created_at)
                    part = {"stage": stage, "stages": stages}
                    peer.send(Assign(self.id, spec, corpus, restore_step, addresses_of(holders), lineage, **part))
            case co.CutsChosen(cuts):
                await self._save(cuts=list(cuts))
            case co.SendSurvey(peer_ids):
                ports.survey.measure_all_before(peer_ids, partial(self.post, co.Signal.SURVEYED))
            case co.SendHold(peer_ids, generation, reason):
                self._send(peer_ids, Hold(self.id, generation, reason))
                self.rows.recoveries.held(reason, ports.clock.now(), ports.clock.wall())
            case co.SendCatchUp(peer_id, generation, sources):
                self._send([peer_id], CatchUp(self.id, generation, list(sources), self.core.settings.made))
            case co.SendSave(peer_ids):
                self._send(peer_ids, SaveNow(self.id))
            case co.SendRelease(peer_id, reason):
                if (peer := ports.peers.in_job(peer_id, self.id)) is not None:
                    peer.send(Release(self.id, reason))
                    peer.release()
            case co.Mint(view, restored, branch):
                await self._mint(view, branch, restored=restored)
                self.rows.recoveries.minted(view, ports.clock.now())
            case co.SetState(state, reason):
                await self._set_state(state, reason)
                if state in _NOT_RUNNING:
                    self.rows.recoveries.abandon()
            case co.SetCorpus(digest):
                await self._save(corpus=digest)

    def _send(self, peer_ids: Iterable[str], message: Message) -> None:
        for peer_id in peer_ids:
            if (peer := self._ports.peers.in_job(peer_id, self.id)) is not None:
                peer.send(message)

    def _notify_kept_out(self) -> None:
        """Tell workers in their own terminals why they do not train, when the reason changes."""
        now = self._ports.clock.now()
        if self._notices_due is not None and now < self._notices_due:
            return
        self._notices_due, before, self._kept_out = None, self._kept_out, self.core.kept_out()
        for peer_id, (why, until) in self._kept_out.items():
            if before.get(peer_id) != (why, until):
                self._notices_due, left_s = now + NOTICES_S, until - now
                limit = f" for up to {left_s:.0f} s" if 0 < left_s < math.inf else ""
                text = clip(f"waiting{limit}: {why}")
                self._send([peer_id], EventNotice("info", "kept-out", text, self.id))

    async def _mint(self, view: View, branch: frozenset[str] | None, *, restored: bool) -> None:
        ports, rows = self._ports, self.rows
        ledger_step = rows.view_began(view)  # read now: rows that arrive later are not stored with the view
        self.record = replace(self.record, branch=sorted(branch) if branch is not None else None, restoring=None)
        self._take_changes(view)
        self._notices_due = None  # who is not in this view is told at once
        if await ports.store.call(Records.add_view, view, self.record):
            rows.ledger.restart(view)
            text = f"the members' state at step {view.step} does not follow from the recorded steps; the"
            self._note("warning", "ledger", f"{text} record restarts there, without earlier steps")
        ports.request_backup()
        if rows.newest is not None and rows.newest.step > view.step:
            rows.newest, rows.val_loss = await ports.store.call(newest_row, self.id)
        connected = ports.peers.connected
        peers = [connected[member.peer_id] for member in view.members if member.peer_id in connected]
        edges = [self.edge_from(view, rank) for rank in range(view.size)]
        heartbeat_s, death_s = ring_beats(
            [peer.rtt_ms for peer in peers], [edge.latency_s if edge else None for edge in edges]
        )
        # Neighbours must agree on the beats.
        chosen = self.profile.membership if self.profile else Membership()
        heartbeat_s, death_s = chosen.heartbeat_s or heartbeat_s, chosen.death_s or death_s
        view = replace(view, heartbeat_s=heartbeat_s, death_s=death_s, ledger_step=ledger_step)
        for peer in peers:
            peer.detector.late_s = 0.0  # it has loaded its libraries; what it does next is learned anew
        self._send([peer.id for peer in peers], view)
        ports.survey.view_began(self.id, [member.peer_id for member in view.members])
        if restored:
            await ports.checkpoints.drop_after(view)

    def _take_changes(self, view: View) -> None:
        """Take the settings of a view into the record that is stored with it."""
        for change in view.changes[len(self.record.changes) :]:
            text = f"{change.key} = {change.value} (before: {change.before}) from step {change.step + 1} on"
            self._note("info", "setting", text)
        if len(view.changes) > len(self.record.changes):  # those that were asked for are among them
            self.record = replace(self.record, asked_changes=[])
        self.record = replace(self.record, changes=[list(astuple(change)) for change in view.changes])
        if self.record.changes and (profile := self._profile_after(self.record.changes)):
            self.profile = profile
            self.record = replace(self.record, steps_total=profile.job.steps)

    async def _set_state(self, state: str, reason: str) -> None:
        wall, record = self._ports.clock.wall(), self.record
        started = wall if state == "running" and record.started_at is None else record.started_at
        ended = state in ENDED
        finished = (record.finished_at or wall) if ended else None
        await self._save(state=state, reason=reason, started_at=started, finished_at=finished)
        if ended:
            for peer in self._ports.peers.of_job(self.id):
                peer.release()

    async def _save_requests(self) -> None:
        """Store what a person asked of the job: to pause, to go back to a checkpoint, or to change settings."""
        core, restore = self.core, self.core.restore
        requests = {
            "paused": core.paused,
            "restoring": [restore.step, restore.peer_id, restore.lineage] if restore else self.record.restoring,
            "asked_changes": [list(astuple(change)) for change in core.settings.asked] or self.record.asked_changes,
        }
        if any(getattr(self.record, name) != value for name, value in requests.items()):
            await self._save(**requests)

    async def save_cursor(self, tracker: str, cursor: Sequence[object]) -> None:
        await self._save(tracked=self.record.tracked | {tracker: list(cursor)})

    async def _save(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        await self._ports.store.call(Records.save_job, self.record)

    # --------------------------------------------------------------------------------------------- reports of members

    async def take_report(self, peer: ConnectedPeer, report: Report) -> None:
        """Handle a member's checked report. It waits for measurements of the member's links, if any are missing."""
        ports, event = self._ports, co.PeerReported(peer.id, report)
        peer.rows = range(report.first_row, report.applied + 1)
        if report.status == "following":
            peer.newest_fetch = report
        if report.windows and not self.record.windows:  # training sequences in the corpus, as first reported
            await self._save(windows=report.windows)
        if report.status == "ready":
            await ports.checkpoints.drop_unloaded(self.id, peer.id, self.stage_of(peer.id), report.applied)

        def post() -> None:
            if ports.peers.is_current(peer) and peer.job == self.id:
                self.post(event)

        ports.survey.drop(peer.id)
        if report.status != "ready" or not ports.survey.measure_before(peer, self.core.peer_ids, post):
            await self.post(event)

    async def record_step(self, message: StepMetrics) -> None:
        """Record a step that rank 0 reported. Steps that a later view took back are ignored."""
        view, ports, rows = self.core.view, self._ports, self.rows
        if view is None or not rows.counts_in(view, message):
            return
        if (recovery := rows.end_recovery(message, ports.clock.now())) is not None:
            ports.announcements.add(recovery)
        if (row := rows.add_step(message, ports.clock.wall())) is None:
            return
        ports.announcements.add(row)
        is_robust = self.profile is not None and bool(self.profile.robust.rule)
        if is_robust and message.generation == view.generation and message.step > view.step:
            rows.count_scores(view, message.values)
        await self.post(co.StepCommitted(message.step, step_s(row)))
        await ports.store.make_room()

    def record_rows(self, message: LedgerRows) -> None:
        """Record a member's ledger rows. Raises ``ProtocolError``."""
        view = self.core.view
        if view is None:
            return
        peers = [self._ports.peers.connected.get(member.peer_id) for member in view.members]
        held = [peer.rows for peer in peers if peer is not None and peer.rows is not None]
        wanted = self.rows.ledger.step + 1
        entries, problem = self.rows.ledger.take_untrusted(
            message,
            view,
            micro_batches=self.record.micro_batches,
            steps_total=self.record.steps_total,
            held=held if len(held) == view.size else (),
        )
        for entry in entries:
            self._ports.store.add(entry)
        if (head := self.rows.ledger.head) is not None and head.base_step >= wanted:
            self._ports.probe.event("gap-skipped", first=wanted, last=head.base_step)
        if problem:
            self._note("warning", "ledger", problem)

    def info(self, *, queued: bool) -> JobInfo:
        """The record that people see. ``queued``: it waits because other jobs have the workers."""
        record, view = self.record, self.running_view
        edges = [self.edge_from(view, rank) for rank in range(view.size)] if view else []
        known, step = any(edges), self.core.known_step
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
            reason="another job has the workers" if queued else self._reason(),
            changes=list(self.core.settings.made),
            **self.rows.figures(step),
        )


def _resolve(handled: asyncio.Future[bool] | None, result: bool) -> None:
    if handled is not None and not handled.done():
        handled.set_result(result)


def profile_of(spec: str) -> Profile | None:
    """The profile of a stored job; None if another release wrote it and this one cannot read it."""
    try:
        return Profile.from_spec_untrusted(spec)
    except ProtocolError:
        return None


def offer_to(device: str, peer: JobWorker) -> JobWorker:
    """The worker as seen by a job that computes on ``device``. A job on the CPU ignores the figures of a GPU."""
    if device == "cpu" and not peer.on_host:
        return replace(peer, memory_bytes=0, flops=0.0, on_host=True)
    return peer


def assigned_spec(spec: str, cuts: Sequence[int], created_at: float) -> str:
    """The profile for a worker of the job: with its cuts, and with the date of its creation for chat templates."""
    profile, changes = profile_of(spec), dict[str, Any]()
    if profile is None:
        return spec  # the worker says that it cannot read it
    if cuts:
        changes["pipeline"] = profile.pipeline.model_copy(update={"cuts": list(cuts)})
    if profile.data.format in ("chat", "preference") and not profile.data.date:
        day = datetime.fromtimestamp(created_at, UTC).date().isoformat()
        changes["data"] = profile.data.model_copy(update={"date": day})
    return profile.model_copy(update=changes).to_spec() if changes else spec


def options_of(record: JobRecord, profile: Profile | None, *, minted_below: int) -> JobOptions:
    """The coordinator's options. Without a profile it starts nothing, but people can still end the job."""
    if profile is None:
        return JobOptions(record.workers, record.micro_batches, minted_below=minted_below)
    ring, codec = profile.ring, "fp32" if profile.job.exact else profile.ring.codec
    return JobOptions(
        replicas=record.workers // profile.stages,
        micro_batches=record.micro_batches,
        ring_options=RingOptions(ring.order, ring.streams, ring.sub_chunk_bytes, codec, ring.error_budget),
        minted_below=minted_below,
        share_rule=share_rule_of(profile),
        parts=profile.stages,
        least=least_members(profile),
        asynchronous=profile.job.strategy == "server",
        training=training_of(profile, record.shape, record.cuts),
        least_steps=least_steps(profile),
        masked=profile.federated.secure,
    )


def least_steps(profile: Profile) -> int:
    may_end_early = profile.validation.patience or profile.privacy.epsilon
    return 0 if may_end_early else profile.job.steps
