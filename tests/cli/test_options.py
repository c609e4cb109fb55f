"""The whole tree of commands: an option's name means the same at every command."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer

from p2ptrain.cli.commands import app

FLAG = "a flag"
MEANINGS = {
    "--seed": "SEED",
    "--random-seed": "N",
    "--job": "JOB",
    "--profile": "NAME|PATH",
    "--workers": "N",
    "--json": FLAG,
    "--yes": FLAG,
    "--output": "FILE",
}
"""What must follow the most common options."""


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every command, with the command's name."""
    waiting: list[tuple[str, Any]] = [("p2ptrain", typer.main.get_command(app))]
    while waiting:
        path, command = waiting.pop()
        if hasattr(command, "list_commands"):
            waiting += [(f"{path} {name}", command.get_command(None, name)) for name in command.list_commands(None)]
        yield from ((path, option) for option in command.params if option.param_type_name == "option")


def test_an_option_has_one_meaning_and_a_short_name_one_option() -> None:
    found, full = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for path, option in options():
        name, *short = sorted(option.opts, key=len, reverse=True)
        assert option.hidden or option.help, f"{path} {name} has no help"
        assert option.hidden or option.is_flag or option.metavar, f"{path} {name} does not say what follows it"
        found[name].add(FLAG if option.is_flag else str(option.metavar).strip("[]"))
        for letter in short:
            full[letter].add(name)
    assert {name: kinds for name, kinds in found.items() if len(kinds) > 1} == {}
    assert {name: found[name] for name in MEANINGS} == {name: {kind} for name, kind in MEANINGS.items()}
    assert {letter: names for letter, names in full.items() if len(names) > 1} == {}
