"""When this member's checkpoints are written, and what is told of them.

The step waits while the state is copied. The copy is written beside the steps that follow, and announced when it is
durable. One write waits at most while another is under way: more copies there are not, and a disk that is so slow gets
fewer checkpoints. Where the ring stands still after the step, for good or to let somebody go, it waits for the write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.core.checkpoints import CheckpointEntry, Meta
from p2ptrain.core.errors import P2PTrainError
from roles.engine import WHOLE, Engine, Stage
from roles.worker.keeper import Keeper
from roles.worker.snapshot import Snapshots
from roles.worker.surroundings import Surroundings
from wire.job_messages import CheckpointSaved

STANDSTILL_S = 30.0
"""A member that gets nowhere for so long will not save what others wait for."""


class Checkpointing:
    """Saves one job's checkpoints.

    Args:
        tasks: a write outlives the ring in which it began: it belongs to this group.
        stage: whose state it is.
    """

    def __init__(
        self,
        around: Surroundings,
        *,
        job: str,
        keeper: Keeper,
        snapshots: Snapshots,
        tasks: asyncio.TaskGroup,
        stage: Stage = WHOLE,
    ) -> None:
        self._around, self._job, self._keeper, self._stage = around, job, keeper, stage
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
        for known in await self._keeper.entries():
            announce(self._around, self._job, known, self._stage)  # the seed may have lost its record, or not know us

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that is durable here; -1: there is none."""
        return self._saved[0]

    @property
    def idle(self) -> bool:
        """Whether nothing is being written: what was saved last is durable, or has failed."""
        return not self._writing

    def go_without(self, step: int) -> None:
        """Tell that there is no checkpoint of ``step``, because an older one is still being written here."""
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
        """Nothing is being written any more."""
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
                entry = await self._keeper.save(snapshot, plan, meta, urgent=urgent, spared=spared)
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


def announce(around: Surroundings, job: str, entry: CheckpointEntry, stage: Stage = WHOLE) -> None:
    """Tell the seed of a checkpoint that is durable here. ``stage``: whose files it has."""
    val_loss = entry.meta.get("val_loss")
    known = float(val_loss) if isinstance(val_loss, float | int) else None
    path, index, count = str(entry.path), stage.index, stage.count
    around.say(CheckpointSaved(job, entry.step, path, entry.digest, entry.size_bytes, known, index, count))
