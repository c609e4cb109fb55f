"""Chooses which workers train which layers of a split model: cuts and workers that make a step fastest. Pure.

What a stage costs
------------------
A *stage* is layers [start, stop). Its memory is that of ``p2ptrain.core.footprint``: weights, gradients, moments, and
activations of the micro-batches in flight, which are more the more stages follow. A micro-batch takes::

    compute_s = passes * forward FLOPs of its layers (and of the head) / (achieved(width) * measured FLOP per second)

``passes`` is 3: a backward pass costs two forward ones. With recomputing it is 4, except on the last stage of 1F1B,
which recomputes nothing. A hop carries a micro-batch's activations there and its gradients back. It takes both
latencies and both transfer times. It *occupies* the link for the longer transfer, since the two go in opposite
directions.

How it is chosen
----------------
As in ``serving``: one order of the workers by their links, tried in both directions, and an exact dynamic
program over the cuts. No stage exceeds its memory. Then the slowest stage or hop, which sets the pace, is as fast as
possible. Then the time of one micro-batch through all stages and back is least: a step's start and end cost it.

With several replicas all have the same cuts, and a step waits for the slowest. So workers form *groups* of one worker
per replica: once of workers alike in speed, once alike in memory. A group is as fast as its slowest member and as large
as its smallest. The distance of two groups is the longest within one replica. Groups are placed as workers would be,
and the better of both results is taken.

A memory of 0 holds anything; a speed of 0 counts as the median of the known ones. Links are as in ``ring_plan``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import GPIPE
from p2ptrain.core.texts import human_bytes
from ring.planning.ring_plan import LinkCosts, Links, all_reduce_s
from ring.planning.schedule import StageCosts, StageSchedule, extended, simulate
from ring.planning.serving import MOST_PEERS, Array, CostTable, best_chain, cut_places, spans
from ring.planning.training import CandidateWorker, Training, achieved
from wire.records import StagePlanInfo, TrainingPlanInfo

Plan = tuple[TrainingPlanInfo, list[StagePlanInfo]]
"""A plan and its stages, as records that the seed sends."""


def plan(training: Training, candidates: Iterable[CandidateWorker], links: Links | None = None) -> Plan:
    """The best plan by the module's objective.

    Raises:
        UserError: there are fewer workers or layers than the training needs, or the cuts do not fit it.
        ResourceError: it does not fit. The error tells what is needed, what there is, and a remedy.
    """
    there = sorted(candidates, key=lambda candidate: candidate.id)
    if training.layers < training.stages:
        text = f"a model of {training.layers} layers cannot be cut into {training.stages} stages"
        raise UserError(text, remedy=f"set pipeline.stages to {training.layers} at most")
    if len(there) < training.workers:
        raise UserError(
            f"{training.stages} stages of {training.replicas} replica{'s' * (training.replicas != 1)} need "
            f"{training.workers} workers, and {len(there)} {'is' if len(there) == 1 else 'are'} connected",
            remedy="start more: p2ptrain join",
        )
    if training.cuts and (len(training.cuts) != training.stages - 1 or training.cuts[-1] >= training.layers):
        text = f"cuts at {list(training.cuts)} do not cut {training.layers} layers into {training.stages} stages"
        raise UserError(text, remedy="correct pipeline.cuts, or leave it out")
    known = any(candidate.flops for candidate in there)
    found = _best(training, _with_speeds(there), _Hops(training, links or {}, there), known=known)
    if found is None:
        raise _refusal(training, there)
    return found


# --------------------------------------------------------------------------------------------------------------- costs


Group = tuple[CandidateWorker, ...]
"""The workers of one stage, one per replica, in the order of ids, as replicas are made."""


class _Hops:
    def __init__(self, training: Training, links: Links, there: Iterable[CandidateWorker]) -> None:
        self._ways = LinkCosts(links, [candidate.id for candidate in there])
        self._training = training

    def there(self, ones: Group, others: Group) -> tuple[float, float]:
        """Seconds of latency, and of transfer of a micro-batch's activations."""
        return self._slowest(ones, others, self._training.activation_bytes)

    def back(self, ones: Group, others: Group) -> tuple[float, float]:
        return self._slowest(others, ones, self._training.gradient_bytes)

    def both(self, ones: Group, others: Group) -> tuple[float, float]:
        """Seconds until activations are there and gradients back, and seconds that the link is occupied."""
        there, back = self.there(ones, others), self.back(ones, others)
        return sum(there) + sum(back), max(there[1], back[1])

    def _slowest(self, ones: Group, others: Group, size_bytes: float) -> tuple[float, float]:
        ways = [self._ways.between(one.id, other.id, size_bytes) for one, other in zip(ones, others, strict=True)]
        return max(latency_s for latency_s, _ in ways), max(bytes_s for _, bytes_s in ways)

    def ring_s(self, members: Group, size_bytes: int) -> float:
        if len(members) < 2:
            return 0.0
        latency_s, chunk_s = self._slowest(members, (*members[1:], members[0]), size_bytes / len(members))
        return all_reduce_s(len(members), latency_s, chunk_s=chunk_s)


