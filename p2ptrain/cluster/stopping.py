"""Leaving on Ctrl+C: the first one requests an orderly end, the second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import EXIT_INTERRUPTED

LEAVING = "leaving; press Ctrl+C again not to wait"

T = TypeVar("T")


def stoppable(*, with_parent: bool = False) -> tuple[Console, asyncio.Event]:
    """A console, and an event that Ctrl+C sets; ``with_parent``: the end of the parent sets it, too."""
    console, stop = Console(), asyncio.Event()
    stop_on_signals(stop, lambda text: console.event("info", text))
    if with_parent:
        leave_with_parent(stop)
    return console, stop


def stop_on_signals(stop: asyncio.Event, announce: Callable[[str], None]) -> None:
    """Set ``stop`` on SIGINT, SIGTERM or SIGHUP; a second one ends the process at once. `nohup` ignores SIGHUP."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        stop.set()  # set first, because the message may fail
        announce(LEAVING)

    hang_up = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    for number in {signal.SIGINT, signal.SIGTERM, hang_up}:
        if number == hang_up and signal.getsignal(number) is signal.SIG_IGN:
            continue
        try:
            loop.add_signal_handler(number, ask)
        except NotImplementedError:  # Windows: asyncio has no signal handlers there
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(ask))


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of ``work``; None if ``stop`` is set before, which cancels the work."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        both: set[asyncio.Future[Any]] = {task, stopped}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def leave_with_parent(stop: asyncio.Event) -> None:
    """In a child: set ``stop`` when the parent closes our standard input, or dies."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        try:
            loop.call_soon_threadsafe(stop.set)
        except RuntimeError:
            return  # the loop has ended before the parent did

    threading.Thread(target=watch, name="parent", daemon=True).start()
