"""A model directory that a peer can send to others: its tensors and small files, their digests, and reads by ranges.

A sender first sends the *table*: a *record* (name, dtype, shape, digest) of each tensor and small file. The receiver
then requests ranges of bytes. An *entry* says where in which file a sender finds them.

Senders may lie. A model's id is a hash over its config and the records of its tensors. The receiver refuses a table
that does not lead to the requested id, and bytes that do not match their digest. So only small files can be forged. All
peers that request the same id share parts, so hashes must resist forgery, unlike xxh3: BLAKE2b with 256 bits for
tensors, and with 224 for ids, because ``is_id`` accepts no longer text. One core hashes 0.9 GB/s, about the speed of a
disk or network. A sender hashes each file once: it caches the digests by the file's size and modification time. If a
file changes and keeps both, receivers notice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from p2ptrain.core.adapters import model_name
from p2ptrain.core.disk import Disk, RealDisk, read_exactly, translating, write_atomic
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
BYTES = "U8"
"""The ``dtype`` of a record of a range of a plain file (``open_files``)."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.(json|txt|model|jinja)")
CACHE_FILE = "tensor-digests.json"
MAX_CACHE_BYTES = 64 << 20
_CACHED_FILES = 256
MAX_TENSOR_BYTES = 4 << 30
"""Larger tensors are refused: a record, with a digest per range, must fit into a control frame."""
_MAX_CONFIG_BYTES = 48 << 10  # the text of config.json is sent in a request
_REMEDY = "give a directory that save_pretrained wrote"


class FileStamp(NamedTuple):
    """If neither changes, a file counts as unchanged."""

    size_bytes: int
    mtime_ns: int


class HashedFile(NamedTuple):
    """A file as it was when it was hashed. ``digests``: by name of the tensor."""

    stamp: FileStamp
    digests: Mapping[str, bytes]


# ------------------------------------------------------------------------------------------------------------ the table


def is_file_name(name: str) -> bool:
    """Whether a small file of that name may belong to a model: no path, no hidden file, no weights."""
    return _FILE_NAME.fullmatch(name) is not None


def hash_ranges(data: bytes | bytearray | memoryview) -> bytes:
    """The digest in a record: the hashes of all ranges of a tensor or small file, joined. Releases the GIL."""
    view = memoryview(data)
    ranges = (view[start : start + RANGE_BYTES] for start in range(0, max(len(view), 1), RANGE_BYTES))
    return b"".join(hashlib.blake2b(part, digest_size=DIGEST_BYTES).digest() for part in ranges)


