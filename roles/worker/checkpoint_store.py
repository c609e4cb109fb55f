"""One job's checkpoints on this worker's disk.

A save: the step waits while the compute thread copies the state in memory (``Snapshots``). The disk's thread writes
the copy beside the steps that follow (``CheckpointFiles``), and the checkpoint is announced when it is durable
(``Checkpointing``). A disk that is too slow gets fewer checkpoints. If the ring stands still after the step, it waits.

Everything that touches the directory runs on one thread, one call after the other: so a run that goes back to an older
checkpoint never has a newer one appear behind it, and no step waits for the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import xxhash

from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore, Draft, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import P2PTrainError, ResourceError, StorageError, UserError
from p2ptrain.core.threads import Thread
from p2ptrain.core.training import FilePlan
from ring.token import first_lineage, is_lineage
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Blob, Engine, Stage
from roles.worker.context import Context
from wire.job_messages import CheckpointSaved

WRITE_SHARE = 1 / 8
"""Of one core: what writing a checkpoint takes of it while steps are computed."""
STANDSTILL_S = 30.0
"""A member that gets nowhere for so long will not save what others wait for."""

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------- copies of the state


class Snapshot:
    """A copy of the state at one step. Each holder calls ``release`` once.

    Attributes:
        blobs: as ``Engine.state``, read-only. Not to be touched after the release.
        square_sum: the step's squared gradient norm.
    """

    def __init__(self, step: int, lineage: str, square_sum: float, blobs: list[Blob]) -> None:
        self.step, self.lineage, self.square_sum, self.blobs = step, lineage, square_sum, blobs
        self.holders = 1

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        assert self.holders, "released once too often"
        self.holders -= 1


class Snapshots:
    """Makes one job's snapshots, two at most. Their memory is used again: touching new memory costs more than copying.

    Args:
        compute: the engine's thread; it alone sees a state that stands still.
    """

    def __init__(self, compute: ComputeThread) -> None:
        self._compute = compute
        self._made: list[Snapshot] = []
        self._copying = 0

    async def take(self, engine: Engine, *, step: int, lineage: str, square_sum: float) -> Snapshot:
        """Copy the state, which is that of ``step``; the caller keeps it from changing until this returns.

        A snapshot of the same state that is still held is given again.

        Raises:
            ResourceError: two older ones are still being read, or there is no memory for one.
        """
        held = [each for each in self._made if each.holders]
        for each in held:
            if (each.step, each.lineage) == (step, lineage):
                each.holders += 1
                return each
        if len(held) + self._copying >= 2:
            raise ResourceError("2 earlier copies of the state are still being read", remedy="raise checkpoint.every")
        free = [each.blobs for each in self._made if not each.holders]
        self._made, self._copying = held, self._copying + 1
        try:
            # A call that is cancelled may still copy: the next one runs after it, on the same thread.
            blobs = await self._compute.run(_copied, engine, free)
        finally:
            self._copying -= 1
        taken = Snapshot(step, lineage, square_sum, blobs)
        self._made.append(taken)
        return taken

    def close(self) -> None:
        """Let go of the memory: at once what nobody reads any more, the rest with its last reader."""
        self._made.clear()


def _copied(engine: Engine, free: list[list[Blob]]) -> list[Blob]:
    """The state in other memory, in that of ``free`` where it fits. numpy lets the event loop run meanwhile."""
    state = engine.state()
    sizes = [blob.view.nbytes for blob in state]
    memory = next((each for each in free if [blob.view.nbytes for blob in each] == sizes), None)
    free.clear()
    try:
        targets = [_writable(blob) for blob in memory] if memory else [np.empty(size, np.uint8) for size in sizes]
    except MemoryError:
        raise ResourceError(
            f"a copy of the state needs {sum(sizes) / 1e6:.1f} MB of memory", remedy="train a smaller model"
        ) from None
    for target, blob in zip(targets, state, strict=True):
        np.copyto(target, np.frombuffer(blob.view, np.uint8))
    return [Blob(blob.name, target.data.toreadonly()) for blob, target in zip(state, targets, strict=True)]


def _writable(blob: Blob) -> npt.NDArray[np.uint8]:
    return cast("npt.NDArray[np.uint8]", blob.view.obj)


# ------------------------------------------------------------------------------------------------------- on the disk


class CheckpointFiles:
    """Saves, loads, verifies and deletes one job's checkpoints.

    Args:
        keep: how many are kept.
        tell: (level, kind, text) for people.
    """

    def __init__(
        self, thread: Thread, disk: Disk, root: Path, keep: int, tell: Callable[[str, str, str], None]
    ) -> None:
        self._thread, self.disk, self._root, self._keep, self._tell = thread, disk, root, keep, tell
        self._opened: CheckpointStore | None = None
        self._wanted = -1  # the job may go back to it

    async def entries(self) -> list[CheckpointEntry]:
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
        return await self._on_disk(lambda store: store.draft(step, need_bytes))

    async def publish(self, draft: Draft, meta: Meta) -> CheckpointEntry:
        def publish(store: CheckpointStore) -> CheckpointEntry:
            store.spared = self._spared()
            return store.publish(draft, meta)

        return await self._on_disk(publish)

    def at_disk(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return self._thread.submit(call)

    async def load(
        self, engine: Engine, compute: ComputeThread, *, spec: str, restore_step: int, split: bool = False
    ) -> tuple[int, str, float, CheckpointEntry | None]:
        """Put the newest good state into ``engine``: a checkpoint's, or the initial one.

        Args:
            restore_step: the step to go back to, -1 for the newest. Newer checkpoints are set aside.
            split: the engine is a ``Engine``, and the directory its stage's.

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
        """Write the checkpoint of the snapshot's step, which the caller holds until this returned, then prune.

        Args:
            urgent: the ring waits for it; else it takes only idle time, and ``WRITE_SHARE`` of a core.
            spared: the checkpoint of this step is kept, however old it is, as is one that was verified.

        Raises:
            StorageError, ResourceError: there is no such checkpoint; the older ones are unharmed.
        """
        blobs = {blob.name: blob.view for blob in snapshot.blobs}

        def write(store: CheckpointStore) -> CheckpointEntry:
            store.spared = self._spared(spared)
            return store.write(snapshot.step, plan, blobs, meta, between=_nothing if urgent else _pauses())

        return await self._on_disk(write, idle=not urgent)

    def _spared(self, *steps: int) -> frozenset[int]:
        return frozenset({*steps, self._wanted} - {-1})

    async def verify(self, step: int) -> CheckpointEntry:
        """The checkpoint of ``step``, every byte of it compared. Raises ``UserError``, ``StorageError``.

        The job is to go back to it: until it does, saves keep it.
        """
        before, self._wanted = self._wanted, step
        try:
            entry = await self.find(step)
            if entry is None:
                raise UserError(f"there is no checkpoint of step {step} in {self._root}")
            lineage_of(entry)
        except P2PTrainError:
            self._wanted = before
            raise
        return entry

    async def delete(self, step: int) -> bool:
        return await self._on_disk(lambda store: store.delete(step))

    async def _on_disk(self, call: Callable[[CheckpointStore], T], *, idle: bool = False) -> T:
        def run() -> T:
            if self._opened is None:
                self._opened = CheckpointStore(self.disk, self._root, self._keep)
            return call(self._opened)

        return await self._thread.submit(run, idle=idle)


