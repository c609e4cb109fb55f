"""The pool of a seed, against scripted workers and verifiers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2ptrain.core.errors import Refused
from tests.roles.scripted import ScriptedPeer, lineage_of
from tests.roles.test_seed import SPEC, Bench
from wire.job_messages import Assign, CheckpointSaved, Hold, Release, StepMetrics
from wire.messages import Request, Response
from wire.text_messages import DrafterList, DraftOrder, Serving

DRAFTS = {"allow": "train,serve,draft", "draft_tokenizer": "ab"}


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr("roles.seed.pool.REVIEW_S", 0.05)
    made = Bench(tmp_path / "state")
    await made.start()
    yield made
    await made.close()


async def create(bench: Bench, name: str, *, workers: int = 2, weight: float = 1.0) -> str:
    spec = json.loads(SPEC)
    spec["job"] |= {"workers": workers, "weight": weight}
    created = await bench.ask("jobs.create", name=name, profile="tiny", spec=json.dumps(spec))
    return str(created["job"])


async def test_new_job_gets_members_of_a_running_one_at_a_step_boundary(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    first = a.job
    c = await bench.worker("c")
    await c.assigned()
    for worker in (a, b):
        await worker.hear(Hold)
        worker.report("held", 0)
    ring = {worker.id: worker for worker in (a, b, c)}
    for worker in ring.values():
        await worker.viewed()
    ring[a.view.members[0].peer_id].say(StepMetrics(first, a.view.generation, 1, {"step_ms": 20_000.0}))
    await a.beaten()
    second = await create(bench, "second", workers=1)
    for worker in ring.values():
        assert "gets another task" in (await worker.hear(Hold)).reason
        worker.report("held", 1)
    moved = await bench.event("moved")
    assert "from job first to job second" in moved["text"]
    mover = ring.pop(moved["peer"])
    assert (await mover.hear(Release)).job == first
    assert (await mover.assigned()).job == second
    assert len((await mover.viewed()).members) == 1
    for worker in ring.values():
        assert len((await worker.viewed()).members) == 2
        assert worker.view.step == 1
    assert (await bench.ask("cluster.info"))["cluster"]["moves"] == 1


async def test_job_keeps_the_workers_that_it_asked_for(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    await create(bench, "second")
    job = await bench.until("jobs", lambda job: bool(job["name"] == "second"))
    assert job["state"] == "queued"
    for worker in (a, b):
        await worker.beaten()  # nobody was stopped
    heavy = await create(bench, "heavy", workers=1, weight=9.0)
    c = await bench.worker("c")
    assert (await c.hear(Assign)).job == heavy


async def test_owner_decides_what_a_worker_does(bench: Bench) -> None:
    job = await create(bench, "job", workers=1)
    idle = await bench.worker("a", capabilities={"allow": "serve"})
    await idle.beaten("idle")
    busy = await bench.worker("b")
    assert (await busy.hear(Assign)).job == job
    peers = {peer["id"]: peer["job"] for peer in (await bench.ask("peers.list"))["peers"]}
    assert peers == {"a": "", "b": job}


async def test_restore_takes_no_worker_whose_owner_lets_it_train_no_longer(bench: Bench) -> None:
    a, b = await bench.ring("a", "b")
    a.say(CheckpointSaved(a.job, 10, "/c/10", "d", 5))
    await a.beaten()
    await bench.ask("jobs.cancel", job=a.job)
    verifier = await bench.worker("v", "verifier")
    await verifier.hear(DrafterList)
    await verifier.say_and_wait(Serving("large", 100, 0, "ab", "", 0))
    for worker in (a, b):
        await worker.hear(Release)
    await a.connection.close()
    await a.join(capabilities=DRAFTS | {"allow": "draft"})
    assert (await a.hear(DraftOrder)).model == "large"
    restoring = asyncio.create_task(bench.ask("checkpoints.restore", id=f"{a.job}@10@a"))
    a.say(Response((await a.hear(Request)).id, {"step": 10, "lineage": lineage_of(10)}))
    await restoring
    await b.hear(Assign)
    peers = {peer["id"]: peer["job"] for peer in (await bench.ask("peers.list"))["peers"]}
    assert (peers["a"], peers["b"]) == ("", a.job)


async def test_idle_worker_drafts_until_a_job_needs_it(bench: Bench) -> None:
    verifier = await bench.worker("v", "verifier")
    await verifier.hear(DrafterList)
    await verifier.say_and_wait(Serving("large", 100, 0, "ab", "", 0))
    other = await bench.worker("other", capabilities=DRAFTS | {"draft_tokenizer": "cd"})
    drafter = await bench.worker("d", capabilities=DRAFTS)
    assert (await drafter.hear(DraftOrder)).model == "large"
    await drafter.say_and_wait(Serving("small", 100, 0, "ab", "", 0))
    listed = (await verifier.hear(DrafterList)).drafters
    assert [(item.peer_id, item.role) for item in listed] == [("d", "worker")]
    states = {peer["id"]: peer["state"] for peer in (await bench.ask("peers.list"))["peers"]}
    assert (states["d"], states["other"]) == ("drafting", "joining")
    job = await create(bench, "job")
    assert (await other.hear(Assign)).job == job
    assert (await drafter.hear(DraftOrder)).model == ""
    assert (await drafter.hear(Assign)).job == job
    assert (await verifier.hear(DrafterList)).drafters == []
    await bench.ask("jobs.cancel", job="job")
    await drafter.hear(Release)
    assert (await drafter.hear(DraftOrder)).model == "large"
    await verifier.connection.close()
    assert (await drafter.hear(DraftOrder)).model == "", "nobody is there to draft for"


async def ask_for_workers(verifier: ScriptedPeer, *holders: str, weights_bytes: int = 10) -> list[str]:
    params = {"model": "large", "weights_bytes": weights_bytes, "holders": list(holders)}
    verifier.say(Request(1, "workers.list", params))
    return [peer["id"] for peer in (await verifier.hear(Response)).result["peers"]]


async def test_split_model_gets_idle_workers_and_gives_them_back(bench: Bench) -> None:
    verifier = await bench.worker("v", "verifier")
    await verifier.hear(DrafterList)
    first, second = [await bench.worker(id, capabilities={"parts_memory_bytes": 100}) for id in "ab"]
    assert await ask_for_workers(verifier) == ["a", "b"]
    assert await ask_for_workers(verifier, "b") == ["a", "b"]
    job = await create(bench, "job", workers=1)
    assert (await first.hear(Assign)).job == job
    assert await ask_for_workers(verifier, "b") == ["b"]
    await bench.ask("jobs.cancel", job="job")
    await first.hear(Release)
    job = await create(bench, "job", workers=2)
    for worker in (first, second):
        assert (await worker.hear(Assign)).job == job
    assert await ask_for_workers(verifier, "b") == ["a", "b"], "none is idle: those of the job serve, too"
    with pytest.raises(Refused, match="only a verifier"):
        await bench.ask("workers.list", model="large", weights_bytes=1)


async def test_heavy_split_model_takes_back_the_worker_that_it_cannot_be_written_without(bench: Bench) -> None:
    verifier = await bench.worker("v", "verifier", capabilities={"weight": 2.0})
    await verifier.hear(DrafterList)
    ring = {worker.id: worker for worker in await bench.ring("a", "b")}
    first = ring["a"]
    ring[first.view.members[0].peer_id].say(StepMetrics(first.job, first.view.generation, 1, {"step_ms": 20_000.0}))
    await first.beaten()
    assert await ask_for_workers(verifier) == ["a", "b"], "none is idle"
    for worker in ring.values():
        assert "gets another task" in (await worker.hear(Hold)).reason
        worker.report("held", 1)
    moved = await bench.event("moved")
    assert "from job first to the model large" in moved["text"]
    mover = ring.pop(moved["peer"])
    assert (await mover.hear(Release)).job == first.job
    (other,) = ring.values()
    assert len((await other.viewed()).members) == 1, "the job goes on with the least that it can"
    assert await ask_for_workers(verifier) == [mover.id]
