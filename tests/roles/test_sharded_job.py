"""Jobs whose model is sharded, with torch: the real seed, real workers and FSDP2 over rings, against one process."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import Profile
from ring import coordination as co
from roles.seed import jobs
from roles.strategies.pipeline import strategy_of
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_pipeline_job import (
    at,
    done,
    ended_as_one_process,
    gated,
    join,
    members_of,
    one_process,
    profile_of,
    rows_of,
    state_of,
    text,
)

__all__ = ["text"]


def sharded(text: Path, shards: int, replicas: int, steps: int) -> Profile:
    base = profile_of(text, 2, 2, model={"layers": 2}).model_dump()
    base["job"] |= {"strategy": "sharded", "workers": shards * replicas, "steps": steps}
    return Profile.model_validate(base | {"pipeline": {}, "sharded": {"shards": shards}})


@pytest.mark.parametrize(("shards", "replicas", "steps"), [(2, 2, 50)])
async def test_a_sharded_model_learns_what_one_process_does(
    cluster: Cluster, text: Path, shards: int, replicas: int, steps: int
) -> None:
    """3 shards: the micro-batches of a step, 4, are no multiple of them."""
    profile = sharded(text, shards, replicas, steps)
    job = await cluster.create(profile)
    peers = [join(cluster) for _ in range(shards * replicas)]
    await cluster.job_until(job, done)
    losses, held_out, weights = one_process(profile)
    rows = await rows_of(cluster, job)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    assert {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None} == pytest.approx(
        held_out, abs=1e-5
    )
    assert losses[-1] < losses[0] - 1
    assert len({state_of(peer) for peer in peers}) == shards, "members of one shard have the same bits"
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    whole = next(item for item in saved if item["stage"] is None and item["step"] == profile.job.steps)
    found = AutoModelForCausalLM.from_pretrained(whole["path"], use_safetensors=True).state_dict()
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=1e-4)


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


async def test_a_spare_takes_its_rows_out_of_the_whole_checkpoint_of_another(
    cluster: Cluster, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the lost one is gone with it."""
    monkeypatch.setattr(jobs.co, "JobOptions", partial(co.JobOptions, grace_s=1.0))  # nobody comes back
    profile, gate = sharded(text, 2, 1, 22), Gate(15)
    job = await cluster.create(profile)
    for _ in range(3):
        cluster.join(build_part=gated(gate), strategies=strategy_of)
    await cluster.whole(job, 10)
    item = await cluster.job_until(job, at(12))
    members = await members_of(cluster, job, item)
    gate.away()
    await members[1].die()
    shutil.rmtree(members[1].identity.directory)
    await ended_as_one_process(cluster, job, profile)
    spare = next(peer for peer in cluster.peers if peer not in members)
    assert [text for _, kind, text in spare.told if kind == "taken"] == [
        f"took the files of step 10 of part 1 of 2 from {members[0].identity.name}"
    ]
