"""``p2ptrain explain``: predicts what a step costs in each way to train, and recommends one (``ring.planning``)."""

from __future__ import annotations

import math
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.loader import load
from configs.schema import Profile
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.placement import plan_map, print_training_plan
from p2ptrain.cli.runtime import (
    DownloadOption,
    JsonOption,
    LinkOption,
    SeedOption,
    SetOption,
    ask,
    option,
    run,
    seed_option,
)
from p2ptrain.cluster.models import resolve_inputs, shape_of
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import human_bytes, human_duration, printable
from p2ptrain.lab.explain.predictions import STRATEGIES, calibrate, cluster_of, explain_choice, method_of, predict_all
from ring.planning.measurements import CandidateWorker, DescribedCluster
from ring.planning.prediction import Calibration, Prediction, predict, recommend
from ring.planning.workloads import ModelShape
from wire.records import FINISHED_STATES

ROWS, LEAST_ROWS = 200, 5  # newest steps that medians are taken of


def explain(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A profile that ships, or a TOML file.")] = "tiny",
    workers: Annotated[int, option("--workers -w N", "So many workers of this machine.", min=0, max=64)] = 0,
    link: LinkOption = "",
    cluster: Annotated[Path | None, option("--cluster FILE.toml", "Members and links from a file.")] = None,
    job: Annotated[str, option("--job JOB", "Show the prediction for a job of the seed beside its steps.")] = "",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    download: DownloadOption = False,
    seed: SeedOption = "",
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
    from p2ptrain.lab.explain.cluster_file import read

    if cluster is not None and (workers or link):
        raise UserError("--cluster excludes --workers and --link", remedy="leave one of them out")
    if job:
        if sets:
            raise UserError("--job has its own settings", remedy="leave --set out")
        _show_job(job, seed, workers, link, cluster, as_json=as_json)
        return
    usual = {"job.workers": (workers, f"--workers {workers}")} if workers else {}
    own = resolve_inputs(load(profile, os.environ, sets, usual).profile, download=download, quiet=as_json).alone()
    sets = [*sets, f"model.path={own.model.path}"] if own.model.path else sets  # a model that was fetched
    if workers or not (cluster or seed):
        where: int | DescribedCluster = workers or own.job.workers
        do = ["up", "--profile", profile, "--workers", str(where), *(["--link", link] if link else [])]
    else:
        where, do = read(cluster) if cluster else cluster_of_seed(seed), ["jobs", "create", "--profile", profile]
    measured, members = calibrate_here(own, where, STRATEGIES, link or own.link.preset, quiet=as_json)
    found, refused = predict_all(profile, sets, own, members, measured, shape_here)
    best = recommend(found, own.ring.error_budget)
    reasons = explain_choice(best) if best else ["nothing can be recommended: no way is possible"]
    if best:
        for setting in (*sets, *best.method.settings):
            do += ["--set", setting]
        reasons.append(f"do: p2ptrain {shlex.join(do)}{seed_option(seed) if do[0] == 'jobs' else ''}")
    if as_json:
        there = {
            "members": [_map_member(member) for member in members.members],
            "ways": [way.to_map() for way in found],
        }
        print_json({**there, "refused": refused, "recommended": best.to_map() if best else None, "reasons": reasons})
        return
    _print_ways(found)
    for strategy, why in refused.items():
        typer.echo(f"{strategy} is impossible: {printable(why)}")
    typer.echo("\n" + "\n".join(map(printable, reasons)))


def show_one(profile: Profile, where: int | DescribedCluster, link: str = "", *, as_json: bool) -> None:
    """Show the prediction for a profile as it is, for a dry run. ``where``: as for ``calibrate_here``."""
    measured, members = calibrate_here(profile, where, [profile.job.strategy], link, quiet=as_json)
    method = method_of(profile, shape_here(profile), len(members.members))
    way = predict(method, members, measured[method.strategy])
    if as_json:
        print_json(way.to_map() | (plan_map(*way.plan) if way.plan else {}))
        return
    if way.plan:
        print_training_plan(*way.plan)
        typer.echo()
    _print_ways([way])


def calibrate_here(
    profile: Profile, where: int | DescribedCluster, strategies: Sequence[str], link: str, *, quiet: bool
) -> tuple[dict[str, Calibration], DescribedCluster]:
    shape = shape_here(profile)  # fail here, not after the measurements
    return run(calibrate(profile, shape, where, strategies, link, quiet=quiet), children=True)


def cluster_of_seed(seed: str, among: Sequence[str] | None = None) -> DescribedCluster:
    """As ``cluster_of``."""
    links = ask(seed, lambda client: client.links())  # the workers measure their speed before
    return cluster_of(ask(seed, lambda client: client.peers()), links, among)


def shape_here(profile: Profile) -> ModelShape:
    """Raises ``UserError`` if the model is not on this machine, and as ``shape_of``."""
    if (shape := shape_of(profile)) is None:
        text = f"the sizes of the model at {profile.model.path} are not known here"
        raise UserError(text, remedy="run this on a machine that has it")
    return shape


def _map_member(member: CandidateWorker) -> dict[str, Any]:
    """A member for programs. A memory that is not known is 0, because JSON has no infinity."""
    names = ("id", "name", "memory_bytes", "flops", "on_host", "host", "host_flops")
    figures = {name: getattr(member, name) for name in names}
    return figures if math.isfinite(member.memory_bytes) else figures | {"memory_bytes": 0}


def _print_ways(ways: Sequence[Prediction]) -> None:
    columns = ("STRATEGY", "CODEC", "TOKENS/S", "STEP", "COMPUTE", "EXCHANGE", "WAITS", "MEMORY", "SENT/STEP", "SENT/S")
    rows = []
    for way in ways:
        times = [
            human_duration(seconds)
            for seconds in (way.step_s, way.compute_s + way.update_s, way.exchange_s, way.exposed_s)
        ]
        sizes = [human_bytes(way.memory_bytes), human_bytes(way.sent_bytes), human_bytes(way.sent_bytes / way.step_s)]
        rows.append((way.method.strategy, way.method.codec, f"{way.tokens_per_s:,.0f}", *times, *sizes))
    print_table(columns, rows, right=columns[2:], less=("EXCHANGE", "SENT/S"))


def _show_job(job: str, seed: str, workers: int, link: str, cluster: Path | None, *, as_json: bool) -> None:
    """Show the prediction for a job beside the medians of its newest steps."""
    from p2ptrain.lab.explain.cluster_file import read

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
    where = workers or (read(cluster) if cluster else cluster_of_seed(seed, info.members))
    measured, members = calibrate_here(profile, where, [info.strategy], link or profile.link.preset, quiet=as_json)
    if len(members.members) != size:
        text = f"the newest steps of job {info.name} had {size} members, and {len(members.members)} are described"
        raise UserError(text, remedy=f"give --workers {size} (of this machine), or --cluster FILE")
    method = method_of(profile, shape_here(profile), size)
    way = predict(replace(method, codec=info.codec or method.codec), members, measured[method.strategy])
    # A server's versions come in groups, so a median of theirs tells little.
    typical = statistics.mean if info.strategy == "server" else statistics.median
    peers = [peer for peer in ask(seed, lambda client: client.peers()) if peer.id in info.members]
    memory_bytes = max((peer.memory_bytes for peer in peers), default=0)
    figures = [
        ("step_s", way.step_s, typical([(row.step_ms or 0.0) / 1e3 for row in timed]), human_duration),
        ("tokens_per_s", way.tokens_per_s, typical([row.tokens_per_s or 0.0 for row in timed]), "{:,.0f}".format),
        ("memory_bytes", way.memory_bytes, memory_bytes, human_bytes),
    ]
    known = [
        (key, predicted, actual, form, 100 * (predicted / actual - 1))
        for key, predicted, actual, form in figures
        if actual
    ]
    if as_json:
        table = {
            key: {"predicted": predicted, "measured": actual, "error_percent": off}
            for key, predicted, actual, _, off in known
        }
        print_json({"job": info.id, "steps": len(timed), **table})
        return
    how = f"{info.strategy} with {way.method.codec}, {size} members, {len(timed)} steps"
    typer.echo(f"job {printable(info.name)}: {how}\n")
    rows = [(key, form(predicted), form(actual), f"{off:+.0f} %") for key, predicted, actual, form, off in known]
    print_table(("", "PREDICTED", "MEASURED", "ERROR"), rows, right=("PREDICTED", "MEASURED", "ERROR"))
