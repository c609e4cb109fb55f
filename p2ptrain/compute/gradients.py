"""What a contribution holds, without torch: its buckets, fixed point, secret noise, and the inner steps in it.

Buckets. The flat gradients are in the order in which a backward pass produces them (``compute.flat``). They are cut
into *buckets*, each of which goes to the ring as soon as it is final. The cuts depend only on sizes, and buckets are
submitted in order. So all members submit the same operations in the same order.

Fixed point. A micro-batch's contribution v (the gradient of its part of a step's mean loss, fp32) becomes the integer
round(v * 2^44), ties to even, in an int64. Integer addition does not round, so the order and the grouping of the
additions do not matter.

**Range.** A contribution *fits* if |v| <= 2^18 / M in every element. Then no sum of a step's M contributions exceeds
2^62, and no partial sum overflows. If all micro-batches have equally many targets, the limit is a gradient of 262,144
in one element of the mean loss of a micro-batch, for every M. With clipping at 1 a run has diverged long before. A
contribution that is larger or not finite does not fit: it is void, and its step must not be committed.

**Error.** A value of magnitude 2^-20 or more keeps all 24 bits of fp32. A smaller value is rounded to a multiple of
2^-44 (5.7e-14), so the error of a sum is at most M * 2^-45. This is negligible beside the sqrt(v) + 1e-8 by which AdamW
divides. A sum in fp32 errs by up to (M - 1) * 2^-24 of its largest partial sum.

Noise. ChaCha20 (RFC 8439) makes random numbers from a key, and Gaussian noise is made from those.

Inner steps. ``InnerSteps`` counts which inner steps of DiLoCo a contribution holds (``compute.local``). With fragments,
or if steps overlap, the inner steps of an aborted step stay in the member's own copy, and count when the step is
repeated. Else each step begins with a new copy of the shared parameters.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

KEY_BYTES = 32
_NOISE_BLOCK_NUMEL = 1 << 18
FRACTION_BITS = 44
UNIT = 2.0**-FRACTION_BITS
"""The value of the integer 1."""


def bucket_bounds(numel: int, itemsize: int, bucket_bytes: int = 0) -> list[tuple[int, int]]:
    """Cut ``range(numel)`` into equal runs [start, stop), in order; the same on every member. ``bucket_bytes``:
    approximate size; 0 for 1/16 of the array, at least 1 MiB: smaller buckets save less than they cost. There are at
    most 256 buckets, because each operation in progress takes memory at both neighbours."""
    total_bytes = numel * itemsize
    count = min(-(-total_bytes // bucket_bytes), 256) if bucket_bytes else min(total_bytes >> 20, 16)
    count = max(count, 1)
    # 16 fp32 elements are 64 bytes, the alignment of the parameters in the flat arrays.
    cuts = [numel * number // count // 16 * 16 for number in range(count)] + [numel]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


def largest(micro_batches: int) -> float:
    """Largest magnitude of a contribution that fits, for a step of ``micro_batches`` contributions."""
    return 2.0 ** (62 - FRACTION_BITS) / micro_batches


def to_fixed(values: npt.NDArray[np.float32], micro_batches: int) -> tuple[npt.NDArray[np.int64], bool]:
    """Contribution ``values`` in fixed point, same shape, and whether all fit. If one does not fit, all are zeros."""
    fits = bool(np.all(np.abs(values) <= largest(micro_batches)))
    if not fits:
        return np.zeros(values.shape, np.int64), False
    return np.rint(np.multiply(values, 1 / UNIT, dtype=np.float64)).astype(np.int64), True


def to_float(fixed: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The nearest fp32 values, same shape."""
    return fixed.astype(np.float32) * np.float32(UNIT)


