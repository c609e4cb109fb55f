"""Element types that the ring can reduce, on plain host memory. Needs numpy only, so every peer computes the same bits.

numpy has no bfloat16: it is stored as uint16 and reduced in float32, rounded to nearest even, as torch does on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == "bfloat16" else name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_OF_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def storage_dtype(name: str) -> np.dtype[Any]:
    """The numpy type that holds elements of type ``name``. Raises ``ValueError`` for a type that cannot be reduced."""
    if name not in _STORAGE:
        raise ValueError(f"elements of type {name!r} cannot be reduced; known types are {', '.join(_STORAGE)}")
    return _STORAGE[name]


def check_reduction(dtype: str, reduction: np.ufunc) -> None:
    """Raise ``ValueError`` if elements of type ``dtype`` have no such reduction."""
    if reduction in _OF_BITS and "float" in dtype:
        raise ValueError(f"{reduction.__name__} is for integers, the elements are {dtype}")


def reduce_into(out: Array, left: Array, right: Array, dtype: str, reduction: np.ufunc = np.add) -> None:
    """``out = reduction(left, right)``, element by element, all of shape (numel,) and stored as
    ``storage_dtype(dtype)``. ``out`` may be ``left``.

    Integers wrap around. Float overflow gives infinity, infinity minus infinity gives NaN, and NaN stays NaN: the
    step's finite check judges them, not this function.
    """
    with np.errstate(all="ignore"):
        if dtype != "bfloat16":
            reduction(left, right, out=out)
            return
        total, operand = np.empty(left.shape, np.float32), np.empty(right.shape, np.float32)
        widen_bfloat16(left, total)
        widen_bfloat16(right, operand)
        reduction(total, operand, out=total)
        round_to_bfloat16(total, out, operand.view(np.uint32))


def divide(array: Array, divisor: int, dtype: str) -> None:
    """Divide floating-point elements (numel,) in place. Raises ``ValueError`` for other types."""
    if "float" not in dtype:
        raise ValueError(f"a mean is for floating-point elements, these are {dtype}")
    if dtype == "bfloat16":
        wide = np.empty(array.shape, np.float32)
        widen_bfloat16(array, wide)
        wide /= divisor
        round_to_bfloat16(wide, array)
    else:
        array /= divisor


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
