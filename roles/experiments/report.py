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

from roles.experiments.analysis import Analysis, Measure

MOST_PICTURES = 48
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1.25rem; }
div { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #8886; } .axis { text-align: left; }
img { background: #fff; border-radius: 8px; padding: .5rem; margin: .3rem; max-width: 100%; break-inside: avoid; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } table { font-size: 7px; } td { padding: 2px; } }
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
    mpl.rcParams.update({"svg.hashsalt": "p2ptrain", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold",
                         "text.parse_math": False})  # fmt: skip
    found, axes = analysis.found, len(analysis.found.axes)
    title, (columns, rows) = html.escape(found.grid["name"]), analysis.table()
    what = "simulated: times are virtual, and there are no losses" if found.simulated else "measured"
    body = ""
    for tag, row in [("th", [it.lower() for it in columns]), *(("td", row) for row in rows)]:
        cells = (f"<{tag}{' class=axis' * (n < axes)}>{html.escape(it)}</{tag}>" for n, it in enumerate(row))
        body += f"<tr>{''.join(cells)}</tr>"
    maps = [*product(analysis.others(), analysis.measures)]
    left_out = f" The first {MOST_PICTURES} of {len(maps)}." * (len(maps) > MOST_PICTURES)
    curves = "".join(_curves(analysis))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{html.escape(' × '.join(found.axes))} · {what}</p>"
        f"<h2>Conclusions</h2><ul>{''.join(f'<li>{html.escape(it)}</li>' for it in analysis.conclusions())}</ul>"
        "<h2>Cells</h2><p>Means over the runs of a cell that are done, ± half of the 95 % confidence interval (by "
        f"Student's t); without ±, there is one run.</p><div><table>{body}</table></div><h2>Maps</h2><p>Lighter is "
        f"better. Red: no run of the cell is done, or none reached the loss.{left_out}</p>"
        f"{''.join(_heatmap(analysis, *it) for it in maps[:MOST_PICTURES])}"
        f"{'<h2>Curves</h2><p>A line for each run.</p>' * bool(curves)}{curves}</html>"
    )


def _picture(figure: Any, text: str) -> str:
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    image = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{image}">'


def _heatmap(analysis: Analysis, other: dict[str, str], measure: Measure) -> str:
    """A measure over x and y. ``other``: the labels of the other axes."""
    import matplotlib.pyplot as plt
    import seaborn as sns
    from matplotlib.colors import LogNorm

    cells = [cell for cell in analysis.cells if other.items() <= cell.labels.items()]
    title = measure.title + "".join(f", {axis} = {label}" for axis, label in other.items())
    across, down = analysis.found.axes.get(analysis.x, [""]), analysis.found.axes[analysis.y]
    values, texts = np.full((len(down), len(across)), np.nan), np.full((len(down), len(across)), "", dtype=object)
    figure, axes = plt.subplots(figsize=(max(3.2, 1.2 + 1.1 * len(across)), max(1.9, 0.9 + 0.6 * len(down))))
    for cell in cells:
        row, column = down.index(cell.labels[analysis.y]), across.index(cell.labels.get(analysis.x, ""))
        if (estimate := cell.estimate(measure)) is not None:
            values[row, column], texts[row, column] = estimate.mean, cell.shown(measure).replace(" ± ", "\n± ")
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

    found, colour, panel = analysis.found, analysis.x or analysis.y, analysis.y if analysis.x else ""
    data = pd.DataFrame([
        {"run": row["run"], "colour": row[colour], "panel": f"{panel} = {row[panel]}" if panel else "",
         "seconds": point["time_s"], "MiB sent by all workers": (point["sent_bytes"] or 0.0) / (1 << 20),
         "validation loss": point["val_loss"], "training loss": point["loss"]}
        for row in found.rows for point in found.curve(row["run"])
    ])  # fmt: skip
    losses = [name for name in ("validation loss", "training loss") if len(data) and data[name].notna().any()]
    panels = [f"{panel} = {label}" for label in found.axes[panel]] if panel else [""]
    for loss, (across, scale) in product(losses[:1], (("seconds", "linear"), ("MiB sent by all workers", "log"))):
        grid = sns.relplot(
            data[data[loss].notna()], x=across, y=loss, hue="colour", hue_order=found.axes[colour], col="panel",
            col_order=panels, col_wrap=min(3, len(panels)), units="run", estimator=None, kind="line", marker=".",
            height=2.6, aspect=1.25, palette="colorblind", facet_kws={"sharex": False},
        )  # fmt: skip
        grid.set_titles("{col_name}").set(xscale=scale)
        grid.legend.set_title(colour)
        yield _picture(grid.figure, f"{loss} against {across}")
