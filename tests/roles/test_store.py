"""The seed's memory: what comes back after a restart, what is dropped, what is refused."""

from __future__ import annotations

import dataclasses
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError, UserError
from ring.coordination import JobWorker
from ring.replicas import with_shares
from ring.token import balance_counts
from ring.view import View
from roles.seed import store as module
from roles.seed.store import CheckpointChange, JobRecord, Records, SeedStore
from wire.records import CheckpointInfo, EventInfo, MetricRow

JOB = JobRecord("j1", "first", "tiny", "sync", workers=2, micro_batches=8, steps_total=400, created_at=1.0)


def view(generation: int, step: int, *peer_ids: str) -> View:
    peers = [JobWorker(peer_id, peer_id.upper(), "10.0.0.1", 7000) for peer_id in peer_ids]
    return View(
        "j1", generation, step, f"L{step}", with_shares(peers, balance_counts(8, [0] * len(peers)), peer_ids[:1]), 2.5
    )


def row(step: int, **values: float) -> MetricRow:
    return MetricRow(job="j1", step=step, wall=float(step), **values)  # type: ignore[arg-type]


def event(number: int) -> EventInfo:
    return EventInfo(number, 1.0, "info", "kind", f"text {number}", peer="p", job="j1")


@pytest.fixture
def kept(tmp_path: Path) -> Records:
    return Records(tmp_path / "seed.sqlite3")


def test_jobs_come_back_oldest_first_with_their_specs(kept: Records, tmp_path: Path) -> None:
    kept.add_job(dataclasses.replace(JOB, id="j2", created_at=2.0), "{2}")
    kept.add_job(JOB, "{1}")
    kept.save_job(dataclasses.replace(JOB, state="running", paused=True))
    kept.close()
    found = Records(tmp_path / "seed.sqlite3").jobs()
    assert [(job.id, job.state, job.paused, spec) for job, spec in found] == [
        ("j1", "running", True, "{1}"),
        ("j2", "waiting", False, "{2}"),
    ]


def test_a_view_and_its_jobs_branch_become_durable_together(kept: Records) -> None:
    kept.add_job(JOB, "{1}")
    kept.add_view(view(1, 0, "a"), dataclasses.replace(JOB, branch=["a"]))
    assert kept.jobs()[0][0].branch == ["a"]
    with pytest.raises(StorageError):
        kept.add_view(view(1, 3, "b"), dataclasses.replace(JOB, branch=["b"]))
    assert kept.jobs()[0][0].branch == ["a"]


def test_a_forgotten_job_leaves_nothing_behind_but_the_diary(kept: Records) -> None:
    for job in ("j1", "j2"):
        kept.add_job(dataclasses.replace(JOB, id=job), "{}")
        kept.add_view(dataclasses.replace(view(1, 0, "a"), job=job), JOB)
        kept.add_rows([dataclasses.replace(row(1), job=job), event(1)])
        kept.add_rows([CheckpointChange(CheckpointInfo(f"{job}@9@p", job, 9, "/c", "p", "p", "d", 5, 1.0))])
    assert ([item.id for item in kept.checkpoints("j1")], kept.checkpoints("none")) == (["j1@9@p"], [])
    kept.forget_job("j1")
    assert [job.id for job, _ in kept.jobs()] == ["j2"]
    assert (kept.last_view("j1"), kept.last_metrics("j1", 9)) == (None, [])
    assert [item.job for item in kept.checkpoints()] == ["j2"]
    assert len(kept.last_metrics("j2", 9)) == len(kept.events(0, 9)) == 1
    assert kept.last_view("j2") is not None


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_number_that_sqlite_does_not_hold_is_a_storage_error(kept: Records, value: int) -> None:
    with pytest.raises(StorageError):
        kept.add_rows([row(value)])
    kept.add_rows([row(1)])


def test_old_rows_are_dropped(kept: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVENTS_KEPT", "METRICS_KEPT", "VIEWS_KEPT"):
        monkeypatch.setattr(module, name, 3)
    kept.add_rows([row(step) for step in range(1, 10)] + [event(number) for number in range(1, 10)])
    for generation in range(1, 10):
        kept.add_view(view(generation, 99, "a"), JOB)
    assert [item.step for item in kept.metrics("j1", 0, 100)] == [7, 8, 9]
    assert [item.id for item in kept.events(0, 100)] == [7, 8, 9]
    assert kept.last_event_id() == 9
    assert kept._one("SELECT count(*) FROM views") == 3


def test_every_commit_reaches_the_disk(kept: Records) -> None:
    assert kept._one("PRAGMA journal_mode") == "wal"
    assert kept._one("PRAGMA synchronous") == 2  # FULL


def test_what_is_no_store_is_said_to_be_damaged(tmp_path: Path) -> None:
    (tmp_path / "seed.sqlite3").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="not a database") as caught:
        Records(tmp_path / "seed.sqlite3")
    assert "move seed.sqlite3 away" in caught.value.remedy


def test_the_store_of_another_release_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "seed.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StorageError, match="another release"):
        Records(tmp_path / "seed.sqlite3")


def test_a_full_disk_is_named_and_leaves_the_store_whole(kept: Records) -> None:
    kept._db.execute("PRAGMA max_page_count = 20").fetchall()
    with pytest.raises(StorageError, match="full") as caught:
        kept.add_rows([row(step) for step in range(5_000)])
    assert "free some space" in caught.value.remedy
    assert kept.metrics("j1", -1, 10) == []
    kept.add_rows([row(1)])


# --------------------------------------------------------------------------------------------- the event loop's side


async def test_the_state_directory_is_its_owners_only_and_one_seeds_only(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    first = await SeedStore.open(RealDisk(), directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with pytest.raises(UserError, match="another seed is running") as caught:
        await SeedStore.open(RealDisk(), directory)
    assert "--state" in caught.value.remedy
    await first.close()
    await (await SeedStore.open(RealDisk(), directory)).close()


async def test_what_was_added_is_there_when_a_call_returns(tmp_path: Path) -> None:
    store = await SeedStore.open(RealDisk(), tmp_path)
    store.add(row(1))
    store.add(event(1))
    assert await store.call(Records.metrics, "j1", 0, 10) == [row(1)]
    assert await store.call(Records.events, 0, 10) == [event(1)]
    await store.close()


async def test_rows_are_durable_before_too_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    store = await SeedStore.open(RealDisk(), tmp_path)
    with closing(sqlite3.connect(tmp_path / module.FILE_NAME)) as other:
        for step, stored in ((1, 0), (2, 2)):
            store.add(row(step))
            await store.make_room()
            assert other.execute("SELECT count(*) FROM metrics").fetchone() == (stored,)
    await store.close()
