"""Checkpoints of a split job: workers put the parts of all stages together, and stages take theirs out again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.checkpoints import (
    ADAPTER,
    CheckpointEntry,
    is_part,
    of_the_whole,
    part_of,
    read_checkpoint,
    shard_name,
    verify_checkpoint,
)
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.tensor_files import ADAPTER_FILE, TensorTable, header_of
from p2ptrain.core.training import FilePlan
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine, StandInState
from ring import coordination
from roles.engine import Stage
from tests.roles.in_process import Cluster, Gate, Peer
from tests.roles.test_cluster import done
from tests.roles.test_staged import unsplit_run
from tests.roles.test_staged import whole_of as whole_state_of


@pytest.fixture(autouse=True)
def saves_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ring.coordinator.SAVE_AGAIN_S", 0.2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who is away does not come back, and is not waited for long."""
    monkeypatch.setattr(coordination, "GRACE_S", 0.5)
    return


def profile_of(steps: int = 30, **tables: dict[str, Any]) -> Profile:
    base: dict[str, Any] = {
        "job": {"steps": steps, "workers": 2, "strategy": "pipeline"},
        "batch": {"micro_batches": 4},
        "validation": {"every": 0},
        "checkpoint": {"every": 10, "copies": 2},
        "pipeline": {"stages": 2},
    }
    for name, values in tables.items():
        base[name] = base.get(name, {}) | values
    return Profile.model_validate(base)


