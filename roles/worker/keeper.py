"""One job's checkpoints on this worker's disk. Every method blocks, and is called on the compute thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import StorageError, UserError
from ring.token import first_lineage, is_lineage
from roles.engine import Blob, Engine


class Keeper:
    """Saves, loads, verifies and deletes.

    Args:
        root: the directory of the job's checkpoints.
        keep: how many to keep.
        tell: (level, kind, text) for people; called on the compute thread, too.
    """

    def __init__(self, disk: Disk, root: Path, keep: int, tell: Callable[[str, str, str], None]) -> None:
        self._disk, self._root, self._keep, self._tell = disk, root, keep, tell
        self._opened: CheckpointStore | None = None

    @property
    def _store(self) -> CheckpointStore:
        """Opened by the first call that needs it: that clears what a crash left, which may take a while."""
        if self._opened is None:
            self._opened = CheckpointStore(self._disk, self._root, self._keep)
        return self._opened

    def entries(self) -> list[CheckpointEntry]:
        """What is there, newest first, not verified. Raises ``StorageError``."""
        return self._store.entries()

    def load(self, engine: Engine, *, spec: str, restore_step: int) -> tuple[int, str, float, CheckpointEntry | None]:
        """Put the newest good state into ``engine``: a checkpoint's, or the initial one.

        Args:
            restore_step: the step to go back to, -1 for the newest. Newer checkpoints are set aside.

        Returns:
            Steps applied, lineage, the last step's squared gradient norm (0 where it is not known), the checkpoint.

        Raises:
            StorageError: the directory cannot be read, or holds what is not of this program.
        """
        if restore_step >= 0:
            for path in self._store.set_aside_after(restore_step):
                self._tell("info", "checkpoint-superseded", f"a newer checkpoint is kept as {path}")
        entry = self._store.newest_good(self._damaged)
        if entry is None:
            engine.load_initial()
            return 0, first_lineage(spec, state_digest(engine.state())), 0.0, None
        engine.load(entry.path)
        square_sum = entry.meta.get("square_sum")
        return entry.step, lineage_of(entry), float(square_sum) if isinstance(square_sum, float) else 0.0, entry

    def save(self, engine: Engine, step: int, meta: Meta) -> CheckpointEntry:
        """Write the engine's state as the checkpoint of ``step``. Raises ``StorageError``, ``ResourceError``."""
        temporary = self._store.begin(step, need_bytes=state_bytes(engine.state()))
        try:
            engine.save(temporary)
            return self._store.commit(temporary, step, meta)
        except BaseException:
            self._store.discard(temporary)
            raise

    def verify(self, step: int) -> CheckpointEntry:
        """The checkpoint of ``step``, every byte of it compared. Raises ``UserError``, ``StorageError``."""
        entry = self._store.find(step)
        if entry is None:
            raise UserError(f"there is no checkpoint of step {step} in {self._root}")
        lineage_of(entry)
        return entry

    def delete(self, step: int) -> bool:
        """Whether there was one. Raises ``StorageError``."""
        return self._store.delete(step)

    def _damaged(self, path: Path, problem: str) -> None:
        text = f"checkpoint {path} is damaged ({problem}); falling back to the one before it"
        self._tell("warning", "checkpoint-damaged", text)


def lineage_of(entry: CheckpointEntry) -> str:
    """Raises ``StorageError`` where the manifest names none."""
    lineage = entry.meta.get("lineage")
    if not isinstance(lineage, str) or not is_lineage(lineage):
        raise StorageError(f"{entry.path} does not say which state it holds", remedy="move it away and join again")
    return lineage


def state_bytes(state: list[Blob]) -> int:
    return sum(blob.view.nbytes for blob in state)


def state_digest(state: list[Blob]) -> bytes:
    """xxh3-128 over all blobs: equal digests, equal bits. 16 bytes."""
    digest = xxhash.xxh3_128()
    for blob in state:
        digest.update(blob.view)
    return digest.digest()


def odd_ones_out(digests: list[bytes]) -> set[int]:
    """Ranks whose digest is not that of the most members; where two are as frequent, that of the lowest rank counts."""
    most = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
    return {rank for rank, digest in enumerate(digests) if digest != most}
