"""``p2ptrain up``: a whole cluster on this machine, which trains or holds a model.

This module has the options and what is printed. The processes are those of ``p2ptrain.cluster``: ``training_run``
trains, and serves a pair; ``split_model`` holds a model that is split over workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2ptrain.cli.output import number, print_json, print_pairs
from p2ptrain.cli.runtime import (
    HTTP_EXAMPLE,
    STATE_DEFAULT,
    WEB_EXAMPLE,
    ApiKeyOption,
    DownloadOption,
    DryRunOption,
    HttpOption,
    JsonOption,
    LinkOption,
    ProfileOption,
    SetOption,
    StragglerOption,
    WorkersOption,
    at_terminal,
    check_http,
    host_and_port,
    option_field,
    run,
    takes_options,
)
from p2ptrain.cli.text_options import CheckpointOption, DtypeOption, WeightsOption, check_dtype, newest_in
from p2ptrain.cluster.console import Console, stoppable, unless_stopped
from p2ptrain.cluster.jobs import UNSAVED, JobSummary
from p2ptrain.cluster.local_cluster import LocalCluster, own_texts, part_bytes
from p2ptrain.cluster.models import SplitOptions, config_text, load_for, resolve_inputs, shape_if_known
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.errors import EXIT_INTERRUPTED, JobFailed, StorageError, UserError
from p2ptrain.core.texts import human_seconds, size_of
from wire.emulate import preset_named

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cluster.training_run import ServedPair, TrainingPlan
    from roles.serving.chain import StageChain


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What a person gives ``up``. Each field is an option, and its help describes it."""

    profile: ProfileOption = "tiny"
    workers: WorkersOption = 2
    state: Path | None = option_field("--state DIR", f"Where everything is kept. {STATE_DEFAULT}{os.sep}up", None)
    port: int = option_field("--port PORT", "Port of the seed; 0: 7337 if it is free, else any.", 0, min=0, max=65535)
    sets: SetOption = field(default_factory=list)
    new: bool = option_field(
        "--new", "Start over: cancel an unfinished job of other settings; train a finished one again.", False
    )
    plain: bool = option_field("--plain", "Plain progress lines instead of the full-screen view.", False)
    link: LinkOption = ""
    straggler: StragglerOption = 1.0
    data: list[str] = option_field(
        "--data PATH", "The text of one worker, for each worker once, with data.private = true.", []
    )
    split: int | None = option_field(
        "--split N",
        "Do not train: split the model of --checkpoint over N workers, and keep them running.",
        None,
        min=1,
        max=63,
    )
    checkpoint: CheckpointOption = None
    spare: int = option_field("--spare K", "With --split: spare workers that replace dead ones.", 0, min=0, max=32)
    memory: str = option_field("--memory SIZE", "With --split: memory limit of each worker, such as 2GiB.", "")
    dtype: DtypeOption = ""
    weights: WeightsOption = ""
    web: str = option_field("--web HOST:PORT", "Address of the web page and the HTTP API; default: none.", "")
    http: HttpOption = ""
    api_keys: ApiKeyOption = None
    dry_run: DryRunOption = False
    download: DownloadOption = False
    as_json: JsonOption = False

    @property
    def root(self) -> Path:
        return (self.state or default_state_dir() / "up").absolute()

    @property
    def web_place(self) -> tuple[str, int] | None:
        return host_and_port("--web", self.web, WEB_EXAMPLE)

    def cluster(self) -> LocalCluster:
        return LocalCluster(self.root, self.port, web=self.web_place, announce=True)


@takes_options(UpOptions)
def up(options: UpOptions) -> None:
    """Start a whole cluster on this machine and train: a seed, and workers that form a ring.

    An unfinished job in the same --state continues where it stopped. Ctrl+C stops everything; nothing is lost.

    A profile with a [drafter], such as pair, trains two models and then serves them. `p2ptrain generate` and `p2ptrain
    chat` write with the larger one, and the smaller one drafts for it. The next start serves them at once.

    With --split the workers hold a model instead, some layers each. Use it with `p2ptrain generate --split` or
    `p2ptrain chat --split` from another terminal.

    \b
    Examples:
      p2ptrain up
      p2ptrain up --workers 4 --set job.steps=1000
      p2ptrain up --workers 4 --straggler 5
      p2ptrain up --web 127.0.0.1:8080
      p2ptrain up --profile my.toml --state ./run --plain
      p2ptrain up --set model.path=HuggingFaceTB/SmolLM2-135M --download
      p2ptrain up --profile pair --http 127.0.0.1:8000
      p2ptrain up --workers 2 --set data.private=true --data ~/letters --data ~/notes
      p2ptrain up --workers 2 --set job.strategy=pipeline --set pipeline.stages=2 --dry-run
      p2ptrain up --split 3 --spare 1 --checkpoint ./SmolLM2-135M --memory 400MiB
    """
    if options.link:
        preset_named(options.link)  # fail here, not in each worker
    _ = options.web_place
    if options.split is not None:
        _hold(options, options.split)
    else:
        _train(options)


