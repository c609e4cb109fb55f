"""Pipeline schedules: the order in which each stage of a chain runs the forwards and backwards of its micro-batches.

Stage s of p runs ``w_s`` forwards (its *warm-up*), then a forward and a backward in turn (1F1B; Narayanan et al., arXiv
1806.03377 and 2104.04473), then the remaining backwards::

    F0 .. F(w-1)   Fw B0   F(w+1) B1   ..   F(m-1) B(m-1-w)   B(m-w) .. B(m-1)

Every schedule has this form, so its warm-ups define it. A stage has at most w + 1 micro-batches *in flight*: it keeps
their activations from the forward to the backward.

* ``gpipe`` (Huang et al., arXiv 1811.06965): all forwards, then all backwards, w = m - 1.
* ``one_f_one_b``: w = p - 1 - s, the least that keeps all stages busy if links cost nothing.
* ``extended``: for links that cost time. Let R be the round trip of a hop, and T one forward and one backward at the
  slowest stage. A pipeline that never waits starts one micro-batch every T. The gradient of the next stage arrives in
  time if ``(w_s - w_(s+1)) T`` is at least ``T + R``. So ``w_s = w_(s+1) + ceil(1 + R / T)``, and 0 at the last stage.
  Each hop is rounded up separately: else the turns of F and B on different stages would not match.

No deadlock: B_s(k) follows F_s(w_s + k), which waits for B_{s-1} of a micro-batch before k exactly if w_s <= w_{s-1}.
So warm-ups never rise from one stage to the next, and a cap on one stage holds for all stages after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from p2ptrain.core.footprint import GPIPE
from wire.job_messages import MAX_STAGES

MAX_MICRO_BATCHES = 65_536
ONE_F_ONE_B = "1f1b"
SLACK = 0.01
"""Fraction of the time that a schedule may lose to save memory."""


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class StageOperation:
    """The forward or the backward of micro-batch ``index``, counted from 0 within the step."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}"


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The order of operations on all stages; see the module's docstring.

    Attributes:
        micro_batches: of one step, on each stage.
        warm_ups: for each stage, the forwards before the first one that a backward follows; 0 to micro_batches - 1.
        backward: whether there are backwards; validation runs forwards only, in order.

    Raises:
        ValueError: a number is out of range, or warm-ups rise, which would deadlock the stages.
    """

    micro_batches: int
    warm_ups: tuple[int, ...]
    backward: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= MAX_STAGES or not 1 <= self.micro_batches <= MAX_MICRO_BATCHES:
            raise ValueError(f"invalid pipeline: {self.stages} stages and {self.micro_batches} micro-batches")
        if not all(0 <= warm_up < self.micro_batches for warm_up in self.warm_ups):
            raise ValueError(f"invalid warm-ups {self.warm_ups} for {self.micro_batches} micro-batches")
        if any(after > before for before, after in zip(self.warm_ups, self.warm_ups[1:], strict=False)):
            raise ValueError(f"warm-ups {self.warm_ups} rise: those stages would wait for one another for ever")

    @property
    def stages(self) -> int:
        return len(self.warm_ups)

    def order(self, stage: int) -> tuple[StageOperation, ...]:
        """The operations of ``stage`` in order: each micro-batch's forward and backward once."""
        warm_up, count = self.warm_ups[stage], self.micro_batches
        if not self.backward:
            return tuple(StageOperation(Kind.FORWARD, index) for index in range(count))
        operations = [StageOperation(Kind.FORWARD, index) for index in range(warm_up)]
        for index in range(count - warm_up):
            operations += StageOperation(Kind.FORWARD, warm_up + index), StageOperation(Kind.BACKWARD, index)
        operations += (StageOperation(Kind.BACKWARD, index) for index in range(count - warm_up, count))
        return tuple(operations)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches whose activations ``stage`` keeps at the same time."""
        return self.warm_ups[stage] + 1

    def ahead(self, hop: int) -> int:
        """Receive buffers that each end of the hop from stage ``hop`` to the next one needs.

        While both stages alternate F and B, one is at most ``w_hop - w_(hop+1) + 1`` payloads ahead of the other,
        including the one in use; one more is filling. Where a stage can be further ahead (in the warm-up, at the end),
        TCP holds it back.
        """
        further = self.warm_ups[hop] - self.warm_ups[hop + 1]
        return min(self.micro_batches, max(3, further + 2))


def gpipe(stages: int, micro_batches: int, max_in_flight: int = 0) -> StageSchedule:
    """``max_in_flight``: 0: all."""
    return StageSchedule(micro_batches, (min(max_in_flight or micro_batches, micro_batches) - 1,) * stages)


def forwards(stages: int, micro_batches: int) -> StageSchedule:
    return StageSchedule(micro_batches, (0,) * stages, backward=False)


def one_f_one_b(stages: int, micro_batches: int) -> StageSchedule:
    """1F1B for links that cost nothing."""
    return extended(micro_batches, [0.0] * (stages - 1), 1.0)


def extended(
    micro_batches: int, round_trips_s: Sequence[float], period_s: float, *, max_in_flight: Sequence[int] = ()
) -> StageSchedule:
    """1F1B with warm-ups long enough to hide the links.

    Args:
        round_trips_s: for each hop, the transfer times of a micro-batch's activations and of its gradients, added up.
        period_s: time of one forward and one backward at the slowest stage; infinite if unknown.
        max_in_flight: for each stage the most micro-batches that its memory allows, at least 1; empty: no bound. A
            bound below the need makes the stage wait.
    """
    needed = [0]
    for round_trip_s in reversed(round_trips_s):
        periods = (1 + min(round_trip_s / period_s, micro_batches)) / (1 + SLACK)  # more are never in flight
        needed.append(needed[-1] + math.ceil(periods))
    warm_ups, limit = [], micro_batches
    for stage, warm_up in enumerate(reversed(needed)):
        limit = min(limit, max_in_flight[stage] if max_in_flight else limit)
        warm_ups.append(min(warm_up, limit - 1))
    return StageSchedule(micro_batches, tuple(warm_ups))


def choose_schedule(
    name: str,
    micro_batches: int,
    round_trips_s: Sequence[float],
    period_s: float,
    *,
    max_in_flight: int,
    room: Sequence[int],
) -> StageSchedule:
    """The schedule of a step, as ``pipeline.schedule`` of a profile names it.

    Args:
        max_in_flight: configured; 0: no limit.
        room: for each stage, the micro-batches that its memory allows; 0: any number. Others are as in ``extended``.

    Raises:
        ValueError: no schedule has that name.
    """
    if name == GPIPE:
        return gpipe(len(room), micro_batches, max_in_flight)
    if name != ONE_F_ONE_B:
        raise ValueError(f"no pipeline schedule is named {name!r}")
    limit = max_in_flight or micro_batches
    return extended(micro_batches, round_trips_s, period_s, max_in_flight=[min(limit, fit or limit) for fit in room])


# ------------------------------------------------------------------------------------------------------ the ideal time


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What operations and hops take, in seconds.

    Attributes:
        forward_s, backward_s: for each stage, of one micro-batch.
        there_s, back_s: for each hop, the delay of activations to the next stage, and of gradients back. Hops do not
            queue: this is latency, which may include the time to transfer the bytes.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    there_s: tuple[float, ...]
    back_s: tuple[float, ...]

    @classmethod
    def even(cls, forward_s: float, backward_s: float, round_trips_s: Sequence[float]) -> StageCosts:
        """Equal stages, and hops with half their round trip in each direction."""
        stages = len(round_trips_s) + 1
        one_way_s = tuple(seconds / 2 for seconds in round_trips_s)
        return cls((forward_s,) * stages, (backward_s,) * stages, one_way_s, one_way_s)


def simulate(schedule: StageSchedule, costs: StageCosts) -> float:
    """Seconds of a step if only computing and hops take time. Each stage runs one operation at a time."""
    stages = range(schedule.stages)
    left = [deque(schedule.order(stage)) for stage in stages]
    free_s = [0.0] * schedule.stages
    ended_s: dict[tuple[int, StageOperation], float] = {}
    while any(left):
        before = len(ended_s)
        for stage in stages:
            takes_s = {Kind.FORWARD: costs.forward_s[stage], Kind.BACKWARD: costs.backward_s[stage]}
            while left[stage] and (arrived_s := _arrival_s(stage, left[stage][0], ended_s, costs)) is not None:
                operation = left[stage].popleft()
                free_s[stage] = ended_s[stage, operation] = max(arrived_s, free_s[stage]) + takes_s[operation.kind]
        assert len(ended_s) > before, "stages wait for ever"
    return max(free_s)


def _arrival_s(
    stage: int, operation: StageOperation, ended_s: dict[tuple[int, StageOperation], float], costs: StageCosts
) -> float | None:
    """When an operation has its input; None while that is not known."""
    if operation.kind is Kind.FORWARD:
        if stage == 0:
            return 0.0
        sent_s, hop_s = ended_s.get((stage - 1, operation)), costs.there_s[stage - 1]
    elif stage < len(costs.back_s):
        sent_s, hop_s = ended_s.get((stage + 1, operation)), costs.back_s[stage]
    else:
        sent_s, hop_s = ended_s.get((stage, StageOperation(Kind.FORWARD, operation.index))), 0.0
    return None if sent_s is None else sent_s + hop_s
