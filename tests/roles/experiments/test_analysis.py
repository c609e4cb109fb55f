"""What an analysis says about known numbers, and its report."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.errors import UserError
from roles.experiments.analysis import MEASURES, Analysis, Estimate, t_quantile
from roles.experiments.report import page
from roles.experiments.results import FIGURES, Found, Row


def row(context: str, batch: str, repeat: int, state: str = "done", **figures: float) -> Row:
    known: dict[str, Any] = dict.fromkeys((*FIGURES, "seconds_to_2"))
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


def found(rows: list[Row] = ROWS, axes: dict[str, list[str]] | None = None) -> Found:
    return Found(
        {"name": "a<b"}, axes or {"context": ["64", "128"], "batch": ["4", "8"]}, [2.0], False, 8, rows, Path("/none")
    )


def test_intervals_are_those_of_student() -> None:
    known = {1: 12.7062, 2: 4.30265, 10: 2.22814, 20: 2.08596, 21: 2.07961, 30: 2.04227, 60: 2.00030, 1000: 1.96234}
    assert {freedom: t_quantile(freedom) for freedom in known} == pytest.approx(known, rel=1e-4)
    estimate = Estimate.of([2.0, 2.2, 2.1, 2.6])  # stats.t.interval(0.95, 3, loc=2.225, scale=stats.sem(values))
    assert (estimate.mean, estimate.half) == pytest.approx((2.225, 0.418485), rel=1e-4)
    assert Estimate.of([1.0]) == Estimate(1.0, None, 1)


def test_cells_and_words_follow_from_the_numbers() -> None:
    made = Analysis.of(found())
    assert (made.x, made.y) == ("batch", "context")
    loss = next(measure for measure in MEASURES if measure.name == "val_loss")
    assert [cell.shown(loss) for cell in made.cells] == ["2.100 ± 0.248", "1.550 ± 0.635", "-"]
    words = "\n".join(made.conclusions())
    assert "Not done: context = 128, batch = 8: out-of-memory (2)." in words
    assert "same number of tokens, 1,000" in words
    best = made.to_json()["cells"][0]["measures"]["seconds_to_2"]
    assert best == {"mean": 10.0, "half_95": None, "runs": 1}
    assert made.cells[0].shown(made.measures[0]) == "10.0 s, 1 of 3"
    # 2.1 ± 0.248 and 1.55 ± 0.635 overlap, although the samples do not.
    assert re.search(r"Validation loss: least with context = 128.*35.5 % more.*overlaps context = 64, batch = 4", words)
    apart = ROWS + [row("128", "4", n, val_loss=1.5 + n / 100) for n in range(3, 9)]
    assert "overlaps that of no other" in "\n".join(Analysis.of(found(apart)).conclusions())


def test_each_condition_has_its_best_choice() -> None:
    rows = [row(context, batch, n, val_loss=loss + n / 100)
            for context, batch, loss in (("64", "4", 2.0), ("64", "8", 1.0), ("128", "4", 1.0), ("128", "8", 3.0))
            for n in (1, 2, 3)]  # fmt: skip
    words = "\n".join(Analysis.of(found(rows)).conclusions())
    assert "With context = 64: validation loss: least with batch = 8 (1.020 ± 0.025), most with batch = 4" in words
    assert "With context = 128: validation loss: least with batch = 4" in words
    assert "3.0 times as much" in words
    fast = [row(batch, "4", 1, tokens_per_s=speed) for batch, speed in (("64", 1000.0), ("128", 4000.0))]
    assert "75.0 % less" in "\n".join(Analysis.of(found(fast, {"context": ["64", "128"]})).conclusions())


def test_axes_that_do_not_exist_are_refused() -> None:
    for x, y in (("size", ""), ("context", "context")):
        with pytest.raises(UserError):
            Analysis.of(found(), x, y)
    with pytest.raises(UserError, match="no run"):
        Analysis.of(found([]))


def test_the_report_shows_any_label_and_needs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "curves").mkdir()
    rows = []
    for name in ("$<b>\\frac$", "seconds"):
        rows.append(row(name, "4", 1, val_loss=2.0, sent_bytes=0.0))
        curve = "step,time_s,tokens,sent_bytes,loss,val_loss\n1,0.5,10,100,3,\n2,1.5,20,900,2,2\n"
        (tmp_path / "curves" / f"{len(rows)}.csv").write_text(curve)
        rows[-1]["run"] = f"{len(rows)}"
    one = {"context": ["$<b>\\frac$", "seconds"]}
    for axes, directory, pictures in ((one | {"batch": ["4"]}, tmp_path, 3), (one, tmp_path / "none", 1)):
        text = page(Analysis.of(replace(found(rows, axes), directory=directory)))
        assert "a&lt;b" in text
        assert "<script" not in text
        assert "<b>" not in text
        sources = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"' >)]+)", text)
        assert len(sources) == pictures  # a map, and curves against seconds and bytes
        assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
