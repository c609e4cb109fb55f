"""One pass of one session."""

from __future__ import annotations

from typing import Any

from p2ptrain.core.serving import Pass, Ran, result_of


def run_one(engine: Any, session: str, work: Pass) -> Ran:
    """Raises the pass's error."""
    return result_of(engine.run({session: work})[session])
