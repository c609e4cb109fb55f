"""A model directory that a peer can send to others: its tensors are hashed, and read by ranges.

A sender first sends the table: records of its tensors and small files. The model's id is a hash over everything that
decides what the model computes. The receiver accepts a table only if it leads to the requested id. So a sender can lie
about the small files only.

Senders may be hostile, and all peers that request the same id share parts. So both hashes are BLAKE2b; a checksum such
as xxh3 is easy to forge. Digests of tensors have 256 bits. Ids have 224 bits, the longest hex text that ``is_id``
accepts. One core hashes 0.9 GB/s. A receiver hashes every byte that it loads; the disk or the network takes as long. A
sender hashes a file once, and caches the digests by size and modification time. The cache only serves to make tables.
If a file changes unnoticed, the receiver's hash differs, so it refuses the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from p2ptrain.core.adapters import model_name
from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import ConfigError, ProtocolError, StorageError
from p2ptrain.core.tensor_files import ITEM_BYTES, MAX_DIMS, MAX_TENSORS, TensorEntry, TensorTable, config_untrusted
from wire.chain_messages import TensorRecord, TensorsPage
from wire.job_messages import RANGE_BYTES

FILE = "FILE"
"""The ``dtype`` of a record of a small file, such as the tokenizer's. Its shape is [size in bytes]."""
DIGEST_BYTES = 32
ID_BYTES = 28
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 64
_MAX_RECORDS = MAX_TENSORS + MAX_FILES
_MAX_NAME = 512
_PAGE_BYTES = 56 << 10
_PAGE_RECORDS = 1024
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.(json|txt|model|jinja)")
CACHE_FILE = "tensor-digests.json"
MAX_CACHE_BYTES = 64 << 20
_CACHED_FILES = 256
MAX_TENSOR_BYTES = 4 << 30
"""Larger tensors are refused: a record, with a digest per range, must fit into a control frame."""
_MAX_CONFIG_BYTES = 48 << 10  # the text of config.json is sent in a request

Stamp = tuple[int, int]
"""A file's size in bytes and modification time in ns. If neither changes, the file counts as unchanged."""


# ------------------------------------------------------------------------------------------------------------ the table


