"""Copies of a seed: complete or not there, private, and restored in a higher term or refused with the reason."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from configs.loader import load
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.world import World, real_world
from p2ptrain.lab.memory import MemoryNetwork, run_virtual
from p2ptrain.lab.sim.machine import Died, MachineDisk, Process
from roles.seed.authority import Authority
from roles.seed.run import COPY_NAME, Backup, _watch_directory, restore, write_copy
from roles.seed.server import Seed
from roles.seed.store import JobRecord, Records, SeedStore
from tests.roles.in_process import Cluster

JOB = JobRecord("j1", "first", "tiny", "sync", 2, 4, 100, 5.0)


async def copied(tmp_path: Path, *, encrypted: bool = True) -> tuple[Path, World]:
    world = real_world(MemoryNetwork())
    store = await SeedStore.open(world.disk, tmp_path / "seed", world.threads)
    await store.call(Records.add_job, JOB, "spec")
    await store.call(Records.add_job, dataclasses.replace(JOB, id="j2", state="done"), "spec")
    directory = tmp_path / "seed" / "authority"
    authority = Authority.open(world.disk, directory, name="n", now=0.0) if encrypted else None
    seed = cast(Seed, SimpleNamespace(world=world, store=store))
    backup = Backup(seed, authority, tmp_path / "copies", asyncio.Event())
    await backup.write()
    backup.close()
    await store.close()
    return tmp_path / "copies", world


async def test_a_restored_seed_has_all_of_it_in_a_higher_term(tmp_path: Path) -> None:
    copies, world = await copied(tmp_path)
    assert copies.stat().st_mode & 0o777 == 0o700
    assert (copies / COPY_NAME).stat().st_mode & 0o777 == 0o600
    found = [restore(world.disk, copies, tmp_path / name) for name in ("one", "two")]
    assert [(item.encrypted, item.term) for item in found] == [(True, 1), (True, 2)], "the copy keeps the term"
    for file in ("ca.key", "ca.pem", "tickets.json"):
        source = tmp_path / "seed" / "authority" / file
        assert not source.exists() or (tmp_path / "two" / "authority" / file).read_bytes() == source.read_bytes()
    store = await SeedStore.open(world.disk, tmp_path / "two", world.threads)
    jobs = [job for job, _ in await store.call(Records.jobs)]
    assert {job.id: job.unsettled for job in jobs} == {"j1": True, "j2": False}
    assert await store.call(Records.fact, "term", "0") == "2"
    await store.close()
    with pytest.raises(UserError, match="already has a seed's database"):
        restore(world.disk, copies, tmp_path / "two")


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 900, None])
async def test_what_is_no_copy_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    copies, world = await copied(tmp_path, encrypted=False)
    if damage is None:
        with sqlite3.connect(copies / COPY_NAME) as database:
            database.execute("PRAGMA user_version = 99")
    else:
        (copies / COPY_NAME).write_bytes(damage)
    with pytest.raises(StorageError, match=r"damaged|another release"):
        restore(world.disk, copies, tmp_path / "new")
    assert not (tmp_path / "new" / "seed.sqlite3").exists()
    with pytest.raises(UserError, match="no backup"):
        restore(world.disk, tmp_path, tmp_path / "new")


def test_a_kill_or_a_power_cut_leaves_the_old_copy_or_the_new_one() -> None:
    found = set()
    for number in range(200):
        disk, process = MachineDisk(random.Random(number)), Process("seed")
        write_copy(disk.view_for(process), Path("/backup"), b"old")
        disk.die_in = disk.calls + 1 + number % 8

        def killed(process: Process = process) -> None:
            process.alive = False

        disk.killed = killed
        try:
            write_copy(disk.view_for(process), Path("/backup"), b"new")
        except Died:
            found.add("died")
        disk.power_cut()
        found.add(disk.view_for(Process("seed")).read(Path("/backup") / COPY_NAME, max_bytes=9))
    assert found == {"died", b"old", b"new"}


async def test_a_copy_that_cannot_be_written_is_told_of_once(tmp_path: Path) -> None:
    world = real_world(MemoryNetwork())
    store = await SeedStore.open(world.disk, tmp_path / "seed", world.threads)
    (tmp_path / "file").write_bytes(b"")
    told: asyncio.Queue[str] = asyncio.Queue()
    requested = asyncio.Event()
    announcements = SimpleNamespace(note=lambda level, kind, text: told.put_nowait(text))
    seed = cast(Seed, SimpleNamespace(world=world, store=store, announcements=announcements))
    backup = Backup(seed, None, tmp_path / "file" / "copies", requested)
    running = asyncio.create_task(backup.run())
    async with asyncio.timeout(10):
        requested.set()
        text = await told.get()
        assert "no backup is made" in text
        assert "choose another place with --backup" in text
    running.cancel()
    await asyncio.wait([running])
    backup.close()
    await store.close()
    assert isinstance(world.disk, RealDisk)


async def test_a_seed_whose_database_is_removed_ends_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "seed")
    assert cluster._seed is not None
    with pytest.raises(StorageError, match=r"seed\.sqlite3 was removed while the seed ran") as caught:
        await asyncio.wait_for(cluster._seed, 60)
    assert "seed --restore DIR" in caught.value.remedy
    await cluster.start_seed(cluster.address[1])


class Unlisted(RealDisk):
    """The disk of a process without a free file descriptor."""

    looks = 0

    def list_dir(self, path: Path) -> list[str]:
        self.looks += 1
        raise StorageError(f"cannot list {path}: Too many open files")


def test_a_directory_that_cannot_be_listed_is_not_called_removed(tmp_path: Path) -> None:
    disk = Unlisted()

    async def main() -> None:
        watching = asyncio.create_task(_watch_directory(disk, tmp_path))
        while disk.looks < 3:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1.0)
        assert not watching.done()
        watching.cancel()

    run_virtual(main())


async def await_event(cluster: Cluster, part: str) -> None:
    async with asyncio.timeout(60):
        while True:
            events = (await cluster.ask("events.list"))["events"]
            if any(part in event["text"] for event in events):
                return
            await asyncio.sleep(0.1)


async def test_a_seed_that_lost_its_records_leaves_the_unfinished_job_to_its_workers(
    cluster: Cluster, tmp_path: Path
) -> None:
    made = load("tiny", {}, ["job.steps=3000", "job.workers=2", "validation.every=0"]).profile
    workers = [cluster.join() for _ in range(2)]
    job = await cluster.create(made)
    await cluster.job_until(job, lambda item: item["step"] >= 5)
    await cluster.stop_seed()
    shutil.rmtree(tmp_path / "seed")
    await cluster.start_seed(cluster.address[1])
    await await_event(cluster, f"job {job} of cluster")
    assert [peer.worker._runner.job for peer in workers] == [job, job]
    assert (await cluster.ask("peers.list"))["peers"] == []
