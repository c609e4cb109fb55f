"""What is shown of a placement: a table for people, a map for programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2ptrain.cli.placement import placement_map, print_placement
from p2ptrain.core.footprint import ModelSizes
from ring.planning.measurements import CandidateWorker, LinkQuality
from ring.planning.serving import Placement, place_model
from ring.planning.workloads import ServingWorkload

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
