"""``p2ptrain jobs ...``: sends a seed requests about jobs, and prints what it answers."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import deque
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import number, print_json, print_pairs, print_table
from p2ptrain.cli.runtime import (
    DownloadOption,
    DryRunOption,
    JsonOption,
    ProfileOption,
    SeedOption,
    SetOption,
    YesOption,
    ask,
    confirm,
    is_name,
    not_empty,
    option,
    run,
    seed_option,
)
from p2ptrain.cluster.access import operator
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.jobs import UNSAVED, JobObserver, JobSummary, newest_of, show_step, summarize_job, warm_up_problem
from p2ptrain.core.errors import EXIT_INTERRUPTED, JobFailed, P2PTrainError, Refused, StorageError, UserError
from p2ptrain.core.texts import human_seconds, human_time, printable
from wire.address import is_loopback
from wire.job_messages import SettingChange
from wire.records import (
    FINISHED_STATES,
    PHASES,
    CheckpointInfo,
    JobInfo,
    MetricRow,
    PeerInfo,
    RecoveryInfo,
    StagePlanInfo,
    TrainingPlanInfo,
    recovery_spread,
)

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.lab.audit import AuditResult
    from ring.planning.workloads import ModelShape

app = new_typer(help="Create, show, watch, audit, pause, resume, save, cancel and forget jobs.")


JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", callback=not_empty, help="Id of the job, the beginning of one, or its name.")
]


@app.command()
def create(
    context: typer.Context,
    profile: ProfileOption = "tiny",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    name: Annotated[str, option("--name NAME", "Name of the job; default: the profile's name.", callback=is_name)] = "",
    dry_run: DryRunOption = False,
    drafter: Annotated[
        bool, option("--drafter", "Create the job of the profile's [drafter] instead of the main model's.")
    ] = False,
    begin_from: Annotated[
        str, option("--from CHECKPOINT", "Begin with the weights of a whole checkpoint: its id, or its directory.")
    ] = "",
    keep_optimizer: Annotated[
        bool, option("--keep-optimizer", "With --from: keep the optimizer's moments, too.")
    ] = False,
    download: DownloadOption = False,
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Create a job on the seed. It starts when enough workers are ready.

    A split model (pipeline.stages) is placed on the workers by their memory, speed and links. If enough of them are
    connected, the plan is shown, and a model that does not fit is refused.

    With --from and the id of a checkpoint, the settings are those of its job, and each worker needs the checkpoint at
    the same path.

    \b
    Examples:
      p2ptrain jobs create --profile tiny
      p2ptrain jobs create --profile ./mine.toml --set optimizer.lr=1e-3 --name slower
      p2ptrain jobs create --set job.strategy=pipeline --set pipeline.stages=2 --dry-run
      p2ptrain jobs create --from 3f9a12bc04de@400@5d0c11aa90fe --keep-optimizer --set optimizer.lr=1e-4
      p2ptrain jobs create --profile pair && p2ptrain jobs create --profile pair --drafter
    """
    from configs.loader import load

    label = Path(profile).stem
    if keep_optimizer and not begin_from:
        raise UserError("--keep-optimizer is for a job that begins from a checkpoint", remedy="name it: --from")
    if begin_from:
        label, chosen = _begin_from(seed, begin_from, profile, sets, context, keep_optimizer=keep_optimizer)
    else:
        chosen = load(profile, os.environ, sets).profile
    loaded = _resolve_inputs(chosen, seed, download=download, quiet=as_json)
    name = name or (f"{label}-drafter" if drafter else label)
    has_pair = bool(loaded.drafter.layers)
    if drafter and not has_pair:
        remedy = "set drafter.layers and its sizes; `p2ptrain profiles show pair` has an example"
        raise UserError(f"the profile {label} has no drafter (drafter.layers = 0)", remedy=remedy)
    loaded = loaded.of_drafter() if drafter else loaded.alone()
    shape, plan = None, None
    if dry_run and loaded.pipeline.stages < 2:
        from p2ptrain.cli.explain import cluster_of_seed, show_one

        show_one(loaded, cluster_of_seed(seed), as_json=as_json)
        return
    if loaded.pipeline.stages > 1:
        from p2ptrain.cli.placement import describe_plan, plan_map, print_training_plan
        from p2ptrain.cluster.models import shape_if_known, shape_of

        shape = shape_of(loaded, quiet=as_json) if dry_run else shape_if_known(loaded, Console(quiet=as_json))
        plan = _plan_stages(seed, loaded, shape, dry_run=dry_run)
        if dry_run and plan is not None:
            print_json(plan_map(*plan)) if as_json else print_training_plan(*plan)
            return
        if plan is not None and not as_json:
            typer.echo(describe_plan(*plan), err=True)
    if problem := warm_up_problem(loaded):
        typer.echo(problem, err=True)
    more = {} if shape is None else {"shape": shape.to_map()}
    job = ask(seed, lambda client: client.create_job(name, label, loaded.to_spec(), **more))
    if as_json:
        print_json({"job": job} | ({} if plan is None else plan_map(*plan)))
        return
    if has_pair and not drafter:
        typer.echo("only the main model's job is created; for the drafter's job add --drafter", err=True)
    typer.echo(printable(job))
    typer.echo(f"watch it with: p2ptrain jobs watch {printable(job)}{seed_option(seed)}", err=True)


