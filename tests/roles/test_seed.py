"""The seed's shell over memory, against scripted workers that speak the messages and real operators."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, Refused
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from ring.detector import beat_defaults
from roles.seed import events
from roles.seed.admission import is_passing
from roles.seed.peers import ring_beats, seed_beats
from roles.seed.run import serving_seed
from roles.seed.server import Seed
from roles.seed.store import Records
from tests.roles.in_process import ScriptedProbe
from tests.roles.scripted import DEADLINE_S, HOST, ScriptedPeer, lineage_of
from wire.client import SeedClient
from wire.connection import Connection
from wire.handshake import SOFTWARE, dial, local_hello
from wire.job_messages import (
    Assign,
    CheckpointSaved,
    Hold,
    Release,
    Report,
    SaveNow,
    StepMetrics,
)
from wire.messages import (
    EventNotice,
    Leave,
    Message,
    RefusalCode,
    Refuse,
    Request,
    Response,
)
from wire.records import EventInfo
from wire.transport import no_answer, unreachable

SPEC = Profile.model_validate(
    {"job": {"workers": 2, "steps": 100}, "batch": {"micro_batches": 4}, "checkpoint": {"keep": 2}}
).to_spec()


class Bench:
    """One seed, and whoever a test brings to it."""

    def __init__(self, root: Path) -> None:
        self.network, self.root, self.probe = MemoryNetwork(), root, ScriptedProbe()
        self.address = (HOST, 0)
        self.stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._workers: list[ScriptedPeer] = []

    async def start(self) -> None:
        ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        (host, port), world = (
            self.address,
            World(LoopClock(), self.network, RealDisk(), random.Random(0), probe=self.probe),
        )

        async def serve(stop: asyncio.Event) -> None:
            async with serving_seed(world, state_dir=self.root, host=host, port=port, name="seed") as listening:
                ready.set_result(listening.address)
                await stop.wait()

        self._task = asyncio.create_task(serve(self.stop))
        both: set[asyncio.Future[Any]] = {self._task, ready}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
        if self._task.done():
            await self._task
        self.address = ready.result()

    async def end(self) -> None:
        """Stop the seed. It has a second for it, and as long again here."""
        assert self._task is not None
        self.stop.set()
        async with asyncio.timeout(2.0):
            await self._task

    async def kill(self) -> None:
        """The seed's process is gone: nothing is said, nothing more is written."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def worker(self, peer_id: str, role: str = "worker", **more: Any) -> ScriptedPeer:
        worker = ScriptedPeer(self.network, self.address, peer_id, (role,))
        self._workers.append(worker)
        await worker.listen()
        await worker.join(**more)
        return worker

    async def ring(self, *peer_ids: str, applied: int = 0) -> list[ScriptedPeer]:
        """A job and its running view."""
        await self.ask("jobs.create", name="first", profile="tiny", spec=SPEC)
        workers = [await self.worker(peer_id) for peer_id in peer_ids]
        for worker in workers:
            await worker.assigned(applied)
        for worker in workers:
            await worker.viewed()
        return workers

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[SeedClient]:
        client = await SeedClient.connect(self.network, *self.address, name="test")
        try:
            yield client
        finally:
            await client.close()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        async with self.operator() as client:
            return await client.request(method, params)

    async def refused(self, method: str, **params: Any) -> Refused:
        with pytest.raises(Refused) as caught:
            await self.ask(method, **params)
        return caught.value

    async def until(self, topic: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first record of an update that fits."""
        async with asyncio.timeout(DEADLINE_S), self.operator() as client:
            await client.request("subscribe")
            async for update in client.updates():
                for item in update.items if update.topic == topic else []:
                    if fits(item):
                        return item
        raise AssertionError("the updates ended")

    async def job_is(self, state: str) -> dict[str, Any]:
        return await self.until("jobs", lambda job: bool(job["state"] == state))

    async def event(self, kind: str) -> dict[str, Any]:
        return await self.until("events", lambda event: bool(event["kind"] == kind))

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            await self.end()
        for worker in self._workers:
            await worker.close()


def test_what_led_to_a_state_is_told_before_it() -> None:
    """Who waits for a job's end stops reading there: it must know by then that no checkpoint was written."""
    feed = events.Subscription(lambda topic, item_id: {"id": item_id, "state": "done"})
    feed.touch("jobs", ["job1"])
    feed.add([EventInfo(1, 0.0, "error", "checkpoint-failed", "no checkpoint: the disk is full")])
    assert [update.topic for update in feed.drain()] == ["events", "jobs"]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "state")
    await made.start()
    yield made
    await made.close()


# --------------------------------------------------------------------------------------------------------- who comes in


