"""Codec ``fp24``: the upper three bytes of a float32: 16 significant bits, the range of float32, 75 % of the bytes."""

from __future__ import annotations

import numpy as np

from ring.codecs import F32, U8, Codec


class Fp24(Codec):
    """``nearest``: round to the nearest value; else towards zero, which is faster."""

    name = "fp24"

    def __init__(self, *, nearest: bool = True) -> None:
        super().__init__()
        self._nearest = nearest

    def encoded_bytes(self, numel: int) -> int:
        return 3 * numel

    def _encode(self, values: F32, out: U8) -> None:
        bits = values.view(np.uint32)
        if self._nearest:  # but not what is infinite or no number: it must stay so
            bits = np.where(np.isfinite(values), bits + np.uint32(127) + ((bits >> 8) & np.uint32(1)), bits)
        out.reshape(-1, 3)[:] = bits.astype("<u4").view(np.uint8).reshape(-1, 4)[:, 1:]

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        bits = np.zeros((out.size, 4), np.uint8)
        bits[:, 1:] = encoded.reshape(-1, 3)
        out[:] = bits.view("<f4")[:, 0]
