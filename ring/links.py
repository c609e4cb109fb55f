"""How the members of a view find each other: dialling to the right, and being dialled from the left; in a chain, the
next stage and the one before.

The seed announces a view to all members at once, but one of them always hears it first and dials at once. Its
connections may name a generation that this worker does not know yet: they are held, for a while and in bounded number,
one view's for each peer. A generation older than the newest one known is refused: its ring is over. So is, in the
newest one, whoever is not the left neighbour there, or the stage before; those held for it are judged when the view
arrives. On an encrypted wire the handshake has compared the peer id with the certificate: nobody takes the place of
another, or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from p2ptrain.core.errors import (
    DeadlineExceeded,
    NeighbourAway,
    NetworkError,
    P2PTrainError,
    Refused,
    Unreachable,
    first_error,
)
from p2ptrain.core.world import World
from ring.neighbours import Neighbour
from ring.view import LABEL, MAX_STREAMS, View
from wire.connection import Connection
from wire.handshake import HANDSHAKE_TIMEOUT_S, RefusalCode, dial, local_hello
from wire.job_messages import MemberRecord
from wire.messages import Hello, Refuse

FIRST_PAUSE_S = 0.05
DIAL_PART = 0.4
"""Of the time to form: for dialling. Who knows which link is missing says so before all others' time is up."""


class Topology(Enum):
    """What neighbours are to one another. In one view a member may have a place in a ring, in a chain, and in the ring
    of two that a chain's ends are: their connections differ by the channel that a ``Hello`` names, so those of one
    cannot be taken for another's.

    Attributes:
        prefix: of its channels. dialled, dialling: what the neighbour that a member dials is to it, for people, and the
            one that dials it.
    """

    RING = ("", "right neighbour", "left neighbour")
    CHAIN = ("chain-", "next stage", "stage before")
    PAIR = ("pair-", "other end of the chain", "other end of the chain")

    def __init__(self, prefix: str, dialled: str, dialling: str) -> None:
        self.prefix, self.dialled, self.dialling = prefix, dialled, dialling

    def channels(self, streams: int) -> list[str]:
        """The names of the connections to one neighbour: for its beats, and for payloads."""
        bulks = ["bulk", *(f"bulk-{stream}" for stream in range(1, streams))]
        return [self.prefix + channel for channel in ("beat", *bulks)]


CHANNELS = {channel: topology for topology in Topology for channel in topology.channels(MAX_STREAMS)}
# Refusals that time mends; the last one is of another peer that has the address now, perhaps not for long.
_PASSING = frozenset({RefusalCode.BUSY, RefusalCode.FULL, RefusalCode.IDENTITY})
_Key = tuple[str, int, str, str]  # job, generation, peer id, channel


@dataclass(eq=False, slots=True)
class _Held:
    """A connection that waits for its view; ``let_go`` ends the waiting, and says why."""

    job: str
    generation: int
    connection: Connection
    let_go: asyncio.Future[Refuse]


class Inbound:
    """One worker's accepted ring connections. The listener's ``decide`` asks ``decide``, its ``serve`` awaits
    ``offer``.

    Args:
        max_held: peers whose connections are held for views that have not arrived; more are refused as ``BUSY``, and
        the dialler tries again. hold_s: how long each connection is held: longer than a
            member takes to turn from a step to the next view.
    """

    def __init__(self, *, max_held: int = 16, hold_s: float = 60.0) -> None:
        self._max_held = max_held
        self._hold_s = hold_s
        self._job = ""
        # Job, or the label of a ring of one of its stages → the newest generation, and who may dial in it, where that
        # is known; an empty peer id: nobody.
        self._newest: dict[str, tuple[int, dict[Topology, str]]] = {}
        self._held: dict[tuple[str, str], _Held] = {}  # by peer id and channel; of one peer all are for one view
        self._waiting: dict[_Key, asyncio.Future[Connection]] = {}

    def announced(self, view: View, peer_id: str) -> None:
        """The view in which this worker, ``peer_id``, has a place: from now on only its left neighbour may connect."""
        self.expect(view.job, view.generation)
        rank = view.rank_of(peer_id)
        if rank is not None and self._newest[view.job][0] == view.generation:
            self._newest[view.job][1][Topology.RING] = view.left_of(rank).peer_id
            self._judge_held()

    def announced_chain(self, view: View, before: str) -> None:
        """This worker is a stage of a chain in ``view``: from now on only the stage ``before`` may connect as such."""
        self.expect(view.job, view.generation)
        if self._newest[view.job][0] == view.generation:
            self._newest[view.job][1][Topology.CHAIN] = before
            self._judge_held()

    def expect(self, job: str, generation: int) -> None:
        """A view of ``job`` is known here: from now on older generations of it are refused, and those held are
        closed.
        """
        own = job.partition(LABEL)[0]
        if own != self._job:
            self._job = own
            self._newest.clear()
        if generation > self._newest.get(job, (0, {}))[0]:
            self._newest[job] = generation, {}
            self._judge_held()

    def decide(self, hello: Hello) -> Refuse | None:
        """Why this caller may not connect, None where it may. For the handshake's decision; changes nothing."""
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
            text = f"generation {generation} is over, the job is at {newest}"
            return Refuse(RefusalCode.STALE_GENERATION, text, "wait for the view that the seed announces next")
        if generation == newest and dialling.get(topology, peer_id) != peer_id:
            text = f"{peer_id[:64]} is not the {topology.dialling} here in generation {generation}"
            return Refuse(RefusalCode.NOT_A_NEIGHBOUR, text, f"dial the {topology.dialled} that the seed announced")
        return None

    def _judge_held(self) -> None:
        for (peer_id, channel), held in list(self._held.items()):
            if refusal := self._judge(held.job, held.generation, peer_id, CHANNELS[channel]):
                self._let_go((peer_id, channel), refusal)

    async def offer(self, connection: Connection, hello: Hello) -> None:
        """Keep an accepted connection for whoever takes it; returns when it is closed, by whomever.

        Raises:
            Refused: its view arrived, and has no place for it; the other side was told.
        """
        refusal = self.decide(hello)  # again: the last place may have gone while the handshake ended
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
        again = Refuse(RefusalCode.STALE_GENERATION, "this peer has dialled again since", "wait for the next view")
        mine = {other: held for other, held in self._held.items() if other[0] == hello.peer_id}
        if any(held.job == hello.job and held.generation > hello.generation for held in mine.values()):
            return again
        for other, held in mine.items():  # it has gone on to another view, or has given up the first one
            if other == key or (held.job, held.generation) != (hello.job, hello.generation):
                self._let_go(other, again)
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
            await connection.closed.wait()  # whoever took it closes it
            return None
        finally:
            closed.cancel()
            if self._held.get(key) is held:
                del self._held[key]

    async def take(self, job: str, generation: int, peer_id: str, channel: str, *, timeout_s: float) -> Connection:
        """The connection that ``peer_id`` opened for this view; it belongs to the caller from now on.

        Raises:
            DeadlineExceeded: it has not come within ``timeout_s``.
        """
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
                waiter.result().abort()  # it came in the same instant; nobody else knows of it
            if isinstance(given_up, asyncio.CancelledError):
                raise
            raise DeadlineExceeded(
                f"the {CHANNELS[channel].dialling} {peer_id} has not connected within {timeout_s:.0f} s",
                remedy="can it reach the port of this worker? see the other members' events",
            ) from None
        finally:
            del self._waiting[key]

    def _let_go(self, key: tuple[str, str], refusal: Refuse) -> None:
        held = self._held.pop(key)
        if not held.let_go.done():
            held.let_go.set_result(refusal)


