"""One number for each element, in 4 or 2 bytes."""

from __future__ import annotations

import numpy as np

from ring.codecs.base import F16_WIRE, F32, F32_WIRE, U8, U16_WIRE, CodecBase
from ring.dtypes import round_to_bfloat16, widen_bfloat16


class Fp32(CodecBase):
    """The elements as they are."""

    name = "fp32"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, values: F32, out: U8) -> None:
        out.view(F32_WIRE)[:] = values

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        out[:] = encoded.view(F32_WIRE)

    def _decode_add_untrusted(self, encoded: U8, into: F32) -> None:
        into += encoded.view(F32_WIRE)


class Fp16(CodecBase):
    """IEEE half precision. For values whose range is known: above 65504 is infinite, below 3e-8 is zero."""

    name = "fp16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: F32, out: U8) -> None:
        out.view(F16_WIRE)[:] = values

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        out[:] = encoded.view(F16_WIRE)


class Bf16(CodecBase):
    """The upper half of a float32, rounded to nearest even. Relative error at most 2**-8, at any magnitude."""

    name = "bf16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: F32, out: U8) -> None:
        round_to_bfloat16(values, out.view(U16_WIRE), self._scratch.array("bits", values.size, np.uint32))

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        widen_bfloat16(encoded.view(U16_WIRE), out)
