"""How far a benchmark of many settings is, and how long it will take yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from p2ptrain.cli.output import human_seconds


class Says(Protocol):
    """A ``Console``."""

    def progress(self, text: str) -> None: ...


class Remaining:
    """What is left: what was expected of it, as much slower or faster as what was done.

    Args:
        expected_s: of each setting, in their order; all 0 where nobody knows.
    """

    def __init__(self, console: Says, expected_s: Sequence[float], now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._expected_s, self._now = console, expected_s, now
        self._done, self._took_s = 0, 0.0

    @property
    def told(self) -> str:
        """For the end of a line; empty where nothing is known."""
        expected_s = self._expected_s if any(self._expected_s) else [1.0] * len(self._expected_s)
        left, done = sum(expected_s[self._done :]), sum(expected_s[: self._done])
        if self._took_s:
            left *= self._took_s / done
        elif not any(self._expected_s):
            return ""
        return f"; about {human_seconds(left)} left"

    @contextmanager
    def next(self, what: str) -> Iterator[None]:
        """The next one is done in this block."""
        self._console.progress(f"{self._done + 1} of {len(self._expected_s)}: {what}{self.told}")
        began = self._now()
        yield
        self._done += 1
        self._took_s += self._now() - began
