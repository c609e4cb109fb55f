"""Prints the results of a benchmark: a table, a picture, and notes."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import typer

from p2ptrain.cli.output import print_table
from p2ptrain.cluster.console import printable
from p2ptrain.core.texts import human_duration, three_digits
from p2ptrain.lab.bench.report import origin

if TYPE_CHECKING:
    from p2ptrain.lab.bench.report import BenchReport


def table_of(report: BenchReport) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each contender of each case."""
    heads = [
        "",
        "",
        f"{report.unit.upper()}/S",
        "MEDIAN",
        "P10-P90",
        "N",
        *(head for head, _ in report.columns.values()),
    ]
    rows = []
    for case in report.cases:
        found = ((case.facts.get(name), shown) for name, (_, shown) in report.columns.items())
        facts = ["-" if value is None else shown(value) for value, shown in found]
        label = case.label
        for each in case.contenders.values():
            if each.seconds:
                spread = human_spread(each.quantile_s(0.1), each.quantile_s(0.9))
                rate = report.rate(case.amount / each.median_s)
                row = [label, each.title, rate, human_duration(each.median_s), spread, str(len(each.seconds))]
                rows.append(row + facts)
                label, facts = "", [""] * len(facts)
    return heads, rows


def picture_of(report: BenchReport) -> str:
    """A bar for each contender of each case, drawn by plotext; empty without data."""
    import plotext

    whole = [case for case in report.cases if all(each.seconds for each in case.contenders.values())]
    names = [name for name in (whole[0].contenders if whole else ()) if all(name in it.contenders for it in whole)]
    if not names:
        return ""
    rates = [[case.amount / case.contenders[name].median_s / report.scale for case in whole] for name in names]
    titles = [whole[0].contenders[name].title for name in names]
    plotext.clear_figure()
    labels = [case.label or report.benchmark for case in whole]
    plotext.simple_multiple_bar(labels, rates, labels=titles, width=screen_columns())
    text: str = plotext.build()
    return text if sys.stdout.isatty() else str(plotext.uncolorize(text))


def print_report(report: BenchReport) -> None:
    typer.secho(report.title, bold=True)
    made = origin()
    torch = f" · torch {report.torch}" if report.torch else ""
    typer.echo(f"{made['cores']} cores · {made['system']} · Python {made['python']} ({made['loop']}){torch}")
    typer.echo(printable(f"{made['date']} · {made['command']}"))
    if not report.complete:
        typer.secho("interrupted: this is what was measured until then", fg="yellow")
    heads, rows = table_of(report)
    if rows:
        typer.echo()
        print_table(heads, rows, right=heads[2:])
        typer.echo()
        typer.echo(picture_of(report))
    for note in report.notes:
        for line in textwrap.wrap(note, screen_columns() - 2, initial_indent="· ", subsequent_indent="  "):
            typer.echo(line)


def screen_columns() -> int:
    """Columns of the terminal, 80 without one."""
    return min(120, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


def human_spread(low_s: float, high_s: float) -> str:
    """Both ends in the unit of the upper one: ``55–80.1 µs``."""
    number, _, unit = human_duration(high_s).partition(" ")
    return f"{three_digits(low_s / {'s': 1.0, 'ms': 1e-3, 'µs': 1e-6}[unit])}–{number} {unit}"
