"""How the elements of an all-reduce travel: whole, or in fewer bytes. Needs numpy only.

========  ===================================================  ===================
name      what is sent                                         bytes of a float32
========  ===================================================  ===================
fp32      the elements as they are                             100 %
fp16      11 significant bits, 6e-8 to 65504                   50 %
bf16      8 significant bits, the range of float32             50 %
int8      127 levels a side of each block's largest element    25.4 %
========  ===================================================  ===================

What all codecs promise:

* **Fixed size.** The bytes depend on the number of elements alone, so both ends of a link plan with them.
* **Equal bits.** Decoding is exact in float32, so the same bytes decode to the same bits on every machine.
* **Nothing is hidden.** Where an element is not finite, its decoded value is not finite (in the blockwise codecs the
  whole block's), and the step's finite check sees it. No input warns or raises.
* **A peer's bytes may be anything.** Decoding raises ``ProtocolError`` or gives values, finite or not.

Scales are bfloat16, not float16: gradients of large models lie around 1e-8, where a float16 scale is zero.

A codec keeps scratch memory of the largest sub-chunk that it met. It belongs to one session and one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ConfigError, ProtocolError
from ring.dtypes import round_to_bfloat16, widen_bfloat16

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

# The bytes on the wire are little-endian, whatever the machine.
_F32 = np.dtype("<f4")
_F16 = np.dtype("<f2")
_U16 = np.dtype("<u2")

_SMALLEST_SCALE = np.float32(2.0**-126)  # the smallest normal number: its inverse is finite, its multiples are normal
_NAN_BFLOAT16 = 0x7FC0


class Codec(Protocol):
    """Encodes float32 elements of one sub-chunk and decodes them again."""

    @property
    def name(self) -> str: ...

    @property
    def feedback(self) -> bool:
        """Whether what the encoding lost has to be added to the next value (error feedback, arXiv 1901.09847)."""
        ...

    @property
    def block_numel(self) -> int:
        """Sub-chunks are cut at multiples of it, so that only the last one has a tail."""
        ...

    def encoded_bytes(self, numel: int) -> int:
        """The size of ``numel`` encoded elements: exact, and the same for any values."""
        ...

    def encode(self, values: F32, out: U8) -> None:
        """``values`` (numel,) into ``out`` (encoded_bytes(numel),). Raises ``ValueError`` where the sizes differ."""
        ...

    def decode(self, encoded: U8, out: F32) -> None:
        """Replace ``out`` (numel,) by what ``encoded`` (encoded_bytes(numel),) says. Raises ``ProtocolError``."""
        ...

    def decode_add(self, encoded: U8, into: F32) -> None:
        """Add what ``encoded`` (encoded_bytes(numel),) says to ``into`` (numel,). Raises ``ProtocolError``."""
        ...


def codec_named(name: str) -> Codec:
    """A new codec, with scratch memory of its own. Raises ``ConfigError`` for an unknown name."""
    if name not in _KINDS:
        raise ConfigError(f"no codec is named {name!r}", remedy=f"known are {', '.join(CODECS)}")
    return _KINDS[name]()


class _Scratch:
    """Arrays that are used again, one per purpose, as large as the largest that was asked for."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def array(self, purpose: str, numel: int, dtype: type[np.generic]) -> Array:
        kept = self._kept.get(purpose)
        if kept is None or kept.size < numel:
            kept = self._kept[purpose] = np.empty(numel, dtype)
        return kept[:numel]


class _Codec:
    """What is common: sizes are checked, and floating-point events are values, not warnings."""

    name: str
    feedback = False
    block_numel = 1

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def encoded_bytes(self, numel: int) -> int:
        raise NotImplementedError

    def encode(self, values: F32, out: U8) -> None:
        if out.size != self.encoded_bytes(values.size):
            raise ValueError(f"{values.size} elements in {self.name} are not {out.size} bytes")
        with np.errstate(all="ignore"):
            self._encode(values, out)

    def decode(self, encoded: U8, out: F32) -> None:
        self._check_untrusted(encoded, out)
        with np.errstate(all="ignore"):
            self._decode_untrusted(encoded, out)

    def decode_add(self, encoded: U8, into: F32) -> None:
        self._check_untrusted(encoded, into)
        with np.errstate(all="ignore"):
            self._decode_add_untrusted(encoded, into)

    def _check_untrusted(self, encoded: U8, out: F32) -> None:
        expected = self.encoded_bytes(out.size)
        if encoded.size != expected:
            raise ProtocolError(f"{out.size} elements in {self.name} are {expected} bytes, {encoded.size} came")

    def _encode(self, values: F32, out: U8) -> None:
        raise NotImplementedError

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        raise NotImplementedError

    def _decode_add_untrusted(self, encoded: U8, into: F32) -> None:
        decoded = self._scratch.array("decoded", into.size, np.float32)
        self._decode_untrusted(encoded, decoded)
        into += decoded


