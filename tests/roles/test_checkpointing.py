"""Checkpoints beside the steps: a run whose disk hangs goes on, and tells of a checkpoint when it is there."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import Refused, StorageError
from p2ptrain.core.threads import RealThreads
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from roles.compute_thread import ComputeThread
from roles.snapshots import Snapshots
from roles.worker import checkpoint_store
from roles.worker.checkpoint_store import CheckpointFiles, Checkpointing
from tests.roles.in_process import Cluster, Gate

STEPS = 13


class HangingDisk(RealDisk):
    """Hangs in the middle of a checkpoint until it is let go; then it may be broken."""

    def __init__(self) -> None:
        self.hangs, self.go = threading.Event(), threading.Event()
        self.broken = False
        self.concerned = re.compile("")

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        if not self.concerned.search(str(path)):
            super().append_file(path, data)
            return
        self.hangs.set()
        assert self.go.wait(30), "the test never let go"
        if self.broken:
            raise StorageError(f"cannot write {path}: Input/output error", remedy="another disk")
        super().append_file(path, data)


class HangingCluster(Cluster):
    """All its disks are one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, MemoryNetwork())
        self.disk: HangingDisk = HangingDisk()

    async def saved(self) -> set[int]:
        listed = (await self.ask("checkpoints.list"))["checkpoints"]
        return {item["step"] for item in listed}


def profile(every: int) -> Profile:
    tables: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "workers": 1},
        "batch": {"micro_batches": 2},
        "validation": {"every": 0},
        "checkpoint": {"every": every, "keep": 9},
    }
    return Profile.model_validate(tables)


class Desk:
    """A worker's files of one job and what is around them, for as many ``Checkpointing`` as a test makes."""

    def __init__(self, root: Path, tasks: asyncio.TaskGroup, disk: RealDisk) -> None:
        self.thread, self.compute = RealThreads().start("disk"), ComputeThread()
        self.told: list[str] = []
        self.files = CheckpointFiles(self.thread, disk, root, 2, lambda *notice: None)
        self._context: Any = SimpleNamespace(
            compute=self.compute, send=lambda message: None, notify=lambda *notice: self.told.append(notice[1])
        )
        self._about: Any = {"job": "j", "files": self.files, "snapshots": Snapshots(self.compute), "tasks": tasks}

    def checkpointing(self, where: Callable[[], tuple[int, int]], **more: Any) -> Checkpointing:
        return Checkpointing(self._context, **self._about, where=where, **more)


@asynccontextmanager
async def desk_at(root: Path, disk: RealDisk | None = None) -> AsyncIterator[Desk]:
    async with asyncio.TaskGroup() as tasks:
        desk = Desk(root, tasks, disk or RealDisk())
        yield desk
    desk.thread.close()
    desk.compute.close()


def meta(lineage: str) -> Any:
    return {"lineage": lineage * 32, "square_sum": 1.0}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[HangingCluster]:
    made = HangingCluster(tmp_path)
    await made.start_seed()
    yield made
    made.disk.go.set()
    await made.close()


async def test_steps_go_on_while_the_disk_hangs_and_the_last_waits_for_it(cluster: HangingCluster) -> None:
    job = await cluster.create(profile(every=6))
    peer = cluster.join()
    at_last = await cluster.job_until(job, lambda item: item["step"] == STEPS)
    assert await asyncio.to_thread(cluster.disk.hangs.wait, 30), "the writer runs when the CPU is idle"
    assert sorted(peer.steps) == list(range(1, STEPS + 1)), "not one step waited for the disk"
    assert at_last["state"] != "done", "the end waits for its checkpoint"
    assert await cluster.saved() == set(), "nothing is told before it is durable"
    cluster.disk.go.set()
    await cluster.job_until(job, lambda item: item["state"] == "done")
    assert await cluster.saved() == {6, 12, STEPS}
    kinds = [kind for _, kind, _ in peer.told]
    assert kinds.count("checkpoint-saved") == 3
    assert "checkpoint-failed" not in kinds


