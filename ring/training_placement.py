"""Which workers train which layers of a split model: the cuts, and who does what, that make a step fastest. Pure.

What a stage costs
------------------
A *stage* is layers [start, stop). Its memory is ``p2ptrain.core.footprint``'s: weights, gradients and moments, and what
is kept of the micro-batches in flight there, which are the more, the more stages follow. For each micro-batch it
computes, at the speed that its worker has measured::

    compute_s = passes * forward FLOPs of its layers (and of the head) / (ACHIEVED * FLOP per second)

``passes`` is 3: a backward pass is two forward ones. With recomputing it is 4, but on the last stage of 1F1B, where
nothing runs twice. A hop carries a micro-batch's activations there and its gradients back: it takes both latencies and
both times of the bytes, and *occupies* the link for the longer of the two, for they go opposite ways.

The objective
-------------
No stage over its memory; then the slowest stage or hop as fast as can be, for that is the pace; then the least time of
one micro-batch through all stages and back, for that is what a step's begin and end cost. The search is that of
``ring.placement``: exact where the workers are few.

Several crews
-------------
All have the same cuts, and a step waits for the slowest. So workers are put into *groups* of one for each crew, once of
those alike in speed and once of those alike in memory: a group is as fast as its slowest member, as large as its
smallest, as near to another as the farthest two that would be in one crew. (Of neighbours in the order of speed the
slowest are as fast as can be.) The groups are placed as workers would be, and the better one of both is taken.

What is not known
-----------------
A memory of 0 holds anything, a speed of 0 is the median of the known ones. Links are as in ``ring.placement``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import DEVICE_COPIES, GPIPE, HOST_COPIES, part_training_bytes
from p2ptrain.core.units import human_bytes
from ring.order import Links, known_link
from ring.placement import MOST_CUTS, MOST_PEERS
from ring.placement_search import Array, Board, search
from ring.schedule import Costs, Schedule, extended, simulate
from ring.training_costs import ACHIEVED, Trainee, Training

SEARCH_WORK = 3e7
"""Of ``placement_search.search``, by moves: the seed answers nobody meanwhile. A tenth of a second."""
SIMULATED = 256
"""Micro-batches of which a step is simulated; each further one takes as long as the slowest stage or hop."""
_NAMED = 8  # workers that a refusal tells of, one by one
_TRIED = 4  # searches for what would fit instead: the seed answers nobody meanwhile


# ---------------------------------------------------------------------------------------------------------- the result


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        trainees: one for each crew.
        weights_bytes: of its layers, in fp32; need_bytes: training memory, at the first of those that need most.
        in_flight: micro-batches, predicted.
        compute_s: of one micro-batch, both ways, at the slowest; 0 where no speed is known.
        hop_s, occupied_s: to the next stage and back; 0 behind the last one.
    """

    trainees: tuple[Trainee, ...]
    start: int
    stop: int
    weights_bytes: int
    need_bytes: int
    in_flight: int
    compute_s: float
    hop_s: float
    occupied_s: float


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Who trains what, and what it is predicted to do.

    Attributes:
        schedule: its name.
        step_s: of a step: computing, and what waits for the network; 0 where no speed is known.
        reduce_s: of that, summing gradients round the rings of the stages, and of what the ends share.
        bubble: part of the stages' time, without ``reduce_s``, in which they wait. efficiency: of the busiest one's in
            which it computes.
        tokens_per_s: of all crews; None where no speed is known.
        exact: no plan of these groups of workers is better.
    """

    stages: tuple[StagePlan, ...]
    schedule: str
    step_s: float
    reduce_s: float
    bubble: float
    efficiency: float
    tokens_per_s: float | None
    exact: bool

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(stage.start for stage in self.stages[1:])


def plan(training: Training, trainees: Iterable[Trainee], links: Links | None = None) -> TrainingPlan:
    """The best plan by the objective above.

    Raises:
        UserError: there are fewer workers, or layers, than the training wants.
        ResourceError: it does not fit. It tells what is needed, what there is, and what would do.
    """
    there = sorted(trainees, key=lambda trainee: trainee.id)
    if training.layers < training.stages:
        text = f"a model of {training.layers} layers does not make {training.stages} stages"
        raise UserError(text, remedy=f"set pipeline.stages to {training.layers} at most")
    if len(there) < training.workers:
        raise UserError(
            f"{training.stages} stages of {training.crews} crew{'s' * (training.crews != 1)} want {training.workers} "
            f"workers, and {len(there)} {'is' if len(there) == 1 else 'are'} here",
            remedy="start more: p2ptrain join",
        )
    if training.cuts and (len(training.cuts) != training.stages - 1 or training.cuts[-1] >= training.layers):
        text = f"cuts at {list(training.cuts)} do not make {training.stages} stages of {training.layers} layers"
        raise UserError(text, remedy="correct pipeline.cuts, or leave it out")
    ways = _Ways(training, links or {}, [trainee.id for trainee in there])
    found = _best(training, there, ways, SEARCH_WORK)
    if found is None:
        raise _refusal(training, there)
    return found


# --------------------------------------------------------------------------------------------------------------- costs


class _Ways:
    """What hops cost between workers: both latencies, and both times of the bytes."""

    def __init__(self, training: Training, links: Links, ids: Sequence[str]) -> None:
        pairs = [(one, other) for one in ids for other in ids if one != other]
        self._known = {pair: link for pair in pairs if links and (link := known_link(links, *pair)) is not None}
        rates = [link.bandwidth_bps for link in self._known.values() if link.bandwidth_bps]
        latencies_s = [link.latency_s for link in self._known.values()]
        self._latency_s = statistics.median(latencies_s) if latencies_s else 0.0
        self._rate_bps = statistics.median(rates) if rates else None
        self._training = training

    def one_way(self, one: str, other: str, size_bytes: float) -> tuple[float, float]:
        """Seconds of latency, and of the bytes."""
        link = self._known.get((one, other))
        rate_bps = (link.bandwidth_bps if link else None) or self._rate_bps
        return (link.latency_s if link else self._latency_s), (8 * size_bytes / rate_bps if rate_bps else 0.0)

    def there(self, ones: Sequence[Trainee], others: Sequence[Trainee]) -> tuple[float, float]:
        return self._slowest(ones, others, self._training.activation_bytes)

    def back(self, ones: Sequence[Trainee], others: Sequence[Trainee]) -> tuple[float, float]:
        return self._slowest(others, ones, self._training.gradient_bytes)

    def _slowest(self, ones: Sequence[Trainee], others: Sequence[Trainee], size_bytes: int) -> tuple[float, float]:
        """Between the members that come into one crew: both are in the order of ids, as crews are made."""
        ways = [self.one_way(one.id, other.id, size_bytes) for one, other in zip(ones, others, strict=True)]
        return max(latency_s for latency_s, _ in ways), max(bytes_s for _, bytes_s in ways)

    def ring_s(self, members: Sequence[Trainee], size_bytes: int) -> float:
        """An all-reduce round a ring of these, gradients in fp32."""
        count = len(members)
        if count < 2:
            return 0.0
        hops = list(zip(members, [*members[1:], members[0]], strict=True))
        ways = [self.one_way(one.id, other.id, 2 * (count - 1) / count * size_bytes) for one, other in hops]
        return max(bytes_s for _, bytes_s in ways) + 2 * (count - 1) * max(latency_s for latency_s, _ in ways)


Group = tuple[Trainee, ...]


def _groups(training: Training, there: Sequence[Trainee]) -> Iterator[list[Group]]:
    """The workers in groups of one for each crew: alike in speed, then alike in memory, the best first. Those that are
    left over are the least."""
    typical = _typical(there)

    def speed(trainee: Trainee) -> tuple[float, float, str]:
        return -(trainee.flops or typical), -_room(trainee), trainee.id

    def room(trainee: Trainee) -> tuple[float, float, str]:
        return -_room(trainee), -(trainee.flops or typical), trainee.id

    for key in (speed, room)[: 2 if training.crews > 1 else 1]:
        ordered = sorted(there, key=key)
        count = training.crews
        groups = [tuple(ordered[at : at + count]) for at in range(0, len(ordered) - count + 1, count)]
        yield [tuple(sorted(group, key=lambda trainee: trainee.id)) for group in groups]


def _room(trainee: Trainee) -> float:
    return trainee.memory_bytes or float("inf")


def _typical(there: Sequence[Trainee]) -> float:
    """The median of the known speeds; 1 where none is."""
    known = [trainee.flops for trainee in there if trainee.flops]
    return statistics.median(known) if known else 1.0


def _best(training: Training, there: Sequence[Trainee], ways: _Ways, work: float) -> TrainingPlan | None:
    found: list[tuple[float, float, int, list[tuple[Group, int, int]], bool]] = []
    typical = _typical(there)
    for number, groups in enumerate(_groups(training, there)):
        looked_at = sorted(groups[:MOST_PEERS], key=lambda group: [trainee.id for trainee in group])
        board, cuts = _board(training, looked_at, ways, typical)
        chain = search(board, [training.stages], work=work)
        if chain is not None:
            parts = [(looked_at[group], cuts[start], cuts[stop]) for group, start, stop in chain.chain]
            pace_s, through_s = _cost(training, parts, ways, typical)
            exact = chain.exact and (bool(training.cuts) or len(cuts) == training.layers + 1)
            found.append((pace_s, through_s, number, parts, exact and len(looked_at) == len(groups)))
    if not found:
        return None
    *_, parts, exact = min(found, key=lambda item: item[:3])
    known = any(trainee.flops for trainee in there)
    return _predicted(training, parts, ways, typical, known=known, exact=exact)


def _board(training: Training, groups: Sequence[Group], ways: _Ways, typical: float) -> tuple[Board, list[int]]:
    """The costs as arrays, by index of group and of cut; and at which layer each cut is."""
    layers, sizes = training.layers, training.shape.sizes
    cuts = [*range(0, layers, -(-layers // MOST_CUTS)), layers]
    if training.cuts:
        cuts = [0, *training.cuts, layers]
    at = np.array(cuts)
    upper = np.triu(np.ones((len(cuts), len(cuts)), bool), 1)
    weights = _between(np.cumsum([0, *sizes.layers_bytes], dtype=np.float64)[at])
    weights[0, :] += sizes.first_bytes
    weights[:, -1] += sizes.last_bytes
    kept = _between(at.astype(np.float64)) * training.layer_kept_bytes
    kept[:, -1] += training.head_kept_bytes
    inputs = np.full_like(kept, training.activation_bytes)
    inputs[0, :] = 0
    flop = _between(np.cumsum([0, *(training.layer_flop(layer) for layer in range(layers))])[at])
    flop[:, -1] += training.head_flop
    flop *= np.array([training.passes(int(stop)) for stop in at])[None, :]
    copies_of = {True: HOST_COPIES, False: DEVICE_COPIES}
    levels: list[list[Array]] = []
    # The last level is for more behind it, too; workers alike share their arrays, which are what a board's memory is.
    for flying in sorted({training.in_flight(stage) for stage in range(training.stages)}):
        keeping = kept + flying * inputs if training.recompute else flying * kept
        needs = {on_host: copies * weights + keeping for on_host, copies in copies_of.items()}
        alike = {_kind(group, typical): group for group in groups}
        costs_of = {kind: _costs_of(group, needs, flop, upper, typical) for kind, group in alike.items()}
        levels.append([costs_of[_kind(group, typical)] for group in groups])
    hop_s, occupied_s = np.full((2, len(groups) + 1, len(groups) + 1), np.inf)
    hop_s[-1, :-1] = hop_s[:-1, -1] = occupied_s[-1, :-1] = occupied_s[:-1, -1] = 0.0
    for here, ones in enumerate(groups):
        for there, others in enumerate(groups):
            if here != there:
                hop_s[here, there], occupied_s[here, there] = _hop(ways, ones, others)
    return Board(levels[0], hop_s, occupied_s, levels[1:]), cuts


def _kind(group: Group, typical: float) -> tuple[float, frozenset[tuple[int, bool]]]:
    """What its costs follow from."""
    speed = min(trainee.flops or typical for trainee in group)
    return speed, frozenset((trainee.memory_bytes, trainee.on_host) for trainee in group)


def _costs_of(group: Group, needs: Mapping[bool, Array], flop: Array, upper: Array, typical: float) -> Array:
    """(cuts, cuts): what parts take the slowest of a group; infinite where one of it has not the memory."""
    speed = ACHIEVED * min(trainee.flops or typical for trainee in group)
    costs_s: Array = np.where(upper, flop / speed, np.inf)
    for trainee in group:
        if trainee.memory_bytes:
            costs_s = np.where(needs[trainee.on_host] <= trainee.memory_bytes, costs_s, np.inf)
    return costs_s


def _between(total: Array) -> Array:
    return total[None, :] - total[:, None]


def _hop(ways: _Ways, ones: Group, others: Group) -> tuple[float, float]:
    """Until a micro-batch's activations are there and its gradients back; and what keeps the next one from it."""
    there, back = ways.there(ones, others), ways.back(ones, others)
    return sum(there) + sum(back), max(there[1], back[1])


