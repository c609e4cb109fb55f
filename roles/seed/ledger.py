"""The seed's ledger: one row per step, which records the members' shares of it (``ring.ledger``).

A row takes less than 50 bytes on the disk, plus 4 per member. With strategy 'server' each contribution takes 26
more. When a job has more than 17/16 of ``ROWS_KEPT`` rows, the oldest are folded into its *base*:
a step and the lineage at that step. Folded rows were verified when they were taken in. So the table of a job with 8
members has at most 90 MB.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from ring.ledger import (
    Begins,
    Placed,
    begin_anew,
    counts_of_untrusted,
    extend_ledger,
    head_after,
    rows_untrusted,
    select_rows,
)
from ring.token import next_lineage
from ring.view import View
from wire.job_messages import LedgerRow, LedgerRows
from wire.records import LedgerHead

ROWS_KEPT = 1_000_000
ROWS_AHEAD = 4096
"""Rows kept beyond a gap, at most: as many as a member keeps. With more the gap is given up."""
TABLES = ("ledger", "ledgers")
SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (job TEXT, step INTEGER, generation INTEGER, digest BLOB, counts BLOB,
    made_of BLOB, PRIMARY KEY (job, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledgers (job TEXT PRIMARY KEY, base_step INTEGER, base_lineage TEXT, step INTEGER,
    lineage TEXT) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    job: str
    row: LedgerRow
    head: LedgerHead


class JobLedger:
    """The part of one job's ledger that the event loop needs. Pure.

    Args:
        begins: generation, step and lineage of each known view.

    Attributes:
        head: None before the first view.
        counts: micro-batches of each member in the newest row, in the rank order of view ``generation``.
    """

    def __init__(self, job: str, head: LedgerHead | None = None, begins: Iterable[tuple[int, int, str]] = ()) -> None:
        self.head = head
        self.begins = Begins(begins)
        self.generation = 0
        self.counts: tuple[int, ...] = ()
        self._job = job
        self._contradicted = ""
        # Step → placed row beyond a gap. Its sender may be gone when another member fills the gap.
        self._ahead: dict[int, Placed] = {}

    @property
    def step(self) -> int:
        return self.head.step if self.head else 0

    def view_began(self, view: View) -> None:
        self.head = head_after(self.head, view)
        self.begins.add(view.generation, view.step, view.lineage)
        self._contradicted = ""
        self._ahead = {step: row for step, row in self._ahead.items() if step <= view.step}

    def restart(self, view: View) -> None:
        self.head = begin_anew(view)
        self._ahead = {}

    def take_untrusted(
        self, message: LedgerRows, view: View, *, micro_batches: int, steps_total: int, held: Sequence[range] = ()
    ) -> tuple[list[LedgerEntry], str]:
        """Take in a member's rows. Raises ``ProtocolError`` if they are malformed.

        ``held``: the steps of which each member of the view has rows, as it reported; empty if not all have reported.
        Returns the new entries, and in words a contradiction or a gap that was given up. Contradictions are reported
        once per view.
        """
        rows = rows_untrusted(message, micro_batches=micro_batches, steps_total=steps_total)
        if self.head is None:
            return [], ""
        placed = select_rows(view, self.begins, message.lineage, rows)
        entries, problem = self._append(view, placed)
        if not problem:
            self._ahead |= {row.step: (lineage, row) for lineage, row in placed if row.step > self.step + 1}
        gap = self._give_up_gap(held)
        found: Placed | None
        while found := self._ahead.pop(self.step + 1, None):
            more, contradiction = self._append(view, [found])
            entries, problem = entries + more, problem or contradiction
        if entries:
            newest = entries[-1].row
            self.generation, self.counts = newest.generation, counts_of_untrusted(newest.counts)
        problem, self._contradicted = "" if self._contradicted else problem, self._contradicted or problem
        return entries, gap or problem

    def _append(self, view: View, placed: Sequence[Placed]) -> tuple[list[LedgerEntry], str]:
        assert self.head is not None
        head, entries = self.head, []
        self.head, taken, problem = extend_ledger(self.head, view, self.begins, placed)
        for row in taken:
            head = LedgerHead(head.base_step, head.base_lineage, row.step, next_lineage(head.lineage, row.digest))
            entries.append(LedgerEntry(self._job, row, head))
            self._ahead.pop(row.step, None)
        return entries, problem

    def _give_up_gap(self, held: Sequence[range]) -> str:
        """Restart the ledger after a gap that no member can fill any more. Returns the event in words, or ""."""
        wanted = self.step + 1
        next_known = min((max(steps.start, wanted) for steps in held if steps.stop > wanted), default=wanted)
        while (first := min(self._ahead) if len(self._ahead) >= ROWS_AHEAD else next_known) in self._ahead:
            if first == wanted:
                return ""
            lineage = self._ahead[first][0]
            self._ahead = {step: row for step, row in self._ahead.items() if step >= first}
            if self.begins.lineage_at(first - 1) in ("", lineage):
                self.head = LedgerHead(first - 1, lineage, first - 1, lineage)
                steps = f"step {wanted} is" if first == wanted + 1 else f"steps {wanted} to {first - 1} are"
                return f"{steps} not on record: no member remembers them; the record restarts with step {first}"
            del self._ahead[first]
        return ""


# ---------------------------------------------------------------------------- on the store's thread, in a transaction


def head(db: sqlite3.Connection, job: str) -> LedgerHead | None:
    found = db.execute("SELECT base_step, base_lineage, step, lineage FROM ledgers WHERE job = ?", (job,)).fetchone()
    return LedgerHead(*found) if found else None


def rows(db: sqlite3.Connection, job: str, after_step: int, limit: int) -> list[LedgerRow]:
    sql = """SELECT step, generation, digest, counts, made_of FROM ledger WHERE job = ? AND step > ?
        ORDER BY step LIMIT ?"""
    return [LedgerRow(*found) for found in db.execute(sql, (job, after_step, limit))]


def view_began(db: sqlite3.Connection, view: View) -> bool:
    """Delete the rows of steps that a view takes back. Returns whether the ledger begins anew with the view, because
    the view's lineage contradicts the rows."""
    before = head(db, view.job)
    departs = (
        before is not None
        and before.base_step <= view.step <= before.step
        and _lineage_at(db, view.job, before, view.step) != view.lineage
    )
    kept_step = -1 if departs else view.step
    db.execute("DELETE FROM ledger WHERE job = ? AND step > ?", (view.job, kept_step))
    _set_head(db, view.job, begin_anew(view) if departs else head_after(before, view))
    return departs


