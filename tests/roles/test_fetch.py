"""What a fetch believes of a donor, and how much of it it remembers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import xxhash

from p2ptrain.core.world import LoopClock
from roles.worker.fetch import Fetch, _Donor
from roles.worker.offered import Base, Self
from roles.worker.testing import FIRST, JOB, engine_of
from wire.heal_messages import HealRequest, StepLogged


def fetch_of(connection: Any) -> tuple[Fetch, _Donor]:
    """One that holds what step 1 leads on from, and its only donor."""
    engine = engine_of(1000)
    world: Any = SimpleNamespace(clock=LoopClock())
    fetch = Fetch(
        world,
        Self("me", "me", "", engine.state(), engine.reduce_buffer.nbytes),
        request=HealRequest(JOB, -1, "", 1.0, 0, FIRST),
        generation=1,
        donors=[],
        on_torn=lambda: None,
        on_progress=lambda done, total: None,
    )
    donor = fetch._donors["d"] = _Donor("d", "d", connection, offer=Base(0, FIRST))
    fetch._next, fetch._lineage = 1, FIRST
    return fetch, donor


async def test_a_step_that_came_whole_is_applied_though_whoever_gave_it_is_gone() -> None:
    asked: list[tuple[memoryview, Callable[[], None]]] = []

    def post(buffer: memoryview, *, done: Callable[[], None], **_: Any) -> None:
        asked.append((buffer, done))

    fetch, donor = fetch_of(SimpleNamespace(post=post, send=lambda *_, **__: None))
    size_bytes = fetch._me.reduce_bytes
    data = bytes(range(256)) * (size_bytes // 256 + 1)
    digest = xxhash.xxh3_128_digest(data[:size_bytes])
    fetch._heard_untrusted(donor, StepLogged(1, digest, 2.0, size_bytes))
    ((buffer, done),) = asked
    buffer[:] = data[:size_bytes]
    done()
    fetch._news[1].withdraw("d")
    step = await fetch.step()
    assert (step.step, step.square_sum, bytes(step.data)) == (1, 2.0, data[:size_bytes])
    fetch.used(step)


async def test_of_a_donor_that_tells_of_steps_without_end_little_is_remembered() -> None:
    fetch, donor = fetch_of(SimpleNamespace(post=lambda *_, **__: None, send=lambda *_, **__: None))
    for step in range(1, 50_000):
        fetch._heard_untrusted(donor, StepLogged(step, bytes(16), 1.0, fetch._me.reduce_bytes))
    assert fetch._log_steps < len(fetch._news) < 3 * fetch._log_steps
