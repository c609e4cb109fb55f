"""Runs the activities of strategy 'server': this member is the server of a view, or one of its workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from p2ptrain.core.errors import NetworkError
from ring import member_events as ev
from ring.session import RingSession
from ring.versions import VersionMember
from roles.snapshots import Snapshots
from roles.strategies.server import MOST_COPIES, VersionServer, VersionWorker, WorkerRecord
from roles.strategies.sync import MicroBatches
from roles.worker.context import Context
from roles.worker.job_state import ActivityRunner, JobState
from roles.worker.view_connections import FORM_TIMEOUT_S, NEW_S, ViewConnections


class VersionRunner(ActivityRunner):
    def __init__(self, context: Context, core: VersionMember, state: JobState, connections: ViewConnections) -> None:
        self._context, self._core, self._state, self._connections = context, core, state, connections
        self._copies = Snapshots(context.compute, MOST_COPIES)  # that workers pull
        self._record = WorkerRecord()
        self._work: MicroBatches | None = None
        self._alone: RingSession | None = None  # a ring of this member only: nobody else validates
        self._role: VersionServer | VersionWorker | None = None  # in this view
        self.activities = {
            ev.Collect: self._collect,
            ev.Apply: self._apply,
            ev.Boundary: self._boundary,
            ev.ExchangeWithServer: self._exchange,
            ev.Adopt: self._adopt,
        }

    def build(self) -> None:
        self._work = MicroBatches(self._state.engine, self._context.compute, self._state.count_progress)

    def close(self) -> None:
        self._work = self._role = None

    async def begin_view(self, session: RingSession) -> None:
        state, compute, view = self._state, self._context.compute, session.view
        if isinstance(self._role, VersionServer):
            self._role.close()
        messages = self._connections.direct(session)
        assert self._work is not None
        if session.rank == 0:
            only = replace(view, members=view.members[:1])
            self._alone = await RingSession.form(self._context, only, timeout_s=FORM_TIMEOUT_S)
            self._role = VersionServer(
                state.engine, compute, session, messages, self._copies, state.reports.ledger, state.profile
            )
        else:
            self._copies.close()  # this member may have been the server
            self._role = VersionWorker(
                self._work, state.engine, compute, session, messages, self._record, state.profile
            )

    def contribution_stats(self) -> dict[str, float]:
        return self._record.figures()

    def carry_out(self, instruction: object) -> None:
        match instruction:
            case ev.RecordStep(row, lineage):
                self._state.heal_source.log_step(row)
                self._state.reports.add_row(row, lineage)
            case ev.EndCollect():
                self._server.end()

    # ------------------------------------------------------------------------------------------------------ the server

    @property
    def _server(self) -> VersionServer:
        if not isinstance(self._role, VersionServer):
            raise NetworkError("the view of this server has ended")
        return self._role

    async def _collect(self, instruction: ev.Collect) -> ev.VersionCombined | ev.ActivityFinished:
        session, is_last = self._connections.session, self._state.early.is_due
        if instruction.step == session.view.step:
            self._state.reports.steps.tell_beyond(session.view, instruction.step)
        await self._publish()
        with self._state.reports.clock.phase("compute"):
            version = await self._server.collect()
        if version is None:
            return ev.ActivityFinished(instruction.ticket)
        return ev.VersionCombined(instruction.ticket, *version, stop=is_last)

    async def _publish(self, *, over: bool = False, last: bool = False) -> None:
        core = self._core
        await self._server.publish(core.applied, core.lineage, core.square_sum, over=over, last=last)

    async def _apply(self, instruction: ev.Apply) -> ev.ActivityFinished:
        state, server = self._state, self._server
        await state.apply(partial(server.apply, instruction.step, instruction.square_sum))
        state.reports.report_applied(instruction.step, server.scores, redone=False)
        return ev.ActivityFinished(instruction.ticket)

    async def _boundary(self, instruction: ev.Boundary) -> ev.ActivityFinished:
        assert self._work is not None
        assert self._alone is not None
        await self._publish(over=self._core.stopping, last=instruction.last)
        losses, session = partial(self._work.validate, patience_s=NEW_S), self._connections.session
        await self._state.finish_step(instruction, session, losses, self._alone, patience_s=NEW_S)
        return ev.ActivityFinished(instruction.ticket)

    # -------------------------------------------------------------------------------------------------------- a worker

    @property
    def _worker(self) -> VersionWorker:
        if not isinstance(self._role, VersionWorker):
            raise NetworkError("the view of this worker has ended")
        return self._role

    async def _exchange(self, instruction: ev.ExchangeWithServer) -> ev.VersionPulled:
        core, state, worker, clock = self._core, self._state, self._worker, self._context.world.clock
        began = clock.now()
        reply = await worker.exchange(core.applied, core.lineage)
        if reply.status:
            state.reports.clock.computed(clock.now() - began, worker.share)
            state.tokens += worker.share * state.engine.data.tokens_per_micro_batch
        state.count_progress()
        version = reply.version, reply.lineage, reply.square_sum
        return ev.VersionPulled(instruction.ticket, *version, over=reply.over, last=reply.last)

    async def _adopt(self, instruction: ev.Adopt) -> ev.ActivityFinished:
        state, core = self._state, self._core
        await self._worker.adopt(instruction.applied)
        state.reports.steps.forget()
        # First, as the report that may follow drops rows that do not lead to its state.
        state.reports.ledger.take_up_untrusted(instruction.applied, instruction.lineage, self._worker.rows)
        state.count_progress()
        state.tell_notices()
        self._context.on_step(instruction.applied, core.steps_total, {})
        return ev.ActivityFinished(instruction.ticket)
