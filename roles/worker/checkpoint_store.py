"""One job's checkpoints on this worker's disk.

A save has three parts. The step waits while the compute thread copies the state in memory (``Snapshots``). The disk's
thread writes the copy while later steps run (``CheckpointFiles``). When the checkpoint is durable it is announced
(``Checkpointing``). A slow disk gets fewer checkpoints. If the ring stops after the step, the step waits for the write.

Everything that touches the directory runs on one thread, one call after the other. So a run that goes back to an older
checkpoint never sees a newer one appear later, and no step waits for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore, Draft, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import P2PTrainError, ResourceError, StorageError, UserError
from p2ptrain.core.threads import Thread
from p2ptrain.core.training import FilePlan
from ring.token import first_lineage, is_lineage
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Engine, Stage
from roles.snapshots import Snapshot, Snapshots, state_digest
from roles.worker.context import Context
from wire.job_messages import CheckpointSaved

STANDSTILL_S = 30.0
"""A member without progress for so long is not expected to save, so others stop waiting for it."""

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------- on the disk


class CheckpointFiles:
    """Saves, loads, verifies and deletes one job's checkpoints. ``tell`` shows (level, kind, text) to people. ``keep``
    and ``best``: as in ``CheckpointStore``. ``held``: the steps of those that were there after the last call."""

    def __init__(
        self,
        thread: Thread,
        disk: Disk,
        root: Path,
        keep: int,
        tell: Callable[[str, str, str], None],
        *,
        best: bool = False,
    ) -> None:
        self._thread, self.disk, self.root, self._tell = thread, disk, root, tell
        self._keep, self._best = keep, best
        self.held = list[int]()
        self._opened: CheckpointStore | None = None
        self._wanted = -1  # a checkpoint that the job may go back to

    async def entries(self) -> list[CheckpointEntry]:
        return await self._on_disk(CheckpointStore.entries)

    async def go_back(self, step: int) -> None:
        """Set checkpoints newer than ``step`` aside: the run restarts from there. Raises ``StorageError``."""
        self._wanted = -1
        for path in await self._on_disk(lambda store: store.set_aside_after(step)):
            self._tell("info", "checkpoint-superseded", f"a newer checkpoint is kept as {path}")

    async def find(self, step: int) -> CheckpointEntry | None:
        """Return the verified checkpoint of ``step``; None if there is none. Raises ``StorageError`` if damaged."""
        return await self._on_disk(lambda store: store.find(step))

    async def draft(self, step: int, need_bytes: int) -> Draft:
        return await self._on_disk(lambda store: store.draft(step, need_bytes))

    async def publish(self, draft: Draft, meta: Meta) -> CheckpointEntry:
        return await self._on_disk(lambda store: store.publish(draft, meta))

    def at_disk(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return self._thread.submit(call)

    async def load(
        self, engine: Engine, compute: ComputeThread, *, spec: str, restore_step: int, split: bool = False
    ) -> tuple[int, str, float, CheckpointEntry | None]:
        """Load the newest good state into ``engine``: a checkpoint's, or the initial one.

        Args:
            restore_step: the step to go back to, -1 for the newest. Newer checkpoints are set aside.
            split: the engine holds a stage, and the directory is that stage's.

        Returns:
            Steps applied, lineage, the last step's squared gradient norm (0 if unknown), the checkpoint.

        Raises:
            StorageError: the directory cannot be read, or was not written by this program.
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
        await compute.run(engine.state.load, entry.path)
        square_sum = entry.meta.get("square_sum")
        return entry.step, lineage_of(entry), float(square_sum) if isinstance(square_sum, float) else 0.0, entry

    async def small_file(self, entry: CheckpointEntry | None, name: str, max_bytes: int) -> bytes:
        """Read a small file of a verified checkpoint; empty if the checkpoint has none, or it is too large."""
        if entry is None or not 0 < entry.files.get(name, (0, ""))[0] <= max_bytes:
            return b""
        return await self.at_disk(lambda: self.disk.read(entry.path / name, max_bytes=max_bytes))

    async def save(self, snapshot: Snapshot, plan: list[FilePlan], meta: Meta, *, spared: int = -1) -> CheckpointEntry:
        """Write the checkpoint of a snapshot, which the caller holds until this returns. Then delete old checkpoints.

        Args:
            spared: the checkpoint of this step is kept, however old it is, as is a verified one.

        Raises:
            StorageError: the write failed; older checkpoints are unharmed.
        """
        blobs = {blob.name: blob.view for blob in snapshot.blobs}

        return await self._on_disk(lambda store: store.write(snapshot.step, plan, blobs, meta), spared=spared)

    async def verify(self, step: int) -> CheckpointEntry:
        """Compare every byte of the checkpoint of ``step``. Raises ``UserError``, ``StorageError``.

        The job is about to go back to it, so later saves keep it.
        """
        before, self._wanted = self._wanted, step
        try:
            entry = await self.find(step)
            if entry is None:
                raise UserError(f"there is no checkpoint of step {step} in {self.root}")
            lineage_of(entry)
        except P2PTrainError:
            self._wanted = before
            raise
        return entry

    async def delete(self, step: int) -> bool:
        return await self._on_disk(lambda store: store.delete(step))

    async def _on_disk(self, call: Callable[[CheckpointStore], T], *, spared: int = -1) -> T:
        def run() -> T:
            if self._opened is None:
                self._opened = CheckpointStore(self.disk, self.root, self._keep, best=self._best)
            self._opened.spared = frozenset({spared, self._wanted})
            result = call(self._opened)
            self.held = self._opened.steps()
            return result

        return await self._thread.submit(run)


def lineage_of(entry: CheckpointEntry) -> str:
    lineage = entry.meta.get("lineage")
    if not isinstance(lineage, str) or not is_lineage(lineage):
        raise StorageError(f"{entry.path} has no valid lineage", remedy="move it away and join again")
    return lineage