def _begin_from(
    seed: str, checkpoint: str, profile: str, sets: list[str], context: typer.Context, *, keep_optimizer: bool
) -> tuple[str, Profile]:
    """The label and the profile of a job that begins from a checkpoint. Raises ``UserError``."""
    from configs.loader import load, load_settings, read_overrides
    from configs.schema import Profile

    place = Path(checkpoint).absolute()
    model = {"model.tokenizer": "", "model.keep_optimizer": keep_optimizer}
    if place.is_dir():
        sets_of_model = [f"{key}={value}" for key, value in (model | {"model.path": place}).items()]
        return Path(profile).stem, load(profile, os.environ, [*sets, *sets_of_model]).profile
    if "DEFAULT" not in str(context.get_parameter_source("profile")):
        text = "--profile is not for --from and the id of a checkpoint: the settings are those of its job"
        raise UserError(text, remedy="leave it out, and change settings with --set; or name the checkpoint's directory")
    known = {item.id: item for item in ask(seed, lambda client: client.checkpoints())}
    if (found := known.get(checkpoint)) is None:
        text = f"{checkpoint!r} is neither a directory here nor a checkpoint of the seed"
        raise UserError(text, remedy="see p2ptrain checkpoints list")
    if found.stage is not None:
        remedy = "choose one that is whole: p2ptrain checkpoints list"
        raise UserError(f"{checkpoint} has a part of a model", remedy=remedy)
    info, spec = ask(seed, lambda client: client.job(found.job))
    tables = Profile.from_spec_untrusted(spec).model_dump()
    if tables["lora"]["rank"]:
        raise UserError(f"{checkpoint} has adapters, no whole model", remedy="first: p2ptrain checkpoints merge")
    overrides = read_overrides(sets) | model | {"model.path": found.path}
    return info.profile, load_settings(tables, overrides)


def _resolve_inputs(profile: Profile, seed: str, *, download: bool, quiet: bool) -> Profile:
    """Check data and model if all workers are on this machine. Raises ``P2PTrainError`` as ``resolve_inputs``."""
    from p2ptrain.cluster.models import resolve_inputs

    def is_elsewhere() -> bool:
        return not is_loopback(ask(seed, lambda client: client.cluster()).address.rpartition(":")[0].strip("[]"))

    if download and is_elsewhere():
        text = "--download fetches to this machine, and other machines join this seed"
        raise UserError(text, remedy="have the model at the same path on each worker, and set model.path to it")
    try:
        return resolve_inputs(profile, download=download, quiet=quiet)
    except UserError:
        if is_elsewhere():  # each worker reads its own disk
            return profile
        raise


