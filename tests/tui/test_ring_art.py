from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tui.format import Span
from tui.ring_art import MAX_BOXES, Seat, draw_ring


def seats(size: int, name: str = "peer") -> list[Seat]:
    return [Seat("●", "good", (f"{name}{rank}", "training ×4", "8.2k tok/s")) for rank in range(size)]


def plain(rows: list[list[Span]]) -> list[str]:
    return ["".join(span.text for span in row).rstrip() for row in rows]


def test_a_ring_of_four_is_a_loop():
    assert plain(draw_ring(seats(4), 40, 8, centre=("generation 7",))) == [
        "╭ 0 ● ───────────╮    ╭ 1 ● ───────────╮",
        "│ peer0          │───▶│ peer1          │",
        "╰────────────────╯    ╰────────────────╯",
        "         ▲    generation 7     │",
        "         │                     ▼",
        "╭ 3 ● ───────────╮    ╭ 2 ● ───────────╮",
        "│ peer3          │◀───│ peer2          │",
        "╰────────────────╯    ╰────────────────╯",
    ]


def test_a_ring_of_three_bends_around_its_last_member():
    assert plain(draw_ring(seats(3), 34, 8)) == [
        "╭ 0 ● ────────╮    ╭ 1 ● ────────╮",
        "│ peer0       │───▶│ peer1       │",
        "╰─────────────╯    ╰─────────────╯",
        "       ▲                  │",
        "       │                  │",
        "       │ ╭ 2 ● ────────╮  │",
        "       ╰─│ peer2       │◀─╯",
        "         ╰─────────────╯",
    ]


def test_a_ring_of_two_closes_below_and_of_one_around_itself():
    two = plain(draw_ring(seats(2), 34, 5))
    assert two[3].strip().startswith("▲")
    assert "╰" in two[4]
    one = plain(draw_ring(seats(1), 34, 5))
    assert any("╭─▶│ peer0" in line for line in one)


@pytest.mark.parametrize("size", range(1, MAX_BOXES + 1))
def test_every_rank_and_as_many_arrows_as_members_are_drawn(size: int):
    text = "\n".join(plain(draw_ring(seats(size), 76, 15)))
    assert all(f" {rank} ● " in text and f"peer{rank}" in text for rank in range(size))
    assert sum(text.count(head) for head in "▶◀▲▼") == size


@pytest.mark.parametrize("size", range(1, MAX_BOXES + 1))
def test_the_lit_arrow_walks_on_with_the_steps(size: int):
    for pulse in (None, *range(2 * size)):
        rows = draw_ring(seats(size), 76, 15, pulse=pulse)
        heads = sum(span.text.count(head) for row in rows for span in row if span.role == "accent" for head in "▶◀▲▼")
        assert heads == (0 if pulse is None else 1)


def test_many_members_are_a_chain():
    rows = plain(draw_ring(seats(12), 40, 6))
    assert rows[0].startswith(" 0 ● peer0")
    assert rows[-1].endswith("↩")
    assert sum(line.count("→") for line in rows) == 11


def test_what_does_not_fit_is_counted():
    rows = plain(draw_ring(seats(64), 40, 5))
    assert len(rows) == 5
    shown = sum(line.count("●") for line in rows)
    assert rows[-1] == f"… and {64 - shown} more, then back to 0"


@given(
    size=st.integers(0, 70),
    width=st.integers(0, 120),
    height=st.integers(0, 30),
    name=st.text(max_size=20),
    pulse=st.integers(),
)
def test_nothing_is_drawn_outside(size: int, width: int, height: int, name: str, pulse: int):
    rows = draw_ring(seats(size, name), width, height, pulse=pulse, centre=("generation 123456", "step 1"))
    assert len(rows) <= height
    assert all(sum(cell_len(span.text) for span in row) <= width for row in rows)


def test_a_box_tells_the_way_to_the_right_as_far_as_there_is_room():
    known = [dataclasses.replace(seat, ways=("98.2 Mbit/s · 20 ms", "98.2M 20 ms", "98.2M")) for seat in seats(4)]
    assert "╰ 98.2 Mbit/s · 20 ms ───╯" in "\n".join(plain(draw_ring(known, 76, 15)))
    assert "╰ 98.2M 20 ms ───╯" in plain(draw_ring(known, 40, 8))[2]
    assert "╰ 98.2M ─╯" in plain(draw_ring(known, 24, 8))[2]


def test_the_slowest_way_is_marked_and_dashed_not_only_coloured():
    for size in range(2, MAX_BOXES + 1):
        for slowest in range(size):
            known = [
                dataclasses.replace(seat, ways=("98M",), slowest=rank == slowest)
                for rank, seat in enumerate(seats(size))
            ]
            rows = draw_ring(known, 76, 15, pulse=0)
            text = "\n".join(plain(rows))
            assert text.count("! 98M") == 1
            assert text.count(" 98M") == size
            assert "╌" in text or "╎" in text
            assert sum(text.count(head) for head in "▶◀▲▼") == size
            marked = [span for row in rows for span in row if span.role == "warn" and "98M" in span.text]
            assert len(marked) == 1
    assert not any(dash in "\n".join(plain(draw_ring(seats(5), 76, 15))) for dash in "╌╎!")


def test_a_chain_marks_the_slowest_way_too():
    known = [dataclasses.replace(seat, slowest=rank == 7) for rank, seat in enumerate(seats(12))]
    text = "\n".join(plain(draw_ring(known, 60, 6)))
    assert text.count("!→") == 1
    assert "peer7  !→" in text