def _initial_digest(engine: Engine, split: bool) -> bytes:
    engine.state.load_initial()
    return engine.state.initial_digest() if split else state_digest(engine.state.blobs())


# ------------------------------------------------------------------------------------------ scheduling and announcing


class Checkpointing:
    """Saves one job's checkpoints and announces them.

    Args:
        tasks: holds the writes, which outlive their ring.
        extra_files: returns small files to save with a state, at the moment of the save.
        where: returns the applied steps and a progress counter of this member.
        save_soon: called when a skipped save can be made up for.
    """

    def __init__(
        self,
        context: Context,
        *,
        job: str,
        files: CheckpointFiles,
        snapshots: Snapshots,
        tasks: asyncio.TaskGroup,
        stage: Stage = WHOLE,
        extra_files: Callable[[], list[FilePlan]] = list,
        where: Callable[[], tuple[int, int]],
        save_soon: Callable[[], None] = lambda: None,
    ) -> None:
        self._save_soon = save_soon
        self._context, self._job, self._files, self._stage = context, job, files, stage
        self._extra_files, self._where = extra_files, where
        self._snapshots, self._tasks = snapshots, tasks
        self._saved = (-1, "")  # step and lineage of the newest durable checkpoint
        self._failed = (-1, "")  # of the newest failed save
        self.problem = ""  # of the newest save; empty: it did not fail
        self._owed = False  # a save was skipped because the disk or the memory was busy
        self._writing: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    async def begin_from(self, entry: CheckpointEntry | None) -> None:
        """Report the checkpoints to the seed after the state was loaded, from ``entry`` or initially."""
        self._saved = (-1, "")
        if entry is not None:
            self._saved = (entry.step, str(entry.meta.get("lineage")))
            self._context.notify("info", "checkpoint-loaded", f"resuming from {entry.path} (step {entry.step})")
        await self.announce_all()

    async def announce_all(self) -> None:
        """Report all checkpoints: the seed may have lost its record of one."""
        for known in await self._files.entries():
            announce(self._context, self._job, known, self._files.held, self._stage)

    def has_saved(self, step: int, lineage: str) -> bool:
        return self._saved == (step, lineage)

    @property
    def newest(self) -> int:
        return self._saved[0]

    @property
    def idle(self) -> bool:
        return not self._writing

    def go_without(self, step: int) -> None:
        self._owed = True
        text = f"no checkpoint at step {step}: an earlier one is still being written. raise checkpoint.every"
        self._context.notify("error", "checkpoint-failed", f"{text}. A later step is saved instead")

    async def save(self, engine: Engine, meta: Meta, *, step: int, wait: bool, spared: int = -1) -> None:
        """Save the state, which is that of ``step`` and does not change until this returns. Failures are only reported.

        ``meta``: with the state's ``lineage`` and the step's ``square_sum``. ``wait``: until it is durable, or failed.
        """
        lineage = str(meta["lineage"])
        key = step, lineage
        if wait:
            await self.wait_written()
        if self._saved == key or key in self._writing:
            return
        copied, extra_files = asyncio.Event(), self._extra_files()

        async def write() -> None:
            square_sum = float(meta["square_sum"] or 0.0)
            try:
                taking = self._snapshots.take(engine, step=step, lineage=lineage, square_sum=square_sum)
                with await taking as snapshot:
                    plan = await self._context.compute.run(engine.state.checkpoint_files, step)
                    copied.set()
                    entry = await self._files.save(snapshot, [*plan, *extra_files], meta, spared=spared)
            except P2PTrainError as problem:
                # A full disk must not end the run: the state is in memory, here and at every member.
                before, self.problem = self.problem, problem.with_remedy
                if (before, self._failed) != (self.problem, key):  # else it is said already
                    text = f"no checkpoint at step {step}: {self.problem}"
                    self._context.notify("error", "checkpoint-failed", text)
                self._failed = key
                self._owed |= isinstance(problem, ResourceError) and len(self._writing) > 1
            else:
                self._saved, self.problem = key, ""
                announce(self._context, self._job, entry, self._files.held, self._stage)
                self._context.notify("info", "checkpoint-saved", f"step {step} saved to {entry.path}")
            finally:
                copied.set()
                del self._writing[key]
                self._announce()
                if self._owed and not self._writing:
                    self._owed = False
                    self._save_soon()

        # A ring that breaks now abandons the boundary, not the checkpoint. Later changes of the state run on the
        # compute thread, too, and so after the copy.
        self._writing[key] = self._tasks.create_task(write(), name=f"save {step}")
        self._announce()
        await (self.wait_written() if wait else copied.wait())

    async def wait_for_save(self, step: int, lineage: str) -> None:
        """Wait until the state's checkpoint is durable, or is known not to come. A member without progress before that
        step is not waited for."""
        key = step, lineage
        while key != self._saved:
            applied, progress = self._where()
            if key not in self._writing and (applied > step or key == self._failed):
                return
            news = self._news
            try:
                async with asyncio.timeout(STANDSTILL_S):
                    await news.wait()
            except TimeoutError:
                if key not in self._writing and self._where() == (applied, progress):
                    return

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait_written(self) -> None:
        if self._writing:
            await asyncio.wait(self._writing.values())


def announce(context: Context, job: str, entry: CheckpointEntry, held: list[int], stage: Stage = WHOLE) -> None:
    val_loss = entry.meta.get("val_loss")
    known = float(val_loss) if isinstance(val_loss, float | int) else None
    facts = (job, entry.step, str(entry.path), entry.digest, entry.size_bytes, known)
    context.send(CheckpointSaved(*facts, held, stage=stage.index, stages=stage.count))