@pytest.mark.parametrize("broken", [False, True], ids=["hangs", "broken"])
async def test_stages_never_lose_the_newest_state_that_all_have_saved(cluster: HangingCluster, broken: bool) -> None:
    """One stage's disk takes nothing more after step 4: the others, who save on, keep what goes with its checkpoint."""
    cluster.disk.concerned, cluster.disk.broken = re.compile(r"stage-1-of-2.*new-0*([5-9]|[1-9]\d+)-"), broken
    if broken:
        cluster.disk.go.set()
    tables: dict[str, dict[str, Any]] = {
        "job": {"steps": 10_000, "workers": 2, "strategy": "pipeline"},
        "batch": {"micro_batches": 2},
        "pipeline": {"stages": 2},
        "validation": {"every": 0},
        "checkpoint": {"every": 1, "keep": 2},
    }
    job = await cluster.create(Profile.model_validate(tables))
    peers = [cluster.join(), cluster.join()]
    assert await asyncio.to_thread(cluster.disk.hangs.wait, 20)
    since = (await cluster.job_until(job, lambda item: item["step"] >= 5))["step"]
    await cluster.job_until(job, lambda item: item["step"] >= since + 20)
    kept = [{int(path.name[5:]) for path in cluster.root.glob(f"*/jobs/*/stage-{stage}-of-2/checkpoints/step-*")}
            for stage in (0, 1)]  # fmt: skip
    assert kept[0] & kept[1], f"no state is whole: {kept}"
    listed = (await cluster.ask("checkpoints.list", job=job))["checkpoints"]
    known = [{item["step"] for item in listed if item["stage"] == stage} for stage in (0, 1)]
    assert known[0] & known[1], f"the seed knows of none that is whole: {known}"
    if not broken:
        (hangs_at,) = cluster.root.glob("*/jobs/*/stage-1-of-2/checkpoints/.new-*")
        assert max(kept[0]) <= int(hangs_at.name[5:13]), "none saves on alone"
    told = [text for peer in peers for _, kind, text in peer.told if kind == "checkpoint-failed"]
    assert told, "the one whose disk it is says so"
    cluster.disk.go.set()
    for peer in peers:
        await peer.die()


@pytest.mark.parametrize("stages", [1, 2])
async def test_a_run_does_not_end_for_a_broken_disk_but_before_its_result_is_on_one(
    cluster: HangingCluster, stages: int
) -> None:
    cluster.disk.broken = True
    cluster.disk.go.set()
    made = profile(every=6)
    if stages > 1:
        parts = {"job": {"steps": STEPS, "workers": 2, "strategy": "pipeline"}, "pipeline": {"stages": 2}}
        made = Profile.model_validate(made.model_dump() | parts)
    job = await cluster.create(made)
    peers = [cluster.join() for _ in range(stages)]
    held = await cluster.job_until(job, lambda item: item["state"] == "saving")
    assert held["step"] == STEPS
    assert "Input/output error; another disk" in held["reason"]
    assert await cluster.saved() == set()
    assert "checkpoint-failed" in [kind for _, kind, _ in peers[0].told]
    assert not list(cluster.root.glob("worker-1/jobs/**/checkpoints/.new-*")), "what was begun is cleared"
    cluster.disk.broken = False
    while (await cluster.ask("jobs.list"))["jobs"][0]["state"] == "saving":
        with suppress(Refused):  # it may have ended meanwhile
            await cluster.ask("jobs.save", job=job)
    ended = await cluster.job_until(job, lambda item: item["state"] == "done")
    assert (ended["step"], await cluster.saved()) == (STEPS, {STEPS})


async def test_a_save_that_was_skipped_for_a_busy_disk_is_made_up_for_once(tmp_path: Path) -> None:
    soon: list[bool] = []
    slow, engine = HangingDisk(), StandInEngine(Profile())
    async with desk_at(tmp_path, slow) as desk:
        checkpoints = desk.checkpointing(lambda: (4, 0), save_soon=lambda: soon.append(checkpoints.idle))
        for step in (1, 2, 3):  # memory has room for two copies
            await checkpoints.save(engine, meta(f"{step}"), step=step, wait=False)
        assert soon == [], "the disk is busy"
        slow.go.set()
        await checkpoints.wait_written()
        assert soon == [True]
        await checkpoints.save(engine, meta("4"), step=4, wait=True)
        assert soon == [True]
        assert [entry.step for entry in await desk.files.entries()] == [4, 2]


async def test_a_worker_whose_disk_is_broken_claims_no_result_and_ends_with_the_reason(cluster: HangingCluster) -> None:
    cluster.disk.broken = True
    cluster.disk.go.set()
    job = await cluster.create(profile(every=0))
    peer = cluster.join()
    await cluster.job_until(job, lambda item: item["state"] == "saving")
    assert [text for _, kind, text in peer.told if kind == "done"] == ["trained: all 13 steps; not saved here"]
    with pytest.raises(StorageError, match=r"step 13 is not saved here: .* Input/output error"):
        await peer.leave()
    cluster.peers.remove(peer)  # its end was expected
    peer.identity.release()


