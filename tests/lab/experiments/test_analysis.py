"""What an analysis says about known numbers, and its report."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.lab.experiments.analysis import Analysis, draw_figures, page, t_quantile
from p2ptrain.lab.experiments.grid import Grid
from p2ptrain.lab.experiments.results import CURVES, GRID, RESULTS, Row, load, measured_columns


def row(context: str, batch: str, repeat: int, state: str = "done", **figures: float) -> Row:
    known: dict[str, Any] = dict.fromkeys(measured_columns([2.0]))
    known |= {"tokens": 1000.0, "sent_bytes": 4096.0} if state == "done" else {}
    return known | {
        "run": f"{context}{batch}{repeat}", "context": context, "batch": batch, "repeat": float(repeat), "state": state,
        "reason": "", **figures,
    }  # fmt: skip


ROWS = [
    row("64", "4", 1, val_loss=2.0, seconds_to_2=10.0), row("64", "4", 2, val_loss=2.2),
    row("64", "4", 3, val_loss=2.1),
    row("128", "4", 1, val_loss=1.5, seconds_to_2=20.0), row("128", "4", 2, val_loss=1.6, seconds_to_2=24.0),
    row("128", "8", 1, "out-of-memory"), row("128", "8", 2, "out-of-memory"),
]  # fmt: skip


def analysis(rows: list[Row] = ROWS, axes: dict[str, list[str]] | None = None, x: str = "", y: str = "") -> Analysis:
    axes = axes or {"context": ["64", "128"], "batch": ["4", "8"]}
    labelled = {axis: {label: {} for label in labels} for axis, labels in axes.items()}
    return Analysis(Grid(name="sizes", axes=labelled, loss_targets=[2.0], repeats=2), rows, x, y)


def test_intervals_are_those_of_student() -> None:
    known = {1: 12.7062, 2: 4.30265, 10: 2.22814, 20: 2.08596, 21: 2.07961, 30: 2.04227, 60: 2.00030, 1000: 1.96234}
    assert {freedom: t_quantile(freedom) for freedom in known} == pytest.approx(known, rel=1e-4)
    rows = [row("64", "4", n, val_loss=loss) for n, loss in enumerate([2.0, 2.2, 2.1, 2.6])]
    (estimate,) = analysis(rows).estimates("val_loss").itertuples()
    # stats.t.interval(0.95, 3, loc=2.225, scale=stats.sem(values))
    assert (estimate.mean, estimate.half_95, estimate.runs) == pytest.approx((2.225, 0.418485, 4), rel=1e-4)


def test_cells_and_words_follow_from_the_numbers() -> None:
    made = analysis()
    assert made.axes == ["context", "batch"]
    assert list(made.estimates("val_loss")["text"]) == ["2.1 ± 0.2484", "1.55 ± 0.6353", "-"]
    columns, rows = made.table()
    assert rows[0] == ["64", "4", "3", "10.0 s, 1 of 3", "2.1 ± 0.2484", "1,000 ± 0", "4.0 KiB ± 0 B"]
    assert rows[2] == ["128", "8", "0 + out-of-memory (2)", "-", "-", "-", "-"]
    assert columns[:4] == ["context", "batch", "runs", "time to a validation loss of 2"]
    cells = made.to_json()["cells"]
    assert cells[0]["seconds_to_2"] == {"mean": 10.0, "half_95": None, "runs": 1}
    assert cells[2]["cell"] == {"context": "128", "batch": "8"}
    assert cells[2]["states"] == {"out-of-memory": 2}
    assert cells[2]["val_loss"] == {"mean": None, "half_95": None, "runs": 0}


def test_each_condition_has_its_best_choice() -> None:
    rows = [row(context, batch, n, val_loss=loss + n / 100)
            for context, batch, loss in (("64", "4", 2.0), ("64", "8", 1.0), ("128", "4", 2.99), ("128", "8", 3.0))
            for n in (1, 2, 3)]  # fmt: skip
    words = analysis(rows).conclusions()
    assert words[0] == "12 of 8 runs have a result."
    alone = "no other 95 % interval overlaps."
    assert f"With context = 64: validation loss: best with batch = 8 (1.02 ± 0.02484), {alone}" in words
    # 3.01 ± 0.025 and 3.02 ± 0.025 overlap.
    assert "With context = 128: validation loss: best with batch = 4 (3.01 ± 0.02484), not told apart from 8." in words
    words = analysis(rows, x="context").conclusions()
    assert f"With batch = 4: validation loss: best with context = 64 (2.02 ± 0.02484), {alone}" in words
    fast = [row(batch, "4", 1, tokens_per_s=speed) for batch, speed in (("64", 1000.0), ("128", 4000.0))]
    words = analysis(fast, {"context": ["64", "128"]}).conclusions()
    assert "tokens/s: best with context = 128 (4,000), not told apart from 64." in words  # by one run each


def test_no_best_loss_is_named_between_different_numbers_of_tokens() -> None:
    rows = [row("64", batch, n, val_loss=loss + n / 100, tokens=tokens, seconds_to_2=tokens, bytes_to_2=loss)
            for batch, loss, tokens in (("4", 2.0, 1000.0), ("8", 1.0, 2000.0)) for n in (1, 2, 3)]  # fmt: skip
    words = "\n".join(analysis(rows).conclusions())
    assert "validation loss: not compared: the runs trained on different numbers of tokens (1,000 to 2,000)." in words
    assert "validation loss: best" not in words
    assert "time to a validation loss of 2: best with batch = 4" in words
    assert "bytes sent to a validation loss of 2: best with batch = 8" in words


def test_a_cell_of_which_some_runs_missed_a_loss_is_not_the_fastest() -> None:
    rows = [row("64", "4", 1, seconds_to_2=1.0), row("64", "4", 2)]
    rows += [row("64", "8", n, seconds_to_2=9.0 + n) for n in (1, 2)]
    words = analysis(rows).conclusions()
    missed = "not reached by every run of 4, which are left out."
    assert f"With context = 64: time to a validation loss of 2: {missed}" in words
    assert not any("best with batch = 4" in sentence for sentence in words)


def test_runs_with_members_away_are_marked() -> None:
    rows = [row("64", "4", 1, members_mean=2.5, members_min=2.0), row("64", "4", 2, members_mean=3.0, members_min=3.0)]
    made = analysis(rows)
    assert made.conclusions()[1].startswith("In 1 of them members were away for some steps")
    assert made.table()[1][0][2] == "2, members were away in 1"


def test_axes_that_do_not_exist_are_refused() -> None:
    for x, y, text in (("size", "", "size is no axis of"), ("context", "context", "x and y are both context")):
        with pytest.raises(UserError, match=text):
            analysis(x=x, y=y)
    with pytest.raises(UserError, match="no run"):
        analysis([])


def test_an_analysis_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "seaborn", None)
    monkeypatch.delitem(sys.modules, "p2ptrain.lab.experiments.analysis")
    with pytest.raises(UserError, match="needs the package seaborn") as caught:
        importlib.import_module("p2ptrain.lab.experiments.analysis")
    assert "pip install 'seaborn" in caught.value.remedy


def test_the_report_shows_any_label_and_needs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "curves").mkdir()
    rows = []
    for name in ("$<b>\\frac$", "seconds"):
        rows.append(row(name, "4", 1, val_loss=2.0, sent_bytes=0.0))
        curve = "step,time_s,tokens,sent_bytes,loss,val_loss\n1,0.5,10,100,3,\n2,1.5,20,900,2,2\n"
        (tmp_path / "curves" / f"{len(rows)}.csv").write_text(curve)
        rows[-1]["run"] = f"{len(rows)}"
    one = {"context": ["$<b>\\frac$", "seconds"]}
    for axes, directory, pictures in ((one | {"batch": ["4"]}, tmp_path, 4), (one, tmp_path / "none", 2)):
        made = analysis(rows, axes)
        text = page(made, draw_figures(made, directory))
        assert "<script" not in text
        assert "<b>" not in text
        sources = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"' >)]+)", text)
        assert len(sources) == pictures  # maps of loss and tokens, and curves against seconds and bytes
        assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)


def test_a_map_has_all_axes_and_shows_where_no_run_is_done(tmp_path: Path) -> None:
    rows = [
        row(*labels, val_loss=1.0) | {"link": link} for labels in (("64", "4", 1), ("128", "4", 1)) for link in "ab"
    ]
    rows += [row("64", "8", 1, "out-of-memory") | {"link": "a"}]
    axes = {"link": ["a", "b"], "context": ["64", "128"], "batch": ["4", "8"]}
    made = analysis(rows, axes, x="batch", y="context")
    assert made.axes == ["context", "link", "batch"]
    figures = draw_figures(made, tmp_path)
    assert [figure.name for figure in figures] == ["val_loss", "tokens", "sent_bytes"]
    for figure in figures:
        assert figure.files["svg"].startswith(b"<?xml")
        assert figure.files["png"].startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "step,time_s,tokens,sent_bytes,loss,val_loss\n1,1,1,1,none,x\n"])
def test_a_damaged_curve_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CURVES).mkdir()
    (tmp_path / CURVES / f"{ROWS[0]['run']}.csv").write_text(content)
    with pytest.raises(StorageError, match=rf"{ROWS[0]['run']}\.csv is damaged"):
        draw_figures(analysis(), tmp_path)


def test_a_row_without_a_state_is_damage(tmp_path: Path) -> None:
    (tmp_path / GRID).write_text(analysis().grid.model_dump_json())
    (tmp_path / RESULTS).write_text("run,context,batch,state\nr,64,4,\n")
    with pytest.raises(StorageError, match="without a state"):
        load(tmp_path)