def _compute_s(training: Training, group: Group, start: int, stop: int, typical: float) -> float:
    return training.compute_s(start, stop, min(trainee.flops or typical for trainee in group))


def _cost(
    training: Training, parts: Sequence[tuple[Group, int, int]], ways: _Ways, typical: float
) -> tuple[float, float]:
    """The slowest stage or hop, and all of them."""
    computes_s = [_compute_s(training, *part, typical) for part in parts]
    hops = [_hop(ways, ones, others) for (ones, *_), (others, *_) in pairwise(parts)]
    return max(*computes_s, 0.0, *(occupied_s for _, occupied_s in hops)), sum(computes_s) + sum(hop for hop, _ in hops)


# ------------------------------------------------------------------------------------------------------ the prediction


def _predicted(
    training: Training,
    parts: Sequence[tuple[Group, int, int]],
    ways: _Ways,
    typical: float,
    *,
    known: bool,
    exact: bool,
) -> TrainingPlan:
    """``known``: whether speeds are."""
    groups = [group for group, *_ in parts]
    computes_s = [_compute_s(training, *part, typical) if known else 0.0 for part in parts]
    hops = [(*ways.there(*pair), *ways.back(*pair)) for pair in pairwise(groups)]
    there_s, back_s = [hop[0] + hop[1] for hop in hops], [hop[2] + hop[3] for hop in hops]
    occupied_s = [max(hop[1], hop[3]) for hop in hops]
    pace_s = max([*computes_s, *occupied_s])
    share = -(-training.micro_batches // training.crews)
    bounds = [
        min(training.most_in_flight(stage, start, stop, trainee) for trainee in group)
        for stage, (group, start, stop) in enumerate(parts)
    ]
    schedule = _schedule(training, min(share, SIMULATED), there_s, back_s, pace_s, bounds)
    forward_s = [each_s / training.passes(stop) for each_s, (_, _, stop) in zip(computes_s, parts, strict=True)]
    costs = Costs(
        tuple(forward_s),
        tuple(all_s - one_s for all_s, one_s in zip(computes_s, forward_s, strict=True)),
        tuple(there_s),
        tuple(back_s),
    )
    chain_s = max(
        simulate(schedule, costs).step_s + (share - schedule.micro_batches) * pace_s, share * max(occupied_s, default=0)
    )
    weights = [training.shape.sizes.weights_bytes(start, stop) for _, start, stop in parts]
    reduce_s = max(ways.ring_s(group, size_bytes) for group, size_bytes in zip(groups, weights, strict=True))
    if training.shape.sizes.tied_bytes:
        ends = zip(groups[0], groups[-1], strict=True)
        reduce_s += max(ways.ring_s(pair, training.shape.sizes.tied_bytes) for pair in ends)
    busy_s = [share * each_s for each_s in computes_s]
    step_s = chain_s + reduce_s
    return TrainingPlan(
        tuple(
            StagePlan(
                group,
                start,
                stop,
                weights[stage],
                max(training.need_bytes(stage, start, stop, on_host=trainee.on_host) for trainee in group),
                schedule.in_flight(stage),
                computes_s[stage],
                there_s[stage] + back_s[stage] if stage < len(hops) else 0.0,
                occupied_s[stage] if stage < len(hops) else 0.0,
            )
            for stage, (group, start, stop) in enumerate(parts)
        ),
        schedule.name,
        step_s if known else 0.0,
        reduce_s if known else 0.0,
        1 - sum(busy_s) / (len(busy_s) * chain_s) if known and chain_s else 0.0,
        max(busy_s) / chain_s if known and chain_s else 1.0,
        training.micro_batches * training.tokens / step_s if known and step_s else None,
        exact,
    )


def _schedule(
    training: Training,
    micro_batches: int,
    there_s: Sequence[float],
    back_s: Sequence[float],
    pace_s: float,
    bounds: Sequence[int],
) -> Schedule:
    """As the stages derive it from what they measure."""
    if training.schedule == GPIPE:
        most = min(training.max_in_flight or micro_batches, micro_batches)
        return Schedule(GPIPE, micro_batches, (most - 1,) * training.stages)
    round_trips_s = [there + back for there, back in zip(there_s, back_s, strict=True)]
    made = extended(micro_batches, round_trips_s, pace_s or 1.0, max_in_flight=bounds)
    return replace(made, name="1f1b")


# ------------------------------------------------------------------------------------------------------------- refusal


def _refusal(training: Training, there: Sequence[Trainee]) -> ResourceError:
    """Why there is no plan, in numbers, and what would do."""
    needs = _least_needs(training)
    smallest, largest = min(needs), max(needs)
    offers = [
        f"{trainee.name} {human_bytes(trainee.memory_bytes) if trainee.memory_bytes else 'any'}" for trainee in there
    ]
    offers[_NAMED:] = [f"{len(offers) - _NAMED} more"] if len(offers) > _NAMED else []
    crews = f"{training.crews} crew{'s' * (training.crews != 1)}"
    told = (
        f"the model ({human_bytes(training.shape.sizes.weights_bytes(0, training.layers))} of weights) cannot train as "
        f"{training.stages} stages by {crews}: {_told(training, smallest, 'the smallest stage')}, "
        f"{_told(training, largest, 'the largest' if training.cuts else 'an end')}, all stages of a crew together "
        f"about {human_bytes(_whole_need(training))}, and there are {', '.join(offers)}"
    )
    likely = (item for item in _others(training) if len(there) >= item[1].workers and _may_fit(item[1], there))
    do = [text for text, other in islice(likely, _TRIED) if _fits_somehow(other, there)]
    return ResourceError(told, remedy=", or ".join([*do[:3], "start workers with more memory"]))


def _least_needs(training: Training) -> list[tuple[int, int, int, int]]:
    """(bytes, stage, start, stop) of each stage where the cuts are given; else of the least first, last and other
    one that there can be."""
    layers, stages = training.layers, training.stages
    if training.cuts:
        spans = list(enumerate(pairwise((0, *training.cuts, layers))))
        return [(training.need_bytes(stage, *span), stage, *span) for stage, span in spans]
    ends = [(0, 0, 1), (stages - 1, layers - 1, layers)]
    inner = [(stages - 2, at, at + 1) for at in range(1, layers - 1) if stages > 2]
    found = [(training.need_bytes(*place), *place) for place in ends]
    return found + ([min((training.need_bytes(*place), *place) for place in inner)] if inner else [])


def _told(training: Training, need: tuple[int, int, int, int], what: str) -> str:
    need_bytes, stage, start, stop = need
    span = f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}"
    flying = training.in_flight(stage)
    return f"{what} needs {human_bytes(need_bytes)} ({span}, {flying} micro-batch{'es' * (flying != 1)} in flight)"


