"""p2ptrain parts, against a seed that answers what it was told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tui.chains import how_to_split
from wire.records import PartInfo

Command = Callable[..., Any]

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
