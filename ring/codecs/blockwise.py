"""Small whole numbers of a step that a block of elements shares."""

from __future__ import annotations

import numpy as np

from ring.codecs.base import F32, I8, U8, U16_WIRE, Array, CodecBase, blocks_of
from ring.dtypes import round_to_bfloat16, widen_bfloat16

_SMALLEST_STEP = np.float32(2.0**-126)  # the smallest normal number: its inverse is finite, its multiples are normal


class Blockwise(CodecBase):
    """A bfloat16 step per block, then a small whole number of steps per element (arXiv 2110.02861, with even steps).

    The element of largest magnitude is ``-levels`` steps: the step's sign is chosen so. With two's complement this
    gives one level more than symmetric codes have; at 4 bits it is a tenth less error. On the other side what is beyond
    ``top`` steps is cut.

    Error feedback is needed even where the error is small: without it, elements below half a step are lost again and
    again, and an optimizer that normalises each element would see nothing of them.
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
        """From each block's extreme element its step, as bfloat16 in ``scales``, and in place.

        Rounding to nearest takes no element beyond the last level: 127 (1 + 2**-8) steps are still nearest to 127. The
        magnitude is never below the smallest normal number, so that zeros and denormals are no special case. Where it
        is not finite, all of the block decodes to NaN: the one quiet NaN, for that of zero times infinity has another
        sign on another processor.
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
    """One signed byte an element.

    In heavy tails blocks of 64 have two fifths of the error of blocks of 1024, for 3 % more bytes.
    """

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
    """Two elements a byte, the first in the lower half, each as its steps plus 8."""

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

    Even and odd elements are compared until one is left of each row: numpy is several times slower along the short
    rows of a matrix.
    """
    free = scratch
    while values.size > rows and values.size % (2 * rows) == 0:
        half = values.size // 2
        values, free = extreme(values[0::2], values[1::2], out=free[:half]), free[half:]
    return values if values.size == rows else extreme.reduce(values.reshape(rows, -1), axis=1)
