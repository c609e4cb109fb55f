"""Leaving on Ctrl+C: the first asks politely, the second does not wait."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

EXIT_INTERRUPTED = 130


def stop_on_signals(stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Set ``stop`` on SIGINT or SIGTERM; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        say("leaving; press Ctrl+C again not to wait")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ask)
        except NotImplementedError:  # Windows: asyncio has no signal handlers there
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(ask))
