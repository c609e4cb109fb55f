"""Token stores: the tokens of a text on disk, made once and mapped into memory.

A store is a directory below ``stores_dir()``, named after a hash of what decides the tokens. It holds

- ``tokens.bin``: the tokens, little-endian, of the dtype that ``Tokenizer.dtype`` chooses;
- ``marks.bin``: of conversations and pairs, the mark of each token (``compute.packing``), uint8;
- ``store.json``: ``StoreFacts``. While the store is made they say how much of it is durable, and where to go on.

One process at a time makes a store; others wait. Only this user may read it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from p2ptrain.compute.tokenizer import Tokens
from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import ConfigError, DiskFull, ProtocolError, StorageError
from p2ptrain.core.text_files import FACTS, MARKS, TOKENS, unreadable
from p2ptrain.core.texts import human_bytes

FORMAT = 2
"""Part of what is hashed; another one when equal texts would give other files."""

_READ_BYTES = _BUFFER_BYTES = 1 << 20
_POLL_S = 0.2
_MAX_FACTS_BYTES = 256 << 20  # with the windows that are being filled
DISK = RealDisk()

OnProgress = Callable[[str, float], None]
"""Called with what is being done, for people; and the share of it that is done, 0 to 1."""


def no_progress(text: str, share: float) -> None:
    """Show nothing."""


@dataclass(slots=True)
class StoreFacts:
    """What is known of a store without reading it.

    Attributes:
        path, form: ``data.path``, absolute, and ``data.format``. sources: hash of its files' paths, sizes and times.
        dtype, vocab_size: the tokenizer's. has_marks: whether the tokens have marks.
        digest: as ``compute.data.Corpus.digest``; empty: the store is not finished.
        numel: number of tokens, with padding. highest: the highest id.
        documents: number of texts, conversations or pairs. text_bytes: of their UTF-8.
        rows: fields of ``compute.rows.RowCounts``. note: what else was left out or cut.
        state: where to go on.
    """

    path: str
    form: str
    sources: str
    dtype: str
    vocab_size: int
    has_marks: bool
    digest: str = ""
    numel: int = 0
    highest: int = 0
    documents: int = 0
    text_bytes: int = 0
    rows: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def file_sizes(self) -> dict[str, int]:
        """In bytes, by name."""
        tokens = {TOKENS: self.numel * np.dtype(self.dtype).itemsize}
        return tokens | {MARKS: self.numel} if self.has_marks else tokens

    @property
    def size_bytes(self) -> int:
        return sum(self.file_sizes.values())


@dataclass(frozen=True, slots=True)
class TokenStore:
    """A finished store, mapped. tokens: shape (numel,); marks: (numel,), or None."""

    directory: Path
    facts: StoreFacts
    tokens: Tokens
    marks: npt.NDArray[np.uint8] | None


def stores_dir() -> Path:
    """Where this operating system keeps what a program can make again."""
    from platformdirs import user_cache_path

    return user_cache_path("p2ptrain", appauthor=False) / "tokens"


def sources_of(files: Sequence[Path]) -> str:
    """Hash of the files' paths, sizes and times, hex."""
    found = [(os.path.abspath(file), status_of(file)) for file in files]
    return hashlib.sha256(repr([(path, is_.st_size, is_.st_mtime_ns) for path, is_ in found]).encode()).hexdigest()


