"""The control link of a worker to its seed: registers, beats, and finds the seed again after either side was away.

Where several seeds are known (``roles.known_seeds``), it tries them in turn, beginning with the one that led last. A
standby refuses it and says who leads; a seed that leads in a lower term than another that was met before is left alone.

Training never waits for this link. What must not be lost while it is down (metrics of committed steps, checkpoints,
events) is kept, bounded, and sent when the link is back; where the ring stands is reported anew by the owner
(``on_up``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import World
from roles.known_seeds import Known
from wire.client import Calls
from wire.connection import Connection
from wire.handshake import RefusalCode, dial
from wire.job_messages import CheckpointSaved, StepMetrics
from wire.messages import EventNotice, Heartbeat, HeartbeatAck, Hello, Leave, Message, Response, Seeds, Welcome

DIAL_TIMEOUT_S = 10.0  # dial, handshake (5 s) and the seed's dial-back (3 s) fit
FIRST_DELAY_S = 0.1
MAX_DELAY_S = (1.0, 5.0)
"""Between two tries: a twentieth of how long the seed has been away, within these, so that whoever waits for it to be
back waits hardly longer than it took. A try that is refused costs a packet; half a thousand at once, a second."""
KEPT_MESSAGES = 20_000
"""Metrics rows kept while the seed is away: about half a day at two seconds a step, 10 MB at most."""

RESENT_MESSAGES = 512
"""The newest ones that were sent are sent again after a loss of the link: they may have died in a socket's buffer. The
seed keeps one of each."""
RESENT_SAVES = 16
"""Of those, checkpoints: the seed flushes each to its disk, and a whole run's would keep that busy for long. Older ones
are not on this worker's disk any more."""
TOLD_EVERY_S = 30.0

