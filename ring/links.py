"""How members of a view connect: each dials the right neighbour and accepts the left one; in a chain, next and
previous.

The seed announces a view to all members at once, but some member gets it first and dials at once. Its connection may
name a generation that this worker does not know yet. Such connections are held for a limited time, in bounded number,
for one view per peer. A worker refuses generations older than the newest one that it knows. In the newest one it
refuses every peer but its left neighbour or previous stage. On an encrypted wire the handshake has compared the peer id
with the certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from p2ptrain.core.errors import (
    NeighbourAway,
    NetworkError,
    P2PTrainError,
    Refused,
    first_error,
)
from p2ptrain.core.world import World
from ring.neighbours import Neighbour
from ring.quarantine import DIAL
from ring.view import LABEL, View
from wire.address import advertised_host
from wire.connection import Connection
from wire.handshake import HANDSHAKE_TIMEOUT_S, dial, local_hello
from wire.job_messages import MAX_STREAMS, MemberRecord
from wire.messages import Hello, RefusalCode, Refuse

FIRST_PAUSE_S = 0.05
DIAL_PART = 0.4
"""The part of the time to form that is for dialling. So the member that cannot reach its neighbour reports it before
the other members' time is up."""


class Topology(Enum):
    """What two neighbours are to each other. In one view a member may have a place in a ring, in a chain, and in the
    ring of two that the ends of a chain form. Their connections cannot be confused, since a ``Hello`` names the
    channel.

    Attributes:
        prefix: of the channel names.
        dialled, dialling: title of the neighbour that a member dials, and of the one that dials it, for messages.
    """

    RING = ("", "right neighbour", "left neighbour")
    CHAIN = ("chain-", "next stage", "previous stage")
    PAIR = ("pair-", "other end of the chain", "other end of the chain")

    def __init__(self, prefix: str, dialled: str, dialling: str) -> None:
        self.prefix, self.dialled, self.dialling = prefix, dialled, dialling

    def channels(self, streams: int) -> list[str]:
        """The names of the connections to one neighbour: the heartbeat connection first, then one for each stream."""
        bulks = ["bulk", *(f"bulk-{stream}" for stream in range(1, streams))]
        return [self.prefix + channel for channel in ("beat", *bulks)]


CHANNELS = {channel: topology for topology in Topology for channel in topology.channels(MAX_STREAMS)}
# Refusals worth a retry. IDENTITY: another peer has the address now, perhaps not for long.
_PASSING = frozenset({RefusalCode.BUSY, RefusalCode.FULL, RefusalCode.IDENTITY, RefusalCode.TOO_SLOW})
_Key = tuple[str, int, str, str]  # job, generation, peer id, channel


@dataclass(eq=False, slots=True)
class _Held:
    """A connection that waits for its view. ``let_go`` ends the wait with a refusal."""

    job: str
    generation: int
    connection: Connection
    let_go: asyncio.Future[Refuse]


