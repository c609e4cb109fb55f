"""A process at a real terminal (a pseudo-terminal): typed to, and read."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

DEADLINE_S = 60.0


class Terminal:
    """A process whose standard streams are one terminal.

    Args:
        program: what Python runs with ``arguments``.
        network: name of the network namespace that it lives in; empty: this one.
    """

    def __init__(
        self, *arguments: str, program: tuple[str, ...] = ("-m", "p2ptrain"), network: str = "", **environment: str
    ) -> None:
        self.here, there = pty.openpty()
        self.process = subprocess.Popen(
            [*(["ip", "netns", "exec", network] if network else []), sys.executable, *program, *arguments],
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env=os.environ | {"TERM": "dumb"} | environment,
        )
        os.close(there)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.here, text.encode())

    def until(self, pattern: str) -> None:
        """Read until what came since the last match matches."""
        ends = time.monotonic() + DEADLINE_S
        while not (match := re.search(pattern, self.text, re.DOTALL)):
            ready, _, _ = select.select([self.here], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"no {pattern!r} in:\n{self.text[-2000:]}"
            try:
                self.text += os.read(self.here, 65536).decode(errors="replace")
            except OSError as error:  # Linux: the other end is closed
                raise AssertionError(f"it ended without {pattern!r}:\n{self.text[-2000:]}") from error
        self.text = self.text[match.end() :]

    def left(self) -> tuple[int, float]:
        """Exit code, and the seconds that it took."""
        began = time.monotonic()
        return self.process.wait(DEADLINE_S), time.monotonic() - began

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.here)


def _own_terminal() -> None:
    """Make the terminal that of the new session, so that Ctrl+C typed there is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
