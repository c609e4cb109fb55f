"""``p2ptrain.train``: the run of ``p2ptrain up`` (``p2ptrain.cluster.training_run``) for a program or a notebook.

It is on the event loop of a second thread, and so it works where an event loop runs already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from p2ptrain.cluster.client import Client, ProfileSource, frame_of, load_program_profile, optional_package
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.jobs import UNSAVED, JobSummary, show_step
from p2ptrain.cluster.local_cluster import LocalCluster, new_run_directory, own_texts
from p2ptrain.cluster.loops import ServiceThread
from p2ptrain.cluster.models import check_workers, resolve_inputs
from p2ptrain.cluster.training_run import TrainingPlan, TrainingRun
from p2ptrain.core.errors import JobFailed, StorageError
from wire.records import MetricRow


def train(
    profile: ProfileSource = "tiny",
    *,
    workers: int = 2,
    settings: Mapping[str, Any] | None = None,
    state: str | Path | None = None,
    download: bool = False,
) -> TrainingResult:
    """Train a model on this machine with a seed and so many workers, and show the progress.

    Args:
        settings: overrides by dotted key, such as ``{"job.steps": 100}``.
        state: where everything is kept; None: a new directory in ``p2ptrain-runs``.
        download: fetch the model of ``model.path`` from the Hugging Face hub.

    Raises:
        UserError: a setting is wrong, or ``state`` holds an unfinished job of other settings.
        JobFailed, StorageError: the job did not end well, or its result is on no disk.
        KeyboardInterrupt: after the job was saved. The same call with the same ``state`` goes on.
    """
    label, loaded = load_program_profile(profile, {"job.workers": workers} | dict(settings or {}))
    check_workers(loaded, workers, "settings")
    loaded = resolve_inputs(loaded, download=download)
    root = new_run_directory(label) if state is None else Path(state).absolute()
    plan = TrainingPlan(label, loaded, workers, False, loaded.link.preset, texts=own_texts(loaded, workers, []))
    bar = StepBar() if find_spec("tqdm") else None
    console, on_step = (Console(), show_step) if bar is None else (bar, bar.show_step)
    run = TrainingRun(plan, LocalCluster(root), console, lambda pair: None, on_step)
    thread = ServiceThread("p2ptrain train", children=True)
    try:
        thread.call(run.begin())
        try:
            thread.call(run.work())
        except KeyboardInterrupt:
            thread.call(run.outcome())
            console.event("info", f"interrupted: train with state={str(root)!r} goes on")
            raise
        console.finish()
        summary = thread.call(run.outcome())
        assert summary is not None, "only a pair has none"
        with Client(run.cluster.address, state=root) as client:
            rows = client.metrics(summary["job"])
    finally:
        console.finish()
        thread.call(run.end())
        thread.close()
    if summary["state"] != "done":
        kind = StorageError if summary["state"] == UNSAVED else JobFailed
        raise kind(f"the job is {summary['state']}: {summary['reason']}", remedy=f"see the logs in {root / 'logs'}")
    return TrainingResult(summary, loaded.loss_unit, rows, root)


class StepBar(Console):
    """A console that shows steps as a bar of tqdm, in a notebook or a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._tqdm: Any = optional_package("tqdm.auto").tqdm
        self._bar: Any = None

    def show_step(self, console: Console, row: MetricRow, total: int, label: str) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=total, initial=row.step - 1, unit="step")
        figures = {"loss": row.loss, "val_loss": row.val_loss, "tokens/s": row.tokens_per_s}
        shown = {name: f"{value:,.4g}" for name, value in figures.items() if value is not None}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(row.step - self._bar.n)

    def finish(self) -> None:
        super().finish()
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _print(self, text: str) -> None:
        with self._tqdm.external_write_mode(file=sys.stderr):
            super()._print(text)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A job that ``train`` has finished.

    Attributes:
        summary: its ``job`` (id), ``steps``, ``loss``, ``val_loss``, ``tokens``, ``seconds`` and more.
        loss_unit: of its losses. metrics: one row for each step on record. state: directory of the run.
    """

    summary: JobSummary
    loss_unit: str
    metrics: Sequence[MetricRow] = field(repr=False)  # they fill a terminal
    state: Path

    @property
    def checkpoint(self) -> Path | None:
        """Directory of the model, which transformers opens; None: its parts are not in one directory."""
        return Path(self.summary["checkpoint"]) if self.summary["whole"] else None

    def frame(self) -> Any:
        """The metrics as a data frame of pandas, by step. Raises ``UserError`` if pandas is not installed."""
        return frame_of(self.metrics)

    def plot(self) -> Any:
        """Draw losses and speed by step. Returns a figure. Raises ``UserError`` if matplotlib is not installed."""
        pyplot = optional_package("matplotlib.pyplot")
        figure, (losses, speed) = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained")
        for axes, name in ((losses, "loss"), (losses, "val_loss"), (speed, "tokens_per_s")):
            points = [(row.step, value) for row in self.metrics if (value := getattr(row, name)) is not None]
            axes.plot([step for step, _ in points], [value for _, value in points], label=name)
            axes.set_xlabel("step")
        losses.set_ylabel(self.loss_unit)
        losses.legend()
        speed.set_ylabel("tokens/s")
        pyplot.close(figure)  # else a notebook shows it twice: as an open figure, and as the value of its cell
        return figure

    def _repr_html_(self) -> str:
        cells = (f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in self.summary.items())
        return f"<table>{''.join(cells)}</table>"
