"""When this member's checkpoints are written, and what is told of them.

The step waits while the state is copied. The copy is written beside the steps that follow, one at a time, and announced
when it is durable. Where the ring stands still after the step, for good or to let somebody go, it waits for the write.
"""

from __future__ import annotations

import asyncio

from p2ptrain.core.checkpoints import CheckpointEntry, Meta
from p2ptrain.core.errors import P2PTrainError, ResourceError
from p2ptrain.core.training import FilePlan
from roles.engine import Engine
from roles.worker.keeper import Keeper
from roles.worker.snapshot import Snapshot, Snapshots
from roles.worker.surroundings import Surroundings
from wire.messages import CheckpointSaved


class Checkpointing:
    """Saves one job's checkpoints.

    Args:
        tasks: a write outlives the ring in which it began: it belongs to this group.
    """

    def __init__(
        self, around: Surroundings, *, job: str, keeper: Keeper, snapshots: Snapshots, tasks: asyncio.TaskGroup
    ) -> None:
        self._around, self._job, self._keeper = around, job, keeper
        self._snapshots, self._tasks = snapshots, tasks
        self._saved = (-1, "")  # step and lineage of what is on disk
        self._writing: asyncio.Task[None] | None = None

    async def resumed(self, entry: CheckpointEntry | None) -> None:
        """The state was loaded, from ``entry`` or as it was at first: tell the seed what there is."""
        self._saved = (-1, "")
        if entry is not None:
            self._saved = (entry.step, str(entry.meta.get("lineage")))
            self._around.notify("info", "checkpoint-loaded", f"resuming from {entry.path} (step {entry.step})")
        for known in await self._keeper.entries():
            self._announce(known)  # the seed may have lost its record, or this worker may be new to it

    async def save(self, engine: Engine, meta: Meta, *, step: int, wait: bool) -> None:
        """Save the state, which is that of ``step`` and stands still until this returns. A failure is told, not raised.

        Args:
            meta: with the state's ``lineage`` and the step's ``square_sum``.
            wait: return when it is durable, or failed, and not before.
        """
        if self._writing is not None and wait:
            await asyncio.shield(self._writing)
        lineage, square_sum = str(meta["lineage"]), float(meta["square_sum"] or 0.0)
        if self._saved == (step, lineage):
            return
        if self._writing is not None:
            text = f"no checkpoint at step {step}: an earlier one is still being written. Raise checkpoint.every"
            self._around.notify("warning", "checkpoint-skipped", text)
            return
        try:
            plan = await self._around.compute.run(engine.checkpoint_files)
            snapshot = await self._copy(engine, step, lineage, square_sum, wait)
        except P2PTrainError as problem:
            self._failed(step, problem)
            return
        # A ring that breaks meanwhile abandons the boundary, not the checkpoint.
        self._writing = self._tasks.create_task(self._write(snapshot, plan, meta), name=f"save {step}")
        if wait:
            await asyncio.shield(self._writing)

    async def _copy(self, engine: Engine, step: int, lineage: str, square_sum: float, wait: bool) -> Snapshot:
        try:
            return await self._snapshots.take(engine, step=step, lineage=lineage, square_sum=square_sum)
        except ResourceError:
            if not wait:
                raise
        # There is no memory for a copy, but the state will stand still: it can be written from where it is.
        state = await self._around.compute.run(engine.state)
        return Snapshot.of_live(state, step=step, lineage=lineage, square_sum=square_sum)

    async def _write(self, snapshot: Snapshot, plan: list[FilePlan], meta: Meta) -> None:
        try:
            entry = await self._keeper.save(snapshot, plan, meta)
        except P2PTrainError as problem:
            # A full disk must not end the run: the state is in memory, here and at every member.
            self._failed(snapshot.step, problem)
        else:
            self._saved = (snapshot.step, snapshot.lineage)
            self._announce(entry)
            self._around.notify("info", "checkpoint-saved", f"step {entry.step} saved to {entry.path}")
        finally:
            snapshot.release()
            self._writing = None

    def _failed(self, step: int, problem: P2PTrainError) -> None:
        text = f"no checkpoint at step {step}: {problem.message}. {problem.remedy}".rstrip(". ")
        self._around.notify("error", "checkpoint-failed", text)

    def _announce(self, entry: CheckpointEntry) -> None:
        val_loss = entry.meta.get("val_loss")
        known = float(val_loss) if isinstance(val_loss, float | int) else None
        path = str(entry.path)
        self._around.say(CheckpointSaved(self._job, entry.step, path, entry.digest, entry.size_bytes, known))
