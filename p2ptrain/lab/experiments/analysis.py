"""What the results of an experiment say: means over repeats, their confidence intervals, and conclusions in words.

A *cell* is a combination of the axes' labels. Needs the extra ``experiments``: tables are those of pandas.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.texts import human_bytes, human_duration, install_command
from p2ptrain.lab.experiments.grid import Grid
from p2ptrain.lab.experiments.results import CURVES, DONE, POINT, Row, bytes_to, time_to

try:
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns
except ImportError as error:
    text = f"an analysis needs the package {error.name}"
    raise UserError(text, remedy=f"run: {install_command('experiments')}") from error

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1.25rem; }
div { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #8886; } td { white-space: nowrap; }
img { background: #fff; border-radius: 8px; padding: .5rem; margin: .3rem; max-width: 100%; break-inside: avoid; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } table { font-size: 7px; } td { padding: 2px; } }
"""

MEASURES = {
    "val_loss": "validation loss", "loss": "training loss", "tokens_per_s": "tokens/s", "step_ms": "time of a step",
    "tokens": "tokens", "sent_bytes": "bytes sent", "memory_bytes": "memory of a worker", "recoveries": "recoveries",
    "rejected": "rejected contributions", "epsilon": "epsilon",
}  # fmt: skip
"""Columns of the results that are compared, and their titles. Times and bytes to a loss come before them."""
IN_WORDS = ("val_loss", "tokens_per_s", "sent_bytes")
"""Those that conclusions are about, with the times and bytes to a loss."""
OF_EQUAL_TOKENS = ("val_loss", "sent_bytes")
"""Those that say nothing between cells that trained on different numbers of tokens."""
MORE_IS_BETTER = "tokens_per_s"


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. It is sqrt(n) tan(a), where the density of the angle a is that of
    cos(a)**(n - 1)."""
    angles, step = np.linspace(-np.pi / 2, np.pi / 2, 100_001, retstep=True)
    area = np.cumsum(np.cos(angles[1:] - step / 2) ** (freedom - 1))
    return float(np.sqrt(freedom) * np.tan(np.interp(0.975, area / area[-1], angles[1:])))


def shown(measure: str, value: float) -> str:
    if "bytes" in measure:
        return human_bytes(value)
    if measure == "step_ms" or measure not in MEASURES:
        return human_duration(value / 1e3 if measure == "step_ms" else value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


class Analysis:
    """The results by cell.

    Attributes:
        axes: of the condition, then of the choice. At least two: a single one comes after an empty one.
        measures: those that the results know, with their titles, the most important first.
        states: cell → how many of its runs ended in which state.
    """

    def __init__(self, grid: Grid, rows: list[Row], x: str = "", y: str = "") -> None:
        """``x``: axis of the choice; empty: the second. ``y``: first of the condition; empty: the first. Raises
        ``UserError``."""
        remedy = "the axes are " + ", ".join(grid.axes)
        for axis in (x, y):
            if axis not in ("", *grid.axes):
                raise UserError(f"{axis} is no axis of {grid.name}", remedy=remedy)
        if x == y != "":
            raise UserError(f"x and y are both {x}", remedy=remedy)
        if not rows:
            raise UserError(f"no run of {grid.name} is over", remedy="run the experiment first")
        axes = ["", *grid.axes] if len(grid.axes) == 1 else list(grid.axes)
        x = x or next(axis for axis in axes[1:] + axes if axis != y)
        y = y or next(axis for axis in axes if axis != x)
        self.grid, self.rows, self.axes = grid, rows, [y, *(axis for axis in axes if axis not in (x, y)), x]
        titles = {time_to(target): f"time to a validation loss of {target:g}" for target in grid.loss_targets}
        titles |= {bytes_to(target): f"bytes sent to a validation loss of {target:g}" for target in grid.loss_targets}
        titles |= MEASURES
        table = pd.DataFrame(rows).assign(**{"": ""})
        for axis, labels in grid.axes.items():
            table[axis] = pd.Categorical(table[axis], list(labels), ordered=True)
        table = table.set_index(self.axes)
        self.states = {cell: Counter(states) for cell, states in table["state"].groupby(self.axes, observed=True)}
        known = table[list(titles)].astype(float).where(table["state"] == DONE)
        self.measures = {name: title for name, title in titles.items() if known[name].fillna(0).any()}
        self._cells = known.groupby(self.axes, observed=True)
        is_uneven = (table["state"] == DONE) & (table["members_min"] < table["members_mean"]).fillna(False)
        self._uneven = is_uneven.groupby(self.axes, observed=True).sum()

    def estimates(self, measure: str) -> Any:
        """A row for each cell: ``mean`` over its runs that are done and know the measure, ``half_95``: half of the
        confidence interval, ``runs``: number of these, ``text``. nan: no run, no interval."""
        made = self._cells[measure].agg(mean="mean", half_95="sem", runs="count")
        made["half_95"] *= [t_quantile(max(runs - 1, 1)) for runs in made["runs"]]
        texts, done = list[str](), (states[DONE] for states in self.states.values())
        for mean, half, runs, of in zip(made["mean"], made["half_95"], made["runs"], done, strict=True):
            interval = f" ± {shown(measure, half)}" * (runs > 1) + f", {runs} of {of}" * (runs < of)
            texts.append(shown(measure, mean) + interval if runs else "-")
        return made.assign(text=texts)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns, and a row for each cell."""
        texts = [self.estimates(measure)["text"] for measure in self.measures]
        rows = []
        for cell, states in self.states.items():
            runs = [f"{states[DONE]}", *(f"{state} ({count})" for state, count in states.items() if state != DONE)]
            uneven = f", members were away in {self._uneven[cell]}" if self._uneven[cell] else ""
            rows.append([*self._named(cell).values(), " + ".join(runs) + uneven, *(text[cell] for text in texts)])
        return [*filter(None, self.axes), "runs", *self.measures.values()], rows

    def conclusions(self) -> list[str]:
        """What the results support, in sentences."""
        simulated = " (simulated)" * self.grid.simulated
        sentences = [f"{len(self.rows)} of {self.grid.planned} runs have a result{simulated}."]
        if uneven := int(self._uneven.sum()):
            text = f"In {uneven} of them members were away for some steps: their times and bytes are of fewer workers."
            sentences.append(text)
        tokens = self.estimates("tokens")["mean"]
        for measure in (name for name in self.measures if name in IN_WORDS or name not in MEASURES):
            known = self.estimates(measure).dropna(subset="mean")
            known = known.sort_values("mean", ascending=measure != MORE_IS_BETTER, kind="stable")
            for condition, cells in known.groupby(self.axes[:-1], observed=True):
                where = ", ".join(f"{axis} = {label}" for axis, label in self._named(condition).items())
                about = f"With {where}: " * bool(where) + self.measures[measure]
                if measure not in MEASURES:  # a mean over the runs that reached the loss tells nothing of the others
                    is_reached = cells["runs"] == [self.states[cell][DONE] for cell in cells.index]
                    if missed := [cell[-1] for cell in cells[~is_reached].index]:
                        sentences.append(
                            f"{about}: not reached by every run of {', '.join(missed)}, which are left out."
                        )
                    cells = cells[is_reached]
                if cells.empty or np.allclose(cells["mean"], cells["mean"].iloc[0], rtol=1e-3):
                    continue  # nothing to choose
                trained = tokens[cells.index]
                if measure in OF_EQUAL_TOKENS and not np.allclose(trained, trained.iloc[0], rtol=1e-3):
                    numbers = " to ".join(shown("tokens", number) for number in (trained.min(), trained.max()))
                    text = f"not compared: the runs trained on different numbers of tokens ({numbers})."
                    sentences.append(f"{about}: {text}")
                    continue
                best, others = cells.iloc[0], cells.iloc[1:]
                reach = (best["half_95"] + others["half_95"]).fillna(math.inf)  # one run tells nothing apart
                near = [cell[-1] for cell in others[abs(others["mean"] - best["mean"]) <= reach].index]
                sentences.append(
                    f"{about}: best with {self.axes[-1]} = {best.name[-1]} ({best['text']})"
                    + (f", not told apart from {', '.join(near)}." if near else ", no other 95 % interval overlaps.")
                )
        return sentences

    def to_json(self) -> dict[str, Any]:
        cells = [{"cell": self._named(cell), "states": dict(states)} for cell, states in self.states.items()]
        for measure in self.measures:
            estimates = json.loads(self.estimates(measure).drop(columns="text").to_json(orient="records"))  # nan: null
            cells = [cell | {measure: estimate} for cell, estimate in zip(cells, estimates, strict=True)]
        facts = {"name": self.grid.name, "simulated": self.grid.simulated, "planned": self.grid.planned}
        return facts | {"runs": len(self.rows), "cells": cells, "conclusions": self.conclusions()}

    def _named(self, labels: Sequence[str]) -> dict[str, str]:
        return {axis: label for axis, label in zip(self.axes, labels, strict=False) if axis}


