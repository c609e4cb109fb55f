"""How the members of a view find each other: dialling to the right, and being dialled from the left.

The seed announces a view to all members at once, but one of them always hears it first and dials at once. Its
connection may name a generation that this worker does not know yet: it is held, for a while and in bounded number. A
generation older than the newest one known is refused: its ring is over.
"""

from __future__ import annotations

import asyncio

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NeighbourAway,
    NetworkError,
    P2PTrainError,
    Refused,
    Unreachable,
)
from p2ptrain.core.world import World
from wire.connection import Connection
from wire.handshake import HANDSHAKE_TIMEOUT_S, RefusalCode, dial
from wire.messages import Hello, MemberRecord, Refuse

CHANNELS = ("bulk", "beat")
MAX_HELD = 16
HOLD_S = 60.0
"""How long a connection waits for its view: longer than a member takes to turn from a step to the next view."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0

_PASSING = frozenset({RefusalCode.BUSY, RefusalCode.FULL})  # refusals that time mends
_Key = tuple[str, int, str, str]  # job, generation, peer id, channel


class Inbound:
    """One worker's accepted ring connections. The listener's ``decide`` asks ``decide``, its ``serve`` awaits
    ``offer``.

    Args:
        max_held: connections held for views that have not arrived; more are refused as ``BUSY``, and the dialler
        tries again. hold_s: how long each of them is held.
    """

    def __init__(self, *, max_held: int = MAX_HELD, hold_s: float = HOLD_S) -> None:
        self._max_held = max_held
        self._hold_s = hold_s
        self._newest = ("", 0)
        self._held: dict[_Key, Connection] = {}
        self._waiting: dict[_Key, asyncio.Future[Connection]] = {}

    def expect(self, job: str, generation: int) -> None:
        """A view of ``job`` is known here: from now on older generations of it are refused, and those held are
        closed.
        """
        if job == self._newest[0]:
            generation = max(generation, self._newest[1])
        self._newest = (job, generation)
        for key in [key for key in self._held if key[0] == job and key[1] < generation]:
            self._held.pop(key).abort(ConnectionLost(f"the view of generation {key[1]} is over"))

    def decide(self, hello: Hello) -> Refuse | None:
        """Why this caller may not connect, None where it may. For the handshake's decision; changes nothing."""
        channel = hello.capabilities.get("channel")
        if not hello.job or hello.generation < 1 or channel not in CHANNELS:
            return Refuse(RefusalCode.NOT_A_NEIGHBOUR, "a ring connection names its job, generation and channel")
        job, newest = self._newest
        if hello.job == job and hello.generation < newest:
            text = f"generation {hello.generation} is over, the job is at {newest}"
            return Refuse(RefusalCode.STALE_GENERATION, text, "wait for the view that the seed announces next")
        key = _key(hello)
        if len(self._held) >= self._max_held and key not in self._held and key not in self._waiting:
            return Refuse(RefusalCode.BUSY, f"{len(self._held)} ring connections wait for their views", "try again")
        return None

    async def offer(self, connection: Connection, hello: Hello) -> None:
        """Keep an accepted connection for whoever takes it; returns when it is closed, by whomever."""
        if self.decide(hello) is not None:  # the last place may have gone while the handshake ended
            connection.abort()
            return
        key = _key(hello)
        waiter = self._waiting.get(key)
        if waiter is not None and not waiter.done():
            waiter.set_result(connection)
            await connection.closed.wait()
            return
        if key in self._held:  # the neighbour dialled again, so it has given up the first one
            self._held.pop(key).abort()
        self._held[key] = connection
        expiry = asyncio.get_running_loop().call_later(self._hold_s, self._drop, key, connection)
        try:
            await connection.closed.wait()
        finally:
            expiry.cancel()
            self._drop(key, connection)

    async def take(self, job: str, generation: int, peer_id: str, channel: str, *, timeout_s: float) -> Connection:
        """The connection that ``peer_id`` opened for this view; it belongs to the caller from now on.

        Raises:
            DeadlineExceeded: it has not come within ``timeout_s``.
        """
        key = (job, generation, peer_id, channel)
        if key in self._held:
            return self._held.pop(key)
        waiter: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiter
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise DeadlineExceeded(
                f"the left neighbour {peer_id} has not connected within {timeout_s:.0f} s",
                remedy="can it reach the port of this worker? see the other members' events",
            ) from None
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.result().abort()  # it came in the same instant; nobody else knows of it
            raise
        finally:
            del self._waiting[key]

    def _drop(self, key: _Key, connection: Connection) -> None:
        """No longer hold ``connection``, if it is still held."""
        if self._held.get(key) is connection:
            del self._held[key]
            connection.abort()


def _key(hello: Hello) -> _Key:
    return hello.job, hello.generation, hello.peer_id, str(hello.capabilities.get("channel"))


async def dial_patiently(
    world: World, member: MemberRecord, seed_host: str, hello: Hello, *, deadline: float
) -> Connection:
    """A connection to the right neighbour, who may not be listening yet: tried again and again until ``deadline``.

    Args:
        seed_host: dialled where the member's own host is empty.

    Raises:
        NeighbourAway: it could not be reached in time.
        Refused, ProtocolError: it does not want us, and time will not change that.
    """
    now, host, pause_s = world.clock.now, member.host or seed_host, FIRST_PAUSE_S
    problem: P2PTrainError
    while True:
        try:
            timeout_s = max(min(HANDSHAKE_TIMEOUT_S, deadline - now()), 0.0)
            connection, welcome = await dial(world.network, host, member.port, hello, timeout_s=timeout_s)
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
        delay_s = pause_s * world.random.uniform(0.5, 1.5)  # or members that were refused together come back together
        if now() + delay_s >= deadline:
            raise NeighbourAway(
                f"the right neighbour {member.name} was not reached in time: {problem.message}",
                peer_id=member.peer_id,
                remedy=problem.remedy,
            ) from problem
        await asyncio.sleep(delay_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