def saved_by(root: Path, number: int) -> list[str]:
    return [path.name for path in root.glob(f"worker-{number}/jobs/*/checkpoints/step-*")]


async def test_the_last_worker_that_leaves_saves_also_in_the_middle_of_a_long_step(tmp_path: Path) -> None:
    cluster, gate = Cluster(tmp_path, MemoryNetwork()), Gate(5)
    await cluster.start_seed()
    try:
        long = Profile.model_validate(profile(every=0).model_dump() | {"job": {"steps": 100, "workers": 2}})
        job = await cluster.create(long)
        first, last = (cluster.join(gate.build, slot=slot) for slot in (1, 2))
        await cluster.job_until(job, lambda item: item["step"] == 5)
        await first.leave()
        assert saved_by(tmp_path, 1) == [], "the other keeps the state"
        leaving = asyncio.create_task(last.leave())
        await last.hears("saving step 5, which no other worker keeps")
        gate.away()
        await leaving
        assert saved_by(tmp_path, 2) == ["step-00000005"]
    finally:
        gate.away()
        await cluster.close()


async def test_a_worker_that_leaves_without_a_seed_saves(tmp_path: Path) -> None:
    cluster, gate = Cluster(tmp_path, MemoryNetwork()), Gate(5)
    await cluster.start_seed()
    try:
        job = await cluster.create(Profile.model_validate(profile(every=0).model_dump() | {"job": {"workers": 1}}))
        peer = cluster.join(gate.build, slot=1)
        await cluster.job_until(job, lambda item: item["step"] == 5)
        await cluster.stop_seed()
        leaving = asyncio.create_task(peer.leave())
        await peer.hears("saving step 5")
        gate.away()
        await leaving
        assert saved_by(tmp_path, 1) == ["step-00000005"]
        await cluster.start_seed()
        cluster.join(slot=1)
        await cluster.peers[-1].hears("resuming from")
    finally:
        gate.away()
        await cluster.close()


async def test_who_waits_for_a_save_waits_for_its_end_and_not_for_one_that_will_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "STANDSTILL_S", 0.05)
    engine, lineage, progress = StandInEngine(Profile()), "0" * 32, itertools.count()
    async with desk_at(tmp_path) as desk:
        checkpoints = desk.checkpointing(lambda: (3, next(progress)))
        early = asyncio.create_task(checkpoints.wait_for_save(4, lineage))
        await asyncio.wait([early], timeout=0.2)
        assert not early.done(), "this member is on its way there"
        async with asyncio.timeout(10):
            came_by = desk.checkpointing(lambda: (5, next(progress)))
            await came_by.wait_for_save(4, lineage)  # and saved nothing
            await came_by.wait_for_save(4, "1" * 32)
            await desk.checkpointing(lambda: (3, 0)).wait_for_save(4, lineage)  # it stands still before
        busy = threading.Event()
        blocked = asyncio.create_task(desk.compute.run(busy.wait, 20))
        saving = asyncio.create_task(checkpoints.save(engine, meta("0"), step=4, wait=False))
        await asyncio.wait([early], timeout=0.2)
        assert not early.done(), "it is being saved"
        busy.set()
        await asyncio.gather(blocked, saving)
        async with asyncio.timeout(10):
            await early
        assert [entry.step for entry in await desk.files.entries()] == [4]


async def test_a_ring_that_breaks_while_the_state_is_copied_costs_no_checkpoint(tmp_path: Path) -> None:
    engine, busy = StandInEngine(Profile()), threading.Event()
    async with desk_at(tmp_path) as desk:
        checkpoints = desk.checkpointing(lambda: (4, 0))
        before = asyncio.create_task(desk.compute.run(busy.wait, 20))
        boundary = asyncio.create_task(checkpoints.save(engine, meta("0"), step=4, wait=False))
        for _ in range(3):
            await asyncio.sleep(0)  # it has asked for the copy
        boundary.cancel()
        await asyncio.wait([boundary])
        after = asyncio.create_task(desk.compute.run(engine.state.load_initial))
        expected = engine.state.digest()
        busy.set()
        await asyncio.gather(before, after)
        await checkpoints.wait_written()
        assert desk.told == ["checkpoint-saved"]
        entry = await desk.files.verify(4)
        saved = StandInEngine(Profile())
        saved.state.load(entry.path)
        assert saved.state.digest() == expected != engine.state.digest(), "what came after it is not in it"
