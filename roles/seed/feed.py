"""The rows of a seed's store on their way to a standby: what changed, what the bytes are, how they are taken in.

The leader's side lives on its store's thread. While somebody follows, triggers log the key of every row that is
written or removed, whatever statement did it, in a temporary table; rows are read when a batch is made, so a row that
changed ten times is sent once. A *first copy* is every table, page by page, and then the log since its begin; what
follows is the log alone. A batch is *whole* where it leaves nothing in the log: the standby's store is then what the
leader's was at one moment. A standby takes batches in within one SQLite transaction from one whole batch to the
next, so that its file is, whenever it dies, the whole copy of one moment, or what it was before the first copy.

Sizes: a batch has ``BATCH_BYTES`` and one row at most; the log ``MAX_LOGGED`` keys: who is further behind copies anew.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack

from p2ptrain.core.errors import ProtocolError

BATCH_BYTES = 512 << 10
MAX_BATCH_BYTES = 16 << 20
"""Of a batch with the largest row there can be, the book of tickets, which has 8 MiB at most."""
BATCH_ROWS = 4096
MAX_LOGGED = 200_000
FILES = "files"
"""Name of what is no table: the files of the authority, as rows of name and bytes."""
MAX_VALUES = 64

Value = int | float | str | bytes | None
_TYPES = (int, float, str, bytes, type(None))
_LOG = "feed_log"
_MAX_INT = 2**63


@dataclass(frozen=True, slots=True)
class Change:
    """One row as it is now, or, where it is ``gone``, the key that it had."""

    table: str
    values: tuple[Value, ...]
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes up to ``mark`` in the log; ``whole``: there are no others."""

    mark: int
    whole: bool
    changes: list[Change]


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of one table in the order of its key, and the key to go on after; None where that was all."""

    changes: list[Change]
    after: tuple[Value, ...] | None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """``keys``: the columns of its primary key, in order; ``at``: where they are in a row."""

    name: str
    columns: int
    keys: tuple[str, ...]
    at: tuple[int, ...]


def tables(db: sqlite3.Connection) -> dict[str, Table]:
    """All tables of a store, by name: none is forgotten that a later release adds."""
    found = {}
    names = db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    for (name,) in sorted(names.fetchall()):
        columns = db.execute("SELECT name, pk FROM pragma_table_info(?)", (name,)).fetchall()
        keyed = sorted((pk, index, column) for index, (column, pk) in enumerate(columns) if pk)
        found[name] = Table(name, len(columns), tuple(key[2] for key in keyed), tuple(key[1] for key in keyed))
    return found


# ------------------------------------------------------------------------------------------------- the leader's side


class Feed:
    """The log of one store. On its thread; every method may raise ``sqlite3.Error``."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._tables: dict[str, Table] = {}
        self.stop()  # what a process that was killed left in a connection that outlived it, as simulated ones do

    @property
    def on(self) -> bool:
        return bool(self._tables)

    @property
    def names(self) -> list[str]:
        """Of the tables that are logged."""
        return list(self._tables)

    def start(self) -> int:
        """Log from now on; returns the mark of this moment."""
        if not self.on:
            self._db.execute("PRAGMA temp_store=MEMORY")
            self._db.execute(f"CREATE TEMP TABLE {_LOG} (seq INTEGER PRIMARY KEY AUTOINCREMENT, name, one, two)")
            self._tables = tables(self._db)
            for table in self._tables.values():
                for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                    key = [*(f"{row}.{column}" for column in table.keys), "NULL"][:2]
                    insertion = f"INSERT INTO {_LOG} (name, one, two) VALUES ('{table.name}', {', '.join(key)})"  # noqa: S608
                    name = f"feed_{table.name}_{event}"
                    self._db.execute(
                        f"CREATE TEMP TRIGGER {name} AFTER {event} ON main.{table.name} BEGIN {insertion}; END"
                    )
        return self.mark()

    def stop(self) -> None:
        """Nobody follows: log no more."""
        self._tables = {}
        for (name,) in self._db.execute("SELECT name FROM temp.sqlite_master WHERE type = 'trigger'").fetchall():
            self._db.execute(f"DROP TRIGGER temp.{name}")
        self._db.execute(f"DROP TABLE IF EXISTS temp.{_LOG}")

    def mark(self) -> int:
        """The number of the newest change; 0 where nothing is logged."""
        if not self.on:
            return 0
        found = self._db.execute("SELECT seq FROM temp.sqlite_sequence WHERE name = ?", (_LOG,)).fetchone()
        return int(found[0]) if found else 0

    def forget(self, upto: int) -> int:
        """Drop what all have; returns how much is left."""
        self._db.execute(f"DELETE FROM temp.{_LOG} WHERE seq <= ?", (upto,))  # noqa: S608 - our own constants
        return self.mark() - upto

    def page(self, name: str, after: tuple[Value, ...] | None) -> Page:
        """The next rows of a table."""
        table = self._tables[name]
        columns, marks = ", ".join(table.keys), ", ".join("?" * len(table.keys))
        where = f"WHERE ({columns}) > ({marks})" if after is not None else ""
        cursor = self._db.execute(f"SELECT * FROM main.{name} {where} ORDER BY {columns}", after or ())  # noqa: S608
        changes: list[Change] = []
        size_bytes = 0
        for row in cursor:
            changes.append(Change(name, tuple(row)))
            size_bytes += _size_bytes(row)
            if size_bytes >= BATCH_BYTES or len(changes) >= BATCH_ROWS:
                cursor.close()
                return Page(changes, tuple(row[index] for index in table.at), size_bytes)
        return Page(changes, None, size_bytes)

    def changes(self, after: int) -> Batch:
        """What changed since ``after``, as it is now."""
        sql = f"SELECT seq, name, one, two FROM temp.{_LOG} WHERE seq > ? ORDER BY seq LIMIT ?"  # noqa: S608
        seen: dict[tuple[str, tuple[Value, ...]], Change] = {}
        mark, size_bytes = after, 0
        for seq, name, one, two in self._db.execute(sql, (after, BATCH_ROWS)).fetchall():
            table, key = self._tables[name], (one, two)[: len(self._tables[name].keys)]
            if (name, key) not in seen:
                change = seen[name, key] = self._now(table, key)
                size_bytes += _size_bytes(change.values)
            mark = seq
            if size_bytes >= BATCH_BYTES:
                break
        return Batch(mark, mark >= self.mark(), list(seen.values()))

    def _now(self, table: Table, key: tuple[Value, ...]) -> Change:
        where = " AND ".join(f"{column} = ?" for column in table.keys)
        row = self._db.execute(f"SELECT * FROM main.{table.name} WHERE {where}", key).fetchone()  # noqa: S608
        return Change(table.name, key, gone=True) if row is None else Change(table.name, tuple(row))


