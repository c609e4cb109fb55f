"""Passes that begin before the one in front of them is answered. Pure.

A target whose stages compute different passes at once has room for more than one: the next one takes drafts behind
those that are under way. It counts where all of them turn out right, and the token behind them, too; where not, it is
*void*: its picks stand on what the text is not, and are dropped. Answers come in the order of the passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from roles.speculation.estimates import Recent
from roles.speculation.events import Run

MOST_PASSES = 6
"""In the target at a time, void ones among them."""
LEAST_CHANCE = 0.04
"""That a pass counts: else it is not begun."""


class Behind:
    """What is in the target: the pass in front, those behind it, and void ones.

    Attributes:
        drafts: of all that count, in the order of the text: what follows it if they are right.
        delayed: void ones were in the way of the pass in front.
    """

    def __init__(self) -> None:
        self.drafts: list[int] = []
        self.delayed = False
        self._passes: deque[tuple[Run, int]] = deque()
        self._began: deque[float] = deque()
        self._void = 0
        self._turn = Recent(0.0)

    def front(self, run: Run, now: float) -> None:
        """The pass in front of all others began; what is in the target beside it is void."""
        assert not self._passes
        self.delayed = self._void > 0
        self._began.append(now)
        self.drafts = list(run.ids[1:])

    def begin(self, run: Run, drafter: int, now: float) -> None:
        """One more began."""
        self._began.append(now)
        self._passes.append((run, drafter))
        self.drafts += run.ids

    def answered(self, turn_s: float) -> bool:
        """An answer came; whether it is void. ``turn_s``: so long the pass kept the next one out of the target; 0 where
        all of it is over before the next one begins."""
        if self._began:
            self._began.popleft()
        if turn_s > 0:
            self._turn.add(turn_s)
        if self._void:
            self._void -= 1
            return True
        return False

    def next_in_front(self, text: Sequence[int]) -> tuple[Run, int] | None:
        """After an answer that counts: the pass that is in front now; None where what there is is void."""
        if self._passes:
            run, drafter = self._passes[0]
            if run.keep == len(text) - 1 and run.ids[0] == text[-1]:
                self._passes.popleft()
                self.delayed = False
                self.drafts = [*run.ids[1:], *(token for other, _ in self._passes for token in other.ids)]
                return run, drafter
        self._void += len(self._passes)
        self._passes.clear()
        self.drafts = []
        return None

    def apart_s(self, step_s: float, sessions: int) -> float:
        """How long after a pass the next one may begin; 0: not before it is answered, for that would be no gain.
        ``sessions``: that share the target's turns."""
        apart_s = self._turn.seconds * max(1, sessions)
        return apart_s if apart_s <= step_s / 2 else 0.0

    @property
    def full(self) -> bool:
        """No other one may begin."""
        return len(self._began) >= MOST_PASSES

    @property
    def last_at(self) -> float:
        """When the last one began."""
        return self._began[-1]

    def answer_within(self, seconds: float, step_s: float, now: float) -> bool:
        """Whether an answer is due: were it to void the others, one that begins now would be in the next one's way."""
        return any(began + step_s < now + seconds for began in self._began)

    def validate(self) -> None:
        """Raises ``AssertionError`` where what must always hold does not."""
        assert len(self._began) <= MOST_PASSES + 1
        assert self._void + len(self._passes) <= len(self._began)
