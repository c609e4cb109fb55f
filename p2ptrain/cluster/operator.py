"""Connections of an operator to a seed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cluster.running import default_state_dir

if TYPE_CHECKING:
    from p2ptrain.cluster.access import Access
    from wire.client import SeedClient

CONNECT_TIMEOUT_S = 5.0


async def connect_operator(access: Access, others: Sequence[tuple[str, int]] = ()) -> SeedClient:
    """Dial the seed; if it is unreachable, dial the others. Raises the first error of ``SeedClient.connect``."""
    from p2ptrain.core.errors import NetworkError, P2PTrainError
    from wire.client import SeedClient

    problem: P2PTrainError | None = None
    for place in dict.fromkeys([(access.host, access.port), *others]):
        try:
            return await SeedClient.connect(
                access.network, *place, name=operator_name(), peer_id=access.peer_id, timeout_s=CONNECT_TIMEOUT_S
            )
        except NetworkError as error:
            problem = problem or error
    assert problem is not None
    raise problem


async def open_operator(
    seed: str | tuple[str, int], *, state: Path | None = None, afresh: bool = False
) -> tuple[Access, SeedClient]:
    """Reach and dial the seed. If it no longer honours the stored credentials, spend a new ticket.

    Args:
        seed: an address, or what the user gave.
        state: state directory of this operator, and of a seed on this machine; default: the usual place.
        afresh: as in ``access.reach``.

    Raises:
        UserError: it is no address and no ticket, or a ticket is needed; else as ``access.reach`` and
            ``connect_operator``.
    """
    from p2ptrain.cluster.access import MENDED_BY_A_TICKET, Caller, place_of, reach_one, read_targets
    from p2ptrain.core.errors import Refused
    from wire.transport import TcpNetwork

    root = state or default_state_dir()
    targets = read_targets(seed) if isinstance(seed, str) else [seed]
    access = await reach_one(targets, Caller("operator", root / "operator", [root]), TcpNetwork(), afresh=afresh)
    try:
        return access, await connect_operator(access, [place_of(target) for target in targets])
    except Refused as refusal:
        if afresh or access.member is None or refusal.code not in MENDED_BY_A_TICKET:
            raise
    return await open_operator(seed, state=state, afresh=True)


@asynccontextmanager
async def operator(seed: str | tuple[str, int], *, state: Path | None = None) -> AsyncIterator[SeedClient]:
    """An operator's connection to the seed; the end of the block closes it. Within the block the operator's certificate
    is renewed in time."""
    access, client = await open_operator(seed, state=state)
    renewing = asyncio.create_task(_keep_fresh(access, client), name="renew")
    try:
        await access.freshen(client.request)
        yield client
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        await client.close()


async def _keep_fresh(access: Access, client: SeedClient) -> None:
    from p2ptrain.core.errors import P2PTrainError

    try:
        await access.keep_fresh(client.request)
    except P2PTrainError as problem:  # the next connection tries again
        client.connection.abort(problem)


def operator_name() -> str:
    """The name that this command line sends to peers."""
    return f"cli@{socket.gethostname()}"
