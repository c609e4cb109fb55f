"""The links of a member to its neighbours in one view: heartbeats, a listener per connection, one end for all.

The left one of two neighbours sends heartbeats on a connection of its own, and the right one acknowledges them.
Everything received counts as a sign of life.

A member that loses a neighbour is *broken* for good. It closes all its connections, which breaks its neighbours. So the
news travels from member to member at the speed of the wires. ``MemberLost`` names the lost member. If a connection ends
but its neighbour's heartbeats do not, this member waits one heartbeat interval for the neighbour to name the lost
member. A member that leaves on purpose sends ``Leave`` first.

The owner decides what the connections carry: a ring (``ring.session``) or a chain (``ring.chain``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.core.background import Background
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    PeerError,
    ProtocolError,
    Refused,
    Stalled,
)
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import Clock
from ring.detector import FailureDetector
from ring.view import View
from wire.connection import Connection
from wire.job_messages import MemberLost, MemberRecord
from wire.messages import Heartbeat, HeartbeatAck, Leave, Message, Refuse

AT_WORK = "between operations"
"""The state that a heartbeat reports for a member that waits for nothing."""
REASON_CHARS = 200
UNLIMITED_S = 1e8
"""Time limit of a receive whose end something else decides: the detector of silence, or each message's own time."""


class Neighbour:
    """One neighbour and the connections shared with it. ``role`` is its title in messages: ``"left neighbour"``.

    Attributes:
        bulks: for payloads, one per stream. beat: for heartbeats.
        leaving: the neighbour sent ``Leave``, so the end of its connections is no failure.
    """

    def __init__(self, role: str, member: MemberRecord, bulks: Sequence[Connection], beat: Connection) -> None:
        self.title = f"the {role} {member.name}"
        self.peer_id = member.peer_id
        self.bulks, self.beat = tuple(bulks), beat
        self.leaving = False

    @property
    def connections(self) -> tuple[Connection, ...]:
        return *self.bulks, self.beat

    @property
    def last_heard(self) -> float:
        return max(connection.last_heard for connection in self.connections)

    def send_control(self, connection: Connection, message: Message, generation: int) -> bool:
        """Send ``message``. Returns False if the connection is gone; its listener gets the error as well."""
        try:
            connection.send(message, generation=generation)
        except NetworkError:
            return False
        return True

    def abort(self) -> None:
        for connection in self.connections:
            connection.abort()


@dataclass(frozen=True, slots=True)
class RingBroken:
    """Why a session ended.

    Attributes:
        suspect: peer id of the lost member; empty if this side ended the session.
        beside: peer id of the neighbour of ``suspect`` that noticed the loss.
        left: the lost member left on purpose.
    """

    suspect: str
    cause: P2PTrainError
    beside: str = ""
    left: bool = False


def cause_of(error: P2PTrainError) -> str:
    """The cause of a break, as in ``Report``."""
    return "protocol" if isinstance(error, PeerError) else "stalled" if isinstance(error, Stalled) else ""


class Heartbeats:
    """The heartbeats of a member: sends its own to the right neighbour, and notices the silence of both neighbours."""

    def __init__(self, links: NeighbourLinks, clock: Clock) -> None:
        self._links, self._clock = links, clock
        self.interval_s = 0.0  # 0 before the first beat
        self.newest_of_left: Heartbeat | None = None
        self._seq = 0

    async def run(self) -> None:
        """Send heartbeats and watch both neighbours, until cancelled."""
        times_s = {"heartbeat_s": self.interval_s, "death_s": self._links.view.death_s}
        watched = [(neighbour, FailureDetector(**times_s)) for neighbour in self._links.neighbours]
        now = due = self._clock.now()
        while True:
            if now >= due:
                self._send()
                due = now + self.interval_s
            planned_s = min(due - now, *(detector.wait_s for _, detector in watched))
            await asyncio.sleep(planned_s)
            now = self._clock.now()
            for neighbour, detector in watched:
                if detector.waited(planned_s, now, neighbour.last_heard):
                    silence = DeadlineExceeded(f"it sent nothing for {detector.silent_s:.1f} s")
                    self._links.give_up(neighbour, silence)

    def _send(self) -> None:
        self._seq += 1
        view, right = self._links.view, self._links.right
        progress, state = self._links.owner.status()
        if right is not None:
            right.send_control(right.beat, Heartbeat(self._seq, progress, view.step, state), view.generation)


