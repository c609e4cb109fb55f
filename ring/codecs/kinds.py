"""The interface of codecs, and the codecs: whole and half floats, small integers with a scale per block, and only the
largest elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ProtocolError
from ring.dtypes import round_to_bfloat16, widen_bfloat16

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
Array = npt.NDArray[Any]

# The bytes on the wire are little-endian, whatever the machine.
F32_WIRE: np.dtype[Any] = np.dtype("<f4")
F16_WIRE: np.dtype[Any] = np.dtype("<f2")
U16_WIRE = np.dtype("<u2")
_SMALLEST_STEP = np.float32(2.0**-126)  # the smallest normal number: its inverse is finite, its multiples are normal


class Scratch:
    """Reusable arrays, one per purpose, each as large as the largest request so far."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def array(self, purpose: str, numel: int, dtype: type[np.generic]) -> Array:
        kept = self._kept.get(purpose)
        if kept is None or kept.size < numel:
            kept = self._kept[purpose] = np.empty(numel, dtype)
        return kept[:numel]


class Codec:
    """Encodes float32 elements of one sub-chunk and decodes them again. Checks sizes; raises no floating-point
    warnings.

    Attributes:
        feedback: the caller must add what the encoding lost to the next value (error feedback, arXiv 1901.09847).
        block_numel: sub-chunks are cut at multiples of it, so that only the last one has a tail.
    """

    name: str
    feedback = False
    block_numel = 1

    def __init__(self) -> None:
        self._scratch = Scratch()

    def encoded_bytes(self, numel: int) -> int:
        """The exact size of ``numel`` encoded elements, for any values."""
        raise NotImplementedError

    def encode(self, values: F32, out: U8) -> None:
        """Encode ``values`` (numel,) into ``out`` (encoded_bytes(numel),)."""
        with np.errstate(all="ignore"):
            self._encode(values, out)

    def encode_with_feedback(self, values: F32, residual: F32, out: U8) -> None:
        """Encode ``values + residual``, which replaces ``values``. ``residual`` keeps what the encoding lost of it."""
        with np.errstate(all="ignore"):  # infinity - infinity: the finite check refuses the step
            values += residual
            self.encode(values, out)
            self.decode(out, residual)
            np.subtract(values, residual, out=residual)

    def decode(self, encoded: U8, out: F32) -> None:
        """Decode ``encoded`` (encoded_bytes(numel),) into ``out`` (numel,). Raises ``ProtocolError``."""
        self._check_untrusted(encoded, out)
        with np.errstate(all="ignore"):
            self._decode_untrusted(encoded, out)

    def decode_add(self, encoded: U8, into: F32) -> None:
        """Decode ``encoded`` (encoded_bytes(numel),) and add it to ``into`` (numel,). Raises ``ProtocolError``."""
        self._check_untrusted(encoded, into)
        with np.errstate(all="ignore"):
            self._decode_add_untrusted(encoded, into)

    def _check_untrusted(self, encoded: U8, out: F32) -> None:
        expected = self.encoded_bytes(out.size)
        if encoded.size != expected:
            raise ProtocolError(f"{out.size} elements in {self.name} take {expected} bytes, received {encoded.size}")

    def _encode(self, values: F32, out: U8) -> None:
        raise NotImplementedError

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        raise NotImplementedError

    def _decode_add_untrusted(self, encoded: U8, into: F32) -> None:
        decoded = self._scratch.array("decoded", into.size, np.float32)
        self._decode_untrusted(encoded, decoded)
        into += decoded


def blocks_of(numel: int, block_numel: int) -> Iterator[tuple[slice, slice]]:
    """(block slice, element slice) of all whole blocks, then of the tail; each only if there is any."""
    whole = numel // block_numel
    if whole:
        yield slice(0, whole), slice(0, whole * block_numel)
    if numel % block_numel:
        yield slice(whole, whole + 1), slice(whole * block_numel, numel)


class Fp32(Codec):
    name = "fp32"
    wire_dtype = F32_WIRE

    def encoded_bytes(self, numel: int) -> int:
        return self.wire_dtype.itemsize * numel

    def _encode(self, values: F32, out: U8) -> None:
        out.view(self.wire_dtype)[:] = values

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        out[:] = encoded.view(self.wire_dtype)

    def _decode_add_untrusted(self, encoded: U8, into: F32) -> None:
        into += encoded.view(self.wire_dtype)


class Fp16(Fp32):
    """IEEE half precision, for values of a known range: above 65504 becomes infinite, below 3e-8 becomes zero."""

    name = "fp16"
    wire_dtype = F16_WIRE


