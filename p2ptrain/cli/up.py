"""``p2ptrain up``: a seed and workers on this machine, as processes of their own, and a view of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.children import Child, end_all, start_seed_process, until_it_listens
from p2ptrain.cli.runtime import (
    DEFAULT_PORT,
    STATE_DEFAULT,
    JsonOption,
    ProfileOption,
    SetOption,
    at_terminal,
    default_state_dir,
    operator_name,
    run,
)
from p2ptrain.cli.split_options import DtypeOption
from p2ptrain.cli.text_options import CheckpointOption
from p2ptrain.cli.up_jobs import Watcher, job_for, unfinished
from p2ptrain.cli.up_view import View
from p2ptrain.core.errors import EXIT_INTERRUPTED, JobFailed, UserError

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.up_pair import HttpWish


def up(
    profile: ProfileOption = "tiny",
    workers: Annotated[
        int, typer.Option("--workers", "-n", metavar="N", min=1, max=64, help="How many workers to start.")
    ] = 2,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help=f"Where everything is kept. {STATE_DEFAULT}")
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="PORT", min=0, max=65535, help="Port of the seed; 0: 7337 if it is free, else any."
        ),
    ] = 0,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    new: Annotated[
        bool,
        typer.Option(
            "--new", help="Begin afresh: cancel an unfinished job of other settings; train a pair that is trained."
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain progress lines instead of the full-screen view.")
    ] = False,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="PRESET",
            help="Emulate a link between the workers: lan, wifi, metro, wan, transcontinental, satellite, lossy; "
            "default: the profile's.",
        ),
    ] = "",
    split: Annotated[
        int | None,
        typer.Option(
            "--split",
            metavar="N",
            min=1,
            max=63,
            help="Train nothing: start N workers that hold the model of --checkpoint between them, and stay.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    spare: Annotated[
        int,
        typer.Option("--spare", metavar="K", min=0, max=32, help="With --split: K workers more, for when one dies."),
    ] = 0,
    memory: Annotated[
        str,
        typer.Option("--memory", metavar="SIZE", help="With --split: what each worker may hold of a model, as 2GiB."),
    ] = "",
    dtype: DtypeOption = "",
    http: Annotated[
        str,
        typer.Option(
            "--http", metavar="HOST:PORT", help="With a profile of a pair: the verifier answers the OpenAI API there."
        ),
    ] = "",
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="With --http: the file that holds the key to it."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Start nothing: show which layers of a split model each worker would train."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a whole cluster on this machine and train: a seed, and workers that form a ring.

    An unfinished job in the same --state is taken up where it was. Ctrl+C stops everything; nothing is lost.

    A profile with a [drafter], such as pair, trains two models and then serves them: `p2ptrain generate` and
    `p2ptrain chat` write with the larger one, for which the smaller one drafts. The next start serves at once.

    With --split the workers hold a model instead, some layers each, and `p2ptrain generate --split` and
    `p2ptrain chat --split` use it from another terminal.

    \b
    Examples:
      p2ptrain up
      p2ptrain up --workers 4 --set job.steps=1000
      p2ptrain up --profile my.toml --state ./run --plain
      p2ptrain up --profile pair --http 127.0.0.1:8000
      p2ptrain up --workers 2 --set job.strategy=pipeline --set pipeline.stages=2 --dry-run
      p2ptrain up --split 3 --spare 1 --checkpoint ./SmolLM2-135M --memory 400MiB
    """
    from p2ptrain.cli.up_pair import http_wish
    from p2ptrain.cli.up_split import check_split
    from wire.shaper import preset_named

    if link:
        preset_named(link)  # refused here: each worker would only end
    if split is not None and (http or api_keys is not None):
        raise UserError("--http is answered by a verifier, and --split starts none", remedy="leave one of them out")
    check_split(split, checkpoint, spare=spare > 0, memory=bool(memory), dtype=bool(dtype))
    root = (state or default_state_dir() / "up").absolute()
    if split is not None and checkpoint is not None:
        _stay(split, spare, checkpoint, memory, dtype, root, port, link, as_json)
        return
    if dry_run and split is not None:
        raise UserError("--dry-run is of a training", remedy="see p2ptrain generate --split --dry-run for --split")
    loaded = _profile(profile, sets, workers)
    endpoint = http_wish(http, api_keys, loaded)
    if dry_run or loaded.stages > 1:
        _plan_here(loaded, workers, link or loaded.link.preset, dry_run=dry_run, as_json=as_json)
        if dry_run:
            return
    plan = Plan(
        profile_name=profile,
        profile=loaded,
        workers=workers,
        root=root,
        port=port or _usual_port(),
        new=new,
        link=link or loaded.link.preset,
    )
    full_screen = not plain and not as_json and at_terminal()
    if loaded.drafter.layers:
        _pair(plan, endpoint, full_screen=full_screen, as_json=as_json)
        return
    summary = run(_cluster(plan, full_screen=full_screen), children=True)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print_summary(summary, plan.root)
    _leave(summary["state"])


