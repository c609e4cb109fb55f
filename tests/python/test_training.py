"""What ``import p2ptrain`` offers, and the result of a training run."""

from __future__ import annotations

import _thread
import ast
import asyncio
import sys
from pathlib import Path

import pytest

import p2ptrain
from p2ptrain.core.errors import UserError
from p2ptrain.python import training
from p2ptrain.python.training import TrainingResult
from wire.records import MetricRow

ROWS = [MetricRow("j1", step, 0.0, loss=5.0 - step, tokens_per_s=9.0) for step in (1, 2)]
SUMMARY = {"job": "j1", "checkpoint": "/a<b>/step-2", "whole": True}
RESULT = TrainingResult(SUMMARY, "nats/token", ROWS, Path("/a<b>"))


def test_type_checkers_see_what_programs_get() -> None:
    tree = ast.parse(Path(p2ptrain.__file__).with_suffix(".pyi").read_text("utf-8"))
    declared = {node.names[0].name: node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name: getattr(p2ptrain, name).__module__ for name in declared} == declared
    assert declared.keys() <= set(dir(p2ptrain))
    with pytest.raises(AttributeError, match="no attribute 'Cluster'"):
        _ = p2ptrain.Cluster


def test_result_shows_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RESULT.frame().loss.to_dict() == {1: 4.0, 2: 3.0}
    losses, speed = RESULT.plot().axes
    assert losses.lines[0].get_xydata().tolist() == [[1.0, 4.0], [2.0, 3.0]]
    assert len(speed.lines) == 1
    assert "/a&lt;b&gt;/step-2" in RESULT._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="this needs pandas") as caught:
        RESULT.frame()
    assert "install" in caught.value.remedy


def test_more_workers_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match="the job needs 3 workers to begin, and 2 would be started"):
        p2ptrain.train(settings={"job.workers": 3})


def test_interrupted_training_is_saved_before_its_processes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    class InterruptedRun(training.TrainingRun):
        async def begin(self) -> None:
            calls.append("begin")

        async def work(self) -> None:
            _thread.interrupt_main()
            await asyncio.Event().wait()

        async def outcome(self) -> None:
            calls.append("save")

        async def end(self) -> None:
            calls.append("end")

    monkeypatch.setattr(training, "TrainingRun", InterruptedRun)
    with pytest.raises(KeyboardInterrupt):
        p2ptrain.train(state=tmp_path)
    assert calls == ["begin", "save", "end"]
