"""peers, jobs and checkpoints, against a seed that answers what it was told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from configs.loader import load
from configs.schema import Profile
from p2ptrain.core.errors import Refused
from tui.chains import how_to_split
from wire.records import CheckpointInfo, ClusterInfo, JobInfo, MemberScore, PartInfo, PeerInfo, ServingInfo, TicketInfo
from wire.schema import Record

from .conftest import Command

PEER = PeerInfo(
    id="a1b2",
    name="laptop\x1b[31m",
    roles=["worker"],
    device="cpu (2 threads)",
    state="training",
    address="10.0.0.2:41000",
    joined_at=1.7e9,
    rtt_ms=0.42,
    tokens_per_s=12345.6,
    memory_bytes=512 << 20,
    memory_total_bytes=8 << 30,
    rank=0,
    step=17,
)
JOB = JobInfo(
    id="3f9a12bc04de",
    name="tiny",
    profile="tiny",
    strategy="sync",
    state="running",
    created_at=1.7e9,
    steps_total=400,
    step=100,
    generation=3,
    members=["a1b2", "c3d4"],
    started_at=1.7e9,
    finished_at=1.7e9 + 90_000,
    trained_s=7500.0,
    loss=2.5,
    step_ms=100.0,
    compute_ms=70.0,
    reason="going well",
)
CHECKPOINT = CheckpointInfo(
    id="3f9a12bc04de@100@a1b2",
    job="3f9a12bc04de",
    step=100,
    path="/state/step-00000100",
    peer_id="a1b2",
    peer_name="laptop",
    digest="00",
    size_bytes=3 << 20,
    created_at=1.7e9,
    val_loss=1.75,
)


# --------------------------------------------------------------------------------------------------------------- peers


def test_peers_for_people(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["peers.list"] = {"peers": [PEER.to_map()]}
    outcome = command("peers", "list")
    assert (outcome.code, outcome.err) == (0, "")
    header, row = outcome.out.splitlines()
    assert header.split()[:4] == ["NAME", "ID", "ROLES", "STATE"]
    assert row.split()[0] == "laptop�[31m"
    for part in ("a1b2", "training", "cpu (2 threads)", "0.4", "12,346", "512.0 MiB / 8.0 GiB", "10.0.0.2:41000"):
        assert part in row


def test_peers_that_serve_models(command: Command, fake_seed: Any) -> None:
    change = {"roles": ["verifier"], "state": "serving", "model": "big", "sessions": 3, "rank": None}
    verifier = dataclasses.replace(PEER, id="v1", **change)
    drafter = dataclasses.replace(PEER, id="d1", **change | {"roles": ["drafter"], "model": "small", "state": "idle"})
    served = ServingInfo(
        id="v1/big",
        peer="v1",
        name="laptop",
        role="verifier",
        host="10.0.0.2",
        port=41000,
        model="big",
        stats={
            "alpha": 0.777,
            "waiting": 2.0,
            "tokens_per_s": 31.2,
            "first_ms": 120.4,
            "first_p95_ms": 900.0,
            "preemptions": 1.0,
        },
    )
    fake_seed.answers["peers.list"] = {"peers": [peer.to_map() for peer in (PEER, verifier, drafter)]}
    fake_seed.answers["serving.list"] = {"serving": [served.to_map()], "total": 1}
    header, *rows, line = command("peers", "list").out.splitlines()
    figures = "0 running, 2 waiting, 31.2 tok/s, first token after 120 ms (95 %: 900 ms), 1 preempted"
    assert line == f"laptop, big: {figures}"
    at = header.index("MODEL")
    assert [row[at:].split()[:3] for row in [header, *rows]] == [
        ["MODEL", "SESSIONS", "ACCEPTED"], ["-", "-", "-"], ["big", "3", "78%"], ["small", "3", "-"],
    ]  # fmt: skip
    told = command("peers", "list", "--json").json
    assert told["serving"] == [served.to_map()]
    assert [peer["model"] for peer in told["peers"]] == ["", "big", "small"]
    fake_seed.answers["serving.list"] = {"serving": [served.to_map() | {"port": 0}]}
    assert command("peers", "list").code == 4


@pytest.mark.parametrize(
    "answer", [{}, {"peers": {}}, {"peers": [3]}, {"peers": [{}]}, {"peers": [PEER.to_map() | {"id": 3}]}]
)
def test_a_seed_that_talks_nonsense_is_a_peer_error(command: Command, fake_seed: Any, answer: dict[str, Any]) -> None:
    fake_seed.answers["peers.list"] = answer
    outcome = command("peers", "list", "--json")
    assert (outcome.code, list(outcome.json)) == (4, ["error"])
    assert outcome.err.startswith("error: ")


def test_no_seed_is_a_network_error_with_a_remedy(command: Command, free_port: int) -> None:
    outcome = command("peers", "list", "--seed", f"127.0.0.1:{free_port}")
    assert (outcome.code, outcome.out) == (3, "")
    assert f"127.0.0.1:{free_port}" in outcome.err
    assert "  → " in outcome.err


# ---------------------------------------------------------------------------------------------------------------- jobs


def test_create_sends_the_effective_profile(command: Command, fake_seed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_seed.answers["jobs.create"] = {"job": JOB.id}
    monkeypatch.setenv("P2PTRAIN__JOB__SEED", "7")
    outcome = command("jobs", "create", "--profile", "tiny", "--set", "job.steps=20", "--set", "job.workers=1")
    assert (outcome.code, outcome.out) == (0, f"{JOB.id}\n")
    ((method, params),) = fake_seed.asked
    assert (method, params["name"], params["profile"]) == ("jobs.create", "tiny", "tiny")
    expected = load("tiny", {"P2PTRAIN__JOB__SEED": "7"}, ["job.steps=20", "job.workers=1"]).profile
    assert Profile.from_spec_untrusted(params["spec"]) == expected
    assert "warmup" not in outcome.err
    outcome = command("jobs", "create", "--profile", "tiny", "--set", "job.steps=5")
    assert "optimizer.warmup_steps = 20 is more than job.steps = 5: the learning rate ends at 25 % of" in outcome.err


def test_create_of_a_pair_makes_the_job_of_one_of_them(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.create"] = {"job": JOB.id}
    both = load("pair", {}, []).profile
    outcome = command("jobs", "create", "--profile", "pair")
    assert (outcome.code, outcome.out) == (0, f"{JOB.id}\n")
    assert "for the drafter's job add --drafter" in outcome.err
    watch = f"watch it with: p2ptrain jobs watch {JOB.id}\n"
    assert command("jobs", "create", "--profile", "pair", "--drafter").err == watch
    assert command("jobs", "create", "--profile", "pair", "--drafter", "--name", "small").code == 0
    sent = [(params["name"], Profile.from_spec_untrusted(params["spec"])) for _, params in fake_seed.asked]
    assert sent == [("pair", both.alone()), ("pair-drafter", both.of_drafter()), ("small", both.of_drafter())]


def test_create_with_a_bad_profile_asks_nobody(command: Command, fake_seed: Any) -> None:
    outcome = command("jobs", "create", "--set", "optimizer.lr=fast")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith('error: --set optimizer.lr=fast: optimizer.lr = "fast" must be a number\n  → ')
    assert fake_seed.asked == []


def test_job_from_a_checkpoint_has_the_settings_of_its_job_and_takes_no_profile(
    command: Command, fake_seed: Any
) -> None:
    spec = load("tiny", {}, ["job.steps=20", "validation.every=0"]).profile.to_spec()
    fake_seed.answers |= {
        "checkpoints.list": {"checkpoints": [CHECKPOINT.to_map()]},
        "cluster.info": {"cluster": ClusterInfo("c", "attic", "0.1", "10.0.0.2:7337", 1.7e9, 1, 1).to_map()},
        "jobs.show": {"job": JOB.to_map(), "spec": spec},
        "jobs.create": {"job": JOB.id},
    }
    typed = ("jobs", "create", "--from", CHECKPOINT.id, "--set", "job.steps=30")
    outcome = command(*typed, "--profile", "tiny")
    assert (outcome.code, fake_seed.asked) == (2, [])
    assert "--profile" in outcome.err
    assert command(*typed).code == 0
    sent = Profile.from_spec_untrusted(dict(fake_seed.asked)["jobs.create"]["spec"])
    assert (sent.job.steps, sent.validation.every, sent.model.path) == (30, 0, CHECKPOINT.path)


def test_list_jobs(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.list"] = {"jobs": [JOB.to_map()]}
    row = command("jobs", "list").out.splitlines()[1].split()
    assert row[:7] == [JOB.id, "tiny", "running", "100", "400", "2.5000", "-"]
    assert command("jobs", "list", "--json").json == {"jobs": [JOB.to_map()]}
    fake_seed.answers["jobs.list"] = {"jobs": []}
    assert "p2ptrain jobs create" in command("jobs", "list").err


def test_show_a_job(command: Command, fake_seed: Any) -> None:
    profile = load("tiny", {}, []).profile
    fake_seed.answers["jobs.show"] = {"job": JOB.to_map(), "spec": profile.to_spec()}
    newer = dataclasses.replace(CHECKPOINT, step=150, stage=0)
    fake_seed.answers["checkpoints.list"] = {"checkpoints": [CHECKPOINT.to_map(), newer.to_map()]}
    outcome = command("jobs", "show", "tiny")
    assert outcome.code == 0
    for part in (
        f"step 100 on {CHECKPOINT.peer_name}: {CHECKPOINT.path}",
        "running: going well",
        "100 of 400 (25.0 %)",
        "a1b2 → c3d4",
        "compute 70 ms",
        "2 h 5 min",
    ):
        assert part in outcome.out
    assert "optimizer.lr" not in outcome.out
    assert "optimizer.lr" in command("jobs", "show", "tiny", "--spec").out
    shown = command("jobs", "show", "tiny", "--json").json
    saved = CHECKPOINT.to_map()
    assert shown == {"job": JOB.to_map(), "checkpoint": saved, "spec": profile.model_dump(mode="json")}
    assert fake_seed.asked[0] == ("jobs.show", {"job": "tiny"})
    parts = [dataclasses.replace(CHECKPOINT, id=f"{n}", stage=n, path=f"/s{n}") for n in range(2)]
    old = dataclasses.replace(parts[0], id="o", step=50, path="/o")
    fake_seed.answers["checkpoints.list"] = {"checkpoints": [item.to_map() for item in (old, *parts)]}
    assert "step 100 in parts: /s0 on laptop, /s1 on laptop" in command("jobs", "show", "tiny").out


def test_show_tells_how_the_ring_runs(command: Command, fake_seed: Any) -> None:
    ring = {"members": ["a", "b"], "edge_ms": [0.5, 20.1], "edge_bps": [1e9, 98.3e6], "streams": 2, "codec": "int8"}
    fake_seed.answers["jobs.show"] = {"job": JOB.to_map() | ring, "spec": "{}"}
    fake_seed.answers["checkpoints.list"] = {"checkpoints": []}
    assert "2 streams, int8; slowest edge b → a: 98.3 Mbit/s, 20.1 ms" in " ".join(
        command("jobs", "show", "x").out.split()
    )
    unknown = ring | {"edge_ms": [], "edge_bps": [], "streams": 1}
    fake_seed.answers["jobs.show"] = {"job": JOB.to_map() | unknown, "spec": "{}"}
    out = command("jobs", "show", "x").out
    assert "1 stream, int8" in out
    assert "slowest" not in out


def test_show_names_first_the_member_whose_vectors_are_far(command: Command, fake_seed: Any) -> None:
    scores = [MemberScore("c3d4", 40, 3, 1.1), MemberScore("a1b2", 40, 37, 12.0)]
    job = dataclasses.replace(JOB, scores=scores).to_map()
    fake_seed.answers |= {"jobs.show": {"job": job, "spec": "{}"}, "checkpoints.list": {"checkpoints": []}}
    lines = [" ".join(line.split()) for line in command("jobs", "show", "x").out.splitlines()]
    told = [
        "a1b2 left out of 37 of 40 steps, 12.0 times as far as usual",
        "c3d4 left out of 3 of 40 steps, 1.1 times as",
    ]
    first = lines.index(told[0])
    assert lines[first + 1].startswith(told[1])


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("pause", "pauses at the next step"),
        ("resume", "goes on"),
        ("save", "writes a checkpoint as soon as no step runs"),
        ("cancel", "is cancelled"),
        ("forget", "is forgotten"),
    ],
)
def test_commands_to_a_job(command: Command, fake_seed: Any, verb: str, text: str) -> None:
    fake_seed.answers[f"jobs.{verb}"] = {"job": JOB.id}
    sure = ["--yes"] if verb in ("cancel", "forget") else []
    assert command("jobs", verb, "tiny", *sure).out == f"job {JOB.id} {text}\n"
    assert command("jobs", verb, "tiny", *sure, "--json").json == {"job": JOB.id}
    assert fake_seed.asked == [(f"jobs.{verb}", {"job": "tiny"})] * 2


def test_wrong_value_of_a_setting_is_the_users_mistake(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.set"] = Refused("bad-setting", "optimizer.lr: Input should be greater than 0")
    assert command("jobs", "set", "tiny", "optimizer.lr=-1").code == 2


def test_a_refusal_names_the_remedy(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.pause"] = Refused("unknown-job", "no job 'tinny'", remedy="did you mean tiny?")
    outcome = command("jobs", "pause", "tinny")
    assert (outcome.code, outcome.err) == (2, "error: no job 'tinny'\n  → did you mean tiny?\n")


@pytest.mark.parametrize(
    "typed",
    [
        "jobs cancel tiny",
        "jobs forget tiny",
        "checkpoints restore x@1@y",
        "checkpoints delete x@1@y",
        "peers evict laptop",
        "ticket revoke 0011",
        "ticket rotate",
    ],
)
def test_what_cannot_be_undone_needs_an_answer_or_yes(command: Command, fake_seed: Any, typed: str) -> None:
    group, _, *name = typed.replace("ticket ", "tickets ").split()
    fake_seed.answers[f"{group}.list"] = {group: []}
    if name:
        outcome = command(*typed.split())
        assert (outcome.code, f"error: there is no {group[:-1]} {name[0]}\n" in outcome.err) == (2, True)
    known: dict[str, Record] = {
        "jobs": dataclasses.replace(JOB, name="tiny"),
        "checkpoints": dataclasses.replace(CHECKPOINT, id="x@1@y"),
        "peers": dataclasses.replace(PEER, name="laptop"),
        "tickets": TicketInfo("00112233aabb", "worker", "open", None, "", 1.0, None, None, 0),
    }
    fake_seed.answers[f"{group}.list"] = {group: [known[group].to_map()]}
    outcome = command(*typed.split(), "--json")
    assert (outcome.code, outcome.json["error"]["remedy"]) == (2, "add --yes to do it without a question")
    outcome = command(*typed.split(), typed="n\n")
    assert outcome.code == 2
    assert outcome.err.endswith("error: nothing was done\n")
    assert command(*typed.split(), typed="").code == 130, "Ctrl+C or Ctrl+D at the question"
    assert {method for method, _ in fake_seed.asked} <= {f"{group}.list"}
    fake_seed.asked.clear()
    command(*typed.split(), typed="y\n")
    command(*typed.split(), "--yes", typed="")
    assert len([method for method, _ in fake_seed.asked if method != f"{group}.list"]) == 2


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_list_checkpoints(command: Command, fake_seed: Any) -> None:
    later = dataclasses.replace(CHECKPOINT, id="3f9a12bc04de@200@a1b2", step=200, val_loss=1.875)
    others = [
        dataclasses.replace(CHECKPOINT, job="0" * 12, val_loss=1.0),
        dataclasses.replace(CHECKPOINT, job="1" * 12, val_loss=None),
    ]
    found = [CHECKPOINT, later, *others]
    fake_seed.answers["checkpoints.list"] = {"checkpoints": [item.to_map() for item in found]}
    rows = [line.split() for line in command("checkpoints", "list").out.splitlines()[1:]]
    assert rows[0][:7] == [CHECKPOINT.id, "100", "whole", "1.7500", "best", "3.0", "MiB"]
    assert rows[1][3:5] == ["1.8750", "3.0"]
    listed = command("checkpoints", "list", "--job", "tiny", "--json").json["checkpoints"]
    best = [True, False, True, False]
    assert listed == [item.to_map() | {"best": mark} for item, mark in zip(found, best, strict=True)]
    assert fake_seed.asked == [("checkpoints.list", {}), ("checkpoints.list", {"job": "tiny"})]


def test_restore_and_delete(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["checkpoints.restore"] = {"job": JOB.id}
    fake_seed.answers["checkpoints.delete"] = {}
    assert command("checkpoints", "restore", CHECKPOINT.id, "--yes", "--json").json == {"job": JOB.id}
    command("checkpoints", "restore", CHECKPOINT.id, "--yes", "--shards", "3")
    assert command("checkpoints", "delete", CHECKPOINT.id, "--yes", "--json").json == {"deleted": CHECKPOINT.id}
    assert fake_seed.asked == [
        ("checkpoints.restore", {"id": CHECKPOINT.id}),
        ("checkpoints.restore", {"id": CHECKPOINT.id, "shards": 3}),
        ("checkpoints.delete", {"id": CHECKPOINT.id}),
    ]


# --------------------------------------------------------------------------------------------------------------- parts


FIRST = PartInfo(
    id="a1/p1",
    peer="a1",
    peer_name="laptop\x1b[31m",
    part="p1",
    model="ab12",
    name="llama",
    start=0,
    stop=12,
    layers=28,
    dtype="bfloat16",
    weights_bytes=3 << 30,
    cache_bytes=512 << 20,
    limit_bytes=8 << 30,
    sessions=2,
    compute_ms=4.214,
    busy=0.615,
    tokens_per_s=1234.56,
    out_position_bytes=6144.0,
    next="b2",
)
LAST = dataclasses.replace(
    FIRST, id="b2/p1", peer="b2", peer_name="attic", start=12, stop=28, compute_ms=9.0, out_position_bytes=0.0, next=""
)


def told(*parts: PartInfo, **more: Any) -> dict[str, Any]:
    return {"parts": [part.to_map() for part in parts], "total": len(parts)} | more


def test_parts_for_people(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["parts.list"] = told(LAST, FIRST)
    outcome = command("parts")
    assert (outcome.code, outcome.err) == (0, "")
    header, first, last = outcome.out.splitlines()
    assert header.split()[:4] == ["MODEL", "LAYERS", "HELD", "BY"]
    assert first.split() == ["llama", "0–11", "of", "28", "laptop�[31m", "bfloat16", "3.5", "GiB", "8.0", "GiB", "2",
                             "4.21", "62%", "1,234.6", "6.0", "KiB"]  # fmt: skip
    assert last.split() == ["llama", "12–27", "of", "28", "attic", "bfloat16", "3.5", "GiB", "8.0", "GiB", "2",
                            "9.00", "62%", "1,234.6", "-", "slowest"]  # fmt: skip
    assert fake_seed.asked == [("parts.list", {})]


def test_what_is_missing_and_what_is_left_over_has_a_line(command: Command, fake_seed: Any) -> None:
    spare = dataclasses.replace(FIRST, id="c3/p1", peer="c3", peer_name="spare", start=4, stop=5)
    fake_seed.answers["parts.list"] = told(LAST, spare, dataclasses.replace(FIRST, stop=10))
    lines = command("parts").out.splitlines()
    assert [" ".join(line.split()[1:4]) for line in lines[1:]] == [
        "0–9 of 28", "10–11 of 28", "12–27 of 28", "4 of 28",
    ]  # fmt: skip
    assert lines[2].rstrip().endswith("nobody holds these layers")
    assert "spare" in lines[4]
    assert lines[4].rstrip().endswith("in no chain")


def test_no_part_yet_says_what_to_do(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["parts.list"] = told()
    outcome = command("parts")
    assert outcome.code == 0
    assert how_to_split(fake_seed.address) in outcome.err
    assert command("parts", "--json").json == {"parts": [], "total": 0}
