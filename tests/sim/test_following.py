"""A worker that follows the ring beside it, and loses the seed meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.lab.sim.cluster import SEED
from tests.sim.played import WORKERS, Played, play


@pytest.mark.parametrize(("how", "away_s"), [("cut", 0.5), ("silence", 4.0), ("seed dies", 4.0)])
def test_it_is_let_in_when_the_seed_is_back(how: str, away_s: float) -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        newcomer = cluster.workers[0]
        newcomer.kill()
        await cluster.goes_on()
        newcomer.start()
        lost = asyncio.Event()

        def look() -> None:
            if newcomer.following and not lost.is_set():
                lost.set()
                match how:
                    case "cut":
                        cluster.network.cut(newcomer.host, SEED)
                    case "silence":
                        cluster.network.silence(newcomer.host, SEED)
                    case _:
                        cluster.seed.kill()

        newcomer.process.on_moment = look
        await cluster.until(lost.is_set)
        newcomer.process.on_moment = None
        await asyncio.sleep(away_s)
        if how == "seed dies":
            cluster.seed.start()
        else:
            cluster.network.mend(newcomer.host, SEED)
        ring = cluster.workers[1:]
        await cluster.until(lambda: all(machine.worker._runner.core.view.size == WORKERS for machine in ring), 60.0)

    play(script)


def test_it_goes_on_alone_when_the_ring_that_it_follows_freezes() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        newcomer, *ring = cluster.workers
        newcomer.kill()
        await cluster.goes_on()
        newcomer.start()
        frozen = asyncio.Event()

        def look() -> None:
            if newcomer.following and newcomer.worker._runner.follower.is_level and not frozen.is_set():
                frozen.set()
                for machine in ring:
                    machine.process.frozen = True

        newcomer.process.on_moment = look
        await cluster.until(frozen.is_set)
        newcomer.process.on_moment = None
        await cluster.until(lambda: newcomer.worker._runner.core.running, 60.0)

    play(script)
