"""``p2ptrain jobs ...``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.lazy import new_typer
from p2ptrain.cli.output import (
    checked,
    confirm,
    human_seconds,
    human_time,
    number,
    print_json,
    print_pairs,
    print_table,
    printable,
)
from p2ptrain.cli.runtime import (
    DEFAULT_SEED,
    JsonOption,
    ProfileOption,
    SeedOption,
    SetOption,
    YesOption,
    ask,
    is_name,
    not_empty,
)

if TYPE_CHECKING:
    from wire.records import JobInfo

app = new_typer(help="Create, show, pause, resume, save, cancel and forget jobs.")

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", callback=not_empty, help="Id of the job, the beginning of one, or its name.")
]


@app.command()
def create(
    profile: ProfileOption = "tiny",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    name: Annotated[
        str,
        typer.Option(
            "--name", metavar="NAME", callback=is_name, help="What to call it; the profile's name if not given."
        ),
    ] = "",
    seed: SeedOption = DEFAULT_SEED,
    as_json: JsonOption = False,
) -> None:
    """Hand a new job to the seed. It starts when enough workers are ready.

    \b
    Examples:
      p2ptrain jobs create --profile tiny
      p2ptrain jobs create --profile ./mine.toml --set optimizer.lr=1e-3 --name slower
    """
    from pathlib import Path

    from configs.loader import load

    loaded = load(profile, os.environ, sets)
    label = Path(profile).stem
    answer = ask(seed, "jobs.create", name=name or label, profile=label, spec=loaded.profile.to_spec())
    job = checked(answer, "job", str)
    print_json({"job": job}) if as_json else typer.echo(printable(job))


@app.command("list")
def list_jobs(seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Show all jobs, newest last.

    \b
    Examples:
      p2ptrain jobs list
      p2ptrain jobs list --json | jq -r '.jobs[-1].id'
    """
    from wire.records import JobInfo

    found = [JobInfo.from_map_untrusted(item) for item in checked(ask(seed, "jobs.list"), "jobs", list)]
    if as_json:
        print_json({"jobs": [job.to_map() for job in found]})
        return
    columns = ("ID", "NAME", "STATE", "STEP", "OF", "LOSS", "VAL LOSS", "TOKENS/S", "MEMBERS", "CREATED")
    print_table(columns, [_row(job) for job in found], right=("STEP", "OF", "LOSS", "VAL LOSS", "TOKENS/S", "MEMBERS"))
    if not found:
        typer.echo("No jobs yet: p2ptrain jobs create --profile tiny", err=True)


def _row(job: JobInfo) -> tuple[str, ...]:
    return (
        job.id,
        job.name,
        job.state,
        str(job.step),
        str(job.steps_total),
        number(job.loss),
        number(job.val_loss),
        number(job.tokens_per_s, ",.0f"),
        str(len(job.members)),
        human_time(job.created_at),
    )


@app.command()
def show(
    job: JobArgument,
    spec: Annotated[bool, typer.Option("--spec", help="Show every setting too.")] = False,
    seed: SeedOption = DEFAULT_SEED,
    as_json: JsonOption = False,
) -> None:
    """Show one job: its state and why, its progress, and what it was made from.

    \b
    Examples:
      p2ptrain jobs show 3f9a
      p2ptrain jobs show tiny --spec
    """
    from wire.records import JobInfo

    answer = ask(seed, "jobs.show", job=job)
    info = JobInfo.from_map_untrusted(checked(answer, "job", dict))
    settings = _settings(answer)
    if as_json:
        print_json({"job": info.to_map(), "spec": settings})
        return
    print_pairs(_pairs(info))
    if spec:
        typer.echo()
        print_pairs(
            [(f"{table}.{key}", json.dumps(value)) for table, keys in settings.items() for key, value in keys.items()]
        )


