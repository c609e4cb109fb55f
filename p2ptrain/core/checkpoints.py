"""Checkpoints on disk: a checkpoint directory is complete or does not exist.

The order of the calls makes sure that a crash at any moment leaves the old checkpoints, and the new one whole or not at
all::

    write     .new-00000100-<random>/      the files, each flushed: a power cut could otherwise keep the name and lose
                                           the content
              manifest.json written last   size and SHA-256 of every file, the step, the caller's meta; flushed
              directory flushed            now the temporary directory is durable as a whole
              renamed to step-00000100/    the atomic moment
              parent flushed
              older ones pruned            renamed first: a half-removed directory never has a checkpoint's name

An existing checkpoint of the same step is renamed to ``.old-step-00000100`` until the new one has its name. If a crash
comes between these two renames, the next store renames it back. Other leftovers of a crash are renamed before they are
removed. So a writer thread that outlives its worker does not find its directory, and cannot publish a half-removed one.
Readers check names, sizes and sums first.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import DiskFull, ProtocolError, StorageError
from p2ptrain.core.training import BlobRange, FilePlan

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
MAX_INTEGER = 1 << 63
WRITE_BYTES = 4 << 20
"""Most bytes in one write call."""
MIN_KEEP = 2
"""If the newest checkpoint is damaged, an older one is needed."""

_STEP_DIR = re.compile(r"step-(\d{8,12})")
_NEW, _OLD, _DEAD = ".new-", ".old-", ".dead-"
_SUPERSEDED = "superseded-"

Meta = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One committed checkpoint.

    Attributes:
        size_bytes: total size of all files except the manifest.
        digest: SHA-256 of the manifest, hex. The manifest has every file's sum, so it identifies the whole checkpoint.
        meta: the caller's values: lineage, job, generation, corpus, val_loss, ...
        files: name → (size in bytes, SHA-256 hex).
    """

    step: int
    path: Path
    size_bytes: int
    digest: str
    meta: Meta
    files: dict[str, tuple[int, str]]


