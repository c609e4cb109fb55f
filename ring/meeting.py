"""How the members of a view get their connections: each dials one neighbour, and is dialled by the other one.

In a ring that is the right one and the left one; in a chain of stages the next one and the one before, where there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from p2ptrain.core.errors import P2PTrainError, first_error
from p2ptrain.core.world import World
from ring.links import Inbound, Kin, dial_patiently
from ring.liveness import Neighbour
from ring.view import View
from wire.connection import Connection
from wire.handshake import local_hello
from wire.job_messages import MemberRecord

DIAL_PART = 0.4
"""Of the time to form: for dialling. Who knows which link is missing says so before all others' time is up."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Who comes together, and how.

    Attributes:
        name: of this member, for people.
        seed_host: dialled for members whose own host is empty.
        inbound: where those that dial this member arrive.
        streams: bulk connections to each neighbour.
    """

    world: World
    view: View
    peer_id: str
    name: str
    seed_host: str
    inbound: Inbound
    kin: Kin
    streams: int

    async def neighbours(
        self, dialled: MemberRecord | None, dialling: MemberRecord | None, *, timeout_s: float
    ) -> tuple[Neighbour | None, Neighbour | None]:
        """The one that this member dials, and the one that dials it, each with a beat and bulk connections.

        Raises as ``RingSession.form``; no connection is left open then.
        """
        began = self.world.clock.now()
        channels = self.kin.channels(self.streams)
        opened: list[Connection] = []

        async def dial(member: MemberRecord, channel: str) -> Connection:
            hello = local_hello(
                peer_id=self.peer_id,
                name=self.name,
                roles=["worker"],
                purpose="ring",
                capabilities={"channel": channel},
                job=self.view.job,
                generation=self.view.generation,
            )
            deadline = began + DIAL_PART * timeout_s
            title = self.kin.dialled
            connection = await dial_patiently(self.world, member, self.seed_host, hello, deadline=deadline, title=title)
            opened.append(connection)
            return connection

        async def take(member: MemberRecord, channel: str) -> Connection:
            remaining_s = began + timeout_s - self.world.clock.now()
            job, generation = self.view.job, self.view.generation
            connection = await self.inbound.take(job, generation, member.peer_id, channel, timeout_s=remaining_s)
            opened.append(connection)
            return connection

        there = back = None
        try:
            if dialled is not None:
                beat, *bulks = await _all_of(dial(dialled, channel) for channel in channels)
                there = Neighbour(self.kin.dialled, dialled, bulks, beat)
            if dialling is not None:
                beat, *bulks = await _all_of(take(dialling, channel) for channel in channels)
                back = Neighbour(self.kin.dialling, dialling, bulks, beat)
        except BaseException:
            for connection in opened:
                connection.abort()
            raise
        return there, back


async def _all_of(parts: Iterable[Coroutine[Any, Any, Connection]]) -> list[Connection]:
    """The results of all, in order. Where one fails its error is raised once the others have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except* P2PTrainError as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]
