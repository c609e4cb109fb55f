"""Rings and chains in one process, over any network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.ring_member import HOST, LocalMember, local_view
from ring.chain import Chain
from ring.session import RingSession
from ring.view import View
from wire.emulate import EmulatedNetwork, LinkPreset


class RingMember(LocalMember):
    """A member of a test: it keeps the ring or the chain that it joined, and the ``problems`` of its listener."""

    def __init__(self, peer_id: str, network: Network, *, seed: int = 0) -> None:
        super().__init__(peer_id, network, seed=seed)
        self.problems: list[P2PTrainError] = []
        self.session: RingSession
        self.chain: Chain
        self._joined: list[RingSession | Chain] = []

    async def form(self, view: View, **settings: Any) -> RingSession:
        self.session = await super().form(view, **settings)
        self._joined.append(self.session)
        return self.session

    async def form_chain(self, view: View, **options: Any) -> Chain:
        self.chain = await super().form_chain(view, **options)
        self._joined.append(self.chain)
        return self.chain

    def on_problem(self, problem: P2PTrainError, address: object) -> None:
        self.problems.append(problem)

    def die(self) -> None:
        """Reset every connection without a message, as the kernel does for a killed process."""
        for member in self._joined:
            for neighbour in member.links.neighbours:
                neighbour.abort()

    async def stop(self) -> None:
        for member in self._joined:
            member.close()
            await member.links.wait_closed()
        if self.server is not None:
            await self.server.close()


def on_hosts(view: View) -> View:
    """The view of members that listen on hosts of their own names."""
    return replace(view, members=tuple(replace(member, host=member.peer_id) for member in view.members))


@asynccontextmanager
async def listening(
    names: str, network: Network | Sequence[Network], *, hosts: bool = False
) -> AsyncIterator[tuple[list[RingMember], View]]:
    """Members that listen, and a view of them; all ended with the block.

    Args:
        names: a letter for each.
        network: of all, or of each.
        hosts: each listens on a host of its own name.
    """
    networks = list(network) if isinstance(network, Sequence) else [network] * len(names)
    members = [RingMember(name, networks[rank], seed=rank) for rank, name in enumerate(names)]
    try:
        ports = {member.peer_id: await member.listen(member.peer_id if hosts else HOST) for member in members}
        yield members, on_hosts(local_view(ports)) if hosts else local_view(ports)
    finally:
        await asyncio.gather(*(member.stop() for member in members))


@asynccontextmanager
async def local_ring(count: int, network: Network, **options: Any) -> AsyncIterator[list[RingMember]]:
    """``count`` members a, b, c ... in one formed ring; ``options`` are of ``LocalMember.form``."""
    async with listening(ascii_lowercase[:count], network) as (members, view):
        await asyncio.gather(*(member.form(view, **options) for member in members))
        yield members


@asynccontextmanager
async def local_chain(
    count: int, network: Network | Sequence[Network], *, hosts: bool = False, **options: Any
) -> AsyncIterator[list[RingMember]]:
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
            return LinkPreset("hop", one_way_s[min(stage, ord(host) - ord("a"))])

        return EmulatedNetwork(inner.at(chr(ord("a") + stage)), link, seed=stage)

    return [seen_from(stage) for stage in range(len(one_way_s) + 1)]
