"""What a simulated disk keeps when its machine is killed, and what when the power fails."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import StorageError
from p2ptrain.lab.sim.machine import Died, MachineDisk, Process

ROOT = Path("/state")
FILE = ROOT / "file"


def machine(seed: int = 0) -> tuple[MachineDisk, Process, Disk]:
    disk, process = MachineDisk(random.Random(seed)), Process("a")
    seen = disk.view_for(process)
    seen.make_dir(ROOT)
    return disk, process, seen


def left(disk: MachineDisk) -> bytes | None:
    seen = disk.view_for(Process("a"))
    try:
        return seen.read(FILE, max_bytes=99)
    except StorageError:
        return None


def outcomes(write: str) -> set[bytes | None]:
    """What may be left after a power cut, of "old" and then "new"."""
    found = set()
    for seed in range(60):
        disk, _, seen = machine(seed)
        write_atomic(seen, FILE, b"old")
        if write == "atomic":
            write_atomic(seen, FILE, b"new")
        elif write == "in place":
            seen.write_file(FILE, b"new")
        else:
            seen.write_file(ROOT / "other", b"new")
            seen.rename(ROOT / "other", FILE)
        disk.power_cut()
        found.add(left(disk))
    return found


def test_what_was_flushed_with_its_directory_stays() -> None:
    assert outcomes("atomic") == {b"new"}


def test_what_was_not_flushed_is_old_new_or_torn() -> None:
    assert {b"old", b"new"} < outcomes("in place")


def test_a_name_without_its_directory_may_bring_an_empty_file() -> None:
    found = outcomes("renamed without a flush")
    assert b"old" in found
    assert found & {b"", b"n", b"ne", b"\0\0\0"}


def test_a_kill_keeps_what_calls_did_and_part_of_the_one_it_came_in() -> None:
    found = set()
    for seed in range(40):
        disk, process, seen = machine(seed)
        seen.write_file(FILE, b"old")
        disk.die_in = disk.calls + 1

        def killed(process: Process = process) -> None:
            process.alive = False

        disk.killed = killed
        with pytest.raises(Died):
            seen.write_file(FILE, b"new")
        with pytest.raises(Died):
            seen.list_dir(ROOT)
        found.add(left(disk))
    assert found == {b"", b"n", b"ne", b"new"}


def test_a_full_disk_takes_nothing_and_keeps_all() -> None:
    disk, _, seen = machine()
    seen.write_file(FILE, b"old")
    disk.full = True
    with pytest.raises(StorageError, match="No space left"):
        seen.write_file(FILE, b"new")
    assert (left(disk), seen.free_bytes(ROOT)) == (b"old", 0)


def test_a_database_keeps_what_was_committed() -> None:
    disk, _, seen = machine()
    first = seen.connect(ROOT / "db")
    first.execute("CREATE TABLE t (x)")
    first.execute("BEGIN")
    first.execute("INSERT INTO t VALUES (1)")
    first.execute("COMMIT")
    first.execute("BEGIN")
    first.execute("INSERT INTO t VALUES (2)")
    first.close()
    second = seen.connect(ROOT / "db")
    assert second.execute("SELECT x FROM t").fetchall() == [(1,)]
    disk.full = True
    second.execute("BEGIN")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        second.execute("COMMIT")
    second.rollback()
    disk.close()


def test_a_lock_ends_with_its_process() -> None:
    disk, process, seen = machine()
    other = disk.view_for(Process("a"))
    assert seen.try_lock(ROOT / "lock") is not None
    assert other.try_lock(ROOT / "lock") is None
    process.alive = False
    assert other.try_lock(ROOT / "lock") is not None
