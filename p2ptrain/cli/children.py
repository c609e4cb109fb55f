"""Peers as child processes: started, watched, and ended with their parent, however it ends.

A child is told to leave by closing its standard input. So it also leaves when the parent is killed, on every operating
system, and Ctrl+C at the terminal reaches the parent alone, which then ends the children in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.errors import JobFailed, StorageError

LEAVE_S = 3.0  # a worker leaves within two seconds
SEED_READY_S = 20.0
TAIL_BYTES = 4096
LINE_BYTES = 64 << 20
"""Of one line that a child says: texts of a benchmark, with their times, come in one."""
_ERROR, _REMEDY = "error: ", "  → "  # as ``p2ptrain.cli.main`` writes them


@dataclass(slots=True)
class Child:
    """One peer process. What it says goes to ``log``."""

    name: str
    process: Process
    log: Path
    log_start: int

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: list[str],
        log: Path,
        *,
        listen: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start ``p2ptrain``; ``listen`` keeps its standard output readable. Raises ``StorageError``.

        Args:
            environment: the child's, whole; None for this process' own.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("ab")
            log_start = sink.tell()  # opened for appending: its end
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
                env=environment,
                limit=LINE_BYTES,
            )
        return cls(name, process, log, log_start)

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

    def failed(self, what: str) -> JobFailed:
        """The error that says why it ended: its own last words, with their remedy, or the signal that killed it.

        Args:
            what: happened, such as ``"the seed did not start"``.
        """
        reason, remedy = self._last_words()
        code = self.process.returncode
        if code is not None and code < 0 and os.name == "posix":
            reason, remedy = f"it was killed by {signal.Signals(-code).name}", ""
            if -code == signal.SIGKILL:
                remedy = "the machine may have run out of memory"
        text = f"{what}: {reason}" if reason else what
        return JobFailed(text, remedy=f"{remedy}; its log is {self.log}".removeprefix("; "))

    def _last_words(self) -> tuple[str, str]:
        """The error that this process (its log may be older) wrote last, and the remedy; else its last line."""
        try:
            with self.log.open("rb") as handle:
                handle.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
                lines = handle.read(TAIL_BYTES).decode(errors="replace").strip().splitlines()
        except OSError:
            return "", ""
        for number in reversed(range(len(lines))):
            if lines[number].startswith(_ERROR):
                follows = lines[number + 1] if number + 1 < len(lines) else ""
                remedy = follows.removeprefix(_REMEDY) if follows.startswith(_REMEDY) else ""
                return lines[number].removeprefix(_ERROR), remedy
        return (lines[-1] if lines else ""), ""


async def start_seed_process(root: Path, port: int, *, tls: bool = False) -> Child:
    """A seed on the loopback without a job, for whoever makes one. Raises ``StorageError``."""
    arguments = ["seed", "--no-job", "--json", "--host", "127.0.0.1", "--port", str(port), "--state", str(root)]
    return await Child.start("seed", arguments + ["--tls"] * tls, root / "logs" / "seed.log", listen=True)


async def until_it_listens(seed: Child) -> None:
    """Returns when the seed says so. Raises ``JobFailed`` where it does not; then it has ended."""
    assert seed.process.stdout is not None
    try:
        async with asyncio.timeout(SEED_READY_S):
            line = await seed.process.stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        await end_all([seed])
        raise seed.failed("the seed did not start")


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
