"""A connection to a peer whose silence shows that it is dead: the peer sends heartbeats, or keep-alives (``Line``)."""

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

T = TypeVar("T")


async def receive_in_time(connection: Connection, detector: FailureDetector, who: str) -> Received:
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
            text = f"{who} was silent for {detector.silent_s:.1f} s"
            raise DeadlineExceeded(text, remedy="check its network")


async def wait_unless_closed(
    connection: Connection, waiting: Awaitable[object], timeout_s: float | None = None
) -> bool:
    """Await something until the connection is closed, or the time is over. Returns whether it came."""
    futures = [asyncio.ensure_future(waiting), asyncio.ensure_future(connection.closed.wait())]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return futures[0].done()
    finally:
        for future in futures:
            future.cancel()


class Line:
    """One connection that is closed if the other side is silent for too long.

    Args:
        silence_s: the permitted silence of the other side. It may be changed at any time.
        beat_s: upper bound of the time between this side's keep-alives; ``silence_s / BEATS`` may be shorter.
    """

    def __init__(self, connection: Connection, silence_s: float = QUIET_S, *, beat_s: float = QUIET_S) -> None:
        self.connection = connection
        self._beat_s = beat_s
        self._detector = self._new_detector(silence_s)
        self._now = asyncio.get_running_loop().time
        self._waiters: set[asyncio.Future[Any]] = set()

    @property
    def silence_s(self) -> float:
        return self._detector.death_s

    @silence_s.setter
    def silence_s(self, silence_s: float) -> None:
        self._detector.heartbeat_s, self._detector.death_s = min(silence_s / BEATS, self._beat_s), silence_s

    @asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[None]:
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
            self._fail_waiters()

    async def receive(self) -> Received:
        """Receive the next message that is not a keep-alive.

        Raises:
            DeadlineExceeded: the other side was silent for too long; the connection is closed.
            ConnectionLost, ProtocolError, Refused: the connection ended for this cause.
        """
        while True:
            try:
                received = await receive_in_time(self.connection, self._detector, "it")
            except DeadlineExceeded as silence:
                self.connection.abort(silence)
                raise
            if not isinstance(received.message, KeepAlive):
                return received

    async def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the other side closes. Raises as ``receive``, but for ``ConnectionLost``.

        Between two iterations nothing is read, and silence is not checked.
        """
        while True:
            try:
                message = (await self.receive()).message
            except ConnectionLost:
                return
            yield message

    async def run(
        self, take: Callable[[Received], None], on_end: Callable[[P2PTrainError], None] = lambda cause: None
    ) -> P2PTrainError:
        """Pass what comes to ``take`` until the connection ends, or ``take`` raises. Returns the cause, and passes it
        to ``on_end``, also if it is a defect of this program."""
        cause: P2PTrainError = ConnectionLost("this side failed to process its message")
        try:
            async with self.keep_alive():
                while True:
                    take(await self.receive())
        except P2PTrainError as problem:
            cause = problem
            return cause
        finally:
            on_end(cause)

    async def wait_sent(self) -> None:
        """Wait until the kernel has taken all sent data, as long as it makes progress. Raises as ``flush``."""
        while True:
            unsent_bytes = self.connection.unsent_bytes
            try:
                return await self.connection.flush(timeout_s=self.silence_s)
            except DeadlineExceeded:
                if self.connection.unsent_bytes >= unsent_bytes or self.connection.close_cause is not None:
                    raise

    async def receive_bulk(self, size_bytes: int, *, stream: int) -> bytearray:
        """Receive an announced bulk frame into a new buffer. The caller has checked ``size_bytes``.

        Raises:
            DeadlineExceeded: nothing came for too long; the connection is closed.
            ConnectionLost, ProtocolError: the connection ended.
        """
        data = bytearray(size_bytes)
        await self.wait_for(self.post(memoryview(data), stream=stream))
        return data

    def post(self, into: memoryview, *, stream: int) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self.new_waiter()
        self.connection.post(into, generation=0, stream=stream, done=lambda: _finish(waiter))
        return waiter

    def new_waiter(self) -> asyncio.Future[Any]:
        """Make a future for what the other side is to send; it fails when the connection ends."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        if self.connection.closed.is_set():  # ``_watch`` has run already
            self._fail_waiters()
        return waiter

    async def wait_for(self, waiter: asyncio.Future[T]) -> T:
        """Await a future of ``new_waiter``. Raises as ``receive_bulk``."""
        began, detector = self._now(), self._new_detector(self.silence_s)
        while True:
            wait_s = detector.wait_s
            await asyncio.wait([waiter], timeout=wait_s)
            if waiter.done():
                return waiter.result()
            silent = detector.waited(wait_s, self._now(), self.connection.last_heard)
            if silent or self._now() - began > LONGEST_SILENCE_S:
                text = f"it did not send the awaited data in {self._now() - began:.1f} s"
                problem = DeadlineExceeded(text, remedy="check its network")
                self.connection.abort(problem)
                raise problem

    def _new_detector(self, silence_s: float) -> FailureDetector:
        return FailureDetector(heartbeat_s=min(silence_s / BEATS, self._beat_s), death_s=silence_s)

    async def _beat(self) -> None:
        while True:
            sent_bytes = self.connection.bytes_out
            await asyncio.sleep(self._detector.heartbeat_s)
            if self.connection.bytes_out == sent_bytes and not self.connection.unsent_bytes:
                try:
                    self.connection.send(KeepAlive())
                except ConnectionLost:
                    return

    async def _watch(self) -> None:
        await self.connection.closed.wait()
        self._fail_waiters()

    def _fail_waiters(self) -> None:
        cause = self.connection.close_cause or ConnectionLost("the connection was closed by this side")
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_exception(cause)
                waiter.exception()  # marks it as retrieved: the end of the connection is reported elsewhere


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
