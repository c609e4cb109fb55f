"""What ties a member to its neighbours in one view, and how that ends: once, for all of them, with a name.

Whoever loses a neighbour is *broken* for good: it closes all its connections, which breaks the neighbours, and so the
news goes from member to member as fast as the wires are, with no timeout involved. With it goes the name of the one
that is lost (``MemberLost``): a connection that ended while its neighbour's beats did not is explained by that
neighbour, for which it has the time of one beat. A member that leaves on purpose says so first (``Leave``).

What the connections carry is the owner's affair: a ring (``ring.session``) or a chain (``ring.chain``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, Refused
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import Clock
from ring.detector import Memory
from ring.liveness import REASON_CHARS, Neighbour, Watch
from ring.view import View
from wire.connection import Connection
from wire.heal_messages import MemberLost
from wire.messages import Leave


@dataclass(frozen=True, slots=True)
class RingBroken:
    """Why a session ended.

    Attributes:
        suspect: peer id of the member that is lost, empty where this side ended it.
        beside: peer id of its neighbour that saw it, mostly this member or whoever told it.
    """

    suspect: str
    cause: P2PTrainError
    beside: str = ""


class Bonds:
    """The neighbours of one member, watched. Ends with ``close``, or with the first loss.

    Args:
        rank: this member's in ``view``.
        left, right: who beats to it, and to whom it beats; None where there is none.
        memory: what is known of the neighbours from earlier views.
        status: this member's progress and what it is doing, for the beats.
        on_end: called when a connection of a neighbour has ended: what that means depends on what it still carried.
        on_beat: called with every beat of the left neighbour.
        on_broken: called once, when the end has come, before any connection is closed.

    Attributes:
        broken: resolves to ``RingBroken`` as soon as the end has come, for whatever reason.
        watch: None without neighbours.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        view: View,
        rank: int,
        left: Neighbour | None,
        right: Neighbour | None,
        memory: Memory,
        status: Callable[[], tuple[int, int, str]],
        on_end: Callable[[Neighbour, Connection, P2PTrainError], None],
        on_beat: Callable[[Neighbour], None],
        on_broken: Callable[[], None],
    ) -> None:
        self.broken: asyncio.Future[RingBroken] = asyncio.get_running_loop().create_future()
        self.left, self.right = left, right
        self.watch: Watch | None = None
        self._view, self._rank = view, rank
        self._on_broken = on_broken
        self._farewells: set[asyncio.Task[None]] = set()
        self._verdict: asyncio.TimerHandle | None = None  # a connection ended; its neighbour may still say why
        for neighbour in self.neighbours:
            for bulk in neighbour.bulks:
                bulk.fence = view.generation
                bulk.tune_for_bulk()
        if self.neighbours:
            self.watch = Watch(
                clock=clock,
                generation=view.generation,
                left=left,
                right=right,
                memory=memory,
                status=status,
                on_end=on_end,
                on_silent=self.give_up,
                on_beat=on_beat,
                on_news=self._told,
            )

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Left and right, those that there are."""
        return tuple(neighbour for neighbour in (self.left, self.right) if neighbour is not None)

    def whose(self, connection: Connection) -> Neighbour:
        """The neighbour of one of the connections; in a ring of two each of both is another."""
        return next(neighbour for neighbour in self.neighbours if connection in neighbour.connections)

    def failure(self) -> P2PTrainError:
        """The error of whatever wants more of what is broken: a new one each time, for each grows its own traceback."""
        cause = self.broken.result().cause
        return type(cause)(cause.message, remedy=cause.remedy)

    def close(self, cause: str, reason: str, *, orderly: bool) -> None:
        """End it, without waiting (``wait_closed`` does).

        Args:
            cause: why, for this side. reason: for the neighbours, who are told where this is ``orderly``: what was said
                so far is still sent. Else all connections end at once.
        """
        if self.broken.done():
            return
        self._settle(RingBroken("", ConnectionLost(cause)))
        for neighbour in self.neighbours:
            if orderly:
                self._leave(neighbour, reason)
            else:
                neighbour.abort()

    def follow(self, gone: Neighbour, what: str) -> None:
        """End it because a neighbour has left ``what`` (the ring, the chain), and nothing is under way here any more.

        The others are left in an orderly way: what was sent to them still arrives.
        """
        if self.broken.done():
            return
        me = self._view.members[self._rank].peer_id
        self._settle(RingBroken(gone.peer_id, ConnectionLost(f"lost {gone.title}: it left {what}"), me))
        for neighbour in self.neighbours:
            if neighbour is gone:
                neighbour.abort()
            else:
                self._leave(neighbour, f"{gone.title} has left")

    async def wait_closed(self) -> None:
        """After the end: wait until nothing is left, a second at most."""
        if self.watch is not None:
            await self.watch.wait_stopped()
        await asyncio.gather(*self._farewells)
        for neighbour in self.neighbours:
            for connection in neighbour.connections:
                await connection.closed.wait()

    def lost(self, neighbour: Neighbour, connection: Connection, error: P2PTrainError) -> None:
        """A connection failed. Its neighbour has the time of one beat to say whose fault it is: who ends a session for
        another's death says so on its beats. A process that died ends all connections at once, and the end of its beats
        decides: what it said before that was heard by then.
        """
        beats = self.watch.heartbeat_s if self.watch is not None else 0.0
        if not beats or connection is neighbour.beat or neighbour.leaving or not isinstance(error, ConnectionLost):
            self.give_up(neighbour, error)
        elif self._verdict is None and not self.broken.done():
            loop = asyncio.get_running_loop()
            self._verdict = loop.call_later(beats, self.give_up, neighbour, error)

    def give_up(self, neighbour: Neighbour | None, error: P2PTrainError, news: MemberLost | None = None) -> None:
        """End it because of ``neighbour``, of whom it has ``news``, or of nobody but this member. The first cause
        counts."""
        if self.broken.done():
            return
        me = self._view.members[self._rank].peer_id
        if news is None and neighbour is not None:
            news = MemberLost(neighbour.peer_id, me, shortened(error.message, REASON_CHARS))
            kind = ConnectionLost if isinstance(error, Refused) else type(error)
            error = kind(f"lost {neighbour.title}: {error.message}", remedy=error.remedy)
        elif news is not None and neighbour is not None:
            members = self._view.members
            lost, by = (members[self._view.rank_of(item) or 0].name for item in (news.peer_id, news.beside))
            error = ConnectionLost(f"{by} lost {lost}: {error.message}", remedy=error.remedy)
        self._settle(RingBroken(news.peer_id, error, news.beside) if news else RingBroken("", error))
        for other in self.neighbours:
            tell = news is not None and other is not neighbour and other.peer_id != news.peer_id
            if tell and news is not None and other.say(other.beat, news, self._view.generation):
                self._part(other.beat)
                for bulk in other.bulks:
                    bulk.abort()
            else:
                other.abort()

    def lost_elsewhere(self, broken: RingBroken) -> bool:
        """End it with the news of whom another ring of the same view lost; whether it knows the one and who saw it."""
        if self._view.rank_of(broken.suspect) is None or self._view.rank_of(broken.beside) is None:
            return False
        news = MemberLost(broken.suspect, broken.beside, shortened(broken.cause.message, REASON_CHARS))
        self.give_up(None, broken.cause, news)
        return True

    def _told(self, neighbour: Neighbour, news: MemberLost) -> None:
        """A neighbour says who was lost. News of this member itself, or of no member, only tell that it goes."""
        rank = self._view.rank_of(news.peer_id)
        if rank is None or rank == self._rank or self._view.rank_of(news.beside) is None:
            self.give_up(neighbour, ConnectionLost(f"it ended the session: {shortened(news.reason, REASON_CHARS)}"))
        else:
            self.give_up(neighbour, ConnectionLost(shortened(news.reason, REASON_CHARS)), news)

    def _leave(self, neighbour: Neighbour, reason: str) -> None:
        for connection in neighbour.connections:
            if neighbour.say(connection, Leave(shortened(reason, REASON_CHARS)), self._view.generation):
                self._part(connection)
            else:
                connection.abort()

    def _part(self, connection: Connection) -> None:
        """Close a connection once what was said on it is on its way."""
        farewell = asyncio.get_running_loop().create_task(connection.close())
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    def _settle(self, broken: RingBroken) -> None:
        self.broken.set_result(broken)
        if self._verdict is not None:
            self._verdict.cancel()
        self._on_broken()
        if self.watch is not None:
            self.watch.stop()
