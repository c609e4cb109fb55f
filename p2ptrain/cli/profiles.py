"""``p2ptrain profiles ...``: the profiles that ship, and where each effective setting comes from."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import JsonOption, SetOption
from p2ptrain.core.plugins import installed

app = new_typer(help="List the profiles that ship; show every effective setting and where it comes from.")


@app.command("list")
def list_profiles(as_json: JsonOption = False) -> None:
    """Show the profiles that ship, what each one is for, and the plugins that this machine has.

    \b
    Example:
      p2ptrain profiles list
    """
    from configs.loader import describe, shipped

    found = [(name, describe(path), str(path)) for name, path in shipped().items()]
    plugins = {key: package for key, (_, package) in installed().items()}
    if as_json:
        shown = [{"name": name, "description": text, "path": path} for name, text, path in found]
        print_json({"profiles": shown, "plugins": plugins})
    else:
        print_table(("NAME", "WHAT FOR"), [row[:2] for row in found])
        typer.echo("plugins: " + (", ".join(f"{key} ({package})" for key, package in plugins.items()) or "none"))


@app.command()
def show(
    profile: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A profile that ships, or a TOML file.")],
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    as_json: JsonOption = False,
) -> None:
    """Show every effective setting, and where its value comes from.

    \b
    Examples:
      p2ptrain profiles show tiny
      p2ptrain profiles show ./mine.toml --set optimizer.lr=1e-3
    """
    from configs.loader import load

    loaded = load(profile, os.environ, sets)
    values = {key: loaded.profile.value(key) for key in loaded.sources}
    if as_json:
        print_json({"profile": loaded.profile.model_dump(mode="json"), "sources": loaded.sources})
    else:
        rows = [(key, json.dumps(value, ensure_ascii=False), loaded.sources[key]) for key, value in values.items()]
        print_table(("SETTING", "VALUE", "FROM"), rows, cut=("VALUE", "FROM"))
