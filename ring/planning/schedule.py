"""Pipeline schedules: the order in which each stage of a chain runs the forwards and backwards of its micro-batches.

Stage s of p runs ``w_s`` forwards (its *warm-up*), then a forward and a backward in turn (1F1B; Narayanan et al., arXiv
1806.03377 and 2104.04473), then the remaining backwards::

    F0 .. F(w-1)   Fw B0   F(w+1) B1   ..   F(m-1) B(m-1-w)   B(m-w) .. B(m-1)

Every schedule has this form, so its warm-ups define it. A stage has at most w + 1 micro-batches *in flight*: it keeps
their activations from the forward to the backward.

* ``plan_gpipe`` (Huang et al., arXiv 1811.06965): all forwards, then all backwards, w = m - 1.
* ``plan_one_f_one_b``: w = p - 1 - s, the least that keeps all stages busy if links cost nothing.
* ``plan_extended``: 1F1B for links that cost time. Let R be the round trip of a hop, and T the time of one forward and
  one backward at the slowest stage. A pipeline that never waits starts one micro-batch every T. The gradient of the
  next stage arrives in time if ``(w_s - w_(s+1)) T`` is at least ``T + R``. So ``w_s = w_(s+1) + ceil(1 + R / T)``, and
  0 at the last stage. Each hop is rounded up separately, so that the turns of F and B on neighbouring stages match.

Warm-ups must not rise from a stage to the next: a stage with more of them would wait for forwards that the stage before
it runs only after receiving gradients from it. So a cap on one stage holds for all stages after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

MAX_MICRO_BATCHES = 65_536
MAX_SLOWDOWN = 0.01
"""Fraction of a step's time that a schedule may lose to keep fewer micro-batches in flight."""


class OperationKind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class StageOperation:
    """The forward or the backward of micro-batch ``index``, counted from 0 within the step."""

    kind: OperationKind
    index: int


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The order of operations on all stages; see the module's docstring.

    Attributes:
        micro_batches: of one step, on each stage.
        warm_ups: for each stage, the forwards before the first one that a backward follows; 0 to micro_batches - 1.
        backward: whether there are backwards; validation runs forwards only, in order.
    """

    micro_batches: int
    warm_ups: tuple[int, ...]
    backward: bool = True

    @property
    def stages(self) -> int:
        return len(self.warm_ups)

    def list_operations(self, stage: int) -> tuple[StageOperation, ...]:
        """Return the operations of ``stage`` in order."""
        warm_up, count = self.warm_ups[stage], self.micro_batches
        forwards = [StageOperation(OperationKind.FORWARD, index) for index in range(count)]
        if not self.backward:
            return tuple(forwards)
        backwards = [StageOperation(OperationKind.BACKWARD, index) for index in range(count)]
        pairs = zip(forwards[warm_up:], backwards, strict=False)
        return *forwards[:warm_up], *chain.from_iterable(pairs), *backwards[count - warm_up :]

    def count_in_flight(self, stage: int) -> int:
        """Return how many micro-batches' activations ``stage`` keeps at the same time, at most."""
        return self.warm_ups[stage] + 1

    def count_receive_buffers(self, hop: int) -> int:
        """Return how many receive buffers each end of the hop from stage ``hop`` to the next one needs.

        While both stages alternate F and B, at most ``w_hop - w_(hop+1) + 1`` received payloads are unused or in use.
        One more buffer is being filled. In the warm-up and at the end a sender may be faster; TCP holds it back.
        """
        warm_up_difference = self.warm_ups[hop] - self.warm_ups[hop + 1]
        return min(self.micro_batches, max(3, warm_up_difference + 2))


def plan_gpipe(stages: int, micro_batches: int) -> StageSchedule:
    """All forwards, then all backwards."""
    return StageSchedule(micro_batches, (micro_batches - 1,) * stages)


def plan_forwards(stages: int, micro_batches: int) -> StageSchedule:
    """Forwards only, for validation."""
    return StageSchedule(micro_batches, (0,) * stages, backward=False)


