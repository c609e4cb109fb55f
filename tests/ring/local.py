"""Rings and chains in one process, over any network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

from p2ptrain.core.world import Network
from ring.chain import Chain
from ring.local import HOST, LocalMember, local_view
from ring.session import RingSession
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.memory import MemoryNetwork, run_virtual


@asynccontextmanager
async def local_ring(
    count: int,
    network: Network,
    *,
    heartbeat_s: float = 5.0,
    death_s: float = 15.0,
    sub_chunk_bytes: int = 64,
    streams: int = 1,
) -> AsyncIterator[list[LocalMember]]:
    """``count`` members a, b, c ... in one formed ring; all ended with the block."""
    members = [LocalMember(chr(ord("a") + rank), network, seed=rank) for rank in range(count)]

    def form(member: LocalMember) -> Coroutine[Any, Any, RingSession]:
        return member.form(
            view, heartbeat_s=heartbeat_s, death_s=death_s, sub_chunk_bytes=sub_chunk_bytes, streams=streams
        )

    try:
        view = local_view({member.peer_id: await member.listen() for member in members})
        await asyncio.gather(*(form(member) for member in members))
        yield members
    finally:
        await asyncio.gather(*(member.stop() for member in members))


@asynccontextmanager
async def local_chain(
    count: int,
    network: Network | Sequence[Network],
    *,
    activation_bytes: int = 64,
    gradient_bytes: int = 64,
    heartbeat_s: float = 5.0,
    death_s: float = 15.0,
    streams: int = 1,
    hosts: bool = False,
) -> AsyncIterator[list[LocalMember]]:
    """``count`` stages a, b, c ... in one formed chain; all ended with the block.

    Args:
        network: of all, or of each.
        hosts: each listens on a host of its own name.
    """
    networks = list(network) if isinstance(network, Sequence) else [network] * count
    members = [LocalMember(chr(ord("a") + stage), networks[stage], seed=stage) for stage in range(count)]

    def form(member: LocalMember) -> Coroutine[Any, Any, Chain]:
        return member.form_chain(
            view,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            streams=streams,
        )

    try:
        ports = {member.peer_id: await member.listen(member.peer_id if hosts else HOST) for member in members}
        view = local_view(ports, hosts=hosts)
        await asyncio.gather(*(form(member) for member in members))
        yield members
    finally:
        await asyncio.gather(*(member.stop() for member in members))


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


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on virtual time: its seconds cost nothing, and are exact."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run
