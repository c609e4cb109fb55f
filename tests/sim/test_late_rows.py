"""What members kept while the seed was away is told when they find it again, even where the job is over by then."""

from __future__ import annotations

from p2ptrain.lab.sim.cluster import SEED
from tests.sim.played import Played, play


def test_steps_made_without_the_seed_stand_in_the_ledger_of_a_job_that_was_cancelled_meanwhile() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        for machine in cluster.workers:
            cluster.network.cut(machine.host, SEED)
        await cluster.goes_on()
        reached = max(cluster.applied())
        await cluster.asked("jobs.cancel", job=cluster.job)
        for machine in cluster.workers:
            cluster.network.mend(machine.host, SEED)
        await all_told(cluster, reached)

    play(script)


def test_members_tell_what_rank_0_could_not_when_they_are_let_go() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        (first,) = [machine for machine in cluster.workers if machine.worker._runner.state.reports._rank() == 0]
        cluster.network.cut(first.host, SEED)
        await cluster.goes_on(4)
        reached = max(cluster.applied())
        await cluster.asked("jobs.cancel", job=cluster.job)
        first.kill()
        await all_told(cluster, reached)

    play(script)


async def all_told(cluster: Played, reached: int) -> None:
    await cluster.until(lambda: not cluster.applied(), 60.0)
    answer = await cluster.asked("jobs.ledger", job=cluster.job, after_step=0)
    assert answer["head"]["base_step"] == 0
    assert answer["head"]["step"] >= reached
