"""Which sessions have their next pass computed together. Pure.

A session waits here with its next pass; its owner keeps the passes themselves. ``take`` forms a batch from what waits
now, in two groups, each in the order of priority, then first come, first served:

1. Passes that write text, one row or a few each. A session that wrote goes to the end.
2. Passes of prompts, which are long. A session keeps its place until its prompt is computed, so prompts are computed
   one after another. The first one always goes, so the owner bounds how long a pass of a prompt is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SHARED_CHUNK = 128
"""Positions of prompts in one batch while other texts wait for their next token."""


@dataclass(frozen=True, slots=True)
class _WaitingPass:
    positions: int
    prefill: bool
    priority: int
    place: int


class PassQueue(Generic[K]):
    """Sessions that wait for their next pass, each at most once."""

    def __init__(self) -> None:
        self._waiting: dict[K, _WaitingPass] = {}
        self._places: dict[K, int] = {}  # of sessions whose prompt is being computed
        self._last_place = 0

    def __contains__(self, session: K) -> bool:
        return session in self._waiting

    def add(self, session: K, positions: int, *, prefill: bool, priority: int = 0) -> None:
        """Let the session wait with a pass of ``positions`` rows. It is ignored if the session waits already.

        Args:
            prefill: the pass computes positions of a prompt. priority: lower ones go first.
        """
        if session in self._waiting:
            return
        self._last_place += 1
        kept_place = self._places.pop(session, self._last_place)
        self._waiting[session] = _WaitingPass(positions, prefill, priority, kept_place if prefill else self._last_place)

    def drop(self, session: K) -> None:
        """Forget a session, waiting or not. To be called when it ends."""
        self._waiting.pop(session, None)
        self._places.pop(session, None)

    def take(
        self, ready: Callable[[K], bool] = lambda session: True, *, most_sessions: int = 0, most_prompt_positions: int
    ) -> list[K]:
        """Take the sessions of the next batch out of the queue; empty: none is ready.

        Args:
            ready: whether the session's pass can be computed now.
            most_sessions: most passes that write text; 0: any number.
            most_prompt_positions: most positions of prompts together, unless the first prompt's pass has more.
        """
        ordered = sorted(self._waiting, key=self._order)
        writing = [session for session in ordered if not self._waiting[session].prefill and ready(session)]
        batch = writing[: most_sessions or None]
        room = most_prompt_positions
        for session in ordered:
            waiting = self._waiting[session]
            if not waiting.prefill or not ready(session):
                continue
            if waiting.positions > room and room < most_prompt_positions:
                break  # a shorter prompt that came later must not go first
            batch.append(session)
            room -= waiting.positions
        for session in batch:
            waiting = self._waiting.pop(session)
            if waiting.prefill:
                self._places[session] = waiting.place
        return batch

    def _order(self, session: K) -> tuple[int, int]:
        return self._waiting[session].priority, self._waiting[session].place
