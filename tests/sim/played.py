"""A simulated cluster of one seed and three workers, for scripts that decide themselves what happens when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from configs.schema import Profile
from p2ptrain.lab.sim.cluster import PERSON, SEED, SEED_PORT, STATE, Simulation
from p2ptrain.lab.sim.machine import SimLoop, undisturbed
from roles.seed.store import Records
from wire.client import SeedClient

WORKERS = 3


@cache
def profile_of() -> Profile:
    """More steps than any test takes."""
    return Profile.model_validate(
        {"job": {"steps": 3000, "workers": 2}, "batch": {"micro_batches": 8}, "checkpoint": {"every": 200}}
    )


@cache
def expected() -> list[Any]:
    return undisturbed(profile_of())


class Played(Simulation):
    """A cluster with a seed and three workers."""

    def __init__(self, loop: SimLoop, states: list[Any]) -> None:
        super().__init__(loop, profile_of(), states, 3, peers=WORKERS, verbose=True)
        self.links.latency_s = 0.0005

    @property
    def records(self) -> Records:
        """The seed's store, to look at. What a killed process did not commit is gone."""
        found = Records.__new__(Records)
        found._path, found._db = STATE / "seed.sqlite3", self.seed.disk.database(STATE / "seed.sqlite3")
        if not self.seed.up and found._db.in_transaction:
            found._db.rollback()
        return found

    async def until(self, true: Callable[[], bool], seconds: float = 120.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not true():  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(
                "\n".join(f"{at:.2f} {text}" for at, text in self.observer.report.timeline[-80:])
            ) from None

    async def asked(self, method: str, **params: Any) -> dict[str, Any]:
        client = await SeedClient.connect(self.network.at(PERSON), SEED, SEED_PORT, name=PERSON)
        try:
            return await client.request(method, params)
        finally:
            await client.close()

    def applied(self) -> list[int]:
        return [m.worker._runner.core.applied for m in self.workers if m.up and m.worker and m.worker._runner]

    def generations(self) -> set[int]:
        """In which the workers are; 0: in none yet."""
        views = [m.worker._runner.core.view for m in self.workers if m.worker and m.worker._runner]
        return {view.generation if view else 0 for view in views}

    async def begin(self) -> None:
        """A ring of three trains."""
        self.seed.start()
        await self.create_job()
        for machine in self.workers:
            machine.start()
        await self.until(lambda: len(self.applied()) == WORKERS and min(self.applied()) > 20)

    async def goes_on(self, more: int = 20) -> None:
        goal = max(self.applied()) + more
        await self.until(lambda: bool(self.applied()) and min(self.applied()) >= goal)


def play(script: Callable[[Played], Awaitable[None]], states: list[Any] | None = None) -> Played:
    """``states``: those after 0, 1, 2, … steps; empty: the script compares them."""
    loop = SimLoop()
    made: list[Played] = []

    async def main() -> None:
        played = Played(loop, expected() if states is None else states)
        made.append(played)
        loop.set_exception_handler(played.complaint)
        try:
            await script(played)
        finally:
            played.close()
            await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert not made[0].complaints, made[0].complaints
    assert not made[0].observer.report.violation, made[0].observer.report.violation
    return made[0]