# ------------------------------------------------------------------------------------------------------------ training


def _train(options: UpOptions) -> None:
    from p2ptrain.cluster.training_run import TrainingPlan, train

    of_split = {"checkpoint": options.checkpoint, "spare": options.spare, "memory": options.memory}
    of_split |= {"dtype": options.dtype, "weights": options.weights}
    if extra := next((name for name, value in of_split.items() if value), None):
        raise UserError(f"--{extra} works only with --split", remedy="add --split N, or leave it out")
    profile = load_for(options.workers, options.profile, options.sets)
    profile = resolve_inputs(profile, download=options.download, quiet=options.as_json)
    http = host_and_port("--http", options.http, HTTP_EXAMPLE)
    check_http(http, options.api_keys)
    if http is not None and not profile.drafter.layers:
        remedy = "choose a profile with a [drafter], such as pair, or leave it out"
        raise UserError("--http needs a verifier, and this profile trains none", remedy=remedy)
    link = options.link or profile.link.preset
    if options.dry_run:
        from p2ptrain.cli.explain import show_one

        show_one(profile, options.workers, link, as_json=options.as_json)
        return
    if profile.stages > 1:
        _check_fits(profile, options)
    plan = TrainingPlan(
        options.profile,
        profile,
        options.workers,
        options.new,
        link,
        http,
        None if options.api_keys is None else options.api_keys.absolute(),
        own_texts(profile, options.workers, options.data),
        options.straggler,
    )

    async def work() -> JobSummary | None:
        console, stop = stoppable()
        console.quiet = options.as_json
        full_screen = not options.plain and not options.as_json and at_terminal()
        show = partial(_print_pair, options)
        return await train(plan, options.cluster(), console, stop, show, full_screen=full_screen)

    outcome = run(work(), children=True)
    if outcome is not None:
        _print_outcome(outcome, plan, as_json=options.as_json)
    if outcome is not None and outcome["state"] != "done":
        codes = {"interrupted": EXIT_INTERRUPTED, UNSAVED: StorageError.exit_code}
        raise typer.Exit(codes.get(outcome["state"], JobFailed.exit_code))


