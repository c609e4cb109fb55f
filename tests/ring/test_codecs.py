"""Codecs: sizes, bounds of the error, odd input, and whatever a peer may send."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from configs.schema import CodecName
from p2ptrain.core.errors import ConfigError, ProtocolError
from ring.codecs import CODECS, Codec, codec_named

every_codec = pytest.mark.parametrize("name", CODECS)
numels = st.integers(0, 1500)
any_values = hnp.arrays(np.float32, numels, elements=st.floats(width=32), fill=st.floats(width=32))


def encoded(codec: Codec, values: np.ndarray) -> np.ndarray:
    result = np.full(codec.encoded_bytes(values.size), 0xAA, np.uint8)
    codec.encode(values, result)
    return result


def round_trip(codec: Codec, values: np.ndarray) -> np.ndarray:
    result = np.full_like(values, 7)
    codec.decode(encoded(codec, values), result)
    return result


def gaussian(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


# --- sizes


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'zstd'") as caught:
        codec_named("zstd")
    assert caught.value.remedy == "known are " + ", ".join(CODECS)


@pytest.mark.parametrize(
    ("name", "share"), [("fp32", 1), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.265), ("int4", 0.16), ("topk", 0.024)]
)
def test_what_a_codec_costs(name, share):
    for numel in (1 << 16, 1 << 18, (1 << 18) - 37):
        assert codec_named(name).encoded_bytes(numel) <= share * 4 * numel


def test_a_profile_may_name_every_codec():
    assert {*CODECS, "auto"} == set(get_args(CodecName))


@every_codec
@given(numel=numels)
def test_blocks_cut_from_an_array_cost_what_they_cost_together(name, numel):
    codec = codec_named(name)
    head = numel // 2 // codec.block_numel * codec.block_numel
    assert codec.encoded_bytes(head) + codec.encoded_bytes(numel - head) == codec.encoded_bytes(numel)
    both = encoded(codec, gaussian(numel))
    assert np.array_equal(round_trip(codec, gaussian(numel)[:head]), decoded(codec, both, numel)[:head])


def decoded(codec: Codec, payload: np.ndarray, numel: int) -> np.ndarray:
    result = np.empty(numel, np.float32)
    codec.decode(payload, result)
    return result


# --- the bytes


def test_int8_sends_a_bfloat16_step_and_whole_numbers_of_it():
    values = np.array([-127, 0, 127, 62.5, 63.5, 1.4], np.float32)
    step = [0x80, 0xBF]  # -1: the largest magnitude is -127 steps, the first of equals being the positive one
    codes = np.array([127, 0, -127, -62, -64, -1], np.int8).view(np.uint8)  # ties go to even
    assert encoded(codec_named("int8"), values).tolist() == [*step, *codes]


def test_int4_packs_two_codes_a_byte_and_fills_an_odd_end():
    values = np.arange(-8, 7, dtype=np.float32)
    payload = encoded(codec_named("int4"), values)
    assert payload.tobytes().hex(" ") == "80 3f 10 32 54 76 98 ba dc 8e"
    assert np.array_equal(decoded(codec_named("int4"), payload, 15), values)


def test_topk_sends_rising_places_then_values():
    values = np.zeros(256 + 33, np.float32)
    large = [3, 50, 51, 100, 200, 201, 254, 255, 257, 288]
    values[large] = np.arange(1, 11) * np.array([1, -1] * 5)
    codec = codec_named("topk")
    payload = encoded(codec, values)
    assert payload[:10].tolist() == [3, 50, 51, 100, 200, 201, 254, 255, 1, 32]
    assert payload[10:14].tobytes().hex(" ") == "80 3f 00 c0"
    assert np.array_equal(decoded(codec, payload, values.size), values)


# --- the error


@every_codec
@given(values=any_values)
def test_any_input_is_encoded_the_same_twice_and_what_is_not_finite_stays_so(name, values):
    codec = codec_named(name)
    kept = values.copy()
    payload = encoded(codec, values)
    assert values.tobytes() == kept.tobytes(), "the input was changed"
    codec.encode(gaussian(values.size), np.empty_like(payload))  # scratch holds something else now
    assert encoded(codec, values).tobytes() == payload.tobytes()
    assert encoded(codec_named(name), values).tobytes() == payload.tobytes()
    if not np.isfinite(values).all():
        assert not np.isfinite(decoded(codec, payload, values.size)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_decodes_to_the_same_bits_on_every_processor(name, bad):
    """Zero times infinity is a NaN of either sign; a NaN times a number is that NaN."""
    codec = codec_named(name)
    values = np.zeros(codec.block_numel, np.float32)
    values[3] = bad
    assert encoded(codec, values)[:2].view("<u2").tolist() == [0x7FC0]
    assert set(round_trip(codec, values).view(np.uint32).tolist()) == {0x7FC00000}


@every_codec
def test_unaligned_and_empty_memory(name):
    codec = codec_named(name)
    values = gaussian(777)
    payload = encoded(codec, values)
    raw = np.zeros(payload.size + 1, np.uint8)
    codec.encode(values, raw[1:])
    assert raw[1:].tobytes() == payload.tobytes()
    memory = np.zeros(4 * values.size + 1, np.uint8)
    odd = memory[1:].view(np.float32)
    codec.decode(raw[1:], odd)
    assert odd.tobytes() == decoded(codec, payload, 777).tobytes()
    into = gaussian(777, seed=1)
    expected = into + odd
    codec.decode_add(raw[1:], into)
    assert into.tobytes() == expected.tobytes()
    assert codec.encoded_bytes(0) == 0
    codec.decode_add(encoded(codec, values[:0]), values[:0])


@given(hnp.arrays(np.float32, numels, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int8_is_wrong_by_half_a_level_at_most(values):
    codec = codec_named("int8")
    result = round_trip(codec, values)
    for start in range(0, values.size, codec.block_numel):
        block = slice(start, start + codec.block_numel)
        level = max(np.abs(values[block]).max() / 127 * (1 + 2**-7), 2.0**-126)
        assert np.abs(result[block].astype(float) - values[block]).max() <= level / 2 * (1 + 1e-6)


@given(hnp.arrays(np.float32, numels, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int4_is_wrong_by_half_a_level_and_by_one_at_the_far_end(values):
    codec = codec_named("int4")
    result = round_trip(codec, values)
    for start in range(0, values.size, codec.block_numel):
        block = slice(start, start + codec.block_numel)
        level = max(np.abs(values[block]).max() / 8 * (1 + 2**-7), 2.0**-126)
        error = np.abs(result[block].astype(float) - values[block])
        within = np.abs(values[block]) <= 7 * level
        assert error[within].max(initial=0) <= level / 2 * (1 + 1e-6)
        assert error.max() <= level * (1 + 1e-6)


@given(hnp.arrays(np.float32, numels, elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)))
def test_topk_loses_nothing_larger_than_what_it_keeps(values):
    codec = codec_named("topk")
    result = round_trip(codec, values)
    for start in range(0, values.size, 256):
        block, got = values[start : start + 256], result[start : start + 256]
        kept = got != 0
        assert kept.sum() <= -(-block.size // 32)
        assert np.abs(block[~kept]).max(initial=0) <= np.abs(block[kept]).min(initial=np.inf) * (1 + 2**-15)
        assert (np.abs(got[kept].astype(float) - block[kept]) <= np.abs(block[kept]) * 2.0**-8).all()


@given(hnp.arrays(np.float32, numels, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_bf16_keeps_eight_significant_bits(values):
    error = np.abs(round_trip(codec_named("bf16"), values).astype(float) - values)
    assert (error <= np.maximum(np.abs(values) * 2.0**-8, 2.0**-134)).all()


def test_fp16_keeps_eleven_significant_bits_within_its_range():
    values = np.array([1, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 6e-8, 2e-8], np.float32)
    assert round_trip(codec_named("fp16"), values).tolist() == [1, 1, 1 + 2**-9, 65504, np.inf, 2**-24, 0]


# --- whatever a peer sends


@every_codec
def test_a_wrong_size_is_a_peers_fault(name):
    codec = codec_named(name)
    values = gaussian(100)
    payload = encoded(codec, values)
    for wrong in (payload[:-1], payload[:0], np.append(payload, np.uint8(0))):
        for decode in (codec.decode, codec.decode_add):
            with pytest.raises(ProtocolError, match=f"100 elements in {name} take {payload.size} bytes"):
                decode(wrong, values)


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([0, 1, 2, 3, 4, 5, 7, 7, 0, 1], id="twice"),
        pytest.param([0, 1, 2, 3, 4, 6, 5, 7, 0, 1], id="falling"),
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7, 0, 33], id="beyond the tail"),
    ],
)
def test_topk_refuses_places_that_do_not_rise_within_their_block(places):
    codec, memory = codec_named("topk"), np.zeros(256 + 33, np.float32)
    payload = np.array(places + [0] * 20, np.uint8)
    for decode in (codec.decode, codec.decode_add):
        with pytest.raises(ProtocolError, match="are not ascending, or are outside their block"):
            decode(payload, memory)
