"""The report of an experiment: one HTML file without scripts, with its pictures inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

from roles.experiments.analysis import Analysis, Cell, Measure

MOST_PICTURES = 48
_STYLE = """
:root { color-scheme: light dark; --text: #1d2530; --soft: #5b6675; --line: #d9dee5; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --soft: #9aa5b4; --line: #3a4350; --page: #14181e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 70rem;
  margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
p { color: var(--soft); margin: .2rem 0 1rem; } li { margin: .25rem 0; }
div.wide { overflow-x: auto; } div.pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); white-space: normal; vertical-align: bottom; } .axis { text-align: left; }
img { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .5rem; box-sizing: border-box;
  max-width: 100%; height: auto; break-inside: avoid; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } div.wide { overflow: visible; }
  table { font-size: 8px; } th, td { padding: .15rem .25rem; white-space: normal; } img { max-width: 48%; }
  img.large { max-width: 100%; } }
"""


def can_draw() -> str:
    """Why there can be no report; empty if there can."""
    if find_spec("seaborn") is not None:
        return ""
    return "there is no report: it needs seaborn; run `pip install 'p2ptrain[experiments]'`"


def page(analysis: Analysis) -> str:
    """The report. Needs seaborn."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "p2ptrain", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"})
    found, axes = analysis.found, len(analysis.found.axes)
    title, (columns, rows) = html.escape(found.name), analysis.table()
    what = "simulated: times are virtual, and there are no losses" if found.simulated else "measured"
    cells = [[f"<th{' class=axis' * (n < axes)}>{html.escape(it.lower())}</th>" for n, it in enumerate(columns)]]
    cells += [[f"<td{' class=axis' * (n < axes)}>{html.escape(it)}</td>" for n, it in enumerate(row)] for row in rows]
    head, *body = (f"<tr>{''.join(line)}</tr>" for line in cells)
    curves = "".join(_curves(analysis))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{html.escape(' × '.join(found.axes))} · {what}</p>"
        f"<h2>Conclusions</h2><ul>{''.join(f'<li>{html.escape(it)}</li>' for it in analysis.conclusions())}</ul>"
        "<h2>Cells</h2><p>Means over the runs of a cell that are done, ± half of the 95 % confidence interval (by "
        f"Student's t).</p><div class=wide><table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
        f"<h2>Maps</h2><p>Lighter is better. Red: no run of the cell is done, or none reached the loss.</p>"
        f"<div class=pictures>{''.join(_maps(analysis))}</div>"
        f"{f'<h2>Curves</h2><p>A line for each run.</p><div class=pictures>{curves}</div>' if curves else ''}</html>"
    )


def _picture(figure: Any, text: str, kind: str = "") -> str:
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    image = base64.b64encode(buffer.getvalue()).decode()
    return f'<img class="{kind}" alt="{html.escape(text)}" src="data:image/svg+xml;base64,{image}">'


def _maps(analysis: Analysis) -> Iterator[str]:
    """A heatmap of each measure over x and y, for each combination of the other axes."""
    for other, measure in [*product(analysis.others(), analysis.measures)][:MOST_PICTURES]:
        cells = [cell for cell in analysis.cells if other.items() <= cell.labels.items()]
        given = "".join(f", {axis} = {label}" for axis, label in other.items())
        yield _heatmap(analysis, cells, measure, f"{measure.title}{given}")


def _heatmap(analysis: Analysis, cells: list[Cell], measure: Measure, title: str) -> str:
    import matplotlib.pyplot as plt
    import seaborn as sns
    from matplotlib.colors import LogNorm

    across, down = analysis.found.axes.get(analysis.x, [""]), analysis.found.axes[analysis.y]
    values, texts = np.full((len(down), len(across)), np.nan), np.full((len(down), len(across)), "", dtype=object)
    figure, axes = plt.subplots(figsize=(max(3.2, 1.2 + 1.1 * len(across)), max(1.9, 0.9 + 0.6 * len(down))))
    for cell in cells:
        row, column = down.index(cell.labels[analysis.y]), across.index(cell.labels.get(analysis.x, ""))
        if (estimate := cell.estimate(measure)) is not None:
            values[row, column], texts[row, column] = estimate.mean, measure.shown(estimate).replace(" ± ", "\n± ")
        else:  # seaborn writes nothing there
            text = cell.trouble().replace(" (", "\n(") or "not reached"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color="#a02020", fontsize=8)
    colours = "crest" if measure.less_is_better else "crest_r"
    axes.set_facecolor("#f1e4e4")
    known = values[np.isfinite(values)]
    is_wide = known.size and known.min() > 0 and known.max() > 8 * known.min()
    sns.heatmap(
        values, norm=LogNorm() if is_wide else None, annot=texts, fmt="", cmap=colours, cbar=False, linewidths=1.5,
        ax=axes, xticklabels=across, yticklabels=down, annot_kws={"fontsize": 8},
    )  # fmt: skip
    axes.set(title=title, xlabel=analysis.x, ylabel=analysis.y)
    axes.tick_params(axis="y", rotation=0, length=0)
    axes.tick_params(axis="x", length=0)
    return _picture(figure, title)


def _curves(analysis: Analysis) -> Iterator[str]:
    """The loss of every run against time and bytes: a panel for each value of y, a colour for each of x."""
    import pandas as pd
    import seaborn as sns
    from matplotlib.ticker import LogLocator, NullLocator

    found, colour, panel = analysis.found, analysis.x or analysis.y, analysis.y if analysis.x else ""
    data = pd.DataFrame([
        {"run": row["run"], colour: row[colour], "panel": f"{panel} = {row[panel]}" if panel else "",
         "seconds": point["time_s"], "MiB sent by all workers": (point["sent_bytes"] or 0.0) / (1 << 20),
         "validation loss": point["val_loss"], "training loss": point["loss"]}
        for row in found.rows for point in found.curve(row["run"])
    ])  # fmt: skip
    losses = [name for name in ("validation loss", "training loss") if len(data) and data[name].notna().any()]
    panels = [f"{panel} = {label}" for label in found.axes[panel]] if panel else [""]
    for loss, across in product(losses[:1], ("seconds", "MiB sent by all workers")):
        grid = sns.relplot(
            data[data[loss].notna()], x=across, y=loss, hue=colour, hue_order=found.axes[colour], col="panel",
            col_order=panels, col_wrap=min(3, len(panels)), units="run", estimator=None, kind="line", marker=".",
            markersize=7, markeredgewidth=0, height=2.6, aspect=1.25, palette="colorblind", facet_kws={"sharex": False},
        )  # fmt: skip
        grid.set_titles("{col_name}")
        for axes in grid.axes.flat:
            axes.grid(color="#e3e6ea", linewidth=0.8)
            axes.set_axisbelow(True)
            if across != "seconds":
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.xaxis.set_minor_locator(NullLocator())
        yield _picture(grid.figure, f"{loss} against {across}", "large")
