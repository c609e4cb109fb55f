"""What the commands of ``p2ptrain bench`` have in common: where results go, and how a command ends."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from p2ptrain.cli.runtime import run
from p2ptrain.core.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from p2ptrain.cli.bench.machine import Origin
    from p2ptrain.cli.bench.report import Report, Targets

JsonTo = Annotated[str, typer.Option("--json", metavar="FILE", help="Write JSON; - for standard output, alone.")]
CsvTo = Annotated[str, typer.Option("--csv", metavar="FILE", help="Write CSV, one row a sample.")]
PlotTo = Annotated[str, typer.Option("--plot", metavar="FILE.svg", help="Draw it as SVG.")]


class Work(Protocol):
    """A benchmark."""

    def report(self, origin: Origin, *, complete: bool) -> Report: ...


def checked(json_to: str, csv_to: str, plot_to: str = "") -> Targets:
    """Raises ``UserError``, before anything is measured."""
    from p2ptrain.cli.bench.report import Targets

    targets = Targets(json_to, csv_to, plot_to)
    targets.check()
    return targets


def carry_out(work: Work, measuring: Coroutine[Any, Any, bool], targets: Targets, notes: Sequence[str] = ()) -> bool:
    """Measure, and publish what was found, and ``notes``. Whether it came to its end. Raises ``P2PTrainError``."""
    complete = run(measuring, children=True)
    publish(work, targets, complete=complete, notes=notes)
    return complete


def publish(work: Work, targets: Targets, *, complete: bool, notes: Sequence[str] = ()) -> None:
    """Raises ``StorageError``."""
    from p2ptrain.cli.bench import report as reports
    from p2ptrain.cli.bench.machine import origin

    report = work.report(origin(), complete=complete)
    report.notes += notes
    reports.publish(report, targets)


def leave(complete: bool) -> None:
    """Leave as one that was interrupted, where it was."""
    if not complete:
        raise typer.Exit(EXIT_INTERRUPTED)
