"""Which parts make a chain, against a search through all that are possible, and how chains are drawn."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from p2ptrain.core.texts import layers_text
from tui.chain_panel import draw_chain
from tui.chains import MAX_CHAINS, Gap, ShownChain, chains_of
from tui.format import Look, Span
from wire.records import PartInfo

LAYERS = 8


def part(start: int, stop: int, peer: str = "a", **changes: Any) -> PartInfo:
    known = {"layers": LAYERS, "sessions": 1, "compute_ms": 1.0, "busy": 0.5, "tokens_per_s": 10.0}
    who = {"id": f"{peer}/{start}-{stop}", "peer": peer, "peer_name": peer}
    return PartInfo(f"{start}-{stop}", "m", "model", start, stop, **(who | known | changes))


def shape(chain: ShownChain) -> list[str]:
    """``a0-4`` for a part, ``?4-8`` for a gap, ``~4-8`` for one whose layers parts beside have."""
    return [
        f"{'~' if stage.held else '?'}{stage.start}-{stage.stop}"
        if isinstance(stage, Gap)
        else f"{stage.peer}{stage.start}-{stage.stop}"
        for stage in chain.stages
    ]


def test_stages_stand_in_the_order_of_layers():
    (chain,) = chains_of([part(5, 8, "c"), part(0, 2, "a"), part(2, 5, "b")])
    assert shape(chain) == ["a0-2", "b2-5", "c5-8"]
    assert (chain.missing, chain.unchained) == (0, ())


def test_parts_that_overlap_do_not_fit_and_are_beside():
    (chain,) = chains_of([part(0, 5, "a"), part(4, 8, "b"), part(3, 4, "c")])
    assert shape(chain) == ["a0-5", "~5-8"]
    assert [unchained.peer for unchained in chain.unchained] == ["c", "b"]
    (chain,) = chains_of([part(0, 5, "a"), part(4, 7, "b")])
    assert shape(chain) == ["a0-5", "~5-7", "?7-8"]


def test_what_works_stands_before_what_is_idle_and_few_stages_before_many():
    idle = {"sessions": 0, "busy": 0.0, "tokens_per_s": 0.0}
    whole, halves = part(0, 8, "w", **idle), [part(0, 4, "a"), part(4, 8, "b")]
    first, second = chains_of([whole, *halves])
    assert (shape(first), shape(second)) == (["a0-4", "b4-8"], ["w0-8"])
    assert (first.number, second.number) == (0, 1)
    first, second = chains_of([dataclasses.replace(whole, sessions=1), *halves])
    assert shape(first) == ["w0-8"]


def test_replicas_are_told_apart_by_whom_they_send_to():
    parts = [part(0, 4, "a", next="y", sessions=2), part(0, 4, "b", next="x"), part(4, 8, "x"), part(4, 8, "y")]
    first, second = chains_of(parts)
    assert (shape(first), shape(second)) == (["a0-4", "y4-8"], ["b0-4", "x4-8"])
    assert first.unchained == second.unchained == ()


def test_models_are_kept_apart_and_stand_by_name():
    other = dataclasses.replace(part(0, 8, "z"), model="n", name="another")
    same_name = dataclasses.replace(part(0, 8, "y"), model="o")
    assert [(chain.name, chain.model) for chain in chains_of([part(0, 8), same_name, other])] == [
        ("another", "n"),
        ("model", "m"),
        ("model", "o"),
    ]
    assert chains_of([]) == []


def test_figures_of_a_chain():
    slow = part(4, 8, "b", compute_ms=9.0, busy=1.0, tokens_per_s=7.0, sessions=3)
    (chain,) = chains_of([part(0, 4, "a", compute_ms=4.0, busy=0.5), slow])
    assert chain.slowest is slow
    assert chain.bubble == pytest.approx(0.25)
    assert (chain.tokens_per_s, chain.sessions) == (7.0, 3)
    (chain,) = chains_of([part(0, 8, "a", busy=0.0, compute_ms=4.0)])
    assert chain.slowest is None  # beside what?
    assert chain.bubble is None


# --------------------------------------------------------------------------------------------------- an independent way


def all_ways(parts: list[PartInfo], at: int = 0) -> Iterator[list[PartInfo]]:
    """Every choice of parts that do not overlap, in order."""
    yield []
    for item in parts:
        if item.start >= at:
            for rest in all_ways(parts, item.stop):
                yield [item, *rest]


def cost(way: list[PartInfo]) -> tuple[int, int, int]:
    covered = sum(item.stop - item.start for item in way)
    idle = sum(not (item.sessions or item.tokens_per_s or item.busy) for item in way)
    return LAYERS - covered, idle, len(way)


@st.composite
def held(draw: st.DrawFn) -> list[PartInfo]:
    parts = {}
    for index in range(draw(st.integers(0, 7))):
        start = draw(st.integers(0, LAYERS - 1))
        stop = draw(st.integers(start + 1, LAYERS))
        works = {} if draw(st.booleans()) else {"sessions": 0, "busy": 0.0, "tokens_per_s": 0.0}
        item = part(start, stop, f"p{index}", next=f"p{draw(st.integers(0, 7))}", **works)
        parts[item.id] = item
    return list(parts.values())


@given(held())
def test_the_first_chain_lacks_least_and_all_that_is_held_is_told_once(parts: list[PartInfo]):
    chains = chains_of(parts)
    assert bool(chains) == bool(parts)
    told = [item.id for chain in chains for item in (*chain.parts, *chain.unchained)]
    assert sorted(told) == sorted(item.id for item in parts)
    for chain in chains:
        places = [0, *(stage.stop for stage in chain.stages)]
        assert places[-1] == LAYERS
        assert [stage.start for stage in chain.stages] == places[:-1]
        assert not any(
            isinstance(one, Gap) and isinstance(two, Gap) and one.held == two.held
            for one, two in pairwise(chain.stages)
        )
        layers = {layer for item in parts for layer in range(item.start, item.stop)}
        if chain.number == 0:
            assert cost(chain.parts) == min(map(cost, all_ways(parts)))
            for stage in chain.stages:
                if isinstance(stage, Gap) and not stage.held:
                    assert not layers & set(range(stage.start, stage.stop))
                elif isinstance(stage, Gap):
                    assert set(range(stage.start, stage.stop)) <= layers
        else:
            assert chain.missing == 0


@given(held(), st.randoms(use_true_random=False))
def test_chains_do_not_depend_on_the_order_in_which_parts_became_known(parts: list[PartInfo], chance: random.Random):
    shuffled = list(parts)
    chance.shuffle(shuffled)
    assert chains_of(shuffled) == chains_of(parts)
    alike = [part(0, 5, "a"), part(3, 8, "b")]  # either lacks three layers
    assert chains_of(alike) == chains_of(alike[::-1])


def test_chains_of_a_model_are_bounded():
    chains = chains_of([part(0, LAYERS, f"p{index:04}") for index in range(100)])
    assert (len(chains), len(chains[-1].unchained)) == (MAX_CHAINS, 100 - MAX_CHAINS)


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


def no_way(origin: str, target: str) -> str:
    return ""


def look_of(peer: str) -> Look:
    return Look("○", "calm")


def plain(rows: list[list[Span]]) -> list[str]:
    return ["".join(span.text for span in row).rstrip() for row in rows]


def test_the_pipeline_of_a_job_bears_its_name_and_says_that_it_trains():
    (training,) = chains_of(chain(2, name="c0ffee", sessions=0).parts, {"m": "tiny"})
    rows = plain(draw_chain(training, look_of, 76, no_way))
    assert rows[0].startswith("tiny  4 layers · in training · 31.2 tok/s · bubble 25% · bfloat16")
    assert not chains_of(training.parts, {"another": "tiny"})[0].trains


@pytest.mark.parametrize("width", [20, 40, 76, 156])
@pytest.mark.parametrize("count", [2, 3, 5, 9, 40])
def test_every_stage_is_drawn_and_the_slowest_is_marked_not_only_coloured(count: int, width: int):
    rows = draw_chain(chain(count), look_of, width, no_way)
    assert all(sum(cell_len(span.text) for span in row) <= width for row in rows)
    text = "\n".join(plain(rows))
    for index in range(count):
        assert layers_text(2 * index, 2 * index + 2) in text
        assert f"peer{index}" in text or width < 24
    assert text.count("!") == 1
    (mark,) = [span for row in rows for span in row if "!" in span.text]
    assert mark.role == "warn"


def test_a_stage_is_a_line() -> None:
    rows = plain(draw_chain(chain(12), look_of, 100, no_way))
    assert rows[1] == "layers   held by  request  weights, caches      busy ░ bubble  tok/s  to next   sessions"
    assert re.fullmatch(r"0–1 +○ peer0 +4 ms █+▓+·+ 5.0/8 GiB █+░+  75% +31.2 +4 KiB +2", rows[2])
    assert re.fullmatch(r"2–3 ! +○ peer1 +8 ms █+▓+·+ 5.0/8 GiB █+░+  75% +31.2 +4 KiB +2", rows[3])
    assert len(rows) == 14
    known = {("p0", "p1"): "relayed by desk"}
    rows = plain(draw_chain(chain(12), look_of, 120, lambda *ends: known.get(ends, "")))
    assert rows[1].endswith(" way")
    assert ["relayed by desk" in row for row in rows[2:4]] == [True, False]


def test_what_is_beside_is_named_or_counted():
    more = [stage(10 + index, 0, 2, 8, peer_name=f"spare{index}") for index in range(30)]
    broken = [stage(0, 0, 2, 8, sessions=9), *more]
    (found,) = chains_of(broken)
    last = plain(draw_chain(found, look_of, 60, no_way))[-1]
    assert last.startswith("beside: ○ spare0 0–1  ○ spare1 0–1")
    assert last.endswith(f"+{30 - last.count('○')}")


def test_gaps_have_a_look_of_their_own():
    assert Gap(0, 3) != Gap(0, 3, held=True)
    (found,) = chains_of([stage(0, 0, 6, 8), stage(1, 3, 8, 8)])
    text = "\n".join(plain(draw_chain(found, look_of, 76, no_way)))
    assert "no part fits" in text
    assert "nobody holds" not in text
    assert "beside: ○ peer1 3–7" in text
