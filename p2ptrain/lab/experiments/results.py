"""The results of an experiment on disk: ``results.csv`` has a row for each run, ``curves/`` a file."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.lab.experiments.grid import Grid, GridPlan, GridRun

GRID, RESULTS, CURVES, LOCK = "grid.json", "results.csv", "curves", ".lock"
MAX_FILE_BYTES = 64 << 20
DONE = "done"
ALONE = "alone"
"""State of a run that came to its end, but a worker trained some steps without the others."""
FIGURES = (
    "duration_s", "steps", "tokens", "tokens_per_s", "step_ms", "compute_ms", "sent_bytes", "loss", "best_loss",
    "val_loss", "best_val_loss", "memory_bytes", "members_mean", "members_min", "generation_changes", "recoveries",
    "rejected", "epsilon",
)  # fmt: skip
"""Columns that the runs measure; docs/experiments.md explains them. Times and bytes to losses follow."""
POINT = ("step", "time_s", "tokens", "sent_bytes", "loss", "val_loss")
"""Columns of a curve."""

Row = dict[str, Any]


def time_to(target: float) -> str:
    return f"seconds_to_{target:g}"


def bytes_to(target: float) -> str:
    """Column of the bytes that all workers had sent when a loss was reached."""
    return f"bytes_to_{target:g}"


def measured_columns(targets: Sequence[float]) -> list[str]:
    return [*FIGURES, *(column(target) for target in targets for column in (time_to, bytes_to))]


@dataclass(frozen=True, slots=True)
class Result:
    """What a run led to.

    Attributes:
        state: ``done``, ``alone``, ``out-of-memory``, ``diverged``, ``time-limit``, ``refused`` or ``failed``.
        figures: those of ``measured_columns``; what is missing is unknown.
        curve: a row for each step, with the columns ``POINT``.
    """

    state: str
    reason: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    curve: Sequence[Sequence[float | None]] = ()


class Results:
    """The directory of an experiment that runs. It is locked until ``close``.

    Attributes:
        rows: run id → row, of the runs that are over.
    """

    def __init__(self, directory: Path, plan: GridPlan) -> None:
        """Raises ``UserError`` if the directory is in use, or holds results of another grid; ``StorageError``."""
        self.directory, self.plan, self.rows = directory, plan, dict[str, Row]()
        self._disk = RealDisk()
        self._disk.make_dir(directory / CURVES)
        lock = self._disk.try_lock(directory / LOCK)
        if lock is None:
            raise UserError(f"another experiment runs in {directory}", remedy="wait for it, or name another directory")
        self.close = lock.close
        self._measured = ("state", "reason", *measured_columns(plan.grid.loss_targets))
        try:
            if taken := plan.grid.axes.keys() & {"run", "repeat", "random_seed", *self._measured}:
                raise UserError(f"the results have a column {min(taken)}", remedy="rename this axis")
            if (directory / RESULTS).is_file():
                self.rows = {row["run"]: row for row in load(directory)[1]}
            if others := self.rows.keys() - {run.id for run in plan.runs}:
                text = f"{directory} has results of {len(others)} runs that are not in this grid"
                remedy = "name another directory; to this one only values and repeats can be added"
                raise UserError(text, remedy=remedy)
            self._write(GRID, plan.grid.model_dump_json(indent=1))
        except BaseException:
            lock.close()
            raise

    def missing(self) -> list[GridRun]:
        return [run for run in self.plan.runs if run.id not in self.rows]

    def add(self, run: GridRun, result: Result) -> Row:
        """Record a run. The files are replaced as a whole, so a crash loses at most this run."""
        if result.curve:
            points = [dict(zip(POINT, point, strict=True)) for point in result.curve]
            self._write(f"{CURVES}/{run.id}.csv", _csv(points))
        measured = {"state": result.state, "reason": " ".join(result.reason.split()), **result.figures}
        row = {"run": run.id, **run.cell, **run.settings, **run.cell, "repeat": run.repeat}
        row |= {"random_seed": run.profile.job.seed, **{name: measured.get(name) for name in self._measured}}
        self.rows[run.id] = row
        self._write(RESULTS, _csv(self.rows.values()))
        return row

    def _write(self, name: str, text: str) -> None:
        write_atomic(self._disk, self.directory / name, text.encode())


def load(directory: Path) -> tuple[Grid, list[Row]]:
    """Read a directory. Raises ``UserError`` if it is of no experiment; ``StorageError`` if it is damaged."""
    if not (directory / GRID).is_file():
        raise UserError(f"{directory} holds no experiment", remedy="name the directory of `p2ptrain experiment run`")
    try:
        grid = Grid.model_validate_json(RealDisk().read(directory / GRID, max_bytes=MAX_FILE_BYTES))
        numbers, path = ("repeat", *measured_columns(grid.loss_targets)), directory / RESULTS
        text = RealDisk().read(path, max_bytes=MAX_FILE_BYTES).decode() if path.is_file() else ""
        rows: dict[str, Row] = {row["run"]: row for row in csv.DictReader(io.StringIO(text))}  # a copy counts once
        for row in rows.values():
            if not row["state"] or any(row[axis] not in labels for axis, labels in grid.axes.items()):
                raise ValueError(f"{RESULTS} has a row without a state, or without a known value of each axis")
            row |= {name: float(row[name]) if row.get(name) else None for name in numbers}
        return grid, list(rows.values())
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise StorageError(f"{directory} is damaged: {error}", remedy="use another directory") from None


def _csv(rows: Collection[Row]) -> str:
    """A column for each key that a row has: a new value of an axis may bring a setting."""
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(itertools.chain(*rows)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