def _size_bytes(row: Sequence[Value]) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else 9 for value in row)


# ----------------------------------------------------------------------------------------------------------- the bytes


def packed(changes: Sequence[Change]) -> bytes:
    """A batch as it travels, in parts. ``changes_untrusted`` reads it."""
    data: bytes = msgpack.packb([[change.table, change.gone, list(change.values)] for change in changes])
    return data


def changes_untrusted(data: bytes) -> list[Change]:
    """The changes in a batch's bytes. Raises ``ProtocolError``."""
    if len(data) > MAX_BATCH_BYTES:
        raise ProtocolError(f"a batch of {len(data)} bytes, {MAX_BATCH_BYTES} are allowed")
    try:
        found = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            max_str_len=MAX_BATCH_BYTES,
            max_bin_len=MAX_BATCH_BYTES,
            max_array_len=BATCH_ROWS + MAX_VALUES,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a batch of rows: {error or type(error).__name__}") from error
    if type(found) is not list:
        raise ProtocolError("a batch that is no list")
    return [_change_untrusted(item) for item in found]


def _change_untrusted(item: object) -> Change:
    if type(item) is not list or len(item) != 3:
        raise ProtocolError("a row that does not say where it belongs")
    name, gone, values = item
    if type(name) is not str or type(gone) is not bool or type(values) is not list or len(values) > MAX_VALUES:
        raise ProtocolError("a row that does not say where it belongs")
    for value in values:
        if type(value) not in _TYPES or (type(value) is int and not -_MAX_INT <= value < _MAX_INT):
            raise ProtocolError(f"a row of {name[:40]!r} with a {type(value).__name__} that no store holds")
    return Change(name, tuple(values), gone)


# ------------------------------------------------------------------------------------------------ the standby's side


def take_untrusted(db: sqlite3.Connection, changes: Sequence[Change], *, first: bool, whole: bool) -> None:
    """Take a batch in; what was taken since the last whole one is durable when this returns for a whole one.

    Args:
        first: it begins a copy: all that was there goes, in the same transaction.

    Raises:
        ProtocolError: it is not of this schema. sqlite3.Error. In both cases nothing since the last whole one is kept.
    """
    known = tables(db)
    try:
        if first:
            give_up(db)
        if not db.in_transaction:
            db.execute("BEGIN IMMEDIATE")
        for name in known if first else ():
            db.execute(f"DELETE FROM {name}")  # noqa: S608 - our own tables
        for change in changes:
            for sql in _taking(known, change):
                db.execute(sql, change.values)
        if whole:
            db.execute("COMMIT")
    except sqlite3.IntegrityError as error:  # a value that its column does not hold
        give_up(db)
        raise ProtocolError(f"rows that fit no table here: {error}") from error
    except BaseException:
        give_up(db)
        raise


def _taking(known: dict[str, Table], change: Change) -> Iterator[str]:
    table = known.get(change.table)
    if table is None or len(change.values) != (len(table.keys) if change.gone else table.columns):
        raise ProtocolError(f"a row of {change.table[:40]!r} with {len(change.values)} values fits no table here")
    if change.gone:
        where = " AND ".join(f"{column} = ?" for column in table.keys)
        yield f"DELETE FROM {table.name} WHERE {where}"  # noqa: S608
    else:
        yield f"INSERT OR REPLACE INTO {table.name} VALUES ({', '.join('?' * table.columns)})"  # noqa: S608


def give_up(db: sqlite3.Connection) -> None:
    """Forget what came after the last whole batch."""
    if db.in_transaction:
        db.execute("ROLLBACK")
