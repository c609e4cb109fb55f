"""Strategies whose members have a copy of their own: 'local' and 'federated', in the real cluster."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import Profile
from ring.ledger import counts_of_untrusted
from roles.stand_in import StandInEngine
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_cluster import at, done, small_profile, state_of
from wire.records import LedgerPage


def counts_of(page: dict[str, Any]) -> list[tuple[int, ...]]:
    rows = [row for run in LedgerPage.from_map_untrusted(page).runs for row in run.rows()]
    assert len(rows) == 12
    return [counts_of_untrusted(row.counts) for row in rows]


@pytest.mark.parametrize(
    "local", [{}, {"fragments": 2}, {"overlap": True}, {"fragments": 3, "overlap": True}], ids=lambda it: "-".join(it)
)
async def test_members_end_with_the_same_bits(cluster: Cluster, local: dict[str, Any]) -> None:
    profile = small_profile(job={"strategy": "local", "workers": 3}, local=local, ring={"codec": "int4"})
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(3)]
    await cluster.job_until(job, done)
    assert len({state_of(peer) for peer in peers}) == 1
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < rows[0]["loss"] / 3


async def test_the_others_complete_the_round_of_a_member_that_is_lost(cluster: Cluster) -> None:
    profile = small_profile(job={"strategy": "local", "workers": 3})
    job = await cluster.create(profile)
    gate = Gate(5)
    peers = [cluster.join(lambda profile: StandInEngine(profile, on_micro_batch=gate.wait)) for _ in range(3)]
    await cluster.job_until(job, at(5))
    await peers[2].die()
    gate.away()
    ended = await cluster.job_until(job, done)
    assert ended["step"] == 12
    assert state_of(peers[0]) == state_of(peers[1])
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert {len(counts) for counts in counts_of(page)} == {2, 3}


async def test_shares_of_a_round_follow_the_sizes_of_the_texts(cluster: Cluster) -> None:
    def built(windows: int) -> Any:
        def build(profile: Profile) -> StandInEngine:
            engine = StandInEngine(profile)
            engine.windows = windows
            return engine

        return build

    profile = small_profile(
        job={"strategy": "federated", "workers": 3}, batch={"micro_batches": 20}, federated={"most_share": 0.5}
    )
    job = await cluster.create(profile)
    for windows in (100, 400, 1500):
        cluster.join(built(windows))
    await cluster.job_until(job, done)
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert {tuple(sorted(counts)) for counts in counts_of(page)} == {(2, 8, 10)}
