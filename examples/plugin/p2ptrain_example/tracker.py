"""Tracker ``csv``: a table of some figures, a line for each step."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from configs.schema import Track
from roles.track.writers import Point, TrackedRun, Writer


class CsvTable(Writer):
    """``columns``: names of figures, with commas between."""

    _file: TextIO

    def __init__(self, track: Track, environ: Mapping[str, str], *, columns: str = "train/loss,val/loss") -> None:
        super().__init__(track, environ)
        self._columns = columns.split(",")

    def begin(self, run: TrackedRun) -> None:
        super().begin(run)
        path = run.directory / "metrics.csv"
        rows = list(csv.reader(path.open(encoding="utf-8", newline=""))) if path.exists() else []
        # A job may go back to an earlier step: each step is in the table once.
        kept = [row for row in rows[1:] if len(row) == 1 + len(self._columns) and int(row[0]) <= run.after_step]
        self._file = path.open("w", encoding="utf-8", newline="")
        csv.writer(self._file).writerows([["step", *self._columns], *kept])

    def write(self, points: Sequence[Point]) -> None:
        rows = [[point.step, *(point.values.get(name, "") for name in self._columns)] for point in points]
        csv.writer(self._file).writerows(rows)
        self._file.flush()
        os.fsync(self._file.fileno())

    def end(self, state: str) -> None:
        self._file.close()
