"""Rings and chains in one process, over any network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from string import ascii_lowercase
from typing import Any

from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.ring_member import HOST, LocalMember, local_view
from ring.view import View
from wire.emulate import EmulatedNetwork, LinkPreset


@asynccontextmanager
async def listening(
    names: str, network: Network | Sequence[Network], *, hosts: bool = False
) -> AsyncIterator[tuple[list[LocalMember], View]]:
    """Members that listen, and a view of them; all ended with the block.

    Args:
        names: a letter for each.
        network: of all, or of each.
        hosts: each listens on a host of its own name.
    """
    networks = list(network) if isinstance(network, Sequence) else [network] * len(names)
    members = [LocalMember(name, networks[rank], seed=rank) for rank, name in enumerate(names)]
    try:
        ports = {member.peer_id: await member.listen(member.peer_id if hosts else HOST) for member in members}
        yield members, local_view(ports, hosts=hosts)
    finally:
        await asyncio.gather(*(member.stop() for member in members))


@asynccontextmanager
async def local_ring(count: int, network: Network, **options: Any) -> AsyncIterator[list[LocalMember]]:
    """``count`` members a, b, c ... in one formed ring; ``options`` are of ``LocalMember.form``."""
    async with listening(ascii_lowercase[:count], network) as (members, view):
        await asyncio.gather(*(member.form(view, **options) for member in members))
        yield members


@asynccontextmanager
async def local_chain(
    count: int, network: Network | Sequence[Network], *, hosts: bool = False, **options: Any
) -> AsyncIterator[list[LocalMember]]:
    """``count`` stages a, b, c ... in one formed chain; ``options`` are of ``LocalMember.form_chain``."""
    async with listening(ascii_lowercase[:count], network, hosts=hosts) as (members, view):
        sizes = {"activation_bytes": 64, "gradient_bytes": 64}
        await asyncio.gather(*(member.form_chain(view, **{**sizes, **options}) for member in members))
        yield members


def networks_apart(one_way_s: Sequence[float]) -> list[Network]:
    """A network in memory as each of the stages a, b, c ... sees it, on a host of its name: the hop after stage s takes
    ``one_way_s[s]`` in each direction.
    """
    inner = MemoryNetwork()

    def seen_from(stage: int) -> Network:
        def link(host: str, port: int) -> LinkPreset:
            return LinkPreset("hop", 1e3 * one_way_s[min(stage, ord(host) - ord("a"))])

        return EmulatedNetwork(inner.at(chr(ord("a") + stage)), link, seed=stage)

    return [seen_from(stage) for stage in range(len(one_way_s) + 1)]
