"""Peers as child processes: started, watched, and ended with their parent, however it ends.

A child is told to leave by closing its standard input. So it also leaves when the parent is killed, on every operating
system, and Ctrl+C at the terminal reaches the parent alone, which then ends the children in order.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.errors import StorageError

LEAVE_S = 3.0  # a worker leaves within two seconds
TAIL_BYTES = 4096


@dataclass(slots=True)
class Child:
    """One peer process. What it says goes to ``log``."""

    name: str
    process: Process
    log: Path

    @classmethod
    async def start(cls, name: str, arguments: list[str], log: Path, *, listen: bool = False) -> Child:
        """Start ``p2ptrain``; ``listen`` keeps its standard output readable. Raises ``StorageError``."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("ab")
        except OSError as error:
            raise StorageError(f"cannot write {log}: {error.strerror}", remedy="choose another --state") from error
        with sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "p2ptrain",
                *arguments,
                "--with-parent",
                stdin=PIPE,
                stdout=PIPE if listen else DEVNULL,
                stderr=sink,
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def ask_to_leave(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def ended(self, timeout_s: float = LEAVE_S) -> None:
        """Wait for the end, and make it one when it takes longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        try:
            with self.log.open("rb") as handle:
                handle.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                lines = handle.read(TAIL_BYTES).decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""


async def end_all(children: list[Child]) -> None:
    """Ask all to leave, then wait for all."""
    for child in children:
        child.ask_to_leave()
    await asyncio.gather(*(child.ended() for child in children))


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
