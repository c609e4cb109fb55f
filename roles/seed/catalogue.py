"""Where durable checkpoints lie: what workers tell of them, on the seed's disk before anything is built upon it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from p2ptrain.core.world import Clock
from ring.view import View
from roles.background import started_in
from roles.seed.jobs import Desk, newest_of_all_stages, saved_of
from roles.seed.peers import Link, checkpoint_of
from roles.seed.store import Records, Store
from roles.seed.updates import Board
from wire.job_messages import CheckpointSaved
from wire.records import CheckpointInfo

MAX_NOTING = 64
"""Checkpoints that are being noted at a time; whoever tells of more waits."""


class Catalogue:
    """All checkpoints that are known of.

    Args:
        desks: the jobs, by their ids; told of how far each could go back, or on.

    Attributes:
        known: by their ids.
    """

    def __init__(self, clock: Clock, store: Store, board: Board, desks: Mapping[str, Desk]) -> None:
        self.known: dict[str, CheckpointInfo] = {}
        self._clock, self._store, self._board, self._desks = clock, store, board, desks
        self._noting = asyncio.Semaphore(MAX_NOTING)
        self._tasks: asyncio.TaskGroup | None = None

    async def load(self) -> None:
        """Know what the store does. Raises ``StorageError``."""
        self.known = {item.id: item for item in await self._store.call(Records.checkpoints)}

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Note in ``tasks`` from now on."""
        self._tasks = tasks

    async def saved(self, link: Link, message: CheckpointSaved) -> None:
        """A checkpoint is durable at ``link``, which keeps as many as the job says, the newest, and the newest that all
        stages of a split model have. Noting it holds up nothing else that is said over the link: beats behind it would
        be answered too late where the disk is slow."""
        desk = self._desks[message.job]
        split = desk.stages > 1
        info = checkpoint_of(link, message, self._clock.wall(), split=split)
        known = self.known.get(info.id)
        keep = max(desk.record.keep, 2)
        alike = info.job, info.peer_id, info.stage is None
        mine = [item for item in self.known.values() if (item.job, item.peer_id, item.stage is None) == alike]
        newer = sum(item.step > info.step for item in mine)
        if newer >= keep or (known is not None and known == replace(info, created_at=known.created_at)):
            return  # told again over a new connection: noted already, or deleted since
        mine = sorted([item for item in mine if item.id != info.id] + [info], key=lambda item: -item.step)
        await self._noting.acquire()
        self.known[info.id] = info
        spared = newest_of_all_stages(self.of(info.job), desk.stages) if split else 0
        dropped = [item.id for item in mine[keep:] if item.step != spared]
        for item_id in dropped:
            self.known.pop(item_id, None)
        self._board.touch("checkpoints", info.id, *dropped)
        self._tell_newest(info.job)  # first: no view may begin before what is noted
        assert self._tasks is not None
        if started_in(self._tasks, self._note(info, dropped), "note a checkpoint") is None:
            self._noting.release()  # the seed stops: the worker tells the next one

    async def went_back(self, view: View) -> None:
        """What the members of a view saved of later steps is set aside."""
        members = {member.peer_id for member in view.members}
        later = [item for item in self.of(view.job) if item.step > view.step]
        await self.drop([item.id for item in later if item.peer_id in members])

    async def loaded(self, link: Link, desk: Desk, applied: int) -> None:
        """A stage holds the newest state that it could load, or more: what it has of later steps is gone, or damaged.

        Of a model that is not split it stays known until a view begins: the job waits by it for who still builds.
        """
        later = [item for item in self.of(desk.id) if item.peer_id == link.id and item.step > applied]
        await self.drop([item.id for item in later if item.stage is not None])

    async def drop(self, ids: list[str]) -> None:
        """They are no longer there."""
        if ids:
            for item_id in ids:
                self.known.pop(item_id, None)
            await self._store.call(Records.remove_checkpoints, ids)
            self._board.touch("checkpoints", *ids)
            for job in {item_id.partition("@")[0] for item_id in ids}:
                self._tell_newest(job)

    def forget(self, job: str) -> None:
        """Nothing of a job is known any more; its record in the store goes with the job's."""
        gone = [item.id for item in self.of(job)]
        for item_id in gone:
            del self.known[item_id]
        self._board.touch("checkpoints", *gone)

    def of(self, job: str) -> list[CheckpointInfo]:
        return [item for item in self.known.values() if item.job == job]

    async def _note(self, info: CheckpointInfo, dropped: list[str]) -> None:
        try:
            await self._store.call(Records.add_checkpoint, info, dropped)
        finally:
            self._noting.release()

    def _tell_newest(self, job: str) -> None:
        """A job knows how far it could go back, or on, from the disks of its workers."""
        if job in self._desks:
            self._desks[job].post(saved_of(self.of(job), split=self._desks[job].stages > 1))
