"""The output of commands: tables for people, one JSON document for programs, and no control characters.

With ``--json`` standard output is one JSON document, even if the command fails. If it fails before it wrote one, the
document is ``{"error": {"message", "remedy", "exit_code"}}``, with the ``code`` of a refusal. A document of partial
results also has that ``error``. Messages for people still go to standard error. Only an interrupted command may end
without a document.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from p2ptrain.core.texts import human_bytes

if TYPE_CHECKING:
    from p2ptrain.core.errors import P2PTrainError
    from wire.client import SeedClient

SHORT_S, PLAIN_S = 1.0, 10.0
"""Work that takes less shows no progress; seconds between its lines where they are not rewritten."""
CUT_CELLS = 12
"""Least width of a column whose texts are shortened."""


@dataclass
class JsonOutput:
    """State of this process. ``typed``: its arguments; ``written``: a document is printed."""

    typed: Sequence[str] = ()
    written: bool = False

    def begin(self, typed: Sequence[str]) -> None:
        self.typed, self.written = typed, False

    @property
    def wanted(self) -> bool:
        """Whether a document is requested. It reads the typed words, because parsing them may be what failed."""
        return "--json" in itertools.takewhile(lambda word: word != "--", self.typed)


json_output = JsonOutput()


def failure(error: P2PTrainError) -> dict[str, Any]:
    """The ``error`` field of a document."""
    from p2ptrain.core.errors import Refused

    said = {"message": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    return said | ({"code": error.code} if isinstance(error, Refused) else {})


def print_error(error: P2PTrainError) -> None:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(error.message), err=True)
    if error.remedy:
        typer.echo(f"  → {printable(error.remedy)}", err=True)


def printable(text: str) -> str:
    """``text`` without control characters, because names and messages come from other machines."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def print_json(document: object) -> None:
    json_output.written = True
    # Line by line: without buffering, a signal (such as the end of a child) may cut a long write short.
    for line in json.dumps(document, indent=2, ensure_ascii=True).splitlines():
        typer.echo(line)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    less: Sequence[str] = (),
    cut: Collection[str] = (),
) -> None:
    """Print a table with a header line. A file or a pipe gets all of it.

    Args:
        right: columns that are right-aligned.
        less: columns that a narrow terminal leaves out, the least important first.
        cut: columns whose texts it shortens, paths at the front.
    """
    from rich.cells import cell_len

    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = {name: max(cell_len(row[number]) for row in cells) for number, name in enumerate(columns)}
    if sys.stdout.isatty():
        _narrow(widths, shutil.get_terminal_size().columns, less, cut)
    for row in cells:
        line = "  ".join(
            _padded(_shortened(cell, widths[name]), widths[name], is_right=name in right)
            for name, cell in zip(columns, row, strict=True)
            if name in widths
        )
        typer.echo(typer.style(line.rstrip(), bold=True) if row is cells[0] else line.rstrip())


def _narrow(widths: dict[str, int], room: int, less: Sequence[str], cut: Collection[str]) -> None:
    """Leave out columns, then shorten those of ``cut``, until a line has at most ``room`` cells."""
    whole = dict(widths)
    widths.update({name: min(width, CUT_CELLS) for name, width in widths.items() if name in cut})

    def left() -> int:
        return room - sum(widths.values()) - 2 * (len(widths) - 1)

    for name in less:
        if left() >= 0:
            break
        widths.pop(name, None)
    for name in cut:
        if name in widths:
            widths[name] = min(whole[name], widths[name] + max(left(), 0))


def _shortened(text: str, width: int) -> str:
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    is_path = "/" in text
    while cell_len(text) >= width:
        text = text[1:] if is_path else text[:-1]
    return f"…{text}" if is_path else f"{text}…"


def _padded(text: str, width: int, *, is_right: bool) -> str:
    from rich.cells import cell_len

    space = " " * (width - cell_len(text))
    return space + text if is_right else text + space


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        typer.echo(f"{name:<{width}}  {printable(value)}")


def human_seconds(seconds: float) -> str:
    """A duration in its two largest units: ``2 h 5 min``."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def human_time(wall: float) -> str:
    """A time in this machine's zone. ``wall`` is Unix seconds from another machine, so it may be any number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
    except (ValueError, OverflowError, OSError):
        return "?"


def number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def confirm(question: str, seed: str = "", group: str = "", name: str = "", *, yes: bool) -> None:
    """Ask before an action that cannot be undone. Raises ``UserError`` without the object, a yes, or a terminal."""
    from p2ptrain.cli.runtime import ask
    from p2ptrain.core.errors import UserError

    async def is_listed(client: SeedClient) -> bool:
        found = await getattr(client, "tickets" if group == "ticket" else group)()
        return any(item.id.startswith(name) or getattr(item, "name", "") == name for item in found)

    if not yes and name and not re.fullmatch("[0-9a-f]{12}", name) and not ask(seed, is_listed):
        raise UserError(f"there is no {group.removesuffix('s')} {name}", remedy=f"see p2ptrain {group} list")
    if not yes and not sys.stdin.isatty():
        text = f"there is no terminal to ask: {printable(question)}"
        raise UserError(text, remedy="add --yes to do it without a question")
    if not yes and not typer.confirm(printable(question), err=True):
        raise UserError("nothing was done")


# ------------------------------------------------------------------------------------------------ long-running commands


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

    def event(self, level: str, text: str) -> None:
        """Print one line with the time; its mark and colour show the level."""
        self.clear()
        self._say(f"{time.strftime('%H:%M:%S')} {self.mark(level)} {printable(text)}")

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
            self._say(text)
            return
        text = text[: shutil.get_terminal_size().columns - 1]  # a folded line cannot be rewritten
        self._draw("\r" + text.ljust(self._drawn)[: max(len(text), self._drawn)])
        self._drawn = len(text)
        if last:
            self.finish()

    def loading(self, done_bytes: int, total_bytes: int, more: str = "", *, last: bool = False) -> None:
        """Show how much of a model is loaded. Where lines are not rewritten, a second must have passed before."""
        self._loading_s = self._now() if self._loading_s is None else self._loading_s
        if self._live or self._now() - self._loading_s > SHORT_S:
            self.progress(f"loading  {human_bytes(done_bytes)} of {human_bytes(total_bytes)}{more}", last=last)

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

    def _say(self, text: str) -> None:
        with suppress(OSError):
            typer.echo(text, err=True)

    def _draw(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def step_line(applied: int, total: int, values: dict[str, float]) -> str:
    """One line about a step: number, losses, speed, and where the time goes."""
    parts = [f"step {applied:>{len(str(total))}}/{total}"]
    if (loss := values.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (val_loss := values.get("val_loss")) is not None:
        parts.append(f"validation {val_loss:.4f}")
    if (epsilon := values.get("epsilon")) is not None:
        parts.append(f"epsilon {epsilon:.2f}")
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
