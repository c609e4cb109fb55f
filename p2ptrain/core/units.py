"""Sizes as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """A size with a binary unit: ``3.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
