"""The real seed and real workers in one process: a run, and what may happen to it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.training import Applied, OnFinal
from p2ptrain.lab.stand_in import StandInEngine
from tests.roles.in_process import Cluster, Gate, Peer, train_alone


def small_profile(**tables: dict[str, Any]) -> Profile:
    """A profile that is done in a second; tables given override single keys."""
    base: dict[str, dict[str, Any]] = {
        "job": {"steps": 12, "workers": 2},
        "batch": {"micro_batches": 8},
        "validation": {"every": 5, "batches": 3},
        "checkpoint": {"every": 4},
    }
    for name, values in tables.items():
        base[name] = base.get(name, {}) | values
    return Profile.model_validate(base)


LONG = 300
"""Steps in which a newcomer is brought to the state beside the ring, and let in."""


def state_of(peer: Peer) -> str:
    engine = peer.engines[-1]
    assert isinstance(engine, StandInEngine)
    return engine.state.digest()


def done(item: dict[str, Any]) -> bool:
    return item["state"] == "done"


def at(step: int) -> Any:
    return lambda item: item["step"] >= step


def undisturbed(profile: Profile) -> list[float]:
    """The loss of every step, of one process alone."""
    return train_alone(StandInEngine(profile), profile.job.steps, profile.batch.micro_batches)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
async def test_a_run_ends_with_the_same_bits_everywhere_and_the_losses_of_one_process(
    cluster: Cluster, workers: int
) -> None:
    profile = small_profile(job={"workers": workers})
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(workers)]
    ended = await cluster.job_until(job, done)
    assert (ended["step"], ended["steps_total"]) == (12, 12)
    assert len({state_of(peer) for peer in peers}) == 1
    for peer in peers:
        assert [text for _, kind, text in peer.told if kind == "done"] == [
            "the job is done: all 12 steps; waits for a new job"
        ]
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == pytest.approx(undisturbed(profile), rel=1e-5)
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [5, 10, 12]
    job = await cluster.create(small_profile(job={"workers": workers}, data={"validation_fraction": 0}))
    await cluster.job_until(job, done)
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert {row["val_loss"] for row in rows} == {None}, "no text is held out"
    saved = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    assert {item["step"] for item in saved} >= {8, 12}


async def test_a_member_leaves_within_two_seconds_and_the_others_go_on(cluster: Cluster) -> None:
    gate = Gate(4)
    job = await cluster.create(small_profile(job={"workers": 3}))
    peers = [cluster.join(gate.build) for _ in range(3)]
    await gate.reached(4)
    leaving = asyncio.create_task(peers[0].leave())
    gate.away()
    async with asyncio.timeout(2):
        await leaving
    await cluster.job_until(job, done)
    rows = (await cluster.ask("metrics.history", job=job, after_step=0, limit=100))["rows"]
    assert (rows[0]["members"], rows[-1]["members"]) == (3, 2)
    assert state_of(peers[1]) == state_of(peers[2])


async def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(cluster: Cluster) -> None:
    gate = Gate(9)
    job = await cluster.create(small_profile())
    peers = [cluster.join(gate.build) for _ in range(2)]
    await gate.reached(9)
    await cluster.saved(job, 8, 2)
    for peer in peers:
        await peer.die()
    gate.away()
    for slot in (1, 2):
        newest = cluster.root / f"worker-{slot}" / "jobs" / job / "checkpoints" / "step-00000008" / "state.bin"
        newest.write_bytes(newest.read_bytes()[:-1])
    again = [cluster.join(slot=slot) for slot in (1, 2)]
    await cluster.job_until(job, done)
    assert min(again[0].steps) == 5
    assert any(kind == "checkpoint-damaged" and "step-00000008" in text for _, kind, text in again[0].told)


class Drifting(StandInEngine):
    """Differs in one bit from step 6 on, as another kind of device might."""

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        applied = super().apply(step, square_sum)
        if step == 5:
            self.state.parameters.view("uint32")[0] ^= 1
        return applied


async def test_a_member_whose_state_drifts_is_healed_at_the_next_checkpoint(cluster: Cluster) -> None:
    job = await cluster.create(small_profile(job={"workers": 3, "steps": LONG}))
    peers = [cluster.join(engine) for engine in (StandInEngine, Drifting, StandInEngine)]
    await cluster.job_until(job, done)
    assert len({state_of(peer) for peer in peers}) == 1
    events = (await cluster.ask("events.list", after_id=0, limit=200))["events"]
    drifts = [event["text"] for event in events if event["kind"] == "drift"]
    assert len(drifts) == 1
    assert peers[1].identity.name in drifts[0]


class Telling(StandInEngine):
    def __init__(self, profile: Profile, **more: Any) -> None:
        super().__init__(profile, **more)
        self.notices.append(("warning", "there is no compiler"))


@pytest.mark.parametrize("strategy", ["sync", "server"])
async def test_what_an_engine_tells_is_a_notice_of_its_worker(cluster: Cluster, strategy: str) -> None:
    job = await cluster.create(small_profile(job={"strategy": strategy, "workers": 3, "steps": 12}))
    peers = [cluster.join(Telling) for _ in range(3)]
    await cluster.job_until(job, done)
    for peer in peers:
        assert peer.told.count(("warning", "compiling", "there is no compiler")) == 1


async def test_checkpoints_on_disk_are_made_known_to_a_seed_that_has_no_record_of_them(cluster: Cluster) -> None:
    gate = Gate(9)
    job = await cluster.create(small_profile())
    peers = [cluster.join(gate.build) for _ in range(2)]
    await cluster.saved(job, 8, 2)
    for peer in peers:
        await peer.die()
    gate.away()
    before = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    assert sorted(item["step"] for item in before) == [4, 4, 8, 8]
    await cluster.stop_seed()
    with contextlib.closing(sqlite3.connect(cluster.root / "seed" / "seed.sqlite3")) as record, record:
        record.execute("DELETE FROM checkpoints")
    await cluster.start_seed(cluster.address[1])
    assert (await cluster.ask("checkpoints.list", job=job))["checkpoints"] == []
    gate = Gate(9)  # no newer ones take their place
    for slot in (1, 2):
        cluster.join(gate.build, slot=slot)
    await cluster.knows({item["id"] for item in before})
    gate.away()


async def test_a_loss_that_is_not_finite_fails_the_job_with_the_reason(cluster: Cluster) -> None:
    class Diverging(StandInEngine):
        def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
            super().micro_batch(step, index, on_final)
            if step == 3:
                self.reduce_buffer[-1] = float("nan")

    job = await cluster.create(small_profile())
    for _ in range(2):
        cluster.join(Diverging)
    ended = await cluster.job_until(job, lambda item: item["state"] == "failed")
    assert "not finite" in ended["reason"]


async def test_a_worker_that_does_not_train_is_told_why(cluster: Cluster) -> None:
    member = cluster.join()
    await member.hears("idle: `p2ptrain jobs create` starts a job")
    profile = small_profile(job={"steps": 10**6, "workers": 1}, batch={"micro_batches": 1})
    job = await cluster.create(profile)
    await cluster.job_until(job, at(1))
    spare = cluster.join()
    await spare.hears("waiting: each micro-batch of a step has a worker")
    more = [cluster.join(), cluster.join()]
    await more[1].hears("idle: job test has the 3 workers that it can use")
    await cluster.ask("jobs.pause", job=job)
    for peer in (member, spare):
        await peer.hears("waiting: the job is paused")
    await cluster.ask("jobs.cancel", job=job)
