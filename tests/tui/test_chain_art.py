from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from p2ptrain.core.texts import layers_text
from tui.chain_art import draw_chain
from tui.chains import Chain, Gap, chains_of
from tui.format import Look, Span
from wire.records import PartInfo

GIB = 1 << 30


def stage(index: int, start: int, stop: int, layers: int, **changes: Any) -> PartInfo:
    part = PartInfo(
        f"p{index}/x", f"p{index}", f"peer{index}", "x", "m", "llama", start, stop, layers, "bfloat16", 4 * GIB, GIB,
        8 * GIB, 2, 4.0, 0.75, 31.2, 4096.0, f"p{index + 1}",
    )  # fmt: skip
    return dataclasses.replace(part, **changes)


def chain(count: int, **changes: Any) -> Chain:
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


def test_a_chain_of_two():
    assert plain(draw_chain(chain(2), look_of, 76)) == [
        "llama  4 layers · 2 sessions · 31.2 tok/s · bubble 25% · bfloat16 · 2 stages",
        "╭ 0–1 ○ ─────────────────────╮              ╭ 2–3 ○ ────────── ! slowest ╮",
        "│ peer0                      │              │ peer1                      │",
        "│ ████████▓▓······ 5.0/8 GiB │  4 KiB/tok   │ ████████▓▓······ 5.0/8 GiB │",
        "│ ███████        4 ms a work │─────────────▶│ ██████████████ 8 ms a work │",
        "│ ████░ 75% busy, 25% bubble │              │ ████░ 75% busy, 25% bubble │",
        "│ 2 sessions · 31.2 tok/s    │              │ 2 sessions · 31.2 tok/s    │",
        "╰────────────────────────────╯              ╰────────────────────────────╯",
    ]


def test_the_pipeline_of_a_job_bears_its_name_and_says_that_it_trains():
    (training,) = chains_of(chain(2, name="c0ffee", sessions=0).parts, {"m": "tiny"})
    rows = plain(draw_chain(training, look_of, 76))
    assert rows[0].startswith("tiny  4 layers · in training · 31.2 tok/s · bubble 25% · bfloat16")
    assert rows[3] == "│ ████████▓▓······ 5.0/8 GiB │  4 KiB/tok   │ ████████▓▓······ 5.0/8 GiB │"
    assert rows[6] == "│ training · 31.2 tok/s      │              │ training · 31.2 tok/s      │"
    assert not chains_of(training.parts, {"another": "tiny"})[0].trains


def test_a_small_gap_puts_the_weight_of_a_token_on_the_edge():
    assert plain(draw_chain(chain(3), look_of, 76))[1:] == [
        "╭ 0–1 ○ ──────────────╮   ╭ 2–3 ○ ─── ! slowest ╮   ╭ 4–5 ○ ──────────────╮",
        "│ peer0               │   │ peer1               │   │ peer2               │",
        "│ █████▓··· 5.0/8 GiB │   │ █████▓··· 5.0/8 GiB │   │ █████▓··· 5.0/8 GiB │",
        "│ ███▌    4 ms a work │──▶│ ███████ 8 ms a work │──▶│ ███▌    4 ms a work │",
        "│ ████████░░ 75% busy │   │ ████████░░ 75% busy │   │ ████████░░ 75% busy │",
        "│ 2 ses · 31.2 tok/s  │   │ 2 ses · 31.2 tok/s  │   │ 2 ses · 31.2 tok/s  │",
        "╰─────── 4 KiB/tok ▶ ─╯   ╰─────── 4 KiB/tok ▶ ─╯   ╰─────────────────────╯",
    ]


def test_layers_that_nobody_holds_are_a_dashed_box():
    whole = chain(4)
    (broken,) = chains_of([part for part in whole.parts if part.peer != "p2"])
    text = "\n".join(plain(draw_chain(broken, look_of, 156)))
    assert "✗ 2 of 8 layers missing" in text
    assert "╭ 4–5 ✗ ╌╌╌" in text
    assert "nobody holds" in text
    assert text.count("╌▶") == 2
    assert text.count("─▶") == 1
    lines = "\n".join(plain(draw_chain(broken, look_of, 40)))
    assert "4–5    ✗ nobody holds these layers" in lines
    assert "nobody" not in "\n".join(plain(draw_chain(whole, look_of, 156)))


@pytest.mark.parametrize("width", [20, 40, 76, 116, 156])
@pytest.mark.parametrize("count", [2, 3, 5, 9, 40])
def test_every_stage_is_drawn_and_the_slowest_is_marked_not_only_coloured(count: int, width: int):
    rows = draw_chain(chain(count), look_of, width)
    text = "\n".join(plain(rows))
    for index in range(count):
        assert layers_text(2 * index, 2 * index + 2) in text
        assert f"peer{index}" in text or width < 24
    assert text.count("!") == 1
    (mark,) = [span for row in rows for span in row if "!" in span.text]
    assert mark.role == "warn"


def test_one_stage_alone_is_not_the_slowest():
    assert "!" not in "\n".join(plain(draw_chain(chain(1), look_of, 76)))