def _key(hello: Hello) -> _Key:
    return hello.job, hello.generation, hello.peer_id, str(hello.capabilities.get("channel"))


async def dial_patiently(
    world: World,
    member: MemberRecord,
    seed_host: str,
    hello: Hello,
    *,
    deadline: float,
    title: str = Topology.RING.dialled,
) -> Connection:
    """A connection to a neighbour, who may not be listening yet: tried again and again until ``deadline``.

    Args:
        seed_host: dialled where the member's own host is empty.
        title: what the neighbour is to this member, for people.

    Raises:
        NeighbourAway: it could not be reached in time.
        Refused, ProtocolError: it does not want us, and time will not change that.
    """
    now, host, pause_s = world.clock.now, member.host or seed_host, FIRST_PAUSE_S
    problem: P2PTrainError
    while True:
        try:
            timeout_s = max(min(HANDSHAKE_TIMEOUT_S, deadline - now()), 0.0)
            connection, welcome = await dial(
                world.network, host, member.port, hello, timeout_s=timeout_s, expect_peer=member.peer_id
            )
            if welcome.peer_id == member.peer_id:
                return connection
            connection.abort()
            problem = Unreachable(f"{host}:{member.port} is another peer, {welcome.name}")
        except NetworkError as error:
            problem = error
        except Refused as error:
            if error.code not in _PASSING:
                raise
            problem = error
        left_s = deadline - now()
        if left_s <= FIRST_PAUSE_S:
            raise NeighbourAway(
                f"the {title} {member.name} was not reached in time: {problem.message}",
                peer_id=member.peer_id,
                remedy=problem.remedy,
            ) from problem
        # Spread, or members that were refused together come back together; and more often when time runs out.
        await asyncio.sleep(min(pause_s * world.random.uniform(0.5, 1.5), max(left_s / 2, FIRST_PAUSE_S)))
        pause_s = min(2 * pause_s, 1.0)


async def connect_neighbours(
    world: World,
    view: View,
    *,
    peer_id: str,
    name: str,
    seed_host: str,
    inbound: Inbound,
    topology: Topology,
    streams: int,
    dialled: MemberRecord | None,
    dialling: MemberRecord | None,
    timeout_s: float,
) -> tuple[Neighbour | None, Neighbour | None]:
    """The neighbour that this member dials, and the one that dials it, each with a beat and bulk connections.

    Args:
        name: of this member, for people. seed_host: dialled for members whose own host is empty.
        inbound: where those that dial this member arrive. streams: bulk connections to each neighbour.

    Raises as ``RingSession.form``; no connection is left open then.
    """
    began = world.clock.now()
    channels = topology.channels(streams)
    opened: list[Connection] = []

    async def dial_one(member: MemberRecord, channel: str) -> Connection:
        hello = local_hello(
            peer_id=peer_id,
            name=name,
            roles=["worker"],
            purpose="ring",
            capabilities={"channel": channel},
            job=view.job,
            generation=view.generation,
        )
        deadline, title = began + DIAL_PART * timeout_s, topology.dialled
        connection = await dial_patiently(world, member, seed_host, hello, deadline=deadline, title=title)
        opened.append(connection)
        return connection

    async def take(member: MemberRecord, channel: str) -> Connection:
        remaining_s = began + timeout_s - world.clock.now()
        connection = await inbound.take(view.job, view.generation, member.peer_id, channel, timeout_s=remaining_s)
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
