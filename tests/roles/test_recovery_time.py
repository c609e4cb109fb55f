"""How long a ring stands still when a member dies or freezes: real shells, virtual time, a LAN's delays and beats."""

from __future__ import annotations

import asyncio

import pytest

from configs.schema import Profile
from p2ptrain.lab.sim.cluster import Simulation
from p2ptrain.lab.sim.machine import SimLoop, undisturbed

LAN_S, THREAD_S, DISK_S = 0.0003, 0.01, 0.002
FREEZE_S, KILL_S = 3.0, 1.0  # the goals, which include a step


def profile_of(workers: int) -> Profile:
    return Profile.model_validate(
        {"job": {"steps": 400, "workers": workers}, "batch": {"micro_batches": 8}, "checkpoint": {"every": 20}}
    )


async def until_commits(simulation: Simulation, number: int) -> float:
    """When so many commits, of all members together, were seen."""
    async with asyncio.timeout(60):
        while simulation.observer.commits < number:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.005)
    return simulation.loop.time()


async def interrupted(loop: SimLoop, what: str, workers: int, victim: int) -> tuple[float, list[str]]:
    """Seconds from the fault to the next committed step, and what was seen meanwhile and in the 6 s after."""
    profile = profile_of(workers)
    simulation = Simulation(loop, profile, undisturbed(profile), 5, peers=workers, verbose=True)
    simulation.links.latency_s = LAN_S
    for machine in simulation.machines.values():
        machine.call_s = DISK_S if machine is simulation.seed else THREAD_S
    try:
        simulation.seed.start()
        await simulation.create_job()
        for machine in simulation.workers:
            machine.start()
        await until_commits(simulation, 20 * workers)
        hit, began = simulation.workers[victim], loop.time()
        if what == "freeze":
            hit.process.frozen = True
        else:
            hit.kill()
        # What the others had under way is committed at once, if at all: it does not count.
        await asyncio.sleep(4 * LAN_S)
        seconds = await until_commits(simulation, simulation.observer.commits + 1) - began
        await asyncio.sleep(2)
        if what == "freeze":
            loop.thaw(hit.process)
        else:
            hit.start()
        await asyncio.sleep(4)
        return seconds, [text for at, text in simulation.observer.report.timeline if at >= began]
    finally:
        simulation.close()
        await asyncio.sleep(1)


@pytest.mark.parametrize(("what", "goal_s"), [("freeze", FREEZE_S), ("kill", KILL_S)])
def test_the_others_go_on_in_time_and_it_comes_back_as_a_newcomer(what: str, goal_s: float) -> None:
    loop = SimLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        seconds, seen = runner.run(interrupted(loop, what, 3, 1))
    assert seconds <= goal_s, "\n".join(seen)
    views = [text for text in seen if "(generation " in text]
    assert "w2" not in views[0]
    assert "w2" in views[-1]
    assert any("w2: fetched" in text or "w2: healed" in text for text in seen), "\n".join(seen)
