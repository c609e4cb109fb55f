"""A model in shards (FSDP2): the members of a replica hold rows of every tensor, and gather a layer to compute it.

Each view has the ring of all members, the ring of this shard between replicas (``roles.strategies.parts``), and the
ring of the replica's members. The engine runs the collectives of FSDP2 over the last one: its thread waits, while the
event loop carries them. They are blocking calls in the same order at all members of the replica, so these make their
passes in lockstep: member s of p computes micro-batches s, s + p, ... of the replica's share. If the share is no
multiple of p, some members repeat a micro-batch in the last pass, and it does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2ptrain.core.training import OnFinal
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Engine, ShardedEngine
from roles.process_group import RingOperations
from roles.strategies.interface import ConnectPeers, Progress
from roles.strategies.sync import MicroBatches


class LockstepShards(MicroBatches):
    def __init__(self, engine: Engine, shards: ShardedEngine, compute: ComputeThread, progress: Progress) -> None:
        super().__init__(engine, compute, progress)
        self._shards_engine = shards
        self._members: RingOperations | None = None  # of this replica, in this view
        self._shard, self._shards = 0, 1

    async def begin_view(self, session: RingSession, connect: ConnectPeers) -> None:
        view = session.view
        self._shard, self._shards = view.stage_of(session.rank), view.stages
        ring = await connect.ring(view.replica_ring(session.rank))
        self._members = members = RingOperations(asyncio.get_running_loop(), ring)
        # On the engine's thread: a pass of the last view may still run there, until its collective fails.
        await self._compute.run(self._shards_engine.connect, members)

    async def compute(self, step: int, first: int, count: int, on_final: OnFinal | None, *, patience_s: float) -> None:
        if self._members is not None:
            self._members.patience_s = patience_s
        await super().compute(step, first, count, on_final, patience_s=patience_s)

    def _passes(self, first: int, count: int) -> Sequence[tuple[int, bool]]:
        indices = range(self._shard, count + self._shard, self._shards)
        return [(first + min(index, count - 1), index < count) for index in indices]

    def _micro_batch(self, step: int, index: int, on_final: OnFinal | None, counts: bool) -> None:
        self._shards_engine.micro_batch(step, index, on_final, counts=counts)
