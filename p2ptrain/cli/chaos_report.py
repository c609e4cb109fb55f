"""Prints the result of ``p2ptrain chaos``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from p2ptrain.cli.output import number, print_pairs, print_table
from p2ptrain.cluster.console import printable
from p2ptrain.core.texts import human_seconds

if TYPE_CHECKING:
    from p2ptrain.lab.chaos.judge import Attack, ChaosReport


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
                str(it.excluded),
                str(it.steps),
                number(it.distance, ".1f"),
            )
            for name, it in attack.scores
        ]
        right = ("LEFT OUT", "STEPS", "DISTANCE")
        print_table(("MEMBER", "ATTACKS", *right), rows, right=right)
