"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from p2ptrain.core.errors import UserError

_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size_of(text: str) -> int:
    """Bytes of ``4096``, ``64K``, ``1.5M``, ``4GiB``; units are binary. Raises ``UserError``."""
    match = _SIZE.fullmatch(text.strip())
    size_bytes = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size_bytes < 1:
        raise UserError(f"{text.strip()!r} is no size", remedy="write bytes, or 64K, 1.5M, 4GiB")
    return size_bytes