def _lineage_at(db: sqlite3.Connection, job: str, whole: LedgerHead, step: int) -> str:
    if step == whole.step:
        return whole.lineage
    sql = """SELECT views.step, views.lineage FROM ledger JOIN views USING (job, generation)
        WHERE job = ? AND ledger.step = ? AND views.step BETWEEN ? AND ?"""
    found = db.execute(sql, (job, step + 1, whole.base_step, step)).fetchone()
    begin, lineage = found or (whole.base_step, whole.base_lineage)
    sql = "SELECT digest FROM ledger WHERE job = ? AND step > ? AND step <= ? ORDER BY step"
    for (digest,) in db.execute(sql, (job, begin, step)):
        lineage = next_lineage(lineage, digest)
    return lineage


def add(db: sqlite3.Connection, entries: Sequence[LedgerEntry]) -> None:
    newest = {entry.job: entry.head for entry in entries}
    first = {entry.job: entry.head for entry in entries if entry.row.step == entry.head.base_step + 1}
    values = [(entry.job, *astuple(entry.row)) for entry in entries]
    db.executemany("INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?, ?, ?)", values)
    for job, found in newest.items():
        if job in first:  # the ledger may have begun anew
            db.execute("DELETE FROM ledger WHERE job = ? AND step <= ?", (job, found.base_step))
        before = first.get(job) or head(db, job) or found  # the stored base may be newer, after folding
        whole = LedgerHead(before.base_step, before.base_lineage, found.step, found.lineage)
        _set_head(db, job, _fold_oldest(db, job, whole))


def _fold_oldest(db: sqlite3.Connection, job: str, whole: LedgerHead) -> LedgerHead:
    spare = ROWS_KEPT // 16
    if whole.step - whole.base_step <= ROWS_KEPT + spare:
        return whole
    lineage = whole.base_lineage
    for row in rows(db, job, whole.base_step, spare):
        lineage = next_lineage(lineage, row.digest)
    step = whole.base_step + spare
    db.execute("DELETE FROM ledger WHERE job = ? AND step <= ?", (job, step))
    return LedgerHead(step, lineage, whole.step, whole.lineage)


def _set_head(db: sqlite3.Connection, job: str, new: LedgerHead) -> None:
    db.execute("INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?, ?, ?)", (job, *astuple(new)))
