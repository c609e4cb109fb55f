"""One job's checkpoints on this worker's disk.

Everything that touches the directory runs on one thread, one thing after the other: so a run that goes back to an older
checkpoint never has a newer one appear behind it, and nothing of it makes a step wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import xxhash

from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore, Draft, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import P2PTrainError, StorageError, UserError
from p2ptrain.core.threads import Thread
from p2ptrain.core.training import FilePlan
from ring.token import first_lineage, is_lineage
from roles.compute_thread import ComputeThread
from roles.engine import Blob, Engine, StagedEngine
from roles.worker.saver import Saver, Shelf
from roles.worker.snapshot import Snapshot

T = TypeVar("T")


class Keeper:
    """Saves, loads, verifies and deletes.

    Args:
        thread: the one that the saver works on, too.
        tell: (level, kind, text) for people.
    """

    def __init__(
        self, thread: Thread, disk: Disk, saver: Saver, shelf: Shelf, tell: Callable[[str, str, str], None]
    ) -> None:
        self._thread, self._disk, self._saver, self._shelf, self._tell = thread, disk, saver, shelf, tell
        self._opened: CheckpointStore | None = None
        self._wanted = -1  # the job may go back to it

    @property
    def disk(self) -> Disk:
        """For whoever works on the keeper's thread."""
        return self._disk

    async def entries(self) -> list[CheckpointEntry]:
        """What is there, newest first, not verified. Raises ``StorageError``."""
        return await self._on_disk(CheckpointStore.entries)

    async def go_back(self, step: int) -> None:
        """Set newer checkpoints than that of ``step`` aside: they are another future's. Raises ``StorageError``."""
        self._wanted = -1
        for path in await self._on_disk(lambda store: store.set_aside_after(step)):
            self._tell("info", "checkpoint-superseded", f"a newer checkpoint is kept as {path}")

    async def find(self, step: int) -> CheckpointEntry | None:
        """The checkpoint of ``step``, verified; None where there is none. Raises ``StorageError``: it is damaged."""
        return await self._on_disk(lambda store: store.find(step))

    async def draft(self, step: int, need_bytes: int) -> Draft:
        """See ``CheckpointStore.draft``."""
        return await self._on_disk(lambda store: store.draft(step, need_bytes))

    async def publish(self, draft: Draft, meta: Meta) -> CheckpointEntry:
        """See ``CheckpointStore.publish``."""

        def publish(store: CheckpointStore) -> CheckpointEntry:
            store.spared = self._spared()
            return store.publish(draft, meta)

        return await self._on_disk(publish)

    def discard(self, draft: Draft) -> None:
        """Soon: nobody waits for it."""
        self._thread.submit(draft.discard)

    def at_disk(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Have ``call`` done where everything that touches the directory is done."""
        return self._thread.submit(call)

    async def load(
        self, engine: Engine, compute: ComputeThread, *, spec: str, restore_step: int, split: bool = False
    ) -> tuple[int, str, float, CheckpointEntry | None]:
        """Put the newest good state into ``engine``: a checkpoint's, or the initial one.

        Args:
            restore_step: the step to go back to, -1 for the newest. Newer checkpoints are set aside.
            split: the engine is a ``StagedEngine``, and the directory its stage's.

        Returns:
            Steps applied, lineage, the last step's squared gradient norm (0 where it is not known), the checkpoint.

        Raises:
            StorageError: the directory cannot be read, or holds what is not of this program.
        """
        if restore_step >= 0:
            await self.go_back(restore_step)
        damaged: list[tuple[Path, str]] = []
        entry = await self._on_disk(lambda store: store.newest_good(lambda path, why: damaged.append((path, why))))
        for path, problem in damaged:
            text = f"checkpoint {path} is damaged ({problem}); falling back to the one before it"
            self._tell("warning", "checkpoint-damaged", text)
        if entry is None:
            return 0, first_lineage(spec, await compute.run(_initial_digest, engine, split)), 0.0, None
        await compute.run(engine.load, entry.path)
        square_sum = entry.meta.get("square_sum")
        return entry.step, lineage_of(entry), float(square_sum) if isinstance(square_sum, float) else 0.0, entry

    async def save(
        self, snapshot: Snapshot, plan: list[FilePlan], meta: Meta, *, urgent: bool, spared: int = -1
    ) -> CheckpointEntry:
        """Write the checkpoint of the snapshot's step; that of step ``spared`` is kept, however old it is, as is one
        that was verified.

        Raises ``StorageError``, ``ResourceError``.
        """
        shelf = replace(self._shelf, spared=self._spared(spared))
        return await self._saver.save(snapshot, plan, shelf, meta, urgent=urgent)

    def _spared(self, *steps: int) -> frozenset[int]:
        return frozenset({*steps, self._wanted} - {-1})

    async def verify(self, step: int) -> CheckpointEntry:
        """The checkpoint of ``step``, every byte of it compared. Raises ``UserError``, ``StorageError``.

        It is asked for because the job is to go back to it. Until then the ring trains on, and may save more than are
        kept: so it is spared from now on, until one is gone back to.
        """
        before, self._wanted = self._wanted, step
        try:
            entry = await self.find(step)
            if entry is None:
                raise UserError(f"there is no checkpoint of step {step} in {self._shelf.root}")
            lineage_of(entry)
        except P2PTrainError:
            self._wanted = before
            raise
        return entry

    async def delete(self, step: int) -> bool:
        """Whether there was one. Raises ``StorageError``."""
        return await self._on_disk(lambda store: store.delete(step))

    async def _on_disk(self, call: Callable[[CheckpointStore], T]) -> T:
        """Opens the store in the first call that needs it: that clears what a crash left, which may take a while."""

        def run() -> T:
            if self._opened is None:
                self._opened = CheckpointStore(self._disk, self._shelf.root, self._shelf.keep)
            return call(self._opened)

        return await self._thread.submit(run)


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


def _initial_digest(engine: Engine, split: bool) -> bytes:
    engine.load_initial()
    return cast(StagedEngine, engine).initial_digest() if split else state_digest(engine.state())
