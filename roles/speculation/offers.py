"""With which probability each draft was drawn that a verifier may judge. Pure.

The core of a session (``verifying``) keeps drafts by the rules of ``lines``. What is kept here follows the same rules:
drafts of an epoch that is over are dropped, and those of a new one take the place of all before.
"""

from __future__ import annotations

from collections.abc import Collection

from roles.speculation.events import Drafted


class Offers:
    """Of all drafters of one session."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}  # by drafter
        self._weights: dict[int, dict[int, tuple[int, float]]] = {}  # drafter → position → token and weight

    def came(self, drafted: Drafted) -> None:
        """Drafts with as many weights, before the core is told of them."""
        assert len(drafted.tokens) == len(drafted.weights)
        epoch = self._epochs.get(drafted.drafter, 0)
        if drafted.epoch < epoch:
            return
        if drafted.epoch > epoch or drafted.drafter not in self._weights:
            self._epochs[drafted.drafter], self._weights[drafted.drafter] = drafted.epoch, {}
        pairs = zip(drafted.tokens, drafted.weights, strict=True)
        self._weights[drafted.drafter].update(enumerate(pairs, drafted.position))

    def of(self, drafter: int, position: int, tokens: Collection[int]) -> tuple[float, ...]:
        """Weights of the drafts from ``position`` on, which the core takes into a pass. Raises ``KeyError``: they never
        came."""
        weights = self._weights.get(drafter, {})
        found = [weights[at] for at in range(position, position + len(tokens))]
        if [token for token, _ in found] != list(tokens):
            raise KeyError(f"drafter {drafter} drafted other tokens from position {position} on")
        return tuple(weight for _, weight in found)

    def has(self, drafter: int) -> bool:
        """Whether it drafted, and is not lost."""
        return drafter in self._weights

    def grew(self, size: int) -> None:
        """The text has so many tokens: what was drafted before its end is of no use."""
        for drafter, weights in self._weights.items():
            self._weights[drafter] = {at: each for at, each in weights.items() if at >= size}

    def lost(self, drafter: int) -> None:
        """It drafts no more."""
        self._epochs.pop(drafter, None)
        self._weights.pop(drafter, None)
