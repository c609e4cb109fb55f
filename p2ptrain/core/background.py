"""Tasks that belong to an object with an explicit end: each task is awaited or cancelled, and its error is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_in(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
    """Start ``work`` in the group. Returns None, and starts nothing, if the group is ending."""
    try:
        return tasks.create_task(work, name=name)
    except RuntimeError:
        work.close()
        return None


class Background:
    """A set of running tasks. An uncaught error goes to the loop's exception handler and to ``on_error``."""

    def __init__(self, on_error: Callable[[BaseException], None] = lambda error: None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def settle(self, *, timeout_s: float | None = None, but: asyncio.Task[Any] | None = None) -> None:
        """Wait until all tasks except ``but`` have ended, for ``timeout_s`` at most; None: they end by themselves."""
        if waiting := self._tasks - {but, asyncio.current_task()}:
            await asyncio.wait(waiting, timeout=timeout_s)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        waiting = self._tasks - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"the task {task.get_name()} failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)
            self._on_error(error)
