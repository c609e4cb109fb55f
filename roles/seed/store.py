"""The seed's database: one SQLite file in its state directory, and one thread that uses it.

``Records`` is the blocking store, for that thread only. ``SeedStore`` is its interface for the event loop:

- Views and jobs must be durable before the seed continues, so their writes are awaited.
- All other rows are collected, and written in one transaction every ``FLUSH_S``.

Every commit is flushed to the disk (WAL, synchronous=FULL), so a minted view survives a power cut. With batches that is
a few flushes per second. A store that cannot be written ends the seed (``StorageError``): the ring trains on without
it, and a seed that forgets is worse than none.

All jobs and their checkpoints are kept. Other records are limited by the constants ``..._KEPT``: events in all;
metrics, views and recoveries per job. The ledger folds its oldest rows (``roles.seed.ledger``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from p2ptrain.core.disk import Disk, Lock, RealDisk
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.threads import RealThreads, Thread, Threads
from p2ptrain.core.world import Probe
from ring.view import View
from roles.seed import ledger
from roles.seed.ledger import LedgerEntry
from wire.job_messages import LedgerRow, MemberRecord
from wire.records import CheckpointInfo, EventInfo, LedgerHead, MetricRow, RecoveryInfo, ViewBegan

EVENTS_KEPT = 20_000
METRICS_KEPT = 500_000
VIEWS_KEPT = 1_000
RECOVERIES_KEPT = 2_000
FLUSH_S = 0.2
MAX_PENDING = 4096
"""Rows that may wait to be written. A sender of more rows waits for the disk."""
SCHEMA_VERSION = 2
FILE_NAME, LOCK_NAME = "seed.sqlite3", "seed.lock"
TERM_FACT = "term"

P = ParamSpec("P")
T = TypeVar("T")

_METRIC_COLUMNS = [item.name for item in dataclasses.fields(MetricRow)]
_RECOVERY_COLUMNS = [item.name for item in dataclasses.fields(RecoveryInfo)]
_CHECKPOINT_COLUMNS = [item.name for item in dataclasses.fields(CheckpointInfo)]
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs
    (id TEXT PRIMARY KEY, record TEXT NOT NULL, spec TEXT NOT NULL, created_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS views (job TEXT, generation INTEGER, step INTEGER, lineage TEXT, square_sum REAL,
    members TEXT, stages INTEGER, PRIMARY KEY (job, generation)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS metrics ({", ".join(_METRIC_COLUMNS)}, PRIMARY KEY (job, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events
    (id INTEGER PRIMARY KEY, wall REAL, level TEXT, kind TEXT, text TEXT, peer TEXT, job TEXT);
CREATE TABLE IF NOT EXISTS recoveries ({", ".join(_RECOVERY_COLUMNS)}, PRIMARY KEY (job, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints ({", ".join(_CHECKPOINT_COLUMNS)}, PRIMARY KEY (id)) WITHOUT ROWID;
{ledger.SCHEMA}
"""


def _insertion(table: str, columns: list[str]) -> str:
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"  # noqa: S608 - our own constants


_ADD_METRIC, _ADD_CHECKPOINT = _insertion("metrics", _METRIC_COLUMNS), _insertion("checkpoints", _CHECKPOINT_COLUMNS)
_ADD_RECOVERY = _insertion("recoveries", _RECOVERY_COLUMNS)


class CheckpointChange(NamedTuple):
    """A new checkpoint, and the ids of those that its holder deleted to make room."""

    added: CheckpointInfo
    dropped: Sequence[str] = ()


Row = MetricRow | EventInfo | LedgerEntry | RecoveryInfo | CheckpointChange


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it is stored. ``paused``: an operator asked for it; the state may not have reached it yet."""

    id: str
    name: str
    profile: str
    strategy: str
    workers: int
    micro_batches: int
    steps_total: int
    created_at: float
    state: str = "waiting"
    reason: str = ""
    paused: bool = False
    corpus: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    windows: int = 0
    """Training sequences in the corpus; 0 until a worker has reported them."""
    branch: list[str] | None = None
    """Peers whose newest checkpoint belongs to this run, after it went back; None: it never did."""
    restoring: list[Any] | None = None
    """Step, peer and lineage of the checkpoint that an operator restores, until a view starts from it."""
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    """Split model: worker → the stage that it holds, or held last (``ring.parts``)."""
    shape: dict[str, Any] | None = None
    """Split model: its sizes (``ring.planning.workloads.ModelShape``), if the job's creator sent them."""
    cuts: list[int] = dataclasses.field(default_factory=list)
    """Split model: the planned cuts; empty before the plan. Checkpoints depend on them, so they never change."""
    changes: list[list[Any]] = dataclasses.field(default_factory=list)
    """Fields of each ``SettingChange``."""
    asked_changes: list[list[Any]] = dataclasses.field(default_factory=list)
    """Those that no view has begun with yet."""
    unsettled: bool = False
    """The seed was restored, and does not know yet whether the job's members are in a newer view."""
    tracked: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """Tracker → how far it is (``roles.seed.tracking.Cursor``)."""


