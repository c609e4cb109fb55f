"""Checkpoints on disk: directories that are whole or are not there.

How one comes to be, and why a crash at any moment leaves the old ones or the new one, never half of one::

    write     .new-00000100-<random>/      the files, each flushed: else a power cut could keep the name and lose the
                                           content
              manifest.json written last   size and SHA-256 of every file, step, what the caller says about it; flushed
              directory flushed            now the temporary directory is durable as a whole
              renamed to step-00000100/    the one atomic moment
              parent flushed
              older ones pruned            moved aside first: a half-removed directory never bears a checkpoint's name

A checkpoint of the same step is moved aside (``.old-step-00000100``) for the moment between two renames; a crash in
that moment is undone when the store is opened again. What else a crash left is renamed before it is removed, so a
writer that outlived its worker by a moment finds its directory gone, instead of publishing one that is half removed.
Reading trusts nothing: names, sizes and sums are checked first.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ProtocolError, ResourceError, StorageError
from p2ptrain.core.training import BlobRange, FilePlan

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
MAX_INTEGER = 1 << 63
WRITE_BYTES = 4 << 20
"""At most so much in one call: between two calls a writer may pause."""
MIN_KEEP = 2
"""The newest may turn out damaged; then there must be one before it."""

_STEP_DIR = re.compile(r"step-(\d{8,12})")
_NEW, _OLD, _DEAD = ".new-", ".old-", ".dead-"
_SUPERSEDED = "superseded-"

Meta = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One committed checkpoint.

    Attributes:
        size_bytes: of all files, the manifest not counted.
        digest: SHA-256 of the manifest, hex; it names every other file's sum, so it stands for the whole.
        meta: what the caller said of it: lineage, job, generation, corpus, val_loss, ...
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
        keep: how many to keep; raised to 2 where it is less.
        spared: see the attribute.

    Attributes:
        spared: steps whose checkpoints are kept beside the newest, however old they are.

    Raises:
        StorageError: ``root`` cannot be made, or what a crash left there cannot be cleared.
    """

    def __init__(self, disk: Disk, root: Path, keep: int, *, spared: frozenset[int] = frozenset()) -> None:
        self._disk = disk
        self._root = root
        self._keep, self.spared = max(keep, MIN_KEEP), spared
        disk.make_dir(root)
        self._recover()

    def write(
        self,
        step: int,
        files: Sequence[FilePlan],
        blobs: Mapping[str, memoryview],
        meta: Meta,
        *,
        between: Callable[[], None] = lambda: None,
    ) -> CheckpointEntry:
        """Make ``files`` the durable checkpoint of ``step``, then prune older ones.

        An existing checkpoint of the same step is replaced.

        Args:
            files: their ranges are of ``blobs``, which do not change meanwhile.
            between: called after every piece of ``WRITE_BYTES``.

        Raises:
            ResourceError: less is free than the files take.
            StorageError: something cannot be written or flushed, the disk is full. The older checkpoints are unharmed.
        """
        if not files:
            raise StorageError(f"the checkpoint of step {step} has no files")
        draft = self.draft(step, sum(file.size_bytes for file in files))
        try:
            for file in files:
                draft.begin(file.name)
                for piece in _pieces(file, blobs):
                    draft.add(piece)
                    between()
                draft.end()
            return self.publish(draft, meta)
        except StorageError:
            draft.discard()
            raise

    def draft(self, step: int, need_bytes: int) -> Draft:
        """A checkpoint of ``step`` to be, whose files come piece by piece. It is ``publish``ed, or ``discard``ed.

        Raises:
            ResourceError: less is free than ``need_bytes``.
            StorageError: nothing can be written.
        """
        free = self._disk.free_bytes(self._root)
        if free < need_bytes:
            raise ResourceError(
                f"a checkpoint needs {need_bytes / 1e6:.1f} MB and {self._root} has {free / 1e6:.1f} MB free",
                remedy="free some space, keep fewer checkpoints, or choose another place with --state",
            )
        return Draft(self._disk, self._root / f"{_NEW}{step:08d}-{secrets.token_hex(4)}", step)

    def publish(self, draft: Draft, meta: Meta) -> CheckpointEntry:
        """Make it the durable checkpoint of its step, then prune older ones. Raises ``StorageError``: it is not."""
        step, target = draft.step, self._path(draft.step)
        encoded = self._write_manifest(draft.path, step, meta, draft.sums)
        self._disk.sync_dir(draft.path)
        self._publish(draft.path, target)
        with suppress(StorageError):  # it is there; what is one too many goes with the next one
            self._disk.remove_tree(self._aside(target))
            for old, path in self._directories()[self._keep :]:  # the new one stays: a restored run writes older steps
                if old not in self.spared | {step}:
                    self._remove(path)
        return _entry(target, step, encoded, meta, draft.sums)

    def entries(self) -> list[CheckpointEntry]:
        """Checkpoints with a readable manifest, newest first. Sizes and sums are not checked."""
        found = []
        for _, path in self._directories():
            try:
                found.append(read_checkpoint(self._disk, path))
            except StorageError:
                continue  # newest_good names the damaged ones
        return found

    def newest_good(self, on_damaged: Callable[[Path, str], None]) -> CheckpointEntry | None:
        """The newest checkpoint whose every byte is as it was written.

        Args:
            on_damaged: told the path and the cause of each damaged one passed over; they are left in place.
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
        """The checkpoint of ``step``, None where there is none. Raises ``StorageError`` where it is damaged."""
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
        """Rename every checkpoint newer than ``step``: the run goes back to it, and they are another future's.

        They stay on disk for a person to look at or remove, under names that no run resumes from.
        """
        moved = []
        for found, path in self._directories():
            if found > step:
                aside = self._root / f"{_SUPERSEDED}{path.name}-{secrets.token_hex(4)}"
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

    def _write_manifest(self, directory: Path, step: int, meta: Meta, sums: Mapping[str, tuple[int, str]]) -> bytes:
        encoded = manifest_of(step, meta, sums)
        self._disk.write_file(directory / MANIFEST, encoded)
        self._disk.sync_file(directory / MANIFEST)
        return encoded

    def _publish(self, temporary: Path, target: Path) -> None:
        if self._disk.is_dir(target):
            self._disk.remove_tree(self._aside(target))
            self._disk.rename(target, self._aside(target))
        self._disk.rename(temporary, target)
        self._disk.sync_dir(self._root)

    def _aside(self, target: Path) -> Path:
        return self._root / f"{_OLD}{target.name}"

    def _remove(self, path: Path) -> None:
        dead = self._root / f"{_DEAD}{path.name}-{secrets.token_hex(4)}"
        self._disk.rename(path, dead)
        self._disk.sync_dir(self._root)
        self._disk.remove_tree(dead)

    def _recover(self) -> None:
        """Undo or finish what a crash interrupted, and flush it: from now on everybody counts on what is found here."""
        found = [name for name in self._disk.list_dir(self._root) if name.startswith((_NEW, _OLD, _DEAD))]
        self._disk.sync_dir(self._root)  # what replaced an old one must be durable before that goes
        for name in found:
            path, original = self._root / name, self._root / name.removeprefix(_OLD)
            if name.startswith(_OLD) and not self._disk.is_dir(original):
                self._disk.rename(path, original)
                self._disk.sync_dir(self._root)
            else:
                dead = self._root / f"{_DEAD}{secrets.token_hex(8)}"
                self._disk.rename(path, dead)
                self._disk.remove_tree(dead)


def verify_checkpoint(disk: Disk, entry: CheckpointEntry) -> None:
    """Compare every file with the manifest, sizes first. Raises ``StorageError`` naming the first that differs."""
    for name, (size_bytes, _) in entry.files.items():
        actual = disk.size(entry.path / name)
        if actual != size_bytes:
            raise StorageError(f"{entry.path / name} has {actual} bytes, {size_bytes} were written")
    for name, (_, digest) in entry.files.items():
        if disk.hash_file(entry.path / name) != digest:
            raise StorageError(f"{entry.path / name} differs from what was written (SHA-256)")


class Draft:
    """The files of a checkpoint that is not there yet, written one after the other. Calls block.

    Attributes:
        path: the directory that they are in meanwhile.
        sums: of the files that are complete: name → (size in bytes, SHA-256 hex), of what was to be written.
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

    def discard(self) -> None:
        with suppress(StorageError):  # why is the problem to tell; who opens the directory next clears what is left
            self._disk.remove_tree(self.path)


