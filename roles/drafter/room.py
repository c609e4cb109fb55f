"""What memory a drafter gives to a session: to its cache, and to what its drafts are drawn from. Pure.

A verifier that rejects drafts by their probabilities may ask for these of any draft that no verdict has told of yet. So
they are kept, a *row* of them for each draft; where there is little memory it drafts less far ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.core.errors import Refused
from roles.speculation.drafting import AHEAD
from roles.speculation.received import FULL, MAX_DEPTH

ROWS_BYTES = 64 << 20
"""Of a session's rows: few drafts ahead where the vocabulary is large."""
LEAST_AHEAD = 4
"""Drafts ahead that are worth their memory."""


@dataclass(frozen=True, slots=True)
class Room:
    """Of one session: positions that it may have, drafts beyond what is verified, and bytes for both of them."""

    positions: int
    ahead: int
    nbytes: int


def room_for(positions: int, *, position_bytes: int, row_bytes: int, left_bytes: int, limit_bytes: int) -> Room:
    """
    Args:
        position_bytes: of the cache. row_bytes: 0: no rows are kept.
        left_bytes: of ``limit_bytes``, which is 0 where there is no limit.

    Raises:
        Refused: too little is left.
    """
    cache_bytes, ahead, least = positions * position_bytes, MAX_DEPTH, 0
    if row_bytes:
        free_bytes, least = left_bytes - cache_bytes if limit_bytes else 2 * ROWS_BYTES, LEAST_AHEAD
        ahead = most_ahead(min(ROWS_BYTES, free_bytes // 2) // row_bytes)  # others may come
        if ahead < least:
            ahead = min(least, most_ahead(free_bytes // row_bytes))
    if limit_bytes and (ahead < least or cache_bytes > left_bytes):
        drafts = f" and {least} drafts with all of their probabilities" if least else ""
        need_mib, left_mib, limit_mib = (
            nbytes / 2**20 for nbytes in (cache_bytes + rows(least) * row_bytes, left_bytes, limit_bytes)
        )
        text = f"{positions} positions{drafts} take {need_mib:,.1f} MiB of memory, and {left_mib:,.1f} are left"
        remedy = "start another drafter, or give this one more memory: --memory"
        raise Refused(FULL, f"{text} of {limit_mib:,.1f}", remedy=remedy)
    ahead = max(1, ahead)
    return Room(positions, ahead, cache_bytes + rows(ahead) * row_bytes)


def rows(ahead: int) -> int:
    """There are so many at most: of drafts that may be sent, of those that are made before they may be, of one that is
    made now, and of one that the engine has."""
    return ahead + min(ahead, AHEAD) + 2


def most_ahead(count: int) -> int:
    """Drafts beyond what is verified for which that many rows are enough."""
    return min(MAX_DEPTH, max((count - 2) // 2, count - 2 - AHEAD))
