"""``p2ptrain tui``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from p2ptrain.cli.runtime import DEFAULT_SEED, SEED_HELP, SEED_VARIABLE, at_terminal, operator
from p2ptrain.core.errors import UserError


def tui(
    seed: Annotated[str, typer.Argument(envvar=SEED_VARIABLE, metavar="[SEED]", help=SEED_HELP)] = DEFAULT_SEED,
) -> None:
    """Watch a cluster full-screen, and pause, resume, save or cancel its jobs. Leaving the view stops nothing.

    \b
    Examples:
      p2ptrain tui
      p2ptrain tui 192.168.1.20:7337/EJd0…
      p2ptrain tui --state ./run
    """
    if not at_terminal():
        raise UserError(
            "the full-screen view needs a terminal, and there is no terminal here",
            remedy="for scripts there are `p2ptrain jobs list --json` and `p2ptrain peers list --json`",
        )
    from p2ptrain.cli.access import read_target, shown_address
    from tui.app import run_tui

    run_tui(partial(operator, seed), shown_address(read_target(seed)))
