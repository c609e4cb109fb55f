"""The order of the samples: a pure function of (seed, epoch, step, micro-batch), without state or coordination.

Samples are numbered through the whole run: with M micro-batches of B sequences, micro-batch ``m`` of step ``s`` reads
samples ``(s M + m) B ... + B - 1``. Sample ``c`` is position ``c mod N`` of epoch ``c div N``. Each epoch visits the N
training windows in the order of a keyed permutation: a balanced Feistel network over the next even power of two,
cycle-walked back into range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). So an epoch reads each
window exactly once, and any sample can be computed without the others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 6  # four suffice for pseudo-randomness (Luby and Rackoff); two more because the halves are short


def permuted(positions: Indices, size: int, key: int) -> Indices:
    """Images of ``positions``, each below ``size``, under permutation ``key`` of ``range(size)``. Same shape."""
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    result = _feistel(positions.astype(np.uint64), half_bits, key)
    while (outside := result >= size).any():  # the domain has at most 4 size numbers: four rounds on average
        result[outside] = _feistel(result[outside], half_bits, key)
    return result.astype(np.int64)


def _feistel(words: _Words, half_bits: np.uint64, key: int) -> _Words:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = words >> half_bits, words & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_splitmix(right ^ np.uint64(_mixed_key(key, number))) & mask)
    return (left << half_bits) | right


def _splitmix(words: _Words) -> _Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mixed_key(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class WindowSampler:
    """The order of the samples of one run.

    Attributes:
        windows: number of training windows.
    """

    windows: int
    seed: int

    def numbered(self, first: int, count: int) -> Indices:
        """Window numbers of samples ``range(first, first + count)`` of the run, shape (count,)."""
        epochs, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), self.windows)
        result = np.empty_like(positions)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            result[here] = permuted(positions[here], self.windows, _mixed_key(self.seed, epoch))
        return result
