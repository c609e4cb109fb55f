from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from rich.cells import cell_len

from p2ptrain.core.texts import layers_text
from tui.chain_panel import draw_chain
from tui.chains import Gap, ShownChain, chains_of
from tui.format import Look, Span
from wire.records import PartInfo

GIB = 1 << 30


def stage(index: int, start: int, stop: int, layers: int, **changes: Any) -> PartInfo:
    part = PartInfo(
        "x", "m", "llama", start, stop, layers, "bfloat16", 4 * GIB, GIB, 8 * GIB, 2, 4.0, busy=0.75, tokens_per_s=31.2,
        out_position_bytes=4096.0, next=f"p{index + 1}", id=f"p{index}/x", peer=f"p{index}", peer_name=f"peer{index}",
    )  # fmt: skip
    return dataclasses.replace(part, **changes)


def chain(count: int, **changes: Any) -> ShownChain:
    """``count`` stages of two layers each, the second one of which is the slowest."""
    parts = [
        stage(index, 2 * index, 2 * index + 2, 2 * count, **({"compute_ms": 8.0 if index == 1 else 4.0} | changes))
        for index in range(count)
    ]
    return chains_of(parts)[0]


def look_of(peer: str) -> Look:
    return Look("○", "calm")


def plain(rows: list[list[Span]]) -> list[str]:
    return ["".join(span.text for span in row).rstrip() for row in rows]


def test_the_pipeline_of_a_job_bears_its_name_and_says_that_it_trains():
    (training,) = chains_of(chain(2, name="c0ffee", sessions=0).parts, {"m": "tiny"})
    rows = plain(draw_chain(training, look_of, 76))
    assert rows[0].startswith("tiny  4 layers · in training · 31.2 tok/s · bubble 25% · bfloat16")
    assert not chains_of(training.parts, {"another": "tiny"})[0].trains


@pytest.mark.parametrize("width", [20, 40, 76, 156])
@pytest.mark.parametrize("count", [2, 3, 5, 9, 40])
def test_every_stage_is_drawn_and_the_slowest_is_marked_not_only_coloured(count: int, width: int):
    rows = draw_chain(chain(count), look_of, width)
    assert all(sum(cell_len(span.text) for span in row) <= width for row in rows)
    text = "\n".join(plain(rows))
    for index in range(count):
        assert layers_text(2 * index, 2 * index + 2) in text
        assert f"peer{index}" in text or width < 24
    assert text.count("!") == 1
    (mark,) = [span for row in rows for span in row if "!" in span.text]
    assert mark.role == "warn"


def test_a_stage_is_a_line() -> None:
    rows = plain(draw_chain(chain(12), look_of, 100))
    assert rows[1] == "layers   held by  request  weights, caches      busy ░ bubble  tok/s  to next   sessions"
    assert re.fullmatch(r"0–1 +○ peer0 +4 ms █+▓+·+ 5.0/8 GiB █+░+  75% +31.2 +4 KiB +2", rows[2])
    assert re.fullmatch(r"2–3 ! +○ peer1 +8 ms █+▓+·+ 5.0/8 GiB █+░+  75% +31.2 +4 KiB +2", rows[3])
    assert len(rows) == 14


def test_what_is_beside_is_named_or_counted():
    more = [stage(10 + index, 0, 2, 8, peer_name=f"spare{index}") for index in range(30)]
    broken = [stage(0, 0, 2, 8, sessions=9), *more]
    (found,) = chains_of(broken)
    last = plain(draw_chain(found, look_of, 60))[-1]
    assert last.startswith("beside: ○ spare0 0–1  ○ spare1 0–1")
    assert last.endswith(f"+{30 - last.count('○')}")


def test_gaps_have_a_look_of_their_own():
    assert Gap(0, 3) != Gap(0, 3, held=True)
    (found,) = chains_of([stage(0, 0, 6, 8), stage(1, 3, 8, 8)])
    text = "\n".join(plain(draw_chain(found, look_of, 76)))
    assert "no part fits" in text
    assert "nobody holds" not in text
    assert "beside: ○ peer1 3–7" in text
