"""A member's link to its seed: it registers, sends heartbeats, and reconnects.

The member may know several addresses, so it finds a seed that was restored elsewhere. It stores the highest term that
it has met in each cluster, and refuses a seed of a lower term.

Training never waits for this link. While the link is down, metrics of committed steps, checkpoint reports and events
are kept in a bounded queue, and sent when the link is back. The owner then reports the state of the ring (``on_up``).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import ConnectionLost, NetworkError, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.ids import is_id
from p2ptrain.core.world import World
from ring.detector import FailureDetector
from roles.line import receive_in_time
from wire.address import format_address
from wire.client import PendingCalls
from wire.connection import Connection
from wire.handshake import dial
from wire.job_messages import CheckpointSaved, StepMetrics
from wire.messages import (
    MAX_TERM,
    EventNotice,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    Message,
    RefusalCode,
    Response,
    Welcome,
)

NOTICE_EVERY_S = 30.0
DIAL_S = 25.0
"""Enough for the dial and the handshake (5 s each), and for the seed's dial-back (10 s)."""
MOST_DELAY_S = 1.0
"""Between two attempts to reach the seed; half to one and a half times as long."""
TERMS_FILE = "terms.json"
MAX_CLUSTERS = 8

Address = tuple[str, int]
Notify = Callable[[str, str, str], None]
"""(level, kind, text)"""
RetryTimeS = Callable[[P2PTrainError], float]
"""The error of an attempt to reach the seed → for how many seconds to try again; 0: the error is raised."""

# Refusals that another try cannot change, and those that it soon may.
_FINAL = frozenset({RefusalCode.VERSION, RefusalCode.TICKET_REVOKED, RefusalCode.EVICTED})
_PASSING = frozenset({RefusalCode.BUSY, RefusalCode.SHUTTING_DOWN, RefusalCode.TOO_SLOW})

T = TypeVar("T")


def is_transient(problem: P2PTrainError) -> bool:
    """Whether a seed that is not there, busy or restarting may soon accept a newcomer. Other refusals stay."""
    return isinstance(problem, NetworkError) or problem.code in _PASSING


def no_retry(problem: P2PTrainError) -> float:
    return 0.0


async def until_reached(attempt: Callable[[], Awaitable[T]], retry_time_s: RetryTimeS, random: Random) -> T:
    """Repeat ``attempt`` while ``retry_time_s`` of its error is positive. Raises the last error."""
    delay_s = 0.1
    while True:
        try:
            return await attempt()
        except P2PTrainError as problem:
            if not (left_s := retry_time_s(problem)) > 0:
                raise
        await asyncio.sleep(min(delay_s * (0.5 + random.random()), left_s))
        # A refused try costs one packet, and 500 members that connect at once take the seed a second.
        delay_s = min(2 * delay_s, MOST_DELAY_S)


class KnownSeeds:
    """The addresses of a cluster's seed, and which of them may lead.

    Args:
        addresses: tried in turn, beginning with the one that accepted this member last.
        terms: cluster → the highest term that was met; changed in place.
        on_term: called when ``terms`` changed.
    """

    def __init__(self, addresses: Sequence[Address], terms: dict[str, int], on_term: Callable[[], None]) -> None:
        self.addresses = list(dict.fromkeys(addresses))
        self._terms, self._on_term = terms, on_term
        self._cluster = ""

    def complete(self, hello: Hello) -> Hello:
        """Add the cluster and the term that this member knows."""
        return replace(hello, cluster=self._cluster, term=self._terms.get(self._cluster, 0))

    def accept(self, address: Address, welcome: Welcome) -> bool:
        """Whether the seed at ``address`` may lead: no later one was met. It is then the first to be tried."""
        before = self._terms.get(welcome.cluster_id)
        if not (before or 0) <= welcome.term < MAX_TERM:
            return False
        self.addresses = list(dict.fromkeys([address, *self.addresses]))
        self._cluster = welcome.cluster_id
        self._terms.pop(welcome.cluster_id, None)
        self._terms[welcome.cluster_id] = welcome.term  # the dict's order is from oldest to newest
        if before != welcome.term:
            self._on_term()
        return True