class CheckpointStore:
    """The checkpoints of one job under one directory. Calls block; one process owns the directory.

    Args:
        keep: number of newest checkpoints to keep, at least 2.
        best: keep the one with the least validation loss, too.

    Attributes:
        spared: steps whose checkpoints are never pruned.

    Raises:
        StorageError: ``root`` cannot be made, or a crash's leftovers cannot be removed.
    """

    def __init__(
        self, disk: Disk, root: Path, keep: int, *, best: bool = False, spared: frozenset[int] = frozenset()
    ) -> None:
        self._disk = disk
        self._root = root
        self._keep, self._best, self.spared = max(keep, MIN_KEEP), best, spared
        disk.make_dir(root)
        self._recover()

    def write(
        self,
        step: int,
        files: Sequence[FilePlan],
        blobs: Mapping[str, memoryview],
        meta: Meta,
    ) -> CheckpointEntry:
        """Write ``files`` as the durable checkpoint of ``step``, replacing an existing one. Then prune older ones. If
        the disk is full, prune first those that would be pruned afterwards, and try again.

        Args:
            files: files whose ranges refer to ``blobs``; these must not change during the call.

        Raises:
            DiskFull: the files do not fit. StorageError: a write or a flush fails. Older checkpoints are unharmed.
        """
        if not files:
            raise StorageError(f"the checkpoint of step {step} has no files")
        draft = self.draft(step, sum(file.size_bytes for file in files))
        try:
            for file in files:
                draft.begin(file.name)
                for piece in pieces(file, blobs):
                    draft.add(piece)
                draft.end()
            return self.publish(draft, meta)
        except StorageError as error:
            draft.discard()
            if isinstance(error, DiskFull) and self._prune(self._keep - 1, step):
                return self.write(step, files, blobs, meta)
            raise

    def draft(self, step: int, need_bytes: int) -> Draft:
        """Start a checkpoint whose files are written piece by piece. ``publish`` or ``discard`` it.

        Raises:
            DiskFull: less than ``need_bytes`` is free, also after old checkpoints were pruned.
            StorageError: the directory cannot be made.
        """
        self._disk.make_dir(self._root)  # a person may have removed it
        while (free := self._disk.free_bytes(self._root)) < need_bytes and self._prune(self._keep - 1, step):
            pass
        if free < need_bytes:
            raise DiskFull(
                f"a checkpoint needs {need_bytes / 1e6:.1f} MB and {self._root} has {free / 1e6:.1f} MB free",
                remedy="free some space, keep fewer checkpoints, or choose another place with --state",
            )
        return Draft(self._disk, self._disk.fresh_path(self._root / f"{_NEW}{step:08d}"), step)

    def publish(self, draft: Draft, meta: Meta) -> CheckpointEntry:
        """Make ``draft`` the durable checkpoint of its step, then prune older ones. Raises ``StorageError``."""
        step, target = draft.step, self._path(draft.step)
        encoded = manifest_of(step, meta, draft.sums)
        self._disk.write_file(draft.path / MANIFEST, encoded)
        self._disk.sync_file(draft.path / MANIFEST)
        self._disk.sync_dir(draft.path)
        self._publish(draft.path, target)
        with suppress(StorageError):  # the new one is durable; the next call prunes what is left now
            self._disk.remove_tree(self._aside(target))
            self._prune(self._keep, step)
        return _entry(target, step, encoded, meta, draft.sums)

    def entries(self) -> list[CheckpointEntry]:
        """All checkpoints with a readable manifest, newest first. Sizes and sums are not checked."""
        found = []
        for _, path in self._directories():
            try:
                found.append(read_checkpoint(self._disk, path))
            except StorageError:
                continue  # newest_good reports damaged checkpoints
        return found

    def newest_good(self, on_damaged: Callable[[Path, str], None]) -> CheckpointEntry | None:
        """The newest checkpoint whose sizes and sums match its manifest.

        Args:
            on_damaged: called with path and cause of each damaged checkpoint that is skipped. They stay in place.
        """
        for _, path in self._directories():
            try:
                entry = read_checkpoint(self._disk, path)
                verify_checkpoint(self._disk, entry)
            except StorageError as error:
                on_damaged(path, error.message)
            else:
                return entry
        return None

    def find(self, step: int) -> CheckpointEntry | None:
        """The checkpoint of ``step``, or None. Raises ``StorageError`` if it is damaged."""
        path = self._path(step)
        if not self._disk.is_dir(path):
            return None
        entry = read_checkpoint(self._disk, path)
        verify_checkpoint(self._disk, entry)
        return entry

    def delete(self, step: int) -> bool:
        path = self._path(step)
        if not self._disk.is_dir(path):
            return False
        self._remove(path)
        return True

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename every checkpoint newer than ``step``, because the run goes back to ``step``.

        They stay on disk for a person to inspect or remove. No run resumes from their new names.
        """
        moved = []
        for found, path in self._directories():
            if found > step:
                aside = self._disk.fresh_path(self._root / f"{_SUPERSEDED}{path.name}")
                self._disk.rename(path, aside)
                moved.append(aside)
        self._disk.sync_dir(self._root)
        return moved

    # ------------------------------------------------------------------------------------------------------- inside

    def _path(self, step: int) -> Path:
        return self._root / step_name(step)

    def _directories(self) -> list[tuple[int, Path]]:
        matches = ((_STEP_DIR.fullmatch(name), name) for name in self._disk.list_dir(self._root))
        return sorted(((int(match[1]), self._root / name) for match, name in matches if match), reverse=True)

    def _prune(self, keep: int, step: int) -> bool:
        """Remove old checkpoints, and return whether there were any. The newest ``keep`` stay, at least ``MIN_KEEP``.
        So does ``step``: a restored run writes lower steps."""
        old, kept = self._directories()[max(keep, MIN_KEEP) :], self.spared | {step}
        if old and self._best:
            kept |= {best_step((entry.step, entry.meta.get("val_loss")) for entry in self.entries())}
        pruned = [path for found, path in old if found not in kept]
        for path in pruned:
            self._remove(path)
        return bool(pruned)

    def _publish(self, temporary: Path, target: Path) -> None:
        if self._disk.is_dir(target):
            self._disk.remove_tree(self._aside(target))
            self._disk.rename(target, self._aside(target))
        self._disk.rename(temporary, target)
        self._disk.sync_dir(self._root)

    def _aside(self, target: Path) -> Path:
        return self._root / f"{_OLD}{target.name}"

    def _remove(self, path: Path) -> None:
        dead = self._disk.fresh_path(self._root / f"{_DEAD}{path.name}")
        self._disk.rename(path, dead)
        self._disk.sync_dir(self._root)
        self._disk.remove_tree(dead)

    def _recover(self) -> None:
        """Undo or finish what a crash interrupted, and flush it."""
        found = [name for name in self._disk.list_dir(self._root) if name.startswith((_NEW, _OLD, _DEAD))]
        self._disk.sync_dir(self._root)  # a replacement must be durable before the old one is removed
        for name in found:
            path, original = self._root / name, self._root / name.removeprefix(_OLD)
            if name.startswith(_OLD) and not self._disk.is_dir(original):
                self._disk.rename(path, original)
                self._disk.sync_dir(self._root)
            else:
                dead = self._disk.fresh_path(self._root / _DEAD)
                self._disk.rename(path, dead)
                self._disk.remove_tree(dead)


def verify_checkpoint(disk: Disk, entry: CheckpointEntry) -> None:
    """Compare every file with the manifest, sizes first. Raises ``StorageError``, which names the first mismatch."""
    for name, (size_bytes, _) in entry.files.items():
        actual = disk.size(entry.path / name)
        if actual != size_bytes:
            raise StorageError(f"{entry.path / name} has {actual} bytes, {size_bytes} were written")
    for name, (_, digest) in entry.files.items():
        if disk.hash_file(entry.path / name) != digest:
            raise StorageError(f"{entry.path / name} differs from what was written (SHA-256)")


class Draft:
    """An unpublished checkpoint, whose files are written one after the other. Calls block.

    Attributes:
        path: the temporary directory.
        sums: complete files: name → (size in bytes, SHA-256 hex) of the bytes given to ``add``.
    """

    def __init__(self, disk: Disk, path: Path, step: int) -> None:
        self.path, self.step = path, step
        self.sums: dict[str, tuple[int, str]] = {}
        self._disk, self._name = disk, ""
        self._size, self._digest = 0, hashlib.sha256()
        disk.make_dir(path)

    def begin(self, name: str) -> None:
        self._name, self._size, self._digest = name, 0, hashlib.sha256()
        self._disk.write_file(self.path / name, b"")

    def add(self, piece: bytes | memoryview) -> None:
        self._digest.update(piece)
        self._size += len(piece)
        self._disk.append_file(self.path / self._name, piece)

    def end(self) -> tuple[int, str]:
        self._disk.sync_file(self.path / self._name)
        self.sums[self._name] = self._size, self._digest.hexdigest()
        return self.sums[self._name]

    def drop(self, name: str) -> None:
        del self.sums[name]
        self._disk.remove_tree(self.path / name)

    def discard(self) -> None:
        with suppress(StorageError):  # the caller reports the first error; the next store removes leftovers
            self._disk.remove_tree(self.path)


def manifest_of(step: int, meta: Meta, sums: Mapping[str, tuple[int, str]]) -> bytes:
    files = {name: {"size_bytes": size, "sha256": digest} for name, (size, digest) in sums.items()}
    return json.dumps({"format": 1, "step": step, "meta": meta, "files": files}, indent=1, sort_keys=True).encode()


def manifest_untrusted(encoded: bytes) -> tuple[int, Meta, dict[str, tuple[int, str]]]:
    """Parse a peer's manifest: step, meta, files. Raises ``ProtocolError``."""
    try:
        return _parse_manifest(encoded, Path("the received text"))
    except StorageError as error:
        raise ProtocolError(error.message) from error


