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
from p2ptrain.core.texts import human_bytes
from roles.experiments.results import DONE, Found, Row, time_to

T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
Z_975 = 1.959964


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table by Abramowitz and Stegun 26.7.5, right to five digits."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z, n = Z_975, freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``count`` runs. ``half``: of its 95 % confidence interval; None with one run."""

    mean: float
    half: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        count = len(values)
        if not count:
            return None
        half = t_quantile(count - 1) * stdev(values) / math.sqrt(count) if count > 1 else None
        return cls(mean(values), half, count)

    def overlaps(self, other: Estimate) -> bool | None:
        """Whether the intervals overlap; None if one is unknown."""
        if self.half is None or other.half is None:
            return None
        return abs(self.mean - other.mean) <= self.half + other.half


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of the results that is compared. ``is_headline``: also in words."""

    name: str
    title: str
    show: Callable[[float], str]
    less_is_better: bool = True
    is_headline: bool = False

    def shown(self, estimate: Estimate | None) -> str:
        if estimate is None:
            return "-"
        return self.show(estimate.mean) + (f" ± {self.show(estimate.half)}" if estimate.half is not None else "")


MEASURES = (
    Measure("val_loss", "validation loss", "{:.3f}".format, is_headline=True),
    Measure("loss", "training loss", "{:.3f}".format, is_headline=True),
    Measure("tokens_per_s", "tokens/s", "{:,.0f}".format, less_is_better=False, is_headline=True),
    Measure("step_ms", "time of a step (median)", lambda value: _seconds(value / 1e3)),
    Measure("sent_bytes", "bytes sent", human_bytes, is_headline=True),
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

    def estimate(self, measure: Measure) -> Estimate | None:
        """Over the runs that are done and know it."""
        known = [row[measure.name] for row in self.rows if row["state"] == DONE]
        return Estimate.of([value for value in known if value is not None])

    def trouble(self) -> str:
        """What became of the runs that are not done, such as ``out-of-memory (2)``; empty if all are."""
        states = Counter(row["state"] for row in self.rows if row["state"] != DONE)
        return ", ".join(f"{state} ({count})" for state, count in states.items())

    def __str__(self) -> str:
        return ", ".join(f"{axis} = {label}" for axis, label in self.labels.items())


@dataclass(frozen=True, slots=True)
class Analysis:
    """The results by cell.

    Attributes:
        x, y: the axes of the heatmaps; ``x`` is empty if there is one axis.
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
        axes = list(found.axes)
        for option, axis in (("--x", x), ("--y", y)):
            if axis and axis not in axes:
                raise UserError(f"{option} {axis}: there is no such axis", remedy="the axes are " + ", ".join(axes))
        if x and x == y:
            raise UserError(f"--x and --y are both {x}", remedy="name two axes: " + ", ".join(axes))
        y = y or next(axis for axis in [*axes, ""] if axis != x)
        x = x or next(axis for axis in [*axes, ""] if axis != y)
        if not found.rows:
            raise UserError(f"no run of {found.directory} is over", remedy="run the experiment first")
        cells = dict[tuple[str, ...], Cell]()
        order = {axis: {label: number for number, label in enumerate(found.axes[axis])} for axis in axes}
        for row in sorted(found.rows, key=lambda row: [order[axis].get(row[axis], -1) for axis in axes]):
            labels = {axis: row[axis] for axis in axes}
            cells.setdefault(tuple(labels.values()), Cell(labels)).rows.append(row)
        targets = [
            Measure(time_to(it), f"time to a validation loss of {it:g}", _seconds, is_headline=True)
            for it in found.targets
        ]
        measures = [
            measure
            for measure in (*targets, *MEASURES)
            if any(row.get(measure.name) for row in found.rows if row["state"] == DONE)  # neither unknown nor all 0
        ]
        return cls(found, x, y, list(cells.values()), measures)

    @property
    def axes(self) -> list[str]:
        return list(self.found.axes)

    def others(self) -> list[dict[str, str]]:
        """The combinations of the axes besides x and y; one empty one if there are no others."""
        seen = [{axis: it for axis, it in cell.labels.items() if axis not in (self.x, self.y)} for cell in self.cells]
        return [it for number, it in enumerate(seen) if it not in seen[:number]]

    def table(self) -> tuple[list[str], list[list[str]]]:
        columns = [*(axis.upper() for axis in self.axes), "RUNS", *(measure.title.upper() for measure in self.measures)]
        rows = []
        for cell in self.cells:
            done = sum(row["state"] == DONE for row in cell.rows)
            figures = [self._figure(cell, measure) for measure in self.measures]
            trouble = cell.trouble()
            rows.append([*cell.labels.values(), f"{done}{f' + {trouble}' if trouble else ''}", *figures])
        return columns, rows

    def _figure(self, cell: Cell, measure: Measure) -> str:
        estimate, done = cell.estimate(measure), sum(row["state"] == DONE for row in cell.rows)
        if not _is_time(measure) or not done:
            return measure.shown(estimate)
        if estimate is None:
            return "not reached"
        return measure.shown(estimate) + (f" ({estimate.count} of {done})" if estimate.count < done else "")

    # ------------------------------------------------------------------------------------------------------------ words

    def conclusions(self) -> list[str]:
        """What the results support, in sentences."""
        found = self.found
        told = [f"{len(found.rows)} of {found.planned} runs have a result" + " (simulated)" * found.simulated + "."]
        told += [f"Not done: {cell}: {cell.trouble()}." for cell in self.cells if cell.trouble()]
        tokens = sorted({row["tokens"] for row in found.rows if row["state"] == DONE})
        if len(tokens) == 1:
            told.append(f"All runs trained on the same number of tokens, {tokens[0]:,.0f}.")
        elif tokens:
            told.append(
                f"The runs trained on different numbers of tokens, {tokens[0]:,.0f} to {tokens[-1]:,.0f}: losses and "
                "bytes are not at equal tokens."
            )
        headlines = [measure for measure in self.measures if measure.is_headline]
        if any(measure.name == "val_loss" for measure in headlines):
            headlines = [measure for measure in headlines if measure.name != "loss"]
        if self.x and headlines:
            for label, other in itertools.product(found.axes[self.x], self.others()):
                fixed = {self.x: label, **other}
                cells = [cell for cell in self.cells if fixed.items() <= cell.labels.items()]
                told.append(self._best(headlines[0], cells, fixed))
        told += [self._best(measure, self.cells, {}) for measure in headlines]
        return [text for text in told if text]

    def _best(self, measure: Measure, cells: Sequence[Cell], fixed: dict[str, str]) -> str:
        """A sentence about the best of the cells; empty if there are not two to compare, or they are equal.

        ``fixed``: axes in which they are equal; empty: they are all cells.
        """

        def name(cell: Cell) -> str:
            return ", ".join(f"{axis} = {it}" for axis, it in cell.labels.items() if axis not in fixed)

        known = [(cell, estimate) for cell in cells if (estimate := cell.estimate(measure)) is not None]
        known.sort(key=lambda it: it[1].mean, reverse=not measure.less_is_better)
        if len(known) < 2 or known[0][1].mean == known[-1][1].mean:
            return ""
        (best, mine), (worst_cell, worst) = known[0], known[-1]
        kind, other = ("least", "most") if measure.less_is_better else ("most", "least")
        given = f"With {', '.join(f'{axis} = {it}' for axis, it in fixed.items())}: " if fixed else ""
        text = f"{given}{measure.title if fixed else measure.title[0].upper() + measure.title[1:]}: "
        text += f"{kind} with {name(best)} ({self._figure(best, measure)}), "
        text += (
            f"{other} with {name(worst_cell)} ({self._figure(worst_cell, measure)}, {_ratio(worst.mean, mine.mean)})."
        )
        if (missing := len(cells) - len(known)) and _is_time(measure):
            text += f" {_cells(missing)} did not reach it."
        if any(mine.overlaps(each) is None for _, each in known[1:]):
            return f"{text} There is no interval for a single run, so a difference may be chance."
        close = [name(cell) for cell, each in known[1:] if mine.overlaps(each)]
        if not close:
            return f"{text} The 95 % interval of the best overlaps that of no other."
        shown = "; ".join(close) if len(close) <= 2 else _cells(len(close))
        return f"{text} The 95 % interval of the best overlaps: {shown}. Those may be as good."

    def to_json(self) -> dict[str, Any]:
        cells = []
        for cell in self.cells:
            figures = {}
            for measure in self.measures:
                if (estimate := cell.estimate(measure)) is not None:
                    low, high = (None, None) if estimate.half is None else (
                        estimate.mean - estimate.half, estimate.mean + estimate.half
                    )  # fmt: skip
                    figures[measure.name] = {"mean": estimate.mean, "low": low, "high": high, "runs": estimate.count}
            states = dict(Counter(row["state"] for row in cell.rows))
            cells.append({"cell": cell.labels, "states": states, "measures": figures})
        found = self.found
        return {
            "name": found.name,
            "simulated": found.simulated,
            "planned": found.planned,
            "runs": len(found.rows),
            "axes": found.axes,
            "x": self.x,
            "y": self.y,
            "cells": cells,
            "conclusions": self.conclusions(),
        }


def _is_time(measure: Measure) -> bool:
    return measure.name.startswith(time_to(0)[:-1])


def _cells(count: int) -> str:
    return f"{count} other cell{'s' * (count > 1)}"


def _ratio(worse: float, better: float) -> str:
    """``worse`` relative to ``better``."""
    low, high = sorted((worse, better))
    if low <= 0:
        return f"{high - low:.3g} apart"
    if high / low >= 2:
        return f"{high / low:.1f} times as much" if worse > better else f"{high / low:.1f} times less"
    change = 100 * (worse / better - 1)
    return f"{abs(change):.1f} % {'more' if change > 0 else 'less'}"
