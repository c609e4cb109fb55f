"""Who writes a snapshot to disk, beside the training.

``DirectSaver`` writes on a thread of this process, through the world's disk: in a simulation, in tests, and where there
is no other way. ``roles.worker.saver_process.ProcessSaver`` has a helper process do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.shared_memory import Memory, PrivateMemory
from p2ptrain.core.threads import Thread
from p2ptrain.core.training import FilePlan
from roles.worker.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where one job's checkpoints stand, and how many are kept; ``spared``: see ``CheckpointStore``."""

    root: Path
    keep: int
    spared: frozenset[int] = frozenset()


class Saver(Protocol):
    """Writes checkpoints, one after the other."""

    def allocate(self, size_bytes: int) -> Memory:
        """Memory for a snapshot that this saver can write. Called on the compute thread. Raises ``ResourceError``."""
        ...

    async def save(
        self, snapshot: Snapshot, plan: list[FilePlan], shelf: Shelf, meta: Meta, *, urgent: bool
    ) -> CheckpointEntry:
        """Write ``plan`` from the snapshot's blobs as the durable checkpoint of its step, then prune older ones.

        The caller keeps the snapshot until this returned.

        Args:
            urgent: somebody waits for it; else training comes first.

        Raises:
            StorageError, ResourceError: there is no such checkpoint; the older ones are unharmed.
        """
        ...

    async def close(self) -> None:
        """Give up what is being written."""
        ...


class DirectSaver:
    """See the module's docstring.

    Args:
        thread: on which the directory's other users work, too: one at a time.
    """

    def __init__(self, thread: Thread, disk: Disk) -> None:
        self._thread, self._disk = thread, disk

    def allocate(self, size_bytes: int) -> Memory:
        """Memory of this process."""
        return PrivateMemory(size_bytes)

    async def save(
        self, snapshot: Snapshot, plan: list[FilePlan], shelf: Shelf, meta: Meta, *, urgent: bool
    ) -> CheckpointEntry:
        """See ``Saver``."""
        return await self._thread.submit(lambda: self.write(snapshot, plan, shelf, meta))

    def write(self, snapshot: Snapshot, plan: list[FilePlan], shelf: Shelf, meta: Meta) -> CheckpointEntry:
        """``save``, by a caller who is on the thread."""
        blobs = {blob.name: blob.view for blob in snapshot.blobs}
        store = CheckpointStore(self._disk, shelf.root, shelf.keep, spared=shelf.spared)
        return store.write(snapshot.step, plan, blobs, meta)

    async def close(self) -> None:
        """Nothing to end: what is half written is cleared by the next start."""
