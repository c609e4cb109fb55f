"""An asyncio event loop whose clock jumps: hours of protocol pass in milliseconds, and every time is exact.

Time stands still while callbacks run. When nothing is ready, the clock moves to the next timer, and nobody waits. When
there is no timer either, nothing can ever happen again; where a real loop would hang, this one raises ``RuntimeError``.
That is also why it is for in-memory networks only: what a thread or another process would send later is not waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Moves its clock where others wait. The loop asks it to wait for exactly the time to its next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise RuntimeError(f"deadlock at virtual time {self.now:g} s: nothing is ready and no timer is set")
        self.now += timeout
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a fresh ``VirtualClockLoop``."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