def _with_speeds(there: Sequence[CandidateWorker]) -> list[CandidateWorker]:
    typical = statistics.median([candidate.flops for candidate in there if candidate.flops] or [1.0])
    return [replace(candidate, flops=candidate.flops or typical) for candidate in there]


def _groups(training: Training, there: Sequence[CandidateWorker]) -> Iterator[list[Group]]:
    """The workers in groups of one per replica: alike in speed, then in memory. The best come first; the least are left
    over."""

    def speed(candidate: CandidateWorker) -> tuple[float, float, str]:
        return -candidate.flops, -_room(candidate), candidate.id

    def room(candidate: CandidateWorker) -> tuple[float, float, str]:
        return -_room(candidate), -candidate.flops, candidate.id

    for key in (speed, room)[: 2 if training.replicas > 1 else 1]:
        ordered = sorted(there, key=key)
        count = training.replicas
        groups = [tuple(ordered[at : at + count]) for at in range(0, len(ordered) - count + 1, count)]
        yield [tuple(sorted(group, key=lambda candidate: candidate.id)) for group in groups]


def _room(candidate: CandidateWorker) -> float:
    return candidate.memory_bytes or float("inf")


def _best(training: Training, there: Sequence[CandidateWorker], hops: _Hops, *, known: bool) -> Plan | None:
    found = []
    for number, groups in enumerate(_groups(training, there)):
        # Of equally near groups the smallest comes first, as in ``serving``.
        looked_at = sorted(groups[:MOST_PEERS], key=lambda group: (min(map(_room, group)), group[0].id))
        cuts = [0, *training.cuts, training.layers] if training.cuts else cut_places(training.layers)
        chain = best_chain(_cost_table(training, looked_at, hops, cuts), [training.stages])
        if chain:
            parts = [(looked_at[group], cuts[start], cuts[stop]) for group, start, stop in chain]
            found.append((*_cost(training, parts, hops), number, parts))
    if not found:
        return None
    *_, parts = min(found, key=lambda item: item[:3])
    return _predicted(training, there, parts, hops, known=known)


def _cost_table(training: Training, groups: Sequence[Group], hops: _Hops, cuts: Sequence[int]) -> CostTable:
    sizes = training.sizes
    upper = np.triu(np.ones((len(cuts), len(cuts)), bool), 1)
    weights = spans(sizes.layers_bytes, cuts)
    weights[0, :] += sizes.first_bytes
    weights[:, -1] += sizes.last_bytes
    weights[0, -1] -= sizes.tied_bytes
    kept = spans([1] * training.layers, cuts) * training.layer_kept_bytes
    kept[:, -1] += training.head_kept_bytes
    inputs = np.full_like(kept, training.activation_bytes)
    inputs[0, :] = 0
    flop = spans([training.layer_flop(layer) for layer in range(training.layers)], cuts)
    flop[:, -1] += training.head_flop
    flop *= np.array([training.passes(stop) for stop in cuts])[None, :] / achieved(training.shape.width)
    copies_of = {on_host: training.copies(on_host=on_host) for on_host in (True, False)}
    levels: list[list[Array]] = []
    # The last level also serves more following stages. Groups alike share arrays, which take most of the memory.
    for flying in sorted({training.in_flight(stage) for stage in range(training.stages)}):
        keeping = kept + flying * inputs if training.recompute else flying * kept
        needs = {on_host: copies * weights + keeping for on_host, copies in copies_of.items()}
        by_kind = {_kind(group): group for group in groups}
        costs_of = {kind: _costs_of(group, needs, flop, upper) for kind, group in by_kind.items()}
        levels.append([costs_of[_kind(group)] for group in groups])
    hop_s, occupied_s = np.full((2, len(groups) + 1, len(groups) + 1), np.inf)
    hop_s[-1, :-1] = hop_s[:-1, -1] = occupied_s[-1, :-1] = occupied_s[:-1, -1] = 0.0
    for here, ones in enumerate(groups):
        for there, others in enumerate(groups):
            if here != there:
                hop_s[here, there], occupied_s[here, there] = hops.both(ones, others)
    return CostTable(levels, hop_s, occupied_s)