def _pair(plan: Plan, http: HttpWish | None, *, full_screen: bool, as_json: bool) -> None:
    from p2ptrain.cli.output import print_json
    from p2ptrain.cli.up_pair import pair, print_outcome

    outcome = run(pair(plan, http, full_screen=full_screen, as_json=as_json), children=True)
    if outcome is not None:
        print_json(outcome) if as_json else print_outcome(outcome)
        _leave(outcome["state"])


def _leave(state: str) -> None:
    """With the exit code that says how it ended."""
    if state != "done":
        raise typer.Exit(EXIT_INTERRUPTED if state == "interrupted" else JobFailed.exit_code)


def _stay(
    split: int, spare: int, checkpoint: Path, memory: str, dtype: str, root: Path, port: int, link: str, as_json: bool
) -> None:
    from p2ptrain.cli.sizes import size_of
    from p2ptrain.cli.split_options import split_wish
    from p2ptrain.cli.text_options import newest_in
    from p2ptrain.cli.up_split import SplitCluster, check_layers, stay

    if memory:
        size_of(memory)  # refused here: each worker would only end
    split_wish(split, dtype, "", 0)
    directory = newest_in(checkpoint).absolute()
    check_layers(directory, split)
    cluster = SplitCluster(split, spare, directory, memory, dtype, root, port or _usual_port(), link)
    run(stay(cluster, as_json=as_json), children=True)


def _profile(name: str, sets: list[str], workers: int) -> Profile:
    """The profile for this many workers. A job that begins with more of them would wait for ever.

    Raises:
        ConfigError, UserError: it is wrong, or the person asked for a job that begins with more.
    """
    from configs.loader import is_shipped, load

    loaded = load(name, os.environ, sets)
    wanted, source = loaded.profile.job.workers, loaded.sources["job.workers"]
    if workers >= wanted:
        return loaded.profile
    stages = loaded.profile.stages
    if workers < stages:
        text = f"the model is in {stages} parts, each for a worker of its own, and {workers} would be started"
        raise UserError(text, remedy=f"give --workers {stages}, or set fewer pipeline.stages")
    if is_shipped(source):
        return load(name, os.environ, [*sets, f"job.workers={workers}"]).profile
    raise UserError(
        f"{source}: the job begins with {wanted} workers, and {workers} would be started",
        remedy=f"give --workers {wanted}, or --set job.workers={workers}",
    )


