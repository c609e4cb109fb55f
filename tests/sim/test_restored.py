"""A seed that is lost with its disk and restored from a copy that is older than the newest view."""

from __future__ import annotations

import asyncio

from p2ptrain.lab.sim.machine import MachineDisk
from ring.view import TERM_BITS
from tests.sim.played import WORKERS, Played, play


async def lost_and_restored(cluster: Played) -> MachineDisk:
    """A worker dies and comes again, so two views are newer than the copy; then the seed is lost. The lost disk."""
    await cluster.until(lambda: bool(cluster.observer.copies))
    copy = cluster.observer.copies[-1][1]
    cluster.workers[0].kill()
    await cluster.goes_on()
    cluster.workers[0].start()
    await cluster.until(lambda: len(cluster.applied()) == WORKERS)
    await cluster.goes_on()
    cluster.seed.kill()
    await cluster.goes_on()
    old, cluster.seed.disk = cluster.seed.disk, cluster.seed._new_disk()
    cluster.seed.restore(copy)
    await cluster.until(lambda: all(machine.linked for machine in cluster.workers))
    return old


def test_members_are_taken_back_as_they_are_and_the_ledger_has_every_step() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        await lost_and_restored(cluster)
        before = cluster.generations()
        assert len(before) == 1
        await asyncio.sleep(5)
        await cluster.goes_on()
        assert cluster.generations() == before
        reached = max(cluster.applied())
        head = cluster.records.ledger_head(cluster.job)
        assert head is not None
        assert (head.base_step, head.step > reached - 20) == (0, True)
        cluster.observer.history.kept = (0, set())
        cluster.workers[1].kill()
        await cluster.goes_on()
        assert min(cluster.generations()) > 1 << TERM_BITS

    play(script)


def test_a_seed_restored_twice_from_one_copy_leads_in_two_terms() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        await lost_and_restored(cluster)
        await cluster.goes_on()
        assert cluster.records.fact("term", "0") == "1"
        cluster.seed.restore(cluster.observer.copies[-1][1])
        await cluster.until(lambda: not any(machine.linked for machine in cluster.workers))
        await cluster.until(lambda: all(machine.linked for machine in cluster.workers))
        assert cluster.records.fact("term", "0") == "2"
        await cluster.goes_on()

    play(script)


def test_workers_that_met_a_higher_term_take_no_orders_of_the_seed_that_was_lost() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        old = await lost_and_restored(cluster)
        await cluster.goes_on()
        cluster.seed.kill()
        cluster.seed.disk = old  # its machine is back
        cluster.seed.start()
        await asyncio.sleep(20)
        assert not any(machine.linked for machine in cluster.workers)
        victim = cluster.workers[0]
        victim.kill()
        victim.start()  # its disk knows the term
        await asyncio.sleep(20)
        assert not victim.linked

    play(script)


def test_rows_of_a_member_that_is_gone_before_the_seed_knows_the_view_are_kept() -> None:
    """The others came anew since the copy, so they have later rows only."""

    async def script(cluster: Played) -> None:
        await cluster.begin()
        copy = cluster.observer.copies[-1][1]
        for machine in cluster.workers[1:]:
            machine.kill()
            await cluster.goes_on()
            machine.start()
            await cluster.until(lambda: len(cluster.applied()) == WORKERS)
            await cluster.goes_on()
        cluster.seed.kill()
        cluster.workers[2].kill()  # the seed waits for it
        cluster.seed.disk = cluster.seed._new_disk()
        cluster.seed.restore(copy)
        await cluster.until(lambda: all(machine.linked for machine in cluster.workers[:2]))
        await asyncio.sleep(1)
        cluster.workers[0].kill()
        await cluster.goes_on()
        await asyncio.sleep(1)
        head = cluster.records.ledger_head(cluster.job)
        assert head is not None
        assert (head.base_step, head.step > 60) == (0, True)

    play(script)
