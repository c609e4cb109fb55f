"""A member dies at every tenth callback of a whole step, one run each: nothing may be violated in any of them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.lab.sim.cluster import Simulation
from p2ptrain.lab.sim.faults import FaultSchedule
from p2ptrain.lab.sim.run import SimulationResult, _to_the_end, run_schedule
from ring.job_member import MemberPhase

MEMBERS, BEFORE, STEPS = 3, 3, 9  # the member that died is one again before the end
EXACT = 2  # the number of a schedule whose sums are exact
STEP = {MemberPhase.COMPUTING, MemberPhase.REDUCING, MemberPhase.VOTING, MemberPhase.APPLYING, MemberPhase.BOUNDARY}


@dataclass
class Death:
    """Of the member ``victim``, so many callbacks after all were members and it had committed step ``BEFORE``.

    Attributes:
        step, phase: where it stood when it died.
    """

    victim: int
    callbacks: int
    step: int = 0
    phase: MemberPhase = MemberPhase.IDLE

    async def conduct(
        self, simulation: Simulation, faults: FaultSchedule, rng: random.Random, kinds: Sequence[str]
    ) -> None:
        simulation.seed.start()
        await simulation.create_job()
        for machine in simulation.workers:
            machine.start()
        victim, done = simulation.workers[self.victim], asyncio.Event()
        left = self.callbacks

        def look() -> None:
            nonlocal left
            runner = victim.worker._runner if victim.worker is not None else None
            if runner is None or runner.core.view is None or runner.core.view.size < MEMBERS:
                return
            if runner.core.applied >= BEFORE:
                left -= 1
            if left < 0:
                victim.process.on_moment = None
                self.step = runner.core.applied
                self.phase = runner.core.phase
                victim.kill()
                done.set()

        victim.process.on_moment = look
        async with asyncio.timeout(60):
            await done.wait()
        await asyncio.sleep(0.3)
        victim.start()
        await _to_the_end(simulation, faults)


def died(callbacks: int) -> tuple[Death, SimulationResult]:
    death = Death(1, callbacks)
    return death, run_schedule(EXACT, peers=MEMBERS, conduct=death.conduct, steps=STEPS)


def test_a_kill_at_every_tenth_callback_of_a_step_harms_nothing() -> None:
    phases: set[MemberPhase] = set()
    steps: list[int] = []
    for callbacks in itertools.count(step=10):
        death, verdict = died(callbacks)
        assert not verdict.violated, f"{callbacks} callbacks after step {BEFORE}: {verdict.text}"
        steps.append(death.step)
        phases.add(death.phase)
        if death.step > steps[0]:  # from one commit to the next
            break
    assert phases >= STEP
    assert len(steps) > 12
