"""A command group that knows its commands by name, and imports one only when it is called.

``p2ptrain --help`` and every light command start in a fraction of a second, because they load nothing that they do
not need.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from p2ptrain.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Entry:
    """One command.

    Attributes:
        target: ``module:attribute`` of a function or a ``typer.Typer``.
        section: the heading of the help under which it stands.
    """

    name: str
    target: str
    help: str
    section: str

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        item: typer.Typer | Callable[..., None] = getattr(importlib.import_module(module), attribute)
        if not isinstance(item, typer.Typer):
            function, item = item, new_typer()
            item.command(self.name)(function)
        return typer.main.get_command(item)


class LazyGroup(TyperGroup):
    """The group over ``entries``, which a subclass names.

    ``Any`` stands for types of the parser: some versions of Typer bring their own, others use click's.
    """

    entries: ClassVar[tuple[Entry, ...]] = ()

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in self.entries]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return next((entry.load() for entry in self.entries if entry.name == cmd_name), None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise unknown_command(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for section in dict.fromkeys(entry.section for entry in self.entries):
            with formatter.section(section):
                formatter.write_dl([(entry.name, entry.help) for entry in self.entries if entry.section == section])


def unknown_command(name: str, names: Iterable[str], *, path: str = "p2ptrain") -> UserError:
    """The error for a command that does not exist, with the one that was probably meant."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UserError(f"no such command: {name}", remedy=f"{hint}`{path} --help` lists what there is")


def new_typer(**settings: Any) -> typer.Typer:
    """A ``Typer`` with this project's manners: plain help (Rich would double the start), errors left to ``main``."""
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, **settings)
