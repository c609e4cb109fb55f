"""Element types that the ring can sum, on plain host memory. Needs numpy only, so every peer computes the same bits.

numpy has no bfloat16: it is stored as uint16 and summed in float32, rounded to nearest even, as torch does on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_STORAGE: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}


def storage_dtype(name: str) -> np.dtype[Any]:
    """The numpy type that holds elements of type ``name``. Raises ``ValueError`` for a type that cannot be summed."""
    if name not in _STORAGE:
        raise ValueError(f"no sum is known for elements of type {name!r}; known are {', '.join(_STORAGE)}")
    return _STORAGE[name]


def sum_into(dst: Array, src: Array, dtype: str) -> None:
    """``dst += src``, element by element, both of shape (numel,) and stored as ``storage_dtype(dtype)``.

    Integers wrap around. A float sum that overflows is infinite, infinity minus infinity is NaN, and NaN stays NaN: a
    loss that is not finite is judged where it has a meaning, not here.
    """
    if dtype == "bfloat16":
        _sum_bfloat16_into(dst, src)
        return
    with np.errstate(all="ignore"):
        np.add(dst, src, out=dst)


def _sum_bfloat16_into(dst: Array, src: Array) -> None:
    with np.errstate(all="ignore"):
        total = _widened(dst)
        total += _widened(src)
    bits = total.view(np.uint32)
    is_nan = np.isnan(total)
    # Half of the last kept bit, less one where that bit is even: ties go to even. Adding it to a NaN could carry into
    # infinity.
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    np.right_shift(bits, np.uint32(16), out=bits)
    bits[is_nan] = 0x7FC0
    dst[:] = bits


def _widened(stored: Array) -> npt.NDArray[np.float32]:
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
