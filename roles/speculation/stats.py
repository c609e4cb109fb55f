"""What a verifier's sessions did, in sums: they may be added up over sessions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

POSITIONS = 16
"""Places in a pass that are counted one by one."""


def _places() -> list[int]:
    return [0] * POSITIONS


@dataclass(slots=True)
class Stats:
    """Sums of one session, or of many.

    Attributes:
        passes: of the target behind the prompt. self_steps: those of them without drafts.
        tokens: of new text. verified: drafts that were in passes. accepted: those of them that were right.
        drafted: drafts that came, of all drafters. wasted: those of them that were found wrong, or stood on such.
        late: drafts that were right and that no pass had, since the text was there first.
        tried_at, accepted_at: by place in the pass: drafts there with all before them right, and those that were right.
        verify_s: in passes behind the prompt. draft_s, wait_s: in which no pass was under way: what drafters needed for
            the drafts that came in it, and the rest, which is the way. prefill_s: the prompt's passes.
    """

    passes: int = 0
    self_steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    drafted: int = 0
    wasted: int = 0
    late: int = 0
    tried_at: list[int] = field(default_factory=_places)
    accepted_at: list[int] = field(default_factory=_places)
    draft_s: float = 0.0
    verify_s: float = 0.0
    wait_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def alpha(self) -> float:
        """Acceptance: of drafts with all before them right, those that were right; 0 where none was tried."""
        tried = sum(self.tried_at)
        return sum(self.accepted_at) / tried if tried else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens that a pass gave, on average; 0 before the first."""
        return self.tokens / self.passes if self.passes else 0.0

    def add(self, other: Stats) -> None:
        """Add another's sums to these."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                setattr(self, item.name, [left + right for left, right in zip(mine, theirs, strict=True)])
            else:
                setattr(self, item.name, mine + theirs)
