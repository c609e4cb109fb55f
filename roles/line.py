"""Receiving from a peer whose silence shows that it is dead: one that sends heartbeats, or keep-alives (``Line``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError
from ring.detector import FailureDetector
from wire.connection import Connection, Received
from wire.messages import LONGEST_SILENCE_S, KeepAlive, Message

BEATS = 4
"""Number of keep-alives within the permitted silence."""
QUIET_S = 10.0
"""Default of the permitted silence."""
DIAL_S = 5.0
BEATS_PER_S, MOST_BEATS = 100.0, 4096
"""Limits on received keep-alives: the average rate, and the burst after a while in which this side read nothing."""

T = TypeVar("T")


async def received_in_time(connection: Connection, detector: FailureDetector, who: str) -> Received:
    """Receive the next message of a peer that the detector watches.

    Raises:
        DeadlineExceeded: the peer is dead, as the detector judges; the connection stays open.
        ConnectionLost, ProtocolError, Refused: as ``Connection.receive``.
    """
    while True:
        wait_s = detector.wait_s
        try:
            return await connection.receive(timeout_s=wait_s)
        except DeadlineExceeded:
            if connection.close_cause is not None:
                raise connection.close_cause.with_traceback(None) from None
        if detector.waited(wait_s, asyncio.get_running_loop().time(), connection.last_heard):
            raise DeadlineExceeded(f"{who} was silent for {detector.silent_s:.1f} s")


async def unless_closed(connection: Connection, waiting: Awaitable[object], timeout_s: float | None = None) -> bool:
    """Await something until the connection is closed, or the time is over. Returns whether it came."""
    futures = [asyncio.ensure_future(waiting), asyncio.ensure_future(connection.closed.wait())]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return futures[0].done()
    finally:
        for each in futures:
            each.cancel()


class Line:
    """One connection that is closed if the other side is silent for too long.

    Args:
        silence_s: the permitted silence of the other side. It may be changed at any time.
        beat_s: upper bound of the time between this side's keep-alives; ``silence_s / BEATS`` may be shorter.
    """

    def __init__(self, connection: Connection, silence_s: float = QUIET_S, *, beat_s: float = QUIET_S) -> None:
        self.connection = connection
        self.silence_s = silence_s
        self._beat_s = beat_s
        self._now = asyncio.get_running_loop().time
        self._waiting: set[asyncio.Future[None]] = set()
        self._beats, self._beats_at = 0.0, self._now()

    @property
    def _interval_s(self) -> float:
        return min(self.silence_s / BEATS, self._beat_s)

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Send keep-alives inside the block. Afterwards the connection is closed, and writes to no buffer any more."""
        tasks = [asyncio.create_task(self._beat(), name="beat"), asyncio.create_task(self._watch(), name="watch")]
        try:
            yield
        except ProtocolError as problem:
            self.connection.abort(problem)  # tells the other side the reason
            raise
        finally:
            self.connection.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._give_up_waiting()

    async def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the other side closes. Between two iterations nothing is read, and silence is not
        checked.

        Raises:
            DeadlineExceeded: the other side was silent for too long; the connection is closed.
            ProtocolError, Refused: the connection ended for this cause.
        """
        while True:
            try:
                message = await self.receive()
            except ConnectionLost:
                return
            yield message

    async def receive(self) -> Message:
        """The next message that is not a keep-alive. Raises as ``messages``, and ``ConnectionLost``."""
        return (await self.frame()).message

    async def run(self, take: Callable[[Received], None]) -> P2PTrainError:
        """Pass what comes to ``take`` until the connection ends, or ``take`` raises. Returns the cause."""
        try:
            async with self.alive():
                while True:
                    take(await self.frame())
        except P2PTrainError as cause:
            return cause

    async def frame(self) -> Received:
        detector = self._detector()
        while True:
            wait_s = detector.wait_s
            try:
                received = await self.connection.receive(timeout_s=wait_s)
            except DeadlineExceeded:
                if self.connection.close_cause is not None:  # the connection ended, so this is its cause
                    raise
                self._judge(detector, wait_s)
                continue
            if not isinstance(received.message, KeepAlive):
                return received
            self._count_beat()

    def _count_beat(self) -> None:
        now = self._now()
        self._beats, self._beats_at = max(0.0, self._beats - BEATS_PER_S * (now - self._beats_at)) + 1, now
        if self._beats > MOST_BEATS:
            raise ProtocolError(f"the peer sent over {MOST_BEATS} keep-alives and little other data")

    async def sent(self) -> None:
        """Wait until the kernel has taken all sent data, as long as it makes progress. Raises as ``flush``."""
        while True:
            unsent_bytes = self.connection.unsent_bytes
            try:
                return await self.connection.flush(timeout_s=self.silence_s)
            except DeadlineExceeded:
                if self.connection.unsent_bytes >= unsent_bytes or self.connection.close_cause is not None:
                    raise

    async def bulk(self, size_bytes: int, *, stream: int) -> bytearray:
        """Receive an announced bulk frame into a new buffer. The caller has checked ``size_bytes``.

        Raises:
            DeadlineExceeded: nothing came for too long; the connection is closed.
            ConnectionLost, ProtocolError: the connection ended.
        """
        data = bytearray(size_bytes)
        await self.landed(self.post(memoryview(data), stream=stream))
        return data

    def post(self, into: memoryview, *, stream: int) -> asyncio.Future[None]:
        arrived: asyncio.Future[None] = self.pending()
        self.connection.post(into, generation=0, stream=stream, done=lambda: _done(arrived))
        return arrived

    def pending(self) -> asyncio.Future[Any]:
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        if self.connection.closed.is_set():  # ``_watch`` has run already
            self._give_up_waiting()
        return waiting

    async def landed(self, waiting: asyncio.Future[T]) -> T:
        """Await a ``pending`` future. Raises as ``bulk``."""
        began, detector = self._now(), self._detector()
        while not waiting.done():
            wait_s = detector.wait_s
            await asyncio.wait([waiting], timeout=wait_s)
            if not waiting.done():
                self._judge(detector, wait_s)
                if self._now() - began > LONGEST_SILENCE_S:
                    problem = DeadlineExceeded(f"the awaited data did not arrive within {LONGEST_SILENCE_S:g} s")
                    self.connection.abort(problem)
                    raise problem
        return waiting.result()

    def _detector(self) -> FailureDetector:
        return FailureDetector(heartbeat_s=self._interval_s, death_s=self.silence_s)

    def _judge(self, detector: FailureDetector, wait_s: float) -> None:
        """Raises ``DeadlineExceeded`` if the other side was silent for too long."""
        detector.heartbeat_s, detector.death_s = self._interval_s, self.silence_s
        if detector.waited(wait_s, self._now(), self.connection.last_heard):
            problem = DeadlineExceeded(f"it sent nothing for {detector.silent_s:.1f} s", remedy="check its network")
            self.connection.abort(problem)
            raise problem

    async def _beat(self) -> None:
        while True:
            sent_bytes = self.connection.bytes_out
            await asyncio.sleep(self._interval_s)
            if self.connection.bytes_out == sent_bytes and not self.connection.unsent_bytes:
                try:
                    self.connection.send(KeepAlive())
                except ConnectionLost:
                    return

    async def _watch(self) -> None:
        await self.connection.closed.wait()
        self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        cause = self.connection.close_cause or ConnectionLost("the connection was closed by this side")
        for waiting in list(self._waiting):
            if not waiting.done():
                waiting.set_exception(cause)
                waiting.exception()  # marks it as retrieved: the end of the connection is reported elsewhere


def _done(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
