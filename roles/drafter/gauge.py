"""What a drafter does, in figures: how fast it drafts, how busy it is, how much of it was right. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW_S = 5.0
STEPS = 15
"""So many steps decide how long one takes."""


class Gauge:
    """Figures of the last ``WINDOW_S`` seconds, and totals.

    Attributes:
        drafts: sent, of all sessions since the start. right: those that were verified; wrong: those that
            were contradicted, without what was drafted behind them.
    """

    def __init__(self) -> None:
        self.drafts = self.right = self.wrong = 0
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._events: deque[tuple[float, float, int]] = deque()  # when, seconds computed, tokens drafted

    @property
    def step_s(self) -> float:
        """Of one draft, by the median; 0 before the first."""
        return median(self._steps_s) if self._steps_s else 0.0

    def ran(self, now: float, took_s: float, *, positions: int, drafts: int) -> None:
        """The engine took in so many positions, and drafted."""
        if positions == 1:
            self._steps_s.append(took_s / drafts)
        self._add(now, took_s, 0)

    def drafted(self, now: float, tokens: int) -> None:
        """Drafts were sent."""
        self.drafts += tokens
        self._add(now, 0.0, tokens)

    def judged(self, right: int, wrong: bool) -> None:
        """A verdict came."""
        self.right += right
        self.wrong += wrong

    def figures(self, now: float) -> dict[str, float]:
        """For the seed, and for people."""
        self._forget(now)
        judged = self.right + self.wrong
        alpha = {"alpha": self.right / judged} if judged else {}
        return alpha | {
            "tokens_per_s": sum(tokens for _, _, tokens in self._events) / WINDOW_S,
            "busy": min(1.0, sum(took_s for _, took_s, _ in self._events) / WINDOW_S),
            "step_ms": 1e3 * self.step_s,
            "drafts": float(self.drafts),
        }

    def _add(self, now: float, took_s: float, tokens: int) -> None:
        self._events.append((now, took_s, tokens))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - WINDOW_S:
            self._events.popleft()
