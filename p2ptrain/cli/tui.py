"""``p2ptrain tui``."""

from __future__ import annotations

from typing import Annotated

import typer

from p2ptrain.cli.runtime import DEFAULT_SEED, SEED_VARIABLE, at_terminal, seed_address
from p2ptrain.core.errors import UserError


def tui(
    address: Annotated[
        str, typer.Argument(envvar=SEED_VARIABLE, metavar="HOST[:PORT]", help="Address of the seed.")
    ] = DEFAULT_SEED,
) -> None:
    """Watch a cluster full-screen, and pause, resume, save or cancel its jobs. Leaving harms nothing.

    \b
    Examples:
      p2ptrain tui
      p2ptrain tui 192.168.1.20
    """
    if not at_terminal():
        raise UserError(
            "the full-screen view needs a terminal, and this is none",
            remedy="for scripts there are `p2ptrain jobs list --json` and `p2ptrain peers --json`",
        )
    from tui.app import run_tui
    from wire.transport import TcpNetwork

    host, port = seed_address(address)
    run_tui(network=TcpNetwork(), host=host, port=port)
