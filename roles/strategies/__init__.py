"""The ways to train. Each is composed of a work, an exchange and a share rule.

Begin with ``strategy.py``, which runs their steps, and ``interface.py``. ``compositions.py`` is the table of works and
exchanges. The share rules are here, because the seed reads them without numpy. The exception is ``server``: its members
apply no steps together, so it has classes of its own in ``server.py``, and a runner of its own (``roles.worker``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.schema import Profile
from ring.token import ShareRule
from roles.strategies import federated

if TYPE_CHECKING:
    from roles.strategies.strategy import Factory


def strategy_of(profile: Profile) -> Factory:
    from roles.strategies.compositions import factory_of

    return factory_of(profile)


def share_rule_of(profile: Profile) -> ShareRule:
    """Return the rule by which the members share the micro-batches of a step: by speed, equally, or by text."""
    match profile.job.strategy:
        case "server":
            return ShareRule(equal=True)
        case "federated":
            return federated.by_text(profile)
        case "local":
            # A private sum of changes is divided by the number of members that have a share: so a slow one has one.
            return ShareRule(equal=bool(profile.robust.rule) or bool(profile.privacy.epsilon))
    return ShareRule(equal=bool(profile.robust.rule))


def least_members(profile: Profile) -> int:
    """Members without which no step begins. The server of strategy 'server' contributes nothing."""
    if profile.job.strategy == "server":
        return 1 + profile.server.buffer
    return federated.LEAST_MASKED if profile.federated.secure else profile.robust.least
