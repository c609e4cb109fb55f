"""Who may write now, and who waits for that, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from p2ptrain.core.errors import Refused
from wire.handshake import RefusalCode

SHORTEST_WAIT_S, LONGEST_WAIT_S = 10.0, 600.0
BUSY = RefusalCode.BUSY


def patience_s(expected_s: float) -> float:
    """For so long somebody waits for what is expected after that time: what is expected is a guess."""
    return min(max(2 * expected_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)


class Places:
    """So many texts at a time, and so many that wait.

    Args:
        expected_s: how long it takes, as far as is known, until so many more places have become free.
    """

    def __init__(self, most: int, most_waiting: int, expected_s: Callable[[int], float]) -> None:
        self._free = most
        self._most, self._most_waiting = most, most_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._expected_s = expected_s

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Take a place, which ``leave`` gives back.

        Raises:
            Refused: too many wait, or it took twice as long as was expected.
        """
        if self._free and not self._waiting:
            self._free -= 1
            return
        ahead = len(self._waiting) + 1
        expected_s = self._expected_s(ahead)
        if ahead > self._most_waiting:
            raise self._refused(f"{self._most} texts are being written, and {ahead - 1} wait", expected_s)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        wait_s = patience_s(expected_s)
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            if _given(turn):  # in this very moment
                return
            self._give_up(turn)
            raise self._refused(f"no place became free within {wait_s:.0f} s", expected_s) from None
        except asyncio.CancelledError:
            if _given(turn):
                self.leave()
            else:
                self._give_up(turn)
            raise

    def leave(self) -> None:
        """A place is free: the first who waits has it now."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else who waited was cancelled, and has yet to notice
                turn.set_result(None)
                return
        self._free += 1

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)

    def _refused(self, text: str, expected_s: float) -> Refused:
        seconds = max(1, round(expected_s))
        return Refused(
            BUSY, f"the verifier is busy: {text}", remedy=f"try again in {seconds} s, or start another verifier"
        )


def _given(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled()
