"""How a member of a view gets its connections: it dials its right neighbour, and is dialled by its left one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from p2ptrain.core.errors import P2PTrainError, first_error
from p2ptrain.core.world import World
from ring.links import BEAT, Inbound, bulk_channel, dial_patiently
from ring.liveness import Neighbour
from ring.view import View
from wire.connection import Connection
from wire.handshake import local_hello

DIAL_PART = 0.4
"""Of the time to form: for dialling. Who knows which link is missing says so before all others' time is up."""


async def meet_neighbours(
    world: World,
    view: View,
    peer_id: str,
    name: str,
    seed_host: str,
    inbound: Inbound,
    *,
    streams: int,
    timeout_s: float,
) -> tuple[Neighbour, Neighbour]:
    """The right neighbour and the left one, each with a beat and ``streams`` bulk connections.

    Raises as ``RingSession.form``; no connection is left open then.
    """
    rank = view.rank_of(peer_id)
    assert rank is not None, "only members meet"
    began = world.clock.now()
    deadline, dial_deadline = began + timeout_s, began + DIAL_PART * timeout_s
    right, left = view.right_of(rank), view.left_of(rank)
    channels = [BEAT, *(bulk_channel(stream) for stream in range(streams))]
    opened: list[Connection] = []

    async def dial(channel: str) -> Connection:
        hello = local_hello(
            peer_id=peer_id,
            name=name,
            roles=["worker"],
            purpose="ring",
            capabilities={"channel": channel},
            job=view.job,
            generation=view.generation,
        )
        connection = await dial_patiently(world, right, seed_host, hello, deadline=dial_deadline)
        opened.append(connection)
        return connection

    async def take(channel: str) -> Connection:
        remaining_s = deadline - world.clock.now()
        connection = await inbound.take(view.job, view.generation, left.peer_id, channel, timeout_s=remaining_s)
        opened.append(connection)
        return connection

    try:
        beat, *bulks = await _all_of(dial(channel) for channel in channels)
        to_right = Neighbour("right", right, bulks, beat)
        beat, *bulks = await _all_of(take(channel) for channel in channels)
        return to_right, Neighbour("left", left, bulks, beat)
    except BaseException:
        for connection in opened:
            connection.abort()
        raise


async def _all_of(parts: Iterable[Coroutine[Any, Any, Connection]]) -> list[Connection]:
    """The results of all, in order. Where one fails its error is raised once the others have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except* P2PTrainError as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]