async def test_a_worker_is_dialled_back_and_welcomed_with_beats_that_fit_the_distance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "least_rtt_s", 0.001)  # as TCP's kernel tells it, however busy this process is
    worker = await bench.worker("a")
    assert (worker.welcome.heartbeat_s, worker.welcome.death_s) == (0.25, 2.0)
    await worker.beaten()
    (peer,) = (await bench.ask("peers.list"))["peers"]
    assert (peer["id"], peer["name"], peer["state"], peer["device"]) == ("a", "name-a", "training", "cpu")
    assert (peer["tokens_per_s"], peer["memory_bytes"]) == (5.0, 7)
    assert peer["address"] == f"127.0.0.1:{worker.server.address[1]}"


async def test_who_cannot_be_dialled_back_is_admitted_as_behind_a_router(bench: Bench) -> None:
    worker = await bench.worker("a", port=1)
    assert "cannot reach 127.0.0.1:1" in worker.welcome.unreached
    assert (worker.welcome.heartbeat_s, worker.welcome.death_s) == beat_defaults(50), "it may be far away"
    (peer,) = (await bench.ask("peers.list"))["peers"]
    assert (peer["address"], peer["router"]) == ("a.peer:1", "127.0.0.1")
    assert "behind a router at 127.0.0.1: cannot reach" in (await bench.event("joined"))["text"]


async def test_two_machines_of_one_name_are_told_apart(bench: Bench) -> None:
    for peer_id in ("a", "0123456789ab"):
        await bench.worker(peer_id, name="vm-1")
    assert {peer["name"] for peer in (await bench.ask("peers.list"))["peers"]} == {"vm-1", "vm-1-0123"}


async def test_a_peer_that_only_checks_is_dialled_back_and_not_listed(bench: Bench) -> None:
    worker = ScriptedPeer(bench.network, bench.address, "a")
    await worker.listen()
    hello = local_hello(peer_id="a", name="a", roles=["worker"], purpose="probe", port=worker.server.address[1])
    connection, _ = await dial(bench.network, *bench.address, hello, timeout_s=DEADLINE_S)
    await connection.close()
    await worker.close()
    connection, welcome = await dial(bench.network, *bench.address, hello, timeout_s=DEADLINE_S)
    await connection.close()
    assert "cannot reach" in welcome.unreached
    assert (await bench.ask("peers.list"))["peers"] == []


@pytest.mark.parametrize(
    ("problem", "passing"),
    [
        (no_answer("10.0.0.2", 7339, 10), True),
        (Refused(RefusalCode.BUSY, "too many handshakes"), True),
        (unreachable("10.0.0.2", 7339, TimeoutError(), 5), False),
        (Refused(RefusalCode.IDENTITY, "another peer answers"), False),
    ],
)
def test_a_slow_peer_tries_again_and_a_closed_port_is_that_of_a_router(problem: P2PTrainError, passing: bool) -> None:
    assert is_passing(problem) == passing


def test_a_seed_without_file_descriptors_takes_nobody_for_behind_a_router() -> None:
    problem = unreachable("10.0.0.2", 7339, OSError(errno.EMFILE, ""), 5)
    problem.__cause__ = OSError(errno.EMFILE, "")
    assert is_passing(problem)


async def test_a_peer_at_whose_address_another_one_answers_is_behind_a_router(bench: Bench) -> None:
    other = await bench.worker("b")
    worker = await bench.worker("a", port=other.server.address[1])
    assert "another peer, b, answers" in worker.welcome.unreached


async def test_a_second_worker_of_the_same_id_is_refused_while_the_first_is_there(bench: Bench) -> None:
    first = await bench.worker("a")
    await first.beaten()
    with pytest.raises(Refused, match="already here") as caught:
        await bench.worker("a")
    assert caught.value.code == RefusalCode.DUPLICATE_PEER
    assert "--state" in caught.value.remedy
    await first.beaten()


@pytest.mark.parametrize("purpose", ["ring", "heal", "nonsense"])
async def test_a_seed_answers_no_member(bench: Bench, purpose: str) -> None:
    hello = local_hello(peer_id="a", name="a", roles=[], purpose=purpose)
    with pytest.raises(Refused) as caught:
        await dial(bench.network, *bench.address, hello, timeout_s=DEADLINE_S)
    assert caught.value.code == RefusalCode.ROLE


async def test_a_closed_link_is_a_death_notice_and_a_leave_is_not(bench: Bench) -> None:
    for peer_id in ("a", "b"):
        await bench.worker(peer_id)
    bench._workers[0].connection.abort()
    bench._workers[1].say(Leave("enough"))
    assert (await bench.event("lost"))["peer"] == "a"
    left = await bench.event("left")
    assert (left["peer"], left["text"]) == ("b", "name-b left: enough")
    peers = (await bench.ask("peers.list"))["peers"]
    assert {peer["id"]: peer["state"] for peer in peers} == {"a": "lost", "b": "left"}


