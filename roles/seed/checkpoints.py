"""The catalogue of checkpoints on the workers' disks, and the check whether a job can go back to one.

Workers report what they have saved. The seed has records only, so the holders read and compare every byte of a
checkpoint before a job goes back to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.texts import did_you_mean
from p2ptrain.core.world import Clock
from ring.coordination import CheckpointsSaved
from ring.token import is_lineage
from ring.view import View
from roles.seed.events import Announcements
from roles.seed.peers import ConnectedPeer, PeerTable, clip
from roles.seed.store import CheckpointChange, Records, SeedStore
from wire.job_messages import CheckpointSaved
from wire.records import CheckpointInfo


class CheckpointCatalogue:
    """All known checkpoints. ``known``: checkpoint id → record. ``on_change`` is called with the id of a job whose
    checkpoints changed."""

    def __init__(
        self,
        store: SeedStore,
        clock: Clock,
        peers: PeerTable,
        announcements: Announcements,
        on_change: Callable[[str], None],
    ) -> None:
        self.known: dict[str, CheckpointInfo] = {}
        self._store, self._clock, self._peers, self._announcements = store, clock, peers, announcements
        self._on_change = on_change

    async def load(self) -> None:
        """Read all checkpoints from the store. Raises ``StorageError``."""
        self.known = {item.id: item for item in await self._store.call(Records.checkpoints)}

    async def record(self, peer: ConnectedPeer, message: CheckpointSaved, stages: int) -> None:
        """Record a checkpoint that is durable at ``peer``, and drop the records of older ones that it has no more. A
        message may be repeated over a new connection. ``stages``: of the job."""
        if message.stages not in (1, stages):
            return  # a part of an earlier layout
        stage = message.stage if message.stages > 1 else None
        info = CheckpointInfo(
            id=checkpoint_id(message.job, message.step, peer.id, stage),
            job=message.job,
            step=message.step,
            path=clip(message.path, 1024),
            peer_id=peer.id,
            peer_name=peer.name,
            digest=message.digest[:128],
            size_bytes=message.size_bytes,
            created_at=self._clock.wall(),
            val_loss=message.val_loss if message.val_loss is not None and math.isfinite(message.val_loss) else None,
            stage=stage,
        )
        mine = [item for item in self.of_job(info.job) if (item.peer_id, item.stage) == (info.peer_id, info.stage)]
        dropped = [item.id for item in mine if item.step < info.step and item.step not in message.held]
        if (known := self.known.get(info.id)) is not None:
            info = replace(info, created_at=known.created_at)
        if info == known and not dropped:
            return
        self.known[info.id] = info
        self._forget(dropped)
        self._announcements.touch("checkpoints", info.id)
        self._on_change(info.job)  # before it is stored, so that no view begins at a step before this one
        self._store.add(CheckpointChange(info, dropped))
        await self._store.make_room()

    async def drop_after(self, view: View) -> None:
        """Drop the records of later steps that the members of a restored view saved."""
        members = {member.peer_id for member in view.members}
        later = [item for item in self.of_job(view.job) if item.step > view.step]
        await self.drop([item.id for item in later if item.peer_id in members])

    async def drop_unloaded(self, job: str, peer_id: str, stage: int | None, applied: int) -> None:
        """Drop the records of a stage's checkpoints after step ``applied``: the worker could not load them.

        For a model that is not split they stay known until a view begins, because the job waits for workers that are
        still loading.
        """
        later = [item for item in self.of_job(job) if item.peer_id == peer_id and item.step > applied]
        await self.drop([item.id for item in later if item.stage is not None and item.stage == stage])

    async def drop(self, ids: list[str]) -> None:
        if ids:
            self._forget(ids)
            await self._store.call(Records.remove_checkpoints, ids)
            for job in {item_id.partition("@")[0] for item_id in ids}:
                self._on_change(job)

    def forget_job(self, job: str) -> None:
        """Drop a job's checkpoints from memory. The store deletes their records with the job."""
        self._forget([item.id for item in self.of_job(job)])

    def _forget(self, ids: list[str]) -> None:
        for item_id in ids:
            self.known.pop(item_id, None)
        self._announcements.touch("checkpoints", *ids)

    def of_job(self, job: str) -> list[CheckpointInfo]:
        return [item for item in self.known.values() if item.job == job]

    def find(self, checkpoint_id: str) -> CheckpointInfo:
        """The checkpoint with this id. Raises ``Refused``."""
        found = self.known.get(checkpoint_id)
        if found is None:
            hint = did_you_mean(checkpoint_id, self.known)
            text = f"there is no checkpoint {clip(checkpoint_id, 120)!r}"
            raise Refused("unknown-checkpoint", text, remedy=f"{hint}see p2ptrain checkpoints list")
        return found

    def find_newest(self, job: str) -> CheckpointInfo:
        """The newest checkpoint of a job at a connected worker. Raises ``Refused``."""
        found = [item for item in self.of_job(job) if item.peer_id in self._peers.connected]
        if not found:
            remedy = "start the worker that has one: `p2ptrain checkpoints list` names it"
            raise Refused("holder-away", "no connected worker has a checkpoint of that job", remedy=remedy)
        return max(found, key=lambda item: (item.step, item.stage is None))

    def find_whole(self, checkpoint: CheckpointInfo) -> CheckpointInfo:
        """A checkpoint of the whole model of the same step, at a connected worker. Raises ``Refused``."""
        found = [item for item in self._at_connected_workers(checkpoint) if item.stage is None]
        if not found:
            text = f"no connected worker has the whole model of step {checkpoint.step}, which other parts are cut from"
            raise Refused("not-whole", text, remedy="start its holder, or choose a step that has one marked 'whole'")
        return checkpoint if checkpoint in found else found[0]

    def find_holder(self, checkpoint: CheckpointInfo) -> ConnectedPeer:
        """The worker that holds it. Raises ``Refused`` if that worker is not connected."""
        holder = self._peers.connected.get(checkpoint.peer_id)
        if holder is None:
            text = f"{checkpoint.peer_name}, which holds that checkpoint, is not connected"
            raise Refused("holder-away", text, remedy="start that worker, or choose a checkpoint of another worker")
        return holder

    async def verify(self, checkpoint: CheckpointInfo, stages: int) -> str:
        """Have its holder read and compare every byte of a checkpoint. Returns its lineage.

        For a split model all connected holders of that step verify theirs, and at least one per stage must succeed.
        From then on the holders keep it until they have gone back to it.

        Raises:
            Refused: it is damaged, or no connected worker holds one of its stages.
            DeadlineExceeded, ConnectionLost: the holder does not answer.
        """
        here = self._at_connected_workers(checkpoint)
        if stages > 1 and not _is_whole(here, stages):
            held = sorted({item.stage for item in here if item.stage is not None})
            where = f"of {stages} parts, connected workers hold only {held}"
            text = f"the checkpoint of step {checkpoint.step} is incomplete: {where}"
            raise Refused("holder-away", text, remedy="start the holders of the other parts, or choose another step")
        lineage = await self._ask_lineage(checkpoint, stages)
        if stages == 1:
            return lineage
        others = [item for item in here if item.id != checkpoint.id]
        outcomes = await asyncio.gather(*(self._ask_lineage(item, stages) for item in others), return_exceptions=True)
        good = [item for item, outcome in zip(others, outcomes, strict=True) if outcome == lineage]
        if not _is_whole([checkpoint, *good], stages):
            for outcome in outcomes:
                if isinstance(outcome, P2PTrainError):
                    raise outcome
            text = f"the parts' checkpoints of step {checkpoint.step} hold different states"
            raise Refused("damaged", text, remedy="choose another step")
        return lineage

    async def delete(self, checkpoint: CheckpointInfo, stages: int) -> None:
        """Delete it at its holder, and its record. Raises ``Refused``, ``DeadlineExceeded`` or ``ConnectionLost`` if
        the holder does not do it, ``StorageError``."""
        holder = self.find_holder(checkpoint)
        try:
            await holder.ask("checkpoint.delete", _request_for(checkpoint, stages), timeout_s=10.0)
        except Refused as problem:
            if problem.code != "not-here":
                raise
        await self.drop([checkpoint.id])

    def _at_connected_workers(self, checkpoint: CheckpointInfo) -> list[CheckpointInfo]:
        same_step = [item for item in self.of_job(checkpoint.job) if item.step == checkpoint.step]
        return [item for item in same_step if item.peer_id in self._peers.connected]

    async def _ask_lineage(self, checkpoint: CheckpointInfo, stages: int) -> str:
        request = _request_for(checkpoint, stages)
        # 60 s, because the holder reads the whole checkpoint.
        result = await self.find_holder(checkpoint).ask("checkpoint.verify", request, timeout_s=60.0)
        lineage = result.get("lineage")
        if result.get("step") != checkpoint.step or not isinstance(lineage, str) or not is_lineage(lineage):
            raise Refused("damaged", f"{checkpoint.peer_name} sent no valid lineage of that checkpoint")
        return lineage


