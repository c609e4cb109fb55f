"""The prediction of a step: against sums by hand and the page's formula, and what is recommend on two clusters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from configs.schema import StrategyName
from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import ModelSizes
from ring.collectives import gather_hops
from ring.planning.measurements import CandidateWorker, DescribedCluster, LinkQuality
from ring.planning.prediction import Calibration, Prediction, TrainingMethod, fit_calibration, predict, recommend
from ring.planning.ring_plan import RingOptions
from ring.planning.workloads import ModelShape, TrainingWorkload
from wire.emulate import preset_named

LAYER = 4 * 50_000
SHAPE = ModelShape.of(ModelSizes((LAYER,) * 4, (0,) * 4), 64, 128, 256)
MODEL = 4 * LAYER
"""Bytes of the weights."""
MEASURED = Calibration(0.1, 0.01, 1e9)
NEAR, FAR = LinkQuality(1e-4, 1e9), LinkQuality(0.02, 1e7)


def step_s(size: int, link: LinkQuality, size_bytes: float, compute_s: float, *, updates: int = 1) -> float:
    """The formula of docs/scaling.md: the seconds of an update, of which an exchange follows so many."""
    assert link.bandwidth_bps
    round_s = 8 * size_bytes / size / link.bandwidth_bps + link.latency_s
    return compute_s + 2 * ((size - 1) * round_s + gather_hops(size) * link.latency_s) / updates


def method(
    strategy: str = "sync", *, stages: int = 1, replicas: int = 1, micro_batches: int = 8, **more: Any
) -> TrainingMethod:
    training = TrainingWorkload(SHAPE, stages, replicas, tokens=256, sequence_tokens=128, micro_batches=micro_batches)
    return TrainingMethod(strategy, training, ring=RingOptions(streams=1, sub_chunk_bytes=1 << 20), **more)


def cluster(
    size: int, link: LinkQuality = NEAR, *, flops: float = 1e9, memory_bytes: float = math.inf
) -> DescribedCluster:
    there = tuple(CandidateWorker(f"w{n}", f"w{n}", memory_bytes, flops) for n in range(size))
    return DescribedCluster(there, {(one.id, other.id): link for one in there for other in there if one is not other})


@pytest.mark.parametrize("strategy", get_args(StrategyName))
def test_every_strategy_is_predicted(strategy: str) -> None:
    stages = 2 if strategy in ("pipeline", "sharded") else 1
    assert predict(method(strategy, stages=stages), cluster(2), MEASURED).step_s > 0


@pytest.mark.parametrize("link", [NEAR, FAR])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ring_of_equal_members_takes_what_the_documentation_says(size: int, link: LinkQuality) -> None:
    made = predict(method(), cluster(size, link), MEASURED)
    compute_s = 8 // size * 0.1
    assert made.step_s == pytest.approx(step_s(size, link, MODEL, compute_s) + 0.01)
    assert (made.compute_s, made.update_s) == pytest.approx((compute_s, 0.01))
    assert made.sent_bytes == 2 * (size - 1) / size * MODEL
    assert made.tokens_per_s == pytest.approx(8 * 256 / made.step_s)


def test_faster_members_compute_more_and_workers_of_one_host_share_its_cores() -> None:
    pair = cluster(2)
    fast, slow = pair.members[0], replace(pair.members[1], flops=3e8)
    assert predict(method(), replace(pair, members=(fast, slow)), MEASURED).compute_s == pytest.approx(
        2 * 0.1 / 0.3
    )  # 6 + 2
    here = tuple(replace(one, host="here", host_flops=1e9) for one in pair.members)
    assert predict(method(), replace(pair, members=here), MEASURED).compute_s == pytest.approx(4 * 0.2)
    assert predict(method(), cluster(1), MEASURED).step_s == pytest.approx(8 * 0.1 + 0.01)


def test_buckets_travel_while_the_last_backward_pass_runs() -> None:
    plain, early = (predict(method(buckets=number), cluster(2, FAR), MEASURED) for number in (1, 4))
    # Four buckets of two chunks each, all of which but the last bucket may hide in 3/4 of a backward pass of 0.2 / 3 s.
    chunk_s = 8 * MODEL / 4 / 2 / 1e7
    assert early.exchange_s == pytest.approx(4 * (chunk_s + 0.02 + chunk_s) + 0.02 + 2 * 0.02)
    assert early.exchange_s - early.exposed_s == pytest.approx(0.75 * 0.2 / 3)
    assert plain.exchange_s == plain.exposed_s


@pytest.mark.parametrize("strategy", ["sync", "local", "server", "sharded", "pipeline"])
def test_fitted_calibration_predicts_the_measured_step(strategy: str) -> None:
    split = strategy in ("sharded", "pipeline")
    asked, pair = method(strategy, stages=2 if split else 1, micro_batches=4), cluster(2)
    own = fit_calibration(asked, pair, MEASURED, 0.9)
    assert predict(asked, pair, own).step_s == pytest.approx(0.9, rel=1e-3)
    assert own.update_s / own.micro_batch_s == pytest.approx(MEASURED.update_s / MEASURED.micro_batch_s)


def test_codec_saves_bytes() -> None:
    coded = predict(method(codec="bf16"), cluster(2, FAR), MEASURED)
    assert coded.sent_bytes == MODEL / 2
    assert coded.step_s == pytest.approx(step_s(2, FAR, MODEL / 2, 0.4) + 0.01)


def test_local_pays_an_update_for_each_micro_batch_and_may_hide_the_exchange() -> None:
    made = predict(method("local"), cluster(2, FAR), MEASURED)
    assert made.compute_s == pytest.approx(4 * 0.11)
    assert made.exposed_s == made.exchange_s == pytest.approx(step_s(2, FAR, MODEL, 0.0))
    hidden = predict(method("local", overlap=True, micro_batches=80), cluster(2, FAR), MEASURED)
    assert hidden.exposed_s == pytest.approx(2 * 0.02)  # the gathers
    assert predict(method("local", fragments=4), cluster(2, FAR), MEASURED).sent_bytes == MODEL / 4


def test_server_makes_a_version_for_each_group_of_workers_in_a_cycle() -> None:
    bytes_s = 8 * 4 * MODEL / 1e7  # a gradient there; weights and two moments back
    cycle_s = 0.8 + bytes_s + 10 * 0.02 + 0.01
    there = replace(cluster(5, FAR), emulated=True)
    assert predict(method("server"), there, MEASURED).step_s == pytest.approx(cycle_s / 4)
    of_three = cycle_s - 0.8 + 0.8 / 4
    assert predict(method("server", buffer=4), there, MEASURED).step_s == pytest.approx(of_three)
    # Of four workers three make a version; the fourth begins when they do, so there is one group.
    three = predict(method("server", buffer=3, micro_batches=6), there, MEASURED)
    assert three.step_s == pytest.approx(of_three)
    one = predict(method("server", micro_batches=6), there, MEASURED)
    assert three.memory_bytes - one.memory_bytes == 3 * MODEL  # gradients that wait to be combined
    assert predict(method("server", buffer=1), replace(there, emulated=False), MEASURED).step_s == pytest.approx(
        max(cycle_s / 4, bytes_s)  # all workers share the server's link
    )
    with pytest.raises(UserError, match="6 workers are needed"):
        predict(method("server", buffer=5), there, MEASURED)


def test_shards_gather_every_layer_twice_for_each_pass() -> None:
    made = predict(method("sharded", stages=2, replicas=1), cluster(2, FAR), MEASURED)
    half_s = 8 * MODEL / 2 / 1e7 + 5 * 0.02  # five units
    assert made.compute_s == pytest.approx(4 * 0.1)
    assert made.exposed_s == pytest.approx((2 * 4 + 1) * half_s + 2 * 0.02)
    assert made.sent_bytes == (2 * 4 + 1) * MODEL / 2
    each = predict(method("sharded", stages=2, accumulate=False), cluster(2, FAR), MEASURED)
    assert each.sent_bytes == (2 * 4 + 4) * MODEL / 2


def test_pipeline_computes_as_fast_as_the_measured_whole_model() -> None:
    free = LinkQuality(0.0, 1e15)
    made = predict(method("pipeline", stages=2, micro_batches=64), cluster(2, free), MEASURED)
    assert made.plan is not None
    # 64 micro-batches at half the model each, and one more half to fill and empty it; the head makes the last larger.
    assert 65 * 0.05 <= made.compute_s + made.exposed_s <= 1.2 * 65 * 0.05


def test_memory_counts_copies_of_the_weights_and_is_limited() -> None:
    kept = method().training.kept_bytes(0, 4)
    one = predict(method(), cluster(2), replace(MEASURED, base_bytes=1000))
    assert one.memory_bytes == 1000 + 5 * MODEL + kept + 3 * MODEL
    gathered = predict(method(vectors=5), cluster(5), MEASURED)
    assert gathered.memory_bytes == 8 * MODEL + kept + 5 * MODEL
    assert gathered.sent_bytes == 4 * MODEL
    with pytest.raises(ResourceError, match=r"w0 needs about .*, and may use 1"):
        predict(method(), cluster(2, memory_bytes=1 << 20), MEASURED)


def all_of(there: DescribedCluster) -> list[Prediction]:
    found = []
    for codec in ("fp32", "bf16", "int8", "int4"):
        found += [predict(method("sync", codec=codec), there, MEASURED)]
    for codec in ("fp32", "bf16", "int8", "int4"):
        found += [predict(method("local", codec=codec, micro_batches=800), there, MEASURED)]
    return found


def test_recommended_is_sync_for_near_members_and_local_for_far_ones() -> None:
    near = recommend(all_of(cluster(4)), 0.03)
    assert near is not None
    assert (near.method.strategy, near.method.codec, near.bound) == ("sync", "fp32", "compute")
    far = recommend(all_of(cluster(4, LinkQuality(0.1, 2e6))), 0.03)
    assert far is not None
    assert far.method.strategy == "local"
    # A slow link alone is no reason to lose precision beyond the budget.
    middle = recommend(all_of(cluster(2, LinkQuality(0.001, 4e7)))[:4], 0.03)
    assert middle is not None
    assert middle.method.codec in ("bf16", "int8")
    strict = recommend(all_of(cluster(2, LinkQuality(0.001, 4e7)))[:4], 0.0)
    assert strict is not None
    assert strict.method.codec == "fp32"
    assert recommend([], 0.03) is None


def test_emulated_link_has_the_means_of_its_preset() -> None:
    assert LinkQuality.of_preset(preset_named("80ms-100mbit")) == LinkQuality(0.04, pytest.approx(1e8))
    wan = LinkQuality.of_preset(preset_named("wan"))
    lost = 1e-4 * 0.04 * 1e8 / 8 / 1448
    assert wan == LinkQuality(pytest.approx(0.0215 + 0.04 * lost / (1 + lost)), 1e8)