def status_of(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise unreadable(file, error) from error


def read_facts(directory: Path) -> StoreFacts | None:
    """None: there are none."""
    with suppress(StorageError, ProtocolError):
        return facts_untrusted(DISK.read(directory / FACTS, max_bytes=_MAX_FACTS_BYTES))
    return None


def open_store(directory: Path, on_progress: OnProgress = no_progress) -> TokenStore | None:
    """The store in ``directory``; None: it is not whole. Its files are read once, to verify them."""
    facts = read_facts(directory)
    with suppress(OSError):
        return _verify_and_map(directory, facts, on_progress) if facts is not None and facts.digest else None
    return None


def open_received(directory: Path, form: str, vocab_size: int, on_progress: OnProgress = no_progress) -> TokenStore:
    """The store in ``directory``, which other workers sent. Raises ``ConfigError``: it is damaged, or not made for
    ``data.format`` ``form`` and a tokenizer of ``vocab_size`` tokens."""
    try:
        facts = facts_untrusted(DISK.read(directory / FACTS, max_bytes=_MAX_FACTS_BYTES))
        facts.rows, facts.note = {}, ""  # texts for people
        if (facts.form, facts.vocab_size) != (form, vocab_size):
            raise ProtocolError(f"they are of another format, or of a tokenizer of {facts.vocab_size} tokens")
        if (store := _verify_and_map(directory, facts, on_progress)) is None:
            raise ProtocolError("they are damaged")
        return store
    except (OSError, StorageError, ProtocolError) as error:
        text = f"the tokens in {directory}, from another worker, cannot be used: {error}"
        raise ConfigError(text, remedy="remove them, and start again: p2ptrain data clean") from None


def facts_untrusted(data: bytes) -> StoreFacts:
    """Parse the facts of a store, which may be a peer's. Raises ``ProtocolError``."""
    try:
        facts: StoreFacts = TypeAdapter(StoreFacts).validate_json(data)
    except ValueError as error:
        raise ProtocolError(f"the facts of a token store are not valid ({type(error).__name__})") from None
    numbers = facts.numel, facts.highest, facts.vocab_size, facts.documents, facts.text_bytes
    if facts.dtype not in ("uint8", "uint16", "int32", "int64") or not all(0 <= number < 1 << 50 for number in numbers):
        raise ProtocolError("the facts of a token store have an invalid type or number")
    return facts


def list_stores() -> list[Path]:
    """The directories of all stores of this user."""
    places = (stores_dir() / name for name in DISK.list_dir(stores_dir()))
    return [place for place in places if DISK.is_dir(place)]


def remove_store(directory: Path) -> bool:
    """False: a process makes it now. A process that uses it keeps what it has mapped."""
    lock_file = directory.with_suffix(".lock")
    with store_errors():
        if (lock := DISK.try_lock(lock_file)) is None:
            return False
        for place in (directory, lock_file):
            DISK.remove_tree(place)
        lock.close()
    return True


@contextmanager
def lock_store(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Within it this process alone makes or removes the store. ``on_wait``: called while another one does."""
    with store_errors():
        DISK.make_dir(directory.parent)
        while (lock := DISK.try_lock(directory.with_suffix(".lock"))) is None:
            on_wait()
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.close()


@contextmanager
def store_errors() -> Iterator[None]:
    """Name the place of the stores in errors of the disk."""
    try:
        yield
    except StorageError as error:
        error.remedy = "free some space, remove old stores with `p2ptrain data clean`, or set XDG_CACHE_HOME"
        raise


class StoreWriter:
    """Writes a store, or goes on with one that was not finished. The caller holds its lock.

    Args:
        facts: what is known before.

    Attributes:
        facts: of what was added so far, but for ``state``: that of the last ``sync``, which says where to go on; empty:
            the store is new.
    """

    def __init__(self, directory: Path, facts: StoreFacts) -> None:
        self._directory, known = directory, read_facts(directory)
        self._buffers: dict[str, list[bytes]] = {name: [] for name in facts.file_sizes}
        self._buffered_bytes = 0
        with store_errors():
            DISK.make_dir(directory)
            for name in self._buffers:
                DISK.append_file(directory / name, b"")
                DISK.set_mode(directory / name, 0o600)
            sizes = {} if known is None or known.digest else known.file_sizes
            if known and sizes and all(DISK.size(directory / name) >= size for name, size in sizes.items()):
                facts = known  # else the disk has lost what it had flushed
            for name, size in facts.file_sizes.items():
                DISK.truncate(directory / name, size)
        self.facts = facts

    def append(self, tokens: Tokens, marks: npt.NDArray[np.uint8] | None = None) -> None:
        """Add tokens, shape (n,), and their marks if the store has some."""
        self.facts.numel += len(tokens)
        self.facts.highest = max(self.facts.highest, int(tokens.max(initial=0)))
        for name, array in zip(self._buffers, (tokens.astype(tokens.dtype.newbyteorder("<")), marks), strict=False):
            assert array is not None
            self._buffers[name].append(array.tobytes())
            self._buffered_bytes += array.nbytes
        if self._buffered_bytes >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        with store_errors():
            for name, buffer in self._buffers.items():
                DISK.append_file(self._directory / name, b"".join(buffer))
                buffer.clear()
        self._buffered_bytes = 0

    def check_room(self, need_bytes: float) -> None:
        """Raise ``DiskFull`` if the disk lacks room for so many more bytes."""
        with store_errors():
            if (free_bytes := DISK.free_bytes(self._directory)) < need_bytes:
                need, free, place = human_bytes(need_bytes), human_bytes(free_bytes), self._directory.parent
                raise DiskFull(f"the tokens of {self.facts.path} need about {need} more, and {place} has {free} free")

    def sync(self, state: dict[str, Any]) -> None:
        """Make durable what was added; a later writer gets ``state``."""
        self._flush()
        self.facts.state = state
        with store_errors():
            for name in self._buffers:
                DISK.sync_file(self._directory / name)
            write_atomic(DISK, self._directory / FACTS, json.dumps(asdict(self.facts)).encode(), private=True)

    def finish(self, on_progress: OnProgress) -> TokenStore:
        """Complete the store."""
        self._flush()
        self.facts.digest = _digest(self._directory, self.facts, on_progress)
        self.sync({})
        return _map_store(self._directory, self.facts)


def _digest(directory: Path, facts: StoreFacts, on_progress: OnProgress) -> str:
    """Empty: a token is none of the ids up to ``facts.highest``."""
    prefix = "pairs " if facts.form == "preference" else ""
    digest = hashlib.sha256(f"{prefix}{facts.dtype} {facts.vocab_size} ".encode())
    buffer, read_bytes, kind = bytearray(_READ_BYTES), 0, np.dtype(facts.dtype).newbyteorder("<")
    for name in facts.file_sizes:
        with (directory / name).open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                if name == TOKENS:
                    tokens = np.frombuffer(buffer, kind, count // kind.itemsize)
                    if tokens.min(initial=0) < 0 or tokens.max(initial=0) > facts.highest:
                        return ""
                read_bytes += count
                on_progress("checking the tokens", read_bytes / max(read_bytes, facts.size_bytes))
    return digest.hexdigest()


def _verify_and_map(directory: Path, facts: StoreFacts, on_progress: OnProgress) -> TokenStore | None:
    sizes = {name: (directory / name).stat().st_size for name in facts.file_sizes}
    if sizes != facts.file_sizes or _digest(directory, facts, on_progress) != facts.digest:
        return None
    os.utime(directory)  # when it was last used
    return _map_store(directory, facts)


def _map_store(directory: Path, facts: StoreFacts) -> TokenStore:
    marks = _map_file(directory / MARKS, "uint8") if facts.has_marks else None
    return TokenStore(directory, facts, _map_file(directory / TOKENS, facts.dtype), marks)


def _map_file(path: Path, dtype: str) -> npt.NDArray[Any]:
    """The content of a file. Windows are read at random, so no page is read ahead: few are in this process."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.dtype(dtype).newbyteorder("<"))