def _check_fits(profile: Profile, options: UpOptions) -> None:
    """Refuse a split model that does not fit into this machine's memory. Raises ``ResourceError``."""
    from p2ptrain.lab.explain.predictions import equal_members, method_of
    from ring.planning.prediction import Calibration, predict

    shape = shape_if_known(profile, Console(quiet=options.as_json))
    if shape is not None:
        cluster = equal_members(options.workers, part_bytes(profile.device.kind) // options.workers)
        predict(method_of(profile, shape, options.workers), cluster, Calibration(1.0, 0.0, 0.0))


def _print_pair(options: UpOptions, pair: ServedPair) -> None:
    if options.as_json:
        where = {"state": "serving", "seed": pair.seed, "directory": str(options.root), "http": pair.http}
        print_json({**where, **pair.models})
        return
    rows = []
    for role, summary in sorted(pair.models.items(), reverse=True):
        loss = f"validation {number(summary['val_loss'])} nats/token"
        rows.append((role, f"job {summary['job']}, {summary['step']} steps, {loss}; {summary['checkpoint']}"))
    print_pairs(rows)
    typer.echo("\nThe models are served. From another terminal:\n")
    for command in [*pair.commands, f"p2ptrain tui {pair.seed}"]:
        typer.echo(f"  {command}")
    typer.echo("\nCtrl+C stops everything; the same command serves them again at once.")


def _print_outcome(outcome: JobSummary, plan: TrainingPlan, *, as_json: bool) -> None:
    if as_json:
        print_json(outcome)
        return
    if not plan.is_pair:
        print_summary(outcome, plan.profile.loss_unit)
        _print_next(outcome, plan.profile)
        return
    rows = [("state", outcome["state"])]
    for role, summary in outcome.items():
        if role != "state":
            reason = f": {summary['reason']}" if summary["reason"] else ""
            steps = f"step {summary['step']} of {summary['steps']}"
            rows.append((role, f"{summary['state']}{reason}; {steps}; {summary['checkpoint'] or 'no checkpoint'}"))
    print_pairs(rows)


def print_summary(summary: JobSummary, unit: str) -> None:
    """``unit``: of its losses."""
    print_pairs(
        [
            ("state", f"{summary['state']}{': ' + summary['reason'] if summary['reason'] else ''}"),
            ("step", f"{summary['step']} of {summary['steps']}"),
            ("loss", f"{number(summary['loss'])} {unit}"),
            ("validation", f"{number(summary['val_loss'])} {unit}"),
            ("training time", human_seconds(summary["seconds"])),
            ("checkpoint", summary["checkpoint"] or "none"),
        ]
    )


def _print_next(summary: JobSummary, profile: Profile) -> None:
    if summary["state"] == "interrupted":
        typer.echo("\nto go on, run the same command again")
    if not summary["checkpoint"]:
        return
    if not summary["whole"]:
        typer.echo("\nits parts are not in one directory yet: run the same command again, and the workers collect them")
    else:
        command = "chat" if profile.data.format == "chat" else "generate 'def '"
        typer.echo(f"\ntry it:  p2ptrain {command} --checkpoint {summary['checkpoint']}")
        if not profile.lora.rank:
            typer.echo(f"fine-tune it:  p2ptrain up --profile lora --set model.path={summary['checkpoint']}")


# ------------------------------------------------------------------------------------------------------- a split model


def _hold(options: UpOptions, stages: int) -> None:
    from p2ptrain.cluster.split_model import hold_model

    if options.http or options.api_keys is not None:
        raise UserError("--http needs a verifier, and --split starts none", remedy="leave one of them out")
    if options.checkpoint is None:
        raise UserError("up --split needs a model", remedy="name its directory: --checkpoint DIR")
    if options.dry_run:
        remedy = "see p2ptrain generate --split --dry-run for --split"
        raise UserError("--dry-run works only for training", remedy=remedy)
    if options.straggler > 1:
        raise UserError("--straggler works only for training", remedy="leave it out")
    if options.memory:
        size_of(options.memory, "--memory")  # fail here, not in each worker
    check_dtype(options.dtype, options.weights)
    checkpoint = newest_in(options.checkpoint, download=options.download).absolute()
    config_text(checkpoint, stages)

    async def work() -> None:
        console, stop = stoppable()
        cluster = options.cluster()
        split, workers = SplitOptions(stages, options.dtype, weights=options.weights), stages + options.spare
        show = partial(_print_held, cluster, checkpoint, options)
        limits = {"memory": options.memory, "link": options.link}
        await unless_stopped(stop, hold_model(cluster, checkpoint, split, workers, console, show, **limits))

    run(work(), children=True)


def _print_held(cluster: LocalCluster, checkpoint: Path, options: UpOptions, chain: StageChain) -> None:
    from p2ptrain.cli.placement import placement_map, print_prediction, print_split_facts, split_facts

    placement, facts, seed = chain.plan.placement, split_facts(chain), cluster.address
    if options.as_json:
        where = {"seed": seed, "state": str(cluster.root), "checkpoint": str(checkpoint), "workers": len(cluster.peers)}
        print_json({**where, "split": facts, "plan": placement_map(placement)})
        return
    print_split_facts(facts)
    print_prediction(placement)
    words = f"--split {options.split} -c {checkpoint}" + f" --dtype {options.dtype}" * bool(options.dtype)
    words += f" --weights {options.weights}" * bool(options.weights)
    words += cluster.seed_option
    typer.echo("\nThe model is loaded and stays loaded. From another terminal:\n")
    typer.echo(f'  p2ptrain generate "Once upon a time" {words}')
    typer.echo(f"  p2ptrain chat {words}")
    typer.echo(f"  p2ptrain tui {seed}\n\nCtrl+C stops everything.")
