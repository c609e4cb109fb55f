"""A model in stages: activations and their gradients go through the crew's chain, gradients are summed by stage.

Per view, beside the ring of all and the ring of this stage (``staged``): the crew's *chain*, and, where the first and
the last stage both have the embedding's matrix, the *pair*: the ring of these two, round which their gradients of it
are summed, after the stage's ring has summed those of the replicas. Two numbers are summed, so both get the same bits.

Schedule. Each step has its own, the same on all stages of a crew, because all derive it from the same figures: the
chain's round trips, how many micro-batches each stage has memory for, and how long a micro-batch takes the slowest
stage, which is told with the digests. Whatever the schedule, backwards run in the order of the micro-batches, so it
changes no bit of a step's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from p2ptrain.compute.gradients import OnFinal
from ring.chain import Chain
from ring.links import Topology
from ring.schedule import Schedule, extended, forwards, one_f_one_b
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Engine, Payload, PipelineEngine
from roles.strategies import Meet, StageLoad
from roles.strategies.stage_runner import StageRunner
from roles.strategies.staged import StagedStrategy

GPIPE = "gpipe"


class _Share:
    """A crew's micro-batches of one step, counted from 0 as a ``StageRunner`` does."""

    def __init__(self, engine: PipelineEngine, first: int, count: int, front_final: OnFinal) -> None:
        self.activation_bytes, self.gradient_bytes = engine.activation_bytes, engine.gradient_bytes
        self._engine, self._first, self._last = engine, first, count - 1
        self._front_final = front_final

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        return self._engine.forward(step, self._first + index, inputs)

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        on_final = self._front_final if index == self._last else None
        return self._engine.backward(self._first + index, gradient, on_final)


class _HeldOut:
    """Validation micro-batches from ``first`` on, counted from 0. ``total``: of the losses; 0 before the last stage."""

    def __init__(self, engine: PipelineEngine, first: int) -> None:
        self.activation_bytes, self.gradient_bytes = engine.activation_bytes, engine.gradient_bytes
        self.total = 0.0
        self._engine, self._first = engine, first

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        payload, loss = self._engine.validation_forward(self._first + index, inputs)
        self.total += loss
        return payload

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        raise NotImplementedError("validation has no backward passes")


class PipelineStrategy(StagedStrategy):
    """See the module's docstring.

    Args:
        engine: a ``PipelineEngine``.
        schedule: ``gpipe`` or ``1f1b``.
        max_in_flight: micro-batches whose backward pass is still to come, on a stage, at most; 0: by the schedule.
        ahead: validation micro-batches that the first stage may give on before the last one has taken them: a step's.
    """

    def __init__(
        self,
        engine: Engine,
        compute: ComputeThread,
        progress: Callable[[], None],
        bucket_bytes: int = 0,
        *,
        schedule: str,
        max_in_flight: int,
        ahead: int,
    ) -> None:
        super().__init__(engine, compute, progress, bucket_bytes)
        self._part = cast(PipelineEngine, engine)
        self._contributed = self._part.contributed_square_sum
        self._wanted, self._max_in_flight, self._ahead = schedule, max_in_flight, ahead
        self._chain: Chain | None = None
        self._pair: RingSession | None = None
        self._period_s = math.inf  # of a micro-batch at the slowest stage, in this view
        self._next = ""  # peer id of the next stage
        self._load: StageLoad | None = None

    async def begin(self, session: RingSession, meet: Meet) -> None:
        self._chain = self._pair = None
        self._period_s, self._load = math.inf, None
        await super().begin(session, meet)
        view = session.view
        crew, stage = view.crew(session.rank), view.stage_of(session.rank)
        self._next = crew[stage + 1].peer_id if stage + 1 < len(crew) else ""
        if self._part.tied_gradient() is not None:
            ends = replace(crew[0], first=0, count=0), replace(crew[-1], first=0, count=0)
            self._pair = await meet.ring(replace(view, members=ends, stages=1), Topology.PAIR)
        self._chain = await meet.chain(
            view,
            [member.peer_id for member in crew],
            activation_bytes=self._part.activation_bytes,
            gradient_bytes=self._part.gradient_bytes,
            in_flight=self._part.in_flight,
        )

    async def _fill(self, step: int, first: int, count: int, front_final: OnFinal) -> None:
        self._unit_s = 0.0
        if not count:
            return
        runner = self._runner(_Share(self._part, first, count, front_final))
        spent = await runner.run(step, self._schedule(count), patience_s=self._patience_s)
        self._unit_s = (spent.forward_s + spent.backward_s) / count
        part = self._part
        both_ways_bytes = part.activation_bytes + part.gradient_bytes if self._next else 0
        self._load = StageLoad(
            *part.layers,
            micro_batch_s=self._unit_s,
            busy=1 - min(1.0, spent.waited_s / spent.step_s) if spent.step_s > 0 else 0.0,
            token_bytes=both_ways_bytes / part.tokens_per_micro_batch,
            next=self._next,
        )

    def stage_load(self) -> StageLoad | None:
        return self._load

    async def _summed(self) -> None:
        gradient = self._part.tied_gradient()
        if gradient is not None:
            if self._pair is None:
                raise RuntimeError("no view has begun")
            await self._pair.all_reduce(gradient, patience_s=self._patience_s)

    def _heard(self, units_s: list[float]) -> None:
        slowest_s = max(units_s)
        if math.isfinite(slowest_s) and slowest_s > 0:
            self._period_s = min(self._period_s, slowest_s)  # slower ones were held up by something else

    async def validate(self, first: int, count: int) -> tuple[float, int]:
        total = 0.0
        for start in range(first, first + count, self._ahead):
            held_out = _HeldOut(self._part, start)
            number = min(self._ahead, first + count - start)
            schedule = forwards(self._crew_chain.stages, number)
            await self._runner(held_out).run(-1, schedule, patience_s=self._patience_s)
            total += held_out.total
        is_last = self._crew_chain.stage == self._crew_chain.stages - 1
        return total, count * self._engine.tokens_per_micro_batch if is_last else 0

    def _runner(self, engine: _Share | _HeldOut) -> StageRunner:
        return StageRunner(engine, self._crew_chain, self._compute, on_work=self._progress)

    def _schedule(self, count: int) -> Schedule:
        """Of a step of ``count`` micro-batches."""
        chain, most = self._crew_chain, self._max_in_flight
        if self._wanted == GPIPE:
            return Schedule(GPIPE, count, (min(count, most or count) - 1,) * chain.stages)
        bounds = [min(most or count, room or count) for room in chain.in_flight]
        if self._period_s == math.inf:
            return one_f_one_b(chain.stages, count, max_in_flight=bounds)
        return extended(count, chain.round_trips_s, self._period_s, max_in_flight=bounds)

    @property
    def _crew_chain(self) -> Chain:
        if self._chain is None:
            raise RuntimeError("no view has begun")
        return self._chain
