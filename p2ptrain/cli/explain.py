"""``p2ptrain explain``: predicts what a step costs in each way to train, and recommends one (``ring.prediction``)."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.inputs import DownloadOption
from p2ptrain.cli.measuring import PASSES, measure
from p2ptrain.cli.model_sizes import shape_of
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.placement import print_plan, to_json
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, LinkOption, SeedOption, SetOption, ask, run, seed_option
from p2ptrain.cluster.console import printable
from p2ptrain.compute.gradients import bucket_bounds
from p2ptrain.core.errors import EXIT_INTERRUPTED, P2PTrainError, UserError
from p2ptrain.core.texts import human_bytes, human_duration
from ring.codecs import CODECS
from ring.codecs.choice import STATED_ERROR
from ring.order import LinkQuality, RingOptions
from ring.prediction import (
    EXACT,
    Calibration,
    Cluster,
    Prediction,
    Way,
    fitted,
    predict,
    quality_of,
    recommended,
)
from ring.training_costs import CandidateWorker, ModelShape
from wire.emulate import preset_named
from wire.records import ABSENT_STATES, FINISHED_STATES, LinkInfo

if TYPE_CHECKING:
    from configs.schema import Profile


MOST_AT_ONCE = 4
"""Workers that are measured at once. More of them share the cores in proportion."""
STRATEGIES = ("sync", "sharded", "pipeline", "server", "local", "federated")
"""In the order of preference."""
LOCAL = ("local", "federated")
MOST_WAITING, MOST_INNER = 0.1, 512
"""Share of a step that ``local`` waits for the network at most, if the profile does not say how many inner steps; and
how many of these a worker makes at most."""
ROWS, LEAST_ROWS = 200, 5  # newest steps that medians are taken of


def explain(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A profile that ships, or a TOML file.")] = "tiny",
    workers: Annotated[
        int, typer.Option("--workers", "-w", metavar="N", min=0, max=64, help="So many workers of this machine.")
    ] = 0,
    link: LinkOption = "",
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE.toml", help="Members and links from a file.")
    ] = None,
    job: Annotated[
        str, typer.Option("--job", metavar="JOB", help="Show the prediction for a job of the seed beside its steps.")
    ] = "",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    download: DownloadOption = False,
    seed: SeedOption = DEFAULT_SEED,
    as_json: JsonOption = False,
) -> None:
    """Predict step time, memory and bytes for each strategy and codec, and recommend one.

    The model is measured on this machine for a few seconds. The cluster is N workers of this machine (the default: as
    many as the profile says), or the workers of a seed with their measured speeds and links, or what a file says.

    \b
    Examples:
      p2ptrain explain
      p2ptrain explain small --workers 4 --link wan
      p2ptrain explain ./my.toml --seed 192.168.1.20
      p2ptrain explain --cluster lab.toml --set model.hidden_size=512
      p2ptrain explain --job tiny --workers 2
    """
    from p2ptrain.cli.cluster_file import read

    if cluster is not None and (workers or link):
        raise UserError("--cluster excludes --workers and --link", remedy="leave one of them out")
    if job:
        if sets:
            raise UserError("--job has its own settings", remedy="leave --set out")
        _show_job(job, seed, workers, link, cluster, as_json=as_json)
        return
    from configs.loader import load
    from p2ptrain.cli.inputs import checked

    usual = {"job.workers": (workers, f"--workers {workers}")} if workers else {}
    own = checked(load(profile, os.environ, sets, usual).profile, download=download).alone()
    sets = [*sets, f"model.path={own.model.path}"] if own.model.path else sets  # a model that was fetched
    if workers or not (cluster or seed):
        where: int | Cluster = workers or own.job.workers
        do = ["up", "--profile", profile, "--workers", str(where), *(["--link", link] if link else [])]
    else:
        where, do = read(cluster) if cluster else of_seed(seed), ["jobs", "create", "--profile", profile]
    measured, members = calibrated(own, where, STRATEGIES, link or own.link.preset, quiet=as_json)
    found, refused = _all_ways(profile, sets, own, members, measured)
    best = recommended(found, own.ring.error_budget)
    reasons = _reasons(best) if best else ["nothing can be recommended: no way is possible"]
    if best:
        for setting in (*sets, *best.way.settings):
            do += ["--set", setting]
        reasons.append(f"do: p2ptrain {shlex.join(do)}{seed_option(seed) if do[0] == 'jobs' else ''}")
    if as_json:
        there = {"members": [asdict(one) for one in members.members], "ways": [one.to_map() for one in found]}
        print_json({**there, "refused": refused, "recommended": best.to_map() if best else None, "reasons": reasons})
        return
    _print_ways(found)
    for strategy, why in refused.items():
        typer.echo(f"{strategy} is impossible: {printable(why)}")
    typer.echo("\n" + "\n".join(map(printable, reasons)))


def show_one(profile: Profile, where: int | Cluster, link: str = "", *, as_json: bool) -> None:
    """Show the prediction for a profile as it is, for a dry run. ``where``: as for ``calibrated``."""
    measured, members = calibrated(profile, where, [profile.job.strategy], link, quiet=as_json)
    one = _predicted(way_of(profile, shape_here(profile), len(members.members)), members, measured)
    if as_json:
        print_json(one.to_map() | (to_json(*one.plan) if one.plan else {}))
        return
    if one.plan:
        print_plan(*one.plan)
        typer.echo()
    _print_ways([one])


# --------------------------------------------------------------------------------------------------------- the clusters


def calibrated(
    profile: Profile, where: int | Cluster, strategies: Sequence[str], link: str, *, quiet: bool
) -> tuple[dict[str, Calibration], Cluster]:
    """Measure the strategies here; return each one's calibration, and the cluster.

    Args:
        where: so many workers of this machine; or a cluster.
        link: preset of the emulated link between workers of this machine; empty: the loopback.
    """
    from p2ptrain.cli.up_cluster import part_bytes

    shape = shape_here(profile)  # fail here, not after the measurements
    if link:
        preset_named(link)
    count = min(where, MOST_AT_ONCE) if isinstance(where, int) else min(2, os.cpu_count() or 1)
    told = run(measure(profile, count, list(map(_like, strategies)), quiet=quiet), children=True)
    if told is None:
        raise typer.Exit(EXIT_INTERRUPTED)
    flops = statistics.median(peer.flops for peer in told.workers)
    loopback = _typical(told.links)
    unlimited = equal_members(count, 0, flops, "", loopback)
    known, found = Calibration(0.0, 0.0, flops), dict[str, Calibration]()
    for strategy, (short, figures) in told.jobs.items():
        way, step_s = way_of(short, shape, count), figures["step_ms"] / 1e3
        if strategy == "sync":
            known = replace(known, micro_batch_s=figures["compute_ms"] / 1e3 / PASSES)
            before = predict(way, unlimited, known)
            # What a worker held was a whole model, and no copy of it for a checkpoint.
            base_bytes = max(int(figures["memory_bytes"]) - before.memory_bytes + 3 * way.trained_bytes, 0)
            known = replace(known, update_s=max(step_s - before.step_s, 0.0), base_bytes=base_bytes)
        found[strategy] = fitted(way, unlimited, known, step_s)
    if not isinstance(where, int):
        return found, where
    return found, equal_members(where, part_bytes(profile.device.kind) // where, flops, link, loopback, flops * count)


def _typical(links: Sequence[LinkInfo]) -> LinkQuality | None:
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
) -> Cluster:
    """Equal workers of this machine, over an emulated link, or over the loopback."""
    there = [
        CandidateWorker(f"worker-{number:02}", f"worker-{number}", memory_bytes, flops, True, "here", host_flops)
        for number in range(1, workers + 1)
    ]
    preset = preset_named(link) if link else None
    way = quality_of(preset) if preset else loopback
    pairs = [(one.id, other.id) for one in there for other in there if one is not other]
    links = dict.fromkeys(pairs, way) if way else {}
    return Cluster(tuple(there), links, emulated=True, burst_bytes=preset.burst_bytes if preset else 0)


def of_seed(seed: str, among: Sequence[str] | None = None) -> Cluster:
    """The workers that are connected to a seed; only those ``among`` a job's members. Raises ``UserError``."""
    links = ask(seed, lambda client: client.links())  # the workers measure their speed before
    peers = [peer for peer in ask(seed, lambda client: client.peers()) if peer.roles == ["worker"]]
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
        members.append(CandidateWorker(peer.id, peer.name, peer.part_bytes, flops, on_host, host, most))
    known = {(way.source, way.target): LinkQuality(way.latency_s, way.bandwidth_bps) for way in links}
    return Cluster(tuple(members), known)