def is_file_name(name: str) -> bool:
    """Whether a small file of that name may belong to a model: no path, no hidden file, no weights."""
    return _FILE_NAME.fullmatch(name) is not None


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The digest in a record: the digests of all ranges of a tensor or small file, joined. Releases the GIL."""
    view = memoryview(data)
    ranges = (view[start : start + RANGE_BYTES] for start in range(0, max(len(view), 1), RANGE_BYTES))
    return b"".join(hashlib.blake2b(part, digest_size=DIGEST_BYTES).digest() for part in ranges)


def digest_size(size_bytes: int) -> int:
    return DIGEST_BYTES * max(1, -(-size_bytes // RANGE_BYTES))


def model_id(config: str, records: Iterable[TensorRecord]) -> str:
    """The id of the model with this text of ``config.json`` and these tensors. Small files do not count."""
    total = hashlib.blake2b(digest_size=ID_BYTES)
    _put(total, config.encode("utf-8", "surrogatepass"))
    for record in sorted((item for item in records if item.dtype != FILE), key=lambda item: item.name):
        _put(total, record.name.encode("utf-8", "surrogatepass"))
        _put(total, f"{record.dtype} {record.shape}".encode())
        _put(total, record.digest)
    return total.hexdigest()


def _put(total: hashlib.blake2b, data: bytes) -> None:
    total.update(len(data).to_bytes(8, "little"))
    total.update(data)


def page_of(records: Sequence[TensorRecord], first: int) -> TensorsPage:
    page: list[TensorRecord] = []
    size = 0
    for record in records[max(first, 0) : max(first, 0) + _PAGE_RECORDS]:
        size += 80 + len(record.digest) + len(record.name.encode("utf-8", "replace")) + 9 * len(record.shape)
        if size > _PAGE_BYTES:
            break
        page.append(record)
    return TensorsPage(len(records), page)


class TableReceiver:
    """Assembles a table from its pages. ``records``: name → record, so far."""

    def __init__(self) -> None:
        self.records: dict[str, TensorRecord] = {}
        self._total = -1

    @property
    def complete(self) -> bool:
        return len(self.records) == self._total

    def take_untrusted(self, page: TensorsPage) -> None:
        if not 0 < page.total <= _MAX_RECORDS or self._total not in (-1, page.total):
            raise ProtocolError(f"a page with an invalid table size: {page.total} tensors")
        if not page.tensors or len(self.records) + len(page.tensors) > page.total:
            raise ProtocolError("a page without tensors, or with more than the rest of its table")
        self._total = page.total
        for record in page.tensors:
            check_record_untrusted(record)
            if record.name in self.records:
                raise ProtocolError(f"the table has {record.name[:80]!r} twice")
            self.records[record.name] = record


def check_record_untrusted(record: TensorRecord) -> None:
    """Raise ``ProtocolError`` if there can be no such tensor or file."""
    if not 0 < len(record.name) <= _MAX_NAME or len(record.digest) != digest_size(record.size_bytes):
        raise ProtocolError(f"tensor {record.name[:80]!r} has an invalid name or digest")
    if len(record.shape) > MAX_DIMS or not all(0 <= length < 1 << 48 for length in record.shape):
        raise ProtocolError(f"{record.name[:80]!r} has an invalid shape")
    if record.dtype == FILE:
        if not is_file_name(record.name) or record.shape != [record.size_bytes] or record.size_bytes > MAX_FILE_BYTES:
            raise ProtocolError(f"{record.name[:80]!r} is not a valid file of a model")
    elif record.dtype not in ITEM_BYTES or record.size_bytes != math.prod(record.shape) * ITEM_BYTES[record.dtype]:
        raise ProtocolError(f"{record.name[:80]!r} has {record.size_bytes} bytes, not those of its shape")


# -------------------------------------------------------------------------------------------------------- the directory


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
            name: {"stamp": list(kept), "digests": {key: value.hex() for key, value in known.items()}}
            for name, (kept, known) in files.items()
        }
        self._disk.make_dir(self._path.parent)
        write_atomic(self._disk, self._path, json.dumps({"files": table}).encode())

    def _known(self) -> dict[str, tuple[Stamp, dict[str, bytes]]]:
        if self._files is None:
            self._files = {}
            if self._path.name in self._disk.list_dir(self._path.parent):
                try:
                    self._files = parse_cache_untrusted(self._disk.read(self._path, max_bytes=MAX_CACHE_BYTES))
                except (ProtocolError, StorageError):
                    self._files = {}  # damaged: the tensors are hashed again
        return self._files


def parse_cache_untrusted(data: bytes) -> dict[str, tuple[Stamp, dict[str, bytes]]]:
    """Parse the file of a ``DigestCache``. Raises ``ProtocolError``."""
    try:
        files = json.loads(data)["files"]
        found = {}
        for path, entry in files.items():
            size, mtime_ns = (int(number) for number in entry["stamp"])
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
    small = [name for name, (size_bytes, _) in before.items() if is_file_name(name) and size_bytes <= MAX_FILE_BYTES]
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
    entries = dict(sorted(table.entries.items()))
    for name in sorted(small)[:MAX_FILES]:
        size_bytes = before[name][0]
        entries[name] = TensorEntry(name, FILE, (size_bytes,), 0, size_bytes)
    digests: dict[str, bytes] = {}
    stamps: dict[str, Stamp] = {}
    for file_name in sorted({entry.file for entry in entries.values()}):
        path, inside = directory / file_name, {name: item for name, item in entries.items() if item.file == file_name}
        stamps[file_name], found = _digests(path, inside, cache)
        if stamps[file_name] != before.get(file_name):
            raise StorageError(f"{path} changed while it was opened", remedy="try again")
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
            found = ((entry.name, entry.stat()) for entry in entries if entry.is_file())
            return {name: (status.st_size, status.st_mtime_ns) for name, status in found}
    except OSError:
        return {}  # it is said by who reads a file
