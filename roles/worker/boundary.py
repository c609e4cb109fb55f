"""What happens between two steps: the members compare their states, validate, and some of them save a checkpoint.

For a split model a checkpoint is useful only if all stages have one of the same step. So the members also exchange what
they have saved and whether a write is still in progress. If one is, all skip the new checkpoint. So all stages stay at
the same step, and the newest step that all have saved is kept until all have a newer one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

from configs.schema import Profile
from p2ptrain.core.checkpoints import Meta
from p2ptrain.core.errors import NetworkError, PeerError
from ring import member_events as ev
from ring.session import RingSession
from ring.token import Shares, balance_counts, odd_ones_out
from roles.engine import Engine
from roles.snapshots import state_digest
from roles.worker.checkpoint_assembler import CheckpointAssembler
from roles.worker.checkpoint_store import Checkpointing
from roles.worker.context import Context
from roles.worker.early_stop import EarlyStop

_VALIDATION = struct.Struct("!dQ")  # sum of losses in nats, number of targets
_SAVING = struct.Struct("!q?16s")  # newest durable checkpoint, whether no write is in progress, the state's digest

Losses = Callable[[int, int], Awaitable[tuple[float, int]]]
"""As ``Strategy.validate``."""
MOST_ABOVE, MOST_LOSS = 10.0, 1e6
"""A mean loss that is so many times that of most members, or beyond this, is no loss of the same model."""


def mean_loss_untrusted(messages: Sequence[bytes], most: int) -> tuple[float, list[int]]:
    """The mean loss per target from what each member told of its share, and the ranks whose figures cannot be. They are
    left out. ``most``: targets of one member."""
    known = [_VALIDATION.unpack(item) if len(item) == _VALIDATION.size else (math.nan, 0) for item in messages]
    means = [total / max(targets, 1) for total, targets in known]
    usual = median([mean for mean, (_, targets) in zip(means, known, strict=True) if targets and mean >= 0] or [0.0])
    limit = min(MOST_ABOVE * usual, MOST_LOSS) if len(messages) > 2 else MOST_LOSS
    odd = [r for r, (mean, (_, targets)) in enumerate(zip(means, known, strict=True))
           if not (0 <= mean <= limit and targets <= most)]  # fmt: skip
    plausible = [mean for rank, mean in enumerate(known) if rank not in odd]
    total = math.fsum(total for total, _ in plausible)
    return total / max(sum(targets for _, targets in plausible), 1) if plausible else math.nan, odd


class BoundaryWork:
    def __init__(self, context: Context, *, profile: Profile, checkpoints: Checkpointing, early: EarlyStop) -> None:
        self._context, self._early = context, early
        self.profile, self._checkpoints = profile, checkpoints
        self._spared, self._idle, self._all_idle = -1, True, True  # as exchanged at the last comparison

    async def compare(self, engine: Engine, session: RingSession, *, patience_s: float) -> tuple[bytes, ...]:
        """Gather the digests of all members' states, in rank order. Raises as ``RingSession.all_gather``."""
        digest = await self._context.compute.run(lambda: state_digest(engine.state.blobs()))
        if session.view.stages > 1:
            digests = await self._compare_stages(digest, session, patience_s)
        else:
            digests = await session.all_gather(digest, patience_s=patience_s)
        odd = odd_ones_out(digests, session.view.stages)
        if odd and session.rank == 0:
            names = ", ".join(session.view.members[number].name for number in sorted(odd))
            self._context.notify("warning", "drift", f"{names} had other weights than the others: replaced by theirs")
        return tuple(digests)

    async def _compare_stages(self, digest: bytes, session: RingSession, patience_s: float) -> list[bytes]:
        saved, view = self._checkpoints, session.view
        self._idle = saved.idle or not self._saves(view.replica_of(session.rank))
        messages = await session.all_gather(_SAVING.pack(saved.newest, self._idle, digest), patience_s=patience_s)
        newest, idle, digests = zip(*map(_SAVING.unpack, messages), strict=True)
        self._spared = min(max(newest[stage :: view.stages]) for stage in range(view.stages))
        self._all_idle = all(idle)
        return list(digests)

    def _saves(self, replica: int) -> bool:
        return replica < self.profile.checkpoint.copies

    async def validate(
        self, boundary: ev.Boundary, engine: Engine, losses: Losses, session: RingSession, *, patience_s: float
    ) -> float | None:
        """Return the mean loss over the held-out micro-batches in nats per token; None if it is not due, no text is
        held out, or it would tell about texts that ``[privacy]`` protects. The members share the micro-batches; in a
        split model the replicas do.
        Of private data each member computes all of its own. All take the same loss into their ``EarlyStop``."""
        every, profile = self.profile.validation.every, self.profile
        if not (boundary.last or (every and boundary.applied % every == 0)):
            return None
        if profile.privacy.epsilon or not profile.data.validation_fraction:
            return None
        view = session.view
        first, count = 0, engine.data.validation_batches
        if not self.profile.data.private:
            first, count = Shares(balance_counts(count, [0] * view.replicas)).of(view.replica_of(session.rank))
        total, targets = await losses(first, count)
        try:
            gathered = await session.all_gather(_VALIDATION.pack(total, targets), patience_s=patience_s)
        except (NetworkError, PeerError) as problem:  # faster members may have left; the step itself is safe
            text = f"validation after step {boundary.applied} skipped: {problem}"
            self._context.notify("warning", "validation", text)
            return None
        loss, odd = mean_loss_untrusted(gathered, self.profile.validation.batches * engine.data.tokens_per_micro_batch)
        if odd and session.rank == min(set(range(session.size)) - set(odd), default=0):
            names = ", ".join(view.members[rank].name for rank in odd)
            text = f"the validation after step {boundary.applied} is without {names}, whose losses cannot be"
            self._context.notify("warning", "validation", text)
        self._early.add_validation(boundary.applied, loss)
        return loss

    async def keep(self, boundary: ev.Boundary, engine: Engine, replica: int, meta: Meta, *, stopping: bool) -> bool:
        """Save the checkpoint of a confirmed step if it is due and this member's to save. Returns whether it was begun.

        Args:
            replica: the replica that this member is, or is part of.
            meta: with the state's lineage and squared norm.
            stopping: the ring stops after this boundary.
        """
        if boundary.save and self._saves(replica):
            wait, step = boundary.last or stopping, boundary.applied
            if wait or self._all_idle:
                await self._checkpoints.save(engine, meta, step=step, wait=wait, spared=self._spared)
                return True
            if not self._idle:
                self._checkpoints.go_without(step)
        return False

    async def gathered(self, assembler: CheckpointAssembler, session: RingSession, *, patience_s: float) -> None:
        going, round_s = True, 2.0  # interval at which members exchange whether they still collect
        while going:
            mine = b"\0" if await assembler.wait_settled(round_s) else b"\1"
            try:
                going = any(byte != b"\0" for byte in await session.all_gather(mine, patience_s=patience_s))
            except (NetworkError, PeerError) as problem:  # only this member's files matter now; the step is safe
                self._context.notify("warning", "not-gathered", f"the ring broke while files were collected: {problem}")
                await assembler.wait_settled()
                return
