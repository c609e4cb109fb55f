"""What a long-running command says at its terminal: one line an event, and progress that does not scroll away.

It goes on, and leaves in order, when nobody reads that any more: ``tee`` ends by the same Ctrl+C, a terminal is closed.

On a terminal the progress is one line that is drawn over; elsewhere it is plain lines, one a second at most.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

import typer

from p2ptrain.cli.output import printable

PLAIN_EVERY_S = 1.0
DRAWN_EVERY_S = 0.1
_COLOURS = {"warning": "yellow", "error": "red"}
_MARKS = {"info": "·", "warning": "!", "error": "✗"}


class Console:
    """Writes to standard error, so that standard output stays free for results.

    Args:
        now: seconds, for the pace of progress.
        quiet: progress is not shown, for the sake of programs.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._now = now
        self._live = sys.stderr.isatty()
        self._drawn = 0
        self._next = 0.0

    def event(self, level: str, text: str) -> None:
        """One line with the time; its mark and colour tell the level."""
        self.clear()
        mark = typer.style(_MARKS.get(level, "·"), fg=_COLOURS.get(level, "cyan"), bold=level != "info")
        self._say(f"{time.strftime('%H:%M:%S')} {mark} {printable(text)}")

    def progress(self, text: str, *, last: bool = False) -> None:
        """How far it is. Dropped where the one before is too fresh, except the ``last``."""
        now = self._now()
        if self._quiet or (now < self._next and not last):
            return
        self._next = now + (DRAWN_EVERY_S if self._live else PLAIN_EVERY_S)
        if not self._live:
            self._say(text)
            return
        self._draw("\r" + text.ljust(self._drawn)[: max(len(text), self._drawn)])
        self._drawn = len(text)
        if last:
            self.finish()

    def finish(self) -> None:
        """End the drawn line, so that what follows begins on a line of its own."""
        if self._drawn:
            self._draw("\n")
            self._drawn = 0

    def clear(self) -> None:
        """Take the drawn line away: it is of no use once it is over."""
        if self._drawn:
            self._draw("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def _say(self, text: str) -> None:
        with suppress(OSError):
            typer.echo(text, err=True)

    def _draw(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def step_line(applied: int, total: int, values: dict[str, float]) -> str:
    """One line about a step: how far, how well, how fast, and where the time goes."""
    parts = [f"step {applied:>{len(str(total))}}/{total}"]
    if (loss := values.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (val_loss := values.get("val_loss")) is not None:
        parts.append(f"validation {val_loss:.4f}")
    if (rate := values.get("tokens_per_s")) is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if step_ms := values.get("step_ms"):
        shares = (
            f"{name} {100 * values.get(key, 0.0) / step_ms:.0f} %"
            for name, key in (("compute", "compute_ms"), ("send", "communicate_ms"), ("wait", "wait_ms"))
        )
        parts.append(f"{step_ms:.0f} ms ({', '.join(shares)})")
    if members := values.get("members"):
        parts.append(f"{members:.0f} member{'s' if members != 1 else ''}")
    return "  ".join(parts)