def plan_one_f_one_b(stages: int, micro_batches: int) -> StageSchedule:
    """1F1B for links that cost nothing."""
    return plan_extended(micro_batches, [0.0] * (stages - 1), 1.0)


def plan_extended(
    micro_batches: int, round_trips_s: Sequence[float], period_s: float, *, max_in_flight: Sequence[int] = ()
) -> StageSchedule:
    """1F1B with warm-ups long enough to hide the links.

    Args:
        round_trips_s: for each hop, the transfer times of a micro-batch's activations and of its gradients, added up.
        period_s: time of one forward and one backward at the slowest stage; infinite if unknown.
        max_in_flight: for each stage the most micro-batches that its memory allows, 0: any number; empty: no limit. If
            it is too low to hide the links, the stage waits.
    """
    reversed_warm_ups = [0]
    for round_trip_s in reversed(round_trips_s):
        # A round trip of more periods than there are micro-batches needs no more of them in flight.
        periods = (1 + min(round_trip_s / period_s, micro_batches)) / (1 + MAX_SLOWDOWN)
        reversed_warm_ups.append(reversed_warm_ups[-1] + math.ceil(periods))
    warm_ups, cap = [], micro_batches
    for stage, warm_up in enumerate(reversed(reversed_warm_ups)):
        cap = min(cap, (max_in_flight[stage] if max_in_flight else 0) or cap)
        warm_ups.append(min(warm_up, cap - 1))
    return StageSchedule(micro_batches, tuple(warm_ups))


# ------------------------------------------------------------------------------------------------------ the ideal time


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Times of operations and hops, for one micro-batch.

    Attributes:
        forward_s, backward_s: for each stage.
        activation_hop_s, gradient_hop_s: for each hop, from the end of the sender's operation to the arrival. Hops do
            not queue.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_hop_s: tuple[float, ...]
    gradient_hop_s: tuple[float, ...]

    @classmethod
    def of_equal_stages(cls, forward_s: float, backward_s: float, round_trips_s: Sequence[float]) -> StageCosts:
        """Equal stages, and hops with half their round trip in each direction."""
        stages = len(round_trips_s) + 1
        one_way_s = tuple(seconds / 2 for seconds in round_trips_s)
        return cls((forward_s,) * stages, (backward_s,) * stages, one_way_s, one_way_s)


def simulate_step_s(schedule: StageSchedule, costs: StageCosts) -> float:
    """Return the seconds of a step if only operations and hops take time. Each stage runs one operation at a time."""
    stages = range(schedule.stages)
    pending = [deque(schedule.list_operations(stage)) for stage in stages]
    free_s = [0.0] * schedule.stages
    ended_s: dict[tuple[int, StageOperation], float] = {}
    while any(pending):
        ended_count = len(ended_s)
        for stage in stages:
            while pending[stage] and (
                (arrival_s := _find_arrival_s(stage, pending[stage][0], ended_s, costs)) is not None
            ):
                operation = pending[stage].popleft()
                duration_s = (costs.forward_s if operation.kind is OperationKind.FORWARD else costs.backward_s)[stage]
                free_s[stage] = ended_s[stage, operation] = max(arrival_s, free_s[stage]) + duration_s
        assert len(ended_s) > ended_count, "stages wait for ever"
    return max(free_s)


def _find_arrival_s(
    stage: int, operation: StageOperation, ended_s: dict[tuple[int, StageOperation], float], costs: StageCosts
) -> float | None:
    """Return when an operation has its input; None if the operation that makes the input has not ended."""
    if operation.kind is OperationKind.FORWARD:
        if stage == 0:
            return 0.0
        sent_s, hop_s = ended_s.get((stage - 1, operation)), costs.activation_hop_s[stage - 1]
    elif stage < len(costs.gradient_hop_s):
        sent_s, hop_s = ended_s.get((stage + 1, operation)), costs.gradient_hop_s[stage]
    else:
        sent_s, hop_s = ended_s.get((stage, StageOperation(OperationKind.FORWARD, operation.index))), 0.0
    return None if sent_s is None else sent_s + hop_s
