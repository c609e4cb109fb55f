"""A model directory that can be sent to other peers: its tensors are hashed, and read by ranges."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from p2ptrain.core.adapters import model_name
from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import ConfigError, ProtocolError, StorageError
from p2ptrain.core.model_config import config_untrusted
from p2ptrain.core.tensor_files import TensorEntry, TensorTable
from roles.model_table import (
    DIGEST_BYTES,
    FILE,
    MAX_FILE_BYTES,
    MAX_FILES,
    digest_of,
    digest_size,
    is_file_name,
    model_id,
)
from wire.chain_messages import TensorRecord
from wire.job_messages import RANGE_BYTES

CACHE_FILE = "tensor-digests.json"
MAX_CACHE_BYTES = 64 << 20
_CACHED_FILES = 256
MAX_TENSOR_BYTES = 4 << 30
"""Larger tensors are refused: a record, with a digest per range, must fit into a control frame."""
_MAX_CONFIG_BYTES = 48 << 10  # the text of config.json is sent in a request

Stamp = tuple[int, int]
"""A file's size in bytes and modification time in ns. If neither changes, the file counts as unchanged."""


class DigestCache:
    """Digests of tensors that were hashed before, stored in the file ``path``. Blocking."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._files: dict[str, tuple[Stamp, dict[str, bytes]]] | None = None

    def get(self, path: Path, stamp: Stamp) -> Mapping[str, bytes]:
        kept, digests = self._known().get(str(path), ((-1, -1), {}))
        return digests if kept == stamp else {}

    def put(self, path: Path, stamp: Stamp, digests: Mapping[str, bytes]) -> None:
        files = self._known()
        files.pop(str(path), None)
        files[str(path)] = (stamp, dict(digests))
        while len(files) > _CACHED_FILES:
            del files[next(iter(files))]
        table = {
            name: {"stamp": list(kept), "digests": {key: value.hex() for key, value in each.items()}}
            for name, (kept, each) in files.items()
        }
        self._disk.make_dir(self._path.parent)
        write_atomic(self._disk, self._path, json.dumps({"files": table}).encode())

    def _known(self) -> dict[str, tuple[Stamp, dict[str, bytes]]]:
        if self._files is None:
            self._files = {}
            if self._path.name in self._disk.list_dir(self._path.parent):
                try:
                    self._files = cached_untrusted(self._disk.read(self._path, max_bytes=MAX_CACHE_BYTES))
                except (ProtocolError, StorageError):
                    self._files = {}  # damaged: the tensors are hashed again
        return self._files


def cached_untrusted(data: bytes) -> dict[str, tuple[Stamp, dict[str, bytes]]]:
    """Parse the file of a ``DigestCache``. Raises ``ProtocolError``."""
    try:
        files = json.loads(data)["files"]
        found = {}
        for path, entry in files.items():
            size, mtime_ns = (int(each) for each in entry["stamp"])
            digests = {str(name): bytes.fromhex(text) for name, text in entry["digests"].items()}
            if any(not digest or len(digest) % DIGEST_BYTES for digest in digests.values()):  # e.g. of an older hash
                raise ProtocolError(f"invalid digest of a tensor in {str(path)[:80]!r}")
            found[str(path)] = ((size, mtime_ns), digests)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the table of digests is damaged ({type(error).__name__})") from None
    return found


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model with all tensors hashed. Reads from a file that changed since are refused.

    Attributes:
        model: its id.
        records: of the tensors, sorted by name, then of the small files.
    """

    directory: Path
    model: str
    config: str
    records: tuple[TensorRecord, ...]
    entries: Mapping[str, TensorEntry]
    stamps: Mapping[str, Stamp]

    @property
    def name(self) -> str:
        return model_name(self.directory)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Read bytes [start, stop) of a tensor or small file. Blocking. Raises ``StorageError`` if the file changed."""
        entry = self.entries.get(name)
        if entry is None or not 0 <= start <= stop <= entry.size_bytes:
            raise StorageError(f"{self.directory} has no bytes {start} to {stop} of {name[:80]!r}")
        with _opened(self.directory / entry.file) as (file, stamp):
            if stamp != self.stamps[entry.file]:
                raise StorageError(f"{self.directory / entry.file} changed since it was opened")
            return read_range(file, entry.start + start, stop - start)


def open_model(directory: Path, cache: DigestCache | None) -> ModelDirectory:
    """Open a model and hash the tensors that are not in ``cache``: about a second per gigabyte. Blocking.

    Raises:
        ConfigError: there is no usable model in safetensors.
        StorageError: a file is damaged, missing or unreadable, or changed meanwhile.
    """
    before = _stamps(directory)  # taken before the headers are read, to detect a later change
    table = table_of(directory)
    small = _small_files(directory)
    if "config.json" not in small:
        raise ConfigError(f"{directory} has no config.json", remedy="give a directory that save_pretrained wrote")
    with _opened(directory / "config.json") as (file, stamp):
        if stamp[0] > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{directory / 'config.json'} is larger than {_MAX_CONFIG_BYTES} bytes")
        try:
            config = read_range(file, 0, stamp[0]).decode()
            config_untrusted(config)
        except UnicodeDecodeError as error:
            raise StorageError(f"{directory / 'config.json'} is not UTF-8 text") from error
        except ProtocolError as error:
            text = f"{directory / 'config.json'} is not valid: {error.message}"
            raise ConfigError(text, remedy="give a directory that save_pretrained wrote") from error
    if any(entry.size_bytes > MAX_TENSOR_BYTES for entry in table.entries.values()):
        raise ConfigError(f"{directory} has a tensor of more than {MAX_TENSOR_BYTES >> 30} GiB")
    if any(not name.isprintable() for name in table.entries):
        raise StorageError(f"{directory} has a tensor whose name is not text")
    entries = dict(sorted(table.entries.items())) | {
        name: TensorEntry(name, FILE, (size_bytes,), 0, size_bytes) for name, size_bytes in small.items()
    }
    digests: dict[str, bytes] = {}
    stamps: dict[str, Stamp] = {}
    for each in sorted({entry.file for entry in entries.values()}):
        stamps[each], found = _digests(
            directory / each, {name: entry for name, entry in entries.items() if entry.file == each}, cache
        )
        if stamps[each] != before.get(each):
            raise StorageError(f"{directory / each} changed while it was opened", remedy="try again")
        digests |= found
    records = tuple(
        TensorRecord(name, entry.dtype, list(entry.shape), entry.size_bytes, digests[name])
        for name, entry in entries.items()
    )
    return ModelDirectory(directory, model_id(config, records), config, records, entries, stamps)


def table_of(directory: Path) -> TensorTable:
    """The tensors of a directory that a peer named. Raises ``ConfigError``, ``StorageError``."""
    try:
        return TensorTable(directory)
    except OSError as error:  # such as a name that is too long, or missing permission
        raise StorageError(f"cannot read {directory}: {error.strerror or error}") from error


def read_range(file: BinaryIO, start: int, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    left = memoryview(data)
    file.seek(start)
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise StorageError(f"{file.name} ends {len(left)} bytes before the end of what it should hold")
        left = left[count:]
    return data


def _digests(
    path: Path, entries: Mapping[str, TensorEntry], cache: DigestCache | None
) -> tuple[Stamp, dict[str, bytes]]:
    with _opened(path) as (file, stamp):
        known = cache.get(path, stamp) if cache is not None else {}
        sizes = {name: digest_size(entry.size_bytes) for name, entry in entries.items()}
        if sizes == {name: len(known[name]) for name in entries if name in known}:
            return stamp, {name: known[name] for name in entries}
        found: dict[str, bytes] = {}
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            starts = range(entry.start, max(entry.stop, entry.start + 1), RANGE_BYTES)
            ranges = (read_range(file, start, min(RANGE_BYTES, entry.stop - start)) for start in starts)
            found[name] = b"".join(map(digest_of, ranges))
    if cache is not None:
        cache.put(path, stamp, found)
    return stamp, found


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Stamp]]:
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            yield file, (status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def _stamps(directory: Path) -> dict[str, Stamp]:
    try:
        with os.scandir(directory) as entries:
            found = ((each.name, each.stat()) for each in entries if each.is_file())
            return {name: (status.st_size, status.st_mtime_ns) for name, status in found}
    except OSError:
        return {}


def _small_files(directory: Path) -> dict[str, int]:
    try:
        with os.scandir(directory) as entries:
            found = {
                each.name: each.stat().st_size
                for each in entries
                if is_file_name(each.name) and each.is_file() and each.stat().st_size <= MAX_FILE_BYTES
            }
    except OSError as error:
        raise StorageError(f"cannot list {directory}: {error.strerror or error}") from error
    return dict(sorted(found.items())[:MAX_FILES])