class Inbound:
    """The accepted ring and chain connections of one worker.

    Args:
        max_held: peers whose connections may be held for future views. More are refused as ``BUSY`` and try again.
        hold_s: how long a connection is held: longer than a member takes to turn from a step to the next view.
    """

    def __init__(self, *, max_held: int = 16, hold_s: float = 60.0) -> None:
        self._max_held = max_held
        self._hold_s = hold_s
        self._job = ""
        # Job, or the label of the ring of one of its stages → the newest generation, and for each topology whose view
        # is known the peer that may dial; an empty peer id: none.
        self._newest: dict[str, tuple[int, dict[Topology, str]]] = {}
        self._held: dict[tuple[str, str], _Held] = {}  # by peer id and channel; all of one peer are for one view
        self._waiting: dict[_Key, asyncio.Future[Connection]] = {}

    def announced(self, view: View, topology: Topology, dialling: str) -> None:
        """Note this worker's place in ``view``. From now on only the peer ``dialling`` may connect as the neighbour of
        this topology; empty: none may."""
        self.expect(view.job, view.generation)
        if self._newest[view.job][0] == view.generation:
            self._newest[view.job][1][topology] = dialling

    def expect(self, job: str, generation: int) -> None:
        """Refuse generations of ``job`` older than ``generation`` from now on."""
        own = job.partition(LABEL)[0]
        if own != self._job:
            self._job = own
            self._newest.clear()
        if generation > self._newest.get(job, (0, {}))[0]:
            self._newest[job] = generation, {}

    def decide(self, hello: Hello) -> Refuse | None:
        """Why this caller may not connect, or None if it may. Serves the handshake's decision and changes nothing."""
        topology = CHANNELS.get(str(hello.capabilities.get("channel")))
        if not hello.job or hello.generation < 1 or topology is None:
            return Refuse(RefusalCode.NOT_A_NEIGHBOUR, "a ring connection names its job, generation and channel")
        if refusal := self._judge(hello.job, hello.generation, hello.peer_id, topology):
            return refusal
        peers = {peer_id for peer_id, _ in self._held}
        if hello.peer_id in peers or _key(hello) in self._waiting or len(peers) < self._max_held:
            return None
        return Refuse(RefusalCode.BUSY, f"{len(peers)} ring connections wait for their views", "try again")

    def _judge(self, job: str, generation: int, peer_id: str, topology: Topology) -> Refuse | None:
        newest, dialling = self._newest.get(job, (0, {}))
        if generation < newest:
            text = f"generation {generation} is over, the job is at generation {newest}"
            return Refuse(RefusalCode.STALE_GENERATION, text, "wait for the view that the seed announces next")
        if generation == newest and dialling.get(topology, peer_id) != peer_id:
            text = f"{peer_id[:64]} is not the {topology.dialling} here in generation {generation}"
            return Refuse(RefusalCode.NOT_A_NEIGHBOUR, text, f"dial the {topology.dialled} that the seed announced")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Keep an accepted connection until ``take`` asks for it. Returns when the connection is closed. Raises
        ``Refused`` if its view has no place for it; the other side gets the same refusal."""
        refusal = self.decide(hello)  # again: the last free place may be gone since the handshake's decision
        if refusal is None:
            waiter = self._waiting.get(_key(hello))
            if waiter is not None and not waiter.done():
                waiter.set_result(connection)
                await connection.closed.wait()
                return
            refusal = await self._hold(connection, hello)
        if refusal is not None and not connection.closed.is_set():
            connection.send(refusal)
            raise Refused(refusal.code, refusal.message, remedy=refusal.remedy)

    async def _hold(self, connection: Connection, hello: Hello) -> Refuse | None:
        key = hello.peer_id, str(hello.capabilities.get("channel"))
        again = Refuse(RefusalCode.STALE_GENERATION, "this peer opened a newer connection", "wait for the next view")
        mine = {other: held for other, held in self._held.items() if other[0] == hello.peer_id}
        if any(held.job == hello.job and held.generation > hello.generation for held in mine.values()):
            return again
        for other, held in mine.items():  # the peer moved to another view, or dials again
            if other == key or (held.job, held.generation) != (hello.job, hello.generation):
                del self._held[other]
                if not held.let_go.done():
                    held.let_go.set_result(again)
        loop = asyncio.get_running_loop()
        held = self._held[key] = _Held(hello.job, hello.generation, connection, loop.create_future())
        closed = loop.create_task(connection.closed.wait(), name="held")
        ends: set[asyncio.Future[Any]] = {closed, held.let_go}
        try:
            await asyncio.wait(ends, timeout=self._hold_s, return_when=asyncio.FIRST_COMPLETED)
            if held.let_go.done():
                return None if held.let_go.cancelled() else held.let_go.result()
            if self._held.get(key) is held and not closed.done():
                text = f"no view asked for this connection within {self._hold_s:g} s"
                return Refuse(RefusalCode.BUSY, text, "try again")
            await connection.closed.wait()  # the session that took it closes it
            return None
        finally:
            closed.cancel()
            if self._held.get(key) is held:
                del self._held[key]

    async def take(self, job: str, generation: int, peer_id: str, channel: str, *, timeout_s: float) -> Connection:
        """Wait for the connection that ``peer_id`` opened for this view. It belongs to the caller from now on. Raises
        ``NeighbourAway`` if it does not come within ``timeout_s``."""
        held = self._held.get((peer_id, channel))
        if held is not None and (held.job, held.generation) == (job, generation):
            del self._held[peer_id, channel]
            return held.connection
        key = (job, generation, peer_id, channel)
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiter
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as given_up:
            if waiter.done() and not waiter.cancelled():
                waiter.result().abort()  # it came in the same instant, so nobody else would close it
            if isinstance(given_up, asyncio.CancelledError):
                raise
            raise NeighbourAway(
                f"the {CHANNELS[channel].dialling} {peer_id} has not connected within {timeout_s:.0f} s",
                peer_id=peer_id,
                remedy="can it reach the port of this worker? see the other members' events",
            ) from None
        finally:
            del self._waiting[key]


def _key(hello: Hello) -> _Key:
    return hello.job, hello.generation, hello.peer_id, str(hello.capabilities.get("channel"))


class ThisMember(Protocol):
    """The member that forms rings and chains.

    Attributes:
        seed_host: dialled for members whose own host is empty.
        inbound: where connections from other members arrive.
    """

    @property
    def world(self) -> World: ...
    @property
    def peer_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def seed_host(self) -> str: ...
    @property
    def inbound(self) -> Inbound: ...


async def dial_patiently(
    me: ThisMember, view: View, member: MemberRecord, channel: str, *, deadline: float, title: str
) -> Connection:
    """Connect to a member of ``view`` that may not be listening yet; try again until ``deadline``. ``title``: for
    messages.

    Raises:
        NeighbourAway: the neighbour was not reached in time.
        Refused, ProtocolError: the neighbour refuses for a reason that a retry does not change.
    """
    world, host, pause_s = me.world, advertised_host(me.seed_host, member.host), FIRST_PAUSE_S
    now = world.clock.now
    hello = local_hello(
        peer_id=me.peer_id,
        name=me.name,
        roles=["worker"],
        purpose="ring",
        capabilities={"channel": channel},
        job=view.job,
        generation=view.generation,
    )
    problem: P2PTrainError
    while True:
        try:
            timeout_s = max(min(HANDSHAKE_TIMEOUT_S, deadline - now()), 0.0)
            connection, _ = await dial(
                world.network, host, member.port, hello, timeout_s=timeout_s, expect_peer=member.peer_id
            )
            return connection
        except NetworkError as error:
            problem = error
        except Refused as error:
            if error.code not in _PASSING:
                raise
            problem = error
        left_s = deadline - now()
        if left_s <= 2 * FIRST_PAUSE_S:  # too little for a pause and another attempt, whose error would hide this one
            raise NeighbourAway(
                f"the {title} {member.name} was not reached in time: {problem.message}",
                peer_id=member.peer_id,
                remedy=problem.remedy,
                cause=DIAL,
            ) from problem
        # Random pauses, or members that were refused together retry together. Shorter ones when time runs out.
        await asyncio.sleep(min(pause_s * world.random.uniform(0.5, 1.5), left_s / 2))
        pause_s = min(2 * pause_s, 1.0)


async def connect_neighbours(
    me: ThisMember,
    view: View,
    topology: Topology,
    *,
    dialled: MemberRecord | None,
    dialling: MemberRecord | None,
    timeout_s: float,
) -> tuple[Neighbour | None, Neighbour | None]:
    """The neighbour that this member dials and the one that dials it, each with its heartbeat and bulk connections.

    Raises what ``RingSession.form`` raises, and leaves no connection open then.
    """
    now = me.world.clock.now
    began, channels = now(), topology.channels(view.streams)
    opened: list[Connection] = []

    async def dial_one(member: MemberRecord, channel: str) -> Connection:
        deadline, title = began + DIAL_PART * timeout_s, topology.dialled
        connection = await dial_patiently(me, view, member, channel, deadline=deadline, title=title)
        opened.append(connection)
        return connection

    async def take(member: MemberRecord, channel: str) -> Connection:
        remaining_s = began + timeout_s - now()
        connection = await me.inbound.take(view.job, view.generation, member.peer_id, channel, timeout_s=remaining_s)
        opened.append(connection)
        return connection

    there = back = None
    try:
        if dialled is not None:
            beat, *bulks = await _all_of(dial_one(dialled, channel) for channel in channels)
            there = Neighbour(topology.dialled, dialled, bulks, beat)
        if dialling is not None:
            beat, *bulks = await _all_of(take(dialling, channel) for channel in channels)
            back = Neighbour(topology.dialling, dialling, bulks, beat)
    except BaseException:
        for connection in opened:
            connection.abort()
        raise
    return there, back


async def _all_of(parts: Iterable[Coroutine[Any, Any, Connection]]) -> list[Connection]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except* P2PTrainError as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]