class Bf16(Codec):
    """The upper half of a float32, rounded to nearest even. The relative error is at most 2**-8, at any magnitude."""

    name = "bf16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, values: F32, out: U8) -> None:
        round_to_bfloat16(values, out.view(U16_WIRE), self._scratch.array("bits", values.size, np.uint32))

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        widen_bfloat16(encoded.view(U16_WIRE), out)


class Blockwise(Codec):
    """A bfloat16 step per block, then a small integer number of steps per element (arXiv 2110.02861, with even steps).

    The sign of the step makes the element of largest magnitude ``-levels`` steps. So two's complement gives one level
    more than symmetric codes; at 4 bits that is a tenth less error. On the other side values above ``top`` steps are
    cut.

    Error feedback is needed even if the error is small. Without it, elements below half a step are lost again and
    again, and an optimizer that normalises each element would never see them.
    """

    feedback = True
    levels: int
    top: int

    def encoded_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block_numel) + self._code_bytes(numel)

    def _encode(self, values: F32, out: U8) -> None:
        scales, codes = self._parts(out, values.size)
        steps = self._scratch.array("steps", scales.size, np.float32)
        smallest = self._scratch.array("smallest", scales.size, np.float32)
        work = self._scratch.array("work", values.size, np.float32)
        for rows, elements in blocks_of(values.size, self.block_numel):
            steps[rows] = _reduced(np.maximum, values[elements], steps[rows].size, work)
            smallest[rows] = _reduced(np.minimum, values[elements], steps[rows].size, work)
        np.copyto(steps, smallest, where=-smallest > steps)
        self._round_steps(steps, scales)
        np.reciprocal(steps, out=steps)
        for rows, elements in blocks_of(values.size, self.block_numel):
            shape = (steps[rows].size, -1)
            np.multiply(values[elements].reshape(shape), steps[rows, np.newaxis], out=work[elements].reshape(shape))
        np.rint(work, out=work)
        np.minimum(work, np.float32(self.top), out=work)
        self._pack(work, codes)

    def _round_steps(self, steps: F32, scales: Array) -> None:
        """Turn each block's extreme element into its step: bfloat16 in ``scales``, float32 in ``steps``.

        Rounding moves no element beyond the last level: 127 (1 + 2**-8) steps are still nearest to 127. The magnitude
        is at least the smallest normal number, so zeros and denormals are no special case. If it is not finite, the
        block decodes to the one quiet NaN, set here: the sign of zero times infinity differs between processors.
        """
        steps /= np.float32(-self.levels)
        np.copyto(steps, np.float32(np.nan), where=np.isinf(steps))
        np.copysign(np.maximum(np.abs(steps), _SMALLEST_STEP), steps, out=steps)
        round_to_bfloat16(steps, scales, self._scratch.array("bits", steps.size, np.uint32))
        widen_bfloat16(scales, steps)

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        scales, packed = self._parts(encoded, out.size)
        steps = self._scratch.array("steps", scales.size, np.float32)
        widen_bfloat16(scales, steps)
        codes = self._unpacked(packed, out.size)
        for rows, elements in blocks_of(out.size, self.block_numel):
            shape = (steps[rows].size, -1)
            # Exact: 8 bits times 8 bits fit into the 24 of a float32.
            np.multiply(codes[elements].reshape(shape), steps[rows, np.newaxis], out=out[elements].reshape(shape))

    def _parts(self, encoded: U8, numel: int) -> tuple[Array, U8]:
        codes_at = encoded.size - self._code_bytes(numel)
        return encoded[:codes_at].view(U16_WIRE), encoded[codes_at:]

    def _code_bytes(self, numel: int) -> int:
        raise NotImplementedError

    def _pack(self, work: F32, packed: U8) -> None:
        raise NotImplementedError

    def _unpacked(self, packed: U8, numel: int) -> I8:
        raise NotImplementedError


class Int8(Blockwise):
    """One signed byte per element. In heavy tails blocks of 64 have two fifths of the error of blocks of 1024, for 3 %
    more bytes."""

    name = "int8"
    block_numel = 64
    levels = 127
    top = 127

    def _code_bytes(self, numel: int) -> int:
        return numel

    def _pack(self, work: F32, packed: U8) -> None:
        np.copyto(packed.view(np.int8), work, casting="unsafe")

    def _unpacked(self, packed: U8, numel: int) -> I8:
        return packed.view(np.int8)


