"""The entry point: runs one command, and turns every failure into one line, its remedy, and an exit code
(``commands.root`` lists them).

This module loads only the standard library, so that Ctrl+C during later imports ends the process quietly.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from p2ptrain.core.errors import EXIT_INTERRUPTED, P2PTrainError, StorageError, UserError

DEBUG_VARIABLE = "P2PTRAIN_DEBUG"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code. Raises ``SystemExit``."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print "?" if the output cannot encode "→"
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # C locales would decode invalid bytes to surrogates
    if "_P2PTRAIN_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "9999"  # a shell would take each line of a folded help for a candidate
    try:
        from p2ptrain.cli.commands import app
        from p2ptrain.cli.output import json_output

        json_output.begin(sys.argv[1:] if args is None else args)
        code = app(args=None if args is None else list(args), prog_name="p2ptrain", standalone_mode=False)
    except KeyboardInterrupt:  # before Typer handles it
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost handler: users see a line, no traceback
        code = print_failure(error)
    code = code if isinstance(code, int) else 0
    if args is not None:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            continue  # the reader has enough
        except OSError as error:
            code = code or print_failure(error)
    os._exit(code)  # a normal shutdown waits for kernels of torch that still run, and takes seconds even without one


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that the caller closed (``>&-``, some supervisors).

    Otherwise the next socket or file gets that descriptor, and messages for the user are written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def print_failure(error: Exception) -> int:
    """Report the error to the user and, if requested, as JSON; return the exit code. In debug mode, raise it again."""
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        raise error
    import typer

    from p2ptrain.cli.output import failure, json_output, print_error, print_json

    if isinstance(error, typer.Abort):  # Ctrl+C at a question
        return EXIT_INTERRUPTED
    known = _translate_error(error)
    # EX_SOFTWARE of sysexits.h
    code = known.exit_code if known is error or isinstance(known, UserError | StorageError) else 70
    print_error(known)
    if json_output.wanted and not json_output.written:
        with suppress(OSError):  # standard output may be what failed
            print_json({"error": failure(known) | {"exit_code": code}})
    return code


def _translate_error(error: Exception) -> P2PTrainError:
    if isinstance(error, P2PTrainError):
        return error
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
        return StorageError(f"cannot write the output: {_FULL[error.errno]}", remedy="make room, or write it elsewhere")
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return StorageError(f"cannot use {error.filename}: {error.strerror}", remedy="check the path")
    if hasattr(error, "format_message"):
        return _usage_error(error)
    return P2PTrainError(
        f"a mistake in this program: {type(error).__name__}: {error}",
        remedy=f"set {DEBUG_VARIABLE}=1 and run it again: the traceback that you then see belongs into a bug report",
    )


def _usage_error(error: Any) -> UserError:
    """Translate an error of Typer's parser or of click; the version of Typer decides which."""
    from p2ptrain.cli.commands import no_such
    from wire.address import without_secrets  # the wrong argument may be half of a ticket

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _name_typed_command()
    message, option, param = str(error.message), getattr(error, "option_name", ""), getattr(error, "param", None)
    options = [name for each in context.command.params for name in each.opts] if context is not None else []
    if option == "--state" and "--seed" in options:
        return UserError("no such option: --state", remedy=f"`{path} --seed @DIR` asks the seed whose --state is DIR")
    if hasattr(error, "possibilities"):
        return no_such("option", without_secrets(option), error.possibilities or (), path)
    if option:
        message = f"{option} takes no value" if "not take" in message else f"{option} needs a value"
    elif param is not None:
        name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name
        message = f"{name}: {_describe_complaint(error)}" if message else f"{name} is missing"
    else:
        message = message.replace("Got unexpected extra argument(s)", "too many arguments:")
    return UserError(without_secrets(message).rstrip("."), remedy=f"`{path} --help` shows what it takes")


def _describe_complaint(error: Any) -> str:
    if not hasattr(error.__cause__, "errors"):
        return str(error.message)
    from configs.loader import complaint

    (details, *_) = error.__cause__.errors()  # of pydantic, with which Typer converts values
    return f"{details['input']} {complaint(details)}"


def _name_typed_command() -> str:
    from p2ptrain.cli.commands import Commands
    from p2ptrain.cli.output import json_output

    first, second = [*json_output.typed, "", ""][:2]
    group = next((entry.load() for entry in Commands.entries if entry.name == first), None)
    known = [first] * (group is not None) + [second] * (second in getattr(group, "commands", ()))
    return " ".join(["p2ptrain", *known])
