"""The seed's trackers: which rows a writer gets, and in which order, whatever happens between two of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import DiskFull, Refused
from p2ptrain.core.threads import RealThreads
from p2ptrain.lab.memory import MemoryNetwork
from ring.view import View
from roles.seed import tracking
from roles.seed.store import JobRecord, Records, SeedStore
from roles.seed.tracking import BATCH, GAP_S, MAX_NODES, RETRY_S, Tracker, Trackers
from roles.track.writers import Point, TrackedRun, Writer
from tests.roles.in_process import DEADLINE_S, Cluster, ScriptedProbe
from wire.records import JobInfo, MemberScore, MetricRow, PeerInfo, ServingInfo

KEY = "a-secret-key\tof-forty-characters-0123456"
PROFILE = Profile.model_validate({"track": {"to": ["jsonl"], "offline": True, "directory": "runs"}})


class Notes(Writer):
    """A writer that notes what it is told. It may refuse, or hang until it is released."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []  # id, after_step
        self.steps: list[int] = []
        self.ends: list[str] = []
        self.last: Point | None = None
        self.refuses = ""
        self.most = 0
        self.writes, self.go = threading.Event(), threading.Event()
        self.go.set()

    def begin(self, run: TrackedRun) -> None:
        self.runs.append((run.id, run.after_step))
        self.directory = run.directory

    def write(self, points: Sequence[Point]) -> None:
        self.writes.set()
        self.go.wait(DEADLINE_S)
        if self.refuses:
            raise ValueError(self.refuses)
        self.most = max(self.most, len(points))
        self.last = points[-1]
        self.steps += [point.step for point in points]

    def end(self, state: str) -> None:
        self.ends.append(state)


class Controller:
    """As much of a job's controller as a tracker sees, over a real store."""

    def __init__(self, store: SeedStore) -> None:
        self.id, self.profile, self.live = "job1", PROFILE, True
        self.core = SimpleNamespace(state="running", known_step=0)
        self.record = JobRecord("job1", "tiny", "tiny", "sync", 2, 4, 100, 1e9, finished_at=1e9 + 9)
        self._store = store

    def info(self) -> JobInfo:
        return JobInfo("job1", "tiny", "tiny", "sync", self.core.state, 1e9, 100, members=["w1"])

    async def save_cursor(self, tracker: str, cursor: Sequence[object]) -> None:
        self.record = dataclasses.replace(self.record, tracked={tracker: json.loads(json.dumps(cursor))})

    def ends(self, state: str, step: int) -> None:
        self.live, self.core = False, SimpleNamespace(state=state, known_step=step)


class Desk:
    """A tracker of a job, and the job's records."""

    def __init__(self, store: SeedStore, probe: ScriptedProbe) -> None:
        self.store, self.probe, self.now, self.notes = store, probe, 1e9, Notes()
        self.events: list[str] = []
        self.controller = Controller(store)
        peer = PeerInfo("w1", "one", ["worker"], "cpu", "training", "h:1", 1e9, memory_bytes=7)
        overview = SimpleNamespace(peer_infos=lambda: [peer], serving_infos=list)
        world = SimpleNamespace(clock=SimpleNamespace(wall=lambda: self.now), threads=RealThreads())
        self.controllers = {"job1": self.controller}
        seed = SimpleNamespace(
            world=world,
            store=store,
            jobs=SimpleNamespace(controllers=self.controllers, info=lambda controller: controller.info()),
            overview=overview,
            announcements=SimpleNamespace(note=lambda level, kind, text, peer, job: self.events.append(text)),
        )
        self.all = Trackers(
            seed=cast(Any, seed),
            directory=Path("track"),
            environ={"WANDB_API_KEY": KEY},
            writers={"jsonl": lambda track, environ: self.notes},
            every_s=0.001,
            leave_s=0.05,
        )
        self.tracker = self._tracker()

    def _tracker(self) -> Tracker:
        return Tracker(self.all, cast(Any, self.controller), "jsonl", PROFILE)

    def restart(self) -> None:
        """The seed starts again, with the record that it has stored."""
        self.tracker._thread.close()
        self.tracker = self._tracker()

    def add(self, *steps: int, generation: int = 1) -> None:
        for step in steps:
            self.store.add(MetricRow("job1", step, 1e9 + step, loss=2.0, generation=generation))

    async def view(self, generation: int, step: int) -> None:
        """A view begins: rows of later steps are gone."""
        view = View("job1", generation, step, "", ())
        await self.store.call(Records.add_view, view, self.controller.record)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    probe = ScriptedProbe()
    store = await SeedStore.open(RealDisk(), tmp_path, probe=probe)
    made = Desk(store, probe)
    await store.call(Records.add_job, made.controller.record, "{}")
    await made.view(1, 0)
    yield made
    made.tracker._thread.close()
    await store.close()


