"""The results of an experiment on disk: ``results.csv`` has a row for each run, ``curves/`` a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import StorageError, UserError

if TYPE_CHECKING:
    from roles.experiments.grid import Plan, Run

GRID, RESULTS, CURVES, LOCK = "grid.json", "results.csv", "curves", ".lock"
MAX_FILE_BYTES = 64 << 20
DONE = "done"
KEYS = ("run", "repeat", "random_seed", "state", "reason")
"""Columns besides the axes, the settings and what the runs measure."""
FIGURES = (
    "duration_s", "steps", "tokens", "tokens_per_s", "step_ms", "compute_ms", "sent_bytes", "loss", "best_loss",
    "val_loss", "best_val_loss", "memory_bytes", "recoveries", "rejected", "epsilon",
)  # fmt: skip
"""Columns that the runs measure; docs/experiments.md explains them. Times to losses follow."""
POINT = ("step", "time_s", "tokens", "sent_bytes", "loss", "val_loss")
"""Columns of a curve."""
_AGAIN = "name another directory; to this one only values and repeats can be added"

Row = dict[str, Any]


def time_to(target: float) -> str:
    """Column of the time to a loss."""
    return f"seconds_to_{target:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """What a run led to.

    Attributes:
        state: ``done``, ``out-of-memory``, ``diverged``, ``time-limit``, ``refused`` or ``failed``.
        figures: ``FIGURES`` and times to losses; what is missing is unknown.
        curve: a row for each step, with the columns ``POINT``.
    """

    state: str
    reason: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    curve: Sequence[Sequence[float | None]] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a directory. ``grid``: the document. ``axes``: axis → its labels. ``planned``: number of runs."""

    grid: dict[str, Any]
    axes: dict[str, list[str]]
    targets: list[float]
    simulated: bool
    planned: int
    rows: list[Row]
    directory: Path

    def curve(self, run: str) -> list[Row]:
        return _read_csv(self.directory / CURVES / f"{run}.csv", POINT)


class Results:
    """The directory of an experiment that runs. It is locked until ``close``.

    Attributes:
        rows: run id → row, of the runs that are over.
    """

    def __init__(self, directory: Path, plan: Plan, *, simulated: bool = False) -> None:
        """Raises ``UserError`` if the directory is in use, or holds results of another grid; ``StorageError``."""
        self.directory, self.plan, self.rows = directory, plan, dict[str, Row]()
        self._disk = RealDisk()
        self._disk.make_dir(directory / CURVES)
        lock = self._disk.try_lock(directory / LOCK)
        if lock is None:
            raise UserError(f"another experiment runs in {directory}", remedy="wait for it, or name another directory")
        self.close = lock.close
        try:
            self._take_up(simulated)
        except BaseException:
            lock.close()
            raise
        told = {"grid": plan.grid.model_dump(), "axes": plan.axes, "planned": len(plan.runs), "simulated": simulated}
        self._write(GRID, json.dumps(told, indent=1))

    def missing(self) -> list[Run]:
        return [run for run in self.plan.runs if run.id not in self.rows]

    def add(self, run: Run, result: Result) -> Row:
        """Record a run. The files are replaced as a whole, so a crash loses at most this run."""
        if result.curve:
            self._write(f"{CURVES}/{run.id}.csv", _csv([POINT, *result.curve]))
        told = {"state": result.state, "reason": " ".join(result.reason.split()), **result.figures}
        row = self.rows[run.id] = self._row(run, told)
        self._write(RESULTS, _csv([row, *(known.values() for known in self.rows.values())]))
        return row

    def _take_up(self, simulated: bool) -> None:
        if not (self.directory / RESULTS).is_file():
            return
        before, runs = load(self.directory), {run.id: run for run in self.plan.runs}
        if other := sum(row["run"] not in runs for row in before.rows):
            raise UserError(f"{self.directory} has results of {other} runs that are not in this grid", remedy=_AGAIN)
        if (before.targets, before.simulated) != (self.plan.grid.loss_targets, simulated):
            text = f"{self.directory} has results with other loss_targets, or of another mode"
            raise UserError(text, remedy=_AGAIN)
        self.rows = {row["run"]: self._row(runs[row["run"]], row) for row in before.rows}

    def _row(self, run: Run, measured: Mapping[str, Any]) -> Row:
        """All rows have the same columns in the same order, whatever the file had: a new value may bring a setting."""
        settings = {key: value for key, value in run.settings.items() if key not in run.cell}
        row = {"run": run.id, **run.cell, **settings, "repeat": run.repeat, "random_seed": run.profile.job.seed}
        columns = ("state", "reason", *FIGURES, *map(time_to, self.plan.grid.loss_targets))
        return row | {name: measured.get(name) for name in columns}

    def _write(self, name: str, text: str) -> None:
        write_atomic(self._disk, self.directory / name, text.encode())


def load(directory: Path) -> Found:
    """Read the results of a directory. Raises ``UserError`` if there are none; ``StorageError`` if they are damaged."""
    path = directory / GRID
    if not path.is_file():
        raise UserError(f"{directory} holds no experiment", remedy="name the directory of `p2ptrain experiment run`")
    try:
        told = json.loads(RealDisk().read(path, max_bytes=MAX_FILE_BYTES))
        axes = {str(axis): [str(label) for label in labels] for axis, labels in told["axes"].items()}
        grid, targets = dict(told["grid"]), [float(target) for target in told["grid"]["loss_targets"]]
        found = Found(grid, axes, targets, bool(told["simulated"]), int(told["planned"]), [], directory)
        rows = _read_csv(directory / RESULTS, ("repeat", *FIGURES, *map(time_to, targets)))
        for row in rows:
            if not row.get("run") or not row.get("state") or any(row.get(it) not in axes[it] for it in axes):
                raise ValueError(f"{RESULTS} has a row without a run, a state or a known value of each axis")
        return replace(found, rows=list({row["run"]: row for row in rows}.values()))  # a copied row counts once
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise StorageError(f"{directory} is damaged: {error}", remedy="use another directory") from None


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _read_csv(path: Path, numbers: Sequence[str]) -> list[Row]:
    """Rows as texts; ``numbers`` as numbers, and None where they are empty. Nothing if there is no file."""
    if not path.is_file():
        return []
    rows: list[Row] = list(csv.DictReader(io.StringIO(RealDisk().read(path, max_bytes=MAX_FILE_BYTES).decode())))
    return [row | {name: float(row[name]) if row.get(name) else None for name in numbers} for row in rows]
