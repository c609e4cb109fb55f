"""``p2ptrain profiles ...``: the profiles that ship, and where each effective setting comes from."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import JsonOption, SetOption

app = new_typer(help="List the profiles that ship; show every effective setting and where it comes from.")


@app.command("list")
def list_profiles(as_json: JsonOption = False) -> None:
    """Show the profiles that ship, and what each one is for.

    \b
    Example:
      p2ptrain profiles list
    """
    from configs.loader import describe, shipped

    found = [(name, describe(path), str(path)) for name, path in shipped().items()]
    if as_json:
        print_json({"profiles": [{"name": name, "description": text, "path": path} for name, text, path in found]})
    else:
        print_table(("NAME", "WHAT FOR"), [row[:2] for row in found])


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
