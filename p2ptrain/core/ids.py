"""Identifiers: short, printable, and random enough to avoid collisions."""

from __future__ import annotations

import re
import secrets

ID_BYTES = 6
ID_PATTERN = r"[0-9a-z][0-9a-z-]{0,62}"


def new_id() -> str:
    """For programs without a World, which has ``World.new_id``."""
    return secrets.token_hex(ID_BYTES)


def is_id(text: str) -> bool:
    return re.fullmatch(ID_PATTERN, text) is not None
