"""The output of commands: tables for people, one JSON document for programs, and no control characters.

With ``--json`` standard output is one JSON document, even if the command fails. If it fails before it wrote one, the
document is ``{"error": {"message", "remedy", "exit_code"}}``, with the ``code`` of a refusal. A document of partial
results also has that ``error``. Messages for people still go to standard error. Only an interrupted command may end
without a document.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.texts import printable

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
    fields = {"message": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    return fields | ({"code": error.code} if isinstance(error, Refused) else {})


def print_error(error: P2PTrainError) -> None:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(error.message), err=True)
    if error.remedy:
        typer.echo(f"  → {printable(error.remedy)}", err=True)


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
            _fit(cell, widths[name], is_right=name in right)
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


def _fit(text: str, width: int, *, is_right: bool) -> str:
    """The text in so many cells; what does not fit gives way to a mark, of a path at the front."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > width and "/" in text:
        while cell_len(text) >= width:
            text = text[1:]
        text = f"…{text}"
    elif cell_len(text) > width:
        text = set_cell_size(text, width - 1) + "…"
    space = " " * (width - cell_len(text))
    return space + text if is_right else text + space


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        typer.echo(f"{name:<{width}}  {printable(value)}")


def number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
