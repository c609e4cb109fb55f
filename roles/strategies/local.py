"""DiLoCo (arXiv 2311.08105): a step is one outer step, after inner AdamW steps of each member's own copy.

The engine takes an inner step for each micro-batch of the member's share (``compute.local``), and contributes how far
its copy came. So the work and the exchanges are those of other strategies; only the shares may differ.
"""

from __future__ import annotations

from configs.schema import Profile
from ring.token import ShareRule


def shares(profile: Profile) -> ShareRule:
    """A private sum of changes is divided by the number of members that have a share: so a slow one has one, too."""
    return ShareRule(equal=bool(profile.robust.rule) or bool(profile.privacy.epsilon))
