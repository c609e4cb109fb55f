"""A model in shards (FSDP2): the members of a replica hold rows of every tensor, and gather a layer to compute it.

Each view has the ring of all members, the ring of this shard between replicas (``StagedStrategy``), and the ring of the
replica's members. The engine runs the collectives of FSDP2 over the last one: its thread waits, while the event loop
carries them. They are blocking calls in the same order at all members of the replica, so these make their passes in
lockstep: member s of p computes micro-batches s, s + p, ... of the replica's share. If the share is no multiple of p,
some members repeat a micro-batch in the last pass, and it does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from p2ptrain.compute.gradients import OnFinal
from ring.session import RingSession
from roles.process_group import RingOperations
from roles.strategies.interface import ConnectPeers
from roles.strategies.staged import StagedStrategy


class ShardedStrategy(StagedStrategy):
    _members: RingOperations  # of this replica, in this view

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        assert self._engine.shards is not None
        self._part = self._engine.shards
        self._shard, self._shards = 0, 1

    async def begin(self, session: RingSession, meet: ConnectPeers) -> None:
        await super().begin(session, meet)
        view = session.view
        self._shard, self._shards = view.stage_of(session.rank), view.stages
        ring = await meet.ring(view.replica_ring(session.rank))
        self._members = members = RingOperations(asyncio.get_running_loop(), ring)
        # On the engine's thread: a pass of the last view may still run there, until its collective fails.
        await self._compute.run(self._part.connect, members)

    async def _fill(self, step: int, first: int, count: int, front_final: OnFinal | None) -> None:
        self._members.patience_s = self._patience_s
        passes = list(self._passes(first, count))
        for number, (index, counts) in enumerate(passes, start=1):
            on_final = front_final if number == len(passes) else None
            await self._compute.run(self._part.micro_batch, step, index, on_final, counts=counts)
            self._progress()

    def _passes(self, first: int, count: int) -> Iterator[tuple[int, bool]]:
        for start in range(0, count, self._shards):
            index = start + self._shard
            yield first + min(index, count - 1), index < count
