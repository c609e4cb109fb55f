"""A peer's identity and state directory, which survive its process.

Each identity has a *slot* in the state directory, locked while its process lives. A second worker on the same machine
takes the next slot. A restarted worker finds its old slot, and so its checkpoints, again.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import Disk, Lock, write_atomic
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.ids import is_id, new_id

MAX_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """A claimed slot. It stays claimed until ``lock`` is closed."""

    peer_id: str
    name: str
    directory: Path
    lock: Lock

    def release(self) -> None:
        self.lock.close()


def claim(
    disk: Disk, root: Path, *, role: str, name: str = "", slot: int | None = None, fresh_id: Callable[[], str] = new_id
) -> Identity:
    """Claim slot ``slot`` of ``root``, or the first free one. ``fresh_id``: makes the id of a new peer.

    Raises:
        UserError: that slot, or every slot, is in use.
        StorageError: the directory cannot be written.
    """
    for number in [slot] if slot is not None else range(1, MAX_SLOTS + 1):
        directory = root / f"{role}-{number}"
        disk.make_dir(directory)
        lock = disk.try_lock(directory / "lock")
        if lock is not None:
            peer_id = _peer_id(disk, directory / "peer-id", fresh_id)
            host = socket.gethostname().split(".")[0] or "peer"
            usual = f"{host}-{number}" if role == "worker" else f"{host}-{role}-{number}"
            return Identity(peer_id, name or usual, directory, lock)
    if slot is not None:
        raise UserError(
            f"{role}-{slot} in {root} is in use by another process", remedy="stop it, or use another --state"
        )
    raise UserError(f"all {MAX_SLOTS} {role} slots in {root} are in use", remedy="use another --state")


def _peer_id(disk: Disk, path: Path, fresh_id: Callable[[], str]) -> str:
    with contextlib.suppress(StorageError, UnicodeDecodeError):
        found = disk.read(path, max_bytes=64).decode().strip()
        if is_id(found):
            return found
    fresh = fresh_id()
    write_atomic(disk, path, fresh.encode())
    return fresh
