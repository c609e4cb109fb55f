"""The endpoints of the HTTP API, who may use them, and requests that are repeated."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from p2ptrain.lab.experiments import endpoints as experiments
from roles.http.access import Keys
from roles.http.answers import Problem, json_response
from roles.web import app as web_app
from roles.web import routes
from roles.web.app import Repeats
from roles.web.endpoints import OPERATE, READ, AfterStep, read_query

from .conftest import LOCAL, Api, api_of, app_of

PATIENCE_S = 10.0
pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"profile": {"base": "tiny", "job": {"workers": 1}}, "set": {"job.steps": 100_000}}


async def created(api: Api, **said: Any) -> str:
    return str((await api.done("POST", "training/jobs", LONG | said, 201))["id"])


async def test_a_job_from_its_creation_to_its_end(api: Api) -> None:
    job = await created(api, name="mine")
    assert [item["id"] for item in (await api.done("GET", "training/jobs"))["items"]] == [job]
    assert (await api.done("GET", "training/jobs/mine"))["steps_total"] == 100_000
    assert (await api.done("GET", f"training/jobs/{job}/settings"))["settings"]["job"]["workers"] == 1
    for _ in range(2):  # both may be repeated
        assert (await api.done("PUT", f"training/jobs/{job}/pause"))["state"] == "paused"
    for _ in range(2):
        assert (await api.done("PUT", f"training/jobs/{job}/resume"))["state"] == "waiting"
    assert (await api.done("PUT", f"training/jobs/{job}/save", status=409))["error"]["code"] == "wrong-state"
    assert (await api.done("DELETE", f"training/jobs/{job}?forget=true", status=409))["error"]["remedy"]
    await api.done("DELETE", f"training/jobs/{job}")
    assert (await api.until(f"training/jobs/{job}", lambda info: info["state"] == "cancelled"))["id"] == job
    await api.done("DELETE", f"training/jobs/{job}", status=409)
    await api.done("DELETE", f"training/jobs/{job}?forget=true")
    assert (await api.done("GET", "training/jobs"))["items"] == []
    assert (await api.done("GET", f"training/jobs/{job}", status=404))["error"]["code"] == "unknown-job"


@pytest.mark.parametrize(
    ("said", "status", "part"),
    [
        ({"profile": "tinny"}, 422, "did you mean tiny"),
        ({"profile": "./mine.toml"}, 422, "these ship"),  # no file that a caller names is read
        ({"profile": {"base": "/etc/passwd"}}, 422, "not a shipped profile"),
        ({"set": {"job.stps": 1}}, 422, "did you mean job.steps"),
        ({"set": {"job.steps": "many"}}, 422, "must be a whole number"),
        ({"set": {"optimizer.lr": 1e999}}, 422, "must be a finite number"),
        ({"set": {"track.directory": "../mine"}}, 422, "a relative path without '..' and '~'"),
        ({"steps": 5}, 400, "steps"),
        (b"{", 400, "not JSON"),
        (b" " * (129 << 10), 413, "larger than 128.0 KiB"),
        ({"drafter": True}, 422, "has no drafter"),
    ],
)
async def test_a_job_that_cannot_be(api: Api, said: Any, status: int, part: str) -> None:
    error = (await api.done("POST", "training/jobs", said, status))["error"]
    assert part in f"{error['message']} {error['remedy']}"


async def test_a_running_cluster(api: Api) -> None:
    short = {"job.steps": 6, "job.workers": 1, "checkpoint.every": 2, "checkpoint.keep": 2}
    job = (await api.done("POST", "training/jobs", {"set": short}, 201))["id"]
    peer = api.cluster.join()
    await api.until(f"training/jobs/{job}", lambda info: info["state"] == "done")
    [node] = (await api.done("GET", "cluster/nodes"))["items"]
    assert (node["id"], node["gpus"]) == (peer.identity.peer_id, [])
    assert (await api.done("GET", "cluster/gpu-status"))["items"] == []
    summary = await api.until("metrics/cluster/summary", lambda said: said["jobs"] == {"done": 1})
    assert (sum(summary["peers"].values()), summary["gpu_load"]) == (1, None)

    steps, after = list[int](), -1
    while after is not None:  # every row once, whatever the size of a part
        part = await api.done("GET", f"metrics/jobs/{job}?limit=4&after_step={after}")
        steps, after = [*steps, *(row["step"] for row in part["items"])], part["next"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [item["kind"] for item in (await api.done("GET", f"training/jobs/{job}/recoveries"))["items"]] == []
    first = await api.done("GET", "events?after_id=0&limit=2")
    assert [event["id"] for event in first["items"]] == [1, 2] == [1, first["next"]]
    assert (await api.done("GET", "serving"))["items"] == []

    kept = await api.until(f"checkpoints/jobs/{job}", lambda found: len(found["items"]) == 2)
    newest = kept["items"][-1]["id"]
    assert (await api.done("POST", f"checkpoints/{kept['items'][0]['id']}/restore", {}))["id"] == job
    await api.until(f"training/jobs/{job}", lambda info: info["state"] == "done")
    await api.done("DELETE", f"checkpoints/{newest}")
    await api.done("DELETE", f"checkpoints/{newest}", status=404)
    assert (await api.done("DELETE", f"cluster/nodes/{node['id']}", status=409))["error"]["code"] == "not-encrypted"
    assert "p2ptrain_job_step" in await api.done("GET", "/metrics")
    await peer.leave()
    await api.done("DELETE", f"training/jobs/{job}?forget=true")


@pytest.mark.parametrize(
    ("module", "reader", "path", "said"),
    [
        (routes, "load_settings", "training/jobs", {"profile": "none"}),
        (experiments, "parse_toml", "experiments", {"grid": "a"}),
    ],
)
async def test_other_requests_are_answered_while_a_text_is_parsed(
    api: Api, monkeypatch: pytest.MonkeyPatch, module: Any, reader: str, path: str, said: Any
) -> None:
    read, begun, answered, in_time = getattr(module, reader), threading.Event(), threading.Event(), list[bool]()

    def read_slowly(*given: Any) -> Any:
        begun.set()
        in_time.append(answered.wait(PATIENCE_S))
        return read(*given)

    monkeypatch.setattr(module, reader, read_slowly)
    post = asyncio.create_task(api.done("POST", path, said, 422))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    await api.done("GET", "training/jobs")
    answered.set()
    await post
    assert in_time == [True]


async def test_a_list_in_parts(api: Api) -> None:
    jobs = [await created(api, name=name) for name in ("a", "b", "c")]
    first = await api.done("GET", "training/jobs?limit=2")
    assert ([item["id"] for item in first["items"]], first["next"]) == (jobs[:2], jobs[1])
    last = await api.done("GET", f"training/jobs?limit=2&after={first['next']}")
    assert ([item["id"] for item in last["items"]], last["next"]) == (jobs[2:], None)
    for wrong in ("limit=0", "limit=999", "after=none", "more=1", "limit=1&limit=2"):
        status, content, _ = await api.ask("GET", f"training/jobs?{wrong}")
        assert (status, bool(content["error"]["message"])) == (409 if "after" in wrong else 400, True)
    for job in jobs:
        await api.done("DELETE", f"training/jobs/{job}")


async def test_how_a_machine_joins(api: Api, tmp_path: Path) -> None:
    plain = await api.done("POST", "cluster/nodes", {"role": "drafter"}, 201)
    assert (plain["ticket"], plain["command"].split()[1], plain["text"]) == (None, "join", None)
    async with api_of(tmp_path, encrypted=True) as secure:
        made = await secure.done("POST", "cluster/nodes", {"uses": 1}, 201)
        assert (made["ticket"]["uses"], made["command"]) == (1, f"p2ptrain join {made['text']}")
        assert (await secure.done("DELETE", "cluster/nodes/none", status=404))["error"]["code"] == "unknown-peer"


READER, OPERATOR = "read-key-read-key-read", "operator-key-operator-key"
KEYS, NAMES = Keys({READER: READ, OPERATOR: OPERATE}), {"seed.example.org", "*.lab.example.org"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "training/jobs", {}, 401),
        ("GET", "/metrics", {}, 401),
        ("GET", "training/jobs", {"authorization": "Bearer wrong"}, 401),
        ("GET", "training/jobs", {"authorization": f"Basic {READER}"}, 401),
        ("GET", "training/jobs", {"authorization": f"Bearer {READER}"}, 200),
        ("GET", "training/jobs", {"authorization": f"Bearer {OPERATOR}"}, 200),
        ("POST", "training/jobs", {"authorization": f"Bearer {READER}"}, 403),
        ("DELETE", "training/jobs/none", {"authorization": f"Bearer {READER}"}, 403),
        ("DELETE", "training/jobs/none", {"authorization": f"Bearer {OPERATOR}"}, 404),
        ("GET", "openapi.json", {}, 200),
        ("GET", "docs", {}, 302),
        ("GET", "/docs.html", {}, 200),
        ("GET", "/", {}, 200),
        ("GET", "/", {"host": "evil.example"}, 403),
        ("GET", "/", {"host": "a.lab.example.org"}, 200),  # the certificate has a wildcard
        ("GET", "/", {"host": "a.b.lab.example.org"}, 403),
        ("GET", "/", {"host": "192.0.2.7:8443"}, 200),  # a page cannot rename an address
        ("GET", "/", {"origin": "https://evil.example"}, 403),
        ("GET", "/", {"origin": "https://seed.example.org:9"}, 403),  # another server of that machine
        ("GET", "/", {"origin": "https://seed.example.org"}, 200),
    ],
)
async def test_who_may_use_it(api: Api, method: str, path: str, headers: dict[str, str], status: int) -> None:
    guarded = Api(api.cluster, api.experiments, app_of(api.cluster, api.experiments, KEYS, NAMES))
    given, content, answered = await guarded.ask(method, path, headers={"host": "seed.example.org"} | headers)
    assert given == status
    assert READER not in str(content)
    assert not any(name.startswith("access-control") for name in answered)


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"host": "192.0.2.7"}, LOCAL | {"origin": "http://127.0.0.1:9"}, {}]
)
async def test_without_keys_only_this_machine_and_its_own_page_may(api: Api, headers: dict[str, str]) -> None:
    assert (await api.ask("GET", "training/jobs", headers=headers))[0] == 403
    own = {"host": "localhost:80", "origin": "http://localhost:80"}
    assert (await api.ask("GET", "training/jobs", headers=own))[0] == 200


async def test_a_request_is_carried_out_once(api: Api) -> None:
    before = len((await api.done("GET", "training/jobs"))["items"])
    keyed = LOCAL | {"idempotency-key": "k1"}
    asked = [api.ask("POST", "training/jobs", LONG, keyed) for _ in range(3)]
    answers = [*await asyncio.gather(*asked), await api.ask("POST", "training/jobs", LONG, keyed)]
    assert {(status, content["id"]) for status, content, _ in answers} == {(201, answers[0][1]["id"])}
    assert len((await api.done("GET", "training/jobs"))["items"]) == before + 1
    status, content, _ = await api.ask("POST", "training/jobs", LONG | {"name": "other"}, keyed)
    assert (status, content["error"]["code"]) == (422, "idempotency_key_reused")
    assert (await api.ask("POST", "training/jobs", LONG, LOCAL | {"idempotency-key": "with space"}))[0] == 400


@pytest.mark.parametrize(
    "query", ["after_step=1&after_step=1", f"after_step={'0' * 19}5{'9' * 30}", "step=1", "after_step=-2"]
)
async def test_a_stream_is_not_begun_with_a_query_that_cannot_be(query: str) -> None:
    with pytest.raises(Problem) as caught:
        read_query(AfterStep, QueryParams(query))
    assert caught.value.status == 400


async def test_answers_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "KEPT_ANSWERS", 2)
    repeats, done = Repeats(), list[str]()

    async def work(name: str) -> Any:
        done.append(name)
        if name == "fails":
            raise Problem(503, "not now")
        return json_response({})

    async def ask(name: str) -> None:
        await repeats.answer(name, b"", lambda: work(name))

    for _ in range(2):
        with pytest.raises(Problem, match="not now"):
            await ask("fails")  # which is tried again
    for name in ("a", "b", "a", "c", "a"):
        await ask(name)
    assert done == ["fails", "fails", "a", "b", "c", "a"]


async def test_a_seed_that_stops_answers_that_it_does(tmp_path: Path) -> None:
    async with api_of(tmp_path) as api:
        await api.done("POST", "training/jobs", LONG | {"name": "mine"}, 201)
        await api.cluster.stop_seed()
        status, content, headers = await api.ask("GET", "training/jobs/mine")
        assert (status, content["error"]["code"], headers["retry-after"]) == (503, "seed_unreachable", "2")
        api.app.stop()
        status, content, headers = await api.ask("GET", "training/jobs")
        assert (status, content["error"]["code"], headers["retry-after"]) == (503, "stopping", "2")
