"""Split jobs whose model's sizes are known: the seed cuts and places them by what workers tell of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.errors import Refused
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.lab.stand_in import StandInEngine
from ring.planning.workloads import ModelShape
from roles.engine import Stage
from roles.seed.peers import ConnectedPeer
from tests.roles.in_process import Cluster, Peer
from tests.roles.stage_stand_in import StandIns
from wire.handshake import local_hello
from wire.messages import Heartbeat

MIB = 1 << 20
SHAPE = ModelShape.of(ModelSizes((8 * MIB,) * 12, (0,) * 12, 4 * MIB, 4 * MIB, 0), 64, 128, 256)
PROFILE = Profile.model_validate(
    {
        "job": {"steps": 6, "workers": 2, "strategy": "pipeline"},
        "model": {"layers": 12},
        "batch": {"micro_batches": 4, "micro_batch_sequences": 1},
        "pipeline": {"stages": 2},
        "validation": {"every": 0, "batches": 1},
        "checkpoint": {"every": 3, "copies": 1},
    }
)


class Replica:
    """Workers of a cluster that give so much memory and are so fast, and the cuts that they were told."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cuts: list[list[int]] = []

    async def join(self, memory_mib: int, flops: float | None) -> Peer:
        def build(profile: Profile, stage: Stage) -> StandInEngine:
            self.cuts.append(profile.pipeline.cuts)
            return StandInEngine(profile, stage=stage)

        holding = StandIns(limit_bytes=memory_mib * MIB, compute_flops=flops).holding
        peer = self.cluster.join(holding=holding, build_part=build)
        await peer.joined.wait()
        return peer


def done(item: dict[str, Any]) -> bool:
    return bool(item["state"] == "done")


async def test_the_seed_cuts_by_speed_keeps_the_cuts_and_tells_who_stays_a_spare(cluster: Cluster) -> None:
    replica = Replica(cluster)
    slow, fast, small = [await replica.join(*told) for told in ((900, 1e9), (900, 3e9), (20, 1e9))]
    plan = await cluster.ask("jobs.plan", spec=PROFILE.to_spec(), shape=SHAPE.to_map())
    layers = {stage["peers"][0]: stage["stop"] - stage["start"] for stage in plan["stages"]}
    assert layers == {slow.identity.peer_id: 3, fast.identity.peer_id: 9}
    assert plan["plan"]["spares"] == [small.identity.name]
    assert plan["plan"]["tokens_per_s"] > 0
    job = await cluster.create(PROFILE, shape=SHAPE.to_map())
    info = await cluster.job_until(job, lambda item: item["step"] >= 2)
    (cut,) = info["cuts"]
    assert cut == plan["stages"][1]["start"]
    shown = await cluster.ask("jobs.show", job=job)
    assert shown["spec"] == PROFILE.to_spec(), "the profile stays as it was given"
    events = (await cluster.ask("events.list"))["events"]
    assert any(event["kind"] == "too-small" and small.identity.name in event["text"] for event in events)
    await cluster.restart_seed()
    info = await cluster.job_until(job, done)
    assert info["cuts"] == [cut]
    assert replica.cuts == [[cut], [cut]]


async def test_what_does_not_fit_is_refused_with_the_numbers_and_waits_for_who_fits(cluster: Cluster) -> None:
    replica = Replica(cluster)
    with pytest.raises(Refused, match="the job needs 2 workers, but only 0 are free"):
        await cluster.ask("jobs.plan", spec=PROFILE.to_spec(), shape=SHAPE.to_map())
    await replica.join(300, 1e9)
    await replica.join(100, 1e9)
    with pytest.raises(Refused, match="the smallest needs") as caught:
        await cluster.ask("jobs.plan", spec=PROFILE.to_spec(), shape=SHAPE.to_map())
    assert caught.value.code == "does-not-fit"
    assert all(given in caught.value.message for given in ("300.0 MiB", "100.0 MiB"))
    job = await cluster.create(PROFILE, shape=SHAPE.to_map())
    await cluster.job_until(job, lambda item: "the smallest needs" in item["reason"])
    assert not replica.cuts
    await replica.join(900, 1e9)
    await cluster.job_until(job, done)
    assert len(replica.cuts) == 2


async def test_sizes_that_cannot_be_are_refused(cluster: Cluster) -> None:
    for wrong in ({"width": 1}, "no", {**SHAPE.to_map(), "layers_bytes": [8] * 11}):
        with pytest.raises(Refused) as caught:
            await cluster.create(PROFILE, shape=wrong)
        assert caught.value.code == "bad-shape"
    with pytest.raises(Refused, match="a plan requires a split model"):
        await cluster.ask("jobs.plan", spec=Profile().to_spec())


def link_of(beats: list[dict[str, float]], **said: Any) -> ConnectedPeer:
    hello = local_hello(peer_id="a", name="a", roles=["worker"], purpose="peer", port=1, capabilities=said)
    nothing: Any = None
    link = ConnectedPeer(nothing, hello, "h", 1, 0.0, 0.0, nothing)
    for stats in beats:
        link.take_heartbeat(Heartbeat(0, 0, 0, "idle", stats))
    return link


def test_what_a_worker_says_of_itself_is_checked() -> None:
    for wrong in ("much", True, -5, float("nan"), None):
        assert link_of([], parts_memory_bytes=wrong).offer.memory_bytes == 0
    assert link_of([], parts_memory_bytes=1 << 70).offer.memory_bytes == 2**53
    assert link_of([]).flops == 0.0, "it is not going to tell"
    assert link_of([{}], gauges=True).flops is None
    assert link_of([{}, {"compute_flops": 2e9}], gauges=True).flops == 2e9
    for wrong_s in (-1.0, float("inf"), float("nan")):
        assert link_of([{"compute_flops": wrong_s}], gauges=True).flops == 0.0
    assert link_of([{"compute_flops": 1.0}]).take_heartbeat(Heartbeat(0, 0, 0, "idle", {"compute_flops": 2.0}))
