"""Fixed point for gradients: sums that are the same in any order and any grouping. The format, and numpy; no torch.

Format
------
A micro-batch's contribution v (the gradient of its mean loss / M, fp32) becomes the integer round(v * 2^44), ties to
even, in an int64. Integers add without rounding, so it does not matter who adds what to what, and when.

**Range.** |v| <= 2^18 / M: then no sum over any of a step's M micro-batches is beyond 2^62, and none overflows on the
way. That is a micro-batch's own gradient (not divided by M) of 262,144 in one element, whatever M is: with clipping at
1 a run is lost long before. What is beyond, or not finite, does not *fit*: the contribution is void, and its step must
not be committed.

**Error.** What is 2^-20 or larger in magnitude keeps all 24 bits of fp32. What is smaller is rounded to a multiple of
2^-44 (5.7e-14): half of that each, hence M * 2^-45 in a sum, at most. AdamW divides by sqrt(v) + 1e-8, beside which
that is nothing; a sum in fp32 errs by up to (M - 1) * 2^-24 of its largest partial sum. The sum is rounded to fp32 as
it is applied, once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FRACTION_BITS = 44
UNIT = 2.0**-FRACTION_BITS
"""What an integer's 1 stands for."""

_SUM_BITS = 62


def largest(micro_batches: int) -> float:
    """The largest magnitude of a contribution that fits, where a step has so many."""
    return 2.0 ** (_SUM_BITS - FRACTION_BITS) / micro_batches


def to_fixed(values: npt.NDArray[np.float32], micro_batches: int) -> tuple[npt.NDArray[np.int64], bool]:
    """Contribution ``values`` in fixed point, of the same shape, and whether all fit; zeros where they do not."""
    fits = bool(np.all(np.abs(values) <= largest(micro_batches)))
    if not fits:
        return np.zeros(values.shape, np.int64), False
    return np.rint(np.multiply(values, 1 / UNIT, dtype=np.float64)).astype(np.int64), True


def to_float(fixed: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The nearest fp32 values, of the same shape."""
    return fixed.astype(np.float32) * np.float32(UNIT)
