"""What the results of an experiment say: means over repeats, their confidence intervals, and conclusions in words."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import human_bytes, human_duration
from roles.experiments.results import DONE, Found, Row, time_to

_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: from a table, or by Abramowitz and Stegun 26.7.5, right to five digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, n = 1.959964, freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``count`` runs. ``half``: of its 95 % confidence interval; None with one run."""

    mean: float
    half: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """``values``: at least one."""
        count = len(values)
        half = t_quantile(count - 1) * stdev(values) / math.sqrt(count) if count > 1 else None
        return cls(mean(values), half, count)


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of the results that is compared. ``in_words``: also in the conclusions."""

    name: str
    title: str
    show: Callable[[float], str]
    in_words: bool = False
    less_is_better: bool = True


MEASURES = (
    Measure("val_loss", "validation loss", "{:.3f}".format, in_words=True),
    Measure("loss", "training loss", "{:.3f}".format),
    Measure("tokens_per_s", "tokens/s", "{:,.0f}".format, in_words=True, less_is_better=False),
    Measure("step_ms", "time of a step (median)", lambda value: human_duration(value / 1e3)),
    Measure("sent_bytes", "bytes sent", human_bytes, in_words=True),
    Measure("memory_bytes", "memory of a worker", human_bytes),
    Measure("recoveries", "recoveries", "{:.1f}".format),
    Measure("rejected", "rejected contributions", "{:.1f}".format),
    Measure("epsilon", "epsilon", "{:.2f}".format),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs of one combination of the axes' values."""

    labels: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    @property
    def done(self) -> list[Row]:
        return [row for row in self.rows if row["state"] == DONE]

    def estimate(self, measure: Measure) -> Estimate | None:
        """Over the runs that are done and know it; None if none does."""
        known = [row[measure.name] for row in self.done if row[measure.name] is not None]
        return Estimate.of(known) if known else None

    def shown(self, measure: Measure) -> str:
        if (estimate := self.estimate(measure)) is None:
            return "-"
        half = "" if estimate.half is None else f" ± {measure.show(estimate.half)}"
        some = f", {estimate.count} of {len(self.done)}" * (estimate.count < len(self.done))
        return measure.show(estimate.mean) + half + some

    def trouble(self) -> str:
        """What became of the runs that are not done, such as ``out-of-memory (2)``; empty if all are."""
        states = Counter(row["state"] for row in self.rows if row["state"] != DONE)
        return ", ".join(f"{state} ({count})" for state, count in states.items())

    def name(self, without: Sequence[str] = ()) -> str:
        return ", ".join(f"{axis} = {label}" for axis, label in self.labels.items() if axis not in without)


