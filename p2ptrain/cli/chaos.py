"""``p2ptrain chaos``: injects faults into a local cluster on a schedule and checks the invariants."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.output import number, print_json, print_pairs, print_table
from p2ptrain.cli.runtime import JsonOption, ProfileOption, SetOption, option, run
from p2ptrain.core.errors import EXIT_INTERRUPTED, UserError
from p2ptrain.core.texts import check_one_of, human_seconds, printable, seconds_of

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.lab.chaos.judge import Attack, ChaosReport

DURATION, ATTACK_DURATION = "60s", "24h"  # an attack lasts until the job ends
SAVE_EVERY = 20
"""Steps between two checkpoints. They are frequent because each one also compares the members' states."""


def chaos(
    workers: Annotated[int, option("--workers -w N", "Number of workers.", min=2, max=32)] = 4,
    profile: ProfileOption = "tiny",
    duration: Annotated[str, option("--duration TIME", f"How long to inject faults; default: {DURATION}.")] = "",
    faults: Annotated[
        int,
        option(
            "--faults N",
            "Instead of --duration: inject N faults, each after all workers are members again.",
            min=0,
            max=100_000,
        ),
    ] = 0,
    seed: Annotated[int, option("--random-seed N", "Seed of the random fault schedule.", min=0)] = 1,
    kinds: Annotated[
        str,
        option(
            "--kinds LIST",
            "Any of kill, freeze, cut, slow, corrupt, seed, disk; or none. Default: all, corrupt only with --tls.",
        ),
    ] = "",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    attack: Annotated[
        str,
        option(
            "--attack KIND",
            "Instead of faults, the last workers send wrong vectors: sign-flip, scale, noise, alie, label-flip.",
        ),
    ] = "",
    attackers: Annotated[int, option("--attackers N", "With --attack: number of those workers.", min=1, max=31)] = 1,
    tls: Annotated[bool, option("--tls", "Encrypt all connections, as between different machines.")] = False,
    state: Annotated[
        Path | None, option("--state DIR", "Directory for all files, new or empty; default: a temporary one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a real cluster on this machine, inject faults on a schedule, and check that it holds.

    Each worker's links run through a small proxy in this command, so that it can cut, slow and damage them. The
    recovery time is the time from a fault to the arrival of the next committed step. It includes the seed's message,
    which is at most 0.1 s late. The exit code is 1 if an invariant is violated.

    With --attack some workers send wrong vectors until the job ends. The report shows the losses, and what the job's
    robust rule made of each member. With robust.rule=mean it shows the damage.

    \b
    Examples:
      p2ptrain chaos
      p2ptrain chaos --kinds kill --faults 200
      p2ptrain chaos --kinds seed --faults 50
      p2ptrain chaos --kinds none --duration 30m --workers 8
      p2ptrain chaos --tls --duration 10m --random-seed 7
      p2ptrain chaos --attack sign-flip --profile robust --workers 7
      p2ptrain chaos --attack alie --attackers 2 --workers 11 --profile robust --set robust.byzantine=2
    """
    from p2ptrain.lab.chaos.conduct import ChaosPlan, conduct, kinds_here
    from p2ptrain.lab.chaos.judge import ChaosReport, parse_kinds

    if attack:
        from p2ptrain.lab.attacker import ATTACKS

        check_one_of("--attack", attack, ATTACKS)
        if attackers >= workers:
            raise UserError(f"--attackers {attackers}: of {workers} workers none would be honest", remedy="start more")
        kinds = kinds or "none"
    if duration and faults:
        raise UserError("--duration and --faults exclude each other", remedy="leave one of them out")
    chosen = parse_kinds(kinds, tls=tls, here=kinds_here())
    if faults and not chosen:
        raise UserError("--faults does not work with --kinds none", remedy="give --duration instead")
    loaded = _load_profile(profile, sets, workers, attacked=bool(attack))
    root = Path(tempfile.mkdtemp(prefix="p2ptrain-chaos-")) if state is None else state.absolute()
    if root.is_dir() and any(root.iterdir()):
        raise UserError(f"{root} is not empty", remedy="name another directory: a run needs an empty one")
    plan = ChaosPlan(
        profile_name=profile,
        profile=loaded,
        workers=workers,
        root=root,
        kinds=chosen,
        count=faults,
        duration_s=seconds_of(duration or (ATTACK_DURATION if attack else DURATION), "--duration"),
        seed=seed,
        tls=tls,
        attack=attack,
        attackers=attackers,
    )
    report, well = ChaosReport(workers, tls), False
    try:
        run(conduct(plan, report), children=True)
        print_json(report.to_json()) if as_json else print_report(report)
        well = not report.broken
    finally:
        if state is None and well:
            shutil.rmtree(root, ignore_errors=True)
        else:
            typer.echo(f"all files are kept in {root}", err=True)
    if report.broken:
        raise typer.Exit(1)
    if not report.complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def _load_profile(name: str, sets: list[str], workers: int, *, attacked: bool) -> Profile:
    """Load the profile, with this command's values for settings that the user did not choose."""
    from p2ptrain.cluster.models import load_for
    from p2ptrain.lab.attacker import check_attackable

    usual = {
        **({} if attacked else {"job.steps": (1_000_000, "chaos")}),  # the job must outlast the faults
        "checkpoint.every": (SAVE_EVERY, "chaos"),
        "checkpoint.keep": (4, "chaos"),
    }
    copies = f"checkpoint.copies={workers}"  # the end of the run compares the state of all workers
    made = load_for(workers, name, [*sets, copies], usual)
    if attacked:
        check_attackable(made.job)
    if made.data.private:
        raise UserError("data.private = true: all workers here read one text", remedy="--set data.private=false")
    if made.checkpoint.every == 0:
        raise UserError("checkpoint.every = 0: there would be nothing to compare", remedy=f"set it to {SAVE_EVERY}")
    return made


def print_report(report: ChaosReport) -> None:
    under = f"{len(report.injected_faults)} faults in {human_seconds(report.seconds)}"
    pairs = [("faults", under if report.complete else f"{under}, interrupted"), ("steps", str(report.steps))]
    if (goodput := report.goodput) is not None:
        text = f"{100 * goodput:.0f} %: {report.steps_per_s:.2f} of {report.baseline_steps_per_s:.2f} steps/s"
        pairs.append(("goodput", text))
    print_pairs(pairs)
    if recoveries := report.recoveries():
        typer.echo()
        rows = [[kind, *(f"{value:g}" for value in found.values())] for kind, found in recoveries.items()]
        print_table(["to the next step", "n", "p50", "p99", "max"], rows, right=["n", "p50", "p99", "max"])
    typer.echo()
    if report.attack is not None:
        _print_attack(report.attack)
        typer.echo()
    for verdict in report.verdicts:
        mark = {True: "held", False: "BROKEN", None: "not seen"}[verdict.held]
        typer.echo(printable(f"{mark:<8}  {verdict.name}" + (f": {verdict.text}" if verdict.text else "")))
    for note in report.notes:
        typer.echo(printable(f"note      {note}"))


def _print_attack(attack: Attack) -> None:
    print_pairs(
        [
            ("attack", f"{attack.kind} by {', '.join(attack.attackers)}"),
            ("loss", f"{number(attack.loss)} nats/token at step {attack.step}"),
            ("validation", f"{number(attack.val_loss)} nats/token"),
            ("attackers found", {True: "yes", False: "no", None: "the job has no robust rule"}[attack.found]),
        ]
    )
    if attack.scores:
        typer.echo()
        rows = [
            (
                name,
                "yes" if name in attack.attackers else "",
                str(score.excluded),
                str(score.steps),
                number(score.distance, ".1f"),
            )
            for name, score in attack.scores
        ]
        right = ("LEFT OUT", "STEPS", "DISTANCE")
        print_table(("MEMBER", "ATTACKS", *right), rows, right=right)
