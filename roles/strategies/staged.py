"""Base of all strategies for split models."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from ring.session import PATIENCE_S, RingSession
from ring.token import joined_digest
from roles.engine import Applied
from roles.strategies.interface import ConnectPeers, Contribution
from roles.strategies.sync import SyncStrategy

# Digest of this member's sums, its part of the mean loss, seconds that it takes for a micro-batch.
_TOLD = struct.Struct("!16sdd")


class StagedStrategy(SyncStrategy):
    """Each member holds a part of the model, a stage or a shard, and all commit one step.

    A view has two kinds of rings. The ring of all members carries votes and small gathers. The *stage ring*, of the
    members that hold the same part, sums their gradients. A step is reduced in two moves:

    1. the stage ring's all-reduce, in buckets behind the computing, as in ``SyncStrategy``;
    2. an all-gather round the ring of all: the digest of each member's sums, and its part of the loss.

    The contribution's digest is a hash over the digests of one replica's stages in order. So all members vote for the
    same digest if no sum was corrupted, the lineage covers the whole model, and the vote blames the replica of a member
    whose sums differ from those of its stage.

    This class serves engines whose parts need nothing from each other. ``PipelineStrategy`` adds activations,
    ``ShardedStrategy`` the collectives inside a replica.
    """

    _ring: RingSession | None = None  # the stage ring
    _patience_s = PATIENCE_S
    _loss = math.nan
    _unit_s = 0.0  # this member's time for a micro-batch of the step; 0: not known

    async def begin(self, session: RingSession, meet: ConnectPeers) -> None:
        self._ring = None
        self._ring = await meet.ring(session.view.stage_ring(session.rank))

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        self._patience_s = patience_s
        await super().compute(step, first, count, self._stage_ring, patience_s=patience_s)

    async def reduce(self, session: RingSession) -> Contribution:
        alike = await super().reduce(self._stage_ring)
        told = _TOLD.pack(alike.digest, float(self._engine.reduce_buffer[-1]), self._unit_s)
        members = [_TOLD.unpack(item) for item in await session.all_gather(told, patience_s=self._patience_s)]
        view = session.view
        first = view.replica_of(session.rank) * view.stages
        replica = members[first : first + view.stages]
        # Summed in stage order, so that all replicas get the same bits.
        self._loss = sum(loss for _, loss, _ in replica)
        digests = b"".join(digest for digest, _, _ in replica)
        self._heard([unit_s for _, _, unit_s in replica])
        return Contribution(joined_digest(digests), alike.part, alike.own, digests)

    def _heard(self, units_s: list[float]) -> None:
        """Handle the times that this replica's stages report for a micro-batch."""

    async def commit(self, step: int, square_sum: float) -> Applied:
        return replace(await super().commit(step, square_sum), loss=self._loss)

    @property
    def _stage_ring(self) -> RingSession:
        if self._ring is None:
            raise RuntimeError("no view has begun")
        return self._ring
