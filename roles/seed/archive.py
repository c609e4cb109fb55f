"""What lies on the workers' disks, for who wants to go back to it: whether a step is here as a whole, and sound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from p2ptrain.core.errors import P2PTrainError, Refused
from ring.token import is_lineage
from roles.seed.catalogue import Catalogue
from roles.seed.jobs import Desk
from roles.seed.params import did_you_mean
from roles.seed.peers import Link, clipped
from wire.records import CheckpointInfo

WORKER_S = 10.0
VERIFY_S = 60.0  # it reads the whole checkpoint


class Archive:
    """The checkpoints of ``catalogue``, with their holders, where these are among ``links``."""

    def __init__(self, catalogue: Catalogue, desks: Mapping[str, Desk], links: Mapping[str, Link]) -> None:
        self._catalogue, self._desks, self._links = catalogue, desks, links

    def named(self, checkpoint_id: str) -> CheckpointInfo:
        """The one with this id. Raises ``Refused``."""
        found = self._catalogue.known.get(checkpoint_id)
        if found is None:
            hint = did_you_mean(checkpoint_id, self._catalogue.known)
            what = f"there is no checkpoint {clipped(checkpoint_id, 120)!r}{hint}"
            raise Refused("unknown-checkpoint", what, remedy="see p2ptrain checkpoints list")
        return found

    def holder(self, checkpoint: CheckpointInfo) -> Link:
        """Who has it. Raises ``Refused`` where that one is not connected."""
        holder = self._links.get(checkpoint.peer_id)
        if holder is None:
            text = f"{checkpoint.peer_name}, which holds that checkpoint, is not connected"
            raise Refused("holder-away", text, remedy="start that worker, or choose a checkpoint of another")
        return holder

    async def verified(self, desk: Desk, checkpoint: CheckpointInfo) -> str:
        """The lineage of a checkpoint, of which its holder has just read every byte; of a split model, all who are here
        and hold one of that step, of each stage at least one. They spare it from now on, until they have gone back.

        Raises:
            Refused: it is not here as a whole, or damaged. DeadlineExceeded, ConnectionLost: its holder does not say.
        """
        self._check_whole(desk, checkpoint)
        lineage = await self._lineage(checkpoint)
        if desk.stages == 1:
            return lineage
        others = [item for item in self._alike_here(checkpoint) if item.id != checkpoint.id]
        found = await asyncio.gather(*map(self._lineage_or_problem, others))
        good = [item for item, told in zip(others, found, strict=True) if told == lineage]
        if not _is_whole([checkpoint, *good], desk.stages):
            for told in found:
                if isinstance(told, P2PTrainError):
                    raise told
            text = f"what the stages have saved as step {checkpoint.step} is not of one state"
            raise Refused("damaged", text, remedy="choose another step")
        return lineage

    async def delete(self, checkpoint: CheckpointInfo) -> bool:
        """Remove it at its holder and from the record; whether it still was at its holder.

        Raises:
            Refused: its holder is away, or does not remove it. DeadlineExceeded, ConnectionLost: it does not say.
            StorageError: the record cannot be written.
        """
        was_there = True
        try:
            await self.holder(checkpoint).ask("checkpoint.delete", self._named_to(checkpoint), timeout_s=WORKER_S)
        except Refused as problem:
            if problem.code != "not-here":
                raise
            was_there = False  # somebody removed it there
        await self._catalogue.drop([checkpoint.id])
        return was_there

    def _check_whole(self, desk: Desk, checkpoint: CheckpointInfo) -> None:
        """Raise ``Refused`` where a split model cannot go back to it, for nobody here has the other stages'."""
        if desk.stages > 1 and not _is_whole(found := self._alike_here(checkpoint), desk.stages):
            stages = sorted({item.stage for item in found if item.stage is not None})
            where = f"of {desk.stages} stages only {stages} have a checkpoint at a worker here"
            text = f"step {checkpoint.step} is not here as a whole: {where}"
            raise Refused("holder-away", text, remedy="start the workers that hold the others, or choose another step")

    def _named_to(self, checkpoint: CheckpointInfo) -> dict[str, Any]:
        """As its holder is asked for it."""
        desk, whole = self._desks.get(checkpoint.job), {"job": checkpoint.job, "step": checkpoint.step}
        if desk is None or checkpoint.stage is None:
            return whole
        return whole | {"stage": checkpoint.stage, "stages": desk.stages}

    async def _lineage_or_problem(self, checkpoint: CheckpointInfo) -> str | P2PTrainError:
        try:
            return await self._lineage(checkpoint)
        except P2PTrainError as problem:
            return problem

    def _alike_here(self, checkpoint: CheckpointInfo) -> list[CheckpointInfo]:
        """Those of the same step whose holders are connected."""
        return [
            item
            for item in self._catalogue.known.values()
            if (item.job, item.step) == (checkpoint.job, checkpoint.step) and item.peer_id in self._links
        ]

    async def _lineage(self, checkpoint: CheckpointInfo) -> str:
        """Of one, of which its holder has just read every byte."""
        asked = self._named_to(checkpoint)
        result = await self.holder(checkpoint).ask("checkpoint.verify", asked, timeout_s=VERIFY_S)
        lineage = result.get("lineage")
        if result.get("step") != checkpoint.step or not isinstance(lineage, str) or not is_lineage(lineage):
            raise Refused("damaged", f"{checkpoint.peer_name} does not say what state that checkpoint holds")
        return lineage


def _is_whole(checkpoints: Iterable[CheckpointInfo], stages: int) -> bool:
    """Whether these have all parts of a split model: one has them all, or there is one for each stage."""
    found = {item.stage for item in checkpoints}
    return None in found or len(found) == stages
