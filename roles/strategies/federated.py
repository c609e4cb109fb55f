"""Federated training (FedAvg, arXiv 1602.05629): rounds of local training, each worker on its own text.

A step is a round. Its micro-batches are shared in proportion to the workers' texts, so in a round all members pass over
their texts equally often, and each counts by the size of its text. A member takes an AdamW step for each of its
micro-batches (``compute.local``), and the members average what they came to. With a sample, only some members, drawn
anew for each round, share it. What a member sends is the exchange of ``roles.strategies.sync``.

For exact averages of LoRA adapters each member that takes part has a slot (``compute.fedex``). So there are at most as
many as slots; if there are more members, those that take part are drawn.

No text and no token leaves a member, only the number of its training sequences and a digest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.schema import Profile
from ring.session import RingSession
from ring.token import ShareRule
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies.sync import SyncStrategy


def share_rule(profile: Profile) -> ShareRule:
    """How the members of a job share its steps."""
    if profile.job.strategy != "federated":
        return ShareRule()
    sample = slots(profile) or profile.federated.sample
    return ShareRule(True, profile.federated.most_share, sample, profile.job.seed)


def slots(profile: Profile) -> int:
    """Slots for exact averages; 0: averages are not of this kind."""
    if profile.job.strategy != "federated" or not profile.lora.rank or profile.federated.average != "exact":
        return 0
    return profile.federated.sample or profile.job.workers


class FederatedStrategy(SyncStrategy):
    """``rule``: the job's, which gives each member that takes part in a round a slot."""

    def __init__(
        self,
        engine: Engine,
        compute: ComputeThread,
        progress: Callable[[], None],
        bucket_bytes: int = 0,
        *,
        rule: ShareRule,
    ) -> None:
        super().__init__(engine, compute, progress, bucket_bytes)
        self._rule = rule

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        counts = self._rule.of_step([member.count for member in session.view.members], step).counts
        engine: Any = self._engine
        await self._compute.run(engine.use_slot, sum(count > 0 for count in counts[: session.rank]))
        await super().compute(step, first, count, session, patience_s=patience_s)