@dataclass(frozen=True, slots=True)
class Figure:
    """A map or a chart as file contents, by suffix: ``svg`` and ``png``. ``name``: of its files."""

    name: str
    title: str
    files: dict[str, bytes]


def draw_figures(analysis: Analysis, directory: Path) -> list[Figure]:
    """A map for each measure, then the curves. ``directory``: that of the results. Raises ``StorageError``."""
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "p2ptrain", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold",
                         "text.parse_math": False})  # fmt: skip
    return [*(_heatmap(analysis, measure) for measure in analysis.measures), *_curves(analysis, directory)]


def page(analysis: Analysis, figures: Sequence[Figure]) -> str:
    """The report: one HTML file."""
    grid, (columns, rows) = analysis.grid, analysis.table()
    what = "simulated: times are virtual, and there are no losses" if grid.simulated else "measured"
    conclusions = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in analysis.conclusions())
    table = pd.DataFrame(rows, columns=columns).to_html(index=False, border=0, justify="left")
    maps, curves = (
        "".join(_image(figure) for figure in figures if figure.name.startswith(CURVES) == is_curve)
        for is_curve in (False, True)
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{grid.name}</title><style>{_STYLE}</style>"
        f"<h1>{grid.name}</h1><p>{html.escape(' × '.join(grid.axes))} · {what}</p>"
        f"<h2>Conclusions</h2><ul>{conclusions}</ul>"
        "<h2>Cells</h2><p>Means over the runs of a cell that are done, ± half of the 95 % confidence interval (by "
        f"Student's t); without ±, there is one run.</p><div>{table}</div><h2>Maps</h2><p>Lighter is better. Red: no "
        "run of the cell is done, or none reached the loss.</p>"
        f"{maps}{'<h2>Curves</h2><p>A line for each run.</p>' * bool(curves)}{curves}</html>"
    )


