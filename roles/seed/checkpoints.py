"""The catalogue of checkpoints on the workers' disks, and the check whether a job can go back to one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from p2ptrain.core.checkpoints import best_step
from p2ptrain.core.errors import P2PTrainError, Refused
from ring.token import is_lineage
from ring.view import View
from roles.background import started_in
from roles.seed.jobs import JobController, newest_of_all_stages, saved_of
from roles.seed.peers import Link, checkpoint_of, clipped, did_you_mean
from roles.seed.store import Records
from wire.job_messages import CheckpointSaved
from wire.records import CheckpointInfo

if TYPE_CHECKING:
    from roles.seed.server import Seed


class Catalogue:
    """All known checkpoints. A job's controller is notified when the checkpoints of the job change.

    ``known``: checkpoint id → record.
    """

    def __init__(self, seed: Seed) -> None:
        self.known: dict[str, CheckpointInfo] = {}
        self._seed = seed
        self._noting = asyncio.Semaphore(64)  # bounds the writes in progress; senders of more reports wait

    async def load(self) -> None:
        """Read all checkpoints from the store. Raises ``StorageError``."""
        self.known = {item.id: item for item in await self._seed.store.call(Records.checkpoints)}

    async def saved(self, link: Link, message: CheckpointSaved) -> None:
        """Record a checkpoint that is durable at ``link``, and drop the records of those that the worker deleted.

        A worker keeps the newest ones, as many as the job says, the newest one that all stages of a split model have,
        and, if the job says so, the one with the least validation loss. The record is written by a task, so that a slow
        disk does not delay heartbeats over the link.
        """
        controller = self._seed.controllers[message.job]
        split = controller.stages > 1
        info = checkpoint_of(link, message, self._seed.world.clock.wall())
        if message.stages not in (1, controller.stages):
            return  # a part of an earlier layout
        known = self.known.get(info.id)
        keep = max(controller.record.keep, 2)
        alike = info.job, info.peer_id, info.stage
        mine = [item for item in self.known.values() if (item.job, item.peer_id, item.stage) == alike]
        newer = sum(item.step > info.step for item in mine)
        mine = sorted([item for item in mine if item.id != info.id] + [info], key=lambda item: -item.step)
        best = best_step((item.step, item.val_loss) for item in mine) if controller.keeps_best else -1
        told_before = known is not None and known == replace(info, created_at=known.created_at)
        if told_before or (newer >= keep and info.step != best):
            return  # repeated over a new connection: it is recorded already, or was deleted since
        await self._noting.acquire()
        self.known[info.id] = info
        spared = {best, newest_of_all_stages(self.of(info.job), controller.stages) if split else 0}
        dropped = [item.id for item in mine[keep:] if item.step not in spared]
        for item_id in dropped:
            self.known.pop(item_id, None)
        self._seed.subscriptions.touch("checkpoints", info.id, *dropped)
        self._tell_newest(info.job)  # first, so that no view begins at a step before this one
        assert self._seed.tasks is not None
        if started_in(self._seed.tasks, self._note(info, dropped), "note a checkpoint") is None:
            self._noting.release()  # the seed stops; the worker reports again to the next one

    async def went_back(self, view: View) -> None:
        """Drop the records of later steps that the members of a restored view saved."""
        members = {member.peer_id for member in view.members}
        later = [item for item in self.of(view.job) if item.step > view.step]
        await self.drop([item.id for item in later if item.peer_id in members])

    async def loaded(self, link: Link, controller: JobController, applied: int) -> None:
        """Drop the records of a stage's checkpoints after step ``applied``: it could not load them.

        For a model that is not split they stay known until a view begins, because the job waits for workers that are
        still loading.
        """
        stage = controller.stage_of(link.id)
        later = [item for item in self.of(controller.id) if item.peer_id == link.id and item.step > applied]
        await self.drop([item.id for item in later if item.stage is not None and item.stage == stage])

    async def drop(self, ids: list[str]) -> None:
        if ids:
            for item_id in ids:
                self.known.pop(item_id, None)
            await self._seed.store.call(Records.remove_checkpoints, ids)
            self._seed.subscriptions.touch("checkpoints", *ids)
            for job in {item_id.partition("@")[0] for item_id in ids}:
                self._tell_newest(job)

    def forget(self, job: str) -> None:
        """Drop a job's checkpoints from memory. The store deletes their records with the job."""
        gone = [item.id for item in self.of(job)]
        for item_id in gone:
            del self.known[item_id]
        self._seed.subscriptions.touch("checkpoints", *gone)

    def of(self, job: str) -> list[CheckpointInfo]:
        return [item for item in self.known.values() if item.job == job]

    async def _note(self, info: CheckpointInfo, dropped: list[str]) -> None:
        try:
            await self._seed.store.call(Records.add_checkpoint, info, dropped)
        finally:
            self._noting.release()

    def _tell_newest(self, job: str) -> None:
        if job in self._seed.controllers:
            self._seed.controllers[job].post(saved_of(self.of(job)))

    # --------------------------------------------------------------------------------------------------- going back

    def named(self, checkpoint_id: str) -> CheckpointInfo:
        """The checkpoint with this id. Raises ``Refused``."""
        found = self.known.get(checkpoint_id)
        if found is None:
            hint = did_you_mean(checkpoint_id, self.known)
            what = f"there is no checkpoint {clipped(checkpoint_id, 120)!r}{hint}"
            raise Refused("unknown-checkpoint", what, remedy="see p2ptrain checkpoints list")
        return found

    def whole(self, checkpoint: CheckpointInfo) -> CheckpointInfo:
        """A checkpoint of the whole model of the same step, at a connected worker. Raises ``Refused``."""
        found = [item for item in self._alike_here(checkpoint) if item.stage is None]
        if not found:
            text = f"no connected worker has the whole model of step {checkpoint.step}, which other parts are cut from"
            raise Refused("not-whole", text, remedy="start its holder, or choose a step that has one marked 'whole'")
        return checkpoint if checkpoint in found else found[0]

    def holder(self, checkpoint: CheckpointInfo) -> Link:
        """The link of the worker that holds it. Raises ``Refused`` if that worker is not connected."""
        holder = self._seed.links.get(checkpoint.peer_id)
        if holder is None:
            text = f"{checkpoint.peer_name}, which holds that checkpoint, is not connected"
            raise Refused("holder-away", text, remedy="start that worker, or choose a checkpoint of another worker")
        return holder

    async def verified(self, controller: JobController, checkpoint: CheckpointInfo) -> str:
        """The lineage of a checkpoint, after its holder has read and compared every byte.

        For a split model all connected holders of that step verify theirs, and at least one per stage must succeed.
        From then on the holders keep it until they have gone back to it.

        Raises:
            Refused: it is damaged, or no connected worker holds one of its stages.
            DeadlineExceeded, ConnectionLost: the holder does not answer.
        """
        self._check_whole(controller, checkpoint)
        lineage = await self._lineage(checkpoint)
        if controller.stages == 1:
            return lineage
        others = [item for item in self._alike_here(checkpoint) if item.id != checkpoint.id]
        found = await asyncio.gather(*map(self._lineage_or_problem, others))
        good = [item for item, told in zip(others, found, strict=True) if told == lineage]
        if not _is_whole([checkpoint, *good], controller.stages):
            for told in found:
                if isinstance(told, P2PTrainError):
                    raise told
            text = f"the parts' checkpoints of step {checkpoint.step} hold different states"
            raise Refused("damaged", text, remedy="choose another step")
        return lineage

    async def delete(self, checkpoint: CheckpointInfo) -> bool:
        """Delete it at its holder, and its record. Returns whether the holder still had it.

        Raises ``Refused``, ``DeadlineExceeded`` or ``ConnectionLost`` if the holder does not do it, ``StorageError``.
        """
        was_there = True
        try:
            await self.holder(checkpoint).ask("checkpoint.delete", self._named_to(checkpoint), timeout_s=10.0)
        except Refused as problem:
            if problem.code != "not-here":
                raise
            was_there = False
        await self.drop([checkpoint.id])
        return was_there

    def _check_whole(self, controller: JobController, checkpoint: CheckpointInfo) -> None:
        if controller.stages > 1 and not _is_whole(found := self._alike_here(checkpoint), controller.stages):
            stages = sorted({item.stage for item in found if item.stage is not None})
            where = f"of {controller.stages} parts, connected workers hold only {stages}"
            text = f"the checkpoint of step {checkpoint.step} is incomplete: {where}"
            raise Refused("holder-away", text, remedy="start the holders of the other parts, or choose another step")

    def _named_to(self, checkpoint: CheckpointInfo) -> dict[str, Any]:
        controller, whole = self._seed.controllers.get(checkpoint.job), {"job": checkpoint.job, "step": checkpoint.step}
        if controller is None or checkpoint.stage is None:
            return whole
        return whole | {"stage": checkpoint.stage, "stages": controller.stages}

    async def _lineage_or_problem(self, checkpoint: CheckpointInfo) -> str | P2PTrainError:
        try:
            return await self._lineage(checkpoint)
        except P2PTrainError as problem:
            return problem

    def _alike_here(self, checkpoint: CheckpointInfo) -> list[CheckpointInfo]:
        alike = [item for item in self.of(checkpoint.job) if item.step == checkpoint.step]
        return [item for item in alike if item.peer_id in self._seed.links]

    async def _lineage(self, checkpoint: CheckpointInfo) -> str:
        asked = self._named_to(checkpoint)
        # 60 s, because the holder reads the whole checkpoint.
        result = await self.holder(checkpoint).ask("checkpoint.verify", asked, timeout_s=60.0)
        lineage = result.get("lineage")
        if result.get("step") != checkpoint.step or not isinstance(lineage, str) or not is_lineage(lineage):
            raise Refused("damaged", f"{checkpoint.peer_name} sent no valid lineage of that checkpoint")
        return lineage


def _is_whole(checkpoints: Iterable[CheckpointInfo], stages: int) -> bool:
    found = {item.stage for item in checkpoints}
    return None in found or len(found) == stages