async def test_a_restarted_seed_goes_on_after_the_last_row_that_was_written(desk: Desk) -> None:
    desk.add(1, 2, 3)
    await desk.tracker.catch_up()
    desk.restart()
    desk.add(4, 5)
    await desk.tracker.catch_up()
    await desk.tracker.catch_up()
    assert desk.notes.steps == [1, 2, 3, 4, 5], desk.events
    assert desk.notes.runs == [("job1", 0), ("job1", 3)]
    assert desk.notes.directory == Path("track") / "runs" / "tiny-job1"
    assert desk.notes.last is not None
    assert desk.notes.last == Point(5, 1e9 + 5, {"train/loss": 2.0, "generation": 1.0, "node/w1/memory": 7.0})


async def test_a_job_that_goes_back_begins_a_new_run_there(desk: Desk) -> None:
    desk.add(1, 2, 3, 4)
    await desk.tracker.catch_up()
    await desk.view(2, 4)  # members changed, and nothing is taken back
    desk.add(5, generation=2)
    await desk.tracker.catch_up()
    assert desk.notes.runs == [("job1", 0)]
    await desk.view(3, 2)
    desk.add(3, 4, 5, generation=3)
    await desk.tracker.catch_up()
    desk.add(6, generation=3)
    await desk.tracker.catch_up()
    assert desk.notes.runs == [("job1", 0), ("job1-2", 2)]
    assert desk.notes.steps == [1, 2, 3, 4, 5, 3, 4, 5, 6]


async def test_a_row_that_comes_late_is_waited_for_but_not_for_ever(desk: Desk) -> None:
    desk.add(1, 3)
    await desk.tracker.catch_up()
    assert desk.notes.steps == [1]
    desk.add(2)
    await desk.tracker.catch_up()
    assert desk.notes.steps == [1, 2, 3]
    desk.add(5)
    await desk.tracker.catch_up()
    desk.now = 1e9 + 5 + GAP_S
    await desk.tracker.catch_up()
    assert desk.notes.steps == [1, 2, 3, 5]


async def test_a_job_that_is_done_ends_its_run_once_all_rows_are_there(desk: Desk) -> None:
    desk.add(1)
    desk.controller.ends("done", 2)
    await desk.tracker.catch_up()
    assert desk.notes.ends == []
    desk.add(2)
    await desk.tracker.catch_up()
    assert (desk.notes.steps, desk.notes.ends) == ([1, 2], ["done"])
    assert not desk.all.is_wanted(cast(Any, desk.controller), "jsonl")


async def test_a_seed_that_stops_after_its_job_waits_for_no_row(desk: Desk) -> None:
    desk.add(1, 3)
    desk.controller.ends("done", 4)
    desk.all.stopping.set()
    await desk.tracker.catch_up()
    assert (desk.notes.steps, desk.notes.ends) == ([1, 3], ["done"])


async def test_a_writer_that_fails_is_reported_once_without_keys_and_gets_the_rows_later(desk: Desk) -> None:
    desk.add(1, 2)
    desk.notes.refuses = f"the key {KEY} is wrong, {KEY.encode()}"
    for _ in range(2):
        assert await desk.tracker.catch_up() == RETRY_S
    (event,) = desk.events
    assert event.startswith(
        "job tiny is not written to jsonl: ValueError: the key (WANDB_API_KEY) is wrong, b'(WANDB_API_KEY)'; the"
    )
    desk.notes.refuses = ""
    assert await desk.tracker.catch_up() == desk.all.every_s
    assert desk.notes.steps == [1, 2]