class Int4(Blockwise):
    """Two elements per byte, the first in the lower half, each as its steps plus 8."""

    name = "int4"
    block_numel = 32
    levels = 8
    top = 7

    def _code_bytes(self, numel: int) -> int:
        return (numel + 1) // 2

    def _pack(self, work: F32, packed: U8) -> None:
        codes = self._scratch.array("codes", 2 * packed.size, np.int8)
        codes[work.size :] = 0
        np.copyto(codes[: work.size], work, casting="unsafe")
        codes += np.int8(8)
        pairs = codes.view(U16_WIRE)
        halves = self._scratch.array("halves", packed.size, np.uint16)
        np.right_shift(pairs, np.uint16(4), out=halves)
        halves |= pairs
        np.copyto(packed, halves, casting="unsafe")

    def _unpacked(self, packed: U8, numel: int) -> I8:
        codes = self._scratch.array("codes", 2 * packed.size, np.int8)
        pairs = codes.view(U16_WIRE)
        np.left_shift(packed, np.uint16(4), out=pairs)
        pairs |= packed
        pairs &= np.uint16(0x0F0F)
        codes -= np.int8(8)
        return codes[:numel]


def _reduced(extreme: np.ufunc, values: F32, rows: int, scratch: F32) -> F32:
    """The extreme of each of ``rows`` equal rows of ``values`` (numel,); ``scratch`` (numel,) is overwritten.

    Even and odd elements are compared until each row has one left: numpy is several times slower along short rows.
    """
    free = scratch
    while values.size > rows and values.size % (2 * rows) == 0:
        half = values.size // 2
        values, free = extreme(values[0::2], values[1::2], out=free[:half]), free[half:]
    return values if values.size == rows else extreme.reduce(values.reshape(rows, -1), axis=1)


class TopK(Codec):
    """The largest 8 of every 256 elements: their ascending positions in the block, one byte each, then their bfloat16
    values. A tail keeps one of every 32 elements, rounded up. (Deep Gradient Compression, arXiv 1712.01887, but per
    block.)

    Magnitudes are compared in their first 16 significant bits; among equals the first ones are kept.
    """

    name = "topk"
    feedback = True
    block_numel = 256
    kept = 8

    def encoded_bytes(self, numel: int) -> int:
        return 3 * self._kept_of(numel)

    def _encode(self, values: F32, out: U8) -> None:
        indices, stored = self._parts(out)
        # The position in the block replaces the low byte of a magnitude's bits. So no two keys are equal, the largest
        # keys hold the positions of the largest elements, and the choice does not depend on numpy's algorithm.
        keys = self._scratch.array("keys", values.size, np.uint32)
        np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFFFF00), out=keys)
        for elements, kept, length, count in self._rows(values.size):
            chosen = keys[elements].reshape(-1, length)
            chosen |= np.arange(255, 255 - length, -1, dtype=np.uint32)
            chosen.partition(length - count, axis=1)
            places = 255 - (chosen[:, length - count :] & np.uint32(255))
            places.sort(axis=1)
            np.copyto(indices[kept].reshape(-1, count), places, casting="unsafe")
        round_to_bfloat16(values[self._elements_untrusted(indices, values.size)], stored)

    def _decode_untrusted(self, encoded: U8, out: F32) -> None:
        out[:] = 0
        self._decode_add_untrusted(encoded, out)

    def _decode_add_untrusted(self, encoded: U8, into: F32) -> None:
        indices, stored = self._parts(encoded)
        at = self._elements_untrusted(indices, into.size)
        kept_values = self._scratch.array("kept", at.size, np.float32)
        widen_bfloat16(stored, kept_values)
        into[at] += kept_values

    def _elements_untrusted(self, indices: U8, numel: int) -> npt.NDArray[np.intp]:
        """Positions of the kept elements. They must rise within a block: an element that came twice would be added
        once."""
        result = indices.astype(np.intp)
        for elements, kept, length, count in self._rows(numel):
            places = result[kept].reshape(-1, count)
            if (places[:, 1:] <= places[:, :-1]).any() or (places[:, -1] >= length).any():
                raise ProtocolError("indices of kept elements are not ascending, or are outside their block")
            places += np.arange(elements.start, elements.stop, length)[:, np.newaxis]
        return result

    def _parts(self, encoded: U8) -> tuple[U8, Array]:
        count = encoded.size // 3
        return encoded[:count], encoded[count:].view(U16_WIRE)

    def _kept_of(self, numel: int) -> int:
        whole, tail = divmod(numel, self.block_numel)
        return whole * self.kept + -(-tail * self.kept // self.block_numel)

    def _rows(self, numel: int) -> Iterator[tuple[slice, slice, int, int]]:
        for _, elements in blocks_of(numel, self.block_numel):
            length = min(self.block_numel, elements.stop - elements.start)
            kept = slice(self._kept_of(elements.start), self._kept_of(elements.stop))
            yield elements, kept, length, self._kept_of(length)
