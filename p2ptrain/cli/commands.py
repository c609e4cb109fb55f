"""The names of all commands, and what ``p2ptrain`` says of itself."""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

import p2ptrain
from p2ptrain.cli.lazy import Entry, LazyGroup, new_typer

_RUN, _WATCH, _USE = "Run a cluster", "Watch and control it", "Use it"


class Commands(LazyGroup):
    """Everything that the executable can do."""

    entries: ClassVar[tuple[Entry, ...]] = (
        Entry("up", "p2ptrain.cli.up:up", "Start a whole cluster on this machine and train.", _RUN),
        Entry("seed", "p2ptrain.cli.seed:seed", "Start a seed: the place where workers meet.", _RUN),
        Entry("join", "p2ptrain.cli.join:app", "Join a seed: as a worker, or to write text.", _RUN),
        Entry("tui", "p2ptrain.cli.tui:tui", "Watch a cluster full-screen.", _WATCH),
        Entry("peers", "p2ptrain.cli.peers:app", "Who is there, and what each one does; evict one.", _WATCH),
        Entry("parts", "p2ptrain.cli.parts:parts", "Who holds which layers of which split models.", _WATCH),
        Entry("ticket", "p2ptrain.cli.ticket:app", "Make, list, revoke and replace tickets.", _WATCH),
        Entry("jobs", "p2ptrain.cli.jobs:app", "Create, show, pause, resume, save and cancel jobs.", _WATCH),
        Entry("checkpoints", "p2ptrain.cli.checkpoints:app", "List, restore and delete checkpoints.", _WATCH),
        Entry(
            "bench", "p2ptrain.cli.bench.commands:app", "Measure this machine, beside what there is to beat.", _WATCH
        ),
        Entry("chaos", "p2ptrain.cli.chaos:chaos", "Hurt a local cluster, and see whether it holds.", _WATCH),
        Entry("sim", "p2ptrain.cli.sim:sim", "Simulate whole clusters under faults; check what must hold.", _WATCH),
        Entry("check", "p2ptrain.cli.check:check", "Find out why this machine cannot join a seed.", _WATCH),
        Entry("generate", "p2ptrain.cli.generate:app", "Write text with a checkpoint.", _USE),
        Entry("chat", "p2ptrain.cli.chat:app", "Talk with a checkpoint.", _USE),
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
    """A few ordinary machines, made one language-model trainer.

    \b
    Everything on this machine:   p2ptrain up
    On several machines:          p2ptrain seed --host 0.0.0.0   (on one: it prints a ticket)
                                  p2ptrain join TICKET           (on each of the others)
                                  p2ptrain tui                   (on the first, to watch)
    When something is wrong:      p2ptrain check TICKET

    \b
    Exit codes: 0 well, 2 a wrong argument or profile, 3 the network, 4 a peer said no,
    5 the job, 6 memory or storage, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