# What no other try can mend: the two sides do not speak the same protocol, or the seed wants us no more.
_FINAL = frozenset({RefusalCode.VERSION, RefusalCode.TICKET_REVOKED, "evicted"})


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a beat says of this worker."""

    progress: int
    step: int
    state: str
    stats: dict[str, float]


class SeedLink:
    """One worker's link to the seed that leads.

    Args:
        known: the seeds, and the highest term that was met. ``plain``: of a cluster without certificates.
        given: those that the person named: there another cluster may lead from now on, elsewhere it is a stranger.
        on_known: called when more is known of them: to be kept.
        hello: makes the greeting of the moment (it names the view that runs).
        pulse: makes the next beat's content.
        on_message: called with every message that is not about beats.
        on_up, on_down: called when the link is there, and when it is lost.
    """

    def __init__(
        self,
        *,
        world: World,
        known: Known,
        given: Collection[tuple[str, int]] = (),
        plain: bool,
        hello: Callable[[], Hello],
        pulse: Callable[[], Pulse],
        on_message: Callable[[Message], None],
        on_up: Callable[[Welcome], None],
        on_down: Callable[[P2PTrainError], None],
        on_known: Callable[[Known], None],
    ) -> None:
        self._world = world
        self._known, self._given, self._plain, self._on_known = known, frozenset(given), plain, on_known
        self._hello, self._pulse = hello, pulse
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._connection: Connection | None = None
        self._kept: deque[Message] = deque(maxlen=KEPT_MESSAGES)
        self._recent: deque[Message] = deque(maxlen=RESENT_MESSAGES)
        self.rtt_ms: float | None = None
        self._leaving = self._waits_for_a_leader = False
        self._sent_at: dict[int, float] = {}
        self._calls = Calls()

    @property
    def host(self) -> str:
        """Of the seed that leads, or led last, as it was dialled."""
        return self._known.seeds[0][0]

    @property
    def up(self) -> bool:
        return self._connection is not None

    def send(self, message: Message) -> None:
        """Say it to the seed: now, or, for what must not be lost, when it is back."""
        if self._connection is not None:
            try:
                self._connection.send(message)
                if isinstance(message, StepMetrics | CheckpointSaved):
                    self._recent.append(message)
                return
            except ConnectionLost:
                pass  # the reader sees it too, and reconnects
        if isinstance(message, StepMetrics | CheckpointSaved | EventNotice):
            self._kept.append(message)

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """A request to the seed. Raises ``Refused``, ``DeadlineExceeded`` or ``ConnectionLost``."""
        if self._connection is None:
            raise ConnectionLost("there is no connection to the seed")
        return await self._calls.ask(self._connection.send, method, params, whom="the seed", timeout_s=timeout_s)

    async def run(self) -> None:
        """Stay connected until ``leave``, or cancelled.

        Raises:
            NetworkError, Refused: the *first* connection could not be made, or the seed speaks another protocol now.
                Later losses and refusals are only told to ``on_down``: a worker that trains does not end for them.
        """
        try:
            connection, welcome = await self._dial()
        except P2PTrainError as refusal:
            if not self._waits_for_a_leader:
                raise
            self._on_down(refusal)
            connection, welcome = await self._find_again()
        while True:
            problem = await self._live(connection, welcome)
            if self._leaving:
                return
            self._on_down(problem)
            connection, welcome = await self._find_again()

    async def leave(self, reason: str) -> None:
        """Say goodbye and close."""
        self._leaving = True
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.send(Leave(reason))
            except ConnectionLost:
                return
            await connection.close(timeout_s=0.5)

    # -------------------------------------------------------------------------------------------------------- helpers

    async def _dial(self) -> tuple[Connection, Welcome]:
        """The first seed that lets this worker in. Raises what the first that was asked had against it, or what is
        final."""
        problems: list[P2PTrainError] = []
        tried: set[tuple[str, int]] = set()
        self._waits_for_a_leader = False
        while places := [place for place in self._known.seeds if place not in tried]:
            host, port = place = places[0]
            tried.add(place)
            hello = replace(self._hello(), cluster=self._known.cluster, term=self._known.term)
            try:
                connection, welcome = await dial(
                    self._world.network, host, port, hello, timeout_s=DIAL_TIMEOUT_S, expect_role="seed"
                )
            except P2PTrainError as problem:
                problems.append(problem)
                if isinstance(problem, Refused):
                    if problem.code in _FINAL:
                        raise
                    if problem.code in (RefusalCode.STANDBY, RefusalCode.STALE_TERM):
                        self._waits_for_a_leader = True
                        self._known = self._known.hinted(problem.elsewhere, host, plain=self._plain)
                continue
            if self._known.stale(welcome.cluster_id, welcome.term):
                connection.abort()
                text = f"{host}:{port} leads in term {welcome.term}, and term {self._known.term} has begun"
                problems.append(Refused(RefusalCode.STALE_TERM, text, remedy="start that seed as a standby"))
                self._waits_for_a_leader = True
                continue
            if self._known.cluster not in ("", welcome.cluster_id) and place not in self._given:
                connection.abort()
                problems.append(Refused(RefusalCode.WRONG_JOB, f"a seed of another cluster is at {host}:{port} now"))
                continue
            try:
                self._met(place, welcome.cluster_id, welcome.term, welcome.seeds)
            except ProtocolError as problem:
                connection.abort(problem)
                problems.append(problem)
                continue
            return connection, welcome
        raise next((item for item in problems if not _of_a_standby(item)), problems[0])

    def _met(self, place: tuple[str, int], cluster: str, term: int, seeds: list[str]) -> None:
        before, self._known = self._known, self._known.met(place, cluster, term, seeds, plain=self._plain)
        if self._known != before:
            self._on_known(self._known)

    async def _find_again(self) -> tuple[Connection, Welcome]:
        clock = self._world.clock
        began = clock.now()
        delay_s, tell_at = FIRST_DELAY_S, began
        while True:
            await asyncio.sleep(delay_s * (0.5 + self._world.random.random()))
            try:
                return await self._dial()
            except P2PTrainError as problem:
                if isinstance(problem, Refused) and problem.code in _FINAL:
                    raise
                # That it is not back yet was told; why it refuses was not.
                if isinstance(problem, Refused) and not _of_a_standby(problem) and clock.now() >= tell_at:
                    tell_at = clock.now() + TOLD_EVERY_S
                    self._on_down(problem)
            least_s, most_s = MAX_DELAY_S
            delay_s = min(2 * delay_s, max(least_s, min((clock.now() - began) / 20, most_s)))

    async def _live(self, connection: Connection, welcome: Welcome) -> P2PTrainError:
        """Serve one connection until it ends; the reason it ended is returned."""
        self._connection = connection
        self._sent_at.clear()
        beats = asyncio.create_task(self._beat(connection, welcome.heartbeat_s), name="beats")
        try:
            self._on_up(welcome)
            await self._catch_up(connection, welcome.death_s)
            while True:
                received = await connection.receive(timeout_s=welcome.death_s)
                if isinstance(received.message, HeartbeatAck):
                    self._acknowledged(received.message)
                elif isinstance(received.message, Response):
                    self._calls.answered(received.message)
                elif isinstance(received.message, Seeds):
                    known = self._known
                    if not known.stale(known.cluster, received.message.term):
                        self._met(known.seeds[0], known.cluster, received.message.term, received.message.seeds)
                else:
                    self._on_message(received.message)
        except DeadlineExceeded:
            return DeadlineExceeded(f"the seed was silent for {welcome.death_s:.0f} s")
        except P2PTrainError as problem:  # where it speaks nonsense, too: a fresh connection may not
            return problem
        finally:
            self._connection = None
            self._calls.lost("the seed")
            beats.cancel()
            connection.abort()

    async def _catch_up(self, connection: Connection, timeout_s: float) -> None:
        """Send what the seed may have missed."""
        missed = _without_old_saves([*self._recent, *self._kept])
        self._recent.clear()
        self._kept.clear()
        self._kept.extend(missed)
        while self._kept:
            message = self._kept[0]
            connection.send(message)
            if isinstance(message, StepMetrics | CheckpointSaved):
                self._recent.append(message)
            self._kept.popleft()
            if len(self._kept) % 256 == 0:
                await connection.flush(timeout_s=timeout_s)

    async def _beat(self, connection: Connection, interval_s: float) -> None:
        clock = self._world.clock
        due, seq = clock.now(), 0
        while True:
            lag_ms = max(0.0, clock.now() - due) * 1e3
            pulse = self._pulse()
            seq += 1
            self._sent_at[seq] = clock.now()
            try:
                connection.send(Heartbeat(seq, pulse.progress, pulse.step, pulse.state, lag_ms, pulse.stats))
            except ConnectionLost:
                return
            due = clock.now() + interval_s
            await asyncio.sleep(interval_s)

    def _acknowledged(self, ack: HeartbeatAck) -> None:
        sent_at = self._sent_at.pop(ack.seq, None)
        for seq in [seq for seq in self._sent_at if seq < ack.seq]:
            del self._sent_at[seq]
        if sent_at is not None:
            sample_ms = (self._world.clock.now() - sent_at) * 1e3
            self.rtt_ms = sample_ms if self.rtt_ms is None else 0.8 * self.rtt_ms + 0.2 * sample_ms


def _without_old_saves(messages: list[Message]) -> list[Message]:
    saves = [place for place, message in enumerate(messages) if isinstance(message, CheckpointSaved)]
    old = frozenset(saves[:-RESENT_SAVES])
    return [message for place, message in enumerate(messages) if place not in old]


def _of_a_standby(problem: P2PTrainError) -> bool:
    return isinstance(problem, Refused) and problem.code == RefusalCode.STANDBY
