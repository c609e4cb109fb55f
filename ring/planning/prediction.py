"""Predicts what a step costs on given members: seconds, memory and bytes, for each strategy and codec. Pure.

What is measured, on one machine with the real model, is a ``Calibration`` of each strategy. A member of another speed
needs ``flops / its flops`` times as long. Workers of one host share its cores. docs/explain.md has the formulas, units
and limits, docs/scaling.md the sum for equal links. Validation and checkpoints are not part of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.footprint import LOCAL_FACTOR, shard_training_bytes
from p2ptrain.core.texts import human_bytes
from ring.codecs import codec_named
from ring.collectives import gather_hops, plan_stripes
from ring.planning.measurements import CandidateWorker, DescribedCluster, LinkTimes, all_reduce_s
from ring.planning.pipeline import TrainingPlan, plan_pipeline
from ring.planning.ring_plan import NEARLY_BEST, SMALL_GATHERS, STATED_ERROR, RingOptions, plan_ring
from ring.planning.workloads import TrainingWorkload
from ring.token import balance_counts

BACKWARD = 2 / 3
"""The backward pass as a part of a micro-batch's time."""
SERVER_TRIPS = 5
"""One-way trips over a link until a message and its arrays are there: offer, answer, message, answer, arrays."""
MOST_SLOWDOWN = 64.0
"""How many times as long as in ``sync`` computing may take with another strategy; more is not looked for."""
CHANGES_RESULT = 1.5
"""How many times as fast a strategy must be that changes what is learned, to be recommended instead of an exact one."""
EXACT = ("sync", "sharded", "pipeline")
"""Strategies whose losses do not depend on the cluster, the simplest first."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a strategy's engine took on a machine that computes ``flops``, while as many members computed as train.

    Attributes:
        micro_batch_s: forward and backward pass of a micro-batch of the whole model.
        update_s: the rest of a step without the network: hash, vote, clipping, and the optimizer, of the whole model.
        base_bytes: memory of a worker beside what the formulas of ``core.footprint`` count.
    """

    micro_batch_s: float
    update_s: float
    flops: float
    base_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """A way to train. ``training.stages`` counts stages or shards; 1 with other strategies.

    Attributes:
        settings: overrides of the profile that choose it, as after ``--set``.
        buckets: pieces in which gradients are sent while the last backward pass runs; 1: after it.
        vectors: arrays of the size of the gradients that each member contributes; 0: they are summed.
        widened: bytes of a gradient on the wire, as a multiple of fp32: 2 in exact mode and with masks.
        layers_kept: see ``device.gradient_checkpointing``. Others are as in the profile.
    """

    strategy: str
    training: TrainingWorkload
    codec: str = "fp32"
    ring: RingOptions = field(default_factory=RingOptions)
    settings: tuple[str, ...] = ()
    buckets: int = 1
    vectors: int = 0
    widened: int = 1
    fragments: int = 1
    overlap: bool = False
    buffer: int = 1
    accumulate: bool = True
    layers_kept: bool = True

    @property
    def trained_bytes(self) -> int:
        return self.training.trained_bytes(0, self.training.layers)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step of ``method`` is predicted to cost, at the member with the most of it.

    Attributes:
        exchange_s: on the way between members. exposed_s: the part of it that a step waits for.
        memory_bytes: of a worker's process. sent_bytes: in a step.
        plan: of a pipeline.
    """

    method: TrainingMethod
    step_s: float
    compute_s: float
    update_s: float
    exchange_s: float
    exposed_s: float
    memory_bytes: int
    sent_bytes: float
    plan: TrainingPlan | None = None

    @property
    def tokens_per_s(self) -> float:
        training = self.method.training
        return training.micro_batches * training.tokens / self.step_s

    @property
    def bound(self) -> str:
        """What a step spends most of its time on."""
        return "link" if self.exposed_s > self.compute_s + self.update_s else "compute"

    def to_map(self) -> dict[str, Any]:
        method = {"strategy": self.method.strategy, "codec": self.method.codec, "settings": list(self.method.settings)}
        figures = {name.name: getattr(self, name.name) for name in fields(self) if name.name not in ("method", "plan")}
        rates = {"tokens_per_s": self.tokens_per_s, "sent_bps": 8 * self.sent_bytes / self.step_s, "bound": self.bound}
        return method | figures | rates


def share_cores(members: Sequence[CandidateWorker]) -> list[CandidateWorker]:
    """The members with the speed that each has while all of them compute: those of one host share its cores."""
    wanted: dict[str, float] = {}
    for worker in members:
        wanted[worker.host] = wanted.get(worker.host, 0.0) + worker.flops
    shares = [min(1.0, member.host_flops / wanted[member.host]) if member.host_flops else 1.0 for member in members]
    return [replace(worker, flops=share * worker.flops) for worker, share in zip(members, shares, strict=True)]


def predict(method: TrainingMethod, cluster: DescribedCluster, measured: Calibration) -> Prediction:
    """Raises ``ResourceError`` or ``UserError`` if the members are too few, or lack the memory."""
    return _STRATEGIES[method.strategy](_Step(method, cluster, measured))


def fit_calibration(
    method: TrainingMethod, cluster: DescribedCluster, known: Calibration, step_s: float
) -> Calibration:
    """``known`` with both times scaled so that ``predict`` says ``step_s`` for ``method``. Raises as ``predict``."""

    def scaled(factor: float) -> Calibration:
        return replace(known, micro_batch_s=factor * known.micro_batch_s, update_s=factor * known.update_s)

    low, high = 0.0, 1.0
    while high < MOST_SLOWDOWN and predict(method, cluster, scaled(high)).step_s < step_s:
        low, high = high, 2 * high
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if predict(method, cluster, scaled(middle)).step_s < step_s else (low, middle)
    return scaled(high)


class _Step:
    """What all strategies need of one step."""

    def __init__(self, method: TrainingMethod, cluster: DescribedCluster, measured: Calibration) -> None:
        self.method, self.training, self.cluster, self.measured = method, method.training, cluster, measured
        self.members = share_cores(cluster.members)
        self.weights_bytes = self.training.sizes.weights_bytes(0, self.training.layers)
        self.moments = self.training.kept_moments(0, self.training.layers)
        self.state_bytes = int((1 + self.moments) * method.trained_bytes)

    def slowdown(self, member: CandidateWorker) -> float:
        """How many times as long as the measured machine it takes."""
        return self.measured.flops / member.flops if member.flops else 1.0

    def micro_batch_s(self, member: CandidateWorker) -> float:
        return self.measured.micro_batch_s * self.slowdown(member)

    @property
    def largest_slowdown(self) -> float:
        return max(map(self.slowdown, self.members))

    def encoded_bytes(self, size_bytes: int) -> int:
        if self.method.codec == "fp32":
            return self.method.widened * size_bytes
        return codec_named(self.method.codec).encoded_bytes(max(size_bytes // 4, 1))

    def ring_sent_bytes(self, members: int, size_bytes: int) -> float:
        """Sent by each member in an all-reduce of so many bytes of fp32."""
        return 2 * (members - 1) / members * self.encoded_bytes(size_bytes)

    def ring_s(self, ids: Sequence[str], size_bytes: int, *, buckets: int = 1) -> tuple[float, float]:
        """Seconds of an all-reduce of so many bytes of fp32, and of a step's small gathers, in a ring of these
        members."""
        size, links = len(ids), self.cluster.links
        if size < 2:
            return 0.0, 0.0
        made = plan_ring(ids, links, self.method.ring, size_bytes)
        latency_s, byte_s = LinkTimes(links, ids).around(made.order, 1.0)
        numel = max(size_bytes // 4 // buckets, 1)
        stripes = plan_stripes(numel, 4, members=size, lanes=made.streams, sub_chunk_bytes=made.sub_chunk_bytes)
        start, stop, piece, _ = stripes[0]
        chunk = -(-(stop - start) // size)
        if not self.cluster.emulated:
            byte_s *= len(stripes)  # streams share a link's rate
        chunk_s, piece_s = (byte_s * self.encoded_bytes(4 * numel) for numel in (chunk, min(piece, chunk)))
        if piece_s + latency_s > chunk_s:  # the link pauses after each chunk
            burst_s = byte_s * self.cluster.burst_bytes
            chunk_s, piece_s = max(chunk_s - burst_s, 0.0), max(piece_s - burst_s, 0.0)
        reduce_s = all_reduce_s(size, latency_s, chunk_s=chunk_s, piece_s=piece_s, buckets=buckets)
        return reduce_s, SMALL_GATHERS * gather_hops(size) * latency_s

    def whole_bytes(self, member: CandidateWorker, factor: float = 1.0) -> int:
        """Memory of a member with the whole model, and with the copy of the state that a checkpoint is made from."""
        held_bytes = self.training.held_bytes(0, self.training.layers, on_host=member.on_host)
        return int(factor * held_bytes) + self.kept_bytes() + self.state_bytes

    def kept_bytes(self) -> int:
        return self.training.kept_bytes(0, self.training.layers, layers_kept=self.method.layers_kept)

    def take(self, number: int) -> None:
        """Use the first ``number`` members. Raises ``UserError`` if there are fewer."""
        if len(self.members) < number:
            text = f"{number} workers are needed, and there are {len(self.members)}"
            raise UserError(text, remedy="start more: p2ptrain join")
        self.members = self.members[:number]

    def prediction(
        self,
        needs: Sequence[int],
        *,
        compute_s: float,
        update_s: float,
        exchange_s: float,
        exposed_s: float,
        sent_bytes: float,
    ) -> Prediction:
        """Raises ``ResourceError`` if a member lacks the memory for what it ``needs``, in bytes."""
        for member, need_bytes in zip(self.members, needs, strict=True):
            if member.memory_bytes < need_bytes:
                limit = human_bytes(member.memory_bytes)
                text = f"{member.name} needs about {human_bytes(need_bytes)}, and may use {limit}"
                do = "split the model, or split it further: job.strategy = 'sharded' or 'pipeline'"
                raise ResourceError(text, remedy=f"{do}; or set device.gradient_checkpointing = true")
        memory_bytes, step_s = self.measured.base_bytes + max(needs), compute_s + update_s + exposed_s
        return Prediction(self.method, step_s, compute_s, update_s, exchange_s, exposed_s, memory_bytes, sent_bytes)


# ------------------------------------------------------------------------------------------------------ the strategies


def _summed(step: _Step) -> Prediction:
    """sync, local and federated: all members hold the whole model, and sum over one ring."""
    method, members, size = step.method, step.members, len(step.members)
    is_local = method.strategy in ("local", "federated")
    units_us = [max(1, round(1e6 * step.micro_batch_s(member))) for member in members]
    counts = balance_counts(step.training.micro_batches, [max(units_us)] * size if method.vectors else units_us)
    each_s = step.measured.micro_batch_s + step.measured.update_s * is_local
    compute_s = max(count * each_s * step.slowdown(member) for count, member in zip(counts, members, strict=True))
    size_bytes = method.trained_bytes // method.fragments
    reduce_s, gathered_s = step.ring_s([member.id for member in members], size_bytes, buckets=method.buckets)
    sent_bytes = step.ring_sent_bytes(size, size_bytes)
    if method.vectors:  # each member's goes once round the ring
        reduce_s, sent_bytes = reduce_s * size / 2, float((size - 1) * size_bytes)
    early_s = min(BACKWARD * step.measured.micro_batch_s * step.largest_slowdown, reduce_s) * (1 - 1 / method.buckets)
    hidden_s = compute_s if method.overlap else 0.0 if is_local else early_s
    factor = LOCAL_FACTOR if is_local else 1.0
    return step.prediction(
        [step.whole_bytes(member, factor) + method.vectors * method.trained_bytes for member in members],
        compute_s=compute_s,
        update_s=step.measured.update_s * step.largest_slowdown,
        exchange_s=reduce_s + gathered_s,
        exposed_s=max(reduce_s - hidden_s, 0.0) + gathered_s,
        sent_bytes=sent_bytes,
    )


def _with_server(step: _Step) -> Prediction:
    method, measured, cluster = step.method, step.measured, step.cluster
    step.take(max(method.buffer + 1, len(step.members)))
    server, workers = cluster.members[0], share_cores(cluster.members[1:])  # the server computes little
    links = LinkTimes(cluster.links, [member.id for member in cluster.members])
    gradient, state = step.encoded_bytes(method.trained_bytes), step.state_bytes
    made_s = measured.update_s  # by the server, for a version
    unit_s, cycles_s, moved_s = step.training.micro_batches / method.buffer * measured.micro_batch_s, [], 0.0
    for member in workers:
        there_s, push_s = links.between(member.id, server.id, gradient)
        back_s, pull_s = links.between(server.id, member.id, state)
        moved_s = max(moved_s, push_s + pull_s)
        cycles_s.append(unit_s * step.slowdown(member) + push_s + pull_s + SERVER_TRIPS * (there_s + back_s) + made_s)
    # Workers of one version begin again together, so they form groups of ``buffer``; each makes a version in a cycle.
    rate = sum(1 / cycle_s for cycle_s in cycles_s) / len(workers) * (len(workers) // method.buffer)
    # All pulls leave by the server's link.
    step_s = max(1 / rate, made_s, 0.0 if cluster.emulated else method.buffer * moved_s)
    compute_s = min(step_s * unit_s * max(map(step.slowdown, workers)) / max(cycles_s), step_s - made_s)
    vectors = method.vectors or method.buffer * (method.buffer > 1)
    # Two copies of the state: the one that is sent, and the next.
    server_bytes = 2 * state + len(workers) * gradient + vectors * method.trained_bytes
    return step.prediction(
        [step.whole_bytes(server) + server_bytes, *(step.whole_bytes(member) + state for member in workers)],
        compute_s=compute_s,
        update_s=made_s,
        exchange_s=moved_s,
        exposed_s=step_s - compute_s - made_s,
        sent_bytes=float(max(method.buffer * state, gradient)),
    )


def _sharded(step: _Step) -> Prediction:
    training, method = step.training, step.method
    shards, replicas = training.stages, training.replicas
    step.take(training.workers)
    ids = [member.id for member in step.members]
    passes = math.ceil(math.ceil(training.micro_batches / replicas) / shards)
    moves = 2 * passes + (1 if method.accumulate else passes)  # of the whole model
    moved = (shards - 1) / shards * step.weights_bytes
    latency_s, moved_s = LinkTimes(step.cluster.links, ids).slowest(pairwise(ids), moved)
    each_bytes = method.trained_bytes // shards
    reduce_s, gathered_s = step.ring_s(ids[::shards], each_bytes)[0], step.ring_s(ids, each_bytes)[1]
    exchange_s = moves * (moved_s + (training.layers + 1) * (shards - 1) * latency_s) + reduce_s + gathered_s
    rows = shard_training_bytes(
        training.sizes,
        step.kept_bytes(),
        shards=shards,
        accumulate=method.accumulate,
        on_host=True,
        moments=step.moments,
    )
    return step.prediction(
        [sum(rows) + step.state_bytes // shards] * len(ids),
        compute_s=passes * step.measured.micro_batch_s * step.largest_slowdown,
        update_s=step.measured.update_s * step.largest_slowdown / shards,
        exchange_s=exchange_s,
        exposed_s=exchange_s,
        sent_bytes=moves * moved + step.ring_sent_bytes(replicas, each_bytes),
    )


def _pipelined(step: _Step) -> Prediction:
    training = step.training
    # Speeds at which the whole model takes as long as was measured.
    flop = training.compute_s(0, training.layers, 1.0)
    members = [replace(member, flops=flop / step.micro_batch_s(member)) for member in step.members]
    info, stages = made = plan_pipeline(training, members, step.cluster.links)
    assert info.step_s is not None
    gathered_s = step.ring_s([member.id for member in members], 4)[1]
    share, last = -(-training.micro_batches // training.replicas), info.stages - 1
    busy_s = max(share * (stage.compute_s or 0.0) for stage in stages)
    part = max(stage.weights_bytes for stage in stages) / step.weights_bytes
    update_s, waits_s = step.measured.update_s * step.largest_slowdown * part, info.step_s - busy_s + gathered_s
    sent, needs = [], []
    for stage in stages:
        trained_bytes, at = training.trained_bytes(stage.start, stage.stop), stage.stage
        hop_bytes = training.activation_bytes * (at < last) + training.gradient_bytes * (at > 0)
        sent.append(share * hop_bytes + step.ring_sent_bytes(info.replicas, trained_bytes))
        needs.append(step.measured.base_bytes + stage.need_bytes + int((1 + step.moments) * trained_bytes))
    times = busy_s + update_s + waits_s, busy_s, update_s, waits_s, waits_s
    return Prediction(step.method, *times, max(needs), max(sent), made)


_STRATEGIES: dict[str, Callable[[_Step], Prediction]] = dict.fromkeys(("sync", "local", "federated"), _summed)
_STRATEGIES |= {"server": _with_server, "sharded": _sharded, "pipeline": _pipelined}


# --------------------------------------------------------------------------------------------------- the recommendation


def recommend(found: Sequence[Prediction], error_budget: float) -> Prediction | None:
    """Of predictions in the order of preference: the fastest; or an earlier one that is nearly as fast, see
    ``NEARLY_BEST``. A strategy that changes what is learned must be ``CHANGES_RESULT`` times as fast as all exact ones.

    ``error_budget``: a codec with a larger error is not recommended, but fp32.
    """
    able = [
        prediction
        for prediction in found
        if prediction.method.codec == "fp32" or STATED_ERROR[prediction.method.codec] <= error_budget
    ]
    exact = [prediction for prediction in able if prediction.method.strategy in EXACT]
    enough = CHANGES_RESULT * max((prediction.tokens_per_s for prediction in exact), default=0.0)
    among = [
        prediction
        for prediction in able
        if prediction.method.strategy not in EXACT and prediction.tokens_per_s > enough
    ] or exact
    fastest = max((prediction.tokens_per_s for prediction in among), default=0.0)
    return next((prediction for prediction in among if prediction.tokens_per_s * NEARLY_BEST >= fastest), None)