class Records:
    """The blocking store. All methods run on the thread that created it, and raise ``StorageError``."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        with _translate_errors(path):
            self._db = (disk or RealDisk()).connect(path)
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "journal_size_limit=4194304", "cache_size=-2048"):
                self._db.execute(f"PRAGMA {pragma}").fetchall()
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                text = f"{path} was written by another release (schema {version}, not {SCHEMA_VERSION})"
                raise StorageError(text, remedy="use the release that wrote it, or another --state")
            self._db.executescript(_SCHEMA + f"PRAGMA user_version = {SCHEMA_VERSION};")
        self._path = path

    def close(self) -> None:
        with _translate_errors(self._path):
            self._db.close()

    def image(self, change: Callable[[sqlite3.Connection], object]) -> bytes:
        """The bytes of the database's file, after ``change`` of a copy."""
        with _translate_errors(self._path), closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            self._db.backup(copy)
            change(copy)
            return file_of(copy)

    def fact(self, name: str, first: str) -> str:
        """What is stored under ``name``; ``first``, which is stored then, if there is nothing."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, first))
            return str(self._one("SELECT value FROM facts WHERE name = ?", name))

    # -------------------------------------------------------------------------------------------------- jobs and views

    def add_job(self, job: JobRecord, spec: str) -> None:
        with self._transaction():
            row = (job.id, json.dumps(dataclasses.asdict(job)), spec, job.created_at)
            self._db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?)", row)

    def save_job(self, job: JobRecord) -> None:
        with self._transaction():
            self._save(job)

    def change_layout(self, job: JobRecord, spec: str) -> None:
        """Store a job in another layout. The records of parts of its model go."""
        with self._transaction():
            self._save(job)
            self._db.execute("UPDATE jobs SET spec = ? WHERE id = ?", (spec, job.id))
            self._db.execute("DELETE FROM checkpoints WHERE job = ? AND stage IS NOT NULL", (job.id,))

    def _save(self, job: JobRecord) -> None:
        self._db.execute("UPDATE jobs SET record = ? WHERE id = ?", (json.dumps(dataclasses.asdict(job)), job.id))

    def jobs(self) -> list[tuple[JobRecord, str]]:
        found, names = list[tuple[JobRecord, str]](), {item.name for item in dataclasses.fields(JobRecord)}
        for record, spec in self._rows("SELECT record, spec FROM jobs ORDER BY created_at, id"):
            values = {name: value for name, value in json.loads(record).items() if name in names}  # others: once stored
            found.append((JobRecord(**values), spec))
        return found

    def forget_job(self, job: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM jobs WHERE id = ?", (job,))
            for table in ("views", "metrics", "checkpoints", "recoveries", *ledger.TABLES):
                self._db.execute(f"DELETE FROM {table} WHERE job = ?", (job,))  # noqa: S608 - our own constants

    def add_view(self, view: View, job: JobRecord) -> bool:
        """Store a view together with its job's record, and delete the rows of steps that the view takes back. Returns
        whether the ledger begins anew with the view (``ledger.view_began``)."""
        members = json.dumps([dataclasses.astuple(member) for member in view.members])
        row = (view.job, view.generation, view.step, view.lineage, view.square_sum, members, view.stages)
        with self._transaction():
            self._db.execute("INSERT INTO views VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._save(job)
            self._db.execute("DELETE FROM metrics WHERE job = ? AND step > ?", (view.job, view.step))
            departs = ledger.view_began(self._db, view)
            older = "SELECT generation FROM views WHERE job = ?1 ORDER BY generation DESC LIMIT 1 OFFSET ?2"
            sql = f"DELETE FROM views WHERE job = ?1 AND generation <= ({older})"  # noqa: S608 - our own constants
            self._db.execute(sql, (view.job, VIEWS_KEPT))  # by count: generations of two terms are far apart
        return departs

    def last_view(self, job: str) -> View | None:
        for row in self._rows("SELECT * FROM views WHERE job = ? ORDER BY generation DESC LIMIT 1", job):
            members = tuple(MemberRecord(*values) for values in json.loads(row[5]))
            return View(row[0], row[1], row[2], row[3], members, row[4], stages=row[6])
        return None

    def views(self, job: str, after_generation: int, limit: int) -> list[ViewBegan]:
        sql = """SELECT generation, step, lineage, members, stages FROM views WHERE job = ? AND generation > ?
            ORDER BY generation LIMIT ?"""
        return [
            ViewBegan(generation, step, lineage, [str(member[0]) for member in json.loads(members)], stages)
            for generation, step, lineage, members, stages in self._rows(sql, job, after_generation, limit)
        ]

    def begins(self, job: str) -> list[tuple[int, int, str]]:
        """Generation, step and lineage of each known view."""
        return self._rows("SELECT generation, step, lineage FROM views WHERE job = ?", job)

    # ------------------------------------------------------------------------------------------------- all other rows

    def add_rows(self, rows: list[Row]) -> None:
        metrics, events = _of_kind(rows, MetricRow), _of_kind(rows, EventInfo)
        with self._transaction():
            ledger.add(self._db, _of_kind(rows, LedgerEntry))
            for recovery in _of_kind(rows, RecoveryInfo):
                self._db.execute(_ADD_RECOVERY, dataclasses.astuple(recovery))
                oldest = (recovery.job, recovery.number - RECOVERIES_KEPT)
                self._db.execute("DELETE FROM recoveries WHERE job = ? AND number <= ?", oldest)
            self._db.executemany(_ADD_METRIC, [dataclasses.astuple(row) for row in metrics])
            for job, step in {row.job: row.step for row in metrics}.items():
                self._db.execute("DELETE FROM metrics WHERE job = ? AND step <= ?", (job, step - METRICS_KEPT))
            values = [dataclasses.astuple(event) for event in events]
            self._db.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            if events:
                self._db.execute("DELETE FROM events WHERE id <= ?", (events[-1].id - EVENTS_KEPT,))
            for added, dropped in _of_kind(rows, CheckpointChange):
                self._db.execute(_ADD_CHECKPOINT, dataclasses.astuple(added))
                self._db.executemany("DELETE FROM checkpoints WHERE id = ?", [(item,) for item in dropped])

    def remove_checkpoints(self, ids: list[str]) -> None:
        with self._transaction():
            self._db.executemany("DELETE FROM checkpoints WHERE id = ?", [(item,) for item in ids])

    def checkpoints(self, job: str = "") -> list[CheckpointInfo]:
        return self._select(CheckpointInfo, "checkpoints WHERE ?1 IN ('', job) ORDER BY created_at, id", job)

    def ledger_head(self, job: str) -> LedgerHead | None:
        with _translate_errors(self._path):
            return ledger.head(self._db, job)

    def ledger_rows(self, job: str, after_step: int, limit: int) -> list[LedgerRow]:
        with _translate_errors(self._path):
            return ledger.rows(self._db, job, after_step, limit)

    def recoveries(self, job: str, limit: int) -> list[RecoveryInfo]:
        return self._select(RecoveryInfo, "recoveries WHERE job = ? ORDER BY number DESC LIMIT ?", job, limit)[::-1]

    def metrics(self, job: str, after_step: int, limit: int) -> list[MetricRow]:
        return self._select(
            MetricRow, "metrics WHERE job = ? AND step > ? ORDER BY step LIMIT ?", job, after_step, limit
        )

    def last_metrics(self, job: str, limit: int) -> list[MetricRow]:
        return self._select(MetricRow, "metrics WHERE job = ? ORDER BY step DESC LIMIT ?", job, limit)[::-1]

    def last_val_loss(self, job: str) -> float | None:
        sql = "SELECT val_loss FROM metrics WHERE job = ? AND val_loss IS NOT NULL ORDER BY step DESC LIMIT 1"
        value = self._one(sql, job)
        return None if value is None else float(value)

    def mean_step_ms(self, job: str) -> tuple[float, int]:
        """The mean time of the job's known steps, and their number."""
        sql = "SELECT coalesce(avg(step_ms), 0.0), count(step_ms) FROM metrics WHERE job = ?"
        ((mean, count),) = self._rows(sql, job)
        return float(mean), int(count)

    def events(self, after_id: int, limit: int) -> list[EventInfo]:
        return self._select(EventInfo, "events WHERE id > ? ORDER BY id LIMIT ?", after_id, limit)

    def last_event_id(self) -> int:
        return int(self._one("SELECT coalesce(max(id), 0) FROM events"))

    # -------------------------------------------------------------------------------------------------------- helpers

    def _select(self, kind: Callable[..., T], of: str, *values: object) -> list[T]:
        return [kind(*row) for row in self._rows(f"SELECT * FROM {of}", *values)]  # noqa: S608 - our own constants

    def _one(self, sql: str, *values: object) -> Any:
        rows = self._rows(sql, *values)
        return rows[0][0] if rows else None

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with _translate_errors(self._path):
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translate_errors(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def _of_kind(rows: Sequence[Row], kind: type[T]) -> list[T]:
    return [row for row in rows if isinstance(row, kind)]


def file_of(database: sqlite3.Connection) -> bytes:
    data = database.serialize()
    return data[:18] + b"\1\1" + data[20:]  # bytes 18 and 19 say: no write-ahead log


class SeedStore:
    """The event loop's interface to ``Records``. Created by ``open``."""

    def __init__(self, records: Records, thread: Thread, lock: Lock, probe: Probe) -> None:
        self._records, self._thread, self._lock, self._probe = records, thread, lock, probe
        self._rows: list[Row] = []
        self._news = asyncio.Event()

    @classmethod
    async def open(
        cls, disk: Disk, directory: Path, threads: Threads | None = None, probe: Probe | None = None
    ) -> Self:
        """Open the store in ``directory``. A missing directory is created, accessible to its owner only. Raises
        ``UserError`` if another seed uses it, and ``StorageError``."""
        disk.make_dir(directory)
        lock = disk.try_lock(directory / LOCK_NAME)
        if lock is None:
            text = f"another seed is running on {directory}"
            raise UserError(text, remedy="stop it, or give this one another directory with --state")
        thread = (threads or RealThreads()).start("store")
        try:
            path = directory / FILE_NAME
            records = await thread.submit(lambda: Records(path, disk))
        except BaseException:
            thread.close()
            lock.close()
            raise
        return cls(records, thread, lock, probe or Probe())

    async def call(self, method: Callable[Concatenate[Records, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Write all rows added before, then run a method of ``Records``. Raises ``StorageError``."""
        self._rows, rows = [], self._rows

        def run() -> T:
            if rows:
                self._records.add_rows(rows)
                self._probe.event("stored", method=Records.add_rows, arguments=(rows,))
            result = method(self._records, *args, **kwargs)
            self._probe.event("stored", method=method, arguments=args)
            return result

        return await self._thread.submit(run)

    def add(self, row: Row) -> None:
        """Queue a row to be written soon. The sender of many rows should await ``make_room``."""
        self._rows.append(row)
        self._news.set()

    async def make_room(self) -> None:
        """If too many rows wait, wait until they are durable. Raises ``StorageError``."""
        if len(self._rows) >= MAX_PENDING:
            await self.flush()

    async def flush(self) -> None:
        """Wait until all added rows are durable. Raises ``StorageError``."""
        await self.call(lambda records: None)

    async def run(self) -> None:
        """Write added rows in batches, until cancelled. Raises ``StorageError``."""
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(FLUSH_S)  # collect a batch
            await self.flush()

    async def close(self) -> None:
        """Flush, close, and release the directory's lock. Raises ``StorageError``."""
        try:
            await self.call(Records.close)
        finally:
            self._thread.close()
            self._lock.close()


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OverflowError, UnicodeError) as error:  # the last two: a value that SQLite cannot store
        text = str(error)
        if "full" in text:
            remedy = "free some space on that disk, then run the same command again"
        elif "malformed" in text or "not a database" in text:
            remedy = f"the file is damaged: move {path.name} away and start again, or restore it from a backup"
        else:
            remedy = "check the disk, and the owner and permissions of --state"
        raise StorageError(f"cannot use {path}: {text}", remedy=remedy) from error
