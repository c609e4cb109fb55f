"""What a step costs in each way to train (``ring.planning.prediction``), from measurements on this machine.

Real workers of this machine train some steps with each strategy, one job after another, so they share cores and memory
as in training. From these times and sizes the cost model predicts all other ways to train, on any cluster.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING

from configs.loader import load
from p2ptrain.cluster import local_cluster
from p2ptrain.cluster.console import Console, run_stoppable
from p2ptrain.cluster.local_cluster import LocalCluster
from p2ptrain.compute.gradients import bucket_bounds
from p2ptrain.core.errors import JobFailed, P2PTrainError, UserError
from p2ptrain.core.texts import human_duration
from ring.codecs import CODECS
from ring.planning.measurements import CandidateWorker, DescribedCluster, LinkQuality
from ring.planning.prediction import EXACT, Calibration, Prediction, TrainingMethod, fit_calibration, predict
from ring.planning.ring_plan import STATED_ERROR, RingOptions
from ring.planning.workloads import ModelShape
from wire.emulate import preset_named
from wire.records import ABSENT_STATES, LinkInfo, PeerInfo

if TYPE_CHECKING:
    from configs.schema import Profile

STEPS, WARM_STEPS, PASSES, MOST_S = 10, 2, 2, 30.0
"""Of each job: steps, the first of them that a mean leaves out, micro-batches of a worker in a step, longest time."""
MOST_AT_ONCE = 4
"""Workers that are measured at once. More of them share the cores in proportion."""
STRATEGIES = ("sync", "sharded", "pipeline", "server", "local", "federated")
"""In the order of preference."""
LOCAL = ("local", "federated")
MOST_WAITING, MOST_INNER = 0.1, 512
"""Share of a step that ``local`` waits for the network at most, if the profile does not say how many inner steps; and
how many of these a worker makes at most."""


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class StrategyTimings:
    """What some workers of this machine are, and what a step took them.

    Attributes:
        jobs: strategy → the profile that was trained, and its figures (``p2ptrain.lab.experiments.results.FIGURES``).
    """

    workers: list[PeerInfo]
    links: list[LinkInfo]
    jobs: dict[str, tuple[Profile, dict[str, float]]]


async def measure(profile: Profile, workers: int, strategies: Sequence[str], *, quiet: bool) -> StrategyTimings:
    """Train with so many workers. Ctrl+C raises ``KeyboardInterrupt``.

    Args:
        strategies: besides ``sync``. One that these workers cannot train is left out.

    Raises:
        P2PTrainError: a process ended, or ``sync`` cannot be trained.
    """
    cluster = LocalCluster(Path(tempfile.mkdtemp(prefix="p2ptrain-explain-")))  # kept after a failure, for its logs

    async def work(console: Console) -> StrategyTimings:
        console.quiet = quiet
        console.progress(cluster.start_notice(workers))
        await cluster.start_seed()
        await cluster.start_workers(workers, threads=profile.device.threads, device=profile.device.kind)
        await cluster.wait_until_joined(cluster.peers)
        training = _train_each(cluster, profile, workers, strategies, console.progress)
        return await LocalCluster.while_alive(training, needed=[cluster.seed, *cluster.peers.values()])

    try:
        found = await run_stoppable(work)
    finally:
        await cluster.end()
    await asyncio.to_thread(shutil.rmtree, cluster.root, ignore_errors=True)
    if found is None:
        raise KeyboardInterrupt
    return found


async def _train_each(
    cluster: LocalCluster, profile: Profile, workers: int, strategies: Sequence[str], show: Callable[[str], None]
) -> StrategyTimings:
    from pydantic import ValidationError

    from p2ptrain.lab.experiments.grid import Grid, GridPlan, GridRun, RunMachine
    from p2ptrain.lab.experiments.run import measure as run_job

    def show_strategy(strategy: str, text: str) -> None:
        show(f"measuring {strategy}: {text}")

    async with cluster.operator() as client:
        show("the workers measure their speed and their links")
        links = await client.links()
        peers = [peer for peer in await client.peers() if peer.roles == ["worker"]]
    found, machine = StrategyTimings(peers, links, {}), RunMachine(workers=workers, link="", threads=0, private=False)
    for strategy in dict.fromkeys(("sync", *strategies)):
        try:
            brief = shorten_job(profile, strategy, workers)
        except ValidationError:  # such as one that needs two workers
            continue
        run = GridRun(strategy, {"strategy": strategy}, {}, 1, brief, machine)
        plan = GridPlan(Grid(name="explain", axes={"strategy": [strategy]}), [run], MOST_S)
        async with cluster.operator() as client:
            result = await run_job(client, run, plan, partial(show_strategy, strategy))
        figures = {name: value or 0.0 for name, value in result.figures.items()}
        if strategy == "server" and figures.get("steps", 0) > WARM_STEPS:
            # Its versions come in groups, so a median of their times tells little.
            times_s = [float(point[1] or 0.0) for point in result.curve[WARM_STEPS - 1 :]]
            figures["step_ms"] = 1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        if figures.get("step_ms"):
            found.jobs[strategy] = brief, figures
        elif strategy == "sync":
            text = f"no step of {PASSES} micro-batches could be trained within {MOST_S:g} s: {result.reason}"
            raise JobFailed(text, remedy="close other programs, or set a smaller batch.micro_batch_sequences")
    return found


def shorten_job(profile: Profile, strategy: str, workers: int) -> Profile:
    """The profile of a short job of a strategy, without what only some strategies know. Raises ``ValidationError``."""
    tables = profile.model_dump()
    tables["job"] |= {"strategy": strategy, "workers": workers, "exact": False, "steps": STEPS}
    tables["batch"]["micro_batches"] = PASSES * workers
    tables |= {name: {} for name in ("robust", "ring", "federated", "privacy", "track", "link")}
    tables |= {"validation": {"every": 0}, "checkpoint": {"every": 0}}
    tables["data"]["private"] = False
    tables["sharded"]["shards"], tables["server"]["buffer"] = 2, 1
    tables["pipeline"] |= {"stages": 2 if strategy == "pipeline" else 0, "cuts": []}
    return type(profile).model_validate(tables)


# ----------------------------------------------------------------------------------------------------- predicting


async def calibrate(
    profile: Profile,
    shape: ModelShape,
    where: int | DescribedCluster,
    strategies: Sequence[str],
    link: str,
    *,
    quiet: bool,
) -> tuple[dict[str, Calibration], DescribedCluster]:
    """Measure the strategies here; return the calibration of every one, that of ``sync`` for those that were not
    measured, and the cluster. Raises as ``measure``.

    Args:
        shape: of the profile's model.
        where: so many workers of this machine; or a cluster.
        link: preset of the emulated link between workers of this machine; empty: the loopback.
    """
    if link:
        preset_named(link)
    count = min(where, MOST_AT_ONCE) if isinstance(where, int) else min(2, os.cpu_count() or 1)
    found = await measure(profile, count, list(map(_measured_as, strategies)), quiet=quiet)
    flops = statistics.median(peer.flops for peer in found.workers)
    loopback = typical_link(found.links)
    unlimited = equal_members(count, 0, flops, "", loopback)
    known, calibrations = Calibration(0.0, 0.0, flops), dict[str, Calibration]()
    for strategy, (short, figures) in found.jobs.items():
        method, step_s = method_of(short, shape, count), figures["step_ms"] / 1e3
        if strategy == "sync":
            known = replace(known, micro_batch_s=figures["compute_ms"] / 1e3 / PASSES)
            before = predict(method, unlimited, known)
            # What a worker held was a whole model, and no copy of it for a checkpoint.
            base_bytes = max(int(figures["memory_bytes"]) - before.memory_bytes + 3 * method.trained_bytes, 0)
            known = replace(known, update_s=max(step_s - before.step_s, 0.0), base_bytes=base_bytes)
        calibrations[strategy] = fit_calibration(method, unlimited, known, step_s)
    usual = calibrations["sync"]
    calibrations = {strategy: calibrations.get(_measured_as(strategy), usual) for strategy in STRATEGIES}
    if not isinstance(where, int):
        return calibrations, where
    memory_bytes = local_cluster.part_bytes(profile.device.kind) // where
    return calibrations, equal_members(where, memory_bytes, flops, link, loopback, flops * count)


def typical_link(links: Sequence[LinkInfo]) -> LinkQuality | None:
    """A link with the medians; None if there is none."""
    rates = [link.bandwidth_bps for link in links if link.bandwidth_bps]
    latencies = [link.latency_s for link in links]
    return LinkQuality(statistics.median(latencies), statistics.median(rates) if rates else None) if links else None


def equal_members(
    workers: int,
    memory_bytes: int,
    flops: float = 0.0,
    link: str = "",
    loopback: LinkQuality | None = None,
    host_flops: float = 0.0,
) -> DescribedCluster:
    """Equal workers of this machine, over an emulated link, or over the loopback. ``memory_bytes``: 0: unknown."""
    equal = memory_bytes or math.inf, flops, True, "here", host_flops
    there = [CandidateWorker(f"worker-{number:02}", f"worker-{number}", *equal) for number in range(1, workers + 1)]
    preset = preset_named(link) if link else None
    link_quality = LinkQuality.of_preset(preset) if preset else loopback
    pairs = permutations((worker.id for worker in there), 2)
    links = dict.fromkeys(pairs, link_quality) if link_quality else {}
    return DescribedCluster(tuple(there), links, emulated=True, burst_bytes=preset.burst_bytes if preset else 0)


def cluster_of(
    peers: Sequence[PeerInfo], links: Sequence[LinkInfo], among: Sequence[str] | None = None
) -> DescribedCluster:
    """The workers that are connected to a seed; only those ``among`` a job's members. Raises ``UserError``."""
    peers = [peer for peer in peers if peer.roles == ["worker"]]
    there = [peer for peer in peers if peer.state not in ABSENT_STATES and (among is None or peer.id in among)]
    if not any(peer.flops for peer in there):
        text = "no worker is connected to the seed, or none has measured its speed"
        do = "start some: p2ptrain join; or predict without them: p2ptrain explain --workers N, or --cluster FILE"
        raise UserError(text, remedy=do)
    typical = statistics.median(peer.flops for peer in there if peer.flops)
    members = []
    for peer in there:
        flops, on_host = peer.flops or typical, not peer.device.startswith(("cuda", "mps"))
        most = flops * peer.cores / (peer.threads or peer.cores or 1) if on_host else 0.0
        host = peer.address.rpartition(":")[0]
        members.append(CandidateWorker(peer.id, peer.name, peer.part_bytes or math.inf, flops, on_host, host, most))
    known = {(link.source, link.target): LinkQuality(link.latency_s, link.bandwidth_bps) for link in links}
    return DescribedCluster(tuple(members), known)


