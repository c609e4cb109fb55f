"""Results of passes, a pass of one session, and sessions with memory for all."""

from __future__ import annotations

from typing import Any

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import BLOCK_POSITIONS, Pass, Ran, blocks_of


def result_of(ran: Ran | P2PTrainError) -> Ran:
    """Raises the pass's error."""
    if isinstance(ran, P2PTrainError):
        raise ran
    return ran


def run_one(engine: Any, session: str, work: Pass) -> Ran:
    """Raises the pass's error."""
    return result_of(engine.run({session: work})[session])


def open_session(part: Any, name: str, *, positions: int, **how: Any) -> int:
    """Open a session of a ``ServedPart``, with memory for the last position of each."""
    blocks = sum(blocks_of(each) for each in (*(part._tables[other].positions for other in part._tables), positions))
    part.reserve(blocks * BLOCK_POSITIONS)
    return int(part.open(name, positions=positions, **how))
