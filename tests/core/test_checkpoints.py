"""The checkpoint store: whole or not there, whatever happens in between."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.core.checkpoints import MANIFEST, CheckpointEntry, CheckpointStore, verify_checkpoint
from p2ptrain.core.disk import Disk, RealDisk
from p2ptrain.core.errors import DiskFull, StorageError
from p2ptrain.core.training import BlobRange, FilePlan
from p2ptrain.lab.sim.machine import Died, MachineDisk, Process

WEIGHTS = "model.safetensors"


def write_checkpoint(store: CheckpointStore, step: int, content: bytes = b"") -> CheckpointEntry:
    weights = content or f"weights of {step}".encode() * 100
    files = [
        FilePlan(WEIGHTS, (weights[:4], BlobRange("all", 4, len(weights)))),
        FilePlan("config.json", (b"{}",)),
    ]
    return store.write(step, files, {"all": memoryview(weights)}, {"lineage": f"l{step}", "val_loss": 1.5, "job": "j"})


def never(path: Path, cause: str) -> None:
    raise AssertionError(f"{path} is said to be damaged: {cause}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store(root: Path) -> CheckpointStore:
    return CheckpointStore(RealDisk(), root, keep=3)


def test_commit_and_find_again(store: CheckpointStore, root: Path) -> None:
    written = write_checkpoint(store, 100)
    assert written.path == root / "step-00000100"
    again = CheckpointStore(RealDisk(), root, keep=3)
    assert again.newest_good(never) == written == again.find(100)
    assert again.entries() == [written]
    assert written.size_bytes == sum((written.path / name).stat().st_size for name in (WEIGHTS, "config.json"))
    assert written.meta == {"lineage": "l100", "val_loss": 1.5, "job": "j"}
    assert again.find(99) is None


def test_all_that_was_written_is_flushed(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = set()
    monkeypatch.setattr("os.fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    written = write_checkpoint(store, 100).path
    assert {path.stat().st_ino for path in (written.parent, written, *written.iterdir())} <= flushed


def test_prunes_to_keep_but_never_what_was_just_written(store: CheckpointStore, root: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(store, step)
    assert [entry.step for entry in store.entries()] == [40, 30, 20]
    write_checkpoint(store, 5)  # the run was restored to an older step
    assert [entry.step for entry in store.entries()] == [40, 30, 20, 5]
    assert sorted(path.name for path in root.iterdir()) == [f"step-{step:08d}" for step in (5, 20, 30, 40)]


def test_replaces_a_checkpoint_of_the_same_step(store: CheckpointStore, root: Path) -> None:
    first = write_checkpoint(store, 7, b"first")
    second = write_checkpoint(store, 7, b"second")
    assert first.digest != second.digest
    assert store.newest_good(never) == second
    assert [path.name for path in root.iterdir()] == ["step-00000007"]


def test_set_aside_what_is_newer(store: CheckpointStore, root: Path) -> None:
    kept = write_checkpoint(store, 10)
    write_checkpoint(store, 20)
    write_checkpoint(store, 30)
    moved = store.set_aside_after(10)
    assert len(moved) == 2
    assert all((path / WEIGHTS).is_file() for path in moved)
    again = CheckpointStore(RealDisk(), root, keep=3)
    assert again.entries() == [kept]
    assert all(path.is_dir() for path in moved), "they are for a person to remove"
    assert again.set_aside_after(10) == []


def _truncate(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1])


def _flip_bit(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[len(data) // 2] ^= 1
    (path / WEIGHTS).write_bytes(data)


def _edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))


SUM = "0" * 64
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "bytes"),
    "flipped bit": (_flip_bit, "SHA-256"),
    "missing file": (lambda path: (path / WEIGHTS).unlink(), WEIGHTS),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), MANIFEST),
    "garbage": (lambda path: (path / MANIFEST).write_bytes(b"\xff\x00{"), "not a checkpoint's manifest"),
    "deep": (lambda path: (path / MANIFEST).write_text("[" * 100_000), "not a checkpoint's manifest"),
    "a list": (lambda path: (path / MANIFEST).write_text("[1]"), "not a checkpoint's manifest"),
    "huge": (lambda path: (path / MANIFEST).write_bytes(b" " * (1 << 21)), "larger"),
    "other step": (lambda path: _edit_manifest(path, step=9), "step 9"),
    "bool step": (lambda path: _edit_manifest(path, step=True), "ill-typed"),
    "other format": (lambda path: _edit_manifest(path, format=2), "format"),
    "nested meta": (lambda path: _edit_manifest(path, meta={"a": []}), "ill-typed"),
    "no files": (lambda path: _edit_manifest(path, files={}), "ill-typed"),
    "way out": (
        lambda path: _edit_manifest(path, files={"../step-00000010/x": {"size_bytes": 1, "sha256": SUM}}),
        "ill-typed",
    ),
    "short sum": (lambda path: _edit_manifest(path, files={WEIGHTS: {"size_bytes": 1, "sha256": "00"}}), "ill-typed"),
    "text size": (lambda path: _edit_manifest(path, files={WEIGHTS: {"size_bytes": "1", "sha256": SUM}}), "ill-typed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_is_named_and_passed_over(store: CheckpointStore, name: str) -> None:
    damage, cause = DAMAGE[name]
    good = write_checkpoint(store, 10)
    bad = write_checkpoint(store, 20)
    damage(bad.path)
    told: list[tuple[Path, str]] = []
    assert store.newest_good(lambda path, text: told.append((path, text))) == good
    assert [path for path, _ in told] == [bad.path]
    assert cause in told[0][1]
    assert bad.path.is_dir()  # left for a person to look at
    with pytest.raises(StorageError):
        store.find(20)


def test_a_checkpoint_needs_files_and_ranges_that_are_there(store: CheckpointStore, root: Path) -> None:
    with pytest.raises(StorageError, match="no files"):
        store.write(1, [], {}, {})
    for part in (BlobRange("none", 0, 1), BlobRange("all", 2, 5), BlobRange("all", -1, 2)):
        with pytest.raises(StorageError, match="which are missing"):
            store.write(1, [FilePlan(WEIGHTS, (part,))], {"all": memoryview(b"abcd")}, {})
    assert list(root.iterdir()) == []


def test_refuses_to_begin_without_room(store: CheckpointStore, root: Path) -> None:
    with pytest.raises(DiskFull, match=r"needs .* MB") as caught:
        store.write(1, [FilePlan(WEIGHTS, (BlobRange("all", 0, 1 << 62),))], {}, {})
    assert "keep fewer" in caught.value.remedy
    assert list(root.iterdir()) == []


ROOT = Path("/checkpoints")
CONTENTS = {5: b"five" * 9, 10: b"ten" * 9, 20: b"new" * 9}
OLD = b"old" * 9


class Choices(random.Random):
    """Decides as ``path`` says, then for the first possibility. Of a range it knows both ends and the middle."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__()
        self.path, self._begun = list(path), 0
        self._counts: list[int] = []

    def choice(self, seq: Any) -> Any:
        if self._begun == len(self.path):
            self.path.append(0)
        chosen, self._begun = self.path[self._begun], self._begun + 1
        self._counts.append(len(seq))
        return seq[chosen]

    def randint(self, a: int, b: int) -> int:
        return int(self.choice(sorted({a, (a + b) // 2, b})))

    def next_path(self) -> list[int]:
        """The next way to decide; empty if this was the last one."""
        for number in reversed(range(self._begun)):
            if self.path[number] + 1 < self._counts[number]:
                return [*self.path[:number], self.path[number] + 1]
        return []


def every_way() -> Iterator[Choices]:
    path: list[int] = []
    while True:
        choices = Choices(path)
        yield choices
        path = choices.next_path()
        if not path:
            return


class FullOnce(MachineDisk):
    """Has no room in call ``full_at``."""

    full_at = 0

    def dies_now(self) -> bool:
        dies = super().dies_now()
        self.full = self.calls == self.full_at
        return dies


class Machine:
    """A machine with checkpoints 5 and 10, and one of step 20 that is to be replaced, if that is the scenario."""

    def __init__(self, scenario: str, choices: random.Random) -> None:
        self.disk = FullOnce(choices)
        self.disk.killed = self._kill
        self._start()
        store = CheckpointStore(self.seen, ROOT, keep=2)
        for step in (5, 10):
            write_checkpoint(store, step, CONTENTS[step])
        if scenario == "replace":
            write_checkpoint(store, 20, OLD)

    def _start(self) -> None:
        self._process = Process("a")
        self.seen = self.disk.view_for(self._process)

    def _kill(self) -> None:
        self._process.alive = False

    def dies(self, call: int, do: Callable[[Disk], object]) -> bool:
        """Whether its process dies in this call of ``do``. Then it starts anew."""
        self.disk.die_in = self.disk.calls + call
        try:
            do(self.seen)
        except Died:
            self._start()
            return True
        self.disk.die_in = None
        return False

    def restarted(self, where: str) -> bytes:
        """What a restart finds: the newest content, which was written as a whole once."""
        store = CheckpointStore(self.seen, ROOT, keep=2)
        entry = store.newest_good(never)  # never a damaged one under a checkpoint's name
        assert entry is not None, f"nothing is left after a crash at {where}"
        content = self.seen.read(entry.path / WEIGHTS, max_bytes=1 << 20)
        assert content in (CONTENTS[entry.step], OLD if entry.step == 20 else b""), where
        for older in store.entries():
            verify_checkpoint(self.seen, older)
        assert all(name.startswith("step-") for name in self.seen.list_dir(ROOT)), "the crash's leavings are cleared"
        return content


def write_new(disk: Disk) -> CheckpointEntry:
    return write_checkpoint(CheckpointStore(disk, ROOT, keep=2), 20, CONTENTS[20])


def crashes(scenario: str, do: Callable[[Disk], object], before: int = 0) -> Iterator[tuple[Machine, str]]:
    """A machine after each way in which its process may die in a call of ``do``, and, if that is not 0, in call
    ``before`` of ``write_new`` before that."""
    for call in itertools.count(1):
        for choices in every_way():
            machine = Machine(scenario, choices)
            if before and not machine.dies(before, write_new):
                return
            if not machine.dies(call, do):
                return
            yield machine, f"call {before}, call {call}, {choices.path}"


@pytest.mark.parametrize("scenario", ["add", "replace"])
def test_power_cut_in_any_call_leaves_a_whole_checkpoint(scenario: str) -> None:
    found, cases = set(), 0
    for machine, where in crashes(scenario, write_new):
        machine.disk.power_cut()
        found.add(machine.restarted(where))
        written = write_checkpoint(CheckpointStore(machine.seen, ROOT, 2), 30)
        assert written == CheckpointStore(machine.seen, ROOT, 2).newest_good(never)
        cases += 1
    assert found == {CONTENTS[20], OLD if scenario == "replace" else CONTENTS[10]}
    assert cases > 100


def test_power_cut_while_a_crash_is_cleared_up_leaves_a_whole_checkpoint() -> None:
    cases = 0
    for first in range(1, 40):
        for machine, where in crashes("replace", lambda disk: CheckpointStore(disk, ROOT, keep=2), before=first):
            machine.disk.power_cut()
            assert machine.restarted(where) in (OLD, CONTENTS[20])
            cases += 1
    assert cases > 20


@pytest.mark.parametrize("scenario", ["add", "replace"])
def test_what_a_restart_after_a_kill_found_survives_a_power_cut(scenario: str) -> None:
    cases = 0
    for machine, where in crashes(scenario, write_new):
        content = machine.restarted(where)
        machine.disk.power_cut()
        assert machine.restarted(f"{where}, and a power cut") == content
        cases += 1
    assert cases > 10


@pytest.mark.parametrize("scenario", ["add", "replace"])
def test_a_full_disk_harms_nothing_and_leaves_room(scenario: str) -> None:
    for full_at in itertools.count(1):
        machine = Machine(scenario, Choices([]))
        machine.disk.full_at = machine.disk.calls + full_at
        with suppress(StorageError):
            write_new(machine.seen)
        if machine.disk.calls < machine.disk.full_at:
            break
        machine.disk.full = False
        machine.restarted(f"call {full_at}")
        assert not [name for name in machine.seen.list_dir(ROOT) if name.startswith(".new-")], "what it took is free"
        write_new(machine.seen)


@pytest.mark.parametrize("noticed", ["before", "while writing"])
@pytest.mark.parametrize(
    ("keep", "spared", "left"),
    [(4, frozenset(), [50, 40, 30, 20]), (4, {10}, [40, 30, 20, 10]), (2, frozenset(), [40, 30])],
)
def test_on_a_full_disk_old_checkpoints_are_pruned_first_where_keep_allows(
    root: Path, keep: int, spared: frozenset[int], left: list[int], noticed: str
) -> None:
    class Full(RealDisk):
        room = 9

        def append_file(self, path: Path, data: bytes | memoryview) -> None:
            if len(self.list_dir(root)) > self.room:
                raise DiskFull("no space left")
            super().append_file(path, data)

        def free_bytes(self, path: Path) -> int:
            return 0 if noticed == "before" and len(self.list_dir(root)) >= self.room else 1 << 40

    disk = Full()
    store = CheckpointStore(disk, root, keep)
    store.spared = spared
    for step in (10, 20, 30, 40):
        write_checkpoint(store, step)
    disk.room = keep
    with suppress(DiskFull):
        write_checkpoint(store, 50)
    assert [entry.step for entry in store.entries()] == left
    assert len(disk.list_dir(root)) == len(left)


def test_a_directory_is_durable_whoever_made_it(tmp_path: Path) -> None:
    class Told(RealDisk):
        def __init__(self) -> None:
            self.flushed: list[tuple[str, bool, bool]] = []

        def sync_dir(self, path: Path) -> None:
            self.flushed.append((path.name, (tmp_path / "a").is_dir(), (tmp_path / "a" / "b").is_dir()))
            super().sync_dir(path)

    disk = Told()
    disk.make_dir(tmp_path / "a" / "b")
    assert disk.flushed == [
        (tmp_path.parent.name, False, False),
        (tmp_path.name, True, False),
        ("a", True, True),
    ], "a kill leaves one at most that is not"
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    disk.flushed.clear()
    disk.make_dir(tmp_path / "a" / "b")
    assert disk.flushed == [("a", True, True)]


def test_a_directory_that_was_removed_is_made_again(store: CheckpointStore, root: Path) -> None:
    shutil.rmtree(root)
    assert write_checkpoint(store, 1).path.is_dir()


def test_the_real_disk_translates_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(RealDisk(), tmp_path, keep=2)
    monkeypatch.setattr(Path, "open", no_room)
    with pytest.raises(StorageError, match="No space left") as caught:
        write_checkpoint(store, 1)
    assert "free some space" in caught.value.remedy


def test_appending_goes_on_after_a_short_write(tmp_path: Path) -> None:
    for piece in (b"ab", memoryview(b"cd"), b"", b"e"):
        RealDisk().append_file(tmp_path / "file", piece)
    assert (tmp_path / "file").read_bytes() == b"abcde"