def _plan_stages(
    seed: str, profile: Profile, shape: ModelShape | None, *, dry_run: bool
) -> tuple[TrainingPlanInfo, list[StagePlanInfo]] | None:
    """The seed's plan for a split job; None, with a printed note, if there is none yet. A dry run needs one."""
    if shape is None:
        text = f"the sizes of {profile.model.path or 'the model'} are not known here"
        if dry_run:
            raise UserError(text, remedy="run this on a machine that has it")
        typer.echo(f"no plan: {text}; the workers cut the model by its weights", err=True)
        return None
    try:
        return ask(seed, lambda client: client.plan(profile.to_spec(), shape.to_map()))
    except Refused as refusal:
        if dry_run or refusal.code != "too-few":
            raise
        typer.echo(f"no plan yet: {printable(refusal.message)}", err=True)
        return None


@app.command("list")
def list_jobs(seed: SeedOption = "", as_json: JsonOption = False) -> None:
    """Show all jobs, newest last.

    \b
    Examples:
      p2ptrain jobs list
      p2ptrain jobs list --json | jq -r '.jobs[-1].id'
    """
    found = ask(seed, lambda client: client.jobs())
    if as_json:
        print_json({"jobs": [job.to_map() for job in found]})
        return
    print_jobs(found)
    if not found:
        typer.echo("No jobs yet: p2ptrain jobs create --profile tiny", err=True)


def print_jobs(found: list[JobInfo]) -> None:
    columns = ("ID", "NAME", "STATE", "STEP", "OF", "LOSS", "VAL LOSS", "TOKENS/S", "MEMBERS", "CREATED")
    figures = ("STEP", "OF", "LOSS", "VAL LOSS", "TOKENS/S", "MEMBERS")
    less = ("CREATED", "MEMBERS", "VAL LOSS", "TOKENS/S", "OF")
    rows = []
    for job in found:
        loss, val_loss, speed = number(job.loss), number(job.val_loss), number(job.tokens_per_s, ",.0f")
        progress = (job.state, str(job.step), str(job.steps_total), loss, val_loss, speed)
        rows.append((job.id, job.name, *progress, str(len(job.members)), human_time(job.created_at)))
    print_table(columns, rows, right=figures, less=less, cut=("NAME",))


