"""The policies of the pool on random loads."""

from __future__ import annotations

from tests.sim.pool_loads import MOST_S, compare_policies, play_load


def test_every_job_of_a_load_ends_under_every_policy() -> None:
    for policy in ("matching", "score", "fifo"):
        for seed in range(2):
            figures = play_load(policy, seed)
            assert figures == play_load(policy, seed)
            assert figures["wait_s"] <= figures["completion_s"] <= figures["makespan_s"] < MOST_S


def test_sharing_spares_jobs_and_models_the_wait() -> None:
    found = compare_policies(loads=6, members=8)
    matching, score, fifo = found["matching"], found["score"], found["fifo"]
    assert matching["wait_s"] < score["wait_s"] < fifo["wait_s"]
    assert matching["served"] > score["served"] > fifo["served"]
    assert matching["drafted"] > fifo["drafted"]
    assert matching["completion_s"] < 1.2 * fifo["completion_s"]
    assert fifo["moves"] == 0 < matching["moves"] < 20
