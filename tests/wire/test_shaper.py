"""The arithmetic of a link: rate, delay, order, what loss costs, stalls, and where it ends."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import UserError
from tests.invariants import check_invariants
from wire.emulate import LinkPreset, LinkShaper, preset_named

PLAIN = LinkPreset("plain", delay_s=0.01)


def shaper(preset: LinkPreset, seed: int = 0, **kwargs: float) -> LinkShaper:
    return LinkShaper(preset, random.Random(seed), **kwargs)


presets = st.builds(
    LinkPreset,
    st.just("drawn"),
    delay_s=st.floats(0, 0.5),
    jitter_s=st.floats(0, 0.1),
    rate_bps=st.sampled_from([0.0, 56e3, 1e6, 1e9]),
    loss=st.sampled_from([0.0, 0.001, 0.3]),
    stall_every_s=st.just(2.0),
    stall_s=st.sampled_from([0.0, 0.5, 1.9]),
    burst_bytes=st.sampled_from([0, 1500, 65536]),
)
# (seconds since the last send, bytes) of each send
sends = st.lists(st.tuples(st.floats(0, 2), st.integers(0, 200_000)), min_size=1, max_size=60)


def played(preset: LinkPreset, script: list[tuple[float, int]], seed: int) -> list[tuple[float, int, float]]:
    """(sent_at, bytes, deliver_at) of each send."""
    link, now, log = shaper(preset, seed), 0.0, []
    for pause_s, nbytes in script:
        now += pause_s
        log.append((now, nbytes, link.send(now, nbytes)))
        check_invariants(link)
    return log


@given(preset=presets, script=sends, seed=st.integers(0, 2**32))
def test_delivery_keeps_the_order_and_never_beats_light(
    preset: LinkPreset, script: list[tuple[float, int]], seed: int
) -> None:
    log = played(preset, script, seed)
    for sent_at, nbytes, deliver_at in log:
        assert deliver_at >= sent_at + preset.delay_s
        if preset.rate_bps and nbytes > preset.burst_bytes:
            serialised_s = (nbytes - preset.burst_bytes) * 8 / preset.rate_bps
            assert deliver_at >= sent_at + preset.delay_s + serialised_s - 1e-6
    assert all(earlier[2] <= later[2] for earlier, later in itertools.pairwise(log))


@given(preset=presets, script=sends, seed=st.integers(0, 2**32))
def test_between_any_two_deliveries_no_more_than_the_bucket_passes(
    preset: LinkPreset, script: list[tuple[float, int]], seed: int
) -> None:
    preset = replace(preset, jitter_s=0.0, loss=0.0, rate_bps=preset.rate_bps or 3e6)
    log = played(preset, script, seed)
    for first, (_, _, begin) in enumerate(log):
        passed = 0
        for _, nbytes, end in log[first + 1 :]:
            passed += nbytes
            assert passed <= preset.burst_bytes + preset.rate_bps / 8 * (end - begin) + 1


def test_a_rate_spreads_what_is_sent_at_once() -> None:
    link = shaper(replace(PLAIN, rate_bps=8000.0))  # a byte a millisecond
    assert [link.send(0.0, 100) for _ in range(3)] == pytest.approx([0.110, 0.210, 0.310])
    assert link.send(5.0, 100) == pytest.approx(5.110)  # what was not used is not saved up


def test_a_burst_leaves_at_once_and_must_be_earned_again() -> None:
    link = shaper(replace(PLAIN, rate_bps=8000.0, burst_bytes=100))
    assert link.send(0.0, 100) == pytest.approx(0.010)
    assert link.send(0.0, 100) == pytest.approx(0.110)
    assert link.send(0.150, 100) == pytest.approx(0.210)  # half of it was back
    assert link.send(9.0, 100) == pytest.approx(9.010)


def test_jitter_is_bounded_and_spreads_over_its_whole_range() -> None:
    link = shaper(replace(PLAIN, jitter_s=0.004))
    late_ms = [(link.send(now, 100) - now) * 1e3 - 10 for now in range(2000)]
    assert min(late_ms) >= -1e-6
    assert max(late_ms) <= 4 + 1e-6
    assert sum(late_ms) / len(late_ms) == pytest.approx(2.0, abs=0.1)
    assert min(late_ms) < 0.1
    assert max(late_ms) > 3.9


@pytest.mark.parametrize(
    ("nbytes", "first_s", "second_s"),
    [
        pytest.param(1448, 0.220, 0.440, id="one segment waits for the timer"),
        pytest.param(14480, 0.020, 0.220, id="ten: one round trip"),
    ],
)
def test_loss_costs_what_tcp_makes_of_it(nbytes: int, first_s: float, second_s: float) -> None:
    loss = 0.05
    link = shaper(replace(PLAIN, loss=loss))
    count = 40_000
    late_s = [link.send(100.0 * index, nbytes) - 100.0 * index - 0.010 for index in range(count)]
    hit = 1 - (1 - loss) ** (nbytes // 1448)
    assert sum(late > 1e-6 for late in late_s) / count == pytest.approx(hit, rel=0.05)
    again_s = loss * second_s / (1 - 2 * loss)  # each further loss doubles the timer
    assert sum(late_s) / count == pytest.approx(hit * (first_s + again_s), rel=0.05)
    assert min(late for late in late_s if late > 1e-6) == pytest.approx(first_s)


def test_a_stall_holds_departures_and_its_backlog_leaves_at_the_plain_rate() -> None:
    preset = replace(PLAIN, rate_bps=8e6, stall_every_s=10.0, stall_s=1.0)
    first_s = random.Random(7).random() * 10  # as documented: at a random point of the first period
    link = shaper(preset, 7, opened_at=100.0)
    begin = 100 + first_s
    assert link.send(begin - 0.5, 1000) == pytest.approx(begin - 0.5 + 0.001 + 0.010)
    held = [link.send(begin + 0.1, 1000) for _ in range(3)]
    assert held == pytest.approx([begin + 1.010, begin + 1.011, begin + 1.012])
    assert link.send(begin + 5.0, 1000) == pytest.approx(begin + 5.011)
    assert link.send(begin + 10.5, 1000) == pytest.approx(begin + 11.010)


def test_a_round_trip_is_a_preset_that_does_nothing_else() -> None:
    link = preset_named("80.5ms")
    assert (link.name, link.delay_s, link.rtt_s) == ("80.5ms", 0.04025, 0.0805)
    assert link == LinkPreset("80.5ms", 0.04025)
    for name in ("-1ms", "ms", "1e3ms", "99999ms", "٣ms", "20 ms"):
        with pytest.raises(UserError, match="no link preset"):
            preset_named(name)
