"""The largest elements alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ProtocolError
from ring.codecs.base import F32, U8, U16_WIRE, Array, CodecBase, blocks_of
from ring.dtypes import round_to_bfloat16, widen_bfloat16


class TopK(CodecBase):
    """The largest 8 of every 256 elements: where they are in their block, one byte each and rising, then what they are
    in bfloat16. A tail keeps one of every 32 begun. (Deep Gradient Compression, arXiv 1712.01887; per block, because
    an index into a block of 256 is one byte.)

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
        # The low byte of a magnitude's bits gives way to the place in the block: no two keys are equal, the largest
        # keys say where the largest elements are, and the choice does not depend on how numpy selects.
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
        """The elements that are kept. Rising indices are asked for: an element that came twice would be added once."""
        result = indices.astype(np.intp)
        for elements, kept, length, count in self._rows(numel):
            places = result[kept].reshape(-1, count)
            if (places[:, 1:] <= places[:, :-1]).any() or (places[:, -1] >= length).any():
                raise ProtocolError("indices of kept elements do not rise, or leave their block")
            places += np.arange(elements.start, elements.stop, length)[:, np.newaxis]
        return result

    def _parts(self, encoded: U8) -> tuple[U8, Array]:
        count = encoded.size // 3
        return encoded[:count], encoded[count:].view(U16_WIRE)

    def _kept_of(self, numel: int) -> int:
        whole, tail = divmod(numel, self.block_numel)
        return whole * self.kept + -(-tail * self.kept // self.block_numel)

    def _rows(self, numel: int) -> Iterator[tuple[slice, slice, int, int]]:
        """Whole blocks, then the tail: which elements, which of the kept ones, and how many of each a block has."""
        for _, elements in blocks_of(numel, self.block_numel):
            length = min(self.block_numel, elements.stop - elements.start)
            kept = slice(self._kept_of(elements.start), self._kept_of(elements.stop))
            yield elements, kept, length, self._kept_of(length)
