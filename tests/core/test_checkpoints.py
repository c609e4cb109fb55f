"""The checkpoint store: whole or not there, whatever happens in between."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2ptrain.core.checkpoints import MANIFEST, CheckpointEntry, CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ResourceError, StorageError

WEIGHTS = "model.safetensors"


class Crash(Exception):
    """The power went."""


class TearingDisk(RealDisk):
    """A disk whose power goes at its ``crash_at``-th call, losing what was not flushed.

    ``tear`` then does to the real files what a power cut may do: files never flushed lose their second half, and a
    rename whose directory was not flushed is undone where ``undo_renames`` says so.
    """

    def __init__(self, crash_at: int, *, undo_renames: bool, error: Exception | None = None) -> None:
        self.calls = 0
        self.crash_at = crash_at
        self.undo_renames = undo_renames
        self.error = error or Crash()
        self.unsynced_renames: list[tuple[Path, Path]] = []
        self.synced: set[int] = set()

    def _tick(self) -> None:
        self.calls += 1
        if self.calls >= self.crash_at:
            raise self.error

    def write_file(self, path: Path, data: bytes) -> None:
        self._tick()
        super().write_file(path, data)

    def sync_file(self, path: Path) -> None:
        self._tick()
        super().sync_file(path)
        self.synced.add(path.stat().st_ino)

    def sync_dir(self, path: Path) -> None:
        self._tick()
        super().sync_dir(path)
        self.unsynced_renames = [pair for pair in self.unsynced_renames if pair[0].parent != path]

    def make_dir(self, path: Path, *, mode: int = 0o755) -> None:
        self._tick()
        super().make_dir(path, mode=mode)

    def rename(self, source: Path, target: Path) -> None:
        self._tick()
        super().rename(source, target)
        self.unsynced_renames.append((source, target))

    def remove_tree(self, path: Path) -> None:
        self._tick()
        files = sorted(path.iterdir()) if path.is_dir() else []
        for file in files[: len(files) // 2]:  # a removal can be interrupted half-way
            file.unlink()
        self._tick()
        super().remove_tree(path)

    def tear(self, written_before: set[int], root: Path) -> None:
        if self.undo_renames:
            for source, target in reversed(self.unsynced_renames):
                if target.exists() and not source.exists():
                    target.rename(source)
        for file in root.glob("*/*"):
            inode = file.stat().st_ino
            if inode not in written_before and inode not in self.synced:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def write_checkpoint(store: CheckpointStore, step: int, content: bytes = b"") -> CheckpointEntry:
    temporary = store.begin(step)
    (temporary / WEIGHTS).write_bytes(content or f"weights of {step}".encode() * 100)
    (temporary / "config.json").write_text("{}")
    return store.commit(temporary, step, {"lineage": f"l{step}", "val_loss": 1.5, "job": "j"})


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


def test_an_empty_store_has_nothing(store: CheckpointStore) -> None:
    assert store.entries() == []
    assert store.newest_good(never) is None
    assert store.delete(3) is False


def test_prunes_to_keep_but_never_what_was_just_written(store: CheckpointStore, root: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(store, step)
    assert [entry.step for entry in store.entries()] == [40, 30, 20]
    write_checkpoint(store, 5)  # the run was restored to an older step
    assert [entry.step for entry in store.entries()] == [40, 30, 20, 5]
    assert sorted(path.name for path in root.iterdir()) == [f"step-{step:08d}" for step in (5, 20, 30, 40)]


def test_never_keeps_fewer_than_two(root: Path) -> None:
    store = CheckpointStore(RealDisk(), root, keep=0)
    for step in (1, 2, 3):
        write_checkpoint(store, step)
    assert [entry.step for entry in store.entries()] == [3, 2]


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


def test_delete(store: CheckpointStore, root: Path) -> None:
    write_checkpoint(store, 1)
    write_checkpoint(store, 2)
    assert store.delete(2) is True
    assert [entry.step for entry in store.entries()] == [1]
    assert len(list(root.iterdir())) == 1


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


def test_nothing_good_left(store: CheckpointStore) -> None:
    _truncate(write_checkpoint(store, 1).path)
    told: list[Path] = []
    assert store.newest_good(lambda path, _: told.append(path)) is None
    assert len(told) == 1


def test_a_checkpoint_needs_files_and_no_directories(store: CheckpointStore) -> None:
    with pytest.raises(StorageError, match="no files"):
        store.commit(store.begin(1), 1, {})
    temporary = store.begin(2)
    (temporary / "inner").mkdir()
    with pytest.raises(StorageError, match="flat"):
        store.commit(temporary, 2, {})
    store.discard(temporary)
    assert store.entries() == []


def test_refuses_to_begin_without_room(store: CheckpointStore) -> None:
    with pytest.raises(ResourceError, match=r"needs .* MB") as caught:
        store.begin(1, need_bytes=1 << 62)
    assert "keep fewer" in caught.value.remedy


def _crash_points(scenario: str, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Every call at which the power can go while step 20 is written, over and over from the same start."""
    for undo_renames in (False, True):
        for crash_at in range(1, 100):
            root = tmp_path / f"{scenario}-{undo_renames}-{crash_at}"
            store = CheckpointStore(RealDisk(), root, keep=2)
            for step in (5, 10):
                write_checkpoint(store, step)
            if scenario == "replace":
                write_checkpoint(store, 20, b"old" * 50)
            before = {file.stat().st_ino for file in root.glob("*/*")}
            disk = TearingDisk(crash_at, undo_renames=undo_renames)
            try:
                write_checkpoint(CheckpointStore(disk, root, keep=2), 20, b"new" * 50)
            except Crash:
                disk.tear(before, root)
                yield crash_at, root
            else:
                assert disk.calls < crash_at, "the scenario ran to its end"
                break
        else:
            raise AssertionError("the scenario never ended")