@dataclass(frozen=True, slots=True)
class Analysis:
    """The results by cell.

    Attributes:
        y, x: the axes of the heatmaps: under which condition, and what is chosen. ``x`` is empty if there is one axis.
        measures: those that the results know, the most important first.
    """

    found: Found
    x: str
    y: str
    cells: list[Cell]
    measures: list[Measure]

    @classmethod
    def of(cls, found: Found, x: str = "", y: str = "") -> Analysis:
        """``x``, ``y``: axes; empty: the second and the first. Raises ``UserError``."""
        axes, cells = list(found.axes), dict[tuple[str, ...], Cell]()
        for option, axis in (("--x", x), ("--y", y)):
            if (axis and axis not in axes) or x == y != "":
                raise UserError(f"{option} {axis} is no axis, or both", remedy="the axes are " + ", ".join(axes))
        y = y or next(axis for axis in [*axes, ""] if axis != x)
        x = x or next(axis for axis in [*axes, ""] if axis != y)
        if not found.rows:
            raise UserError(f"no run of {found.directory} is over", remedy="run the experiment first")
        for row in found.rows:
            labels = {axis: row[axis] for axis in axes}
            cells.setdefault(tuple(labels.values()), Cell(labels)).rows.append(row)
        ordered = [cells[labels] for labels in itertools.product(*found.axes.values()) if labels in cells]
        targets = [
            Measure(time_to(it), f"time to a validation loss of {it:g}", human_duration, True) for it in found.targets
        ]
        known = [row for row in found.rows if row["state"] == DONE]
        measures = [it for it in (*targets, *MEASURES) if any(row[it.name] for row in known)]  # not unknown nor all 0
        return cls(found, x, y, ordered, measures)

    def others(self) -> list[dict[str, str]]:
        """The combinations of the axes besides x and y; one empty one if there are no others."""
        axes = {axis: labels for axis, labels in self.found.axes.items() if axis not in (self.x, self.y)}
        return [dict(zip(axes, labels, strict=True)) for labels in itertools.product(*axes.values())]

    def table(self) -> tuple[list[str], list[list[str]]]:
        columns = [*(axis.upper() for axis in self.found.axes), "RUNS", *(it.title.upper() for it in self.measures)]
        rows = [
            [*cell.labels.values(), " + ".join(filter(None, (str(len(cell.done)), cell.trouble()))),
             *(cell.shown(measure) for measure in self.measures)]
            for cell in self.cells
        ]  # fmt: skip
        return columns, rows

    def conclusions(self) -> list[str]:
        """What the results support, in sentences."""
        found = self.found
        told = [f"{len(found.rows)} of {found.planned} runs have a result{' (simulated)' * found.simulated}."]
        told += [f"Not done: {cell.name()}: {trouble}." for cell in self.cells if (trouble := cell.trouble())]
        tokens = sorted({row["tokens"] or 0.0 for row in found.rows if row["state"] == DONE})
        if len(tokens) == 1:
            told.append(f"All runs trained on the same number of tokens, {tokens[0]:,.0f}.")
        elif tokens:
            text = f"The runs trained on different numbers of tokens, {tokens[0]:,.0f} to {tokens[-1]:,.0f}"
            told.append(f"{text}: losses and bytes are not at equal tokens.")
        in_words = [measure for measure in self.measures if measure.in_words]
        conditions = [{self.y: label} | other for label in found.axes[self.y] for other in self.others()]
        for fixed in conditions if self.x and in_words else ():
            told.append(self._best(in_words[0], fixed))
        told += [self._best(measure, {}) for measure in in_words[bool(self.x) :]]
        return [text for text in told if text]

    def _best(self, measure: Measure, fixed: dict[str, str]) -> str:
        """A sentence about the best of the cells with these labels; empty if there are not two, or they are equal."""
        cells = [cell for cell in self.cells if fixed.items() <= cell.labels.items()]
        known = [(estimate, cell) for cell in cells if (estimate := cell.estimate(measure)) is not None]
        known.sort(key=lambda it: it[0].mean, reverse=not measure.less_is_better)
        if len(known) < 2 or math.isclose(known[0][0].mean, known[-1][0].mean, rel_tol=1e-3):
            return ""
        (mine, best), (least, worst) = known[0], known[-1]
        kinds, keys = ("least", "most") if measure.less_is_better else ("most", "least"), list(fixed)
        text = f"With {', '.join(f'{axis} = {it}' for axis, it in fixed.items())}: " * bool(fixed) + measure.title
        text = f"{text[0].upper()}{text[1:]}: {kinds[0]} with {best.name(keys)} ({best.shown(measure)}), "
        text += f"{kinds[1]} with {worst.name(keys)} ({worst.shown(measure)}: {_ratio(least.mean, mine.mean)})."
        if missing := len(cells) - len(known):
            text += f" Without it: {missing} of {len(cells)} cells."
        if mine.half is None or any(each.half is None for each, _ in known):
            return f"{text} There is no interval for a single run, so a difference may be chance."
        close = [it.name(keys) for each, it in known[1:] if abs(each.mean - mine.mean) <= mine.half + (each.half or 0)]
        if not close:
            return f"{text} The 95 % interval of the best overlaps that of no other."
        shown = "; ".join(close) if len(close) <= 2 else f"those of {len(close)} other cells"
        return f"{text} The 95 % interval of the best overlaps {shown}: not told apart."

    def to_json(self) -> dict[str, Any]:
        cells = [
            {
                "cell": cell.labels,
                "states": dict(Counter(row["state"] for row in cell.rows)),
                "measures": {
                    it.name: {"mean": each.mean, "half_95": each.half, "runs": each.count}
                    for it in self.measures
                    if (each := cell.estimate(it)) is not None
                },
            }
            for cell in self.cells
        ]
        name, runs = self.found.grid["name"], len(self.found.rows)
        facts = {"name": name, "simulated": self.found.simulated, "planned": self.found.planned, "runs": runs}
        return facts | {"x": self.x, "y": self.y, "cells": cells, "conclusions": self.conclusions()}


def _ratio(worse: float, better: float) -> str:
    """``worse`` relative to ``better``."""
    if min(worse, better) <= 0:
        return f"{abs(worse - better):.3g} apart"
    if worse >= 2 * better:
        return f"{worse / better:.1f} times as much"
    return f"{100 * abs(worse / better - 1):.1f} % {'more' if worse > better else 'less'}"
