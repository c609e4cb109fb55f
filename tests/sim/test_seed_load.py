"""A seed's load by its members: what grows with their square would show in the bytes that it sends."""

from __future__ import annotations

import asyncio

from tests.sim.seed_load import Crowd, SeedCost


def test_members_that_join_at_once_are_told_little_each() -> None:
    crowd, costs = Crowd(64), list[SeedCost]()
    with asyncio.Runner(loop_factory=lambda: crowd.loop) as runner:
        runner.run(crowd.run(costs.append, minutes=False))
    assert [cost.title for cost in costs] == ["join storm", "a member is lost", "the seed restarts"]
    # A view of all of them takes 5 KB. With a notice to all waiting members at each join these were 16 KB.
    assert costs[0].moved_bytes / 64 < 13_000
    assert costs[-1].took_s < 10