# ------------------------------------------------------------------------------------------------------------- the ways


def shape_here(profile: Profile) -> ModelShape:
    """Raises ``UserError`` if the model is not on this machine, and as ``model_sizes.shape_of``."""
    if (shape := shape_of(profile)) is None:
        text = f"the sizes of the model at {profile.model.path} are not known here"
        raise UserError(text, remedy="run this on a machine that has it")
    return shape


def way_of(profile: Profile, shape: ModelShape, workers: int, settings: Sequence[str] = ()) -> Way:
    """The profile's way to train with so many workers."""
    from roles.strategies.federated import slots
    from roles.training_shape import of_profile

    job, ring, gathers = profile.job, profile.ring, bool(profile.robust.rule)
    training = of_profile(profile, shape)
    # Workers form as many replicas as possible.
    training = replace(training, replicas=max(min(workers // training.stages, training.micro_batches), 1))
    widened = (2 if job.exact or profile.federated.secure else 1) * max(slots(profile), 1)
    fragments = profile.local.fragments if job.strategy == "local" else 1
    numel = int(training.trained * training.sizes.weights_bytes(0, training.layers)) // 4 // fragments
    return Way(
        job.strategy,
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
        moments=job.strategy != "server" or profile.server.optimizer == "adamw",
        accumulate=profile.sharded.accumulate,
        layers_kept=not profile.device.gradient_checkpointing,
    )


def _all_ways(
    name: str, sets: Sequence[str], own: Profile, cluster: Cluster, measured: dict[str, Calibration]
) -> tuple[list[Prediction], dict[str, str]]:
    """Every strategy with every codec that differs from the one before, in the order of preference; and why other
    strategies are impossible."""
    from configs.loader import load

    workers, refused = len(cluster.members), dict.fromkeys(("sharded", "pipeline"), "it needs 2 workers")
    refused["federated"] = "it needs data.private = true"
    found: list[Prediction] = []
    for strategy, codec in product(STRATEGIES, CODECS):
        best: Prediction | None = None
        for more in _variants(strategy, own, workers):
            settings = [*more, *[f"ring.codec={codec}"] * (codec != own.ring.codec)]
            try:
                tried = load(name, os.environ, [*sets, f"job.workers={workers}", *settings]).profile.alone()
                best = _predicted(way_of(tried, shape_here(tried), workers, settings), cluster, measured)
            except P2PTrainError as problem:
                refused[strategy] = problem.message
                continue
            if strategy not in LOCAL or best.exposed_s <= MOST_WAITING * best.compute_s:
                break
        if best and (strategy, best.step_s) not in [(one.way.strategy, one.step_s) for one in found[-1:]]:
            found.append(best)
    possible = {one.way.strategy for one in found}
    return found, {strategy: why for strategy, why in refused.items() if strategy not in possible}


def _predicted(way: Way, cluster: Cluster, measured: dict[str, Calibration]) -> Prediction:
    """A strategy that could not be measured counts as ``sync``. Raises as ``predict``."""
    return predict(way, cluster, measured.get(_like(way.strategy), measured["sync"]))


def _like(strategy: str) -> str:
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


# ----------------------------------------------------------------------------------------------------------- the output


def _print_ways(ways: Sequence[Prediction]) -> None:
    columns = ("STRATEGY", "CODEC", "TOKENS/S", "STEP", "COMPUTE", "EXCHANGE", "WAITS", "MEMORY", "SENT/STEP", "SENT/S")
    rows = []
    for one in ways:
        times = [
            human_duration(each) for each in (one.step_s, one.compute_s + one.update_s, one.exchange_s, one.exposed_s)
        ]
        sizes = [human_bytes(one.memory_bytes), human_bytes(one.sent_bytes), human_bytes(one.sent_bytes / one.step_s)]
        rows.append((one.way.strategy, one.way.codec, f"{one.tokens_per_s:,.0f}", *times, *sizes))
    print_table(columns, rows, right=columns[2:], less=("EXCHANGE", "SENT/S"))


def _reasons(best: Prediction) -> list[str]:
    """Why this way is recommended, and what it costs, in sentences."""
    strategy, codec, waits = best.way.strategy, best.way.codec, 100 * best.exposed_s / best.step_s
    bounds = "the links bound it" if best.bound == "link" else "computing bounds it"
    cost = "staleness, so the same tokens may teach less" if strategy not in EXACT else "learns as one worker would"
    loss = f"; {codec} errs by up to {100 * STATED_ERROR[codec]:.2g} % in an exchange" if codec != "fp32" else ""
    speed = f"{human_duration(best.step_s)} a step, {best.tokens_per_s:,.0f} tokens/s"
    return [
        f"recommended: {strategy} with {codec}: {speed}",
        f"why: a step waits {waits:.0f} % of its time for the network, so {bounds}",
        f"cost: {cost}{loss}",
    ]


def _show_job(job: str, seed: str, workers: int, link: str, cluster: Path | None, *, as_json: bool) -> None:
    """Show the prediction for a job beside the medians of its newest steps."""
    from configs.schema import Profile
    from p2ptrain.cli.cluster_file import read

    info, spec = ask(seed, lambda client: client.job(job))
    timed = ask(seed, lambda client: client.metrics(info.id, max(info.step - ROWS, 0), ROWS))
    size = timed[-1].members or 1 if timed else 1
    timed = [row for row in timed if row.step_ms and row.members == size]
    if len(timed) < LEAST_ROWS:
        text = f"job {info.name} has {len(timed)} measured steps, and {LEAST_ROWS} are needed"
        raise UserError(text, remedy="wait until it has trained some steps")
    if info.state not in FINISHED_STATES:
        typer.echo(f"! job {printable(info.name)} still runs: on this machine it slows down what is measured", err=True)
    profile = Profile.from_spec_untrusted(spec)
    where = workers or (read(cluster) if cluster else of_seed(seed, info.members))
    measured, members = calibrated(profile, where, [info.strategy], link or profile.link.preset, quiet=as_json)
    if len(members.members) != size:
        text = f"the newest steps of job {info.name} had {size} members, and {len(members.members)} are described"
        raise UserError(text, remedy=f"give --workers {size} (of this machine), or --cluster FILE")
    way = way_of(profile, shape_here(profile), size)
    one = _predicted(replace(way, codec=info.codec or way.codec), members, measured)
    # A server's versions come in groups, so a median of theirs tells little.
    typical = statistics.mean if info.strategy == "server" else statistics.median
    peers = [peer for peer in ask(seed, lambda client: client.peers()) if peer.id in info.members]
    memory_bytes = max((peer.memory_bytes for peer in peers), default=0)
    figures = [
        ("step_s", one.step_s, typical([(row.step_ms or 0.0) / 1e3 for row in timed]), human_duration),
        ("tokens_per_s", one.tokens_per_s, typical([row.tokens_per_s or 0.0 for row in timed]), "{:,.0f}".format),
        ("memory_bytes", one.memory_bytes, memory_bytes, human_bytes),
    ]
    known = [(*each, 100 * (each[1] / each[2] - 1)) for each in figures if each[2]]
    if as_json:
        table = {key: {"predicted": told, "measured": seen, "error_percent": off} for key, told, seen, _, off in known}
        print_json({"job": info.id, "steps": len(timed), **table})
        return
    how = f"{info.strategy} with {one.way.codec}, {size} members, {len(timed)} steps"
    typer.echo(f"job {printable(info.name)}: {how}\n")
    rows = [(key, form(told), form(seen), f"{off:+.0f} %") for key, told, seen, form, off in known]
    print_table(("", "PREDICTED", "MEASURED", "ERROR"), rows, right=("PREDICTED", "MEASURED", "ERROR"))
