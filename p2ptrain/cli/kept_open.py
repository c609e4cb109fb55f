"""What has connections that say that they live while the person types: kept open on a loop of a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from p2ptrain.cli.runtime import run
from p2ptrain.cli.split import LEAVE_S

T = TypeVar("T")
_ENDED_S = 2 * LEAVE_S


class KeptOpen(Generic[T]):
    """Made when it is open. Raises what ``opened`` does on entering.

    Args:
        opened: what is entered, and left in the end, on the thread's loop.
        name: of the thread.

    Attributes:
        value: what ``opened`` gave.
        loop: where it lives.
    """

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> None:
        self._opened = opened
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        ready: Future[tuple[asyncio.AbstractEventLoop, T]] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=name, daemon=True)
        self._thread.start()
        try:
            self.loop, self.value = ready.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave it, and wait a little until that is done."""
        if self._serving is not None:
            loop, serving = self._serving
            try:
                loop.call_soon_threadsafe(serving.cancel)
            except RuntimeError:
                return  # the loop has ended
        self._thread.join(_ENDED_S)

    # ------------------------------------------------------------------------------------------------- on its thread

    def _run(self, ready: Future[tuple[asyncio.AbstractEventLoop, T]]) -> None:
        try:
            run(self._serve(ready))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for it
            if not ready.done():
                ready.set_exception(error)

    async def _serve(self, ready: Future[tuple[asyncio.AbstractEventLoop, T]]) -> None:
        loop, serving = asyncio.get_running_loop(), asyncio.current_task()
        assert serving is not None
        self._serving = loop, serving
        try:
            async with self._opened() as value:
                ready.set_result((loop, value))
                await asyncio.Event().wait()  # until ``close`` cancels this
        except asyncio.CancelledError:
            if not ready.done():
                raise
