"""The event loop of a process. No other place chooses one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


def loop_factory(*, children: bool = False) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed. ``children``: the loop must be able to start processes."""
    try:
        import uvloop
    except ImportError:  # Windows, or no build for this interpreter: asyncio's loop is slower
        # Windows' default loop ignores requests to pause reading, which bulk payloads need. The selector loop cannot
        # start processes.
        return asyncio.SelectorEventLoop if sys.platform == "win32" and not children else None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
