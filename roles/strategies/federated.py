"""Federated training (FedAvg, arXiv 1602.05629): rounds of local training, each worker on its own text.

A step is a round. Its micro-batches are shared in proportion to the workers' texts, so in a round all members pass over
their texts equally often, and each counts by the size of its text. A member takes an AdamW step for each of its
micro-batches (``compute.local``), and the members average what they came to. With a sample, only some members, drawn
anew for each round, share it. What a member sends is the exchange of ``roles.strategies.sync``.

For exact averages of LoRA adapters each member that takes part has a slot (``compute.fedex``). So at most as many take
part as there are slots; if there are more members, they are drawn.

No text and no token leaves a member, only the number of its training sequences and a digest.
"""

from __future__ import annotations

from configs.schema import Profile
from ring.token import ShareRule

LEAST_MASKED = 3
"""Members of a view with masks: of two each could subtract its own contribution from the sum."""


def share_rule(profile: Profile) -> ShareRule:
    """How the members of a job share its steps. A private sum of changes is divided by the number of members that have
    a share, so with ``local`` a slow one has a share, too."""
    strategy = profile.job.strategy
    if strategy != "federated":
        is_private = bool(profile.privacy.epsilon) and strategy == "local"
        return ShareRule(equal=bool(profile.robust.rule) or strategy == "server" or is_private)
    sample = slots(profile) or profile.federated.sample
    return ShareRule(True, profile.federated.most_share, sample, profile.job.seed)


def least_members(profile: Profile) -> int:
    """Members without which no step begins. The server of strategy 'server' contributes nothing."""
    if profile.job.strategy == "server":
        return 1 + profile.server.buffer
    return LEAST_MASKED if profile.federated.secure else profile.robust.least


def slots(profile: Profile) -> int:
    """Slots for exact averages; 0: averages are not of this kind."""
    if profile.job.strategy != "federated" or not profile.lora.rank or profile.federated.average != "exact":
        return 0
    return min(profile.federated.sample or profile.job.workers, profile.job.workers)
