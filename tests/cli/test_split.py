"""What is told of a model that is split over workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2ptrain.cli.placement import print_split_facts, split_facts
from ring.planning.measurements import CandidateWorker
from ring.planning.serving import PlacedStage, Placement
from roles.serving.chain_session import ChainTimes
from roles.serving.model import PassResult

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
