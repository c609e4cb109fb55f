"""Memory that a helper process can map, and that no crash can leave behind.

It has no name: an anonymous file, known by its descriptor alone, which travels over a Unix socket. So it is gone with
the last process that has it open, however that one ends. ``multiprocessing.shared_memory`` has names, which outlive a
process that is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Protocol

from p2ptrain.core.errors import ResourceError


class Memory(Protocol):
    """Writable memory of a fixed size.

    Attributes:
        view: all of it.
        descriptor: of the file that it is a mapping of; -1 where no other process can have it.
    """

    @property
    def view(self) -> memoryview: ...
    @property
    def descriptor(self) -> int: ...


class PrivateMemory:
    """Memory of this process alone."""

    descriptor = -1

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))


class SharedMemory:
    """Memory that another process may map with ``attached``. Freed with the last reference to it and its views.

    Raises:
        ResourceError: there is not that much.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self.descriptor = _anonymous_file()
            weakref.finalize(self, os.close, self.descriptor)
            if hasattr(os, "posix_fallocate"):  # now, as an error: later, as a page is touched, it would be a SIGBUS
                os.posix_fallocate(self.descriptor, 0, size_bytes)
            else:
                os.ftruncate(self.descriptor, size_bytes)
            self.view = memoryview(mmap.mmap(self.descriptor, size_bytes))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceError("too many open files", remedy="raise the limit: ulimit -n 4096") from error
            raise ResourceError(
                f"a copy of the state needs {size_bytes / 1e6:.1f} MB of memory: {error.strerror}",
                remedy="end other programs, or train a smaller model",
            ) from error


def attached(descriptor: int, size_bytes: int) -> memoryview:
    """The memory behind a descriptor that another process sent, to be read only. Raises ``OSError``."""
    return memoryview(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("p2ptrain", os.MFD_CLOEXEC)
    in_memory = Path("/dev/shm")  # noqa: S108 - the file has no name there
    with tempfile.TemporaryFile(dir=in_memory if in_memory.is_dir() else None) as file:
        return os.dup(file.fileno())