def checkpoint_id(job: str, step: int, peer_id: str, stage: int | None) -> str:
    return f"{job}@{step}@{peer_id}{'' if stage is None else f'@part{stage}'}"


def _is_whole(checkpoints: Iterable[CheckpointInfo], stages: int) -> bool:
    stages_held = {item.stage for item in checkpoints}
    return None in stages_held or len(stages_held) == stages


def _request_for(checkpoint: CheckpointInfo, stages: int) -> dict[str, Any]:
    """How a request to its holder names a checkpoint. ``stages``: of the job; 0 if that is not known."""
    whole = {"job": checkpoint.job, "step": checkpoint.step}
    return whole if checkpoint.stage is None or not stages else whole | {"stage": checkpoint.stage, "stages": stages}


def checkpoints_event(checkpoints: Iterable[CheckpointInfo]) -> CheckpointsSaved:
    """The event that reports a job's checkpoints to its core."""
    wholes: dict[str, frozenset[int]] = {}
    parts: dict[tuple[str, int], frozenset[int]] = {}
    for item in checkpoints:
        if item.stage is None:
            wholes[item.peer_id] = wholes.get(item.peer_id, frozenset()) | {item.step}
        else:
            part = item.peer_id, item.stage
            parts[part] = parts.get(part, frozenset()) | {item.step}
    return CheckpointsSaved(wholes, parts)
