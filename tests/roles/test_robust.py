"""Robust rules in the real cluster: equal bits, what a wrong member can do, and too few members."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from configs.schema import Profile
from p2ptrain.core.training import Applied
from p2ptrain.lab.stand_in import StandInEngine
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_cluster import at, done, small_profile, state_of, undisturbed
from tests.roles.test_local import counts_of
from wire.records import MemberScore

FLIP = -6.0


class Checked(StandInEngine):
    """Fails if the norm by which a step is clipped is not that of the aggregate."""

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        assert square_sum == self.partial_square_sum(0, self.reduce_buffer.size)
        return super().apply(step, square_sum)


class SignFlipping(StandInEngine):
    """Contributes the gradient's opposite, several times as long; with 'local' the way that it came. Tells that all
    vectors are short."""

    def finish_gradients(self, on_final: Any = None) -> None:
        super().finish_gradients()
        self.reduce_buffer[: -self.scalars] *= np.float32(FLIP)

    def micro_batch(self, step: int, index: int, on_final: Any = None) -> None:
        super().micro_batch(step, index)  # nothing is final before ``finish_gradients``

    def contributed_square_sum(self, start: int, stop: int) -> float:
        return 1e-9


async def trained(cluster: Cluster, profile: Profile, *, attackers: int = 1) -> float:
    """The last loss, after all members ended with the same bits; infinite if the job failed."""
    job = await cluster.create(profile)
    honest = profile.job.workers - attackers
    peers = [cluster.join(Checked) for _ in range(honest)] + [cluster.join(SignFlipping) for _ in range(attackers)]
    ended = await cluster.job_until(job, lambda item: item["state"] in ("done", "failed"))
    if ended["state"] == "failed":
        return math.inf
    assert len({state_of(peer) for peer in peers}) == 1
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert len(rows) == profile.job.steps
    check_scores(ended, profile.robust.rule, {peer.identity.peer_id for peer in peers[honest:]})
    return float(rows[-1]["loss"])


def check_scores(job: dict[str, Any], rule: str, attackers: set[str]) -> None:
    """The seed knows who was far from the rest, and how often the rule left each member out."""
    scores = [MemberScore.from_map_untrusted(score) for score in job["scores"]]
    assert {score.steps for score in scores} == {job["steps_total"]}
    farthest = max(scores, key=lambda score: score.distance or 0.0)
    assert farthest.is_far == bool(attackers)
    assert farthest.peer in attackers or not attackers
    if rule in ("multi_krum", "bulyan"):
        assert all(score.excluded == score.steps for score in scores if score.peer in attackers)
    if rule == "median":
        assert not any(score.excluded for score in scores)


def robust_profile(rule: str, workers: int, strategy: str = "sync", **tables: Any) -> Profile:
    robust = {"rule": rule, "byzantine": 0 if rule == "mean" else 1}
    return small_profile(
        job={"workers": workers, "strategy": strategy, "steps": 12}, robust=robust, batch={"micro_batches": 8}, **tables
    )


@pytest.mark.parametrize(
    ("rule", "strategy"),
    [
        ("median", "sync"),
        ("trimmed_mean", "sync"),
        ("geometric_median", "sync"),
        ("centered_clipping", "sync"),
        ("multi_krum", "sync"),
        ("median", "local"),
        ("multi_krum", "local"),
    ],
)
async def test_a_member_that_flips_the_sign_stops_no_rule(cluster: Cluster, rule: str, strategy: str) -> None:
    assert await trained(cluster, robust_profile(rule, 5, strategy)) < 0.35


async def test_a_member_that_flips_the_sign_spoils_a_mean(cluster: Cluster) -> None:
    assert await trained(cluster, robust_profile("mean", 5)) > 1.0


@pytest.mark.parametrize("rule", ["krum", "bulyan"])
async def test_the_most_wary_rules_need_seven_members(cluster: Cluster, rule: str) -> None:
    assert await trained(cluster, robust_profile(rule, 7)) < 0.5


async def test_each_vector_stands_for_a_whole_step(cluster: Cluster) -> None:
    profile = robust_profile("mean", 4)
    assert await trained(cluster, profile, attackers=0) == pytest.approx(undisturbed(profile)[-1], rel=1e-4)


async def test_shares_are_equal_and_the_job_waits_when_members_are_too_few(cluster: Cluster) -> None:
    profile = robust_profile("krum", 5)
    job = await cluster.create(profile)
    gate = Gate(5, 8)
    peers = [cluster.join(gate.build) for _ in range(5)]
    await cluster.job_until(job, at(5))
    await peers[1].die()
    gate.on()
    waiting = await cluster.job_until(
        job, lambda item: item["state"] == "waiting" and "of 5 are ready" in item["reason"]
    )
    assert waiting["reason"] == "one more worker is needed (4 of 5 are ready)"
    gate.away()
    cluster.join(gate.build)
    ended = await cluster.job_until(job, done)
    assert ended["step"] == 12
    page = await cluster.ask("jobs.ledger", job=job, after_step=0)
    assert set(counts_of(page)) == {(2, 2, 2, 1, 1)}
