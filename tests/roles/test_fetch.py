"""What a fetch believes of a source, and how much of it it remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from configs.schema import Profile
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.world import LoopClock
from p2ptrain.lab.stand_in import StandInEngine
from ring.token import joined_digest, next_lineage
from roles.engine import WHOLE, Stage
from roles.worker.heal import OfferedState, StateFetch, StateLayout, StateSource
from tests.roles.heal_doubles import FIRST, JOB
from wire.job_messages import HealRequest, StepLogged

SPLIT = Profile.model_validate({"job": {"strategy": "pipeline", "workers": 2}, "pipeline": {"stages": 2}})


def fetch_of(
    stage: Stage, post: Callable[..., None] = lambda *_, **__: None, numel: int = 1000
) -> tuple[StateFetch, StateSource]:
    """One that holds what step 1 leads on from, and its only source."""
    engine = StandInEngine(SPLIT if stage.split else Profile(), numel=numel, stage=stage)
    context: Any = SimpleNamespace(world=SimpleNamespace(clock=LoopClock()), peer_id="me")
    fetch = StateFetch(
        context,
        StateLayout(engine.state.blobs(), engine.reduce_buffer.nbytes, stage),
        request=HealRequest(JOB, -1, "", 1.0, 0, FIRST, stage.index),
        generation=1,
        members=[],
        on_torn=lambda: None,
        on_progress=lambda: None,
    )
    connection = SimpleNamespace(post=post, send=lambda *_, **__: None)
    source = StateSource("d", "d", SimpleNamespace(connection=connection))  # type: ignore[arg-type]
    fetch.receiver.sources["d"] = source
    source.offer = OfferedState(0, FIRST)
    fetch.steps.begin(source.offer)
    return fetch, source


@pytest.mark.parametrize("stage", [WHOLE, Stage(1, 2)], ids=str)
async def test_a_verified_step_is_applied_though_its_source_is_gone(stage: Stage) -> None:
    asked: list[tuple[memoryview, Callable[[], None]]] = []

    def post(buffer: memoryview, *, done: Callable[[], None], **_: Any) -> None:
        asked.append((buffer, done))

    fetch, source = fetch_of(stage, post)
    size_bytes = fetch.layout.reduce_bytes
    data = bytes(range(256)) * (size_bytes // 256 + 1)
    digest = xxhash.xxh3_128_digest(data[:size_bytes])
    digests = bytes(16) + digest if stage.split else b""
    fetch.heard_untrusted(source, StepLogged(1, digest, 2.0, size_bytes, digests))
    ((buffer, done),) = asked
    buffer[:] = data[:size_bytes]
    done()
    await asyncio.sleep(0.01)  # it is verified
    del fetch.receiver.sources["d"]
    step = await fetch.step()
    assert (step.step, step.square_sum, bytes(step.data)) == (1, 2.0, data[:size_bytes])
    assert step.lineage == next_lineage(FIRST, joined_digest(digests) if stage.split else digest)
    fetch.mark_applied(step)


async def test_a_report_without_the_digests_of_all_stages_is_refused() -> None:
    fetch, source = fetch_of(Stage(1, 2))
    size, mine, others = fetch.layout.reduce_bytes, bytes(range(16)), bytes(16)
    fetch.heard_untrusted(source, StepLogged(1, mine, 1.0, size, others + mine))
    for digests in (b"", mine, mine + others, others + mine + mine):
        with pytest.raises(ProtocolError):
            fetch.heard_untrusted(source, StepLogged(2, mine, 1.0, size, digests))


async def test_of_a_source_that_tells_of_steps_without_end_little_is_remembered() -> None:
    fetch, source = fetch_of(WHOLE, numel=30_000)
    for step in range(1, 5 * fetch.steps.log_steps):
        fetch.heard_untrusted(source, StepLogged(step, bytes(16), 1.0, fetch.layout.reduce_bytes))
    assert fetch.steps.log_steps < len(source.reports) < 3 * fetch.steps.log_steps