def test_two_rows_of_boxes_are_joined():
    text = plain(draw_chain(chain(8), look_of, 90))
    assert len(text) == 1 + 2 * 7
    assert text[4] == "   │ ████▌     4 ms │──▶│ █████████ 8 ms │──▶│ ████▌     4 ms │──▶│ ████▌     4 ms │──▶"
    assert text[11] == "──▶│ ████▌     4 ms │──▶│ ████▌     4 ms │──▶│ ████▌     4 ms │──▶│ ████▌     4 ms │"
    assert text[7] == "   ╰── 4 KiB/tok ▶ ─╯   ╰── 4 KiB/tok ▶ ─╯   ╰── 4 KiB/tok ▶ ─╯   ╰── 4 KiB/tok ▶ ─╯"
    assert text[14] == "   ╰── 4 KiB/tok ▶ ─╯   ╰── 4 KiB/tok ▶ ─╯   ╰── 4 KiB/tok ▶ ─╯   ╰────────────────╯"


def test_where_boxes_do_not_fit_there_is_a_line_for_each():
    rows = plain(draw_chain(chain(12), look_of, 100))
    assert rows[1] == "layers   held by  a work   weights, caches      busy ░ bubble  tok/s  to next   sessions"
    assert rows[2] == "0–1      ○ peer0      4 ms █████▓···· 5.0/8 GiB ███████░░  75%   31.2     4 KiB        2"
    assert rows[3] == "2–3    ! ○ peer1      8 ms █████▓···· 5.0/8 GiB ███████░░  75%   31.2     4 KiB        2"
    assert len(rows) == 14


def test_a_figure_that_is_too_long_is_cut():
    years = chain(12, compute_ms=(9999 * 86400 + 23 * 3600) * 1e3)
    assert plain(draw_chain(years, look_of, 80))[2].startswith("0–1    ! ○ peer0  9999d 2… ")


@pytest.mark.parametrize(
    ("weights_bytes", "cache_bytes", "bar"),
    [
        (0, 0, "················"),
        (4 * GIB, 0, "████████········"),
        (6 * GIB, 2 * GIB, "████████████▓▓▓▓"),
        (4 * GIB, 12 * GIB, "████▓▓▓▓▓▓▓▓▓▓▓ 16.0/8 GiB │"),  # more than the limit: the bar is full
    ],
)
def test_the_bar_of_memory_is_weights_and_caches_of_the_limit(weights_bytes: int, cache_bytes: int, bar: str):
    rows = plain(draw_chain(chain(2, weights_bytes=weights_bytes, cache_bytes=cache_bytes), look_of, 120))
    assert rows[3].startswith(f"│ {bar}")


@pytest.mark.parametrize(("busy", "bar"), [(0.0, "░░░░░"), (0.5, "███░░"), (1.0, "█████")])
def test_the_bar_of_work_is_busy_and_bubble(busy: float, bar: str):
    assert plain(draw_chain(chain(2, busy=busy), look_of, 120))[5].startswith(
        f"│ {bar} {busy:.0%} busy, {1 - busy:.0%} bubble │"
    )


def test_a_worker_without_a_limit_tells_what_it_takes():
    assert "5 GiB" in "\n".join(plain(draw_chain(chain(2, limit_bytes=0), look_of, 120)))


def test_what_is_beside_is_named_or_counted():
    more = [stage(10 + index, 0, 2, 8, peer_name=f"spare{index}") for index in range(30)]
    broken = [stage(0, 0, 2, 8, sessions=9), *more]
    (found,) = chains_of(broken)
    last = plain(draw_chain(found, look_of, 60))[-1]
    assert last.startswith("beside: ○ spare0 0–1  ○ spare1 0–1")
    assert last.endswith(f"+{30 - last.count('○')}")


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    figures = st.sampled_from([0, 1, 1000, 2**30, 2**53])
    floats = st.sampled_from([0.0, 0.001, 1.0, 12345.678, 9.9e13, 2.0**53])
    parts, start = [], 0
    for index in range(draw(st.integers(1, 24))):
        start += draw(st.sampled_from([0, 0, 0, 3]))
        stop = start + draw(st.sampled_from([1, 2, 90]))
        parts.append(
            PartInfo(
                f"p{index}/x",
                f"p{index}",
                draw(st.text(max_size=30)),
                "x",
                "m",
                draw(st.text(max_size=70)) and "m",
                start,
                stop,
                4096,
                draw(st.text(max_size=16)),
                draw(figures),
                draw(figures),
                draw(figures),
                draw(figures),
                draw(floats),
                draw(st.floats(0, 1)),
                draw(floats),
                draw(floats),
                "",
            )
        )
        start = stop
    return draw(st.sampled_from(chains_of([part for part in parts if part.stop <= 4096])))


@given(chains(), st.integers(0, 170))
def test_nothing_is_drawn_outside(drawn: Chain, width: int):
    rows = draw_chain(drawn, look_of, width)
    assert all(sum(cell_len(span.text) for span in row) <= width for row in rows)
    assert bool(rows) == (width > 0)


def test_gaps_have_a_look_of_their_own():
    assert Gap(0, 3) != Gap(0, 3, held=True)
    (found,) = chains_of([stage(0, 0, 6, 8), stage(1, 3, 8, 8)])
    text = "\n".join(plain(draw_chain(found, look_of, 76)))
    assert "no part fits" in text
    assert "nobody holds" not in text
    assert "beside: ○ peer1 3–7" in text