async def wholes_of(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    found = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    return [item for item in found if item["stage"] is None]


def said(peer: Peer, kind: str) -> list[str]:
    return [text for _, told, text in peer.told if told == kind]


def parts_below(root: Path) -> list[CheckpointEntry]:
    """The checkpoints of stages, in the order of the stages."""
    found = [read_checkpoint(RealDisk(), path.parent) for path in root.rglob("manifest.json")]
    return sorted(filter(is_part, found), key=lambda each: str(each.meta["stage"]))


async def test_when_a_job_is_done_every_keeper_has_the_whole_model(cluster: Cluster, tmp_path: Path) -> None:
    job = await cluster.create(profile_of())
    peers = [cluster.join() for _ in range(2)]
    await cluster.job_until(job, done)
    found = await wholes_of(cluster, job)
    assert {item["peer_id"] for item in found if item["step"] == 30} == {peer.identity.peer_id for peer in peers}
    parts = [part for part in parts_below(tmp_path) if part.step == 30]
    assert len(parts) == 2
    files = {name: facts for part in parts for name, facts in part.files.items()}
    for item in [item for item in found if item["step"] == 30]:
        entry = read_checkpoint(RealDisk(), Path(item["path"]))
        verify_checkpoint(RealDisk(), entry)
        assert (entry.files, entry.meta) == (files, of_the_whole(parts[0].meta))


class AdaptedState(StandInState):
    """Its checkpoints also have a stage's file of adapters, with one tensor."""

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        name = shard_name(ADAPTER, self.stage.index, self.stage.count)
        header = header_of([(f"of-stage-{self.stage.index}", "F32", (1,), 4)], {})
        return [*super().checkpoint_files(step), FilePlan(name, (header, b"abcd" if self.stage.index else b"efgh"))]


class Adapted(StandInEngine):
    state_type = AdaptedState


async def test_the_adapters_of_all_stages_are_joined_in_one_file(cluster: Cluster) -> None:
    job = await cluster.create(profile_of())
    for _ in range(2):
        cluster.join(build_part=lambda profile, stage: Adapted(profile, stage=stage))
    await cluster.job_until(job, done)
    for item in await wholes_of(cluster, job):
        entry = read_checkpoint(RealDisk(), Path(item["path"]))
        verify_checkpoint(RealDisk(), entry)
        table = TensorTable(entry.path, ADAPTER_FILE)
        assert {name: bytes(table.read(name)) for name in table.entries} == {
            "of-stage-0": b"efgh",
            "of-stage-1": b"abcd",
        }
        assert ADAPTER_FILE not in part_of(entry, 0, 2)[1], "it is made anew of the stages' files"


def whole_of(peer: Peer, job: str) -> Path:
    """Where a worker keeps the whole model's checkpoints."""
    return peer.identity.directory / "jobs" / job / "checkpoints"


async def ended_undisturbed(cluster: Cluster, job: str, profile: Profile) -> None:
    await cluster.job_until(job, done)
    assert whole_state_of([peer for peer in cluster.peers if not peer.task.done()]) == unsplit_run(profile, 1)[0]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """At step 25: the checkpoints are those of 10 and 20. While one is being saved all go without the next: where the
    disk is slower than 10 of these steps, there would be none of 20, but for the stop before it."""
    made = Gate(15, 25)
    yield made
    made.away()


async def running(cluster: Cluster, profile: Profile, gate: Gate, slots: int) -> tuple[str, list[Peer]]:
    """A job of which every keeper has the whole of step 20: its id, and the members in order of their stages."""
    job = await cluster.create(profile)

    def part(profile: Profile, stage: Stage) -> StandInEngine:
        return StandInEngine(profile, stage=stage, on_micro_batch=gate.wait)

    for slot in range(1, slots + 1):
        cluster.join(slot=slot, build_part=part)
    await cluster.whole(job, 10, profile.checkpoint.copies)
    gate.on()
    await cluster.whole(job, 20, profile.checkpoint.copies)
    item = await cluster.job_until(job, lambda item: len(item["members"]) == 2)
    known = {peer.identity.peer_id: peer for peer in cluster.peers}
    return job, [known[peer_id] for peer_id in item["members"]]


def slot_of(peer: Peer) -> int:
    return int(peer.identity.directory.name.rpartition("-")[2])


async def lose(peer: Peer) -> None:
    """Its machine, with the disk."""
    await peer.die()
    shutil.rmtree(peer.identity.directory)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_spare_takes_over_a_stage_that_died_with_its_disk(
    tmp_path: Path, impatient: None, gate: Gate, encrypted: bool
) -> None:
    cluster = Cluster(tmp_path / "cluster", MemoryNetwork(), encrypted=encrypted)
    await cluster.start_seed()
    try:
        profile = profile_of(checkpoint={"copies": 1})
        job, members = await running(cluster, profile, gate, 3)
        await lose(members[1])
        gate.on()
        spare = next(peer for peer in cluster.peers if peer not in members)
        await ended_undisturbed(cluster, job, profile)
        assert said(spare, "taken") == [f"took the files of step 20 of part 1 of 2 from {members[0].identity.name}"]
        assert not said(spare, "no-checkpoint")
    finally:
        await cluster.close()


async def test_files_that_were_changed_are_not_taken(cluster: Cluster, impatient: None, gate: Gate) -> None:
    """The run goes back further, to a whole that is what it was."""
    profile = profile_of(checkpoint={"copies": 1})
    job, members = await running(cluster, profile, gate, 3)
    state = whole_of(members[0], job) / "step-00000020" / "state-00002-of-00002.bin"
    data = bytearray(state.read_bytes())
    data[5] ^= 1
    state.write_bytes(data)
    await lose(members[1])
    gate.on()
    spare = next(peer for peer in cluster.peers if peer not in members)
    await ended_undisturbed(cluster, job, profile)
    assert "does not match its manifest" in said(spare, "not-taken")[0]
    assert said(spare, "taken") == [f"took the files of step 10 of part 1 of 2 from {members[0].identity.name}"]
    assert not list(spare.identity.directory.rglob(".new-*")), "nothing is left of what was given up"


async def test_workers_that_come_back_to_other_stages_need_no_network(
    cluster: Cluster, impatient: None, gate: Gate
) -> None:
    """Both have the whole: each takes the part that it is given now out of its own."""
    profile = profile_of()
    job, members = await running(cluster, profile, gate, 2)
    jobs = [peer.identity.directory / "jobs" for peer in members]
    for peer in members:
        await peer.die()
    jobs[0].rename(jobs[0].with_name("aside"))
    jobs[1].rename(jobs[0])
    jobs[0].with_name("aside").rename(jobs[1])
    gate.on()
    again = [cluster.join(slot=slot_of(peer)) for peer in members]
    await ended_undisturbed(cluster, job, profile)
    for stage, peer in enumerate(again):
        assert said(peer, "taken") == [
            f"took the files of step 20 of part {stage} of 2 from {whole_of(peer, job) / 'step-00000020'}"
        ]


class FullDisk(RealDisk):
    """It has no room for whole checkpoints."""

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if "stage-" in str(path) else 100


class LyingDisk(RealDisk):
    """It reads zeros in place of the second part's moments."""

    def read_range(self, path: Path, start: int, stop: int) -> bytes:
        return bytes(stop - start) if path.name.startswith("state-00002") else super().read_range(path, start, stop)


async def test_no_room_for_the_whole_is_told_and_ends_nothing(cluster: Cluster) -> None:
    cluster.disk = FullDisk()
    profile = profile_of()
    job = await cluster.create(profile)
    peers = [cluster.join() for _ in range(2)]
    await ended_undisturbed(cluster, job, profile)
    assert not await wholes_of(cluster, job)
    for peer in peers:
        assert "cannot assemble the checkpoint of step 30: a checkpoint needs" in said(peer, "not-gathered")[-1]


async def test_a_person_may_go_back_to_a_whole_and_delete_one(cluster: Cluster, gate: Gate) -> None:
    profile = profile_of(300, checkpoint={"copies": 1})
    job, members = await running(cluster, profile, gate, 2)
    found = {item["step"]: item for item in await wholes_of(cluster, job)}
    await cluster.ask("checkpoints.restore", id=found[10]["id"])
    gate.on()
    await ended_undisturbed(cluster, job, profile)
    found = {item["step"]: item for item in await wholes_of(cluster, job)}
    await cluster.ask("checkpoints.delete", id=found[300]["id"])
    kept = {path.name[: len("superseded-step-00000020")] for path in whole_of(members[0], job).iterdir()}
    assert "superseded-step-00000020" in kept, "what was another future's is apart"
    assert "step-00000300" not in kept


async def test_a_sender_that_lies_is_named_and_nothing_is_left(cluster: Cluster) -> None:
    cluster.disk = LyingDisk()
    profile = profile_of(checkpoint={"copies": 1})
    job = await cluster.create(profile)
    for _ in range(2):
        cluster.join()
    await ended_undisturbed(cluster, job, profile)
    assert all(said(peer, "not-gathered") for peer in cluster.peers), "each has tried before the parts are enough"
    keeper, sender = sorted(cluster.peers, key=lambda peer: peer.engines[-1].stage.index)  # type: ignore[attr-defined]
    expected = f"state-00002-of-00002.bin of {sender.identity.name} does not match its manifest"
    assert expected in said(keeper, "not-gathered")[-1]
    assert not list(whole_of(keeper, job).iterdir())
