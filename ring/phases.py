"""Where a member stands in the step transaction, and what may follow what."""

from __future__ import annotations

from enum import StrEnum

from ring.token import Flag


class Phase(StrEnum):
    """Where a member stands."""

    EMPTY = "building"  # no state yet
    IDLE = "waiting"  # has a state, no view
    REDOING = "redoing"
    FORMING = "forming"
    HEALING = "healing"
    COMPUTING = "computing"
    REDUCING = "reducing"
    VOTING = "voting"
    APPLYING = "applying"
    CONFIRMING = "confirming"
    BOUNDARY = "boundary"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"


# What may follow what. A break leads to IDLE from every phase of a running view; a failure to FAILED from everywhere.
NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.EMPTY: frozenset({Phase.IDLE}),
    Phase.IDLE: frozenset({Phase.REDOING, Phase.FORMING, Phase.EMPTY}),
    Phase.REDOING: frozenset({Phase.FORMING, Phase.IDLE}),
    Phase.FORMING: frozenset({Phase.HEALING, Phase.COMPUTING, Phase.CONFIRMING, Phase.IDLE}),
    Phase.HEALING: frozenset({Phase.COMPUTING, Phase.CONFIRMING, Phase.IDLE}),
    Phase.COMPUTING: frozenset({Phase.REDUCING, Phase.IDLE}),
    Phase.REDUCING: frozenset({Phase.VOTING, Phase.IDLE}),
    Phase.VOTING: frozenset({Phase.APPLYING, Phase.IDLE}),
    Phase.APPLYING: frozenset({Phase.CONFIRMING, Phase.BOUNDARY, Phase.IDLE}),
    Phase.CONFIRMING: frozenset({Phase.BOUNDARY, Phase.IDLE}),
    Phase.BOUNDARY: frozenset({Phase.COMPUTING, Phase.HELD, Phase.DONE, Phase.IDLE}),
    Phase.HELD: frozenset({Phase.REDOING, Phase.FORMING, Phase.IDLE}),
    Phase.DONE: frozenset({Phase.REDOING, Phase.FORMING, Phase.IDLE}),
    Phase.FAILED: frozenset({Phase.IDLE}),
}

RUNNING = frozenset(
    {
        Phase.REDOING,
        Phase.FORMING,
        Phase.HEALING,
        Phase.COMPUTING,
        Phase.REDUCING,
        Phase.VOTING,
        Phase.APPLYING,
        Phase.CONFIRMING,
        Phase.BOUNDARY,
    }
)
UNINTERRUPTIBLE = frozenset({Phase.REDOING, Phase.APPLYING})
LASTING = Flag.SAVE | Flag.SNAPSHOT
"""Wishes that outlive a break: others are granted by it."""


class InvalidTransition(RuntimeError):
    """A defect of this program: carries the recent history."""
