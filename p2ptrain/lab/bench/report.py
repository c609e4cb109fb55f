"""The results of a benchmark. ``p2ptrain.cli.bench`` prints them."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

import p2ptrain
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
        if any(contender is None or not contender.seconds for contender in pair):
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
class BenchReport:
    """The results of one run, which fills it while it measures.

    Attributes:
        title: what was measured, in one line. unit: unit of a case's amount, such as ``tokens``.
        rate: formats the unit per second.
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
    complete: bool = False

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


def human_rate(bytes_per_s: float) -> str:
    """Gigabytes (10^9 bytes) per second; small rates with more digits."""
    return f"{bytes_per_s / 1e9:.2f} G" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e9:.2g} G"


def times(factor: float) -> str:
    return f"{factor:.2f}×"


def per_cent(part: float) -> str:
    return f"{100 * part:.1f} %"