def _settings(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The profile in a ``jobs.show`` answer, checked against the schema: as JSON text or as a map."""
    from configs.schema import Profile

    spec = answer.get("spec")
    text = spec if isinstance(spec, str) else json.dumps(spec)
    settings: dict[str, dict[str, Any]] = Profile.from_spec_untrusted(text).model_dump(mode="json")
    return settings


def _ring(job: JobInfo) -> str:
    """How gradients travel in the present ring, and where they travel slowest."""
    if not job.streams:
        return "none"
    text, slowest = f"{job.streams} stream{'s' if job.streams > 1 else ''}, {job.codec}", job.slowest_edge()
    if slowest is None:
        return text
    latency_ms, rate_bps = job.edges()[slowest]
    rate = f"{number(rate_bps / 1e6 if rate_bps is not None else None, '.3g')} Mbit/s"
    right = job.members[(slowest + 1) % len(job.members)]
    return f"{text}; slowest edge {job.members[slowest]} → {right}: {rate}, {number(latency_ms, '.3g')} ms"


def _pairs(job: JobInfo) -> list[tuple[str, str]]:
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
        ("ring", _ring(job)),
        ("loss", f"{number(job.loss)} nats/token (validation {number(job.val_loss)})"),
        ("learning rate", number(job.lr, ".3g")),
        ("gradient norm", number(job.grad_norm, ".3g")),
        ("speed", f"{number(job.tokens_per_s, ',.0f')} tokens/s, {job.tokens_total:,} tokens in all"),
        ("step time", f"{number(job.step_ms, '.0f')} ms: " + ", ".join(_parts(job))),
        ("created", human_time(job.created_at)),
    ]
    if job.started_at is not None:
        pairs.append(("started", human_time(job.started_at)))
    if job.finished_at is not None:
        pairs.append(("finished", human_time(job.finished_at)))
        if job.started_at is not None:
            pairs.append(("took", human_seconds(job.finished_at - job.started_at)))
    return pairs


def _parts(job: JobInfo) -> list[str]:
    parts = {"compute": job.compute_ms, "communicate": job.communicate_ms, "wait": job.wait_ms}
    return [f"{name} {number(value, '.0f')} ms" for name, value in parts.items()]


@app.command()
def pause(job: JobArgument, seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Stop a job at the next step boundary. Its workers keep the state.

    \b
    Example:
      p2ptrain jobs pause tiny
    """
    _command(seed, "pause", job, "pauses at the next step", as_json=as_json)


@app.command()
def resume(job: JobArgument, seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Let a paused job go on.

    \b
    Example:
      p2ptrain jobs resume tiny
    """
    _command(seed, "resume", job, "goes on", as_json=as_json)


@app.command()
def save(job: JobArgument, seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False) -> None:
    """Write a checkpoint after the step that runs now.

    \b
    Example:
      p2ptrain jobs save tiny
    """
    _command(seed, "save", job, "writes a checkpoint after this step", as_json=as_json)


@app.command()
def cancel(
    job: JobArgument, yes: YesOption = False, seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False
) -> None:
    """End a job for good. Its checkpoints stay.

    \b
    Examples:
      p2ptrain jobs cancel tiny
      p2ptrain jobs cancel tiny --yes
    """
    confirm(f"End {job} for good?", yes=yes)
    _command(seed, "cancel", job, "is cancelled", as_json=as_json)


@app.command()
def forget(
    job: JobArgument, yes: YesOption = False, seed: SeedOption = DEFAULT_SEED, as_json: JsonOption = False
) -> None:
    """Remove a job that is over from the seed's record. Its checkpoints stay on the workers' disks.

    \b
    Examples:
      p2ptrain jobs forget tiny
      p2ptrain jobs forget 3f9a --yes
    """
    confirm(f"Forget {job} and its metrics for good?", yes=yes)
    _command(seed, "forget", job, "is forgotten", as_json=as_json)


def _command(seed: str, verb: str, job: str, done: str, *, as_json: bool) -> None:
    answer = checked(ask(seed, f"jobs.{verb}", job=job), "job", str)
    print_json({"job": answer}) if as_json else typer.echo(f"job {printable(answer)} {done}")
