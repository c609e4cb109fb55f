"""Jobs whose model is split over stages: the real seed and real workers, with parts of the stand-in for an engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.errors import Refused
from p2ptrain.lab.stand_in import StandInEngine
from tests.roles.in_process import Cluster, Peer
from tests.roles.test_cluster import at, done


def split_profile(stages: int, replicas: int, **job: Any) -> Profile:
    return Profile.model_validate(
        {
            "job": {"steps": 12, "workers": stages * replicas, "strategy": "pipeline", **job},
            "batch": {"micro_batches": 8},
            "pipeline": {"stages": stages},
            "validation": {"every": 5, "batches": 3},
            "checkpoint": {"every": 4, "copies": 1},
        }
    )


def unsplit_run(profile: Profile, replicas: int) -> tuple[bytes, list[float]]:
    """State and losses of one process that sums the replicas' shares as the ring does: each by itself, then in order
    of ranks."""
    engines = [StandInEngine(profile) for _ in range(replicas)]
    for engine in engines:
        engine.state.load_initial()
    share, losses = profile.batch.micro_batches // replicas, []
    for step in range(profile.job.steps):
        for replica, engine in enumerate(engines):
            engine.begin_step(step)
            for index in range(replica * share, (replica + 1) * share):
                engine.micro_batch(step, index)
        total = engines[0].reduce_buffer.copy()
        for engine in engines[1:]:
            total += engine.reduce_buffer
        for engine in engines:
            engine.reduce_buffer[:] = total
            applied = engine.apply(step, engine.partial_square_sum(0, total.size))
        losses.append(applied.loss)
    return b"".join(bytes(blob.view) for blob in engines[0].state.blobs()), losses


def part_of(peer: Peer) -> StandInEngine:
    engine = peer.engines[-1]
    assert isinstance(engine, StandInEngine)
    return engine


def whole_of(peers: list[Peer]) -> bytes:
    """The state of one replica's parts, put together."""
    parts = sorted((part_of(peer) for peer in peers), key=lambda engine: engine.state.part.start)
    blobs = [[bytes(blob.view) for blob in engine.state.blobs()] for engine in parts]
    return b"".join(b"".join(pieces) for pieces in zip(*blobs, strict=True))


async def by_stage(cluster: Cluster, peers: list[Peer]) -> list[list[Peer]]:
    """The cluster's peers, by the stage that the seed says they hold."""
    known = {item["id"]: item["stage"] for item in (await cluster.ask("peers.list"))["peers"]}
    stages = sorted({stage for stage in known.values() if stage is not None})
    return [[peer for peer in peers if known.get(peer.identity.peer_id) == stage] for stage in stages]


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
async def test_a_split_run_is_bit_for_bit_the_unsplit_one(cluster: Cluster, stages: int, replicas: int) -> None:
    profile = split_profile(stages, replicas)
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(stages * replicas)]
    item = await cluster.job_until(job, at(1))
    (view,) = (await cluster.ask("jobs.views", job=job, after_generation=0))["views"]  # the run may be over by now
    assert (item["stages"], len(view["members"])) == (stages, stages * replicas)
    ended = await cluster.job_until(job, done)
    starts = sorted({part_of(peer).state.part.start for peer in peers})
    held = [[peer for peer in peers if part_of(peer).state.part.start == start] for start in starts]
    assert [len(stage) for stage in held] == [replicas] * stages
    expected, losses = unsplit_run(profile, replicas)
    for replica in zip(*held, strict=True):
        assert whole_of(list(replica)) == expected
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [5, 10, 12]
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    assert len({entry["peer_id"] for entry in saved if entry["step"] == 12}) == stages  # one copy of each part
    assert ended["generation"] == 1


async def test_a_spare_takes_the_place_of_a_worker_that_died(cluster: Cluster) -> None:
    profile = split_profile(2, 2, steps=4000)
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(5)]
    item = await cluster.job_until(job, at(5))
    victim = next(peer for peer in peers if peer.identity.peer_id == item["members"][3])
    await victim.die()
    peers.remove(victim)
    item = await cluster.job_until(job, lambda item: len(item["members"]) == 4 and item["generation"] > 1)
    assert {peer.identity.peer_id for peer in peers} == set(item["members"])
    await cluster.job_until(job, at(item["step"] + 2))
    await cluster.ask("jobs.pause", job=job)
    await cluster.job_until(job, lambda item: item["state"] == "paused")
    held = await by_stage(cluster, peers)
    assert [len(stage) for stage in held] == [2, 2]
    for stage in held:
        assert len({part_of(peer).state.digest() for peer in stage}) == 1, "members of one stage differ"


async def test_after_a_restart_of_everything_each_worker_has_its_stage_again(cluster: Cluster) -> None:
    profile = split_profile(2, 1, steps=200)
    job = await cluster.create(profile)
    peers = [cluster.join(slot=number) for number in (1, 2)]
    await cluster.job_until(job, at(1))
    before = [[peer.identity.peer_id for peer in stage] for stage in await by_stage(cluster, peers)]
    await cluster.saved(job, 8, 2)
    for peer in peers:
        await peer.die()
    await cluster.restart_seed()
    again = [cluster.join(slot=number) for number in (2, 1)]  # the other one comes first
    await cluster.job_until(job, at(20))
    held = await by_stage(cluster, again)
    await cluster.job_until(job, done)
    assert [[peer.identity.peer_id for peer in stage] for stage in held] == before
    assert whole_of([stage[0] for stage in held]) == unsplit_run(profile, 1)[0]
    assert any("resuming from" in text for peer in again for _, _, text in peer.told)


async def test_going_back_to_a_step_needs_a_checkpoint_of_every_stage(cluster: Cluster) -> None:
    profile = split_profile(2, 1, steps=4000)
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(2)]
    await cluster.job_until(job, at(9))
    await cluster.ask("jobs.pause", job=job)
    paused = await cluster.job_until(job, lambda item: item["state"] == "paused")
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    holders = Counter(item["step"] for item in saved if item["stage"] is not None)
    step = min(step for step, count in holders.items() if count == 2)  # one may be told of before the other
    alike = [item for item in saved if item["step"] == step]
    chosen = next(item for item in alike if item["stage"] == 1)
    assert step < paused["step"]
    hidden = [Path(item["path"]) for item in alike if item["stage"] != 1]  # of stage 0, and of the whole model
    for path in hidden:
        path.rename(path.with_name("away"))
    with pytest.raises(Refused, match=f"no checkpoint of step {step} in"):
        await cluster.ask("checkpoints.restore", id=chosen["id"])
    for path in hidden:
        path.with_name("away").rename(path)
    await cluster.ask("checkpoints.restore", id=chosen["id"])
    item = await cluster.job_until(job, lambda item: item["state"] == "running")
    views = (await cluster.ask("jobs.views", job=job, after_generation=0))["views"]
    assert [view["step"] for view in views] == [0, step]
    assert len(item["members"]) == 2
    await next(peer for peer in peers if peer.identity.peer_id != chosen["peer_id"]).die()
    await cluster.job_until(job, lambda item: item["state"] != "running")  # the seed knows of it
    kept = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]  # newer ones have taken its place
    here = next(item for item in kept if item["peer_id"] == chosen["peer_id"])
    with pytest.raises(Refused, match="only"):
        await cluster.ask("checkpoints.restore", id=here["id"])
    await cluster.ask("jobs.cancel", job=job)
