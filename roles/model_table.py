"""The table of a model that one peer sends another: records of its tensors and small files, and the model's id.

The id is a hash over everything that decides what the model computes. The receiver accepts a table only if it leads to
the requested id. So a sender can lie about the small files only.

Senders may be hostile, and all peers that request the same id share parts. So both hashes are BLAKE2b; a checksum such
as xxh3 is easy to forge. Digests of tensors have 256 bits. Ids have 224 bits, the longest hex text that ``is_id``
accepts, so even an attacker who makes both models cannot make two with the same id.

One core hashes 0.9 GB/s with BLAKE2b, and 11 GB/s with xxh3. A receiver hashes every byte that it loads; the disk or
the network takes at least as long. A sender hashes a file once, and caches the digests by size and modification time.
The cache only serves to make tables. If a file changes unnoticed, the receiver's hash differs, so it refuses the data.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.tensor_files import ITEM_BYTES, MAX_DIMS, MAX_TENSORS
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


def is_file_name(name: str) -> bool:
    """Whether a small file of that name may belong to a model: no path, no hidden file, no weights."""
    return _FILE_NAME.fullmatch(name) is not None


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The digest in a record: the digests of all ranges of a tensor or small file, joined. Releases the GIL."""
    view = memoryview(data)
    ranges = (view[start : start + RANGE_BYTES] for start in range(0, max(len(view), 1), RANGE_BYTES))
    return b"".join(hashlib.blake2b(each, digest_size=DIGEST_BYTES).digest() for each in ranges)


def digest_size(size_bytes: int) -> int:
    return DIGEST_BYTES * max(1, -(-size_bytes // RANGE_BYTES))


def model_id(config: str, records: Iterable[TensorRecord]) -> str:
    """The id of the model with this text of ``config.json`` and these tensors. Small files do not count."""
    total = hashlib.blake2b(digest_size=ID_BYTES)
    _put(total, config.encode("utf-8", "surrogatepass"))
    for record in sorted((each for each in records if each.dtype != FILE), key=lambda each: each.name):
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
    if len(record.shape) > MAX_DIMS or not all(0 <= each < 1 << 48 for each in record.shape):
        raise ProtocolError(f"{record.name[:80]!r} has an invalid shape")
    if record.dtype == FILE:
        if not is_file_name(record.name) or record.shape != [record.size_bytes] or record.size_bytes > MAX_FILE_BYTES:
            raise ProtocolError(f"{record.name[:80]!r} is not a valid file of a model")
    elif record.dtype not in ITEM_BYTES or record.size_bytes != math.prod(record.shape) * ITEM_BYTES[record.dtype]:
        raise ProtocolError(f"{record.name[:80]!r} has {record.size_bytes} bytes, not those of its shape")