class Outbox:
    """Messages that the seed may lack: those sent without a connection, and the newest sent over the last one, which
    may have been lost in a socket's buffer. The seed ignores repeats."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # About half a day at two seconds a step, 10 MB at most. Each with the time of the clock.
        self._unsent: deque[tuple[float, Message]] = deque(maxlen=20_000)
        self._recent: deque[Message] = deque(maxlen=512)

    def note_sent(self, message: Message) -> None:
        if isinstance(message, StepMetrics | CheckpointSaved):
            self._recent.append(message)

    def store(self, message: Message) -> None:
        """Store metrics, checkpoints and events until there is a connection. Other messages are lost."""
        if isinstance(message, StepMetrics | CheckpointSaved | EventNotice):
            self._unsent.append((self._now(), message))

    async def send_all(self, connection: Connection, timeout_s: float) -> None:
        now = self._now()
        missed = [*((now, message) for message in self._recent), *self._unsent]
        self._recent.clear()
        self._unsent.clear()
        self._unsent.extend(missed)
        while self._unsent:
            stored_at, message = self._unsent[0]
            if isinstance(message, EventNotice):
                message = replace(message, age_s=now - stored_at)
            connection.send(message)
            self.note_sent(message)
            self._unsent.popleft()
            if len(self._unsent) % 256 == 0:
                await connection.flush(timeout_s=timeout_s)


class SeedLink:
    """One member's link to its seed.

    Args:
        retry_time_s: for a first connection.
        hello, pulse: make the current ``Hello`` (it names the running view), and a ``Heartbeat`` without its number.
        on_up, on_down: called when the link is up, and when it is lost.
    """

    def __init__(
        self,
        *,
        world: World,
        seeds: KnownSeeds,
        retry_time_s: RetryTimeS,
        hello: Callable[[], Hello],
        pulse: Callable[[], Heartbeat],
        on_message: Callable[[Message], None],
        on_up: Callable[[Welcome], None],
        on_down: Callable[[P2PTrainError], None],
    ) -> None:
        self._world, self._seeds, self._retry_time_s = world, seeds, retry_time_s
        self._outbox = Outbox(world.clock.now)
        self._hello, self._pulse = hello, pulse
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._connection: Connection | None = None
        self.rtt_ms: float | None = None
        self._leaving = False
        self._beat_at = (0, 0.0)  # number of the newest beat, and when it was sent
        self._calls = PendingCalls()

    @property
    def address(self) -> Address:
        """Where the current or last seed was dialled."""
        return self._seeds.addresses[0]

    @property
    def host(self) -> str:
        return self.address[0]

    @property
    def up(self) -> bool:
        return self._connection is not None

    def send(self, message: Message) -> None:
        """Send a message to the seed. While the link is down, metrics, checkpoints and events wait; others are lost."""
        passed: Message | None = self._world.probe.alter("message-to-seed", message)
        if passed is None:
            return
        if self._connection is not None:
            try:
                self._connection.send(passed)
                self._outbox.note_sent(passed)
                return
            except ConnectionLost:
                pass  # the reader sees it too, and reconnects
        self._outbox.store(passed)

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request to the seed. Raises ``Refused``, ``DeadlineExceeded`` or ``ConnectionLost``."""
        if self._connection is None:
            raise ConnectionLost("there is no connection to the seed")
        return await self._calls.ask(self._connection.send, method, params, whom="the seed", timeout_s=timeout_s)

    async def run(self) -> None:
        """Stay connected until ``leave`` is called, or cancelled.

        Raises:
            NetworkError, Refused: the *first* connection failed, in ``retry_time_s``, or the seed refuses for good.
                Other later losses and refusals are only reported to ``on_down``, so that a worker trains on.
        """
        connection, welcome = await until_reached(self._dial, self._retry_time_s, self._world.random)
        while True:
            problem = await self._live(connection, welcome)
            if self._leaving:
                return
            if problem.code in _FINAL:
                raise problem
            self._on_down(problem)
            connection, welcome = await self._find_again()

    async def leave(self, reason: str) -> None:
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
        """Connect to the first seed that accepts this member. Raises a final refusal, or else the first problem."""
        problems: list[P2PTrainError] = []
        for place in list(self._seeds.addresses):
            hello = self._seeds.complete(self._hello())
            try:
                network = self._world.network
                connection, welcome = await dial(network, *place, hello, timeout_s=DIAL_S, expect_role="seed")
            except P2PTrainError as problem:
                if problem.code in _FINAL:
                    raise
                problems.append(problem)
                continue
            if not 0 < welcome.heartbeat_s <= welcome.death_s:
                problems.append(ProtocolError(f"the seed at {format_address(*place)} sent invalid heartbeat times"))
                connection.abort(problems[-1])
                continue
            if self._seeds.accept(place, welcome):
                return connection, welcome
            connection.abort()
            text = f"a seed that was restored from a backup has replaced the one at {format_address(*place)}"
            problems.append(Refused(RefusalCode.STALE_TERM, text, remedy="join the restored seed"))
        raise problems[0]

    async def _find_again(self) -> tuple[Connection, Welcome]:
        clock, random = self._world.clock, self._world.random
        tell_at = clock.now()

        def retry_time_s(problem: P2PTrainError) -> float:
            nonlocal tell_at
            if problem.code in _FINAL:
                return 0.0
            # The loss of the seed was reported already; this refusal was not.
            if isinstance(problem, Refused) and clock.now() >= tell_at:
                tell_at = clock.now() + NOTICE_EVERY_S
                self._on_down(problem)
            return math.inf

        await asyncio.sleep(0.05 + 0.1 * random.random())  # not all members at once
        return await until_reached(self._dial, retry_time_s, random)

    async def _live(self, connection: Connection, welcome: Welcome) -> P2PTrainError:
        self._connection = connection
        detector = FailureDetector(heartbeat_s=welcome.heartbeat_s, death_s=welcome.death_s)
        beats = asyncio.create_task(self._beat(connection, welcome.heartbeat_s), name="beats")
        try:
            self._on_up(welcome)
            await self._outbox.send_all(connection, welcome.death_s)
            while True:
                received = await receive_in_time(connection, detector, "the seed")
                if isinstance(received.message, HeartbeatAck):
                    seq, sent_at = self._beat_at
                    if seq == received.message.seq:
                        sample_ms = (self._world.clock.now() - sent_at) * 1e3
                        self.rtt_ms = sample_ms if self.rtt_ms is None else 0.8 * self.rtt_ms + 0.2 * sample_ms
                elif isinstance(received.message, Response):
                    self._calls.resolve(received.message)
                else:
                    self._on_message(received.message)
        except P2PTrainError as problem:  # protocol errors too: a new connection may work
            return problem
        finally:
            self._connection = None
            self._calls.fail_all("the seed")
            beats.cancel()
            connection.abort()

    async def _beat(self, connection: Connection, interval_s: float) -> None:
        for seq in count(1):
            pulse = replace(self._pulse(), seq=seq)
            self._beat_at = seq, self._world.clock.now()
            try:
                connection.send(pulse)
            except ConnectionLost:
                return
            await asyncio.sleep(interval_s)


def load_terms(disk: Disk, directory: Path) -> dict[str, int]:
    """The stored terms: cluster → the highest term that was met. Raises ``StorageError``."""
    if TERMS_FILE not in disk.list_dir(directory):
        return {}
    try:
        found = json.loads(disk.read(directory / TERMS_FILE, max_bytes=MAX_CLUSTERS * 64))
        return {name: term for name, term in found.items() if is_id(name) and 0 <= int(term) < MAX_TERM}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}  # damaged: the next connection writes it again


def store_terms(disk: Disk, directory: Path, terms: dict[str, int]) -> None:
    """Store the terms of the clusters met last. Raises ``StorageError``."""
    newest = dict(list(terms.items())[-MAX_CLUSTERS:])
    write_atomic(disk, directory / TERMS_FILE, json.dumps(newest).encode())
