"""One thread for everything that computes, so that the event loop answers heartbeats whatever the model does.

A thread of its own rather than an executor's: it must be the same one for the life of the process (CUDA contexts,
thread counts), and a long kernel must not keep the process from leaving, so it is a daemon.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from p2ptrain.core.errors import P2PTrainError, ResourceError

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class ComputeThread:
    """Runs blocking calls one after another. Every caller waits for its own, so at most one call a task is queued."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on the thread and give its result.

        A cancelled caller stops waiting; a call that has not begun is then skipped, one that has runs to its end.

        Raises:
            P2PTrainError: as raised by the call; whatever else it raised, libraries' errors too, as ``ComputeFailed``.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, future, lambda: function(*args, **kwargs)))
        return await future

    def close(self) -> None:
        """Let the thread end after what is queued."""
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not _carried_out(*job):
                return
            del job  # while it waits for the next one it must not keep alive what this one was about: a whole model


def _carried_out(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: Callable[[], Any]) -> bool:
    """Call, and hand over what came of it; False where the loop is closed, and so nobody waits any more."""
    if future.cancelled():
        return True
    result, error = None, None
    try:
        result = call()
    except BaseException as raised:  # noqa: BLE001 - carried to the caller, who decides
        error = raised
    try:
        loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        return False
    finally:
        del error  # it holds a traceback, which holds this frame
    return True


class ComputeFailed(ResourceError):
    """Something that is not this project's failed while it computed. ``__cause__`` has the traceback."""


def translated(error: BaseException) -> ComputeFailed:
    """What a library raised, for people."""
    line = " ".join(str(error).split())[:300] or "it did not say why"
    remedy = ""
    if isinstance(error, MemoryError) or "out of memory" in line.lower():
        remedy = "lower batch.micro_batch_sequences, or use a smaller model"
    failed = ComputeFailed(f"{type(error).__name__} while computing: {line}", remedy=remedy)
    failed.__cause__ = error
    return failed


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, P2PTrainError):
        future.set_exception(error)
    elif error is not None:
        future.set_exception(translated(error))
    else:
        future.set_result(result)