def read_checkpoint(disk: Disk, path: Path) -> CheckpointEntry:
    """Read the manifest in ``path``. Raises ``StorageError`` if it is missing or not valid."""
    encoded = disk.read(path / MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
    step, meta, files = _parse_manifest(encoded, path / MANIFEST)
    if path.name != step_name(step):
        raise StorageError(f"{path / MANIFEST} is for step {step}, but its directory is {path.name}")
    return _entry(path, step, encoded, meta, files)


def best_step(losses: Iterable[tuple[int, object]]) -> int:
    """The step with the least validation loss, of equal ones the first; -1 if none has a loss."""
    known = [(loss, step) for step, loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]
    return min(known, default=(0, -1))[1]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def pieces(file: FilePlan, blobs: Mapping[str, memoryview]) -> Iterator[memoryview]:
    """The file's content in pieces, without copying. Raises ``StorageError`` if a range is missing."""
    for part in file.parts:
        halve = None
        if isinstance(part, BlobRange):
            blob = blobs.get(part.blob) if isinstance(part.blob, str) else part.blob()
            if blob is None or not 0 <= part.start <= part.stop <= blob.nbytes:
                raise StorageError(
                    f"{file.name} needs bytes {part.start} to {part.stop} of {part.blob}, which are missing"
                )
            whole, halve = blob[part.start : part.stop], part.halve
        else:
            whole = memoryview(part)
        for start in range(0, len(whole), WRITE_BYTES):
            piece = whole[start : start + WRITE_BYTES]
            yield piece if halve is None else halve(piece)


def _entry(path: Path, step: int, encoded: bytes, meta: Meta, files: dict[str, tuple[int, str]]) -> CheckpointEntry:
    size_bytes = sum(size for size, _ in files.values())
    return CheckpointEntry(step, path, size_bytes, hashlib.sha256(encoded).hexdigest(), meta, files)


def _parse_manifest(encoded: bytes, path: Path) -> tuple[int, Meta, dict[str, tuple[int, str]]]:
    """Step, meta and files of a manifest. Raises ``StorageError`` for anything that ``manifest_of`` does not make."""
    try:
        manifest = json.loads(encoded)
        step, meta = manifest["step"], manifest["meta"]
        files = {name: (item["size_bytes"], item["sha256"]) for name, item in manifest["files"].items()}
        known = manifest["format"] == 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is not a checkpoint's manifest ({type(error).__name__})") from error
    if not known:
        raise StorageError(f"{path} has a format that this version does not read", remedy="update p2ptrain")
    sane = (
        type(step) is int
        and step >= 0
        and isinstance(meta, dict)
        and all(_sane_value(value) for value in meta.values())
        and bool(files)
        and all(_sane_file(name, size, digest) for name, (size, digest) in files.items())
    )
    if not sane:
        raise StorageError(f"{path} is not a checkpoint's manifest (ill-typed)")
    return step, meta, files


def _sane_value(value: object) -> bool:
    """JSON integers have any length; converting a huge one to float would raise."""
    return value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < MAX_INTEGER)


def _sane_file(name: str, size: object, digest: object) -> bool:
    return (
        re.fullmatch(r"[\w][\w.-]*", name) is not None
        and type(size) is int
        and size >= 0
        and isinstance(digest, str)
        and re.fullmatch(r"[0-9a-f]{64}", digest) is not None
    )
