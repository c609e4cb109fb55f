"""What a fetch believes of a donor, and how much of it it remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2ptrain.core.world import LoopClock
from roles.worker.fetch import Base, Fetch, Self, _Donor
from roles.worker.testing import FIRST, JOB, engine_of
from wire.messages import HealRequest, StepLogged


async def test_of_a_donor_that_tells_of_steps_without_end_little_is_remembered() -> None:
    engine = engine_of(1000)
    reduce_bytes = engine.reduce_buffer.nbytes
    world: Any = SimpleNamespace(clock=LoopClock())
    fetch = Fetch(
        world,
        Self("me", "me", "", engine.state(), reduce_bytes),
        request=HealRequest(JOB, -1, "", 1.0, 0, FIRST),
        generation=1,
        donors=[],
        on_torn=lambda: None,
        on_progress=lambda done, total: None,
    )
    connection: Any = SimpleNamespace(post=lambda *_, **__: None, send=lambda *_, **__: None)
    donor = fetch._donors["d"] = _Donor("d", "d", connection, offer=Base(0, FIRST))
    fetch._next, fetch._lineage = 1, FIRST  # it holds what the steps lead on from
    for step in range(1, 50_000):
        fetch._heard_untrusted(donor, StepLogged(step, bytes(16), 1.0, reduce_bytes))
    assert fetch._log_steps < len(fetch._news) < 3 * fetch._log_steps