def _plan_here(profile: Profile, workers: int, link: str, *, dry_run: bool, as_json: bool) -> None:
    """Refuse a split model that does not fit the memory of this machine, divided; show the plan in a dry run.

    Raises:
        UserError: a dry run of a model that is not split, or whose sizes are not known.
        ResourceError: it does not fit, with the numbers.
    """
    from p2ptrain.cli.output import print_json
    from p2ptrain.cli.training_plan import local_plan, print_plan, to_json

    if profile.stages < 2:
        raise UserError(
            "the model of this job is not split: every worker trains all of it, and there is nothing to place",
            remedy="leave --dry-run out, or set job.strategy=pipeline and pipeline.stages",
        )
    flops = 0.0
    if dry_run:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the workers have it
        from p2ptrain.compute.speed import compute_flops

        cores = os.cpu_count() or 1
        threads = profile.device.threads or max(1, cores // workers)
        # Measured alone: workers that have fewer cores than threads between them share them.
        flops = compute_flops(profile.device.kind, threads) * min(1.0, cores / (threads * workers))
    each_bytes = part_bytes(profile.device.kind) // workers
    made = local_plan(profile, workers=workers, memory_bytes=each_bytes, flops=flops, link=link)
    if made is None and dry_run:
        raise UserError(f"the sizes of the model at {profile.model.path} are not known: it is not here")
    if made is not None and dry_run:
        print_json(to_json(*made)) if as_json else print_plan(*made)


@dataclass(frozen=True, slots=True)
class Plan:
    profile_name: str
    profile: Profile
    workers: int
    root: Path
    port: int
    new: bool
    link: str


async def _cluster(plan: Plan, *, full_screen: bool) -> dict[str, Any]:
    from p2ptrain.cli.stopping import LEAVING, stoppable
    from wire.client import SeedClient
    from wire.transport import TcpNetwork

    (console, stop), children = stoppable(), list[Child]()
    try:
        seed = await start_seed(plan)
        children.append(seed)
        client = await SeedClient.connect(TcpNetwork(), "127.0.0.1", plan.port, name=operator_name())
        found = await unfinished(client, [plan.profile.to_spec()], plan.root, cancel=plan.new)
        job = await job_for(client, Path(plan.profile_name).stem, plan.profile_name, plan.profile, found, console)
        for number in range(1, plan.workers + 1):
            children.append(await start_worker(plan, number))
        console.event("info", workers_start(plan))
        watcher = Watcher(client, {job: ""}, children, console, quiet=full_screen)
        watching = asyncio.create_task(watcher.run(), name="watch")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            if full_screen:
                if await View(plan.port).show(watching):
                    console.event("info", LEAVING)
                    stop.set()
                else:
                    console.event("info", "the view is closed; training goes on here. Ctrl+C stops everything")
                watcher.quiet = False
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            stopping.cancel()
            console.finish()
        interrupted = stop.is_set()
        await end_all(children[1:])  # before the seed, so that it hears what they saved on leaving
        summary = await watcher.summary(job, interrupted=interrupted)
        await client.close()
        return summary
    finally:
        await end_all(children[1:])
        await end_all(children[:1])


def workers_start(plan: Plan) -> str:
    """What is said when they do."""
    said = f"worker{'s start' if plan.workers > 1 else ' starts'}"
    return f"{plan.workers} {said}; logs are in {plan.root / 'logs'}"


async def start_seed(plan: Plan) -> Child:
    """Returns when it listens. Raises ``JobFailed``, ``StorageError``."""
    child = await start_seed_process(plan.root, plan.port)
    await until_it_listens(child)
    return child


def part_bytes(device: str) -> int:
    """What the workers of this machine may give to parts of split models, all together."""
    from roles.gauges import free_memory_bytes
    from roles.worker.build import FREE_SHARE

    return int(FREE_SHARE * free_memory_bytes(device))


async def start_worker(plan: Plan, number: int) -> Child:
    """Worker ``number``, from 1; it joins in its own time. Raises ``StorageError``."""
    threads = plan.profile.device.threads or max(1, (os.cpu_count() or 1) // plan.workers)
    arguments = ["join", f"127.0.0.1:{plan.port}", "--state", str(plan.root), "--slot", str(number)]
    arguments += ["--name", f"worker-{number}", "--threads", str(threads)]
    arguments += ["--memory", str(part_bytes(plan.profile.device.kind) // plan.workers)]
    if plan.link:
        arguments += ["--link", plan.link]
    return await Child.start(f"worker-{number}", arguments, plan.root / "logs" / f"worker-{number}.log")


def _print_summary(summary: dict[str, Any], root: Path) -> None:
    from p2ptrain.cli.output import human_seconds, number, print_pairs

    pairs = [
        ("state", f"{summary['state']}{': ' + summary['reason'] if summary['reason'] else ''}"),
        ("step", f"{summary['step']} of {summary['steps']}"),
        ("loss", f"{number(summary['loss'])} nats/token"),
        ("validation", f"{number(summary['val_loss'])} nats/token"),
        ("time", human_seconds(summary["seconds"])),
        ("checkpoint", summary["checkpoint"] or "none"),
    ]
    print_pairs(pairs)
    if not summary["checkpoint"]:
        return
    if not summary["whole"]:
        model = root / "models" / summary["job"]
        typer.echo(f"\none model of its parts:  p2ptrain checkpoints gather {root} --job {summary['job']} --to {model}")
        typer.echo(f"then try it:  p2ptrain generate 'def ' --checkpoint {model}")
    else:
        typer.echo(f"\ntry it:  p2ptrain generate 'def ' --checkpoint {summary['checkpoint']}")


def _usual_port() -> int:
    """7337 where it is free, so that `p2ptrain tui` finds the cluster; else any free port."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            if sys.platform != "win32":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError("no free port on this machine", remedy="name one with --port")
