"""``explain`` without measuring: the ways that it compares, its clusters, its file, a job beside its prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.errors import ConfigError
from p2ptrain.lab.explain.cluster_file import read
from ring.codecs import CODECS
from ring.planning.measurements import LinkQuality
from wire.records import JobInfo, LinkInfo, MetricRow, PeerInfo

from .conftest import SHARDED_MS, Command

MIB = 1 << 20


@pytest.fixture(autouse=True)
def measured(measured_at_once: None, give_parts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    give_parts(4096)


def test_every_strategy_is_compared_in_every_codec_and_one_is_recommended(command: Command) -> None:
    shown = command("explain", "--workers", "2", "--json").json
    ways = {(way["strategy"], way["codec"]): way for way in shown["ways"]}
    assert {strategy for strategy, _ in ways} == {"sync", "sharded", "pipeline", "server", "local"}
    assert {codec for strategy, codec in ways if strategy == "sync"} == set(CODECS) - {"fp16"}  # as bf16
    plain = ways["sync", "fp32"]
    assert plain["compute_s"] == pytest.approx(4 * 0.05)
    assert 480 * MIB < plain["memory_bytes"] < 520 * MIB
    # The job that was measured had 2 micro-batches for each worker, this one has 4.
    assert 1.5 < 1e3 * ways["sharded", "fp32"]["step_s"] / SHARDED_MS < 2.0
    assert ways["pipeline", "fp32"]["settings"] == ["job.strategy=pipeline", "pipeline.stages=2"]
    assert shown["recommended"]["strategy"] == "sync"
    assert shown["reasons"][-1] == "do: p2ptrain up --profile tiny --workers 2"
    far = command("explain", "--workers", "2", "--link", "satellite", "--json").json["recommended"]
    assert far["strategy"] == "local"
    assert any(setting.startswith("batch.micro_batches=") for setting in far["settings"])
    outcome = command("explain", "robust", "--workers", "7")  # other strategies refuse the rule, and say why
    assert outcome.code == 0
    assert "sharded is impossible: " in outcome.out
    assert "recommended: " in outcome.out


def test_the_workers_of_a_seed_are_taken_as_they_measured_themselves(command: Command, fake_seed: Any) -> None:
    def worker(number: int, flops: int, state: str = "idle") -> PeerInfo:
        at = f"10.0.0.{number}:1"
        return PeerInfo(f"p{number}", f"w{number}", ["worker"], "cpu", state, at, 0.0, flops=flops, cores=2)

    peers = [worker(1, 10**11), worker(2, 5 * 10**10), worker(3, 10**12, "lost")]
    fake_seed.answers |= {
        "peers.list": {"peers": [peer.to_map() for peer in peers], "total": 3},
        "links.list": {"links": [LinkInfo("p1", "p2", 0.02, 1e7).to_map()]},
    }
    shown = command("explain", "--seed", fake_seed.address, "--json").json
    assert [member["flops"] for member in shown["members"]] == [1e11, 5e10]
    sync = next(way for way in shown["ways"] if (way["strategy"], way["codec"]) == ("sync", "fp32"))
    assert sync["compute_s"] == pytest.approx(max(5 * 0.05 * 5e10 / 1e11, 3 * 0.05))  # 5 and 3 of 8 micro-batches
    assert sync["exchange_s"] > 8 * 3e6 / 1e7
    told = command("explain", "--seed", fake_seed.address, "--set", "optimizer.lr=1e-3", "--json").json["reasons"][-1]
    assert told.startswith("do: p2ptrain jobs create --profile tiny --set optimizer.lr=1e-3")  # not on this machine
    fake_seed.answers["peers.list"] = {"peers": [peers[0].to_map() | {"flops": float("nan")}], "total": 1}
    assert "PeerInfo.flops" in command("explain", "--seed", fake_seed.address).err
    fake_seed.answers["peers.list"] = {"peers": [], "total": 0}
    outcome = command("explain", "--seed", fake_seed.address)
    assert outcome.code == 2
    assert "no worker is connected" in outcome.err
    outcome = command("jobs", "create", "--profile", "sharded", "--dry-run")
    assert "p2ptrain explain --workers N" in outcome.err


def test_a_job_is_shown_beside_its_prediction(command: Command, fake_seed: Any) -> None:
    info = JobInfo("3f9a", "tiny", "tiny", "sync", "running", 0.0, 400, step=6, members=["p1", "p2"])
    rows = [MetricRow("3f9a", step, 0.0, step_ms=250.0 + 10 * (step == 3), members=2) for step in range(1, 7)]
    peers = [
        PeerInfo(id, id, ["worker"], "cpu", "training", "", 0.0, memory_bytes=500 * MIB, flops=10**10)
        for id in ("p1", "p2")
    ]
    fake_seed.answers |= {
        "jobs.show": {"job": info.to_map(), "spec": Profile().to_spec()},
        "metrics.history": {"rows": [row.to_map() for row in rows]},
        "peers.list": {"peers": [peer.to_map() for peer in peers], "total": 2},
    }
    words = ("explain", "--job", "tiny", "--workers", "2", "--seed", fake_seed.address)
    shown = command(*words, "--json").json
    assert shown["step_s"]["measured"] == 0.25
    assert shown["step_s"]["error_percent"] == pytest.approx(100 * (shown["step_s"]["predicted"] / 0.25 - 1))
    assert shown["memory_bytes"]["measured"] == 500 * MIB
    assert command(*words).code == 0
    outcome = command("explain", "--job", "tiny", "--workers", "3", "--seed", fake_seed.address)
    assert "had 2 members, and 3 are described" in outcome.err
    fake_seed.answers["jobs.show"] = {"job": replace(info, members=[]).to_map(), "spec": Profile().to_spec()}
    fake_seed.answers["links.list"] = {"links": []}
    assert "no worker" in command("explain", "--job", "tiny", "--seed", fake_seed.address).err  # others are no members
    fake_seed.answers["metrics.history"] = {"rows": []}
    assert "0 measured steps" in command(*words).err


GOOD = """
link = "wan"
[[member]]
name = "attic"
gflops = 50
memory = "8GiB"
[[member]]
name = "lab"
gflops = 100.0
count = 2
[[between]]
members = ["lab-1", "lab-2"]
link = "0.2ms-1000mbit"
"""


def test_a_file_describes_a_cluster(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(GOOD)
    made = read(path)
    assert [(one.id, one.flops, one.memory_bytes) for one in made.members] == [
        ("attic", 5e10, 8 << 30), ("lab-1", 1e11, math.inf), ("lab-2", 1e11, math.inf),
    ]  # fmt: skip
    assert made.links["lab-2", "lab-1"] == LinkQuality(1e-4, 1e9)
    assert made.links["attic", "lab-1"].latency_s == pytest.approx(0.0228, abs=1e-4)
    assert len(command("explain", "--cluster", str(path), "--json").json["members"]) == 3
    assert command("explain", "--cluster", str(path), "--workers", "2").code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("link = 'wan'\nmember = 1", "member: must be a list"),
        ("link = 'wan'\n[[member]]\nname = 'a'", "member.1.gflops"),
        (GOOD.replace('"lab-2"]', '"cellar"]'), "between.1.members: there is no member cellar"),
        (GOOD.replace('"lab-2"]', '"lab-1"]'), "between.1.members: both are lab-1"),
        (GOOD.replace("0.2ms-1000mbit", "moon"), "between.1.link: there is no link preset 'moon'"),
        (GOOD.replace('"lab"', '"attic-1"').replace('"attic"\n', '"attic-1-1"\n'), "two members attic-1-1"),
        (GOOD.replace("wan", "van"), "no link preset 'van'"),
        (GOOD.replace("gflops = 50", "gflops = 1e-320"), "member.1.gflops: must be greater than or equal to 0.001"),
        (GOOD.replace("count = 2", "count = 256"), "257 members are more than 256"),
        (GOOD.replace("8GiB", "much"), "'much' is not a size"),
        ("[[member", ":1: not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.message.startswith(str(path))
    assert told in caught.value.message
    assert caught.value.remedy


def test_a_dry_run_shows_the_one_way_that_was_asked_for(command: Command) -> None:
    shown = command("up", "--profile", "sharded", "--dry-run", "--json").json
    less = command("up", "--profile", "sharded", "--set", "sharded.accumulate=false", "--dry-run", "--json").json
    model = 4 * (256 * 128 + 128 + 4 * (4 * 128 * 128 + 3 * 128 * 344 + 2 * 128))  # its bytes
    assert shown["memory_bytes"] - less["memory_bytes"] == model
    robust = command("up", "--workers", "7", "--profile", "robust", "--dry-run", "--json").json
    small = 4 * (256 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 172 + 2 * 64))
    assert robust["sent_bytes"] == 6 * small
    outcome = command("up", "--profile", "sharded", "--set", "model.layers=1024", "--set", "model.hidden_size=65536")
    assert outcome.code == 6
    assert "worker-1 needs about" in outcome.err