def digest_size(size_bytes: int) -> int:
    return DIGEST_BYTES * max(1, -(-size_bytes // RANGE_BYTES))


def compute_model_id(config: str, records: Iterable[TensorRecord]) -> str:
    """The id of the model with this text of ``config.json`` and these tensors. Small files do not count."""
    fields = [config.encode("utf-8", "surrogatepass")]
    for record in sorted((record for record in records if record.dtype != FILE), key=lambda record: record.name):
        fields += [record.name.encode("utf-8", "surrogatepass"), f"{record.dtype} {record.shape}".encode()]
        fields.append(record.digest)
    model_hash = hashlib.blake2b(digest_size=ID_BYTES)
    for data in fields:
        model_hash.update(len(data).to_bytes(8, "little"))  # so no other fields join to the same bytes
        model_hash.update(data)
    return model_hash.hexdigest()


def make_page(records: Sequence[TensorRecord], first: int) -> TensorsPage:
    """As many records from ``first`` on as fit a frame."""
    page: list[TensorRecord] = []
    size_bytes = 0
    for record in records[max(first, 0) : max(first, 0) + _PAGE_RECORDS]:
        name = record.name.encode("utf-8", "replace")
        size_bytes += 80 + len(record.digest) + len(name) + 9 * len(record.shape)  # 9: of an int in msgpack; 80: others
        if size_bytes > _PAGE_BYTES:
            break
        page.append(record)
    return TensorsPage(len(records), page)


class TableReceiver:
    """Assembles a table from its pages. ``records``: name → record, so far."""

    def __init__(self) -> None:
        self.records: dict[str, TensorRecord] = {}
        self._total = -1

    @property
    def is_complete(self) -> bool:
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
        self._files: dict[str, HashedFile] | None = None  # None: not read yet

    def get(self, path: Path, stamp: FileStamp) -> Mapping[str, bytes]:
        """The digests of a file's tensors; none if the file changed since."""
        hashed = self._read_files().get(str(path))
        return hashed.digests if hashed is not None and hashed.stamp == stamp else {}

    def put(self, path: Path, hashed: HashedFile) -> None:
        files = self._read_files()
        files.pop(str(path), None)
        files[str(path)] = hashed
        while len(files) > _CACHED_FILES:
            del files[next(iter(files))]  # the oldest
        table = {
            name: {"stamp": list(stamp), "digests": {tensor: digest.hex() for tensor, digest in digests.items()}}
            for name, (stamp, digests) in files.items()
        }
        self._disk.make_dir(self._path.parent)
        write_atomic(self._disk, self._path, json.dumps(table).encode())

    def _read_files(self) -> dict[str, HashedFile]:
        if self._files is None:
            self._files = {}
            if self._path.name in self._disk.list_dir(self._path.parent):
                with suppress(StorageError, ValueError, LookupError, TypeError, AttributeError):  # damaged: hash again
                    for path, entry in json.loads(self._disk.read(self._path, max_bytes=MAX_CACHE_BYTES)).items():
                        digests = {tensor: bytes.fromhex(text) for tensor, text in entry["digests"].items()}
                        self._files[path] = HashedFile(FileStamp(*entry["stamp"]), digests)
        return self._files


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model with all tensors hashed. Reads from a file that changed since are refused.

    Attributes:
        model: its id.
        records: of the tensors, sorted by name, then of the small files.
        entries: the same tensors and files, by name. ``stamps``: by file name.
    """

    directory: Path
    model: str
    config: str
    records: tuple[TensorRecord, ...]
    entries: Mapping[str, TensorEntry]
    stamps: Mapping[str, FileStamp]

    @property
    def name(self) -> str:
        return model_name(self.directory)

    def read(self, name: str, start: int, stop: int) -> bytearray:
        """Read bytes [start, stop) of a tensor or small file. Blocking. Raises ``StorageError`` if the file changed."""
        entry = self.entries.get(name)
        if entry is None or not 0 <= start <= stop <= entry.size_bytes:
            raise StorageError(f"{self.directory} has no bytes {start} to {stop} of {name[:80]!r}")
        with _open_file(self.directory / entry.file) as (file, stamp):
            if stamp != self.stamps[entry.file]:
                raise StorageError(f"{self.directory / entry.file} changed since it was opened")
            return read_exactly(file, entry.start + start, stop - start)


def open_model(directory: Path, cache: DigestCache | None) -> ModelDirectory:
    """Open a model and hash the tensors that are not in ``cache``: about a second per gigabyte. Blocking.

    Raises:
        ConfigError: there is no usable model in safetensors.
        StorageError: a file is damaged, missing or unreadable, or changed meanwhile.
    """
    stamps = _read_stamps(directory)  # before the headers are read, to detect a later change
    table = TensorTable(directory)
    small = [name for name, stamp in stamps.items() if is_file_name(name) and stamp.size_bytes <= MAX_FILE_BYTES]
    if "config.json" not in small:
        raise ConfigError(f"{directory} has no config.json", remedy=_REMEDY)
    config = _read_config(directory / "config.json")
    if any(entry.size_bytes > MAX_TENSOR_BYTES for entry in table.entries.values()):
        raise ConfigError(f"{directory} has a tensor of more than {MAX_TENSOR_BYTES >> 30} GiB")
    if any(not name.isprintable() for name in table.entries):
        raise StorageError(f"{directory} has a tensor whose name is not text")
    entries = dict(sorted(table.entries.items()))
    for name in sorted(small)[:MAX_FILES]:
        size_bytes = stamps[name].size_bytes
        entries[name] = TensorEntry(name, FILE, (size_bytes,), 0, size_bytes)
    files: dict[str, HashedFile] = {}
    for name in sorted({entry.file for entry in entries.values()}):
        contents = {tensor: entry for tensor, entry in entries.items() if entry.file == name}
        files[name] = _hash_file(directory / name, contents, cache)
        if files[name].stamp != stamps.get(name):
            raise StorageError(f"{directory / name} changed while it was opened", remedy="try again")
    records = tuple(
        TensorRecord(name, entry.dtype, list(entry.shape), entry.size_bytes, files[entry.file].digests[name])
        for name, entry in entries.items()
    )
    return ModelDirectory(directory, compute_model_id(config, records), config, records, entries, stamps)


def open_files(place: Path, title: str, is_needed: Callable[[str], bool]) -> ModelDirectory:
    """Open plain files, with a record for each range: the files of a directory that are needed by their names, or one
    file. ``title``: in place of an id. Hashes a gigabyte a second. Blocking. Raises ``StorageError``."""
    directory = place if place.is_dir() else place.parent
    stamps, entries, records = _read_stamps(directory), dict[str, TensorEntry](), list[TensorRecord]()
    for name in filter(is_needed, sorted(stamps)) if place.is_dir() else stamps.keys() & {place.name}:
        size_bytes = stamps[name].size_bytes
        lengths = [min(RANGE_BYTES, size_bytes - start) for start in range(0, max(size_bytes, 1), RANGE_BYTES)]
        ranges = {
            f"{name}#{number}": TensorEntry(name, BYTES, (length,), number * RANGE_BYTES, number * RANGE_BYTES + length)
            for number, length in enumerate(lengths)
        }
        digests = _hash_file(directory / name, ranges, None).digests
        records += [
            TensorRecord(key, BYTES, list(is_.shape), is_.size_bytes, digests[key]) for key, is_ in ranges.items()
        ]
        entries |= ranges
    if not records:
        raise StorageError(f"{place} has no files that can be sent")
    return ModelDirectory(directory, title, "", tuple(records), entries, stamps)


def file_of(record: TensorRecord) -> str:
    """The name of the file that a record of ``open_files`` has a range of."""
    return record.name.rpartition("#")[0]


def files_untrusted(records: Iterable[TensorRecord]) -> dict[str, list[TensorRecord]]:
    """The records of each file, in order, of a checked table of ``open_files``. Raises ``ProtocolError``."""
    files: dict[str, list[TensorRecord]] = {}
    for record in records:
        ranges = files.setdefault(file_of(record), [])
        is_next = record.name == f"{file_of(record)}#{len(ranges)}" and record.dtype == BYTES
        if (
            not is_next
            or record.size_bytes > RANGE_BYTES
            or any(known.size_bytes < RANGE_BYTES for known in ranges[-1:])
        ):
            raise ProtocolError(f"{record.name[:80]!r} is not the next range of a file")
        ranges.append(record)
    return files


def _read_config(path: Path) -> str:
    try:
        config = RealDisk().read(path, max_bytes=_MAX_CONFIG_BYTES).decode()
        config_untrusted(config)
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} is not UTF-8 text") from error
    except ProtocolError as error:
        raise ConfigError(f"{path} is not valid: {error.message}", remedy=_REMEDY) from error
    return config


def _hash_file(path: Path, entries: Mapping[str, TensorEntry], cache: DigestCache | None) -> HashedFile:
    """Hash the tensors of one file, or take their digests from the cache."""
    with _open_file(path) as (file, stamp):
        cached = cache.get(path, stamp) if cache is not None else {}
        sizes = {name: digest_size(entry.size_bytes) for name, entry in entries.items()}
        if sizes == {name: len(cached[name]) for name in entries if name in cached}:
            return HashedFile(stamp, {name: cached[name] for name in entries})
        digests: dict[str, bytes] = {}
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            starts = range(entry.start, max(entry.stop, entry.start + 1), RANGE_BYTES)
            ranges = (read_exactly(file, start, min(RANGE_BYTES, entry.stop - start)) for start in starts)
            digests[name] = b"".join(map(hash_ranges, ranges))
    hashed = HashedFile(stamp, digests)
    if cache is not None:
        cache.put(path, hashed)
    return hashed


@contextmanager
def _open_file(path: Path) -> Iterator[tuple[FileIO, FileStamp]]:
    with translating("read", path), path.open("rb", buffering=0) as file:
        yield file, _stamp(os.fstat(file.fileno()))


def _read_stamps(directory: Path) -> dict[str, FileStamp]:
    try:
        with os.scandir(directory) as files:
            return {file.name: _stamp(file.stat()) for file in files if file.is_file()}
    except OSError:
        return {}  # reading the table reports it


def _stamp(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_size, status.st_mtime_ns)