def _nothing() -> None:
    """The writer takes what it can get."""


def _pauses() -> Callable[[], None]:
    """What a writer calls after every piece, so that it takes no more than ``WRITE_SHARE`` of a core's time."""
    used_s = time.thread_time()

    def pause() -> None:
        nonlocal used_s
        time.sleep((time.thread_time() - used_s) * (1 / WRITE_SHARE - 1))
        used_s = time.thread_time()

    return pause


def lineage_of(entry: CheckpointEntry) -> str:
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
    return engine.initial_digest() if split else state_digest(engine.state())


# ------------------------------------------------------------------------------------------------- when, and who hears


class Checkpointing:
    """Saves one job's checkpoints and tells of them.

    Args:
        tasks: a write outlives the ring in which it began: it belongs to this group.
        stage: whose state it is.
    """

    def __init__(
        self,
        around: Context,
        *,
        job: str,
        files: CheckpointFiles,
        snapshots: Snapshots,
        tasks: asyncio.TaskGroup,
        stage: Stage = WHOLE,
    ) -> None:
        self._around, self._job, self._files, self._stage = around, job, files, stage
        self._snapshots, self._tasks = snapshots, tasks
        self._saved = (-1, "")  # step and lineage of what is on disk
        self._failed = (-1, "")  # of what was to be saved last, where that failed
        self._writing: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    async def resumed(self, entry: CheckpointEntry | None) -> None:
        """The state was loaded, from ``entry`` or as it was at first: tell the seed what there is."""
        self._saved = (-1, "")
        if entry is not None:
            self._saved = (entry.step, str(entry.meta.get("lineage")))
            self._around.notify("info", "checkpoint-loaded", f"resuming from {entry.path} (step {entry.step})")
        for known in await self._files.entries():
            announce(self._around, self._job, known, self._stage)  # the seed may have lost its record, or not know us

    @property
    def newest(self) -> int:
        return self._saved[0]

    @property
    def idle(self) -> bool:
        return not self._writing

    def go_without(self, step: int) -> None:
        text = f"no checkpoint at step {step}: an earlier one is still being written. raise checkpoint.every"
        self._around.notify("error", "checkpoint-failed", text)

    async def save(self, engine: Engine, meta: Meta, *, step: int, wait: bool, spared: int = -1) -> None:
        """Save the state, which is that of ``step`` and stands still until this returns. A failure is told, not raised.

        Args:
            meta: with the state's ``lineage`` and the step's ``square_sum``.
            wait: return when it is durable, or failed, and not before.
            spared: a step whose checkpoint is kept, however old it is.
        """
        key = step, str(meta["lineage"])
        if wait:
            await self.settled()
        if self._saved == key or key in self._writing:
            return
        # A ring that breaks meanwhile abandons the boundary, not the checkpoint. Whatever changes the state then is
        # called on the compute thread, too, and so after the copying.
        copied = asyncio.Event()
        saving = self._save(engine, meta, key, copied, urgent=wait, spared=spared)
        self._writing[key] = self._tasks.create_task(saving, name=f"save {step}")
        self._told()
        await (self.settled() if wait else copied.wait())

    async def outcome(self, step: int, lineage: str, where: Callable[[], tuple[int, int]]) -> None:
        """Wait until the state's checkpoint is durable, or there will be none.

        Args:
            where: the steps applied here, and what grows while this member gets anywhere: one that stands still before
                that step is not waited for.
        """
        key = step, lineage
        while key != self._saved:
            applied, progress = where()
            if key not in self._writing and (applied > step or key == self._failed):
                return
            news = self._news
            try:
                async with asyncio.timeout(STANDSTILL_S):
                    await news.wait()
            except TimeoutError:
                if key not in self._writing and where() == (applied, progress):
                    return

    def _told(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def settled(self) -> None:
        if self._writing:
            await asyncio.wait(self._writing.values())

    async def _save(
        self, engine: Engine, meta: Meta, key: tuple[int, str], copied: asyncio.Event, *, urgent: bool, spared: int
    ) -> None:
        (step, lineage), square_sum = key, float(meta["square_sum"] or 0.0)
        try:
            with await self._snapshots.take(engine, step=step, lineage=lineage, square_sum=square_sum) as snapshot:
                plan = await self._around.compute.run(engine.checkpoint_files, step)
                copied.set()
                entry = await self._files.save(snapshot, plan, meta, urgent=urgent, spared=spared)
        except P2PTrainError as problem:
            # A full disk must not end the run: the state is in memory, here and at every member.
            text = f"no checkpoint at step {step}: {problem.message}. {problem.remedy}".rstrip(". ")
            self._around.notify("error", "checkpoint-failed", text)
            self._failed = key
        else:
            self._saved = key
            announce(self._around, self._job, entry, self._stage)
            self._around.notify("info", "checkpoint-saved", f"step {step} saved to {entry.path}")
        finally:
            copied.set()
            del self._writing[key]
            self._told()


def announce(around: Context, job: str, entry: CheckpointEntry, stage: Stage = WHOLE) -> None:
    val_loss = entry.meta.get("val_loss")
    known = float(val_loss) if isinstance(val_loss, float | int) else None
    path, index, count = str(entry.path), stage.index, stage.count
    around.say(CheckpointSaved(job, entry.step, path, entry.digest, entry.size_bytes, known, index, count))