@app.command()
def show(
    job: JobArgument,
    spec: Annotated[bool, option("--spec", "Show every setting too.")] = False,
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show one job: its state and why, its progress, its profile.

    \b
    Examples:
      p2ptrain jobs show 3f9a
      p2ptrain jobs show tiny --spec
    """
    from configs.schema import Profile

    info, text = ask(seed, lambda client: client.job(job))
    profile = Profile.from_spec_untrusted(text)
    settings: dict[str, dict[str, Any]] = profile.model_dump(mode="json")
    saved = ask(seed, lambda client: client.checkpoints(info.id))
    peers = ask(seed, lambda client: client.peers()) if info.strategy == "server" else []
    pushing = [peer for peer in peers if peer.job == info.id and peer.rank]
    if as_json:
        newest = newest_of(item for item in saved if item.stage is None)
        found = {"job": info.to_map(), "checkpoint": newest.to_map() if newest else None, "spec": settings}
        print_json(found | ({"workers": [peer.to_map() for peer in pushing]} if pushing else {}))
        return
    print_pairs(
        [
            *_job_rows(info, profile.loss_unit),
            *map(_describe_pushes, pushing),
            ("checkpoint", _describe_checkpoints(saved)),
        ]
    )
    if spec:
        typer.echo()
        print_pairs(
            [(f"{table}.{key}", json.dumps(value)) for table, keys in settings.items() for key, value in keys.items()]
        )


@app.command()
def watch(job: JobArgument, seed: SeedOption = "", as_json: JsonOption = False) -> None:
    """Show the progress of a job until it ends. Ctrl+C ends only the watching.

    The exit code is 0 if the job is done, 5 if it failed or was cancelled, and 6 if it ended before its result was
    saved.

    \b
    Examples:
      p2ptrain jobs watch tiny
      p2ptrain jobs watch 3f9a --json | jq .state
    """
    from p2ptrain.cli.up import print_summary

    console = Console(quiet=as_json)
    try:
        summary, unit = run(_watch(seed, job, console))
    except KeyboardInterrupt:
        console.finish()
        again = f"p2ptrain jobs watch {printable(job)}{seed_option(seed)}"
        typer.echo(f"no longer watched; the job goes on. To watch it again: {again}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_json(summary) if as_json else print_summary(summary, unit)
    if summary["state"] != "done":
        raise typer.Exit((StorageError if summary["state"] == UNSAVED else JobFailed).exit_code)


async def _watch(seed: str, job: str, console: Console) -> tuple[JobSummary, str]:
    """Show the progress of a job until it ends; return its summary, and the unit of its losses. Raises as
    ``JobObserver.run``."""
    from configs.schema import Profile

    def on_step(row: MetricRow) -> None:
        show_step(console, row, observer.info.steps_total if observer.info else 0)

    def on_away(problem: P2PTrainError) -> None:
        console.progress(f"waiting for the seed: {problem.message}")

    observer, shown_state = JobObserver(job, on_step=on_step), ""
    async with aclosing(observer.run(partial(operator, seed), on_away)) as updates:
        async for client in updates:
            info = observer.info
            assert info is not None, "run finds the job first"
            if observer.is_finished:
                console.finish()
                summary = summarize_job(info, newest_of(await client.checkpoints(info.id)))
                profile = Profile.from_spec_untrusted((await client.job(info.id))[1])
                return summary | ({"state": UNSAVED} if observer.is_lost else {}), profile.loss_unit
            if info.state != shown_state and not console.quiet:
                shown_state, reason = info.state, f": {info.reason}" if info.reason else ""
                level = "warning" if info.state == "saving" else "info"
                console.event(level, f"job {info.name} ({info.id}) is {info.state}{reason}")
    raise AssertionError("run does not end")


@app.command()
def metrics(
    job: JobArgument,
    as_csv: Annotated[bool, option("--csv", "Write all steps as CSV, with a header line.")] = False,
    limit: Annotated[int, option("--limit N", "Only the newest N; 0: 20 in a table, else all.", min=0)] = 0,
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the loss, the validation loss, the speed and the times of each step.

    \b
    Examples:
      p2ptrain jobs metrics tiny
      p2ptrain jobs metrics tiny --csv > tiny.csv
      p2ptrain jobs metrics 3f9a --limit 100 --json | jq '.metrics[].loss'
    """
    if as_csv and as_json:
        raise UserError("--csv and --json exclude each other", remedy="leave one of them out")

    async def read() -> deque[MetricRow]:
        async with operator(seed) as client:
            info, _ = await client.job(job)
            kept: deque[MetricRow] = deque(maxlen=limit or (None if as_csv or as_json else 20))
            async for row in client.all_metrics(info.id):
                kept.append(row)
            return kept

    found = [{key: value for key, value in row.to_map().items() if key != "job"} for row in run(read())]
    if as_json:
        print_json({"metrics": found})
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*_METRICS, "wall"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    else:
        names = [key.upper().replace("_", " ") for key in _METRICS]
        rows = [tuple(number(row.get(key), form) for key, form in _METRICS.items()) for row in found]
        print_table(names, rows, right=names, less=names[:4:-1])


_METRICS = {
    "step": "d",
    "loss": ".4f",
    "val_loss": ".4f",
    "tokens_per_s": ",.0f",
    "members": "d",
    "step_ms": ".0f",
    "compute_ms": ".0f",
    "communicate_ms": ".0f",
    "wait_ms": ".0f",
    "lr": ".3g",
    "grad_norm": ".3g",
    "generation": "d",
    "epsilon": ".3f",
    "delta": ".3g",
}
"""Field of ``MetricRow``, the most important first → its format."""


def _describe_checkpoints(checkpoints: list[CheckpointInfo]) -> str:
    if (newest := newest_of(checkpoints)) is None:
        return "none"
    if newest.stage is None:
        return f"step {newest.step:,} on {newest.peer_name}: {newest.path}"
    parts = (f"{item.path} on {item.peer_name}" for item in checkpoints if item.step == newest.step)
    return f"step {newest.step:,} in parts: {', '.join(parts)}"


def _describe_ring(job: JobInfo) -> str:
    if not job.streams:
        return "none"
    text, slowest = f"{job.streams} stream{'s' if job.streams > 1 else ''}, {job.codec}", job.slowest_edge()
    if slowest is None:
        return text
    latency_ms, rate_bps = job.edges()[slowest]
    rate = f"{number(rate_bps / 1e6 if rate_bps is not None else None, '.3g')} Mbit/s"
    right = job.members[(slowest + 1) % len(job.members)]
    return f"{text}; slowest edge {job.members[slowest]} → {right}: {rate}, {number(latency_ms, '.3g')} ms"


def _describe_stages(job: JobInfo) -> str:
    if not job.cuts:
        return f"{job.stages}" + ", cut by weights" * (job.strategy == "pipeline")
    return f"{job.stages}, beginning with layers {', '.join(map(str, [0, *job.cuts]))}"


_VERSIONS = (
    "a step is a version of the first member, the server; the others hold the one that they pulled last. Versions that "
    "nobody pulled are lost if the server dies"
)


def _describe_pushes(peer: PeerInfo) -> tuple[str, str]:
    counted = f"{peer.accepted:,} gradients accepted, {peer.refused:,} refused"
    return f"from {peer.name}", f"{counted}; staleness {peer.staleness:.1f} on average, at most {peer.most_staleness}"


def _job_rows(job: JobInfo, unit: str) -> list[tuple[str, str]]:
    spent = {"compute": job.compute_ms, "communicate": job.communicate_ms, "wait": job.wait_ms}
    times = ", ".join(f"{name} {number(value, '.0f')} ms" for name, value in spent.items())
    pairs = [
        ("id", job.id),
        ("name", job.name),
        ("profile", f"{job.profile} ({job.strategy})"),
        ("state", job.state + (f": {job.reason}" if job.reason else "")),
        ("step", f"{job.step:,} of {job.steps_total:,} ({100 * job.step / max(1, job.steps_total):.1f} %)"),
        (
            "members",
            f"{len(job.members)} in generation {job.generation}: {' → '.join(map(str, job.members)) or 'none'}",
        ),
        *([("parts", _describe_stages(job))] if job.stages > 1 else []),
        *((score.peer, str(score)) for score in job.suspects()),
        *([("versions", _VERSIONS)] if job.strategy == "server" else []),
        ("ring", _describe_ring(job)),
        ("loss", f"{number(job.loss)} {unit} (validation {number(job.val_loss)})"),
        *([("privacy", f"epsilon {job.epsilon:.3f} at delta {job.delta:g}")] if job.epsilon and job.delta else []),
        ("learning rate", number(job.lr, ".3g")),
        ("gradient norm", number(job.grad_norm, ".3g")),
        ("speed", f"{number(job.tokens_per_s, ',.0f')} tokens/s, {job.tokens_total:,} tokens in all"),
        ("step time", f"{number(job.step_ms, '.0f')} ms: {times}"),
        ("training time", human_seconds(job.trained_s)),
        ("created", human_time(job.created_at)),
        *(("setting", _describe_change(item)) for item in job.changes),
    ]
    if job.started_at is not None:
        pairs.append(("started", human_time(job.started_at)))
    if job.finished_at is not None:
        pairs.append(("finished", human_time(job.finished_at)))
    return pairs


def _describe_change(item: SettingChange) -> str:
    return f"{item.key} = {item.value} from step {item.step + 1:,} on, before {item.before}"


def _add_verb(verb: str, done: str, explained: str, question: str = "") -> None:
    def tell(job: JobArgument, seed: SeedOption = "", as_json: JsonOption = False) -> None:
        answer = ask(seed, lambda client: client.tell_job(job, verb))
        print_json({"job": answer}) if as_json else typer.echo(f"job {printable(answer)} {done}")

    def ask_and_tell(
        job: JobArgument, yes: YesOption = False, seed: SeedOption = "", as_json: JsonOption = False
    ) -> None:
        confirm(question.format(job), seed, "jobs", job, yes=yes)
        tell(job, seed, as_json)

    examples = [f"p2ptrain jobs {verb} tiny", *([f"p2ptrain jobs {verb} tiny --yes"] if question else [])]
    text = "\n  ".join([f"{explained}\n\n\b\nExamples:", *examples])
    app.command(verb, help=text)(ask_and_tell if question else tell)


_add_verb("pause", "pauses at the next step", "Stop a job at the next step boundary. Its workers keep the state.")
_add_verb("resume", "goes on", "Let a paused job go on.")
_add_verb("save", "writes a checkpoint as soon as no step runs", "Write a checkpoint, after a step that runs now.")
_add_verb("cancel", "is cancelled", "End a job for good. Its checkpoints stay.", "End {} for good?")
_add_verb(
    "forget",
    "is forgotten",
    "Remove a finished job from the seed's record. Its checkpoints stay on the workers' disks.",
    "Forget {} and its metrics for good?",
)


@app.command("set")
def change(
    job: JobArgument,
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, such as optimizer.lr=1e-3.")],
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Change settings of a job that runs, at its next step boundary.

    What can change: job.steps, validation.every, checkpoint.every, and of the optimizer lr, min_lr_ratio, warmup_steps,
    schedule, decay_share, weight_decay and clip_norm. Each change is on record with its step, and applies again after
    `checkpoints restore`. A job that is done goes on with more job.steps.

    \b
    Examples:
      p2ptrain jobs set tiny optimizer.lr=1e-3
      p2ptrain jobs set tiny job.steps=2000 validation.every=100
    """
    from configs.loader import read_overrides

    values = read_overrides(settings)
    changed = ask(seed, lambda client: client.change_settings(job, values))
    if as_json:
        print_json({"job": changed, "values": values})
        return
    typer.echo(f"{printable(changed)} changes at its next step: {', '.join(settings)}")


@app.command()
def audit(job: JobArgument, seed: SeedOption = "", as_json: JsonOption = False) -> None:
    """Check that every step on record was applied once, and every sample was seen once an epoch.

    The exit code is 1 if anything is wrong; the first fault is named.

    \b
    Examples:
      p2ptrain jobs audit tiny
      p2ptrain jobs audit 3f9a --json | jq .fault
    """
    from configs.schema import Profile
    from p2ptrain.lab.audit import audit as read_and_check

    console = Console()

    async def look() -> tuple[JobInfo, AuditResult]:
        async with operator(seed) as client:
            info, text = await client.job(job)

            def progress(step: int, of: int) -> None:
                console.progress(f"step {step:,} of {of:,}", last=step == of)

            profile = Profile.from_spec_untrusted(text)
            return info, await read_and_check(client, info.id, profile, progress, info.changes)

    info, verdict = run(look())
    console.finish()
    unrecorded = max(info.step - verdict.steps, 0)
    is_wrong = verdict.fault is not None or bool(unrecorded and info.state in FINISHED_STATES)
    if as_json:
        about = {"job": info.id, "state": info.state, "unrecorded": unrecorded, "ok": not is_wrong}
        print_json(about | asdict(verdict))
    else:
        print_pairs(_audit_rows(info, verdict, unrecorded))
    if is_wrong:
        raise typer.Exit(1)


def _audit_rows(info: JobInfo, verdict: AuditResult, unrecorded: int) -> list[tuple[str, str]]:
    samples = "not compared: no worker has reported their number"
    if verdict.private:
        samples = "not compared: each worker draws them from its own text (data.private)"
    elif verdict.windows:
        samples = f"{verdict.samples:,}, each once an epoch; {verdict.epochs:,} complete epochs of {verdict.windows:,}"
    elif info.strategy == "server":
        samples = "no contribution is part of two versions, so none is seen twice in an epoch"
    lost = "are not on record (`p2ptrain logs` says if they were lost)"
    folded = f", {verdict.first_step - 1:,} older steps {lost}" if verdict.first_step > 1 else ""
    layouts = (f"{stages} from step {step:,}" for step, stages in verdict.layouts)
    shares = (f"{peer} {100 * count / verdict.total:.1f} %" for peer, count in sorted(verdict.computed.items()))
    awaited = f"{unrecorded:,} newer steps are not on record" + ("" if info.state in FINISHED_STATES else " yet")
    pairs = [
        ("job", f"{info.id} ({info.name}), {info.state}"),
        ("steps", f"{verdict.first_step:,} to {verdict.steps:,}{folded}"),
        ("rings", f"{verdict.views:,} on record: how often the ring was formed"),
        *(("setting", _describe_change(item)) for item in info.changes),
        ("lineage", f"{verdict.lineage}, a hash over all steps" if verdict.lineage else "none yet"),
        ("samples", samples),
        ("computed", ", ".join(shares) or "nothing yet"),
    ]
    pairs += [("parts", f"{', then '.join(layouts)}: a person changed the layout")] if len(verdict.layouts) > 1 else []
    pairs += [
        (f"from {peer}", f"{number:,} gradients; staleness {mean:.1f} on average, at most {most}")
        for peer, (number, mean, most) in sorted(verdict.staleness.items())
    ]
    pairs += [("unrecorded", awaited)] if unrecorded else []
    verdict_text = f"FAULT at step {verdict.fault.step:,}: {verdict.fault.text}" if verdict.fault else "ok"
    return [*pairs, ("verdict", "FAULT: " + awaited if unrecorded and info.state in FINISHED_STATES else verdict_text)]


@app.command()
def recoveries(
    job: JobArgument,
    limit: Annotated[int, option("--limit N", "Only the newest N.", min=1, max=2000)] = 20,
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show how long each interruption of training took.

    Training is interrupted when a machine joins, dies or freezes. The time is shown by phase of the recovery.

    \b
    Examples:
      p2ptrain jobs recoveries tiny
      p2ptrain jobs recoveries tiny --limit 200 --json | jq .spread_s.total
    """
    found = ask(seed, lambda client: client.recoveries(job, limit))
    spread = recovery_spread(found)
    if as_json:
        named = {name: {"p50": middle, "p99": high} for name, (middle, high) in spread.items()}
        print_json({"recoveries": [item.to_map() for item in found], "spread_s": named})
        return
    columns = ("WHEN", "WHAT", "STEP", "GEN", "MEMBERS", *(name.upper() for name in (*PHASES, "total")), "WHY")
    rows = [_recovery_row(item) for item in found]
    for title, index in (("p50", 0), ("p99", 1)):
        times = (number(spread[name][index] if name in spread else None, ".3f") for name in (*PHASES, "total"))
        rows += [(title, "", "", "", "", *times, "")] if found else []
    less = ("GEN", "MEMBERS", *(name.upper() for name in PHASES[::-1]), "STEP")
    print_table(columns, rows, right=columns[2:-1], less=less, cut=("WHY",))
    if not found:
        typer.echo("No interruption yet.", err=True)


def _recovery_row(item: RecoveryInfo) -> tuple[str, ...]:
    times = (number(value, ".3f") for value in (item.detect_s, item.agree_s, item.form_s, item.transfer_s))
    place = (human_time(item.wall), item.kind, f"{item.step:,}", str(item.generation), str(item.members))
    return (*place, *times, number(item.commit_s, ".3f"), number(item.total_s, ".3f"), item.text)
