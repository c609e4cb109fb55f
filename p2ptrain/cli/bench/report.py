"""The results of a benchmark: a table and a picture for people, JSON for programs."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import typer

import p2ptrain
from p2ptrain.cli.output import print_table
from p2ptrain.cluster.console import printable
from p2ptrain.core.texts import human_duration, three_digits
from wire.records import percentile

Shown = Callable[[Any], str]


@dataclass(slots=True)
class Contender:
    """One contender's samples in seconds. ``facts``: more values for programs."""

    title: str
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def quantile_s(self, part: float) -> float:
        return percentile(self.seconds, part) or 0.0


@dataclass(slots=True)
class Case:
    """The contenders under one setting.

    Attributes:
        label: the setting, for people.
        amount: work of each sample, in the report's unit.
        facts: values for programs; some are columns of the table.
    """

    label: str
    amount: float
    contenders: dict[str, Contender]
    facts: dict[str, Any] = field(default_factory=dict)

    def ratio(self, upper: str, lower: str) -> float | None:
        """Quotient of two contenders' medians; None if either is missing."""
        pair = [self.contenders.get(name) for name in (upper, lower)]
        if any(each is None or not each.seconds for each in pair):
            return None
        return self.contenders[upper].median_s / self.contenders[lower].median_s

    def to_json(self, unit: str) -> dict[str, Any]:
        contenders = {}
        for name, each in self.contenders.items():
            contenders[name] = {"title": each.title, "samples": len(each.seconds), **each.facts}
            if each.seconds:
                contenders[name] |= {
                    "median_s": each.median_s,
                    "p10_s": each.quantile_s(0.1),
                    "p90_s": each.quantile_s(0.9),
                    f"{unit}_per_s": self.amount / each.median_s,
                    "seconds": each.seconds,
                }
        return {"label": self.label, **self.facts, "contenders": contenders}


@dataclass(slots=True)
class Report:
    """The results of one run, which fills it while it measures.

    Attributes:
        title: what was measured, in one line. unit: unit of a case's amount, such as ``tokens``.
        rate: formats the unit per second.
        scale: divisor of rates in the picture.
        columns: name of a fact → heading and format of its column in the table.
        notes: what readers must know to understand the numbers.
    """

    benchmark: str
    title: str
    unit: str
    rate: Shown
    settings: dict[str, Any] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    columns: dict[str, tuple[str, Shown]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    torch: str = ""
    scale: float = 1.0
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "title": self.title,
            "complete": self.complete,
            "origin": origin() | {"torch": self.torch},
            "settings": self.settings,
            "notes": self.notes,
            **self.facts,
            "results": [case.to_json(self.unit) for case in self.cases],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and a row for each contender of each case."""
        heads = [
            "",
            "",
            f"{self.unit.upper()}/S",
            "MEDIAN",
            "P10-P90",
            "N",
            *(head for head, _ in self.columns.values()),
        ]
        rows = []
        for case in self.cases:
            found = ((case.facts.get(name), shown) for name, (_, shown) in self.columns.items())
            facts = ["-" if value is None else shown(value) for value, shown in found]
            label = case.label
            for each in case.contenders.values():
                if each.seconds:
                    spread = human_spread(each.quantile_s(0.1), each.quantile_s(0.9))
                    rate = self.rate(case.amount / each.median_s)
                    row = [label, each.title, rate, human_duration(each.median_s), spread, str(len(each.seconds))]
                    rows.append(row + facts)
                    label, facts = "", [""] * len(facts)
        return heads, rows

    def picture(self) -> str:
        """A bar for each contender of each case, drawn by plotext; empty without data."""
        import plotext

        whole = [case for case in self.cases if all(each.seconds for each in case.contenders.values())]
        names = [name for name in (whole[0].contenders if whole else ()) if all(name in it.contenders for it in whole)]
        if not names:
            return ""
        rates = [[case.amount / case.contenders[name].median_s / self.scale for case in whole] for name in names]
        titles = [whole[0].contenders[name].title for name in names]
        plotext.clear_figure()
        labels = [case.label or self.benchmark for case in whole]
        plotext.simple_multiple_bar(labels, rates, labels=titles, width=screen_columns())
        text: str = plotext.build()
        return text if sys.stdout.isatty() else str(plotext.uncolorize(text))

    def print(self) -> None:
        typer.secho(self.title, bold=True)
        made = origin()
        torch = f" · torch {self.torch}" if self.torch else ""
        typer.echo(f"{made['cores']} cores · {made['system']} · Python {made['python']} ({made['loop']}){torch}")
        typer.echo(printable(f"{made['date']} · {made['command']}"))
        if not self.complete:
            typer.secho("interrupted: this is what was measured until then", fg="yellow")
        heads, rows = self.table()
        if rows:
            typer.echo()
            print_table(heads, rows, right=heads[2:])
            typer.echo()
            typer.echo(self.picture())
        for note in self.notes:
            for line in textwrap.wrap(note, screen_columns() - 2, initial_indent="· ", subsequent_indent="  "):
                typer.echo(line)


def origin() -> dict[str, Any]:
    """This machine, the time, and the command line."""
    try:
        loop = f"uvloop {version('uvloop')}"
    except PackageNotFoundError:
        loop = "asyncio"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "command": shlex.join(["p2ptrain", *sys.argv[1:]]),
        "version": p2ptrain.__version__,
        "cores": os.cpu_count() or 1,
        "load": round(psutil.getloadavg()[0], 1),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "loop": loop,
    }


# ---------------------------------------------------------------------------------------------------------- the numbers


def screen_columns() -> int:
    """Columns of the terminal, 80 without one."""
    import shutil

    return min(120, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


def human_spread(low_s: float, high_s: float) -> str:
    """Both ends in the unit of the upper one: ``55–80.1 µs``."""
    number, _, unit = human_duration(high_s).partition(" ")
    return f"{three_digits(low_s / {'s': 1.0, 'ms': 1e-3, 'µs': 1e-6}[unit])}–{number} {unit}"


def human_rate(bytes_per_s: float) -> str:
    """Gigabytes (10^9 bytes) per second; small rates with more digits."""
    return f"{bytes_per_s / 1e9:.2f} G" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e9:.2g} G"


def times(factor: float) -> str:
    return f"{factor:.2f}×"


def per_cent(part: float) -> str:
    return f"{100 * part:.1f} %"


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
