"""Sizes of hidden states on the wire."""

from __future__ import annotations

import pytest

from p2ptrain.core.activations import ENCODINGS, IDS, activation_bytes
from p2ptrain.core.errors import ProtocolError


def test_sizes() -> None:
    sizes = {encoding: activation_bytes(encoding, 3, 64) for encoding in (*ENCODINGS, IDS)}
    assert sizes == {"fp32": 768, "bf16": 384, "fp16": 384, "int8": 3 * 68, "ids": 12}
    assert activation_bytes("int8", 2048, 4096) / activation_bytes("fp32", 2048, 4096) == 4100 / 16384
    assert activation_bytes("bf16", 0, 64) == 0


def test_an_encoding_that_is_not_there() -> None:
    with pytest.raises(ProtocolError, match="'int3'"):
        activation_bytes("int3", 1, 1)