def manifest_of(step: int, meta: Meta, sums: Mapping[str, tuple[int, str]]) -> bytes:
    files = {name: {"size_bytes": size, "sha256": digest} for name, (size, digest) in sums.items()}
    return json.dumps({"format": 1, "step": step, "meta": meta, "files": files}, indent=1, sort_keys=True).encode()


def manifest_untrusted(encoded: bytes) -> tuple[int, Meta, dict[str, tuple[int, str]]]:
    """Step, meta and files of a manifest that a peer sent. Raises ``ProtocolError``."""
    try:
        return _parse_manifest(encoded, Path("what was sent"))
    except StorageError as error:
        raise ProtocolError(error.message) from error


def read_checkpoint(disk: Disk, path: Path) -> CheckpointEntry:
    """The entry that the manifest in ``path`` describes. Raises ``StorageError`` where there is no sane one."""
    encoded = disk.read(path / MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
    step, meta, files = _parse_manifest(encoded, path / MANIFEST)
    if path.name != step_name(step):
        raise StorageError(f"{path / MANIFEST} is of step {step}, not of {path.name}")
    return _entry(path, step, encoded, meta, files)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def _pieces(file: FilePlan, blobs: Mapping[str, memoryview]) -> Iterator[memoryview]:
    """What the file is to hold, in pieces that are not copied. Raises ``StorageError`` for a range that is missing."""
    for part in file.parts:
        if isinstance(part, BlobRange):
            blob = blobs.get(part.blob)
            if blob is None or not 0 <= part.start <= part.stop <= blob.nbytes:
                raise StorageError(
                    f"{file.name} wants bytes {part.start} to {part.stop} of {part.blob}, which it lacks"
                )
            whole = blob[part.start : part.stop]
        else:
            whole = memoryview(part)
        for start in range(0, len(whole), WRITE_BYTES):
            yield whole[start : start + WRITE_BYTES]


def _entry(path: Path, step: int, encoded: bytes, meta: Meta, files: dict[str, tuple[int, str]]) -> CheckpointEntry:
    size_bytes = sum(size for size, _ in files.values())
    return CheckpointEntry(step, path, size_bytes, hashlib.sha256(encoded).hexdigest(), meta, files)


def _parse_manifest(encoded: bytes, path: Path) -> tuple[int, Meta, dict[str, tuple[int, str]]]:
    """Step, meta and files of a manifest. Raises ``StorageError`` on anything that ``commit`` does not write."""
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
    """JSON has whole numbers of any length: one that no float can be made of would end whoever makes one."""
    return value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < MAX_INTEGER)


def _sane_file(name: str, size: object, digest: object) -> bool:
    return (
        re.fullmatch(r"[\w][\w.-]*", name) is not None
        and type(size) is int
        and size >= 0
        and isinstance(digest, str)
        and re.fullmatch(r"[0-9a-f]{64}", digest) is not None
    )