def method_of(profile: Profile, shape: ModelShape, workers: int, settings: Sequence[str] = ()) -> TrainingMethod:
    """The profile's way to train with so many workers."""
    from roles.strategies.federated import slots
    from roles.training_shape import of_profile

    job, ring, gathers = profile.job, profile.ring, bool(profile.robust.rule)
    training = of_profile(profile, shape)
    # Workers form as many replicas as possible.
    training = replace(training, replicas=max(min(workers // training.stages, training.micro_batches), 1))
    widened = (2 if job.exact or profile.federated.secure else 1) * max(slots(profile), 1)
    fragments = profile.local.fragments if job.strategy == "local" else 1
    numel = training.trained_bytes(0, training.layers) // 4 // fragments
    return TrainingMethod(
        job.strategy if job.strategy in STRATEGIES else "sync",  # of a plugin's only the sum of gradients is known
        training,
        "fp32" if ring.codec == "auto" else ring.codec,
        RingOptions(ring.order, ring.streams, ring.sub_chunk_bytes),
        tuple(settings),
        buckets=1 if gathers else len(bucket_bounds(numel, 4 * widened, ring.bucket_bytes)),
        vectors=(profile.server.buffer if job.strategy == "server" else workers) if gathers else 0,
        widened=widened,
        fragments=fragments,
        overlap=job.strategy == "local" and profile.local.overlap,
        buffer=profile.server.buffer,
        accumulate=profile.sharded.accumulate,
        layers_kept=not profile.device.gradient_checkpointing,
    )


def predict_all(
    name: str,
    sets: Sequence[str],
    own: Profile,
    cluster: DescribedCluster,
    measured: dict[str, Calibration],
    shape_of: Callable[[Profile], ModelShape],
) -> tuple[list[Prediction], dict[str, str]]:
    """Every strategy with every codec that differs from the one before, in the order of preference; and why other
    strategies are impossible. ``shape_of``: of the model of a profile."""
    workers, refused = len(cluster.members), dict.fromkeys(("sharded", "pipeline"), "it needs 2 workers")
    refused["federated"] = "it needs data.private = true"
    found: list[Prediction] = []
    for strategy, codec in product(STRATEGIES, CODECS):
        best: Prediction | None = None
        for more in _variants(strategy, own, workers):
            settings = [*more, *[f"ring.codec={codec}"] * (codec != own.ring.codec)]
            try:
                tried = load(name, os.environ, [*sets, f"job.workers={workers}", *settings]).profile.alone()
                best = predict(method_of(tried, shape_of(tried), workers, settings), cluster, measured[strategy])
            except P2PTrainError as problem:
                refused[strategy] = problem.message
                continue
            if strategy not in LOCAL or best.exposed_s <= MOST_WAITING * best.compute_s:
                break
        before = found[-1] if found else None
        if best and not (before and (before.method.strategy, before.step_s) == (strategy, best.step_s)):
            found.append(best)
    possible = {prediction.method.strategy for prediction in found}
    return found, {strategy: why for strategy, why in refused.items() if strategy not in possible}


def _measured_as(strategy: str) -> str:
    """The strategy that is measured in its place."""
    return "local" if strategy == "federated" else strategy


def _variants(strategy: str, own: Profile, workers: int) -> Iterator[list[str]]:
    """Settings that choose a strategy, of which the first that will do is taken: the fewest parts, or the fewest inner
    steps."""
    if strategy == own.job.strategy:
        yield []
        return
    chosen = [f"job.strategy={strategy}"] + ["pipeline.stages=0"] * (own.pipeline.stages > 0 and strategy != "pipeline")
    if strategy in ("pipeline", "sharded"):
        key = "pipeline.stages" if strategy == "pipeline" else "sharded.shards"
        yield from ([*chosen, f"{key}={parts}"] for parts in range(2, workers + 1) if not workers % parts)
    elif strategy in LOCAL and (strategy == "local" or own.data.private):
        first = own.batch.micro_batches
        numbers = [first << times for times in range(20) if not times or first << times <= MOST_INNER * workers]
        yield from ([*chosen, *[f"batch.micro_batches={number}"] * (number != first)] for number in numbers)
    elif strategy != "federated":
        yield chosen


def explain_choice(best: Prediction) -> list[str]:
    """Why this way is recommended, and what it costs, in sentences."""
    strategy, codec, waits = best.method.strategy, best.method.codec, 100 * best.exposed_s / best.step_s
    bounds = "the links bound it" if best.bound == "link" else "computing bounds it"
    cost = "staleness, so the same tokens may teach less" if strategy not in EXACT else "learns as one worker would"
    loss = f"; {codec} errs by up to {100 * STATED_ERROR[codec]:.2g} % in an exchange" if codec != "fp32" else ""
    speed = f"{human_duration(best.step_s)} a step, {best.tokens_per_s:,.0f} tokens/s"
    return [
        f"recommended: {strategy} with {codec}: {speed}",
        f"why: a step waits {waits:.0f} % of its time for the network, so {bounds}",
        f"cost: {cost}{loss}",
    ]
