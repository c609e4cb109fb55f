"""Watching: tables on narrow terminals, `jobs watch`, `jobs metrics`, `status` and `logs`."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from configs.loader import load
from p2ptrain.cli.output import print_table
from p2ptrain.cli.status import is_over
from p2ptrain.cluster.running import announce_seed
from p2ptrain.core.errors import ConnectionLost, Refused, Unreachable, UserError
from tests.cli.test_operator_commands import CHECKPOINT, JOB, PEER
from wire.records import ClusterInfo, EventInfo, MemberScore, MetricRow
from wire.schema import Record

from .conftest import Command

PREFERENCE = load("lora", {}, ["data.path=pairs", "data.format=preference"]).profile.to_spec()
CLUSTER = ClusterInfo("c", "attic", "0.1", "127.0.0.1:7337", 1.7e9, 1, 1)
ROWS = [MetricRow(JOB.id, step, 1.7e9, loss=1 / step, tokens_per_s=2000.0, members=2) for step in range(98, 104)]
LOST = EventInfo(7, 1.7e9 + 50, "warning", "lost", "laptop is lost", peer="a1b2")


def test_a_narrow_terminal_drops_columns_and_shortens_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def table() -> list[str]:
        row = ("3f9a12bc04de@100@a1b2c3d4e5f6", "laptop", "2026-01-01", "/home/me/p2ptrain/jobs/step-00000100")
        print_table(("ID", "ON", "CREATED", "PATH"), [row], less=("CREATED", "ON"), cut=("PATH",))
        return capsys.readouterr().out.splitlines()

    assert table()[1].endswith("2026-01-01  /home/me/p2ptrain/jobs/step-00000100"), "a pipe gets all"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, shown in (
        (80, "  laptop  2026-01-01  …/p2ptrain/jobs/step-00000100"),
        (56, "  laptop  …bs/step-00000100"),
        (44, "  …tep-00000100"),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert table()[1] == "3f9a12bc04de@100@a1b2c3d4e5f6" + shown, "an id is never broken"


class Seed:
    """A client whose updates are given. ``away``: attempts to reach it that fail after the first connection."""

    def __init__(self, *parts: list[Record] | BaseException) -> None:
        self.parts, self.reached = list(parts), 0

    @asynccontextmanager
    async def operator(self, seed: str) -> AsyncIterator[Seed]:
        self.reached += 1
        if isinstance(self.parts[0], Unreachable | UserError):
            raise self.parts.pop(0)
        yield self

    async def job(self, job: str) -> tuple[Any, str]:
        return JOB, PREFERENCE

    async def checkpoints(self, job: str) -> list[Any]:
        return [CHECKPOINT]

    async def news(self) -> AsyncIterator[list[Record]]:
        while self.parts:
            part = self.parts.pop(0)
            if isinstance(part, BaseException):
                raise part
            yield part


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seed]:
    def made(*parts: Any) -> Seed:
        seed = Seed(*parts)
        monkeypatch.setattr("p2ptrain.cli.jobs.operator", seed.operator)
        monkeypatch.setattr("p2ptrain.cluster.jobs.AGAIN_S", 0.0)
        return seed

    return made


def ended(state: str) -> Record:
    return dataclasses.replace(JOB, state=state, step=400, reason="why")


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 5), ("cancelled", 5)])
def test_watch_ends_with_the_job_and_its_result(command: Command, seed: Any, state: str, code: int) -> None:
    seed([JOB, *ROWS], [ended(state)])
    outcome = command("jobs", "watch", "tiny")
    assert outcome.code == code
    assert f"state          {state}: why" in outcome.out
    assert "nats/pair" in outcome.out
    assert [line for line in outcome.err.splitlines() if "step 101/400" in line]
    assert "step 100/400" not in outcome.err, "that step was done before"
    seed([ended(state)])
    outcome = command("jobs", "watch", "tiny", "--json")
    assert (outcome.code, outcome.json["state"], outcome.err) == (code, state, "")


def test_watch_tells_of_a_job_that_ended_before_its_result_was_saved(command: Command, seed: Any) -> None:
    seed([JOB], [dataclasses.replace(JOB, state="saving", reason="no space on /x")], [ended("cancelled")])
    outcome = command("jobs", "watch", "tiny")
    assert outcome.code == 6
    assert "is saving: no space on /x" in outcome.err
    assert "state          not saved: why" in outcome.out
    seed([dataclasses.replace(JOB, state="saving")], [ended("done")])
    assert command("jobs", "watch", "tiny").code == 0


def test_watch_outlives_the_seed(command: Command, seed: Any) -> None:
    away = seed([JOB], ConnectionLost("it left"), Unreachable("no answer"), [ROWS[-1], ended("done")])
    assert command("jobs", "watch", "tiny").code == 0
    assert away.reached == 3
    away = seed([JOB], ConnectionLost("it left"), UserError("no seed of yours runs"), [ended("done")])
    assert command("jobs", "watch", "tiny").code == 0
    seed(Unreachable("no answer"))
    assert command("jobs", "watch", "tiny").code == 3, "it was never there"


def test_ctrl_c_ends_only_the_watching(command: Command, seed: Any) -> None:
    async def news() -> AsyncIterator[list[Record]]:
        yield [JOB]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    seed([]).news = news
    outcome = command("jobs", "watch", "tiny", "--seed", "192.168.1.20")
    assert outcome.code == 130
    assert outcome.err.endswith(
        "the job goes on. To watch it again: p2ptrain jobs watch tiny --seed 192.168.1.20:7337\n"
    )


def test_metrics_are_read_page_by_page(command: Command, fake_seed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, read = [row.to_map() for row in ROWS], fake_seed.answer_for

    def answer_for(request: Any) -> Any:
        if request.method != "metrics.history":
            return read(request)
        after, limit = request.params["after_step"], request.params["limit"]
        return {"rows": [row for row in rows if row["step"] > after][:limit]}

    fake_seed.answer_for = answer_for
    monkeypatch.setattr("wire.client.PAGE", 4)
    fake_seed.answers["jobs.show"] = {"job": JOB.to_map(), "spec": "{}"}
    table = list(csv.DictReader(command("jobs", "metrics", "tiny", "--csv").out.splitlines()))
    assert [row["step"] for row in table] == [str(row.step) for row in ROWS]
    assert (table[0]["loss"], table[0]["val_loss"], table[0]["members"]) == (str(1 / 98), "", "2")
    assert [row["step"] for row in command("jobs", "metrics", "tiny", "--json", "--limit", "2").json["metrics"]] == [
        102,
        103,
    ]
    assert command("jobs", "metrics", "tiny").out.splitlines()[-1].split()[:4] == ["103", "0.0097", "-", "2,000"]
    assert command("jobs", "metrics", "tiny", "--csv", "--json").code == 2
    rows.reverse()  # a seed that never ends
    outcome = command("jobs", "metrics", "tiny", "--json")
    assert (outcome.code, "not in order" in outcome.err, list(outcome.json)) == (4, True, ["error"])


def test_status_says_what_needs_attention(command: Command, fake_seed: Any) -> None:
    fake_seed.answers |= {
        "cluster.info": {"cluster": CLUSTER.to_map()},
        "peers.list": {"peers": [PEER.to_map()]},
        "jobs.list": {"jobs": [JOB.to_map()]},
        "events.list": {"events": [LOST.to_map()]},
        "checkpoints.list": {"checkpoints": []},
        "probe.clock": {"wall": 1.7e9 + 60},
    }
    assert command("status").out.splitlines()[-1] == "✓ nothing needs attention", "it trains again"
    ways = {PEER.id: "punched", "c3d4": "relayed by desk"}
    fake_seed.answers["peers.list"] = {"peers": [PEER.to_map() | {"state": "building", "ways": ways}]}
    outcome = command("status")
    assert outcome.code == 0
    assert "\nlinks: laptop�[31m → laptop�[31m punched, laptop�[31m → c3d4 relayed by desk\n" in outcome.out
    assert "attic at 127.0.0.1:7337, up 1 min 0 s" in outcome.out
    assert "1: 1 building" in outcome.out
    assert outcome.out.splitlines()[-1] == "! 10 s ago: laptop is lost"
    makes = EventInfo(8, 1.7e9 + 55, "info", "building", "tokenizing books: 15%", peer=PEER.id)
    fake_seed.answers["events.list"] = {"events": [LOST.to_map(), makes.to_map()]}
    assert ": tokenizing books: 15%\n" in command("status").out
    fake_seed.answers["probe.clock"] = {"wall": 1.7e9 + 9999}
    assert command("status").out.splitlines()[-1] == "✓ nothing needs attention"
    score = MemberScore("a1b2", 40, 37, 12.0)
    fake_seed.answers["jobs.list"] = {"jobs": [dataclasses.replace(JOB, scores=[score]).to_map()]}
    assert command("status", "--json").json["attention"] == [
        f"{PEER.name} may send wrong vectors (left out of 37 of 40 steps, 12.0 times as far as usual): "
        "if so, p2ptrain peers evict a1b2"
    ]
    changed = {"state": "lost", "job": ""}
    fake_seed.answers["peers.list"] = {"peers": [PEER.to_map() | changed]}
    fake_seed.answers["jobs.list"] = {"jobs": [JOB.to_map() | {"state": "waiting", "reason": "it needs 2 workers"}]}
    told = command("status", "--json").json
    assert told["attention"] == [
        "job tiny (3f9a12bc04de) is waiting: it needs 2 workers",
        f"peer {PEER.name} (a1b2) is lost: p2ptrain logs a1b2",
    ]
    assert (told["cluster"], told["jobs"][0]["state"]) == (CLUSTER.to_map(), "waiting")
    member = PEER.to_map() | {"roles": ["group member"], "group": "train.py/ab12", "joined_at": 1.7e9}
    there = [member | {"id": str(rank), "name": f"train.py rank {rank}", "rank": rank} for rank in (1, 0)]
    fake_seed.answers["peers.list"] = {"peers": [*there, there[0] | {"id": "2", "state": "left"}]}
    both = {"group": "train.py/ab12", "members": ["train.py rank 0", "train.py rank 1"], "since": 1.7e9}
    assert command("status", "--json").json["groups"] == [both]
    assert "process group train.py/ab12: 2 members for " in command("status").out
    fake_seed.answers["peers.list"] = {"peers": []}
    assert "no peer has joined: p2ptrain join 127.0.0.1:7337" in command("status", "--json").json["attention"]


def test_status_shows_phones_the_way_to_the_page(command: Command, fake_seed: Any) -> None:
    link = "https://192.168.1.20:8443/#key=" + "k" * 43
    fake_seed.answers["cluster.watch_link"] = {"link": link}
    outcome = command("status", "--qr")
    assert outcome.code == 0
    assert len({len(line) for line in outcome.out.splitlines()}) == 1
    assert "▄" in outcome.out
    assert "holds the key" in outcome.err
    assert command("status", "--qr", "--json").json == {"link": link}
    fake_seed.answers["cluster.watch_link"] = Refused("no-page", "it has no page", remedy="start it with --http")
    assert "start it with --http" in command("status", "--qr").err


def test_logs_are_the_events_and_what_the_process_wrote(command: Command, fake_seed: Any, tmp_path: Path) -> None:
    other = dataclasses.replace(LOST, id=8, level="info", peer="", text="the seed\x1b listens")
    fake_seed.answers |= {
        "peers.list": {"peers": [PEER.to_map() | {"name": "laptop"}]},
        "events.list": {"events": [LOST.to_map(), other.to_map()]},
    }
    assert [line[20:] for line in command("logs").out.splitlines()] == ["! laptop is lost", "· the seed� listens"]
    assert fake_seed.asked[-1] == ("events.list", {"after_id": -200, "limit": 200})
    assert [each["id"] for each in command("logs", "a1b2", "--json").json["events"]] == [7]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "laptop.log").write_text("one\ntwo\nthree\n")
    host, _, port = fake_seed.address.rpartition(":")
    with announce_seed((host, int(port)), tmp_path):
        shown = command("logs", "laptop", "--limit", "2").out.splitlines()
    assert shown[:3] == [f"{tmp_path / 'logs' / 'laptop.log'}:", "  two", "  three"]
    assert shown[3].endswith("laptop is lost")
    assert command("logs", "nobody").code == 2
    assert command("logs", "--follow", "--json").code == 2


@pytest.mark.parametrize(
    ("kind", "peer", "job", "saved_at", "over"),
    [
        ("ring-broken", {}, {}, 0, True),
        ("ring-broken", {}, {"state": "forming"}, 0, False),
        ("hung", {"state": "idle", "job": ""}, {}, 0, False),
        ("lost", {"state": "lost", "job": ""}, {}, 0, False),
        ("member-failed", {}, {}, 0, False),
        ("member-failed", {"state": "idle", "job": ""}, {"state": "done"}, 0, True),
        ("checkpoint-failed", {}, {}, 1.7e9 + 40, False),
        ("checkpoint-failed", {}, {}, 1.7e9 + 60, True),
        ("data", {}, {}, 0, False),
        ("waiting", {}, {}, 0, True),
        ("stage-lacking", {}, {}, 0, True),
        ("stage-lacking", {"state": "waiting"}, {}, 0, False),
    ],
)
def test_status_leaves_out_what_has_passed(
    kind: str, peer: dict[str, Any], job: dict[str, Any], saved_at: float, over: bool
) -> None:
    event = dataclasses.replace(LOST, kind=kind, job=JOB.id)
    saved = dataclasses.replace(CHECKPOINT, created_at=saved_at)
    at_work = dataclasses.replace(PEER, **{"job": JOB.id, **peer})
    assert is_over(event, [at_work], [dataclasses.replace(JOB, **job)], [saved]) == over
