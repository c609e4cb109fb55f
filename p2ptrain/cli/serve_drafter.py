"""What a drafter does: see ``p2ptrain.cli.joining`` for when this is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2ptrain.core.errors import UserError

if TYPE_CHECKING:
    from p2ptrain.cli.console import Console
    from p2ptrain.cli.joining import ServeWish
    from roles.member import ServingMember


async def serve(member: ServingMember, wish: ServeWish, console: Console) -> None:
    """Serve until cancelled. Raises ``P2PTrainError``."""
    raise UserError("this release has no drafter yet", remedy="wait for the next one")
