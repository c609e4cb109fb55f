"""Hidden states there and back, against numpy's reading of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2ptrain.compute.activations import DTYPES, decode_untrusted, encode, ids_untrusted
from p2ptrain.core.activations import ENCODINGS, activation_bytes, encode_ids
from p2ptrain.core.errors import ProtocolError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", DTYPES)
def test_what_the_model_computes_in_comes_back_unchanged(encoding: str, dtype: str) -> None:
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    payload = encode(hidden, encoding)
    assert payload.nbytes == activation_bytes(encoding, 5, 16)
    back = decode_untrusted(payload, encoding, 5, 16, DTYPES[dtype])
    assert back.dtype == DTYPES[dtype]
    assert torch.equal(back, hidden.to(DTYPES[encoding]).to(DTYPES[dtype]))
    if encoding == dtype:
        assert torch.equal(back, hidden)


def test_the_layout() -> None:
    hidden = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    assert bytes(encode(hidden, "fp32")) == np.array([1, -2, 0.5, 4], "<f4").tobytes()
    assert bytes(encode(hidden, "fp16")) == np.array([1, -2, 0.5, 4], "<f2").tobytes()
    assert bytes(encode(hidden, "bf16")) == (np.array([1, -2, 0.5, 4], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    scales = np.array([2 / 127, 4 / 127], "<f4")
    assert bytes(encode(hidden, "int8")) == scales.tobytes() + np.array([64, -127, 16, 127], "i1").tobytes()


@given(arrays(np.float32, (3, 7), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int8_errs_by_half_a_scale(values: np.ndarray) -> None:  # type: ignore[type-arg]
    hidden = torch.from_numpy(values.copy())
    back = decode_untrusted(encode(hidden, "int8"), "int8", 3, 7)
    scale = hidden.abs().amax(dim=1, keepdim=True).double() / 127
    assert bool(((back - hidden).double().abs() <= scale * 0.5001 + 1.5e-43).all())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("change", [-1, 1])
def test_another_size_is_refused(encoding: str, change: int) -> None:
    with pytest.raises(ProtocolError, match=f"2 positions as {encoding}"):
        decode_untrusted(bytes(activation_bytes(encoding, 2, 3) + change), encoding, 2, 3)


def test_an_encoding_that_is_none_of_hidden_states() -> None:
    for encoding in ("ids", "fp64", ""):
        with pytest.raises(ProtocolError, match="unknown encoding of hidden states"):
            decode_untrusted(bytes(24), encoding, 2, 3)
    with pytest.raises(ProtocolError):
        encode(torch.ones(1, 1), "fp64")


def test_token_ids() -> None:
    payload = encode_ids([0, 5, 9])
    assert payload == np.array([0, 5, 9], "<i4").tobytes()
    assert ids_untrusted(payload, 3, 10).tolist() == [0, 5, 9]
    for wrong in ([0, 10], [-1, 3]):
        with pytest.raises(ProtocolError, match="for a vocabulary of 10"):
            ids_untrusted(encode_ids(wrong), 2, 10)
    with pytest.raises(ProtocolError, match="2 positions as ids"):
        ids_untrusted(payload, 2, 10)
