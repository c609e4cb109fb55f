"""The disk, reduced to the calls whose order decides whether a file survives a power cut.

Everything durable is written the same way: to a temporary name beside its place, flushed, renamed over the place, and
the directory flushed. A reader therefore sees the old or the new content, never a mixture.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from p2ptrain.core.errors import StorageError

if TYPE_CHECKING:
    import sqlite3


_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS})


class Disk(Protocol):
    """The file operations that the project uses for durable state. Raises ``StorageError``."""

    def read(self, path: Path, *, max_bytes: int) -> bytes: ...
    def read_range(self, path: Path, start: int, stop: int) -> bytes: ...
    def hash_file(self, path: Path) -> str: ...
    def write_file(self, path: Path, data: bytes) -> None: ...
    def append_file(self, path: Path, data: bytes | memoryview) -> None: ...
    def set_mode(self, path: Path, mode: int) -> None: ...
    def sync_file(self, path: Path) -> None: ...
    def sync_dir(self, path: Path) -> None: ...
    def make_dir(self, path: Path, *, mode: int = 0o755) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def list_dir(self, path: Path) -> list[str]: ...
    def is_dir(self, path: Path) -> bool: ...
    def size(self, path: Path) -> int: ...
    def remove_tree(self, path: Path) -> None: ...
    def free_bytes(self, path: Path) -> int: ...
    def try_lock(self, path: Path) -> Lock | None: ...
    def connect(self, path: Path) -> sqlite3.Connection: ...


class Lock(Protocol):
    def close(self) -> None: ...


class RealDisk:
    """The operating system's disk."""

    def read(self, path: Path, *, max_bytes: int) -> bytes:
        """The whole file, refused (before reading) where it is larger than ``max_bytes``."""
        try:
            if path.stat().st_size > max_bytes:
                raise StorageError(f"{path} is larger than the {max_bytes} bytes it may have")
            return path.read_bytes()
        except OSError as error:
            raise _translated("read", path, error) from error

    def read_range(self, path: Path, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the file, refused where it is shorter."""
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise _translated("read", path, error) from error
        if len(data) != stop - start:
            raise StorageError(f"{path} has no bytes {start} to {stop}")
        return data

    def hash_file(self, path: Path) -> str:
        """SHA-256 of the file, hex, read in pieces: the file may be larger than memory."""
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _translated("read", path, error) from error

    def write_file(self, path: Path, data: bytes) -> None:
        try:
            path.write_bytes(data)
        except OSError as error:
            raise _translated("write", path, error) from error

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        try:
            with path.open("ab", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            raise _translated("write", path, error) from error

    def set_mode(self, path: Path, mode: int) -> None:
        try:
            path.chmod(mode)
        except OSError as error:
            raise _translated("restrict", path, error) from error

    def sync_file(self, path: Path) -> None:
        self._sync(path, os.O_RDWR)

    def sync_dir(self, path: Path) -> None:
        if os.name == "posix":  # Windows has no handle on a directory; its rename is durable with the journal
            self._sync(path, os.O_RDONLY)

    def _sync_if_ours(self, path: Path) -> None:
        """A directory that this user may not read is not his to make durable, nor one that no flush is meant for."""
        try:
            self.sync_dir(path)
        except StorageError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _NOT_OURS:
                raise

    def _sync(self, path: Path, flags: int) -> None:
        try:
            descriptor = os.open(path, flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _translated("flush", path, error) from error

    def make_dir(self, path: Path, *, mode: int = 0o755) -> None:
        """Make ``path`` and what leads to it where it is not there, all with ``mode``, which the umask may narrow.

        Durable when it returns: a file is flushed in vain where the power cut takes the directory that it is in. So is
        one that was there already: who made it may have died in the call.
        """
        try:
            missing = list(itertools.takewhile(lambda each: not each.exists(), (path, *path.parents)))
            self._sync_if_ours((missing[-1].parent if missing else path).parent)
            for each in dict.fromkeys((*reversed(missing), path)):
                each.mkdir(mode=mode, exist_ok=True)
                if missing:
                    self.sync_dir(each.parent)  # before the next one: a kill leaves one at most that is not durable
        except OSError as error:
            raise _translated("make the directory", path, error) from error

    def rename(self, source: Path, target: Path) -> None:
        try:
            os.replace(source, target)
        except OSError as error:
            raise _translated("rename", source, error) from error

    def list_dir(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _translated("list", path, error) from error

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError as error:
            raise _translated("stat", path, error) from error

    def remove_tree(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _translated("remove", path, error) from error

    def free_bytes(self, path: Path) -> int:
        try:
            return shutil.disk_usage(path).free
        except OSError as error:
            raise _translated("measure the free space of", path, error) from error

    def try_lock(self, path: Path) -> Lock | None:
        """A lock on the file ``path``, which is made; None where another process holds it."""
        try:
            handle = path.open("a+")
        except OSError as error:
            raise _translated("open", path, error) from error
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
        """The SQLite database in the file ``path``, without implicit transactions. Raises ``sqlite3.Error``."""
        import sqlite3  # not for everyone who writes a file

        return sqlite3.connect(path, isolation_level=None)


def write_atomic(disk: Disk, path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace ``path`` by ``data`` so that a crash at any moment leaves the old or the new file, whole.

    Args:
        private: nobody but this user may read it, at any moment.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if private:
        disk.write_file(temporary, b"")
        disk.set_mode(temporary, 0o600)
    disk.write_file(temporary, data)
    disk.sync_file(temporary)
    disk.rename(temporary, path)
    disk.sync_dir(path.parent)


def _translated(verb: str, path: Path, error: OSError) -> StorageError:
    first = {
        errno.ENOSPC: "free some space, or ",
        errno.EACCES: "check the owner and the permissions, or ",
    }.get(error.errno or 0, "")
    remedy = f"{first}choose another place with --state"
    return StorageError(f"cannot {verb} {path}: {error.strerror or error}", remedy=remedy)