def keystream(key: bytes, number: int, numel: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """``numel`` uniform integers of 64 bits as blocks, each with the place of its first element.

    Args:
        key: ``KEY_BYTES`` bytes.
        number: each number of a key gives another stream. Use no (key, number) for two purposes.
    """
    stream = Cipher(ChaCha20(key, struct.pack("<QQ", 0, number)), mode=None).encryptor()
    for start in range(0, numel, _NOISE_BLOCK_NUMEL):
        yield start, np.frombuffer(stream.update(bytes(8 * min(_NOISE_BLOCK_NUMEL, numel - start))), np.uint64)


def gaussian(key: bytes, numel: int, std: float) -> npt.NDArray[np.float32]:
    """Independent normal numbers of mean 0, shape (numel,), by the method of Box and Muller."""
    noise = np.empty(numel + numel % 2, np.float32)
    for start, uniform in keystream(key, 0, len(noise)):
        unit = ((uniform >> np.uint64(11)) + 1.0) * 2.0**-53  # in (0, 1]: its logarithm is finite
        radius, angle = std * np.sqrt(-2 * np.log(unit[::2])), 2 * math.pi * unit[1::2]
        noise[start : start + len(unit) : 2] = radius * np.cos(angle)
        noise[start + 1 : start + len(unit) : 2] = radius * np.sin(angle)
    return noise[:numel]


# -------------------------------------------------------------------------------------------------------- inner steps

MIXING = 0.5
"""Share of its own copy that a member keeps when the result of an overlapping step arrives (arXiv 2501.18512)."""


class InnerSteps:
    """Counts inner steps by fragment.

    Args:
        numel: of the parameters.
        decayed_numel: elements that are cut into fragments. The last fragment includes the rest, which are few.

    Attributes:
        step: the step that was begun last.
        is_copy_void: the next step begins with a new copy of the shared parameters.
        waits: the member has no inner steps or losses yet. It computes first, and sends only its losses. They count
            again with the inner steps, in the next step.
        sent: inner steps in the contribution.
        kept: share of its own copy that a member keeps when it goes on from the shared parameters.
    """

    def __init__(self, numel: int, decayed_numel: int, *, fragments: int, overlap: bool) -> None:
        self._numel, self._decayed_numel = numel, decayed_numel
        self._fragments, self._overlap = fragments, overlap
        self._taken = [0] * fragments  # since each fragment was exchanged
        self.step, self.sent = -1, 0
        self.is_copy_void, self.waits = True, False
        self.kept = MIXING if overlap else 0.0

    def begin_step(self, step: int, *, has_losses: bool) -> bool:
        """Begin a step. ``has_losses``: of inner steps that were not sent. Returns whether the member begins with a new
        copy."""
        is_new = self.is_copy_void or not (self._overlap or self._fragments > 1)
        if is_new:
            self._taken, self.sent, self.is_copy_void = [0] * self._fragments, 0, False
        self.step = step
        self.waits = self._overlap and not (self._taken[step % self._fragments] and has_losses)
        return is_new

    @property
    def is_ready(self) -> bool:
        """Whether the contribution of the step does not need the inner steps that follow."""
        return self._overlap and not self.waits

    def count(self, micro_batches: int) -> None:
        """Count an inner step, of so many micro-batches."""
        self._taken = [taken + micro_batches for taken in self._taken]

    def send(self) -> int:
        """Put the inner steps into the contribution. Returns their number."""
        self.sent = 0 if self.waits else self._taken[self.step % self._fragments]
        return self.sent

    def take_up(self, step: int) -> bool:
        """The shared parameters of the fragment of ``step`` have changed. Returns whether the member's copy goes on
        from them. Else it took no part, such as after an outlier, and begins with a new copy."""
        self.is_copy_void = self.is_copy_void or step != self.step
        if not self.is_copy_void:
            self._taken[step % self._fragments] -= self.sent
            self.sent = 0
        return not self.is_copy_void

    def fragment(self, step: int) -> slice:
        """The parameters that ``step`` exchanges."""
        index, count = step % self._fragments, self._fragments
        start, stop = (self._decayed_numel * number // count // 16 * 16 for number in (index, index + 1))
        return slice(start, self._numel if index == count - 1 else stop)

    def exchanged(self, step: int, scalars: int) -> list[tuple[int, int]]:
        """``StepUpdate.exchanged``, of a contribution with so many numbers behind the parameters."""
        part, end = self.fragment(step), self._numel + scalars
        return [(part.start, end)] if part.stop == self._numel else [(part.start, part.stop), (self._numel, end)]
