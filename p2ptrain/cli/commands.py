"""The list of all commands, and the top-level help.

A command's module is imported only when the command is called, so that ``p2ptrain --help`` and light commands start in
a fraction of a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

import p2ptrain
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import did_you_mean


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One command under the heading ``section``. ``target``: ``module:attribute`` here, of a function or a Typer."""

    name: str
    target: str
    help: str
    section: str

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        item: typer.Typer | Callable[..., None] = getattr(importlib.import_module(f"p2ptrain.cli.{module}"), attribute)
        if not isinstance(item, typer.Typer):
            function, item = item, new_typer()
            item.command(self.name)(function)
        return typer.main.get_command(item)


class Group(TyperGroup):
    """A command group that shows its help when it is called alone.

    ``Any`` stands for parser types: some versions of Typer have their own, others use click's.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names and not ctx.resilient_parsing:
            raise no_such("command", args[0], names, ctx.command_path)
        return super().resolve_command(ctx, args)


def no_such(kind: str, name: str, names: Iterable[str], path: str) -> UserError:
    """The error for an unknown command or option. ``names``: those that there are."""
    return UserError(f"no such {kind}: {name}", remedy=f"{did_you_mean(name, names)}`{path} --help` lists the {kind}s")


def new_typer(**settings: Any) -> typer.Typer:
    """A ``Typer`` with plain help (Rich would double the start-up time). ``main`` handles its errors."""
    fixed: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
    return typer.Typer(**fixed, **{"cls": Group, "add_completion": False, **settings})


_RUN, _WATCH, _USE = "Run a cluster", "Watch and control it", "Use it"


class Commands(Group):
    """The root of all commands."""

    entries: ClassVar[tuple[CommandEntry, ...]] = (
        CommandEntry("up", "up:up", "Start a whole cluster on this machine and train.", _RUN),
        CommandEntry("seed", "seed:seed", "Start a seed: the place where workers meet.", _RUN),
        CommandEntry("join", "join:app", "Join a seed: as a worker, or to write text.", _RUN),
        CommandEntry("tui", "status:tui", "Watch a cluster full-screen.", _WATCH),
        CommandEntry("status", "status:status", "Show the cluster on one screen.", _WATCH),
        CommandEntry("logs", "status:logs", "Show the newest events, and logs of peers.", _WATCH),
        CommandEntry("peers", "peers:app", "Show peers and what each one does; evict a peer.", _WATCH),
        CommandEntry("parts", "peers:parts", "Show the layers that each peer holds of split models.", _WATCH),
        CommandEntry("ticket", "ticket:app", "Make, list, revoke and replace tickets.", _WATCH),
        CommandEntry("jobs", "jobs:app", "Create, show, watch, pause, resume, save and cancel jobs.", _WATCH),
        CommandEntry("checkpoints", "checkpoints:app", "List, restore and delete checkpoints.", _WATCH),
        CommandEntry("explain", "explain:explain", "Predict the cost of a step; recommend a strategy.", _WATCH),
        CommandEntry("bench", "bench:app", "Measure this machine, and compare it with rivals.", _WATCH),
        CommandEntry("experiment", "experiment:app", "Train a grid of settings; compare the results.", _WATCH),
        CommandEntry("chaos", "chaos:chaos", "Inject faults into a local cluster; check recovery.", _WATCH),
        CommandEntry("sim", "sim:sim", "Simulate whole clusters under faults; check what must hold.", _WATCH),
        CommandEntry("check", "check:check", "Find out why this machine cannot join a seed.", _WATCH),
        CommandEntry("generate", "generate:app", "Write text with a checkpoint.", _USE),
        CommandEntry("chat", "chat:app", "Talk with a checkpoint.", _USE),
        CommandEntry("agent", "agent:app", "Start a coding agent that a model of the cluster answers.", _USE),
        CommandEntry("evaluate", "evaluate:app", "Measure how well a checkpoint predicts a text.", _USE),
        CommandEntry("tokenizer", "tokenizer:app", "Make a tokenizer of your own text.", _USE),
        CommandEntry("data", "data:app", "Show what a text holds for training; remove kept tokens.", _USE),
        CommandEntry("profiles", "profiles:app", "List the profiles that ship; show every effective setting.", _USE),
    )

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in self.entries]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return next((entry.load() for entry in self.entries if entry.name == cmd_name), None)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        near = (entry for entry in self.entries if entry.name.startswith(incomplete))
        return [SimpleNamespace(value=entry.name, help=entry.help, type="plain") for entry in near]  # loads no command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for section in dict.fromkeys(entry.section for entry in self.entries):
            with formatter.section(section):
                formatter.write_dl([(entry.name, entry.help) for entry in self.entries if entry.section == section])


app = new_typer(cls=Commands, add_completion=True, context_settings={"help_option_names": ["-h", "--help"]})


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2ptrain {p2ptrain.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train and serve language models on a few machines, as if they were one.

    \b
    Everything on this machine:   p2ptrain up
    On several machines:          p2ptrain seed --host 0.0.0.0   (on one)
                                  p2ptrain join                  (on each of the others: asks for a code)
                                  p2ptrain ticket code           (on the first, shows one; p2ptrain tui watches)
    When something is wrong:      p2ptrain check TICKET

    \b
    Exit codes: 0 success, 1 another failure, 2 a wrong argument (also an unknown profile, job, peer,
    checkpoint or ticket), 3 the network, 4 a peer, 5 the job, 6 memory or storage,
    70 a bug in this program, 130 interrupted.
    """
