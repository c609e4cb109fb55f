"""Sizes and ranges as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """A size with a binary unit: ``3.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def layers_text(start: int, stop: int) -> str:
    """``0–11`` for the layers [0, 12), ``3`` for the layers [3, 4)."""
    return f"{start}–{stop - 1}" if stop - start > 1 else str(start)
