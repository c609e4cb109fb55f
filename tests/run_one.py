"""Results of passes, and a pass of one session."""

from __future__ import annotations

from typing import Any

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import Pass, Ran


def result_of(ran: Ran | P2PTrainError) -> Ran:
    """Raises the pass's error."""
    if isinstance(ran, P2PTrainError):
        raise ran
    return ran


def run_one(engine: Any, session: str, work: Pass) -> Ran:
    """Raises the pass's error."""
    return result_of(engine.run({session: work})[session])
