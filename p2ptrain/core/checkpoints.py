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

A split model's stages each save a directory of their own, with file names that no other stage uses. The first stage
also saves the files that describe the whole model, such as the index from tensor to file. So the files of all stages
together are an ordinary checkpoint, as ``save_pretrained`` would write it. Two things need more: peft reads LoRA
adapters from a single file, which is made of those of all stages (``add_whole_adapter``), and the files of shards hold
rows of every tensor (``join_rows``). A whole checkpoint of a sharded model has no parts: each shard takes its rows.
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
from p2ptrain.core.tensor_files import (
    ADAPTER_FILE,
    ITEM_BYTES,
    WEIGHTS_FILE,
    TensorEntry,
    header_of,
    read_header,
)
from p2ptrain.core.training import BlobRange, FilePlan

MANIFEST = "manifest.json"
NOTES = "training.json"
"""Beside the moments of an optimizer: the steps that they have seen, and to which model they belong."""
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

    def __init__(self, disk: Disk, root: Path, keep: int, *, best: bool = False) -> None:
        self._disk = disk
        self._root = root
        self._keep, self._best, self.spared = keep, best, frozenset[int]()
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
        """Start a checkpoint whose files are written piece by piece. ``publish`` or ``discard`` it. Raises
        ``DiskFull``: less than ``need_bytes`` is free, also after old checkpoints were pruned."""
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

    def steps(self) -> list[int]:
        return [step for step, _ in self._directories()]

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
        """The newest checkpoint whose sizes and sums match its manifest. ``on_damaged`` is called with path and cause
        of each newer one, which stays in place."""
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
        """Rename every checkpoint newer than ``step``, to which the run goes back. No run resumes from these names."""
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
        dead = self._disk.fresh_path(self._root / _DEAD)
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
                self._remove(path)


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


STAGE, STAGES, LINEAGE = "stage", "stages", "lineage"
"""Keys of a part's meta: the stage, the number of stages, and the lineage of the whole model's state."""

ADAPTER = "adapter_model"
"""A stage's own file with its adapters is ``adapter_model-00001-of-00002.safetensors``."""

ROWS = "rows-"
"""Prefix of a shard's own files, ``rows-model-00001-of-00002.safetensors``. A tensor ``exp_avg/NAME`` is the piece of
the flat array ``exp_avg`` for the tensor NAME (``compute.flat``)."""
_ALIGN_BYTES = 64  # of a tensor in a flat array

_OF_STAGE = re.compile(r".*-(\d{5})-of-(\d{5})\.\w+")


def is_of_stage(name: str, stage: int, stages: int) -> bool:
    """Whether a file belongs to the stage: ``model-00002-of-00003.safetensors`` is the second stage's. A name without
    such a mark belongs to the first stage, because the file describes the whole model."""
    if name == ADAPTER_FILE and stages > 1:
        return False  # it is made of the stages' files
    mark = _OF_STAGE.fullmatch(name)
    return (int(mark[1]), int(mark[2])) == (stage + 1, stages) if mark is not None else stage == 0


def part_of(entry: CheckpointEntry, stage: int, stages: int) -> tuple[Meta, dict[str, tuple[int, str]]]:
    """Meta and files of one stage, from its own checkpoint or from a whole one. Raises ``StorageError``."""
    if is_part(entry) and (entry.meta.get(STAGE), entry.meta.get(STAGES)) != (stage, stages):
        raise StorageError(f"{entry.path} is not a checkpoint of part {stage} of {stages}")
    all_of_it = WEIGHTS_FILE in entry.files  # every shard needs rows of it
    files = {name: facts for name, facts in entry.files.items() if all_of_it or is_of_stage(name, stage, stages)}
    if not files:
        raise StorageError(f"{entry.path} has no files of part {stage} of {stages}")
    return entry.meta | {STAGE: stage, STAGES: stages}, files


def of_the_whole(meta: Meta) -> Meta:
    return {key: value for key, value in meta.items() if key not in (STAGE, STAGES)}


def is_part(entry: CheckpointEntry) -> bool:
    return entry.meta.get(STAGES) is not None


