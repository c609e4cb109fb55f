"""The entry point: runs one command, and turns every failure into one line, its remedy, and an exit code.

Exit codes: 0 well, 1 anything else, 2 a wrong argument or profile, 3 the network, 4 a peer, 5 the job, 6 memory or
storage, 70 a mistake in this program, 130 interrupted.

Only the standard library is loaded with this module: Ctrl+C while the rest loads shall end the process without a word.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from p2ptrain.core.errors import EXIT_INTERRUPTED, P2PTrainError, StorageError, UserError

DEBUG_VARIABLE = "P2PTRAIN_DEBUG"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code. Raises ``SystemExit``."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a place that cannot show "→" shows "?" instead of failing
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # in the C locales bytes that are no text would come as half letters
    try:
        from p2ptrain.cli.commands import app
        from p2ptrain.cli.output import json_output

        json_output.begin(sys.argv[1:] if args is None else args)
        code = app(args=None if args is None else list(args), prog_name="p2ptrain", standalone_mode=False)
    except KeyboardInterrupt:  # before Typer watches for it
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last edge: a person sees a line, never a traceback
        code = told(error)
    code = code if isinstance(code, int) else 0
    if args is None and "torch" in sys.modules:
        # A kernel may still run. The interpreter's own shutdown would wait for it, and takes seconds without one.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # who reads may have left
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _open_missing_streams() -> None:
    """Put the null device where the caller closed standard input, output or error (``>&-``, some supervisors).

    Else the next socket or file takes that number, and what is meant for a person is written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def told(error: Exception) -> int:
    """Tell a person, and a program that wants JSON, what happened and what to do; the exit code. In debugging it is
    raised again."""
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        raise error
    import typer

    from p2ptrain.cli.output import failure, json_output, print_json, printable

    known = _translated(error)
    # EX_SOFTWARE of sysexits.h
    code = known.exit_code if known is error or isinstance(known, UserError | StorageError) else 70
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(known.message), err=True)
    if known.remedy:
        typer.echo(f"  → {printable(known.remedy)}", err=True)
    if json_output.wanted_of(error) and not json_output.written:
        with suppress(OSError):  # it may be that very output that failed
            print_json({"error": failure(known) | {"exit_code": code}})
    return code


def _translated(error: Exception) -> P2PTrainError:
    if isinstance(error, P2PTrainError):
        return error
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
        return StorageError(f"cannot write the output: {_FULL[error.errno]}", remedy="make room, or write it elsewhere")
    import typer

    if isinstance(error, typer.Abort):  # a question that was answered with no
        return UserError("nothing was done")
    # What Typer raises for wrong arguments, whichever parser it stands on.
    usage = getattr(error, "format_message", None)
    if callable(usage):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "p2ptrain"
        from wire.address import without_secrets  # a ticket that a terminal broke in two is a wrong argument

        return UserError(without_secrets(str(usage())).rstrip("."), remedy=f"`{path} --help` says what there is")
    return P2PTrainError(
        f"a mistake in this program: {type(error).__name__}: {error}",
        remedy=f"set {DEBUG_VARIABLE}=1 and run it again: the traceback that you then see belongs into a bug report",
    )