def _whole_need(training: Training) -> int:
    """Of one crew, whatever the cuts, but for what is kept where more are in flight."""
    layers, stages = training.layers, training.stages
    bounds = [stage * layers // stages for stage in range(stages + 1)]
    return sum(training.need_bytes(stage, *span) for stage, span in enumerate(pairwise(bounds)))


def _others(training: Training) -> Iterator[tuple[str, Training]]:
    """What a person could ask for instead."""
    if not training.recompute:
        yield "set pipeline.recompute=true", replace(training, recompute=True)
    if training.schedule == GPIPE:
        yield "set pipeline.schedule='1f1b'", replace(training, schedule="1f1b")
    if training.cuts:
        yield "leave pipeline.cuts out", replace(training, cuts=())
    for parts in (2, 4, 8):
        if training.tokens // training.sequence_tokens >= parts:
            yield (
                f"set batch.micro_batch_sequences to {training.tokens // training.sequence_tokens // parts}",
                replace(training, tokens=training.tokens // parts),
            )
    if training.crews > 1:
        yield f"set job.workers={training.stages} for one crew", replace(training, crews=1)
    for stages in range(training.stages + 1, min(training.layers, training.workers) + 1):
        if training.workers % stages == 0 and not training.cuts:
            yield f"set pipeline.stages={stages}", replace(training, stages=stages, crews=training.workers // stages)


def _may_fit(training: Training, there: Sequence[Trainee]) -> bool:
    """Whether it is worth a search, told in no time: whether the largest workers would hold all layers, and one of
    them each end, if each of their stages were one that needs least."""
    largest = sorted(there, key=_room)[-training.workers :]
    if not all(any(_holds(training, each, stage, 0) for each in largest) for stage in (0, training.stages - 1)):
        return False
    return sum(_most_layers(training, each) for each in largest) >= training.layers * training.crews


def _most_layers(training: Training, trainee: Trainee) -> int:
    least, most = 0, training.layers - training.stages + 1
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if _holds(training, trainee, None, middle) else (least, middle - 1)
    return least


def _holds(training: Training, trainee: Trainee, stage: int | None, layers: int) -> bool:
    """Whether it has memory for so many layers of the least; and what the first, or the last, stage has besides."""
    if not trainee.memory_bytes:
        return True
    sizes, last = training.shape.sizes, training.stages - 1
    ends_bytes = {0: sizes.first_bytes, last: sizes.last_bytes}.get(stage, 0) if stage is not None else 0
    need_bytes = part_training_bytes(
        layers * min(sizes.layers_bytes) + ends_bytes,
        layers * training.layer_kept_bytes + training.head_kept_bytes * (stage == last),
        0,
        in_flight=training.in_flight(last),
        recompute=training.recompute,
        on_host=trainee.on_host,
    )
    return need_bytes <= trainee.memory_bytes


def _fits_somehow(training: Training, there: Sequence[Trainee]) -> bool:
    free = [replace(trainee, flops=0.0) for trainee in there]
    ways = _Ways(training, {}, [trainee.id for trainee in free])
    return _best(training, free, ways, 1e6) is not None
