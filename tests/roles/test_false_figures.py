"""Real members of which one tells what is not so: the job takes all its steps, the liar is named, and nobody else.

A lie is data: what the liar's tokens have in place of the truth.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.training import OnFinal
from p2ptrain.lab.stand_in import StandInEngine
from ring.token import Flag, Token
from tests.roles.in_process import Cluster, Peer, ScriptedProbe
from tests.roles.test_cluster import small_profile
from wire.job_messages import MAX_WINDOWS

STEPS = 12


def lying(lie: dict[str, Any]) -> ScriptedProbe:
    def change(vote: tuple[bytes, Any]) -> tuple[bytes, Any]:
        token, check = vote
        return replace(Token.decode_untrusted(token), **lie).encode(), check

    return ScriptedProbe({"vote": change})


class Spoiled(StandInEngine):
    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        super().micro_batch(step, index)
        self.reduce_buffer[7] = math.nan


class Claiming(StandInEngine):
    def __init__(self, profile: Profile, windows: int) -> None:
        super().__init__(profile)
        self.data.windows = windows


def done(item: dict[str, Any]) -> bool:
    return item["state"] in ("done", "failed", "paused")


def is_excluded(peer: Peer) -> bool:
    return any("it is excluded" in text for _, _, text in peer.told)


async def ended(cluster: Cluster, lie: dict[str, Any], build: Any = StandInEngine) -> tuple[Peer, list[Peer]]:
    """The liar and the honest members of a job that has ended with all its steps."""
    job = await cluster.create(small_profile(job={"workers": 3, "steps": STEPS}))
    honest = [cluster.join() for _ in range(2)]
    liar = cluster.join(build, probe=lying(lie))
    item = await cluster.job_until(job, done)
    assert (item["state"], item["step"]) == ("done", STEPS), item["reason"]
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert all(0 < row["grad_norm"] < 1e3 for row in rows)
    assert not any(is_excluded(peer) for peer in honest)
    return liar, honest


@pytest.mark.parametrize(
    "lie",
    [
        {"part": 1e30},
        {"part": -1000.0},
        {"part": math.nan},
        {"own": -1000.0},
        {"own": math.nan},
        {"flags": Flag.STOP},
    ],
)
async def test_a_false_figure_names_its_sender(cluster: Cluster, lie: dict[str, Any]) -> None:
    liar, _ = await ended(cluster, lie)
    assert is_excluded(liar)


@pytest.mark.parametrize("lie", [{"usual": 1e-30}, {"usual": 1e300}, {"unit_us": 2**32 - 1}])
async def test_what_one_member_calls_usual_changes_nothing(cluster: Cluster, lie: dict[str, Any]) -> None:
    liar, _ = await ended(cluster, lie)
    assert not is_excluded(liar)


async def test_who_spoils_sums_and_says_otherwise_is_found(cluster: Cluster) -> None:
    job = await cluster.create(small_profile(job={"workers": 3, "steps": STEPS}))
    honest = [cluster.join() for _ in range(2)]
    liar = cluster.join(Spoiled, probe=lying({"own": 1.0}))
    item = await cluster.job_until(job, done)
    assert (item["state"], item["step"]) == ("done", STEPS), item["reason"]
    assert is_excluded(liar)
    assert all(STEPS in peer.steps for peer in honest), "who was tried is back"
    assert STEPS not in liar.steps


async def test_a_huge_text_gets_half_of_a_round_and_all_are_told(cluster: Cluster) -> None:
    profile = small_profile(job={"strategy": "federated", "workers": 3}, batch={"micro_batches": 20})
    job = await cluster.create(profile)
    for windows in (MAX_WINDOWS, 100, 400):
        cluster.join(lambda profile, windows=windows: Claiming(profile, windows))
    await cluster.job_until(job, done)
    events = (await cluster.ask("events.list", job=job))["events"]
    (told,) = [item["text"] for item in events if item["kind"] == "shares"]
    assert f"says {MAX_WINDOWS:,} sequences: 10 of 20 micro-batches" in told
    assert "says 400 sequences: 8 of 20" in told
