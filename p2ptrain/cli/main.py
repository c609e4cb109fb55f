"""The entry point: names the commands, and turns every failure into one line, its remedy, and an exit code.

Exit codes: 0 well, 1 anything else, 2 a wrong argument or profile, 3 the network, 4 a peer, 5 the job, 6 memory or
storage, 70 a mistake in this program, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar

import typer

import p2ptrain
from p2ptrain.cli.lazy import Entry, LazyGroup, new_typer
from p2ptrain.core.errors import P2PTrainError, UserError

DEBUG_VARIABLE = "P2PTRAIN_DEBUG"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_MISTAKE = 70  # EX_SOFTWARE of sysexits.h

_RUN, _WATCH, _USE = "Run a cluster", "Watch and control it", "Use it"


class Commands(LazyGroup):
    """Everything that the executable can do."""

    entries: ClassVar[tuple[Entry, ...]] = (
        Entry("up", "p2ptrain.cli.up:up", "Start a whole cluster on this machine and train.", _RUN),
        Entry("seed", "p2ptrain.cli.seed:seed", "Start a seed: the place where workers meet.", _RUN),
        Entry("join", "p2ptrain.cli.join:join", "Start a worker that joins a seed.", _RUN),
        Entry("tui", "p2ptrain.cli.tui:tui", "Watch a cluster full-screen.", _WATCH),
        Entry("peers", "p2ptrain.cli.peers:peers", "Who is there, and what each one does.", _WATCH),
        Entry("jobs", "p2ptrain.cli.jobs:app", "Create, show, pause, resume, save and cancel jobs.", _WATCH),
        Entry("checkpoints", "p2ptrain.cli.checkpoints:app", "List, restore and delete checkpoints.", _WATCH),
        Entry("check", "p2ptrain.cli.check:check", "Find out why this machine cannot join a seed.", _WATCH),
        Entry("generate", "p2ptrain.cli.generate:generate", "Write text with a checkpoint.", _USE),
        Entry(
            "profiles", "p2ptrain.cli.profiles:app", "List the profiles that ship; show every effective setting.", _USE
        ),
    )


app = new_typer(cls=Commands, invoke_without_command=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2ptrain {p2ptrain.__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A few ordinary machines, made one language-model trainer and server.

    \b
    Everything on this machine:   p2ptrain up
    On several machines:          p2ptrain seed           (on one)
                                  p2ptrain join HOST      (on each of the others)
                                  p2ptrain tui HOST       (to watch)
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code. Raises ``SystemExit``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a place that cannot show "→" shows "?" instead of failing
    try:
        code = app(args=None if args is None else list(args), prog_name="p2ptrain", standalone_mode=False)
    except KeyboardInterrupt:  # before Typer watches for it
        code = EXIT_INTERRUPTED
    except Exception as error:  # the last edge: a person sees a line, never a traceback
        if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
            raise
        code = _print_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _print_error(error: Exception) -> int:
    from p2ptrain.cli.output import printable

    known = _translated(error)
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(known.message), err=True)
    if known.remedy:
        typer.echo(f"  → {printable(known.remedy)}", err=True)
    return known.exit_code if known is error or isinstance(known, UserError) else EXIT_MISTAKE


def _translated(error: Exception) -> P2PTrainError:
    if isinstance(error, P2PTrainError):
        return error
    if isinstance(error, typer.Abort):  # a question that was answered with no
        return UserError("nothing was done")
    usage = getattr(
        error, "format_message", None
    )  # what Typer raises for wrong arguments, whichever parser it stands on
    if callable(usage):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "p2ptrain"
        return UserError(str(usage()).rstrip("."), remedy=f"`{path} --help` says what there is")
    return P2PTrainError(
        f"a mistake in this program: {type(error).__name__}: {error}",
        remedy=f"set {DEBUG_VARIABLE}=1 and run it again: the traceback that you then see belongs into a bug report",
    )
