"""What a model has computed of texts that ended, for conversations that go on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.core.serving import Sampling
from roles.background import Background
from roles.chain.generation import common_prefix
from roles.verifier.target import TargetSession

LEAST = 16
"""Positions that are worth to be found again."""


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A target's session, what it was opened for, and the ids that it has."""

    session: TargetSession
    positions: int
    sampling: Sampling
    ids: tuple[int, ...] = ()


class Kept:
    """A few sessions that nobody uses now, the oldest first.

    Args:
        most: so many at a time. keep_s: each for so long.
    """

    def __init__(self, most: int, keep_s: float) -> None:
        self._most, self._keep_s = most, keep_s
        self._sessions: deque[tuple[KeptSession, asyncio.TimerHandle]] = deque()
        self._closing = Background()

    def __len__(self) -> int:
        return len(self._sessions)

    def take(self, ids: Sequence[int], *, positions: int, sampling: Sampling) -> tuple[KeptSession, int] | None:
        """The session that has most of the beginning of ``ids``, and how much; None where none is worth it."""
        for kept in [kept for kept, _ in self._sessions if kept.session.lost]:
            self._expire(kept)
        best, most = None, LEAST - 1
        for number, (kept, _) in enumerate(self._sessions):
            if kept.positions >= positions and kept.sampling == sampling:
                same = common_prefix(kept.ids, ids)
                if same > most and 2 * same >= len(kept.ids):  # else another conversation may still want it
                    best, most = number, same
        if best is None:
            return None
        kept, timer = self._sessions[best]
        timer.cancel()
        del self._sessions[best]
        return kept, most

    def keep(self, session: KeptSession) -> None:
        """For whoever goes on from it; without room the oldest is closed."""
        if not self._most or len(session.ids) < LEAST:
            self.let_go(session.session)
            return
        timer = asyncio.get_running_loop().call_later(self._keep_s, self._expire, session)
        self._sessions.append((session, timer))
        if len(self._sessions) > self._most:
            self._expire(self._sessions[0][0])

    def let_go(self, session: TargetSession) -> None:
        """Close one, soon."""
        self._closing.start(session.close(), "close a session")

    async def drop_oldest(self) -> bool:
        """Close one now, for its memory; whether there was one, or one was just being closed."""
        if self._sessions:
            self._expire(self._sessions[0][0])
        if not len(self._closing):
            return False
        await self._closing.settle(timeout_s=self._keep_s)
        return True

    async def close(self) -> None:
        """All of them."""
        for session, _ in list(self._sessions):
            self._expire(session)
        await self._closing.settle(timeout_s=self._keep_s)

    def _expire(self, session: KeptSession) -> None:
        for number, (kept, timer) in enumerate(self._sessions):
            if kept is session:
                timer.cancel()
                del self._sessions[number]
                self.let_go(session.session)
                return
