"""What a benchmark leaves behind: a table and a picture for people, JSON, CSV and SVG for the rest."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.output import print_json, print_table, printable
from p2ptrain.core.errors import StorageError, UserError

STDOUT = "-"


@dataclass(frozen=True, slots=True)
class Targets:
    """Where to write, beside the terminal; empty for nowhere. ``json`` may be ``-``: then nothing else is printed."""

    json: str = ""
    csv: str = ""
    plot: str = ""

    def check(self) -> None:
        """Find out before anything is measured. Raises ``UserError``."""
        for option, name in (("--json", self.json), ("--csv", self.csv), ("--plot", self.plot)):
            if not name or (name == STDOUT and option == "--json"):
                continue
            path = Path(name)
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise UserError(f"{option} {name}: that is no place for a file", remedy="name a file in a directory")
        if self.plot and Path(self.plot).suffix != ".svg":
            raise UserError(f"--plot {self.plot}: only SVG can be drawn", remedy="name a file that ends in .svg")


@dataclass(slots=True)
class Table:
    """Rows of text under ``columns``; those in ``right`` are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()


@dataclass(slots=True)
class Report:
    """Everything that one run found.

    Attributes:
        title: what was measured, one line.
        settings, results: for programs.
        tables, pictures: for people, in this order; a picture is lines of text.
        notes: what must be known to read the numbers.
        samples: rows of the CSV, one a sample, all with the same keys.
        chart: the SVG; None where nothing can be drawn.
        complete: whether all was measured that was asked for.
    """

    benchmark: str
    title: str
    origin: Origin
    settings: dict[str, Any]
    results: Any = None
    tables: list[Table] = field(default_factory=list)
    pictures: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    chart: Callable[[], str] | None = None
    complete: bool = True

    @property
    def footer(self) -> list[str]:
        """Two lines that say where it comes from."""
        return [self.origin.machine, f"{self.origin.date} · {self.origin.command}"]

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "title": self.title,
            "complete": self.complete,
            "origin": self.origin.to_json(),
            "settings": self.settings,
            "notes": self.notes,
            "results": self.results,
        }


def publish(report: Report, targets: Targets) -> None:
    """Print it and write it where that was asked for. Raises ``StorageError``."""
    if targets.json == STDOUT:
        print_json(report.to_json())
    else:
        _print(report)
    if targets.json and targets.json != STDOUT:
        _write(targets.json, json.dumps(report.to_json(), indent=2) + "\n")
    if targets.csv:
        _write(targets.csv, _csv(report))
    if targets.plot and report.chart is not None:
        _write(targets.plot, report.chart())
    written = [name for name in (targets.json, targets.csv, targets.plot) if name and name != STDOUT]
    if written and targets.json != STDOUT:
        typer.echo(f"\nwritten: {', '.join(written)}")


def _print(report: Report) -> None:
    typer.secho(report.title, bold=True)
    for line in report.footer:
        typer.echo(printable(line))
    if not report.complete:
        typer.secho("interrupted: this is what was measured until then", fg="yellow")
    for table in report.tables:
        if not table.rows:
            continue
        typer.echo()
        print_table(table.columns, table.rows, right=table.right)
    for picture in filter(None, report.pictures):
        typer.echo()
        for line in picture:
            typer.echo(line)
    if report.notes:
        typer.echo()
        for note in report.notes:
            for line in textwrap.wrap(note, screen_columns() - 2, initial_indent="· ", subsequent_indent="  "):
                typer.echo(line)


def _csv(report: Report) -> str:
    """One row a sample; the last columns, the same in every row, say where they come from."""
    origin = {key: report.origin.to_json()[key] for key in ("date", "cores", "system", "python", "torch", "command")}
    rows = [{"benchmark": report.benchmark} | sample | origin for sample in report.samples]
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, "utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {name}: {error.strerror}", remedy="choose another place") from error


def screen_columns() -> int:
    """Columns of the terminal, 80 where there is none."""
    return min(120, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


# ---------------------------------------------------------------------------------------------------------- the numbers


def human_size(size_bytes: int) -> str:
    """``4 KiB``, ``1 MiB``, ``1000 B``: whole where it is."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def human_duration(seconds: float) -> str:
    """Three digits and a unit: ``61.2 µs``, ``1.31 s``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def human_spread(low_s: float, high_s: float) -> str:
    """Both ends in the unit of the higher one: ``55–80.1 µs``."""
    number, _, unit = human_duration(high_s).partition(" ")
    factor = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    return f"{_three(low_s / factor)}–{number} {unit}"


def human_rate(bytes_per_s: float) -> str:
    """In gigabytes (10^9 bytes) a second: ``1.93``; small ones with more digits."""
    return f"{bytes_per_s / 1e9:.2f}" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e9:.2g}"


def times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}×"


def per_cent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f} %"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
