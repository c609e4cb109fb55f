"""``p2ptrain sim``: simulates whole clusters on virtual time, with seeded faults."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import JsonOption, option
from p2ptrain.cluster.console import PLAIN_S, Console
from p2ptrain.core.errors import EXIT_INTERRUPTED, UserError
from p2ptrain.core.texts import check_one_of, human_seconds

if TYPE_CHECKING:
    from p2ptrain.lab.sim.run import SimulationResult, Summary

VIOLATED = 1
STRATEGIES = ("sync", "local", "federated", "private", "server")


def sim(
    workers: Annotated[
        int, option("--workers -w N", "Number of workers; 0: 2 to 16, set by the schedule.", min=0, max=1000)
    ] = 0,
    schedules: Annotated[int, option("--schedules N", "Number of fault schedules.", min=1)] = 100,
    random_seed: Annotated[int, option("--random-seed N", "Number of the first schedule; -1: any.", min=-1)] = -1,
    stages: Annotated[int, option("--stages N", "Parts of the model; 1: not split.", min=1, max=8)] = 1,
    strategy: Annotated[
        str, option("--strategy NAME", f"Of a model that is not split: {', '.join(STRATEGIES)}.")
    ] = "sync",
    rule: Annotated[str, option("--rule NAME", "Robust rule of a model that is not split; one worker attacks.")] = "",
    faults: Annotated[str, option("--kinds LIST", "Kinds of faults; default: all.")] = "",
    processes: Annotated[int, option("--processes N", "Processes to use.", min=1, max=64)] = 1,
    timeline: Annotated[bool, option("--timeline", "Show what happened, moment by moment.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run simulated clusters under faults and check what must always be true.

    Real seeds and workers run on virtual time, in memory. A number decides which machines are killed, frozen or cut
    off, lose power, fill their disks, or lie. The same number gives the same run. The exit code is 1 if a check fails;
    then the command line that replays it is shown.

    \b
    Examples:
      p2ptrain sim --schedules 1000 --processes 2
      p2ptrain sim --schedules 1 --random-seed 17 --timeline
      p2ptrain sim --rule multi_krum --schedules 20
    """
    from configs.schema import Robust, RobustRule
    from p2ptrain.lab.sim.faults import KINDS, KINDS_OF_PARTS
    from p2ptrain.lab.sim.run import Summary, run_batch

    check_one_of("--strategy", strategy, list(STRATEGIES))
    if stages > 1 and strategy != "sync":
        raise UserError(f"--strategy {strategy} cannot have --stages {stages}", remedy="leave one of them out")
    if rule:
        check_one_of("--rule", rule, get_args(RobustRule)[1:])
    if rule and strategy in ("private", "server"):
        raise UserError(f"--rule {rule} cannot have --strategy {strategy}", remedy="leave one of them out")
    if rule and (stages > 1 or 0 < workers < (least := Robust(rule=cast(RobustRule, rule), byzantine=1).least)):
        what = f"--stages {stages}" if stages > 1 else f"--workers {workers}"
        remedy = "leave one of them out" + f", or give --workers {least}" * (stages == 1)
        raise UserError(f"--rule {rule} cannot have {what}", remedy=remedy)
    kinds = tuple(name.strip() for name in faults.split(",") if name.strip())
    for name in kinds:
        check_one_of("--kinds", name, [*KINDS, *(KINDS_OF_PARTS if stages > 1 else ())])
    first = secrets.randbelow(1 << 31) if random_seed < 0 else random_seed
    if not as_json:
        typer.echo(f"schedules {first} to {first + schedules - 1}")
    options: dict[str, Any] = {"peers": workers, "kinds": kinds, "stages": stages, "strategy": strategy, "rule": rule}
    console = Console()

    def show(verdict: SimulationResult) -> None:
        if timeline and not as_json:
            typer.echo(f"schedule {verdict.number}, {verdict.peers} machines, fingerprint {verdict.fingerprint}")
            for at_s, text in verdict.timeline:
                typer.echo(f"{at_s:10.3f} s  {text}")
            typer.echo(verdict.text or "everything holds")
        else:
            left_s = (schedules - summary.schedules) * summary.real_s / summary.schedules
            text = f"{summary.schedules}/{schedules}, {human_seconds(left_s)} left"
            console.progress(f"{text}, {len(summary.violations)} violations", every_s=PLAIN_S)

    summary, interrupted, began = Summary(), False, time.perf_counter()
    try:
        for verdict in run_batch(range(first, first + schedules), jobs=processes, verbose=timeline, **options):
            summary.add(verdict)
            summary.real_s = time.perf_counter() - began
            show(verdict)
    except KeyboardInterrupt:
        interrupted = True
    console.clear()
    _report(summary, options, as_json=as_json)
    if interrupted:
        typer.echo(f"interrupted after {summary.schedules} of {schedules} schedules", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if summary.violations:
        raise typer.Exit(VIOLATED)


def _report(summary: Summary, options: dict[str, Any], *, as_json: bool) -> None:
    from p2ptrain.lab.sim.run import replay

    lines = [replay(verdict, **options) for verdict in summary.violations]
    if as_json:
        found = [
            {"number": verdict.number, "violated": verdict.violated, "text": verdict.text, "replay": line}
            for verdict, line in zip(summary.violations, lines, strict=True)
        ]
        values = {name: value for name, value in vars(summary).items() if name != "violations"}
        print_json({**values, "violations": found})
        return
    broken = {verdict.violated for verdict in summary.violations}
    rows = [(name, f"{summary.checks[name]:,}", "VIOLATED" if name in broken else "holds") for name in summary.checks]
    print_table(("INVARIANT", "CHECKED", ""), rows, right=("CHECKED",))
    rate = summary.schedules / summary.real_s if summary.real_s else 0.0
    typer.echo(
        f"{summary.schedules} schedules, {summary.steps:,} commits, {human_seconds(summary.virtual_s)} of virtual time"
        f" in {human_seconds(summary.real_s)}: {rate:.1f} schedules/s"
    )
    for verdict, line in zip(summary.violations, lines, strict=True):
        typer.echo(f"{verdict.text[:400]}\n  → {line}", err=True)
