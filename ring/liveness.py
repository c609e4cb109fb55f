"""Are the neighbours alive? Heartbeats on connections of their own, and an ear on every connection's end.

The left one of two neighbours beats, the right one acknowledges, and each counts what it hears as a sign of life; so
does any payload. All of it happens on the event loop, whatever the compute thread does. What a loss means is the
session's affair.

Bad news travels on the beats: who ends a session because of a member tells the other neighbour which one it was, and
who saw it (``MemberLost``), before its own connections end. So all round the ring the one that is lost is named, not
the messenger.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NetworkError, P2PTrainError, ProtocolError
from p2ptrain.core.world import Clock
from ring.detector import FailureDetector, Memory, Pace
from wire.connection import Connection
from wire.heal_messages import MemberLost
from wire.job_messages import MemberRecord
from wire.messages import Heartbeat, HeartbeatAck, Leave, Message, Refuse

AT_WORK = "between operations"
"""The state, in a beat, of a member that waits for nobody."""
REASON_CHARS = 200
_LISTEN_S = 3600.0  # a quiet connection is no fault in itself: silence is judged by the detector


class Neighbour:
    """One neighbour and the connections shared with it.

    Args:
        role: what it is to this member, for people: ``"left neighbour"``.

    Attributes:
        bulks: of payloads, one a stream. beat: of heartbeats.
        leaving: it has said that it leaves; the end of its connections is no accident.
        pace: how it gets on, as its beats say; None for the right neighbour, which does not.
    """

    pace: Pace | None = None

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

    def say(self, connection: Connection, message: Message, generation: int) -> bool:
        """Send ``message``; False where the connection is gone, which its listener learns too."""
        try:
            connection.send(message, generation=generation)
        except NetworkError:
            return False
        return True

    def abort(self) -> None:
        for connection in self.connections:
            connection.abort()


class Watch:
    """Listens to both neighbours, and beats. Ends with ``stop``.

    Args:
        left, right: who beats to this member, and to whom it beats; None where there is none.
        memory: what is known of the neighbours from earlier views.
        status: this member's progress and what it is doing, for the beats.
        on_end: called when a connection of a neighbour has ended, once each.
        on_silent: called when a neighbour counts as dead though its connections are open.
        on_beat: called with every beat of the left neighbour: its pace may say that it is stuck.
        on_news: called when a neighbour says who was lost.

    Attributes:
        rtt_ms: round trip to the right neighbour, None before the first acknowledgement.
        heartbeat_s: between two beats, 0 before the first.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        generation: int,
        left: Neighbour | None,
        right: Neighbour | None,
        memory: Memory,
        status: Callable[[], tuple[int, int, str]],
        on_end: Callable[[Neighbour, Connection, P2PTrainError], None],
        on_silent: Callable[[Neighbour, P2PTrainError], None],
        on_beat: Callable[[Neighbour], None],
        on_news: Callable[[Neighbour, MemberLost], None],
    ) -> None:
        self.rtt_ms: float | None = None
        self.heartbeat_s = 0.0
        self._clock = clock
        self._generation = generation
        self._left, self._right = left, right
        self._neighbours = [neighbour for neighbour in (left, right) if neighbour is not None]
        self._status = status
        self._on_end, self._on_silent = on_end, on_silent
        self._on_beat, self._on_news = on_beat, on_news
        self._memory = memory
        self._detectors: dict[Neighbour, FailureDetector] = {}
        self._beat_seq, self._beat_sent_at = 0, 0.0
        self._planned = math.inf  # when this loop means to wake next
        self._tasks: set[asyncio.Task[None]] = set()
        for neighbour in self._neighbours:
            for connection in neighbour.connections:
                self._start(self._listen(neighbour, connection))

    def begin_beats(self, heartbeat_s: float, death_s: float) -> None:
        """From now on silence counts: called when every member is known to be there."""
        self.heartbeat_s = heartbeat_s
        for neighbour in self._neighbours:
            rhythm, pace = self._memory.of(neighbour.peer_id)
            self._detectors[neighbour] = FailureDetector(
                heartbeat_s=heartbeat_s, death_s=death_s, now=self._clock.now(), rhythm=rhythm
            )
            if neighbour is self._left:
                pace.begin()
                neighbour.pace = pace
        self._start(self._pulse(heartbeat_s))

    def stop(self) -> None:
        """Listen and beat no more."""
        for task in self._tasks:
            task.cancel()

    async def wait_stopped(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -------------------------------------------------------------------------------------------------------- listening

    async def _listen(self, neighbour: Neighbour, connection: Connection) -> None:
        try:
            while True:
                try:
                    received = await connection.receive(timeout_s=_LISTEN_S)
                except DeadlineExceeded:
                    if connection.close_cause is not None:
                        raise
                    continue
                self._heard(neighbour, connection, received.message)
        except P2PTrainError as error:
            self._on_end(neighbour, connection, error)

    def _heard(self, neighbour: Neighbour, connection: Connection, message: Message) -> None:
        match message:
            case Leave():
                neighbour.leaving = True
            case Refuse(message=text):
                raise ConnectionLost(f"it refuses to go on: {text}")
            case Heartbeat(seq=seq, progress=progress, state=state) if (
                self._left is not None and connection is self._left.beat
            ):
                connection.send(HeartbeatAck(seq), generation=self._generation)
                self._beat_came(neighbour)
                if neighbour.pace is not None:
                    neighbour.pace.beat(self._clock.now(), progress, at_work=state == AT_WORK)
                    self._on_beat(neighbour)
            case HeartbeatAck(seq=seq) if self._right is not None and connection is self._right.beat:
                self._beat_came(neighbour)
                if seq == self._beat_seq:
                    self.rtt_ms = (self._clock.now() - self._beat_sent_at) * 1e3
            case MemberLost() if connection is neighbour.beat:
                self._on_news(neighbour, message)
            case _:
                raise ProtocolError(f"it sent {type(message).__name__}, which has no place in a ring")

    def _beat_came(self, neighbour: Neighbour) -> None:
        if detector := self._detectors.get(neighbour):
            self._doubt_itself(self._clock.now())
            detector.beat(neighbour.beat.last_heard)

    # ---------------------------------------------------------------------------------------------------------- beating

    async def _pulse(self, heartbeat_s: float) -> None:
        """Beat to the right, and judge both neighbours' silence at the moment when it is up."""
        now = due = self._clock.now()
        late_s = 0.0
        while True:
            if now >= due:
                self._beat(now, late_s)
                due = now + heartbeat_s
            self._planned = min(due, *(detector.next_deadline() for detector in self._detectors.values()))
            await asyncio.sleep(max(self._planned - now, 0.0))
            now = self._clock.now()
            late_s = self._doubt_itself(now)
            for neighbour, detector in self._detectors.items():
                detector.heard(neighbour.last_heard)
                if detector.dead(now):
                    silence = f"it gave no sign of life for {detector.silent_for(now):.1f} s"
                    self._on_silent(neighbour, DeadlineExceeded(silence))

    def _doubt_itself(self, now: float) -> float:
        """By how much this loop is late with what it planned last; each lateness counts once."""
        late_s, self._planned = max(now - self._planned, 0.0), max(now, self._planned)
        for detector in self._detectors.values():
            detector.loop_late(late_s)
        return late_s

    def _beat(self, now: float, late_s: float) -> None:
        self._beat_seq, self._beat_sent_at = self._beat_seq + 1, now
        progress, step, state = self._status()
        beat = Heartbeat(self._beat_seq, progress, step, state, loop_lag_ms=late_s * 1e3)
        if self._right is not None:
            self._right.say(self._right.beat, beat, self._generation)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
