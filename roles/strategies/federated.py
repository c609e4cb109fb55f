"""Federated training (FedAvg, arXiv 1602.05629): rounds of local training, each worker on its own text.

A step is a round. Its micro-batches are shared in proportion to the workers' texts, so in a round all members pass over
their texts equally often, and each counts by the size of its text. A member takes an AdamW step for each of its
micro-batches (``compute.local``), and the members average what they came to. With a sample, only some members, drawn
anew for each round, share it.

For exact averages of LoRA adapters each member that takes part has a slot (``compute.local``). So at most as many take
part as there are slots; if there are more members, they are drawn.

No text and no token leaves a member, only the number of its training sequences and a digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.schema import Profile
from ring.token import ShareRule

if TYPE_CHECKING:
    from ring.session import RingSession
    from roles.compute_thread import ComputeThread
    from roles.engine import SlotInput
    from roles.strategies.strategy import BeforeStep

LEAST_MASKED = 3
"""Members of a view with masks: of two each could subtract its own contribution from the sum."""


def slots(profile: Profile) -> int:
    """Slots for exact averages; 0: averages are not of this kind."""
    if profile.job.strategy != "federated" or not profile.lora.rank or profile.federated.average != "exact":
        return 0
    return min(profile.federated.sample or profile.job.workers, profile.job.workers)


def by_text(profile: Profile) -> ShareRule:
    sample = slots(profile) or profile.federated.sample
    return ShareRule(True, profile.federated.most_share, sample, profile.job.seed)


def slot_chooser(profile: Profile, slots: SlotInput, compute: ComputeThread) -> BeforeStep:
    """Give each member with a share of a step the slot after that of the one before it."""
    rule = by_text(profile)

    async def choose_slot(step: int, count: int, session: RingSession) -> None:
        shares = rule.of_step([member.count for member in session.view.members], step)
        before = sum(map(bool, shares.counts[: session.rank]))
        await compute.run(slots.use_slot, before if count else 0)  # without a share it adds zeros

    return choose_slot
