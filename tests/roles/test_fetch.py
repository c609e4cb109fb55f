"""What a fetch believes of a source, and how much of it it remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import xxhash

from p2ptrain.core.world import LoopClock
from roles.worker.heal import Base, Fetch, Layout, Sender
from tests.roles.heal_doubles import FIRST, JOB, engine_of
from wire.job_messages import HealRequest, StepLogged


def fetch_of(post: Callable[..., None], numel: int = 1000) -> tuple[Fetch, Sender]:
    """One that holds what step 1 leads on from, and its only source."""
    engine = engine_of(numel)
    context: Any = SimpleNamespace(world=SimpleNamespace(clock=LoopClock()), peer_id="me")
    fetch = Fetch(
        context,
        Layout(engine.state.blobs(), engine.reduce_buffer.nbytes),
        request=HealRequest(JOB, -1, "", 1.0, 0, FIRST),
        generation=1,
        members=[],
        on_torn=lambda: None,
        on_progress=lambda: None,
    )
    connection = SimpleNamespace(post=post, send=lambda *_, **__: None)
    sender = fetch.senders["d"] = Sender("d", "d", SimpleNamespace(connection=connection))  # type: ignore[arg-type]
    fetch.receiver.sources["d"] = sender
    sender.offer = Base(0, FIRST)
    fetch.steps.begin(sender.offer)
    return fetch, sender


async def test_a_step_that_came_whole_is_applied_though_whoever_gave_it_is_gone() -> None:
    asked: list[tuple[memoryview, Callable[[], None]]] = []

    def post(buffer: memoryview, *, done: Callable[[], None], **_: Any) -> None:
        asked.append((buffer, done))

    fetch, sender = fetch_of(post)
    size_bytes = fetch.layout.reduce_bytes
    data = bytes(range(256)) * (size_bytes // 256 + 1)
    digest = xxhash.xxh3_128_digest(data[:size_bytes])
    fetch.heard_untrusted(sender, StepLogged(1, digest, 2.0, size_bytes))
    ((buffer, done),) = asked
    buffer[:] = data[:size_bytes]
    done()
    await asyncio.sleep(0.01)  # it is judged
    del fetch.senders["d"], fetch.receiver.sources["d"]
    step = await fetch.step()
    assert (step.step, step.square_sum, bytes(step.data)) == (1, 2.0, data[:size_bytes])
    fetch.mark_applied(step)


async def test_of_a_source_that_tells_of_steps_without_end_little_is_remembered() -> None:
    fetch, sender = fetch_of(lambda *_, **__: None, numel=30_000)
    for step in range(1, 5 * fetch.steps.log_steps):
        fetch.heard_untrusted(sender, StepLogged(step, bytes(16), 1.0, fetch.layout.reduce_bytes))
    assert fetch.steps.log_steps < len(sender.news) < 3 * fetch.steps.log_steps