class Fp32(_Codec):
    """The elements as they are."""

    name = "fp32"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, values: F32, out: U8) -> None:
        out.view(_F32)[:] = values

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        out[:] = encoded.view(_F32)

    def _decode_add_untrusted(self, encoded: U8, into: F32) -> None:
        into += encoded.view(_F32)


class Fp16(_Codec):
    """IEEE half precision. For values whose range is known: above 65504 is infinite, below 3e-8 is zero."""

    name = "fp16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: F32, out: U8) -> None:
        out.view(_F16)[:] = values

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        out[:] = encoded.view(_F16)


class Bf16(_Codec):
    """The upper half of a float32, rounded to nearest even. Relative error at most 2**-8, at any magnitude."""

    name = "bf16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: F32, out: U8) -> None:
        round_to_bfloat16(values, out.view(_U16), self._scratch.array("bits", values.size, np.uint32))

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        widen_bfloat16(encoded.view(_U16), out)


class Int8(_Codec):
    """Blockwise absmax: a bfloat16 scale per block, then one signed byte an element (as in arXiv 2110.02861, linear).

    Error feedback is needed although the error is small: without it, elements below half a level are lost in every
    step, and an optimizer that normalises each element would see nothing of them.
    """

    name = "int8"
    feedback = True
    block_numel = 128
    levels = 127

    def encoded_bytes(self, numel: int) -> int:
        return 2 * _block_count(numel, self.block_numel) + numel

    def _encode(self, values: F32, out: U8) -> None:
        scales, codes = self._parts(out, values.size)
        work = self._scratch.array("work", values.size, np.float32)
        np.abs(values, out=work)
        steps = self._scratch.array("steps", scales.size, np.float32)
        for rows, elements in _blocks(values.size, self.block_numel):
            np.max(work[elements].reshape(steps[rows].size, -1), axis=1, out=steps[rows])
        _round_scales_up(steps, self.levels, scales)
        np.reciprocal(steps, out=steps)
        for rows, elements in _blocks(values.size, self.block_numel):
            inverses = steps[rows, np.newaxis]
            shape = (inverses.size, -1)
            np.multiply(values[elements].reshape(shape), inverses, out=work[elements].reshape(shape))
        np.rint(work, out=codes, casting="unsafe")

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        scales, codes = self._parts(encoded, out.size)
        steps = self._scratch.array("steps", scales.size, np.float32)
        widen_bfloat16(scales, steps)
        for rows, elements in _blocks(out.size, self.block_numel):
            shape = (steps[rows].size, -1)
            # Exact: 7 bits times 8 bits fit into the 24 of a float32.
            np.multiply(codes[elements].reshape(shape), steps[rows, np.newaxis], out=out[elements].reshape(shape))

    def _parts(self, encoded: U8, numel: int) -> tuple[Array, npt.NDArray[np.int8]]:
        codes_at = encoded.size - numel
        return encoded[:codes_at].view(_U16), encoded[codes_at:].view(np.int8)


def _block_count(numel: int, block_numel: int) -> int:
    return -(-numel // block_numel)


def _blocks(numel: int, block_numel: int) -> Iterator[tuple[slice, slice]]:
    """Which blocks, and which elements they are: first all whole blocks, then the tail, each where there is one."""
    whole = numel // block_numel
    if whole:
        yield slice(0, whole), slice(0, whole * block_numel)
    if numel % block_numel:
        yield slice(whole, whole + 1), slice(whole * block_numel, numel)


def _round_scales_up(largest: F32, levels: int, scales: Array) -> None:
    """From each block's largest magnitude the step between two levels, as bfloat16 in ``scales`` and in place.

    Rounded up, so that no element is beyond the last level, and never below the smallest normal number, so that zeros
    and denormals are no special case. Not finite becomes NaN, so all of the block decodes to NaN.
    """
    finite = np.isfinite(largest)
    largest /= np.float32(levels)
    np.maximum(largest, _SMALLEST_SCALE, out=largest)
    bits = largest.view(np.uint32)
    bits += np.uint32(0xFFFF)
    bits >>= np.uint32(16)
    np.copyto(scales, bits, casting="unsafe")
    scales[~finite] = _NAN_BFLOAT16
    widen_bfloat16(scales, largest)


_KINDS: Final[dict[str, type[_Codec]]] = {kind.name: kind for kind in (Fp32, Fp16, Bf16, Int8)}

CODECS: Final[tuple[str, ...]] = tuple(_KINDS)
"""All names, the largest first."""
