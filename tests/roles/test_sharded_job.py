"""Jobs whose model is sharded, with torch: the real seed, real workers and FSDP2 over rings, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import Profile
from p2ptrain.core.errors import Refused
from p2ptrain.lab.audit import audit
from roles.seed.job_requests import in_shards
from roles.strategies import strategy_of
from roles.worker.build import engine_builder
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_pipeline_job import (
    STEPS,
    at,
    ended_as_one_process,
    gated,
    join,
    learned_as_one_process,
    members_of,
    profile_of,
    state_of,
    text,
)

__all__ = ["text"]


def sharded(text: Path, shards: int, replicas: int, steps: int) -> Profile:
    base = profile_of(text, 2, 2, model={"layers": 2}).model_dump()
    base["job"] |= {"strategy": "sharded", "workers": shards * replicas, "steps": steps}
    return Profile.model_validate(base | {"pipeline": {}, "sharded": {"shards": shards}})


async def test_a_sharded_model_learns_what_one_process_does(cluster: Cluster, text: Path) -> None:
    await learned_as_one_process(cluster, sharded(text, 2, 2, STEPS))


async def test_a_replica_that_lost_a_member_comes_back_while_the_other_goes_on(cluster: Cluster, text: Path) -> None:
    profile = sharded(text, 2, 2, 30)
    job = await cluster.create(profile)
    for _ in range(4):
        join(cluster)
    item = await cluster.job_until(job, at(5))
    members = await members_of(cluster, job, item)
    lost = members[3]
    await lost.die()
    item = await cluster.job_until(job, lambda item: len(item["members"]) == 2 and item["step"] >= 8)
    assert await members_of(cluster, job, item) == members[:2]
    join(cluster, slot=cluster.peers.index(lost) + 1)
    await cluster.job_until(job, lambda item: len(item["members"]) == 4)
    await ended_as_one_process(cluster, job, profile)
    assert len({state_of(peer) for peer in cluster.peers if peer is not lost}) == 2


async def test_a_job_goes_on_with_another_number_of_shards(cluster: Cluster, text: Path) -> None:
    """While it runs, from 2 to 3; then it waits for a third worker. When it is done, from 3 to 1 and back to 2: then
    the workers also have parts of step 10 that were given up."""
    profile, gate = sharded(text, 2, 1, 12), Gate(7, 10)
    profile = profile.model_copy(update={"checkpoint": profile.checkpoint.model_copy(update={"every": 5})})
    job = await cluster.create(profile)
    for _ in range(2):
        cluster.join(engine_builder(threads=1), build_part=gated(gate), strategies=strategy_of)
    await cluster.whole(job, 5)
    gate.on()
    await cluster.whole(job, 10)
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    at_5 = [item["id"] for item in saved if item["step"] == 5]
    await cluster.ask("checkpoints.restore", id=at_5[0], shards=3)
    gate.away()
    item = await cluster.job_until(job, lambda item: "2 of 3 workers are here" in item["reason"])
    assert (item["strategy"], item["stages"], item["state"]) == ("sharded", 3, "waiting")
    await cluster.restart_seed()  # it has stored the request
    cluster.join(engine_builder(threads=1), build_part=engine_builder(threads=1), strategies=strategy_of)
    await ended_as_one_process(cluster, job, profile)
    for shards, strategy in ((1, "sync"), (2, "sharded")):
        saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
        step = 5 * shards
        whole = next(item["id"] for item in saved if item["step"] == step and item["stage"] is None)
        await cluster.ask("checkpoints.restore", id=whole, shards=shards)
        item = await cluster.job_until(job, lambda item: item["state"] == "running")
        assert (item["strategy"], item["stages"]) == (strategy, shards)
        await ended_as_one_process(cluster, job, profile)
    async with cluster.operator() as client:
        info, spec = await client.job(job)
        verdict = await audit(client, job, Profile.from_spec_untrusted(spec), lambda step, of: None)
    assert (verdict.fault, verdict.steps) == (None, info.steps_total)
    assert verdict.layouts == [(0, 2), (5, 1), (10, 2)]


def test_only_a_profile_that_can_be_sharded_is(text: Path) -> None:
    changed = Profile.from_spec_untrusted(in_shards(sharded(text, 2, 2, 9).to_spec(), 3))
    assert (changed.stages, changed.job.workers) == (3, 3)
    with pytest.raises(Refused, match="strategy 'pipeline' keeps its layout"):
        in_shards(profile_of(text, 2, 2).to_spec(), 3)
    sync = {"workers": 1, "strategy": "sync"}
    own = profile_of(text, 0, 1, job=sync, pipeline={"stages": 0}, data={"private": True})
    with pytest.raises(Refused, match=r"3 shards: .*data\.private"):
        in_shards(own.to_spec(), 3)
