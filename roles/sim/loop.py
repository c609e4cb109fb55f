"""The simulator's event loop: many processes on one thread, each of which can be frozen, or killed at any moment.

Every callback belongs to the *process* whose context it was scheduled in (``PROCESS``); contexts are inherited by tasks
and timers, and ``wire.memory`` keeps them apart at its pipes. So a whole process can be made to stand still, as SIGSTOP
does it: its callbacks wait, its timers ring late, and the others see silence. A *moment* of a process is one callback.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from wire.memory import VirtualClockLoop

_TASKS_KEPT = 256  # ended tasks are forgotten when so many are known


class Process:
    """One life of one program on one machine.

    Attributes:
        host: the machine's name in the network.
        alive: False once it was killed or has ended: then nothing that it does has an effect.
        on_moment: called after each of its callbacks, outside its context.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.alive = True
        self.frozen = False
        self.moments = 0
        self.on_moment: Callable[[], None] | None = None
        self.waiting: deque[asyncio.Handle] = deque()
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def add(self, task: asyncio.Task[Any]) -> None:
        if len(self.tasks) >= _TASKS_KEPT:
            self.tasks = {known: None for known in self.tasks if not known.done()}
        self.tasks[task] = None

    def __repr__(self) -> str:
        return f"<{self.host}>"


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class SimLoop(VirtualClockLoop):
    """Virtual time for processes that can be frozen and killed."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def run_handle(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None:
            handle._run()
        elif process.frozen:
            process.waiting.append(handle)
        else:
            handle._run()
            self.callbacks += 1
            process.moments += 1
            if process.on_moment is not None:
                process.on_moment()

    def start(self, process: Process, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``main`` as ``process``."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        return self.create_task(main, name=f"{process.host}", context=context)

    def freeze(self, process: Process) -> None:
        """It stands still, and notices nothing."""
        process.frozen = True

    def thaw(self, process: Process) -> None:
        """It goes on where it stood; what it waited for and what is overdue happens at once."""
        process.frozen = False
        self._ready.extend(process.waiting)
        process.waiting.clear()

    def kill(self, process: Process) -> None:
        """It does nothing any more that has an effect. Its tasks are unwound, to leave nothing behind."""
        process.alive, process.on_moment = False, None
        self.thaw(process)
        for task in process.tasks:
            task.cancel()
        process.tasks.clear()


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **settings: Any
) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **settings)
    context = settings.get("context")
    process = context.get(PROCESS) if context is not None else PROCESS.get()
    if process is not None:
        process.add(task)
    return task