def _kind(group: Group) -> tuple[float, frozenset[tuple[int, bool]]]:
    speed = min(candidate.flops for candidate in group)
    return speed, frozenset((candidate.memory_bytes, candidate.on_host) for candidate in group)


def _costs_of(group: Group, needs: Mapping[bool, Array], flop: Array, upper: Array) -> Array:
    """(cuts, cuts): seconds of each part at the slowest of a group; infinite if one of it lacks the memory.

    ``flop``: of a matrix product that takes as long.
    """
    speed = min(candidate.flops for candidate in group)
    costs_s: Array = np.where(upper, flop / speed, np.inf)
    for candidate in group:
        if candidate.memory_bytes:
            costs_s = np.where(needs[candidate.on_host] <= candidate.memory_bytes, costs_s, np.inf)
    return costs_s


def _compute_s(training: Training, group: Group, start: int, stop: int) -> float:
    return training.compute_s(start, stop, min(candidate.flops for candidate in group))


def _cost(training: Training, parts: Sequence[tuple[Group, int, int]], hops: _Hops) -> tuple[float, float]:
    computes_s = [_compute_s(training, *part) for part in parts]
    between = [hops.both(ones, others) for (ones, *_), (others, *_) in pairwise(parts)]
    return max([*computes_s, *(busy_s for _, busy_s in between)]), sum(computes_s) + sum(hop_s for hop_s, _ in between)


# ------------------------------------------------------------------------------------------------------ the prediction


