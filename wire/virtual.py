"""An asyncio event loop whose clock jumps: hours of protocol pass in milliseconds, and every time is exact.

Time stands still while callbacks run. When nothing is ready, the clock moves to the next timer, and nobody waits. When
there is no timer either, nothing can ever happen again; where a real loop would hang, this one raises ``RuntimeError``.
That is also why it is for in-memory networks only: what a thread or another process would send later is not waited for.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_INSTANT_S = 1e-9  # timers so near are due in the same turn, as asyncio has it with its clock's resolution
_CANCELLED_KEPT = 100  # cancelled timers that may lie about; as many as in asyncio


class VirtualClockLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, which starts at 0 s. It has no selector: no sockets, no pipes, no signals."""

    # asyncio's own, which typeshed does not list.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def run_handle(self, handle: asyncio.Handle) -> None:
        """Run one callback; the simulator has its own say here."""
        handle._run()

    def _run_once(self) -> None:
        """One turn, as in asyncio: all that is ready by now, not what becomes ready in it."""
        ready, scheduled = self._ready, self._scheduled
        if self._timer_cancelled_count > _CANCELLED_KEPT and 2 * self._timer_cancelled_count > len(scheduled):
            scheduled[:] = [timer for timer in scheduled if not self._forgotten(timer)]
            heapq.heapify(scheduled)
        while scheduled and scheduled[0].cancelled():
            self._forgotten(heapq.heappop(scheduled))
        if not ready and not self._stopping:
            if not scheduled:
                raise RuntimeError(f"deadlock at virtual time {self._now:g} s: nothing is ready and no timer is set")
            self._now = max(self._now, scheduled[0].when())
        while scheduled and scheduled[0].when() < self._now + _INSTANT_S:
            timer = heapq.heappop(scheduled)
            if not timer.cancelled() or not self._forgotten(timer):
                timer._scheduled = False  # type: ignore[attr-defined]
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                self.run_handle(handle)

    def _forgotten(self, timer: asyncio.TimerHandle) -> bool:
        """Whether a timer of the heap is cancelled; it is counted out then, for it leaves the heap."""
        if timer.cancelled():
            timer._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1
        return timer.cancelled()

    def _write_to_self(self) -> None:
        """Nothing sleeps in a selector, so nothing needs to be woken."""

    def _process_events(self, event_list: object) -> None:
        """There are none."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a fresh ``VirtualClockLoop``."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
