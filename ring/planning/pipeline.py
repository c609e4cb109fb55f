"""Chooses which workers train which layers of a split model: cuts and workers that make a step fastest. Pure.

A stage costs memory and a micro-batch's ``compute_s``, as ``workloads.TrainingWorkload`` says. A hop carries a
micro-batch's activations there and its gradients back. It takes both latencies and both transfer times. It *occupies*
the link for the longer transfer, since the two go in opposite directions.

The stages are chosen by ``cuts``. No stage exceeds its memory. Then the slowest stage or hop, which sets the pace, is
as fast as possible. Then the time of one micro-batch through all stages and back is least: a step's start and end cost
it.

With several replicas all have the same cuts, and a step waits for the slowest. So workers form *groups* of one worker
per replica: once of workers of similar speed, once of similar memory. A group is as fast as its slowest member and as
large as its smallest. The distance of two groups is the longest within one replica. Groups are placed as workers would
be, and the better of both results is taken. A speed of 0 counts as the median of the known ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import part_training_bytes
from p2ptrain.core.texts import human_bytes, join_some
from ring.planning.cuts import MOST_WORKERS, Array, ChainCosts, Score, cut_places, find_best_chain, tabulate
from ring.planning.measurements import CandidateWorker, Links, LinkTimes
from ring.planning.schedule import StageCosts, plan_extended, simulate_step_s
from ring.planning.workloads import TrainingWorkload
from wire.records import StagePlanInfo, TrainingPlanInfo

TrainingPlan = tuple[TrainingPlanInfo, list[StagePlanInfo]]
"""A plan and its stages, as records that the seed sends."""
Group = tuple[CandidateWorker, ...]
"""The workers of one stage, one per replica, in the order of ids, as replicas are made."""
GroupPart = tuple[Group, int, int]
"""A group and its layers [start, stop)."""

MOST_SIMULATED = 256
"""Micro-batches of a step that are simulated; more of them go at the pace of the slowest stage."""


def plan_pipeline(
    training: TrainingWorkload, candidates: Iterable[CandidateWorker], links: Links | None = None
) -> TrainingPlan:
    """The best plan by the module's objective.

    Raises:
        UserError: there are fewer workers or layers than the training needs, or the cuts do not fit it.
        ResourceError: it does not fit. The error tells what is needed, what there is, and a remedy.
    """
    workers = sorted(candidates, key=lambda candidate: candidate.id)
    if training.layers < training.stages:
        text = f"a model of {training.layers} layers cannot be cut into {training.stages} stages"
        raise UserError(text, remedy=f"set pipeline.stages to {training.layers} at most")
    if len(workers) < training.workers:
        raise UserError(
            f"{training.stages} stages of {training.replicas} replica{'s' * (training.replicas != 1)} need "
            f"{training.workers} workers, and {len(workers)} {'is' if len(workers) == 1 else 'are'} connected",
            remedy="start more: p2ptrain join",
        )
    if training.cuts and (len(training.cuts) != training.stages - 1 or training.cuts[-1] >= training.layers):
        text = f"cuts at {list(training.cuts)} do not cut {training.layers} layers into {training.stages} stages"
        raise UserError(text, remedy="correct pipeline.cuts, or leave it out")
    speeds = [candidate.flops for candidate in workers if candidate.flops]
    typical = statistics.median(speeds or [1.0])
    with_speeds = [replace(candidate, flops=candidate.flops or typical) for candidate in workers]
    times = LinkTimes(links or {}, [candidate.id for candidate in workers])
    parts = _best_parts(training, with_speeds, times)
    if parts is None:
        raise _refusal(training, workers)
    return _plan_of(training, with_speeds, parts, times, known=bool(speeds))


# --------------------------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True, slots=True)
class GroupHop:
    """Seconds of a micro-batch from one group to the next, at the slowest of their links: activations there, gradients
    back, and how long it occupies the link."""

    activation_hop_s: float
    gradient_hop_s: float
    occupied_s: float

    @classmethod
    def between(cls, training: TrainingWorkload, times: LinkTimes, senders: Group, receivers: Group) -> GroupHop:
        pairs = [(sender.id, receiver.id) for sender, receiver in zip(senders, receivers, strict=True)]
        activation_hop_s, sent_s = times.slowest(pairs, training.activation_bytes)
        gradient_hop_s, returned_s = times.slowest([pair[::-1] for pair in pairs], training.gradient_bytes)
        return cls(activation_hop_s + sent_s, gradient_hop_s + returned_s, max(sent_s, returned_s))

    @property
    def round_trip_s(self) -> float:
        return self.activation_hop_s + self.gradient_hop_s


def _groups(training: TrainingWorkload, workers: Sequence[CandidateWorker]) -> Iterator[list[Group]]:
    """The workers in groups of one per replica: similar in speed, then in memory. The best come first; the least are
    left over."""

    def speed(candidate: CandidateWorker) -> tuple[float, float, str]:
        return -candidate.flops, -candidate.memory_bytes, candidate.id

    def room(candidate: CandidateWorker) -> tuple[float, float, str]:
        return -candidate.memory_bytes, -candidate.flops, candidate.id

    count = training.replicas
    for key in (speed, room)[: 2 if count > 1 else 1]:
        ordered = sorted(workers, key=key)
        groups = [tuple(ordered[at : at + count]) for at in range(0, len(ordered) - count + 1, count)]
        yield [tuple(sorted(group, key=lambda candidate: candidate.id)) for group in groups]


def _best_parts(
    training: TrainingWorkload, workers: Sequence[CandidateWorker], times: LinkTimes
) -> list[GroupPart] | None:
    found: list[tuple[Score, int, list[GroupPart]]] = []
    for number, groups in enumerate(_groups(training, workers)):
        # Of equally near groups the smallest comes first.
        tried = sorted(
            groups[:MOST_WORKERS], key=lambda group: (min(worker.memory_bytes for worker in group), group[0].id)
        )
        if chain := find_best_chain(chain_costs(training, tried, times), [training.stages]):
            score, parts = chain
            found.append((score, number, [(tried[group], start, stop) for group, start, stop in parts]))
    return min(found, key=lambda item: item[:2])[2] if found else None


def chain_costs(training: TrainingWorkload, groups: Sequence[Group], times: LinkTimes) -> ChainCosts:
    places = [0, *training.cuts, training.layers] if training.cuts else cut_places(training.layers)
    plain_s = tabulate(lambda start, stop: training.compute_s(start, stop, 1.0), places)
    # ``part_training_bytes`` takes whole tables, too.
    kept: Any = tabulate(training.kept_bytes, places)
    inputs: Any = tabulate(lambda start, _: training.inputs_bytes(start), places)
    held: dict[bool, Any] = {
        on_host: tabulate(partial(training.held_bytes, on_host=on_host), places) for on_host in (True, False)
    }

    def part_s(behind: int, index: int) -> Array:
        group, in_flight = groups[index], training.in_flight(training.stages - 1 - behind)
        cost_s = plain_s / min(candidate.flops for candidate in group)
        for on_host, memory_bytes in {(candidate.on_host, candidate.memory_bytes) for candidate in group}:
            need_bytes = part_training_bytes(
                held[on_host], kept, inputs, in_flight=in_flight, recompute=training.recompute
            )
            cost_s = np.where(need_bytes <= memory_bytes, cost_s, np.inf)
        return cost_s

    def hop(here: int, there: int) -> tuple[float, float]:
        if len(groups) in (here, there):
            return 0.0, 0.0  # training has no client
        found = GroupHop.between(training, times, groups[here], groups[there])
        return found.round_trip_s, found.occupied_s

    return ChainCosts(places, len(groups), part_s, hop)


# ------------------------------------------------------------------------------------------------------ the prediction


def _plan_of(
    training: TrainingWorkload,
    workers: Sequence[CandidateWorker],
    parts: Sequence[GroupPart],
    times: LinkTimes,
    *,
    known: bool,
) -> TrainingPlan:
    """The plan with its predictions. ``known``: any worker's speed; without it nothing is predicted."""
    hops = [GroupHop.between(training, times, senders, receivers) for (senders, *_), (receivers, *_) in pairwise(parts)]
    computes_s = [
        training.compute_s(start, stop, min(worker.flops for worker in group)) if known else 0.0
        for group, start, stop in parts
    ]
    forwards_s = [each_s / training.passes(stop) for each_s, (*_, stop) in zip(computes_s, parts, strict=True)]
    occupied_s = max([hop.occupied_s for hop in hops], default=0.0)
    pace_s = max([*computes_s, occupied_s])
    share = -(-training.micro_batches // training.replicas)
    schedule = plan_extended(
        min(share, MOST_SIMULATED),
        [hop.round_trip_s for hop in hops],
        pace_s or 1.0,
        max_in_flight=[
            min(training.most_in_flight(start, stop, worker) for worker in group) for group, start, stop in parts
        ],
    )
    costs = StageCosts(
        tuple(forwards_s),
        tuple(all_s - one_s for all_s, one_s in zip(computes_s, forwards_s, strict=True)),
        tuple(hop.activation_hop_s for hop in hops),
        tuple(hop.gradient_hop_s for hop in hops),
    )
    chain_s = max(simulate_step_s(schedule, costs) + (share - schedule.micro_batches) * pace_s, share * occupied_s)
    reduce_s = _reduce_s(training, parts, times)
    used = {candidate for group, *_ in parts for candidate in group}
    info = TrainingPlanInfo(
        training.stages,
        training.replicas,
        training.micro_batches,
        spares=[candidate.name for candidate in workers if candidate not in used],
    )
    if known:
        info = replace(
            info,
            bubble=1 - share * sum(computes_s) / (len(parts) * chain_s),
            efficiency=share * max(computes_s) / chain_s,
            step_s=chain_s + reduce_s,
            reduce_s=reduce_s,
            tokens_per_s=training.micro_batches * training.tokens / (chain_s + reduce_s),
        )
    round_trips_s = [*(hop.round_trip_s for hop in hops), 0.0]
    stages = [
        StagePlanInfo(
            stage,
            [candidate.id for candidate in group],
            [candidate.name for candidate in group],
            start,
            stop,
            training.sizes.weights_bytes(start, stop),
            max(training.need_bytes(stage, start, stop, on_host=candidate.on_host) for candidate in group),
            min((int(worker.memory_bytes) for worker in group if worker.memory_bytes < math.inf), default=0),
            schedule.count_in_flight(stage),
            computes_s[stage] if known else None,
            round_trips_s[stage] if known else None,
        )
        for stage, (group, start, stop) in enumerate(parts)
    ]
    return info, stages


def _reduce_s(training: TrainingWorkload, parts: Sequence[GroupPart], times: LinkTimes) -> float:
    """Seconds to sum the gradients: of each part over its replicas, then those of a matrix that both ends hold."""

    def ring_s(group: Group, size_bytes: int) -> float:
        return times.all_reduce_s([worker.id for worker in group], size_bytes)

    reduce_s = max(ring_s(group, training.trained_bytes(start, stop)) for group, start, stop in parts)
    tied_bytes = training.sizes.tied_bytes
    if tied_bytes and training.trained == 1:
        reduce_s += max(ring_s(ends, tied_bytes) for ends in zip(parts[0][0], parts[-1][0], strict=True))
    return reduce_s


# ------------------------------------------------------------------------------------------------------------- refusal


def _refusal(training: TrainingWorkload, workers: Sequence[CandidateWorker]) -> ResourceError:
    layers, stages = training.layers, training.stages
    bounds = (0, *training.cuts, layers) if training.cuts else [stage * layers // stages for stage in range(stages + 1)]
    needs = [(training.need_bytes(stage, *span), stage, *span) for stage, span in enumerate(pairwise(bounds))]
    rooms = ((worker.name, worker.memory_bytes) for worker in workers)
    offers = [f"{name} {'any' if room_bytes == math.inf else human_bytes(room_bytes)}" for name, room_bytes in rooms]
    text = (
        f"the model ({human_bytes(training.sizes.weights_bytes(0, layers))} of weights) cannot train as {stages} "
        f"stages by {training.replicas} replica{'s' * (training.replicas != 1)}: "
        f"{'' if training.cuts else 'with equal stages, '}"
        f"{_shortage(training, min(needs), 'the smallest')}, {_shortage(training, max(needs), 'the largest')}, a "
        f"whole replica {human_bytes(sum(need[0] for need in needs))}, and the workers offer {join_some(offers)}"
    )
    do = ["start workers with more memory"]
    if not training.recompute:
        do.append("set pipeline.recompute=true")
    if training.cuts:
        do.append("leave pipeline.cuts out")
    if training.tokens >= 2 * training.sequence_tokens:
        do.append("set batch.micro_batch_sequences lower")
    if training.replicas > 1:
        do.append(f"set job.workers={stages} for one replica")
    elif stages < layers:
        do.append("set pipeline.stages higher and start as many workers")
    return ResourceError(text, remedy=", or ".join(do))


def _shortage(training: TrainingWorkload, need: tuple[int, int, int, int], what: str) -> str:
    need_bytes, stage, start, stop = need
    span = f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"
    flying = training.in_flight(stage)
    return f"{what} needs {human_bytes(need_bytes)} ({span}, {flying} micro-batch{'es' * (flying != 1)} in flight)"
