"""What every strategy of a split model has in common: each member holds a part of the model, and all commit one step.

Per view two rings. That of all members carries votes and small gathers; that of the members which hold the same part,
the *stage ring*, sums their gradients. A step is reduced in two moves:

1. the stage ring's all-reduce, in buckets behind the computing, as in ``SyncStrategy``;
2. an all-gather round the ring of all: the digest of each member's sums, and its part of the loss.

The contribution's digest is a hash over the digests of one crew's stages in order. So all members of a ring in which
nothing was spoiled vote for the same digest, the lineage is that of the whole model, and a member whose sums differ
from those of its stage makes its crew's digest differ, which the vote blames. Nothing of the step transaction changes.

What a part cannot compute alone is ``_fill``'s affair (forward and backward passes), ``_summed``'s (parameters that two
stages share) and ``validate``'s: a strategy that moves activations between the stages of a crew overrides those. As it
is, this one is for engines whose parts need nothing of each other.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from ring.session import PATIENCE_S, RingSession
from ring.token import joined_digest
from roles.engine import Applied
from roles.strategies import Contribution, Meet
from roles.strategies.sync import SyncStrategy

# Digest of this member's sums, sum of the losses that it knows of, seconds that a micro-batch takes it to compute.
_TOLD = struct.Struct("!16sdd")


class StagedStrategy(SyncStrategy):
    """Synchronous data parallelism over the crews of a view: of each part of the model separately, with one commit."""

    _ring: RingSession | None = None  # of this member's stage
    _patience_s = PATIENCE_S
    _loss = math.nan
    _unit_s = 0.0  # that a micro-batch of the step took this member; 0 where that is not known

    async def begin(self, session: RingSession, meet: Meet) -> None:
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
        crew = members[first : first + view.stages]
        # By stage, so that all crews come to the same sum.
        self._loss = sum(loss for _, loss, _ in crew) / sum(member.count for member in view.members)
        digests = b"".join(digest for digest, _, _ in crew)
        self._heard([unit_s for _, _, unit_s in crew])
        return Contribution(joined_digest(digests), alike.part, alike.own, digests)

    def _heard(self, units_s: list[float]) -> None:
        """What a micro-batch took each stage of this crew, as they say."""

    async def commit(self, step: int, square_sum: float) -> Applied:
        """The loss is the whole model's."""
        return replace(await super().commit(step, square_sum), loss=self._loss)

    @property
    def _stage_ring(self) -> RingSession:
        if self._ring is None:
            raise RuntimeError("no view has begun")
        return self._ring
