"""What is shown of a placement: a table for people, a map for programs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from p2ptrain.cli.placement import placement_map, print_placement, print_split_facts, split_facts
from p2ptrain.core.footprint import ModelSizes
from ring.planning.measurements import CandidateWorker, LinkQuality
from ring.planning.serving import PlacedStage, Placement, place_model
from ring.planning.workloads import ServingWorkload
from roles.serving.chain_session import ChainTimes
from roles.serving.model import PassResult

GIB = 1 << 30
SIZES = ModelSizes((GIB,) * 6, (1 << 16,) * 6, GIB, GIB, GIB)
LINKS = {
    ("me", "1"): LinkQuality(0.0005, 1e9),
    ("me", "2"): LinkQuality(0.0005, 1e9),
    ("1", "2"): LinkQuality(0.002, 1e8),
}
WANTED = ServingWorkload(SIZES, 1024, 8192, "me", LINKS)


def placed(name: str = "desk") -> Placement:
    return place_model(
        WANTED,
        [CandidateWorker("1", name, 8 * GIB, byte_s=5e-12), CandidateWorker("2", "laptop", 4 * GIB, byte_s=2e-11)],
        stages=2,
    )


def test_people_see_who_holds_what_and_how_fast_it_will_be(capsys: pytest.CaptureFixture[str]) -> None:
    print_placement(placed())
    said = capsys.readouterr()
    assert said.err == ""
    assert [line.rstrip() for line in said.out.splitlines()] == [
        "PEER    LAYERS  WEIGHTS      CACHE    LIMIT     MS  HOP MS  TOKENS/S",
        "laptop  0       2.0 GiB   64.0 MiB  4.0 GiB  21.47    2.66        47",
        "desk    1–5     6.0 GiB  320.0 MiB  8.0 GiB  32.21    0.50        31",
        "2 stages, predicted at best: 57.34 ms a token (17 tokens/s) for one session, 31 tokens/s with the chain full",
    ]


def test_programs_get_every_figure() -> None:
    found = placed()
    document = json.loads(json.dumps(placement_map(found), allow_nan=False))
    assert sorted(document) == ["bottleneck_s", "client_hop_s", "stages", "token_s", "tokens_per_s"]
    assert (
        document["token_s"]
        == found.token_s
        == pytest.approx(
            document["client_hop_s"] + sum(stage["compute_s"] + stage["hop_s"] for stage in document["stages"])
        )
    )
    assert document["tokens_per_s"] == min(stage["tokens_per_s"] for stage in document["stages"])
    assert [
        (stage["stage"], stage["peer"], stage["name"], stage["start"], stage["stop"]) for stage in document["stages"]
    ] == [
        (0, "2", "laptop", 0, 1),
        (1, "1", "desk", 1, 6),
    ]
    last = document["stages"][1]
    assert (last["weights_bytes"], last["cache_bytes"], last["limit_bytes"]) == (6 * GIB, 5 << 26, 8 * GIB)


def test_a_rate_without_bound_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = place_model(replace(WANTED, links={}), [CandidateWorker("1", "desk", 8 * GIB, byte_s=0.0)])
    document = placement_map(found)
    assert (document["tokens_per_s"], document["stages"][0]["tokens_per_s"]) == (None, None)
    print_placement(found)
    assert "1 stage, predicted at best: 0.00 ms a token (– tokens/s)" in capsys.readouterr().out


def test_names_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_placement(placed("desk\x1b[2J"))
    assert "\x1b" not in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------- split models


PLACEMENT = Placement(
    stages=tuple(
        PlacedStage(
            CandidateWorker(f"id{index}", f"box{index}", 1 << 30),
            2 * index,
            2 * index + 2,
            1000,
            9,
            0.002,
            0.001,
            0.0,
        )
        for index in range(2)
    ),
    client_hop_s=0.001,
    client_occupied_s=0.0,
)
LOADED = SimpleNamespace(
    width=8, device="cpu", read_bytes=900, received_bytes=100, weights_bytes=1000, resident_bytes=5 << 20
)


class StandIn:
    """As much of a chain as its facts need."""

    loaded = (LOADED, LOADED)

    def __init__(self, encoding: str) -> None:
        self.plan = SimpleNamespace(placement=PLACEMENT, stages=PLACEMENT.stages)
        self.times, self.encodings, self.dtype = times(), (encoding, ""), "fp32"


def times() -> ChainTimes:
    """Two prompts, and three tokens behind them; a stage was lost meanwhile."""
    made = ChainTimes(mendings=[("box1", 0.5)])
    for _ in range(2):
        made.add(PassResult((7,), 0.009, (2000, 3000)), prefill=True)
    for _ in range(3):
        made.add(PassResult((7,), 0.009, (2000, 3000)), prefill=False)
    return made


def test_programs_are_told_all() -> None:
    split = split_facts(StandIn("bf16"))  # type: ignore[arg-type]
    # 9 ms a token: 2 + 3 computing, 1 + 1 + 1 on the way, 1 the rest.
    known = ("token_ms", "compute_ms", "link_ms", "rest_ms", "prompt_ms")
    assert [round(split[name], 6) for name in known] == [9.0, 5.0, 3.0, 1.0, 9.0]
    assert [stage["compute_ms"] for stage in split["stages"]] == [2.0, 3.0]
    assert [stage["wire_bytes"] for stage in split["stages"]] == [16, 4], "the last one sends a token"
    assert split["mendings"] == [{"lost": "box1", "seconds": 0.5}]


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_split_facts(split_facts(StandIn("")))  # type: ignore[arg-type]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["PEER", "LAYERS", "READ", "RECEIVED", "WEIGHTS", "MEMORY", "MS/TOKEN", "WIRE"]
    assert rows[1] == ["box0", "0–1", "900", "B", "100", "B", "1000", "B", "5.0", "MiB", "2.00", "32", "B"]
    assert "a token took 9.00 ms: 5.00 computing + 3.00 on the way + 1.00 the rest; a prompt 9.00 ms" in out
    assert "box1 was lost; the text went on 0.50 s later" in out
