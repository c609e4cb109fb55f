"""Where the time of a step goes: compute, communicate, wait for others; and how long a micro-batch takes here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median_low

WEIGHT = 0.5
"""Of the newest measurement in a unit's average: half of a lasting change is seen after one step."""


class UnitTime:
    """How long a micro-batch takes at this member: the average that the shares follow.

    The average moves towards the middle one of the last three measurements, so that one step in which the machine was
    asked for something else moves nothing. The very first measurement, when everything is cold, counts until there is
    another; and so does what was measured before this member had nothing to do for a while.
    """

    def __init__(self) -> None:
        self._average_s = 0.0
        self._provisional = True
        self._recent: deque[float] = deque(maxlen=3)

    @property
    def us(self) -> int:
        """Microseconds, 0 where nothing was measured yet."""
        return max(1, round(self._average_s * 1e6)) if self._average_s else 0

    def measured(self, seconds: float, count: int) -> None:
        """A share of ``count`` micro-batches took so long."""
        if count == 0:
            self._provisional = True
            return
        unit_s = seconds / count
        if self._provisional:
            cold = not self._average_s
            self._average_s, self._provisional = unit_s, cold
            self._recent.clear()
            if cold:
                return
        self._recent.append(unit_s)
        self._average_s += WEIGHT * (median_low(self._recent) - self._average_s)


class StepClock:
    """Adds up the phases of the step under way.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spent: dict[str, float] = {}
        self._waited_s = 0.0
        self._hidden_s = 0.0
        self._began = now()
        self.longest_s = 0.0
        self._formed_s: float | None = None
        self.last_ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent inside counts as ``name``: ``compute`` or ``communicate``."""
        start = self._now()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + self._now() - start

    def waited(self, seconds: float) -> None:
        """So much of the communication was waiting for a neighbour that had nothing to send yet."""
        self._waited_s += seconds

    def exchanged(self, *, exposed_s: float, communicating_s: float) -> None:
        """The gradients were under way for ``communicating_s``, of which ``exposed_s`` came after the own share."""
        self._hidden_s = max(0.0, communicating_s - exposed_s)

    def view_began(self, *, formed_s: float | None = None) -> None:
        """A step that spans two views is not a measurement.

        Args:
            formed_s: how long it took to stand in the view's ring; told with its first step.
        """
        self._formed_s = formed_s
        self._spent.clear()
        self._waited_s = 0.0
        self._hidden_s = 0.0
        self._began = self._now()

    def step_done(self) -> dict[str, float]:
        """Milliseconds of the step just applied.

        ``step_ms``; ``compute_ms``; ``communicate_ms`` and ``wait_ms``: what the ring cost after the computing;
        ``hidden_ms``: what it cost beside the computing, which is no part of the step's time; ``form_ms`` of a view's
        first step: how long its ring took to form.
        """
        now = self._now()
        step_s = now - self._began
        communicate_s = self._spent.get("communicate", 0.0)
        wait_s = min(self._waited_s, communicate_s)
        self.last_ms = {
            "step_ms": step_s * 1e3,
            "compute_ms": self._spent.get("compute", 0.0) * 1e3,
            "communicate_ms": (communicate_s - wait_s) * 1e3,
            "wait_ms": wait_s * 1e3,
            "hidden_ms": self._hidden_s * 1e3,
        }
        if self._formed_s is not None:
            self.last_ms["form_ms"] = self._formed_s * 1e3
        self.longest_s = max(self.longest_s, step_s)
        self.view_began()
        return self.last_ms
