"""What a long-running command says on standard error, and how it is asked to leave.

The first Ctrl+C requests an orderly end, the second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import typer

from p2ptrain.core.errors import EXIT_INTERRUPTED
from p2ptrain.core.texts import human_bytes, printable

T = TypeVar("T")

LEAVING = "leaving; press Ctrl+C again not to wait"
SHORT_S, PLAIN_S = 1.0, 10.0
"""Work that takes less shows no progress; seconds between its lines where they are not rewritten."""


_COLOURS = {"warning": "yellow", "error": "red"}
_MARKS = {"info": "·", "warning": "!", "error": "✗"}


class Console:
    """Writes to standard error, so that standard output stays free for results.

    Args:
        now: clock in seconds that limits how often progress is shown.
        quiet: show no progress.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._now = now
        self._live = sys.stderr.isatty()
        self._drawn = 0
        self._next = 0.0
        self._loading_s: float | None = None  # since when

    def event(self, level: str, text: str, wall: float | None = None) -> None:
        """Print one line with the time, ``wall`` in Unix seconds or now; its mark and colour show the level."""
        self.clear()
        self._print(f"{time.strftime('%H:%M:%S', time.localtime(wall))} {self.mark(level)} {printable(text)}")

    @staticmethod
    def mark(level: str) -> str:
        return typer.style(_MARKS.get(level, "·"), fg=_COLOURS.get(level, "cyan"), bold=level != "info")

    def progress(self, text: str, *, last: bool = False, every_s: float = 1.0) -> None:
        """Show progress. Dropped if the last one is too recent, unless ``last``.

        ``every_s``: seconds between two lines if lines are not rewritten.
        """
        now = self._now()
        if self.quiet or (now < self._next and not last):
            return
        self._next, text = now + (0.1 if self._live else every_s), printable(text)
        if not self._live:
            self._print(text)
            return
        text = text[: shutil.get_terminal_size().columns - 1]  # a folded line cannot be rewritten
        self._draw("\r" + text.ljust(self._drawn)[: max(len(text), self._drawn)])
        self._drawn = len(text)
        if last:
            self.finish()

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Show how much of a model is loaded. Where lines are not rewritten, a second must have passed before."""
        self._loading_s = self._now() if self._loading_s is None else self._loading_s
        if self._live or self._now() - self._loading_s > SHORT_S:
            self.progress(f"loading  {human_bytes(done_bytes)} of {human_bytes(total_bytes)}")

    @contextmanager
    def during(self, text: Callable[[], str]) -> Iterator[None]:
        """Show ``text()`` and the time while the block runs, if it takes over a second. The block may use this thread
        without a pause, as imports do, but must show no progress itself."""
        began, ended = self._now(), threading.Event()

        def show() -> None:
            wait_s = SHORT_S
            while not ended.wait(wait_s):
                with suppress(OSError):  # of the text: a file that it looks at is gone
                    self.progress(f"{text()}  ({self._now() - began:.0f} s)", every_s=PLAIN_S)
                wait_s = 0.2

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.clear()

    def finish(self) -> None:
        if self._drawn:
            self._draw("\n")
            self._drawn = 0

    def clear(self) -> None:
        if self._drawn:
            self._draw("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def _print(self, text: str) -> None:
        with suppress(OSError):
            typer.echo(text, err=True)

    def _draw(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


# ----------------------------------------------------------------------------------------------------------- leaving


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


async def run_stoppable(work: Callable[[Console], Awaitable[T]]) -> T | None:
    """The result of work that shows its progress; None after Ctrl+C, which cancels it."""
    console, stop = stoppable()
    try:
        return await unless_stopped(stop, work(console))
    finally:
        console.finish()


def leave_with_parent(stop: asyncio.Event) -> None:
    """In a child: set ``stop`` when the parent closes our standard input, or dies."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        with suppress(RuntimeError):  # the loop has ended before the parent did
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="parent", daemon=True).start()
