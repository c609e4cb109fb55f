"""How values read, and that their colours can be read."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.color import Color

from tui import format as fmt
from tui.format import JOB_LOOKS, LEVEL_LOOKS, PEER_LOOKS
from tui.theme import DARK, LIGHT, Palette

bytes_rate = partial(fmt.rate, unit="B/s")


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        (fmt.count, 0, "0"),
        (fmt.count, 7, "7"),
        (fmt.count, 0.84, "0.84"),
        (fmt.count, 999, "999"),
        (fmt.count, 999.9, "1.00k"),
        (fmt.count, 12_345, "12.3k"),
        (fmt.count, 4.5e6, "4.50M"),
        (fmt.size, 512, "512 B"),
        (fmt.size, 3 << 29, "1.50 GiB"),
        (fmt.size, 1 << 62, "9999 TiB"),
        (fmt.rate, 98.2e6, "98.2 Mbit/s"),
        (fmt.millis, 0.42, "0.42 ms"),
        (fmt.millis, 1240, "1.24 s"),
        (fmt.duration, 7.9, "7 s"),
        (fmt.duration, 245, "4m 05s"),
        (fmt.duration, 11_520, "3h 12m"),
        (fmt.duration, 200_000, "2d 7h"),
        (fmt.age, 0.42, "0.4 s"),
        (fmt.age, 12, "12 s"),
        (fmt.percent, 0.268, "27%"),
        (fmt.percent, 7.0, "100%"),
        (fmt.loss, 2.34567, "2.3457"),
        (fmt.scientific, 3e-4, "3.0e-4"),
    ],
)
def test_values_read_well(function, value, shown):
    assert function(value) == shown


@given(st.floats() | st.integers(-(2**64), 2**64) | st.none())
def test_every_value_reads_somehow_and_shortly(value):
    for function in (fmt.count, fmt.size, bytes_rate, fmt.millis, fmt.duration, fmt.age, fmt.percent, fmt.scientific):
        assert 0 < len(function(value)) <= 10
    if value is not None:
        assert len(fmt.clock(value)) == 8
    if value is None or not 0 <= value < math.inf:
        for function in (fmt.count, fmt.size, bytes_rate, fmt.millis, fmt.duration, fmt.age):
            assert function(value) == fmt.UNKNOWN


@given(st.floats(), st.lists(st.none() | st.floats(), max_size=20), st.integers(-1, 40))
def test_a_bar_and_a_sparkline_are_as_wide_as_they_should_be(part, values, width):
    assert len(fmt.bar(part, width)) == len(fmt.sparkline(values, width)) == max(0, width)


def test_a_sparkline_shows_changes_and_gaps():
    assert fmt.sparkline([100.0, 101.0, None, 102.0], 6) == "  ▄▆ █"
    assert fmt.sparkline([5.0, 5.0], 2) == "▄▄"
    assert fmt.sparkline([], 3) == "   "
    assert fmt.sparkline([1.0], 0) == ""


@given(st.tuples(*[st.floats(0, 1e6)] * 3), st.integers(4, 200))
def test_the_parts_of_a_step_fill_the_bar(parts, width):
    spans = fmt.filled_bar(list(zip(fmt.STEP_LOOKS.values(), parts, strict=True)), width)
    assert sum(len(span.text) for span in spans) == (width if sum(parts) > 0 else 0)
    assert len({span.text[0] for span in spans}) == len(spans)  # told apart without colours


@given(st.floats(-1e9, 1e9), st.floats(1.0, 1e9), st.integers(2, 12))
def test_ticks_are_few_and_within(low, width, most):
    found = fmt.ticks(low, low + width, most)
    assert len(found) <= most
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in found)


@given(st.text(max_size=30), st.integers(0, 20))
def test_fitted_text_fits(text, width):
    assert cell_len(fmt.fit(text, width)) <= max(width, 0)


def test_states_are_told_apart_without_colours():
    symbols = [look.symbol for state, look in fmt.PEER_LOOKS.items() if state != "idle"]
    assert len(set(symbols)) == len(symbols)
    assert all(cell_len(look.symbol) == 1 for look in (*fmt.PEER_LOOKS.values(), *fmt.JOB_LOOKS.values()))
    assert fmt.look_in(fmt.PEER_LOOKS, "invented").symbol == "?"


def test_a_link_in_words_the_longest_first():
    assert fmt.link_texts(20.0, 98.2e6) == ("98.2 Mbit/s · 20 ms", "98.2M 20 ms", "98.2M")
    assert fmt.link_texts(0.031, 6.04e9) == ("6.04 Gbit/s · 0.03 ms", "6.04G 0.03 ms", "6.04G")
    assert fmt.link_texts(20.0, None) == ("20 ms",)
    assert fmt.link_texts(None, 1e6) == ()
    assert fmt.link_texts(20.0, None, "relayed by vps") == ("20 ms relayed by vps", "relayed by vps", "relayed")


TEXT_ROLES = sorted(DARK.colours.keys() - {"background", "surface", "panel", "border"})


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
@pytest.mark.parametrize("role", TEXT_ROLES)
@pytest.mark.parametrize("ground", ["surface", "panel"])
def test_every_text_can_be_read(palette: Palette, role: str, ground: str):
    """Contrast as WCAG 2.1 defines it: 4.5 on the surface; 3 on the bar under the cursor, which is passing."""
    colours = [Color.parse(palette.colours[name]) for name in (role, ground)]
    lighter, darker = sorted((_luminance(colour) for colour in colours), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= (4.5 if ground == "surface" else 3.0)


def _luminance(colour: Color) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_look_has_a_role_of_the_palette():
    for looks in (PEER_LOOKS, JOB_LOOKS, LEVEL_LOOKS):
        assert {look.role for look in looks.values()} <= set(TEXT_ROLES)
