"""What a verifier needs of the model that it owns, be it whole or split over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.core.serving import Sampling


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of a pass: its picks, and how long it took from when its turn came."""

    tokens: tuple[int, ...]
    took_s: float


class TargetSession(Protocol):
    """One history of tokens, with its cache."""

    @property
    def lost(self) -> bool:
        """It failed, whether it was used or not, and is only to be closed."""
        ...

    async def run(self, *, keep: int, ids: Sequence[int], picks: int, draw: int, prefill: bool) -> Passed:
        """Cut the history to ``keep`` positions, take ``ids`` more (2048 at most), pick for the last ``picks`` of them.

        One at a time. Cancelling it leaves the session unusable but for ``close``.

        Raises:
            P2PTrainError: it could not be computed; the session is to be closed.
        """
        ...

    async def close(self) -> None:
        """Forget it. Never raises."""
        ...


class Target(Protocol):
    """A model to write with.

    Attributes:
        vocab_size: token ids are below it.
        context: positions that it knows; None: nobody says.
        label: its name, for people.
    """

    vocab_size: int
    context: int | None
    label: str

    async def open(self, *, positions: int, sampling: Sampling) -> TargetSession:
        """Begin a session of at most so many positions. Raises ``P2PTrainError``: there is no room for it."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is known of where and how it computes, for programs."""
        ...

    async def close(self) -> None:
        """Let it go. Never raises."""
        ...
