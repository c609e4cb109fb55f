"""The disk interface: the calls whose order decides whether a file survives a power cut.

Every durable file is written in the same way: write it under a temporary name in the same directory, flush it, rename
it over the target, flush the directory. So a reader sees the old or the new content, never a mixture.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from p2ptrain.core.errors import DiskFull, StorageError

if TYPE_CHECKING:
    import sqlite3


_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS})


class Disk(Protocol):
    """The file operations for durable state. They raise ``StorageError`` unless they say otherwise."""

    def read(self, path: Path, *, max_bytes: int) -> bytes: ...
    def read_range(self, path: Path, start: int, stop: int) -> bytes: ...
    def hash_file(self, path: Path) -> str: ...
    def write_file(self, path: Path, data: bytes) -> None: ...
    def append_file(self, path: Path, data: bytes | memoryview) -> None: ...
    def truncate(self, path: Path, size_bytes: int) -> None: ...
    def set_mode(self, path: Path, mode: int) -> None: ...
    def sync_file(self, path: Path) -> None: ...
    def sync_dir(self, path: Path) -> None: ...
    def make_dir(self, path: Path) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def list_dir(self, path: Path) -> list[str]: ...
    def is_dir(self, path: Path) -> bool: ...
    def size(self, path: Path) -> int: ...
    def remove_tree(self, path: Path) -> None: ...
    def free_bytes(self, path: Path) -> int: ...
    def try_lock(self, path: Path) -> Lock | None: ...
    def connect(self, path: Path) -> sqlite3.Connection: ...
    def fresh_path(self, path: Path) -> Path: ...


class Lock(Protocol):
    def close(self) -> None: ...


class RealDisk:
    def read(self, path: Path, *, max_bytes: int) -> bytes:
        """Read the whole file. A file larger than ``max_bytes`` is refused before it is read."""
        with translating("read", path):
            if path.stat().st_size > max_bytes:
                raise StorageError(f"{path} is larger than the {max_bytes} bytes it may have")
            return path.read_bytes()

    def read_range(self, path: Path, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) of the file. A shorter file is an error."""
        with translating("read", path), path.open("rb", buffering=0) as file:
            return bytes(read_exactly(file, start, stop - start))

    def hash_file(self, path: Path) -> str:
        """SHA-256 of the file, hex. The file may be larger than memory."""
        with translating("read", path), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def write_file(self, path: Path, data: bytes) -> None:
        with translating("write", path):
            path.write_bytes(data)

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        with translating("write", path), path.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]

    def truncate(self, path: Path, size_bytes: int) -> None:
        with translating("write", path):
            os.truncate(path, size_bytes)

    def set_mode(self, path: Path, mode: int) -> None:
        with translating("restrict", path):
            path.chmod(mode)

    def sync_file(self, path: Path) -> None:
        self._sync(path, os.O_RDWR)

    def sync_dir(self, path: Path) -> None:
        if os.name == "posix":  # Windows cannot flush a directory; its journal makes the rename durable
            self._sync(path, os.O_RDONLY)

    def _sync_if_ours(self, path: Path) -> None:
        """Flush a directory, unless the user may not read it or it does not support a flush."""
        try:
            self.sync_dir(path)
        except StorageError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _NOT_OURS:
                raise

    def _sync(self, path: Path, flags: int) -> None:
        with translating("flush", path):
            descriptor = os.open(path, flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def make_dir(self, path: Path) -> None:
        """Make ``path`` and its missing parents durably, for this user only.

        A flushed file is lost in a power cut if its directory is not durable. An existing directory is flushed too,
        because its maker may have died before the flush.
        """
        with translating("make the directory", path):
            missing = list(itertools.takewhile(lambda place: not place.exists(), (path, *path.parents)))
            self._sync_if_ours((missing[-1].parent if missing else path).parent)
            for place in dict.fromkeys((*reversed(missing), path)):
                place.mkdir(mode=0o700, exist_ok=True)
                if missing:
                    self.sync_dir(place.parent)  # at once: a kill leaves at most one that is not durable

    def rename(self, source: Path, target: Path) -> None:
        with translating("rename", source):
            os.replace(source, target)

    def list_dir(self, path: Path) -> list[str]:
        with translating("list", path), suppress(FileNotFoundError):
            return sorted(os.listdir(path))
        return []

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def size(self, path: Path) -> int:
        with translating("read", path):
            return path.stat().st_size

    def remove_tree(self, path: Path) -> None:
        with translating("remove", path), suppress(FileNotFoundError):
            path.unlink() if path.is_file() else shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        with translating("measure the free space of", path):
            return shutil.disk_usage(path).free

    def try_lock(self, path: Path) -> Lock | None:
        """Lock the file ``path``, and create it if necessary. None if another process holds the lock."""
        with translating("open", path):
            handle = path.open("a+")
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
            else:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            return None
        return handle

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open the SQLite database ``path`` without implicit transactions. Raises ``sqlite3.Error``."""
        import sqlite3  # most users of a disk do not need it

        return sqlite3.connect(path, isolation_level=None)

    def fresh_path(self, path: Path) -> Path:
        """``path`` with a random ending, which nothing has."""
        return path.with_name(f"{path.name}-{secrets.token_hex(4)}")


def write_atomic(disk: Disk, path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace ``path`` by ``data``. A crash at any moment leaves the whole old or the whole new file.

    Args:
        private: only this user may read the file, from the first moment.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if private:
        disk.write_file(temporary, b"")
        disk.set_mode(temporary, 0o600)
    disk.write_file(temporary, data)
    disk.sync_file(temporary)
    disk.rename(temporary, path)
    disk.sync_dir(path.parent)


@contextmanager
def new_directory(disk: Disk, path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes ``path`` after the block, durable; a failure leaves none."""
    disk.make_dir(path.parent)
    draft = disk.fresh_path(path.with_name(f".{path.name}.new"))
    disk.make_dir(draft)
    try:
        yield draft
        for place, _, names in os.walk(draft):
            for name in names:
                disk.sync_file(Path(place, name))
            disk.sync_dir(Path(place))
        disk.rename(draft, path)
        disk.sync_dir(path.parent)
    except BaseException:
        with suppress(StorageError):  # the first error is raised
            disk.remove_tree(draft)
        raise


def read_exactly(file: FileIO, start: int, size_bytes: int) -> bytearray:
    """Read so many bytes from ``start`` on. Raises ``StorageError`` if the file is shorter, and ``OSError``."""
    data = bytearray(size_bytes)
    left = memoryview(data)
    file.seek(start)
    while left:
        if not (count := file.readinto(left)):
            raise StorageError(f"{file.name} ends {len(left)} bytes too early", remedy="fetch or save it again")
        left = left[count:]
    return data


@contextmanager
def translating(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(verb, path, error) from error


def storage_error(verb: str, path: Path, error: OSError) -> StorageError:
    text, elsewhere = f"cannot {verb} {path}: {error.strerror or error}", "choose another place with --state"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text, remedy=f"free some space, or {elsewhere}")
    remedies = ["check the owner and the permissions"] * (error.errno == errno.EACCES)
    return StorageError(text, remedy=", or ".join(remedies + [elsewhere] * (verb != "read")))
