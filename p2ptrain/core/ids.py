"""Identifiers: short, printable, unguessable enough not to collide by accident."""

from __future__ import annotations

import re
import secrets

ID_PATTERN = r"[0-9a-z][0-9a-z-]{0,62}"


def new_id() -> str:
    """A fresh 48-bit identifier in hex, for peers, jobs and clusters."""
    return secrets.token_hex(6)


def is_id(text: str) -> bool:
    """Whether ``text`` may be used as an identifier (and so as part of a file name)."""
    return re.fullmatch(ID_PATTERN, text) is not None