def _predicted(
    training: Training,
    there: Sequence[CandidateWorker],
    parts: Sequence[tuple[Group, int, int]],
    hops: _Hops,
    *,
    known: bool,
) -> Plan:
    groups = [group for group, *_ in parts]
    computes_s = [_compute_s(training, *part) if known else 0.0 for part in parts]
    there_s, back_s = [[sum(way(*pair)) for pair in pairwise(groups)] for way in (hops.there, hops.back)]
    occupied_s = [hops.both(*pair)[1] for pair in pairwise(groups)]
    pace_s = max([*computes_s, *occupied_s])
    share = -(-training.micro_batches // training.replicas)
    bounds = [
        min(training.most_in_flight(stage, start, stop, candidate) for candidate in group)
        for stage, (group, start, stop) in enumerate(parts)
    ]
    schedule = _schedule(training, min(share, 256), there_s, back_s, pace_s, bounds)
    forward_s = [each_s / training.passes(stop) for each_s, (_, _, stop) in zip(computes_s, parts, strict=True)]
    costs = StageCosts(
        tuple(forward_s),
        tuple(all_s - one_s for all_s, one_s in zip(computes_s, forward_s, strict=True)),
        tuple(there_s),
        tuple(back_s),
    )
    chain_s = max(
        simulate(schedule, costs) + (share - schedule.micro_batches) * pace_s, share * max(occupied_s, default=0)
    )
    weights = [training.sizes.weights_bytes(start, stop) for _, start, stop in parts]
    reduced = [int(training.trained * size_bytes) for size_bytes in weights]
    reduce_s = max(hops.ring_s(group, size_bytes) for group, size_bytes in zip(groups, reduced, strict=True))
    if training.sizes.tied_bytes and training.trained == 1:
        ends = zip(groups[0], groups[-1], strict=True)
        reduce_s += max(hops.ring_s(pair, training.sizes.tied_bytes) for pair in ends)
    busy_s = [share * each_s for each_s in computes_s]
    step_s = chain_s + reduce_s
    used = {candidate for group in groups for candidate in group}
    info = TrainingPlanInfo(
        training.stages,
        training.replicas,
        training.micro_batches,
        schedule.name,
        spares=[candidate.name for candidate in there if candidate not in used],
    )
    if known:
        info = replace(
            info,
            bubble=1 - sum(busy_s) / (len(busy_s) * chain_s),
            efficiency=max(busy_s) / chain_s,
            step_s=step_s,
            reduce_s=reduce_s,
            tokens_per_s=training.micro_batches * training.tokens / step_s,
        )
    stages = [
        StagePlanInfo(
            stage,
            [candidate.id for candidate in group],
            [candidate.name for candidate in group],
            start,
            stop,
            weights[stage],
            max(training.need_bytes(stage, start, stop, on_host=candidate.on_host) for candidate in group),
            min((candidate.memory_bytes for candidate in group if candidate.memory_bytes), default=0),
            schedule.in_flight(stage),
            computes_s[stage] if known else None,
            (there_s[stage] + back_s[stage] if stage < len(there_s) else 0.0) if known else None,
        )
        for stage, (group, start, stop) in enumerate(parts)
    ]
    return info, stages


def _schedule(
    training: Training,
    micro_batches: int,
    there_s: Sequence[float],
    back_s: Sequence[float],
    pace_s: float,
    bounds: Sequence[int],
) -> StageSchedule:
    if training.schedule == GPIPE:
        most = min(training.max_in_flight or micro_batches, micro_batches)
        return StageSchedule(GPIPE, micro_batches, (most - 1,) * training.stages)
    round_trips_s = [there + back for there, back in zip(there_s, back_s, strict=True)]
    made = extended(micro_batches, round_trips_s, pace_s or 1.0, max_in_flight=bounds)
    return replace(made, name="1f1b")


# ------------------------------------------------------------------------------------------------------------- refusal


def _refusal(training: Training, there: Sequence[CandidateWorker]) -> ResourceError:
    layers, stages = training.layers, training.stages
    bounds = (0, *training.cuts, layers) if training.cuts else [stage * layers // stages for stage in range(stages + 1)]
    needs = [(training.need_bytes(stage, *span), stage, *span) for stage, span in enumerate(pairwise(bounds))]
    most = 8  # workers named in the message
    offers = [f"{each.name} {human_bytes(each.memory_bytes) if each.memory_bytes else 'any'}" for each in there[:most]]
    offers += [f"{len(there) - most} more"] if len(there) > most else []
    text = (
        f"the model ({human_bytes(training.sizes.weights_bytes(0, layers))} of weights) cannot train as {stages} "
        f"stages by {training.replicas} replica{'s' * (training.replicas != 1)}: "
        f"{'' if training.cuts else 'with equal stages, '}"
        f"{_shortage(training, min(needs), 'the smallest')}, {_shortage(training, max(needs), 'the largest')}, a "
        f"whole replica {human_bytes(sum(need[0] for need in needs))}, and the workers offer {', '.join(offers)}"
    )
    do = ["start workers with more memory"]
    if not training.recompute:
        do.append("set pipeline.recompute=true")
    if training.schedule == GPIPE:
        do.append("set pipeline.schedule='1f1b'")
    if training.cuts:
        do.append("leave pipeline.cuts out")
    if training.tokens >= 2 * training.sequence_tokens:
        do.append("set batch.micro_batch_sequences lower")
    if training.replicas > 1:
        do.append(f"set job.workers={stages} for one replica")
    elif stages < layers:
        do.append("set pipeline.stages higher and start as many workers")
    return ResourceError(text, remedy=", or ".join(do))


def _shortage(training: Training, need: tuple[int, int, int, int], what: str) -> str:
    need_bytes, stage, start, stop = need
    span = f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"
    flying = training.in_flight(stage)
    return f"{what} needs {human_bytes(need_bytes)} ({span}, {flying} micro-batch{'es' * (flying != 1)} in flight)"