async def test_a_leave_counts_though_the_answer_to_what_came_before_it_can_no_longer_be_sent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> None:
        raise ConnectionLost("a closed the connection")

    worker = await bench.worker("a")
    monkeypatch.setattr(Seed, "_handle", answer)
    worker.say(EventNotice("info", "stopped", "leaving", ""))
    worker.say(Leave("enough"))
    assert (await bench.event("left"))["peer"] == "a"


NONSENSE = {
    "status": Report("", 1, "resting", 0, 0, lineage_of(0)),
    "two prepared": Report("", 1, "held", 5, 7, lineage_of(5)),
    "lineage": Report("", 1, "held", 0, 0, "L" * 32),
    "no lineage": Report("", 1, "held", 0, 0, ""),
    "failed with nonsense": Report("", 1, "failed", 0, 0, "nonsense"),
    "no prepared lineage": Report("", 1, "held", 0, 1, lineage_of(0), prepared_lineage=""),
    "prepared lineage": Report("", 1, "held", 0, 1, lineage_of(0), prepared_lineage="L" * 32),
    "a step too many": Report("", 1, "held", 101, 101, lineage_of(0)),
    "metrics of a step too many": StepMetrics("", 1, 101, {}),
    "checkpoint of a step too many": CheckpointSaved("", 101, "/c", "d", 5),
    "kind": Hold("", 1, "a seed says this"),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_ends_the_link_and_says_why(bench: Bench, nonsense: Message) -> None:
    worker, _ = await bench.ring("a", "b")
    assert isinstance(nonsense, Report | Hold | StepMetrics | CheckpointSaved)
    worker.say(dataclasses.replace(nonsense, job=worker.job))
    assert (await worker.hear(Refuse)).code == RefusalCode.PROTOCOL
    await asyncio.wait_for(worker.connection.closed.wait(), DEADLINE_S)


# ---------------------------------------------------------------------------------------------------------------- jobs


async def test_from_offer_to_a_running_view(bench: Bench) -> None:
    created = await bench.ask("jobs.create", name="first", profile="tiny", spec=SPEC)
    a, b = [await bench.worker(peer_id) for peer_id in ("a", "b")]
    assign = await a.assigned()
    assert (assign.job, assign.spec, assign.corpus, assign.restore_step) == (created["job"], SPEC, "", -1)
    await b.assigned()
    view = await a.viewed()
    assert view == await b.viewed()
    assert (view.generation, view.step, view.lineage) == (1, 0, lineage_of(0))
    assert [(member.peer_id, member.first, member.count) for member in view.members] == [("a", 0, 2), ("b", 2, 2)]
    job = await bench.job_is("running")
    assert (job["members"], job["generation"], job["steps_total"]) == (["a", "b"], 1, 100)
    await a.beaten()
    peers = {peer["id"]: peer for peer in (await bench.ask("peers.list"))["peers"]}
    assert (peers["b"]["rank"], peers["b"]["share"], peers["b"]["job"]) == (1, 2, created["job"])


async def test_a_view_has_the_heartbeats_that_its_profile_chooses(bench: Bench) -> None:
    tables = Profile.from_spec_untrusted(SPEC).model_dump()
    tables["membership"] = {"heartbeat_s": 7.0, "death_s": 31.0}
    await bench.ask("jobs.create", name="first", profile="tiny", spec=Profile.model_validate(tables).to_spec())
    workers = [await bench.worker(peer_id) for peer_id in "ab"]
    for worker in workers:
        await worker.assigned()
    for worker in workers:
        view = await worker.viewed()
        assert (view.heartbeat_s, view.death_s) == (7.0, 31.0)


async def test_a_view_is_in_the_log_when_its_job_is_shown_as_running(bench: Bench) -> None:
    """Both while the store is still writing the view."""
    written = threading.Event()
    bench.probe.acts["stored"] = lambda facts: facts["method"] is Records.add_view and written.wait(2 * DEADLINE_S)
    await bench.ask("jobs.create", name="first", profile="tiny", spec=SPEC)
    try:
        async with asyncio.timeout(DEADLINE_S), bench.operator() as client:
            await client.request("subscribe")
            for peer_id in ("a", "b"):
                await (await bench.worker(peer_id)).assigned()
            seen: set[str] = set()
            async for update in client.updates():
                seen |= {str(item.get("state", item.get("kind"))) for item in update.items}
                if {"running", "view"} <= seen:
                    break
    finally:
        written.set()


async def test_a_restarted_seed_takes_the_ring_back_without_touching_it(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    a.say(StepMetrics(a.job, 1, 8, {"loss": 2.6, "tokens_per_s": 100.0, "step_ms": 3000.0}))
    a.say(StepMetrics(a.job, 1, 9, {"loss": 2.5, "tokens_per_s": 100.0, "step_ms": 1000.0}))
    await a.beaten()
    assert (await bench.ask("jobs.show", job="first"))["job"]["trained_s"] == 18.0, "nine steps of 2 s"
    await bench.end()
    assert (await a.hear(Refuse)).code == RefusalCode.SHUTTING_DOWN
    await bench.start()
    job = await bench.job_is("forming")
    assert (job["step"], job["loss"], job["generation"]) == (9, 2.5, 1)
    assert (job["tokens_total"], job["trained_s"]) == (900, 18.0)
    for worker in (a, b):
        await worker.connection.close()
        await worker.join(job=worker.job, generation=1)
        worker.report("training", 12)
    job = await bench.job_is("running")
    assert (job["step"], job["members"]) == (12, ["a", "b"])
    await a.beaten()  # nothing else was said to it


async def test_members_that_keep_a_result_which_is_on_no_disk_are_shown_as_held(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    for worker in (a, b):
        worker.report("done", 100)
    await bench.job_is("saving")
    await a.hear(SaveNow)
    await a.beaten("idle")
    assert {peer["id"]: peer["state"] for peer in (await bench.ask("peers.list"))["peers"]}["a"] == "held"
    assert (await bench.ask("jobs.save", job="first"))["job"] == a.job


async def test_pause_resume_save_and_cancel_reach_the_members(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    assert (await bench.ask("jobs.save", job="first"))["job"] == a.job
    for worker in (a, b):
        await worker.hear(SaveNow)
    await bench.ask("jobs.pause", job=a.job)
    for worker in (a, b):
        await worker.hear(SaveNow)
        assert (await worker.hear(Hold)).generation == 1
        worker.report("held", 3)
    await bench.job_is("paused")
    await a.beaten("held")
    assert {peer["id"]: peer["state"] for peer in (await bench.ask("peers.list"))["peers"]}["a"] == "paused"
    assert (await bench.refused("jobs.pause", job="first")).code == "wrong-state"
    assert (await bench.refused("jobs.save", job="first")).code == "wrong-state"
    await bench.ask("jobs.resume", job=a.job)
    assert (await a.viewed()).step == 3
    assert (await b.viewed()).generation == 2
    assert (await bench.refused("jobs.resume", job="first")).code == "wrong-state"
    await bench.ask("jobs.cancel", job=a.job)
    assert "cancelled" in (await a.hear(Release)).reason
    await b.hear(Release)
    assert (await bench.job_is("cancelled"))["finished_at"] is not None
    assert (await bench.refused("jobs.cancel", job="first")).code == "wrong-state"


async def test_a_job_that_is_not_found_or_cannot_change_so_is_refused_with_what_helps(bench: Bench) -> None:
    async def create(name: str) -> str:
        return str((await bench.ask("jobs.create", name=name, profile="tiny", spec=SPEC))["job"])

    async def told(method: str, job: str) -> tuple[str, str]:
        refusal = await bench.refused(method, job=job)
        assert refusal.exit_code == 2, "the request is at fault"
        return refusal.message, refusal.remedy

    jobs = [await create("mine")]
    remedy = "did you mean mine? see p2ptrain jobs list"
    assert await told("jobs.pause", "min") == ("there is no job 'min'", remedy)
    cause = "job mine is waiting and cannot be resumed: only a paused job can be"
    assert await told("jobs.resume", "mine") == (cause, "see p2ptrain jobs show")
    while len({job[0] for job in jobs}) == len(jobs):  # of 17 hexadecimal ids two begin alike
        jobs.append(await create("x"))
    same = [job for job in jobs if job[0] == jobs[-1][0]]
    cause = f"several jobs begin with '{same[0][0]}': {same[0]}, {same[1]}"
    assert await told("jobs.pause", same[0][0]) == (cause, "give more of the id")


async def test_a_pause_outlives_the_seed(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    await bench.ask("jobs.pause", job="first")
    for worker in (a, b):
        await worker.hear(SaveNow)
        await worker.hear(Hold)
    await bench.kill()
    await bench.start()
    assert (await bench.job_is("paused"))["members"] == ["a", "b"]
    await bench.ask("jobs.resume", job="first")


async def test_any_member_fills_the_gaps_in_the_metrics_and_repeats_change_nothing(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    job = a.job

    async def told(worker: ScriptedPeer, generation: int, *steps: int) -> list[tuple[int, float | None]]:
        for step in steps:
            worker.say(StepMetrics(job, generation, step, {"loss": float(generation)}))
        await worker.beaten()
        async with bench.operator() as client:
            return [(row.step, row.loss) async for row in client.all_metrics(job)]

    assert await told(a, 1, 1, 2, 5) == [(1, 1.0), (2, 1.0), (5, 1.0)]
    for worker in (a, b):
        worker.report("broken", 5)
    for worker in (a, b):
        assert (await worker.viewed()).generation == 2
        assert worker.view.ledger_step == 0, "of none of these steps it has the ledger row"
    assert await told(b, 2, 2, 4, 5) == [(1, 1.0), (2, 1.0), (4, 2.0), (5, 1.0)]
    assert await told(a, 2, 3, 6) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 1.0), (6, 2.0)]


async def test_jobs_queue_and_the_workers_go_to_the_next(bench: Bench) -> None:
    await bench.ask("jobs.create", name="second", profile="tiny", spec=SPEC)  # made first: it is the older one
    a, b = await bench.ring("a", "b")
    older = a.job
    jobs = {job["name"]: job for job in (await bench.ask("jobs.list"))["jobs"]}
    assert (jobs["second"]["id"], jobs["first"]["state"]) == (older, "queued")
    a.say(CheckpointSaved(older, 100, "/c/100", "d", 5))
    await a.beaten()
    for worker in (a, b):
        worker.report("done", 100)
    for worker in (a, b):
        assert (await worker.assigned()).job == jobs["first"]["id"]
    assert (await a.viewed()).job == jobs["first"]["id"]
    assert (await bench.job_is("done"))["id"] == older


async def test_a_worker_with_other_data_hears_what_to_do(bench: Bench) -> None:
    await bench.ask("jobs.create", name="first", profile="tiny", spec=SPEC)
    a, b = [await bench.worker(peer_id) for peer_id in ("a", "b")]
    await a.assigned()
    await a.beaten()
    b.job = (await b.hear(Assign)).job
    b.report("ready", corpus="decaf")
    assert "its data, tokenizer or base model differs" in (await b.hear(Release)).reason
    assert (await bench.event("corpus"))["level"] == "error"


# ------------------------------------------------------------------------------------------------ metrics, checkpoints


async def test_checkpoints_are_listed_as_their_holder_keeps_them_and_deleted_there(bench: Bench) -> None:
    a, _ = await bench.ring("a", "b")
    for step in (10, 20, 30, 10, 20, 30):  # a new connection repeats them
        a.say(CheckpointSaved(a.job, step, f"/c/{step}", "d", 5, 1.5, [step - 10, step]))
    await a.beaten()
    listed = (await bench.ask("checkpoints.list", job="first"))["checkpoints"]
    assert [item["step"] for item in listed] == [20, 30]
    assert (listed[0]["id"], listed[0]["val_loss"]) == (f"{a.job}@20@a", 1.5)

    deleting = asyncio.create_task(bench.ask("checkpoints.delete", id=f"{a.job}@20@a"))
    request = await a.hear(Request)
    assert (request.method, request.params) == ("checkpoint.delete", {"job": a.job, "step": 20})
    a.say(Response(request.id, {"deleted": 20}))
    assert (await deleting)["deleted"] == f"{a.job}@20@a"
    assert [item["step"] for item in (await bench.ask("checkpoints.list"))["checkpoints"]] == [30]


async def test_a_restore_that_the_seed_did_not_live_to_see_is_carried_out_by_the_next(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    for step in (10, 15):
        a.say(CheckpointSaved(a.job, step, f"/c/{step}", "d", 5, None, [10, 15]))
    await a.beaten()
    restoring = asyncio.create_task(bench.ask("checkpoints.restore", id=f"{a.job}@10@a"))
    a.say(Response((await a.hear(Request)).id, {"step": 10, "lineage": lineage_of(10)}))
    await restoring
    for worker in (a, b):
        await worker.hear(Hold)
        worker.report("held", 15)
    for worker in (a, b):
        assert (await worker.hear(Assign)).restore_step == 10
    await bench.kill()
    await bench.start()
    for worker in (a, b):
        await worker.connection.close()
        await worker.join(job=worker.job, generation=1)
        worker.report("ready", 10)
    for worker in (a, b):
        assert (await worker.assigned(10)).restore_step == 10
    assert (await a.viewed()).step == 10
    left = (await bench.ask("checkpoints.list"))["checkpoints"]
    assert [item["step"] for item in left] == [10]
    await b.viewed()
    for worker in (a, b):
        worker.report("training", 10)
    await bench.job_is("running")
    await bench.kill()
    await bench.start()  # once only
    for worker in (a, b):
        await worker.connection.close()
        await worker.join(job=worker.job, generation=2)
        worker.report("training", 12)
    await bench.job_is("running")
    await a.beaten()  # nothing else was said to it


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (Response(0, {}, "failed", "model.safetensors differs from what was written"), "failed"),
        (Response(0, {}, "not-here", "no such checkpoint"), "not-here"),
        (Response(0, {"step": 10, "lineage": "none"}), "damaged"),
        (Response(0, {"step": 11, "lineage": lineage_of(11)}), "damaged"),
    ],
    ids=["damaged", "gone", "no lineage", "another step"],
)
async def test_a_checkpoint_that_cannot_be_restored_is_refused_before_anybody_stops(
    bench: Bench, result: Response, code: str
) -> None:
    a, b = await bench.ring("a", "b")
    a.say(CheckpointSaved(a.job, 10, "/c/10", "d", 5))
    await a.beaten()
    restoring = asyncio.create_task(bench.refused("checkpoints.restore", id=f"{a.job}@10@a"))
    a.say(dataclasses.replace(result, id=(await a.hear(Request)).id))
    assert (await restoring).code == code
    assert (await bench.ask("jobs.show", job=a.job))["job"]["state"] == "running"
    for worker in (a, b):
        await worker.beaten()


async def test_other_parts_are_cut_from_a_whole_model_that_is_here(bench: Bench) -> None:
    a, _ = await bench.ring("a", "b")
    a.say(CheckpointSaved(a.job, 10, "/c/10", "d", 5))
    a.say(CheckpointSaved(a.job, 9, "/c/9", "d", 5, stage=1, stages=2))  # of an earlier layout: not recorded
    await a.beaten()
    assert [item["step"] for item in (await bench.ask("checkpoints.list"))["checkpoints"]] == [10]
    await a.connection.close()
    await bench.event("lost")
    problem = await bench.refused("checkpoints.restore", id=f"{a.job}@10@a", shards=2)
    assert (problem.code, "no connected worker has the whole model of step 10" in problem.message) == (
        "not-whole",
        True,
    )


async def test_a_job_that_is_over_can_be_forgotten(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    a.say(CheckpointSaved(a.job, 10, "/c/10", "d", 5))
    await a.beaten()
    problem = await bench.refused("jobs.forget", job="first")
    assert (problem.code, problem.remedy) == ("wrong-state", "cancel it first")
    await bench.ask("jobs.cancel", job="first")
    async with asyncio.timeout(DEADLINE_S), bench.operator() as client:
        await client.request("subscribe")
        await client.request("jobs.forget", {"job": "first"})
        gone: dict[str, list[dict[str, Any]]] = {}
        updates = client.updates()
        while not {"jobs-gone", "checkpoints-gone"} <= set(gone):
            update = await anext(updates)
            gone[update.topic] = update.items
    assert (gone["jobs-gone"], gone["checkpoints-gone"]) == ([{"id": a.job}], [{"id": f"{a.job}@10@a"}])
    assert (await bench.refused("jobs.show", job=a.job)).code == "unknown-job"
    await bench.end()
    await bench.start()
    assert (await bench.ask("jobs.list"))["jobs"] == (await bench.ask("checkpoints.list"))["checkpoints"] == []
    await b.connection.close()
    await b.join(job=a.job, generation=1)
    assert (await b.hear(Release)).job == a.job


async def test_a_paused_job_lets_its_workers_go_when_another_needs_them(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    first = a.job
    second = (await bench.ask("jobs.create", name="second", profile="tiny", spec=SPEC))["job"]
    await bench.ask("jobs.pause", job="first")
    for worker in (a, b):
        await worker.hear(SaveNow)
        await worker.hear(Hold)
    b.report("held", 3)
    a.report("held", 3)
    await a.beaten()
    shown = await bench.job_is("paused")
    assert shown["members"] == ["a", "b"]  # nobody has saved it: their memory is all there is
    a.say(CheckpointSaved(first, 3, "/c/3", "d", 5))
    for worker in (a, b):
        assert "paused" in (await worker.hear(Release)).reason
        assert (await worker.assigned()).job == second
    assert (await a.viewed()).job == second
    assert (await b.viewed()).job == second
    await bench.ask("jobs.resume", job="first")
    job = await bench.until("jobs", lambda job: bool(job["id"] == first and job["state"] == "queued"))
    assert job["reason"] == "another job has the workers"
    a.say(CheckpointSaved(second, 100, "/c/100", "d", 5))
    await a.beaten()
    for worker in (a, b):
        worker.report("done", 100)
    for worker in (a, b):
        assert (await worker.assigned(3)).job == first
    assert (await a.viewed()).step == 3


# ----------------------------------------------------------------------------------------------------------- operators


async def test_long_lists_are_cut_to_a_frame_and_say_so(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    for _ in range(150):
        await bench.ask("jobs.create", name="x" * 60, profile="y" * 60, spec=SPEC)
        await a.beaten()  # a busy machine takes longer than a silent worker lives
        await b.beaten()
    answer = await bench.ask("jobs.list")
    assert answer["total"] == 151
    assert 50 < len(answer["jobs"]) < 151
    assert answer["jobs"][0]["id"] == a.job  # the oldest, but it runs
    created = [job["created_at"] for job in answer["jobs"]]
    assert created == sorted(created)


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("jobs.create", {"name": "n", "profile": "p"}, "bad-parameter"),
        ("jobs.create", {"name": "n", "profile": "p", "spec": "{}{"}, "bad-spec"),
        ("jobs.create", {"name": "n", "profile": "p", "spec": '{"job": {"workers": -1}}'}, "bad-spec"),
        ("jobs.create", {"name": "n" * 100, "profile": "p", "spec": SPEC}, "bad-parameter"),
        ("jobs.create", {"name": "n", "profile": "p", "spec": "x" * (33 << 10)}, "bad-parameter"),
        ("jobs.pause", {"job": 5}, "bad-parameter"),
        ("jobs.set", {"job": "first", "values": {"optimizer.lr": "-1"}}, "bad-setting"),
        ("metrics.history", {"job": "first", "limit": 201}, "bad-parameter"),
        ("metrics.history", {"job": "first", "after_step": "x"}, "bad-parameter"),
        ("events.list", {"limit": True}, "bad-parameter"),
        ("checkpoints.restore", {}, "bad-parameter"),
        ("nonsense", {}, "unknown-method"),
    ],
)
async def test_bad_requests_are_refused_and_the_connection_lives_on(
    bench: Bench, method: str, params: dict[str, Any], code: str
) -> None:
    await bench.ask("jobs.create", name="first", profile="tiny", spec=SPEC)
    async with bench.operator() as client:
        with pytest.raises(Refused) as caught:
            await client.request(method, params)
        assert caught.value.code == code
        assert (await client.request("cluster.info"))["cluster"]["name"] == "seed"


async def test_a_job_with_a_setting_of_a_newer_version_is_refused_with_both_versions(bench: Bench) -> None:
    spec = json.dumps(json.loads(SPEC) | {"job": {"later": 1}})
    refused = await bench.refused("jobs.create", name="n", profile="p", spec=spec)
    assert "job.later" in refused.message
    assert refused.remedy == f"install the same version on both: the seed is {SOFTWARE}, the caller {SOFTWARE}"


async def test_a_seed_on_all_addresses_names_one_to_dial(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.address = ("0.0.0.0", 0)
    await bench.start()
    bench.address = (HOST, bench.address[1])
    async with bench.operator() as client:
        assert (await client.cluster()).address == f"{HOST}:{bench.address[1]}"
    await bench.end()


# ------------------------------------------------------------------------------------------------------------- updates


async def test_a_subscriber_that_does_not_read_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PATIENCE_S", 0.05)
    worker = await bench.worker("a")
    hello = local_hello(peer_id="op", name="op", roles=[], purpose="operator")
    connection, _ = await dial(bench.network, *bench.address, hello, timeout_s=DEADLINE_S)
    connection.send(Request(1, "subscribe"))
    await connection.expect(Response, timeout_s=DEADLINE_S)
    connection.pause_reading()
    async with asyncio.timeout(DEADLINE_S):
        while not connection.closed.is_set():
            worker.say(EventNotice("info", "noise", "x"))
            await worker.beaten()
            with suppress(ConnectionLost):
                connection.send(Request(2, "cluster.info"))  # who does not read learns of a reset when it writes
    await worker.beaten()  # everybody else is served
    await connection.close()


async def test_a_subscriber_that_is_too_many_rows_behind_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_ROWS", 2)
    feed, event = events.Subscription(lambda topic, item_id: None), EventInfo(1, 0.0, "info", "k", "t", "", "")
    feed.add([event, event])
    assert [update.topic for update in feed.drain()] == ["events"]
    feed.add([event, event, event])
    with pytest.raises(DeadlineExceeded, match="more than 2 rows behind"):
        await anext(feed.rounds())


async def test_an_event_that_had_to_wait_has_the_time_at_which_it_was(bench: Bench) -> None:
    worker = await bench.worker("a")
    worker.say(EventNotice("info", "hot", "an hour ago", age_s=3600))
    await worker.beaten()
    before, event = (await bench.ask("events.list", after_id=-2, limit=2))["events"]
    assert event["wall"] < before["wall"] - 3500


async def test_the_diary_is_paged_and_cleaned(bench: Bench) -> None:
    worker = await bench.worker("a")
    worker.say(EventNotice("shouting", "kind\x1b[31m", "red\x1b[31m text\nand more", job="unknown"))
    await worker.beaten()
    events = (await bench.ask("events.list", after_id=0, limit=200))["events"]
    assert (await bench.ask("events.list", after_id=-2, limit=200))["events"] == events[-2:]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    event = events[-1]
    assert (event["level"], event["text"], event["job"]) == ("info", "name-a: red [31m text and more", "")
    assert (await bench.ask("events.list", after_id=events[-1]["id"]))["events"] == []


# ---------------------------------------------------------------------------------------------------------- addresses


NEAR, FAR = beat_defaults(0.1), beat_defaults(80.0)


@pytest.mark.parametrize(
    ("rtts_ms", "latencies_s", "expected"),
    [
        ([], [], (0.0, 0.0)),
        ([0.1, 80.0], [1e-4, None], FAR),  # half measured
        ([0.1, 80.0], [1e-4, 1e-4], NEAR),  # slow only to join
        ([0.1, 0.1], [0.04, 1e-4], NEAR),  # never more than before
    ],
)
def test_a_ring_beats_as_its_own_links_allow(
    rtts_ms: list[float], latencies_s: list[float | None], expected: tuple[float, float]
) -> None:
    assert ring_beats(rtts_ms, latencies_s) == expected


@pytest.mark.parametrize(
    ("rtt_ms", "peers", "expected"), [(1, 1, (0.25, 2)), (1, 1000, (5, 15)), (100, 8, (5, 15)), (1, 200, (1, 3))]
)
def test_many_peers_beat_less_often(rtt_ms: float, peers: int, expected: tuple[float, float]) -> None:
    assert seed_beats(rtt_ms, peers) == expected


async def test_two_changes_at_once_follow_each_other(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    asked = [{"optimizer.lr": "0.002", "job.steps": "200"}, {"optimizer.lr": "0.001"}]
    await asyncio.gather(*(bench.ask("jobs.set", job=a.job, values=values) for values in asked))
    for worker in (a, b):
        await worker.hear(Hold)
        worker.report("held", 3)
    changes = (await a.viewed()).changes
    rates = [change for change in changes if change.key == "optimizer.lr"]
    assert rates[1].before == rates[0].value


async def test_worker_that_comes_after_a_change_gets_the_profile_of_the_beginning(bench: Bench) -> None:
    tables = Profile.from_spec_untrusted(SPEC).model_dump()
    tables["data"]["format"] = "chat"  # the seed adds the date to the profile that it sends
    spec = Profile.model_validate(tables).to_spec()
    await bench.ask("jobs.create", name="first", profile="tiny", spec=spec)
    a, b = [await bench.worker(peer_id) for peer_id in "ab"]
    first, _ = [(await worker.assigned(0)).spec for worker in (a, b)]
    for worker in (a, b):
        await worker.viewed()
        worker.report("training", 0)
    await bench.ask("jobs.set", job=a.job, values={"optimizer.lr": "0.001"})
    for worker in (a, b):
        await worker.hear(Hold)
        worker.report("held", 3)
    await a.viewed()
    late = await bench.worker("c")
    assert (await late.hear(Assign)).spec == first


async def test_job_that_may_end_early_goes_on_with_more_steps(bench: Bench) -> None:
    tables = Profile.from_spec_untrusted(SPEC).model_dump()
    tables["validation"] |= {"every": 10, "patience": 3}
    await bench.ask("jobs.create", name="first", profile="tiny", spec=Profile.model_validate(tables).to_spec())
    a, b = [await bench.worker(peer_id) for peer_id in "ab"]
    for worker in (a, b):
        await worker.assigned(0)
    for worker in (a, b):
        await worker.viewed()
    a.say(CheckpointSaved(a.job, 100, "/c/100", "d", 5))
    await a.beaten()
    for worker in (a, b):
        worker.report("done", 100)
    await bench.job_is("done")
    setting = asyncio.create_task(bench.ask("jobs.set", job=a.job, values={"job.steps": "200"}))
    a.say(Response((await a.hear(Request)).id, {"step": 100, "lineage": lineage_of(100)}))
    assert (await setting)["job"] == a.job


async def test_seed_starts_though_another_release_changed_a_setting_that_it_does_not_know(bench: Bench) -> None:
    await bench.ask("jobs.create", name="first", profile="tiny", spec=SPEC)
    await bench.end()
    records = Records(bench.root / "seed.sqlite3", RealDisk())
    record = records.jobs()[0][0]
    records.save_job(dataclasses.replace(record, changes=[[3, "optimizer.new", "1", "2"]]))
    records.close()
    await bench.start()
    assert (await bench.ask("jobs.list"))["total"] == 1


async def test_change_that_was_asked_for_is_kept_by_a_new_layout(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    a.say(CheckpointSaved(a.job, 10, "/c/10", "d", 5))
    await bench.ask("jobs.pause", job=a.job)
    for worker in (a, b):
        await worker.hear(SaveNow)
        await worker.hear(Hold)
        worker.report("held", 10)
    await bench.job_is("paused")
    await bench.ask("jobs.set", job=a.job, values={"optimizer.lr": "0.001"})
    restoring = asyncio.create_task(bench.ask("checkpoints.restore", id=f"{a.job}@10@a", shards=2))
    a.say(Response((await a.hear(Request)).id, {"step": 10, "lineage": lineage_of(10)}))
    await restoring
    for worker in (a, b):
        await worker.hear(Release)
    for worker in (a, b):
        await worker.assigned(10)
    assert [change.value for change in (await a.viewed()).changes] == ["0.001"]