def _figure(plot: Any, name: str, title: str) -> Figure:
    files = dict[str, bytes]()
    for suffix, metadata in (("svg", {"Date": None}), ("png", None)):
        buffer = io.BytesIO()
        plot.savefig(buffer, format=suffix, metadata=metadata, bbox_inches="tight", dpi=200)
        files[suffix] = buffer.getvalue()
    plt.close(plot)
    return Figure(name, title, files)


def _image(figure: Figure) -> str:
    content = base64.b64encode(figure.files["svg"]).decode()
    return f'<img alt="{html.escape(figure.title)}" src="data:image/svg+xml;base64,{content}">'


def _heatmap(analysis: Analysis, measure: str) -> Figure:
    """A measure with x across, and the combinations of the other axes down."""
    means, texts = (analysis.estimates(measure)[name].unstack() for name in ("mean", "text"))
    is_wide = 0 < 8 * means.min(axis=None) < means.max(axis=None)
    figure, axes = plt.subplots(figsize=(max(3.2, 1.2 + 1.1 * means.shape[1]), max(1.9, 0.9 + 0.6 * means.shape[0])))
    axes.set_facecolor("#f1c4c4")
    sns.heatmap(
        means, norm=mpl.colors.LogNorm() if is_wide else None, annot=texts.replace(" ± ", "\n± ", regex=True), fmt="",
        cmap="crest_r" if measure == MORE_IS_BETTER else "crest", cbar=False, linewidths=1.5, ax=axes, xticklabels=True,
        yticklabels=True, annot_kws={"fontsize": 8},
    )  # fmt: skip
    axes.set_title(analysis.measures[measure])
    axes.tick_params(axis="y", rotation=0, length=0)
    axes.tick_params(axis="x", length=0)
    return _figure(figure, measure, analysis.measures[measure])


def _curves(analysis: Analysis, directory: Path) -> Iterator[Figure]:
    """The loss of every run against time and bytes: a panel for each value of y, a colour for each of x."""
    labels, y, x, known = analysis.grid.axes, analysis.axes[0], analysis.axes[-1], []
    for row in analysis.rows:
        path, panel = directory / CURVES / f"{row['run']}.csv", f"{y} = {row[y]}" if y else ""
        if path.is_file():
            try:
                curve = pd.read_csv(path, usecols=list(POINT), dtype=float)
            except ValueError as error:
                raise StorageError(f"{path} is damaged: {error}", remedy="delete it; the other runs stay") from None
            known.append(curve.assign(run=row["run"], x=row.get(x, ""), y=panel))
    data = pd.concat(known) if known else pd.DataFrame(columns=POINT)
    panels = [f"{y} = {label}" for label in labels[y]] if y else [""]
    loss = next((name for name in ("val_loss", "loss") if data[name].notna().any()), "")
    names = MEASURES | {"time_s": "seconds", "sent_bytes": "bytes sent by all workers"}
    for across, scale in (("time_s", "linear"), ("sent_bytes", "log")) if loss else ():
        grid = sns.relplot(
            data[data[loss].notna()], x=across, y=loss, hue="x", hue_order=list(labels.get(x, [""])), col="y",
            col_order=panels, col_wrap=min(3, len(panels)), units="run", estimator=None, kind="line", marker=".",
            height=2.6, aspect=1.25, palette="colorblind", facet_kws={"sharex": False},
        )  # fmt: skip
        grid.set_titles("{col_name}").set(xscale=scale).set_axis_labels(names[across], names[loss])
        grid.legend.set_title(x)
        yield _figure(grid.figure, f"{CURVES}-{across}", f"{names[loss]} against {names[across]}")
