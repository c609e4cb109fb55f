"""The rings of a split model: each member holds a part, a stage or a shard, and all commit one step.

The ring of all members carries votes and small gathers. The ring of the members that hold the same part sums their
contributions. If the first and the last stage both hold the embedding's matrix, these two of a replica also form a ring
of two, the *pair*, which sums its two gradients. A sum of two numbers has the same bits at both. A step is reduced in
two moves:

1. the part's ring reduces it, in buckets behind the computing, then the pair;
2. an all-gather round the ring of all: the digest of each member's sums, and its part of the loss.

The contribution's digest is a hash over the digests of one replica's parts in order. So all members vote for the same
digest if no sum was corrupted, the lineage covers the whole model, and the vote blames the replica of a member whose
sums differ from those of its part.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ring.links import Topology
from ring.session import RingSession
from ring.token import joined_digest
from roles.engine import Engine
from roles.strategies.interface import ConnectPeers, Contribution

# Digest of this member's sums, its part of the mean loss, seconds that it takes for a micro-batch.
_SUMMARY = struct.Struct("!16sdd")
TiedGradient = Callable[[], npt.NDArray[np.float32] | None]


class PartRings:
    """``tied_gradient``: as ``PipelineEngine.tied_gradient``. ``loss``: of the newest step, the mean of the replica."""

    def __init__(self, engine: Engine, tied_gradient: TiedGradient = lambda: None) -> None:
        self._engine, self._tied_gradient = engine, tied_gradient
        self.sums_tied = tied_gradient() is not None
        self._session: RingSession | None = None  # of all members
        self._pair: RingSession | None = None
        self.loss = math.nan

    async def begin_view(self, session: RingSession, connect: ConnectPeers) -> RingSession:
        """Form the rings of a view, and return that of this member's part. Raises as ``ConnectPeers``."""
        self._session, self._pair, view = session, None, session.view
        ring = await connect.ring(view.stage_ring(session.rank))
        if self.sums_tied:
            replica = view.replica(session.rank)
            ends = replace(replica[0], first=0, count=0), replace(replica[-1], first=0, count=0)
            self._pair = await connect.ring(replace(view, members=ends, stages=1), Topology.PAIR)
        return ring

    async def sum_tied(self, *, patience_s: float) -> None:
        """Sum the gradient of the weight that the first and the last stage share. Raises as ``RingSession.submit``."""
        gradient = self._tied_gradient()
        if gradient is not None and self._pair is not None:
            await self._pair.submit(gradient, patience_s=patience_s)

    async def join(self, own: Contribution, unit_s: float, *, patience_s: float) -> tuple[Contribution, list[float]]:
        """Make the whole model's contribution of this part's. Also returns ``unit_s`` of all members of the replica, in
        the order of the parts. Raises as ``RingSession.all_gather``."""
        assert self._session is not None, "no view has begun"
        view, rank = self._session.view, self._session.rank
        summary = _SUMMARY.pack(own.digest, float(self._engine.reduce_buffer[-1]), unit_s)
        gathered = await self._session.all_gather(summary, patience_s=patience_s)
        first = view.replica_of(rank) * view.stages
        digests, losses, units_s = zip(*map(_SUMMARY.unpack, gathered[first : first + view.stages]), strict=True)
        self.loss = sum(losses)  # in the order of the parts, so that all replicas get the same bits
        return Contribution(joined_digest(b"".join(digests)), own.part, own.own, b"".join(digests)), list(units_s)
