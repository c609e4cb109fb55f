"""Event loops: the kind that this program runs on, and one on a thread of its own, for callers that must not wait."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory(*, children: bool = False) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed. ``children``: the loop starts processes, for which every system has asyncio's."""
    if children:
        return None
    try:
        import uvloop
    except ImportError:  # Windows, or no build for this interpreter: asyncio's loop is slower
        # Windows' default loop ignores requests to pause reading, which bulk payloads need.
        return asyncio.SelectorEventLoop if sys.platform == "win32" else None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class ServiceThread:
    """An event loop on a thread of its own, and what was entered there. ``children``: as of ``loop_factory``."""

    def __init__(self, name: str, *, children: bool = False) -> None:
        factory = loop_factory(children=children) or asyncio.new_event_loop
        self._loop, self._stack = factory(), AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter a context manager there; ``close`` leaves it. Raises what entering raises."""
        return self.call(self._stack.enter_async_context(manager))

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = math.inf) -> T:
        """Run ``work`` on that loop and wait for it. Ctrl+C raises here and cancels the work, and so does the end of
        the time, with ``TimeoutError``."""
        future, ends = asyncio.run_coroutine_threadsafe(work, self._loop), time.monotonic() + timeout_s
        try:
            # Python handles a Ctrl+C that comes just before a wait only after the wait. So the waits are short.
            while not futures.wait([future], timeout=0.1).done and time.monotonic() < ends:
                pass
            return future.result(timeout=0)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Leave what was entered; wait up to 4 s for that. May be called twice."""
        if not self.is_open:
            return
        with suppress(TimeoutError):  # longer than the clean-up of what was entered
            self.call(self._stack.aclose(), 4.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():  # else it blocks, and ends with the process
            self._loop.close()
