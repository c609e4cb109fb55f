"""Secret random numbers from a key: ChaCha20 (RFC 8439) as the generator, and Gaussian noise made from it. No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

KEY_BYTES = 32
_BLOCK_NUMEL = 1 << 18


def keystream(key: bytes, number: int, numel: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """``numel`` uniform integers of 64 bits as blocks, each with the place of its first element.

    Args:
        key: ``KEY_BYTES`` bytes.
        number: each number of a key gives another stream. Use no (key, number) for two purposes.
    """
    stream = Cipher(ChaCha20(key, struct.pack("<QQ", 0, number)), mode=None).encryptor()
    for start in range(0, numel, _BLOCK_NUMEL):
        yield start, np.frombuffer(stream.update(bytes(8 * min(_BLOCK_NUMEL, numel - start))), np.uint64)


def gaussian(key: bytes, numel: int, std: float) -> npt.NDArray[np.float32]:
    """Independent normal numbers of mean 0, shape (numel,), by the method of Box and Muller."""
    noise = np.empty(numel + numel % 2, np.float32)
    for start, uniform in keystream(key, 0, len(noise)):
        unit = ((uniform >> np.uint64(11)) + 1.0) * 2.0**-53  # in (0, 1]: its logarithm is finite
        radius, angle = std * np.sqrt(-2 * np.log(unit[::2])), 2 * math.pi * unit[1::2]
        noise[start : start + len(unit) : 2] = radius * np.cos(angle)
        noise[start + 1 : start + len(unit) : 2] = radius * np.sin(angle)
    return noise[:numel]
