"""Runs the activities of the step transaction: what its instructions ask for, with the job's strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from p2ptrain.compute.gradients import KEY_BYTES
from p2ptrain.core.errors import JobFailed
from ring import member_events as ev
from ring.session import RingSession
from ring.token import Token, check_untrusted
from ring.transaction import Transaction
from roles.strategies.strategy import Strategy
from roles.worker.checkpoint_assembler import assembles
from roles.worker.context import Context
from roles.worker.heal import Healer
from roles.worker.job_state import ActivityRunner, JobState
from roles.worker.privacy import Budget
from roles.worker.view_connections import NEW_S, ViewConnections, patience_s


class StepRunner(ActivityRunner):
    def __init__(
        self, context: Context, core: Transaction, state: JobState, connections: ViewConnections, healer: Healer
    ) -> None:
        self._context, self._core, self._state, self._connections = context, core, state, connections
        self._healer = healer
        self._strategy: Strategy | None = None
        self._digests = (b"", b"")  # of the step reduced last: the joined digest, and the digests of all stages
        self._trained: set[str] = set()  # members of the newest step
        self._is_last = False  # the step under way is the job's last, by what all members know
        self.activities = {
            ev.Heal: self._heal,
            ev.Compute: self._compute,
            ev.Reduce: self._reduce,
            ev.Vote: self._vote,
            ev.Apply: self._apply,
            ev.Confirm: self._confirm,
            ev.Boundary: self._boundary,
        }

    def build(self) -> None:
        """Make the strategy for the engine."""
        state, profile = self._state, self._state.profile
        make = self._context.strategies(profile)
        self._strategy = make(state.engine, self._context.compute, state.count_progress, profile.ring.bucket_bytes)

    def close(self) -> None:
        self._strategy = None

    async def begin_view(self, session: RingSession) -> None:
        state, view = self._state, session.view
        session.patience_s = self._patience_s()
        await self._ready_strategy.begin_view(session, self._connections)
        if state.early.budget is not None:
            await state.early.budget.agree(session, patience_s=self._patience_s())
        if state.profile.validation.patience:
            messages = await session.all_gather(state.early.message(), patience_s=self._patience_s())
            healthy = [message for message, member in zip(messages, view.members, strict=True) if member.healthy]
            state.early.agree_untrusted(healthy, view.step)

    def carry_out(self, instruction: object) -> None:
        assert isinstance(instruction, ev.RecordStep)
        joined, digests = self._digests
        row = instruction.row
        self._state.heal_source.log_step(row, digests if joined == row.digest else b"")
        self._state.reports.add_row(row, instruction.lineage)

    # ----------------------------------------------------------------------------------------------------- activities

    async def _heal(self, instruction: ev.Heal) -> ev.ActivityFinished:
        state = self._state
        state.heal_source.cut("it is healed itself")
        state.reports.report_heal(instruction.view, await self._healer.within(instruction, state.engine))
        return ev.ActivityFinished(instruction.ticket)

    async def _compute(self, instruction: ev.Compute) -> ev.ActivityFinished:
        step, count = instruction.step, instruction.count
        state, session, clock = self._state, self._connections.session, self._state.reports.clock
        if step == session.view.step:
            state.reports.steps.tell_beyond(session.view, step)
        began, self._is_last = self._context.world.clock.now(), state.early.is_due
        if state.early.budget is not None:
            await self._spend(state.early.budget, session.size)
        with clock.phase("compute"):
            await self._ready_strategy.compute(step, instruction.first, count, patience_s=self._patience_s())
        if step > session.view.step or not clock.unit_us:  # the first one may wait for an aborted micro-batch
            clock.computed(self._context.world.clock.now() - began, count)
        state.reports.stage_load = self._ready_strategy.work.load
        state.tokens += count * state.engine.data.tokens_per_micro_batch
        return ev.ActivityFinished(instruction.ticket)

    async def _spend(self, budget: Budget, members: int) -> None:
        """Count the step that begins, and give the engine a key for its noise. If the budget does not allow the step,
        such as a repeated one, it changes nothing."""
        world = self._context.world
        key = world.entropy(KEY_BYTES) if await budget.spend() else b""
        noise = self._state.engine.noise
        assert noise is not None
        await self._context.compute.run(noise.use_noise, budget.noise_std / math.sqrt(members), key)
        if key:
            view, step = self._core.view, self._core.applied
            world.probe.event("release-counted", view=view, step=step, count=budget.releases, key=key)

    async def _reduce(self, instruction: ev.Reduce) -> ev.StepReduced:
        session, strategy, clock = self._connections.session, self._ready_strategy, self._state.reports.clock
        with self._communicating(session):
            contribution = await strategy.reduce()
        self._digests = contribution.digest, contribution.digests
        clock.exchanged(exposed_s=strategy.exposed_s, communicating_s=strategy.communicating_s)
        return ev.StepReduced(
            instruction.ticket,
            contribution.digest,
            contribution.part,
            own=contribution.own,
            unit_us=clock.unit_us,
            stop=self._is_last,
        )

    async def _vote(self, instruction: ev.Vote) -> ev.TokensGathered:
        session = self._connections.session
        with self._communicating(session):
            check = partial(check_untrusted, mine=Token.decode_untrusted(instruction.token))
            token, check = self._context.world.probe.alter("vote", (instruction.token, check))
            tokens = await session.all_gather(token, patience_s=self._patience_s(), check=check)
        return ev.TokensGathered(instruction.ticket, tuple(tokens))

    @contextmanager
    def _communicating(self, session: RingSession) -> Iterator[None]:
        waited_s, clock = session.waited_s, self._state.reports.clock
        with clock.phase("communicate"):
            yield
        clock.waited(session.waited_s - waited_s)

    async def _apply(self, instruction: ev.Apply) -> ev.ActivityFinished:
        state, strategy = self._state, self._ready_strategy
        await state.apply(partial(strategy.commit, instruction.step, instruction.square_sum))
        self._trained = self._connections.members
        state.reports.report_applied(instruction.step, strategy.scores, redone=instruction.redo)
        return ev.ActivityFinished(instruction.ticket)

    async def _confirm(self, instruction: ev.Confirm) -> ev.DigestsGathered:
        state, session = self._state, self._connections.session
        if instruction.applied == session.view.step:  # the view begins after the last step
            state.reports.steps.tell_beyond(session.view, instruction.applied)
        digests = await state.boundary.compare(state.engine, session, patience_s=self._patience_s() + NEW_S)
        return ev.DigestsGathered(instruction.ticket, digests)

    async def _boundary(self, instruction: ev.Boundary) -> ev.ActivityFinished:
        state, session, assembler = self._state, self._connections.session, self._state.assembler
        longest_s, view, validate = self._patience_s() + NEW_S, session.view, self._ready_strategy.validate
        is_saving = await state.finish_step(instruction, session, validate, session, patience_s=longest_s)
        if assembler is not None:
            if is_saving and assembles(view, session.rank, state.profile.checkpoint.copies):
                state.assemble(view, session.rank)
            if instruction.last:
                await state.boundary.gathered(assembler, session, patience_s=longest_s)
        return ev.ActivityFinished(instruction.ticket)

    # -------------------------------------------------------------------------------------------------------- helpers

    def _patience_s(self) -> float:
        core, state = self._core, self._state
        if core.view is None:
            return NEW_S
        return patience_s(
            core.view,
            core.applied,
            longest_s=state.reports.clock.longest_s,
            state_bytes=self._connections.state_bytes,
            trained=self._trained,
        )

    @property
    def _ready_strategy(self) -> Strategy:
        if self._strategy is None:
            raise JobFailed("a view came before the model was built")
        return self._strategy