def shard_name(kind: str, stage: int, stages: int, suffix: str = ".safetensors") -> str:
    """Hugging Face's name for the file of stage ``stage``, from 0: ``model-00001-of-00002.safetensors`` for stage 0."""
    return f"{kind}-{stage + 1:05d}-of-{stages:05d}{suffix}"


def add_whole_adapter(disk: Disk, draft: Draft) -> None:
    """Add ``ADAPTER_FILE`` to a whole checkpoint with the adapters of several stages. Blocks. Raises ``StorageError``:
    a stage's file is not one of tensors, or two have the same tensor; see also ``Disk``."""
    entries: dict[str, TensorEntry] = {}
    data: list[tuple[str, int, int]] = []  # file, start, stop
    for file in sorted(name for name in draft.sums if name.startswith(f"{ADAPTER}-")):
        found, _ = read_header(disk, draft.path, file)
        if twice := entries.keys() & found.keys():
            raise StorageError(f"{min(twice)} is in two files of adapters")
        entries |= found
        size_bytes = draft.sums[file][0]
        data.append((file, min((entry.start for entry in found.values()), default=size_bytes), size_bytes))
    if not data:
        return
    tensors = [(name, entry.dtype, entry.shape, entry.size_bytes) for name, entry in entries.items()]
    _write(disk, draft, ADAPTER_FILE, header_of(tensors, {"format": "pt"}), data)


def join_rows(disk: Disk, draft: Draft) -> None:
    """Replace the files of all shards in a whole checkpoint by those of a model that is not sharded. Blocks. Raises
    ``StorageError``: a file is not one of tensors, or they do not fit together; see also ``Disk``."""
    for kind in ("model", "optimizer"):
        files = sorted(name for name in draft.sums if name.startswith(f"{ROWS}{kind}-"))
        if not files:
            continue
        read = [read_header(disk, draft.path, file) for file in files]
        tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}  # dtype, shape and size of the whole
        data: list[tuple[str, int, int]] = []
        for name in read[0][0]:
            rows = [found[name] for found, _ in read if name in found]
            dtype, rest = rows[0].dtype, rows[0].shape[1:]
            if len(rows) > 1 and any(not row.shape or (row.dtype, row.shape[1:]) != (dtype, rest) for row in rows):
                raise StorageError(f"the rows of {name} do not fit together")
            data += [(row.file, row.start, row.stop) for row in rows]
            size_bytes = sum(row.size_bytes for row in rows)
            shape = (sum(row.shape[0] for row in rows), *rest) if len(rows) > 1 else rows[0].shape
            array, is_piece, _ = name.partition("/")
            if is_piece:  # the next one begins on a boundary
                padding = -size_bytes % _ALIGN_BYTES
                data.append(("", 0, padding))
                size_bytes += padding + (tensors[array][2] if array in tensors else 0)
                shape = (size_bytes // ITEM_BYTES[dtype],)
            tensors[array] = dtype, shape, size_bytes
        header = header_of(((name, *facts) for name, facts in tensors.items()), read[0][1])
        _write(disk, draft, f"{kind}.safetensors", header, data)
        for file in files:
            draft.drop(file)


def _write(disk: Disk, draft: Draft, file: str, header: bytes, data: Iterable[tuple[str, int, int]]) -> None:
    """Write a file of the header and of bytes [start, stop) of other files of the draft; of no file: zeros."""
    draft.begin(file)
    draft.add(header)
    for source, start, stop in data:
        for at in range(start, stop, WRITE_BYTES):
            end = min(at + WRITE_BYTES, stop)
            draft.add(disk.read_range(draft.path / source, at, end) if source else bytes(end - at))
    draft.end()


def weights_index(shards: Mapping[str, Mapping[str, int]]) -> bytes:
    """Encode the index of ``shards``: file name → tensor name → size in bytes. Raises ``StorageError``: a tensor is in
    two files."""
    places: dict[str, str] = {}
    total = 0
    for file in sorted(shards):
        for name, size_bytes in shards[file].items():
            if name in places:
                raise StorageError(
                    f"{name} is in {places[name]} and in {file}", remedy="use the files of one checkpoint"
                )
            places[name] = file
            total += size_bytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
