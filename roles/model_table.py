"""What a model directory holds, as one peer tells another: records of its tensors and small files, and the model's id.

The id is a hash over all that decides what the model computes, so a table is believed when it leads to the id that was
asked for: a sender can lie about nothing but the small files.

Givers may be hostile, and parts are shared by whoever asks for a model of the same id, so both hashes are BLAKE2b: a
fast checksum such as xxh3 is forged in no time. Tensors have 256 bits, ids 224 (the longest hex text that ``is_id``
takes); even who makes up two models himself finds no two of one id. One core does 0.9 GB/s of it, where xxh3 does 11: a
second for a gigabyte that is loaded, beside which the disk or the wire takes as long or longer, and once for a gigabyte
that is given, for tables are kept by size and time of the files. What is kept so only ever makes tables: every byte
that is loaded is hashed when it is, so a file that changed unnoticed is refused, not believed.
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
"""In place of a dtype: a small file, such as the tokenizer's. Its shape is its bytes."""
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
    """Whether a small file of that name belongs to a model: no path, nothing hidden, no weights."""
    return _FILE_NAME.fullmatch(name) is not None


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Of a tensor or small file, as it stands in its record: of each range. Lets other threads run meanwhile."""
    view = memoryview(data)
    ranges = (view[start : start + RANGE_BYTES] for start in range(0, max(len(view), 1), RANGE_BYTES))
    return b"".join(hashlib.blake2b(each, digest_size=DIGEST_BYTES).digest() for each in ranges)


def digest_size(size_bytes: int) -> int:
    return DIGEST_BYTES * max(1, -(-size_bytes // RANGE_BYTES))


def model_id(config: str, records: Iterable[TensorRecord]) -> str:
    """The id of the model that ``config`` (``config.json``'s text) and the tensors make; small files do not count."""
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
    """Puts a table together, page after page.

    Attributes:
        records: so far, by name.
    """

    def __init__(self) -> None:
        self.records: dict[str, TensorRecord] = {}
        self._total = -1

    @property
    def complete(self) -> bool:
        return len(self.records) == self._total

    def take_untrusted(self, page: TensorsPage) -> None:
        if not 0 < page.total <= _MAX_RECORDS or self._total not in (-1, page.total):
            raise ProtocolError(f"a table of {page.total} tensors")
        if not page.tensors or len(self.records) + len(page.tensors) > page.total:
            raise ProtocolError("a page that does not lead to the end of its table")
        self._total = page.total
        for record in page.tensors:
            check_record_untrusted(record)
            if record.name in self.records:
                raise ProtocolError(f"a table that names {record.name[:80]!r} twice")
            self.records[record.name] = record


def check_record_untrusted(record: TensorRecord) -> None:
    """Raises ``ProtocolError`` where there can be no such tensor, or file."""
    if not 0 < len(record.name) <= _MAX_NAME or len(record.digest) != digest_size(record.size_bytes):
        raise ProtocolError("a tensor without a proper name or digest")
    if len(record.shape) > MAX_DIMS or not all(0 <= each < 1 << 48 for each in record.shape):
        raise ProtocolError(f"{record.name[:80]!r} has an impossible shape")
    if record.dtype == FILE:
        if not is_file_name(record.name) or record.shape != [record.size_bytes] or record.size_bytes > MAX_FILE_BYTES:
            raise ProtocolError(f"{record.name[:80]!r} is no file that comes with a model")
    elif record.dtype not in ITEM_BYTES or record.size_bytes != math.prod(record.shape) * ITEM_BYTES[record.dtype]:
        raise ProtocolError(f"{record.name[:80]!r} has another number of bytes than its shape has")