@pytest.mark.parametrize("scenario", ["add", "replace"])
def test_a_crash_at_any_call_leaves_the_old_or_the_new(scenario: str, tmp_path: Path) -> None:
    outcomes = set()
    for crash_at, root in _crash_points(scenario, tmp_path):
        store = CheckpointStore(RealDisk(), root, keep=2)
        entry = store.newest_good(never)  # never a damaged one under a checkpoint's name
        assert entry is not None, f"nothing is left after a crash at call {crash_at}"
        content = (entry.path / WEIGHTS).read_bytes()
        if entry.step == 20:
            assert content in (b"old" * 50, b"new" * 50)
        else:
            assert scenario == "add"
            assert entry.step == 10
        outcomes.add(content)
        assert all(path.name.startswith("step-") for path in root.iterdir()), "the crash's leavings are cleared"
        for older in store.entries():
            store.verify(older)
        assert write_checkpoint(store, 30) == store.newest_good(never)
        shutil.rmtree(root)
    assert len(outcomes) == 2, "both the old and the new were seen"


@pytest.mark.parametrize("call", range(4, 10))
def test_a_full_disk_harms_nothing(root: Path, call: int) -> None:
    good = write_checkpoint(CheckpointStore(RealDisk(), root, keep=2), 10)
    disk = TearingDisk(call, undo_renames=False, error=StorageError("no space left on device"))
    store = CheckpointStore(disk, root, keep=2)
    with pytest.raises(StorageError, match="no space"):
        write_checkpoint(store, 20)
    newest = CheckpointStore(RealDisk(), root, keep=2).newest_good(never)
    assert newest is not None
    assert newest == good or newest.step == 20
    assert all(path.name.startswith("step-") for path in root.iterdir())


def test_the_real_disk_translates_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(RealDisk(), tmp_path, keep=2)
    temporary = store.begin(1)
    (temporary / WEIGHTS).write_bytes(b"x")
    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(StorageError, match="No space left") as caught:
        store.commit(temporary, 1, {})
    assert "free some space" in caught.value.remedy


def test_hash_file_reports_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        RealDisk().hash_file(tmp_path / "nothing")
