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
        raise ValueError(f"elements of type {name!r} cannot be summed; known types are {', '.join(_STORAGE)}")
    return _STORAGE[name]


def sum_into(dst: Array, src: Array, dtype: str) -> None:
    """``dst += src``, element by element, both of shape (numel,) and stored as ``storage_dtype(dtype)``.

    Integers wrap around. Float overflow gives infinity, infinity minus infinity gives NaN, and NaN stays NaN: the
    step's finite check judges them, not this function.
    """
    if dtype == "bfloat16":
        _sum_bfloat16_into(dst, src)
        return
    with np.errstate(all="ignore"):
        np.add(dst, src, out=dst)


def round_to_bfloat16(values: Array, out: Array, scratch: Array | None = None) -> None:
    """Round float32 ``values`` (numel,) to bfloat16, ties to even, stored as uint16 in ``out`` (numel,).

    Every NaN becomes the one quiet NaN 0x7FC0; overflow becomes infinity. ``scratch`` (numel,), uint32, is overwritten;
    None allocates it.
    """
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, np.uint32(16), out=scratch)
    # Add half of the last kept bit, minus one if that bit is even: ties go to even. In a NaN the carry could give
    # infinity; those are overwritten below.
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(out, rounded, casting="unsafe")
    out[np.isnan(values)] = 0x7FC0


def widen_bfloat16(stored: Array, out: Array) -> None:
    """Convert bfloat16 ``stored`` (numel,), as uint16, to float32 ``out`` (numel,). Exact."""
    np.left_shift(stored, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")


def _sum_bfloat16_into(dst: Array, src: Array) -> None:
    total, addend = np.empty(dst.shape, np.float32), np.empty(src.shape, np.float32)
    widen_bfloat16(dst, total)
    widen_bfloat16(src, addend)
    with np.errstate(all="ignore"):
        total += addend
    round_to_bfloat16(total, dst, addend.view(np.uint32))