class LinksOwner(Protocol):
    """The ring or chain whose neighbours are watched."""

    def status(self) -> tuple[int, str]:
        """Its progress and state, for the heartbeats."""

    def is_busy(self) -> bool:
        """Whether an operation is under way."""

    def expects(self, connection: Connection) -> bool:
        """Whether the operation still needs bytes of a connection."""

    def settle(self) -> None:
        """End all operations. Called once, before any connection is closed."""


class NeighbourLinks:
    """Watches the neighbours of one member. ``close`` ends it, and so does the first loss.

    Args:
        left, right: sends heartbeats to this member; receives this member's heartbeats.
        what: the owner's name in messages.
        whole: the view of all whose loss may be told here; None: ``view``.

    Attributes:
        broken: resolves to ``RingBroken`` at the end, for whatever reason.
        parted: a neighbour that left while an operation could still complete without it. A ring ends the links after
            that operation; a chain notices at its next step.
    """

    def __init__(
        self,
        owner: LinksOwner,
        clock: Clock,
        view: View,
        rank: int,
        *,
        left: Neighbour | None,
        right: Neighbour | None,
        what: str,
        whole: View | None = None,
    ) -> None:
        self.broken: asyncio.Future[RingBroken] = asyncio.get_running_loop().create_future()
        self.left, self.right = left, right
        self.parted: Neighbour | None = None
        self.beats = Heartbeats(self, clock)
        self.owner, self.view, self._rank, self._what = owner, view, rank, what
        self._whole = whole or view
        self._tasks, self._farewells = Background(), Background()
        self._verdict: asyncio.TimerHandle | None = None  # runs while a ``MemberLost`` may still come
        for neighbour in self.neighbours:
            for bulk in neighbour.bulks:
                bulk.raise_fence(view.generation)
            for connection in neighbour.connections:
                self._tasks.start(self._listen(neighbour, connection), "neighbour")

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        return tuple(neighbour for neighbour in (self.left, self.right) if neighbour is not None)

    def failure(self) -> P2PTrainError:
        """A new copy of the error that broke the links: each raised error grows its own traceback."""
        cause = self.broken.result().cause
        return type(cause)(cause.message, remedy=cause.remedy)

    def close(self, cause: str, reason: str, *, orderly: bool) -> None:
        """End the links without waiting (``wait_closed`` waits).

        Args:
            cause: the reason for this side. reason: for the neighbours.
            orderly: send what is queued and ``Leave`` before the connections close; else they end at once.
        """
        if self.broken.done():
            return
        self._settle(RingBroken("", ConnectionLost(cause)))
        for neighbour in self.neighbours:
            if not orderly:
                neighbour.abort()
                continue
            for connection in neighbour.connections:
                if neighbour.send_control(connection, Leave(shortened(reason, REASON_CHARS)), self.view.generation):
                    self._farewells.start(connection.close(), "farewell")
                else:
                    connection.abort()

    async def wait_closed(self) -> None:
        """Wait after the end until all connections are closed; a second at most."""
        await self._tasks.settle()
        await self._farewells.settle()
        for neighbour in self.neighbours:
            for connection in neighbour.connections:
                await connection.closed.wait()

    def _ended(self, neighbour: Neighbour, connection: Connection, error: P2PTrainError) -> None:
        """End the links after the end of a connection, unless the current operation can complete without it."""
        if not neighbour.leaving:
            self.take_failure(connection, error)
        elif not self.owner.is_busy() or self.owner.expects(connection):
            self.give_up(neighbour, ConnectionLost(f"it left the {self._what}"))
        elif self.parted is None:
            self.parted = neighbour

    def take_failure(self, connection: Connection, error: P2PTrainError) -> None:
        """Handle a failed connection. The neighbour has one heartbeat interval to name another member as lost. A
        process that died ends all connections at once, and the end of its heartbeat connection decides immediately: any
        ``MemberLost`` sent before has been read by then."""
        neighbour = next(known for known in self.neighbours if connection in known.connections)
        wait_s = self.beats.interval_s
        if not wait_s or connection is neighbour.beat or neighbour.leaving or not isinstance(error, ConnectionLost):
            self.give_up(neighbour, error)
        elif self._verdict is None and not self.broken.done():
            loop = asyncio.get_running_loop()
            self._verdict = loop.call_later(wait_s, self.give_up, neighbour, error)

    def give_up(self, neighbour: Neighbour | None, error: P2PTrainError, news: MemberLost | None = None) -> None:
        """End the links; the first cause counts. ``neighbour`` is the suspect, or the sender of ``news`` about another
        member. None: this member itself is the reason."""
        if self.broken.done():
            return
        me = self.view.members[self._rank].peer_id
        if news is None and neighbour is not None:
            news = MemberLost(neighbour.peer_id, me, shortened(error.message, REASON_CHARS), neighbour.leaving)
            kind = ConnectionLost if isinstance(error, Refused) else type(error)
            error = kind(f"lost {neighbour.title}: {error.message}", remedy=error.remedy)
        elif news is not None and neighbour is not None:
            lost, by = map(self._whole.name_of, (news.peer_id, news.beside))
            error = ConnectionLost(f"{by} lost {lost}: {error.message}", remedy=error.remedy)
        self._settle(RingBroken(news.peer_id, error, news.beside, news.left) if news else RingBroken("", error))
        for other in self.neighbours:
            tell = news is not None and other is not neighbour and other.peer_id != news.peer_id
            if tell and news is not None and other.send_control(other.beat, news, self.view.generation):
                self._farewells.start(other.beat.close(), "farewell")
                for bulk in other.bulks:
                    bulk.abort()
            else:
                other.abort()

    def give_up_stuck(self, neighbour: Neighbour | None, silence: str) -> None:
        """End the links because a neighbour makes no progress. Before the heartbeats the cause may be a third member
        that has not come."""
        kind = Stalled if self.beats.interval_s else DeadlineExceeded
        self.give_up(neighbour, kind(silence, remedy="it may be stuck or very slow: look at its log"))

    @property
    def bytes_in(self) -> int:
        return sum(connection.bytes_in for neighbour in self.neighbours for connection in neighbour.connections)

    @property
    def bytes_out(self) -> int:
        return sum(connection.bytes_out for neighbour in self.neighbours for connection in neighbour.connections)

    def follow_loss(self, broken: RingBroken) -> bool:
        """End the links because another ring of the view broke. False if ``broken`` names no member of this view."""
        if self._whole.rank_of(broken.suspect) is None or self._whole.rank_of(broken.beside) is None:
            return False
        news = MemberLost(broken.suspect, broken.beside, shortened(broken.cause.message, REASON_CHARS), broken.left)
        self.give_up(None, broken.cause, news)
        return True

    def _take_loss(self, neighbour: Neighbour, news: MemberLost) -> None:
        """Handle ``MemberLost``. If it names this member or no member, the neighbour that sent it counts as lost."""
        is_known = None not in map(self._whole.rank_of, (news.peer_id, news.beside))
        if not is_known or news.peer_id == self.view.members[self._rank].peer_id:
            self.give_up(neighbour, ConnectionLost(f"it ended the session: {shortened(news.reason, REASON_CHARS)}"))
        else:
            self.give_up(neighbour, ConnectionLost(shortened(news.reason, REASON_CHARS)), news)

    def _settle(self, broken: RingBroken) -> None:
        self.broken.set_result(broken)
        if self._verdict is not None:
            self._verdict.cancel()
        self.owner.settle()
        self._tasks.cancel()

    def begin_beats(self) -> None:
        """Start heartbeats and failure detection, when every member is known to be connected."""
        self.beats.interval_s = self.view.heartbeat_s
        if self.neighbours:
            self._tasks.start(self.beats.run(), "heartbeats")

    # -------------------------------------------------------------------------------------------------------- listening

    async def _listen(self, neighbour: Neighbour, connection: Connection) -> None:
        try:
            while True:
                received = await connection.receive(timeout_s=UNLIMITED_S)
                self._heard(neighbour, connection, received.message)
        except P2PTrainError as error:
            self._ended(neighbour, connection, error)

    def _heard(self, neighbour: Neighbour, connection: Connection, message: Message) -> None:
        match message:
            case Leave():
                neighbour.leaving = True
            case Refuse(message=text):
                raise ConnectionLost(f"it refuses to continue: {text}")
            case Heartbeat(seq=seq) if self.left is not None and connection is self.left.beat:
                self.beats.newest_of_left = message
                connection.send(HeartbeatAck(seq), generation=self.view.generation)
            case HeartbeatAck() if self.right is not None and connection is self.right.beat:
                return  # a sign of life, as everything that is received
            case MemberLost() if connection is neighbour.beat:
                self._take_loss(neighbour, message)
            case _:
                raise ProtocolError(f"it sent {type(message).__name__}, which is not allowed in a ring")
