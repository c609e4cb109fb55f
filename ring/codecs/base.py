"""The interface of codecs, and what all codecs share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ProtocolError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
Array = npt.NDArray[Any]

# The bytes on the wire are little-endian, whatever the machine.
F32_WIRE: np.dtype[Any] = np.dtype("<f4")
F16_WIRE: np.dtype[Any] = np.dtype("<f2")
U16_WIRE = np.dtype("<u2")


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
        """Encode ``values`` (numel,) into ``out`` (encoded_bytes(numel),). Raises ``ValueError`` if the sizes
        differ."""
        if out.size != self.encoded_bytes(values.size):
            raise ValueError(f"{values.size} elements in {self.name} are not {out.size} bytes")
        with np.errstate(all="ignore"):
            self._encode(values, out)

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
