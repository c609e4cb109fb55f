"""``p2ptrain up``: starts a seed and workers as processes on this machine, and shows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.inputs import DownloadOption, checked
from p2ptrain.cli.runtime import (
    STATE_DEFAULT,
    ApiKeyOption,
    DryRunOption,
    HttpOption,
    JsonOption,
    LinkOption,
    ProfileOption,
    SetOption,
    StragglerOption,
    WorkersOption,
    at_terminal,
    option,
    run,
)
from p2ptrain.cli.text_options import CheckpointOption, DtypeOption, check_dtype, newest_in
from p2ptrain.cluster.local_cluster import own_texts
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.errors import EXIT_INTERRUPTED, JobFailed, StorageError, UserError
from p2ptrain.core.texts import size_of

if TYPE_CHECKING:
    from configs.schema import Profile


def up(
    profile: ProfileOption = "tiny",
    workers: WorkersOption = 2,
    state: Annotated[Path | None, option("--state DIR", f"Where everything is kept. {STATE_DEFAULT}{os.sep}up")] = None,
    port: Annotated[
        int, option("--port PORT", "Port of the seed; 0: 7337 if it is free, else any.", min=0, max=65535)
    ] = 0,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    new: Annotated[
        bool, option("--new", "Start over: cancel an unfinished job of other settings; train a finished one again.")
    ] = False,
    plain: Annotated[bool, option("--plain", "Plain progress lines instead of the full-screen view.")] = False,
    link: LinkOption = "",
    straggler: StragglerOption = 1.0,
    data: Annotated[
        list[str], option("--data PATH", "The text of one worker, for each worker once, with data.private = true.")
    ] = [],  # noqa: B006 - Typer copies it
    split: Annotated[
        int | None,
        option(
            "--split N",
            "Do not train: split the model of --checkpoint over N workers, and keep them running.",
            min=1,
            max=63,
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    spare: Annotated[
        int, option("--spare K", "With --split: spare workers that replace dead ones.", min=0, max=32)
    ] = 0,
    memory: Annotated[str, option("--memory SIZE", "With --split: memory limit of each worker, such as 2GiB.")] = "",
    dtype: DtypeOption = "",
    web: Annotated[str, option("--web HOST:PORT", "Address of the web page and the HTTP API; default: none.")] = "",
    http: HttpOption = "",
    api_keys: ApiKeyOption = None,
    dry_run: DryRunOption = False,
    download: DownloadOption = False,
    as_json: JsonOption = False,
) -> None:
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
    from p2ptrain.cli.model_sizes import config_text
    from p2ptrain.cli.runtime import host_and_port
    from p2ptrain.cli.up_cluster import SplitPlan, TrainingPlan, hold, http_place, train
    from wire.emulate import preset_named

    if link:
        preset_named(link)  # fail here, not in each worker
    host_and_port("--web", web, "such as 127.0.0.1:8080, where a browser reaches it")
    root = (state or default_state_dir() / "up").absolute()
    if split is not None:
        if http or api_keys is not None:
            raise UserError("--http needs a verifier, and --split starts none", remedy="leave one of them out")
        if checkpoint is None:
            raise UserError("up --split needs a model", remedy="name its directory: --checkpoint DIR")
        if dry_run:
            remedy = "see p2ptrain generate --split --dry-run for --split"
            raise UserError("--dry-run works only for training", remedy=remedy)
        if straggler > 1:
            raise UserError("--straggler works only for training", remedy="leave it out")
        if memory:
            size_of(memory)  # fail here, not in each worker
        check_dtype(dtype)
        checkpoint = newest_in(checkpoint, download=download).absolute()
        config_text(checkpoint, split)  # fail here
        split_plan = SplitPlan(split, spare, checkpoint, memory, dtype, root, port, link, web)
        run(hold(split_plan, as_json=as_json), children=True)
        return
    split_options = {
        "checkpoint": checkpoint is not None,
        "spare": spare > 0,
        "memory": bool(memory),
        "dtype": bool(dtype),
    }
    if extra := next((name for name, value in split_options.items() if value), None):
        raise UserError(f"--{extra} works only with --split", remedy="add --split N, or leave it out")
    loaded = checked(_profile(profile, sets, workers), download=download)
    place, keys = http_place(http, api_keys, loaded), None if api_keys is None else api_keys.absolute()
    if dry_run:
        from p2ptrain.cli.explain import show_one

        show_one(loaded, workers, link or loaded.link.preset, as_json=as_json)
        return
    if loaded.stages > 1:
        _check_fits(loaded, workers)
    texts = own_texts(loaded, workers, data)
    plan = TrainingPlan(
        profile, loaded, workers, root, port, new, link or loaded.link.preset, place, keys, texts, straggler, web
    )
    full_screen = not plain and not as_json and at_terminal()
    from p2ptrain.cli.output import print_json
    from p2ptrain.cli.watch import UNSAVED

    outcome = run(train(plan, full_screen=full_screen, as_json=as_json), children=True)
    if outcome is None:
        return
    if as_json:
        print_json(outcome)
    elif plan.is_pair:
        _print_pair(outcome)
    else:
        print_summary(outcome)
        _print_next(outcome, loaded)
    if outcome["state"] != "done":
        codes = {"interrupted": EXIT_INTERRUPTED, UNSAVED: StorageError.exit_code}
        raise typer.Exit(codes.get(outcome["state"], JobFailed.exit_code))


def _profile(name: str, sets: list[str], workers: int) -> Profile:
    """Load the profile for this number of workers: the job begins with all of them, unless the user's own settings say
    that fewer are enough. A job that needs more of them would wait for ever."""
    from configs.loader import load

    loaded = load(name, os.environ, sets, {"job.workers": (workers, f"--workers {workers}")})
    wanted, source = loaded.profile.job.workers, loaded.sources["job.workers"]
    if wanted <= workers:
        return loaded.profile
    raise UserError(
        f"{source}: the job needs {wanted} workers to begin, and {workers} would be started",
        remedy=f"give --workers {wanted}, or --set job.workers={workers}",
    )


def _check_fits(profile: Profile, workers: int) -> None:
    """Refuse a split model that does not fit into this machine's memory. Raises ``ResourceError``."""
    from p2ptrain.cli.model_sizes import shape_of
    from p2ptrain.cluster.local_cluster import part_bytes
    from p2ptrain.lab.explain.predictions import equal_members, method_of
    from ring.planning.prediction import Calibration, predict

    shape = shape_of(profile, lambda _: None)
    if shape is not None:  # else ``create_job`` says why
        cluster = equal_members(workers, part_bytes(profile.device.kind) // workers)
        predict(method_of(profile, shape, workers), cluster, Calibration(1.0, 0.0, 0.0))


def _print_pair(outcome: dict[str, Any]) -> None:
    from p2ptrain.cli.output import print_pairs
    from p2ptrain.cli.up_cluster import DRAFTER, VERIFIER

    rows = [("state", outcome["state"])]
    for role in (DRAFTER, VERIFIER):
        if (summary := outcome.get(role)) is not None:
            reason = f": {summary['reason']}" if summary["reason"] else ""
            steps = f"step {summary['step']} of {summary['steps']}"
            rows.append((role, f"{summary['state']}{reason}; {steps}; {summary['checkpoint'] or 'no checkpoint'}"))
    print_pairs(rows)


def print_summary(summary: dict[str, Any]) -> None:
    from p2ptrain.cli.output import number, print_pairs
    from p2ptrain.core.texts import human_seconds

    pairs = [
        ("state", f"{summary['state']}{': ' + summary['reason'] if summary['reason'] else ''}"),
        ("step", f"{summary['step']} of {summary['steps']}"),
        ("loss", f"{number(summary['loss'])} nats/token"),
        ("validation", f"{number(summary['val_loss'])} nats/token"),
        ("training time", human_seconds(summary["seconds"])),
        ("checkpoint", summary["checkpoint"] or "none"),
    ]
    print_pairs(pairs)


def _print_next(summary: dict[str, Any], profile: Profile) -> None:
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