async def test_a_seed_whose_records_cannot_be_written_does_not_go_on(desk: Desk) -> None:
    def fill(stored: dict[str, Any]) -> None:
        if stored["method"] is Records.add_rows:
            raise DiskFull("no room")

    desk.probe.acts["stored"] = fill
    desk.add(1)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(DiskFull):
            await desk.all.run()
    desk.probe.acts.clear()


async def test_a_job_that_is_forgotten_leaves_no_thread(desk: Desk) -> None:
    others = set(threading.enumerate())
    desk.add(1)
    looking = asyncio.create_task(desk.all.run())
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.to_thread(desk.notes.writes.wait, DEADLINE_S)
        (tracked,) = desk.all._tasks.values()
        (thread,) = (thread for thread in set(threading.enumerate()) - others if thread.name == "track")
        desk.controllers.clear()
        await tracked
        await asyncio.to_thread(thread.join, DEADLINE_S)
    looking.cancel()
    assert not thread.is_alive()


def test_a_batch_is_within_mlflow_s_limit() -> None:
    peers = [
        PeerInfo(f"w{n}", "n", ["worker"], "cpu", "training", "h:1", 1e9, memory_bytes=7, accepted=1) for n in range(99)
    ]
    scores = [MemberScore(peer.id, 1, 1, 0.5) for peer in peers]
    job = JobInfo("j", "n", "p", "sync", "running", 1e9, 9, members=[peer.id for peer in peers], scores=scores)
    serving = ServingInfo(
        id="v/m",
        peer="v",
        name="v",
        role="verifier",
        host="h",
        port=1,
        model="m",
        stats={"alpha": 0.5, "token_ms": 20.0},
    )
    figures = tracking.figures_of(job, peers, [serving])
    assert len(figures) == 4 * MAX_NODES + 4
    assert BATCH * len(tracking._COLUMNS) + len(figures) <= 1000


async def test_a_writer_that_hangs_holds_few_rows_and_no_stopping_seed(desk: Desk) -> None:
    desk.notes.go.clear()
    desk.add(*range(1, 2 * BATCH + 2))
    looking = asyncio.create_task(desk.all.run())
    assert await asyncio.to_thread(desk.notes.writes.wait, DEADLINE_S)
    looking.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await desk.all.close()
    assert desk.notes.steps == []
    desk.notes.go.set()
    desk.restart()  # what was written without being noted is void from ``after_step`` on
    await desk.tracker.catch_up()
    assert desk.notes.runs[-1] == ("job1", 0)
    assert desk.notes.most == BATCH
    assert desk.notes.steps[-1] == 2 * BATCH + 1


async def test_the_seed_tracks_a_job_and_refuses_one_that_it_cannot_track(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, MemoryNetwork(), tracker_environ={})
    await cluster.start_seed()
    try:
        tables = {"job": {"steps": 8, "workers": 1}, "batch": {"micro_batches": 2}}
        async with cluster.operator() as operator:
            for to, missing in (("wandb", "WANDB_API_KEY"), ("mlflow", "MLFLOW_TRACKING_URI")):
                monkeypatch.setattr("roles.track.writers.find_spec", lambda name: object())
                spec = Profile.model_validate(tables | {"track": {"to": [to]}}).to_spec()
                with pytest.raises(Refused, match=missing):
                    await operator.create_job("no", "tiny", spec)
            monkeypatch.setattr("roles.track.writers.find_spec", lambda name: None)
            spec = Profile.model_validate(tables | {"track": {"to": ["tensorboard"]}}).to_spec()
            with pytest.raises(Refused, match="the seed lacks the package tensorboard") as caught:
                await operator.create_job("no", "tiny", spec)
            assert "pip install 'tensorboard" in caught.value.remedy
            spec = Profile.model_validate(tables | {"track": {"to": ["jsonl"]}}).to_spec()
            job = await operator.create_job("a/b", "tiny", spec)
        cluster.join()
        await cluster.job_until(job, lambda info: bool(info["state"] == "done"))
        await cluster.restart_seed()  # which looks for rows at once
        await cluster.ask("jobs.list")
    finally:
        await cluster.close()
    lines = (tmp_path / "seed" / "track" / f"a_b-{job}" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
