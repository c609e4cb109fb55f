"""The placement of split training: against brute force over all chains, its refusals, and what it predicts."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from p2ptrain.core.errors import ProtocolError, ResourceError, UserError
from p2ptrain.core.footprint import ModelSizes
from ring.planning.cuts import find_best_cuts
from ring.planning.measurements import CandidateWorker, LinkQuality, LinkTimes
from ring.planning.pipeline import chain_costs, plan_pipeline
from ring.planning.workloads import ModelShape, TrainingWorkload

INSTANCES = 400
Part = tuple[CandidateWorker, int, int]


# ------------------------------------------------------------------------------------------------------- the reference


class Reference:
    """What chains of one replica cost, from the text of the objective alone: no table, no shortcut."""

    def __init__(
        self, training: TrainingWorkload, candidates: list[CandidateWorker], links: dict[tuple[str, str], LinkQuality]
    ) -> None:
        self.training, self.candidates, self.links = training, candidates, links
        known = sorted(candidate.flops for candidate in candidates if candidate.flops)
        middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else 1.0
        self.speed = {candidate.id: candidate.flops or middle for candidate in candidates}

    def need_bytes(self, index: int, part: Part) -> float:
        training, (candidate, start, stop) = self.training, part
        sizes, shape = training.shape.sizes, training.shape
        last, first = stop == len(sizes.layers_bytes), start == 0
        weights = sum(sizes.layers_bytes[start:stop]) + sizes.first_bytes * first + sizes.last_bytes * last
        weights -= sizes.tied_bytes * (first and last)
        kept = 4 * training.tokens * ((stop - start) * (16 * shape.width + 3 * shape.inner) + 3 * shape.vocab * last)
        behind = training.stages - 1 - index
        flying = min(behind + 1, training.micro_batches)
        entering = 0 if first else training.tokens * shape.width * 4  # fp32
        keeping = kept + flying * entering if training.recompute else flying * kept
        return weights * (5 if candidate.on_host else 4) + keeping

    def compute_s(self, part: Part) -> float:
        training, (candidate, start, stop) = self.training, part
        last = stop == len(training.shape.sizes.layers_bytes)
        each = [2 * size / 4 + 4 * training.sequence_tokens * training.shape.width
                for size in training.shape.sizes.layers_bytes[start:stop]]  # fmt: skip
        forward = training.tokens * (sum(each) + 2 * training.shape.vocab * training.shape.width * last)
        twice = training.recompute and not last
        width = self.training.shape.width
        return (3 + twice) * forward / (0.88 * width / (width + 260) * self.speed[candidate.id])

    def hop(self, one: str, other: str) -> tuple[float, float]:
        """Both ways; every link is measured in these instances, or none is."""
        bytes_one_way = self.training.tokens * self.training.shape.width * 4
        ways = [self.links.get(pair, LinkQuality(0.0, 1e30)) for pair in ((one, other), (other, one))]
        times = [8 * bytes_one_way / way.bandwidth_bps for way in ways]
        return sum(way.latency_s for way in ways) + sum(times), max(times)

    def costs(self, chain: tuple[Part, ...]) -> tuple[float, float]:
        computes = [self.compute_s(part) for part in chain]
        hops = [self.hop(one[0].id, other[0].id) for one, other in itertools.pairwise(chain)]
        return max([*computes, *(busy for _, busy in hops)]), sum(computes) + sum(time for time, _ in hops)

    def best(self, order: list[CandidateWorker]) -> tuple[float, float] | None:
        """The least (pace, time through) of all cuts for workers in that order, of whom any may take no layer."""
        layers, stages = self.training.layers, self.training.stages
        costs = []
        for inner in itertools.combinations(range(1, layers), stages - 1):
            if self.training.cuts and inner != self.training.cuts:
                continue
            bounds = (0, *inner, layers)
            for chosen in itertools.combinations(order, stages):
                chain = tuple(zip(chosen, bounds, bounds[1:], strict=False))
                needs = [self.need_bytes(index, part) for index, part in enumerate(chain)]
                if all(need <= each.memory_bytes
                       for (each, *_), need in zip(chain, needs, strict=True)):  # fmt: skip
                    costs.append(self.costs(chain))
        if not costs:
            return None
        least = min(pace for pace, _ in costs)
        return least, min(through for pace, through in costs if pace <= least * (1 + 1e-12))


def problem(rng: random.Random) -> tuple[TrainingWorkload, list[CandidateWorker], dict[tuple[str, str], LinkQuality]]:
    """2 to 5 workers of different memory and speed, 4 to 8 layers, every schedule."""
    size, layers = rng.randint(2, 5), rng.randint(4, 8)
    end_bytes = rng.choice([0, 4096, 65536])
    sizes = ModelSizes(
        tuple(rng.choice([1024, 8192, 65536]) for _ in range(layers)) if rng.random() < 0.5 else (8192,) * layers,
        (0,) * layers,
        end_bytes,
        end_bytes + 64,
        end_bytes if rng.random() < 0.5 else 0,
    )
    shape = ModelShape.of(sizes, rng.choice([4, 16]), rng.choice([8, 64]), rng.choice([16, 256]))
    stages = rng.randint(2, min(size, layers))
    training = TrainingWorkload(
        shape,
        stages=stages,
        replicas=1,
        tokens=rng.choice([8, 64]),
        sequence_tokens=8,
        micro_batches=rng.choice([1, 2, 8]),
        recompute=rng.random() < 0.4,
        cuts=tuple(sorted(rng.sample(range(1, layers), stages - 1))) if rng.random() < 0.2 else (),
    )
    whole = training.need_bytes(0, 0, layers)
    plenty = rng.choice([0.4, 0.8, 1.2, 2])
    candidates = [
        CandidateWorker(
            f"w{index}",
            f"worker {index}",
            rng.choice([math.inf, 1, 1, 1, 1]) * int(whole * plenty / size * rng.choice([0.5, 1, 2])),
            rng.choice([0.0, 1e6, 2e6, 4e6]),
            rng.random() < 0.7,
        )
        for index in range(size)
    ]
    if rng.random() < 0.5:  # just enough, or just too little, for some part
        at = rng.randrange(size)
        start, stage = rng.randrange(layers - 1), rng.randrange(stages)
        need = training.need_bytes(stage, start * (stage > 0), rng.randint(start + 1, layers), on_host=True)
        candidates[at] = replace(candidates[at], memory_bytes=need - rng.choice([0, 0, 1]), on_host=True)
    pairs = list(itertools.permutations([candidate.id for candidate in candidates], 2))
    links = {pair: LinkQuality(rng.choice([0.001, 0.1]), rng.choice([1e4, 1e6, 1e8])) for pair in pairs}
    return training, candidates, links if rng.random() < 0.7 else {}


@pytest.mark.parametrize("batch", range(2))
def test_cuts_are_the_best_for_an_order(batch):
    counted: Counter[str] = Counter()
    for number in range(batch, INSTANCES, 2):
        rng = random.Random(number)
        training, candidates, links = problem(rng)
        order = rng.sample(candidates, len(candidates))
        reference = Reference(training, candidates, links)
        best = reference.best(order)
        groups = [(replace(each, flops=reference.speed[each.id]),) for each in order]
        costs = chain_costs(training, groups, LinkTimes(links, [each.id for each in candidates]))
        found = find_best_cuts(costs, range(len(order)), [training.stages])
        assert (found is None) == (best is None), number
        counted["none" if found is None else "some"] += 1
        if found is None:
            continue
        (pace_s, through_s, _), chain = found
        assert (pace_s, through_s) == pytest.approx(best, rel=1e-9), number
        parts = tuple((order[peer], start, stop) for peer, start, stop in chain)
        assert reference.costs(parts) == pytest.approx(best, rel=1e-9), number
        bounds = (0, *(start for _, start, _ in parts[1:]), training.layers)
        for index, part in enumerate(parts):
            need_bytes = training.need_bytes(index, *part[1:], on_host=part[0].on_host)
            assert need_bytes == reference.need_bytes(index, part)
            assert training.fits(part[0], index, bounds)
        counted["recompute"] += training.recompute
        counted["cuts"] += bool(training.cuts)
    assert min(counted[kind] for kind in ("none", "some", "recompute", "cuts")) >= 5, counted


# ------------------------------------------------------------------------------------------------------ by example

MIB = 1 << 20
MODEL = ModelShape.of(ModelSizes((64 * MIB,) * 12, (0,) * 12, 32 * MIB, 32 * MIB + 4096, 32 * MIB), 1024, 2816, 8192)
TRAINING = TrainingWorkload(MODEL, stages=2, replicas=1, tokens=512, sequence_tokens=512, micro_batches=8)


def workers(*figures: tuple[int, float]) -> list[CandidateWorker]:
    """Workers of so many MiB, 0 if unknown, and FLOP/s."""
    sizes = [(size * MIB or math.inf, flops) for size, flops in figures]
    return [CandidateWorker(f"w{at}", f"w{at}", *each) for at, each in enumerate(sizes)]


def test_faster_worker_gets_more_layers_as_far_as_its_memory_allows():
    free, stages = plan_pipeline(TRAINING, workers((0, 1e10), (0, 3e10)))
    assert {stage.peers[0]: stage.stop - stage.start for stage in stages} == {"w0": 3, "w1": 9}
    tight, stages = plan_pipeline(TRAINING, workers((0, 1e10), (3000, 3e10)))
    assert {stage.peers[0]: stage.stop - stage.start for stage in stages} == {"w0": 5, "w1": 7}
    assert {stage.peers[0]: stage.limit_bytes for stage in stages} == {"w0": 0, "w1": 3000 * MIB}
    assert all(not stage.limit_bytes or stage.need_bytes <= stage.limit_bytes for stage in stages)
    assert tight.step_s > free.step_s


def test_replicas_have_the_same_cuts_and_each_stage_similar_workers():
    measured = [(0, 1e10), (0, 4e10), (0, 1.1e10), (0, 4.4e10), (0, 1e9)]
    found, stages = plan_pipeline(replace(TRAINING, replicas=2), workers(*measured))
    assert sorted(stage.peers for stage in stages) == [["w0", "w2"], ["w1", "w3"]]
    assert found.spares == ["w4"], "the slowest stays out"
    _, alone = plan_pipeline(TRAINING, workers(*measured[:2]))
    assert sorted(stage.compute_s for stage in stages) == pytest.approx(sorted(stage.compute_s for stage in alone))
    assert stages[1].start == alone[1].start or stages[0].peers[0] != "w0"


def test_predicted_step_is_the_schedule_and_the_sums():
    links = {("w0", "w1"): LinkQuality(0.2, 1e9), ("w1", "w0"): LinkQuality(0.2, 1e9)}
    even = workers((0, 1e10), (0, 1e10))
    (near, stages), (far, _) = plan_pipeline(TRAINING, even), plan_pipeline(TRAINING, even, links)
    assert near.bubble == pytest.approx(1 - sum(stage.compute_s for stage in stages) * 8 / (2 * near.step_s))
    assert near.bubble > 1 / 9 - 0.02  # (p - 1) / (m + p - 1), and a little for stages that are not quite equal
    assert far.step_s > near.step_s
    assert near.tokens_per_s == pytest.approx(8 * 512 / near.step_s)
    assert far.reduce_s > near.reduce_s == 0  # the matrix that both ends have
    unknown, stages = plan_pipeline(TRAINING, workers((0, 0), (0, 0)))
    assert {unknown.tokens_per_s, unknown.step_s, unknown.bubble, stages[0].compute_s, stages[0].hop_s} == {None}


def test_refusal_names_what_each_has_what_the_stages_need_and_a_remedy():
    training = replace(TRAINING, tokens=4096, sequence_tokens=512)
    with pytest.raises(ResourceError) as caught:
        plan_pipeline(training, workers((5000, 1e10), (5100, 1e10)))
    text = caught.value.message
    assert "w0 4.9 GiB, w1 5.0 GiB" in text
    assert "the smallest needs" in text
    assert "pipeline.recompute=true" in str(caught.value.remedy)
    assert plan_pipeline(replace(training, recompute=True), workers((5000, 1e10), (5100, 1e10)))
    with pytest.raises(ResourceError, match="layers 0 to 10, 2 micro-batches in flight"):
        plan_pipeline(replace(training, cuts=(11,)), workers((5000, 1e10), (5100, 1e10)))


def test_impossible_numbers_and_cuts_are_refused():
    with pytest.raises(UserError, match="need 2 workers, and 1 is connected"):
        plan_pipeline(TRAINING, workers((0, 0)))
    with pytest.raises(UserError, match="12 layers cannot be cut into 13 stages"):
        plan_pipeline(replace(TRAINING, stages=13), workers(*[(0, 0)] * 13))
    with pytest.raises(UserError, match="cuts at"):
        plan_pipeline(replace(TRAINING, cuts=(12,)), workers((0, 0), (0, 0)))


def test_shape_survives_a_message():
    assert ModelShape.from_map_untrusted(MODEL.to_map()) == MODEL
    for wrong in ({}, [], {**MODEL.to_map(), "width": 0}, {**MODEL.to_map(), "layers_bytes": [1.5]},
                  {**MODEL.to_map(), "tied_bytes": 64 * MIB}, {**MODEL.to_map(), "layers_bytes": []}):  # fmt: skip
        with pytest.raises(ProtocolError):
            ModelShape.from_map_untrusted(wrong)
