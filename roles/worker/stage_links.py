"""A connection whose both ends say that they live, whatever else they have to say, and the link to the next stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError
from p2ptrain.core.world import World
from roles.worker.stage_requests import LONGEST_SILENCE_S, Place
from wire.chain_messages import CHAIN_STREAM, Work
from wire.connection import Connection, Received
from wire.handshake import Dialler, dial, local_hello
from wire.messages import Hello, Message, StillHere, Welcome

BEATS = 4
"""In a silence: so often each side says something."""
QUIET_S = 10.0
"""Silence on a connection whose two sides have not agreed on another."""
MARGIN_S = 0.001
LATE = 8
"""Who judges silence and was itself held up, for more than this part of it, listens for two more beats: what came
meanwhile lies unread, and the other side may have been held up as well (the loading of a library stops the loop, a
machine that is too busy all of its processes)."""
DIAL_S = 5.0
BEATS_PER_S, MOST_BEATS = 100.0, 4096
"""That the other side may say it lives, in the long run, and at once: after a while in which nobody listened."""
LINK_UNSENT_BYTES = 4 << 20
"""Bytes to the next stage that may wait unsent; beyond, the session that they are of computes no further."""

T = TypeVar("T")


async def dial_worker(network: Dialler, host: str, port: int, peer_id: str, hello: Hello) -> tuple[Connection, Welcome]:
    """Reach that worker, which gives or takes much. Raises as ``wire.handshake.dial``."""
    made, welcome = await dial(network, host, port, hello, timeout_s=DIAL_S, expect_peer=peer_id, expect_role="worker")
    made.tune_for_bulk()
    return made, welcome


class Line:
    """One connection on which silence means death.

    Args:
        silence_s: for so long the other side may say nothing. It may be changed at any time.
        beat_s: this side says something as often as this, where that is more often than ``silence_s`` asks for.
    """

    def __init__(self, connection: Connection, silence_s: float = QUIET_S, *, beat_s: float = QUIET_S) -> None:
        self.connection = connection
        self.silence_s = silence_s
        self._beat_s = beat_s
        self._now = asyncio.get_running_loop().time
        self._waiting: set[asyncio.Future[None]] = set()
        self._beats, self._beats_at = 0.0, self._now()

    @property
    def waits(self) -> bool:
        """Whether something was posted, or asked for, that has not come."""
        return bool(self._waiting)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Beat inside. Afterwards the connection is closed, and nothing lands in memory any more."""
        tasks = [asyncio.create_task(self._beat(), name="beat"), asyncio.create_task(self._watch(), name="watch")]
        try:
            yield
        except ProtocolError as problem:
            self.connection.abort(problem)  # it is told why
            raise
        finally:
            self.connection.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._give_up_waiting()

    async def messages(self) -> AsyncIterator[Message]:
        """What the other side says, until it closes. While the caller takes its time nothing is read, nor is silence
        judged.

        Raises:
            DeadlineExceeded: it was silent for too long; the connection is closed.
            ProtocolError, Refused: the connection ended for cause.
        """
        while True:
            try:
                message = await self.receive()
            except ConnectionLost:
                return
            yield message

    async def receive(self) -> Message:
        """The next message that says something. Raises as ``messages``, and ``ConnectionLost``."""
        return (await self.frame()).message

    async def frame(self) -> Received:
        """``receive``, with what stands in the frame's header."""
        since = self._now()
        while True:
            patience_s = self._patience_s(since)
            due = self._now() + patience_s
            try:
                received = await self.connection.receive(timeout_s=patience_s)
            except DeadlineExceeded:
                if self.connection.close_cause is not None:  # it ended, and for another silence, perhaps
                    raise
                since = self._judged(since, due)
                continue
            if not isinstance(received.message, StillHere):
                return received
            self._count_beat()

    def _count_beat(self) -> None:
        """Raises ``ProtocolError``: it says nothing else, and all the time."""
        now = self._now()
        self._beats, self._beats_at = max(0.0, self._beats - BEATS_PER_S * (now - self._beats_at)) + 1, now
        if self._beats > MOST_BEATS:
            raise ProtocolError(f"it said {MOST_BEATS} times that it lives, and little else")

    async def bulk(self, size_bytes: int, *, stream: int) -> bytearray:
        """The bulk frame that was announced: ``size_bytes`` have been checked, and are allocated here.

        Raises:
            DeadlineExceeded: nothing came for too long; the connection is closed.
            ConnectionLost, ProtocolError: it ended.
        """
        data = bytearray(size_bytes)
        await self.landed(self.post(memoryview(data), stream=stream))
        return data

    def post(self, into: memoryview, *, stream: int) -> asyncio.Future[None]:
        """``Connection.post``, with a future for ``landed``. Raises ``ConnectionLost``."""
        arrived: asyncio.Future[None] = self.pending()
        self.connection.post(into, generation=0, stream=stream, done=lambda: _done(arrived))
        return arrived

    def pending(self) -> asyncio.Future[Any]:
        """A future that fails when the connection ends."""
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        if self.connection.closed.is_set():  # which the watcher has told the others
            self._give_up_waiting()
        return waiting

    async def landed(self, waiting: asyncio.Future[T]) -> T:
        """What became of a ``pending`` future. Raises as ``bulk``."""
        began = since = self._now()
        while not waiting.done():
            patience_s = self._patience_s(since)
            due = self._now() + patience_s
            await asyncio.wait([waiting], timeout=patience_s)
            if not waiting.done():
                since = self._judged(since, due)
                if self._now() - began > LONGEST_SILENCE_S:
                    problem = DeadlineExceeded(f"what it owes did not come within {LONGEST_SILENCE_S:g} s")
                    self.connection.abort(problem)
                    raise problem
        return waiting.result()

    def _silent_s(self, since: float) -> float:
        """How long nothing came; before ``since`` nobody listened."""
        return self._now() - max(self.connection.last_heard, since)

    def _patience_s(self, since: float) -> float:
        """Until silence is to be judged again. It may be agreed on anew meanwhile."""
        return min(max(self.silence_s - self._silent_s(since), MARGIN_S), self._beat_s)

    def _judged(self, since: float, due: float) -> float:
        """From when on silence counts. Raises where the other side was silent for too long.

        Args:
            due: when this was to be called.
        """
        if self._silent_s(since) < self.silence_s:
            return since
        if (now := self._now()) - due > self.silence_s / LATE:
            return now - self.silence_s + 2 * self.silence_s / BEATS
        problem = DeadlineExceeded(f"it sent nothing for {self.silence_s:.1f} s", remedy="is it frozen, or cut off?")
        self.connection.abort(problem)
        raise problem

    async def _beat(self) -> None:
        while True:
            said = self.connection.bytes_out
            await asyncio.sleep(min(self.silence_s / BEATS, self._beat_s))
            if self.connection.bytes_out == said and not self.connection.unsent_bytes:
                try:
                    self.connection.send(StillHere())
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
                waiting.exception()  # where nobody asks, it is no news: the connection's end is told elsewhere


def _done(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


class NextStage:
    """This stage's link to the next one of a session.

    Args:
        on_lost: called once, when it ends and was not closed here.
        on_room: called when what waited unsent is gone.
    """

    def __init__(
        self,
        place: Place,
        line: Line,
        *,
        on_lost: Callable[[P2PTrainError], None],
        on_room: Callable[[], None],
    ) -> None:
        self.place = place
        self._line = line
        self._on_lost = on_lost
        self.closed = False
        line.connection.on_drained = on_room
        self._task = asyncio.create_task(self._listen(), name="next stage")

    @classmethod
    async def dial(
        cls,
        world: World,
        place: Place,
        *,
        peer_id: str,
        name: str,
        seed_host: str,
        session: str,
        index: int,
        silence_s: float,
        on_lost: Callable[[P2PTrainError], None],
        on_room: Callable[[], None],
    ) -> NextStage:
        """Raises as ``wire.handshake.dial``.

        Args:
            index: of the stage that is dialled, the ``Hello``'s generation: one worker may have several.
        """
        hello = local_hello(
            peer_id=peer_id, name=name, roles=["worker"], purpose="stage", job=session, generation=index
        )
        connection, _ = await dial_worker(world.network, place.host or seed_host, place.port, place.peer, hello)
        return cls(place, Line(connection, silence_s), on_lost=on_lost, on_room=on_room)

    @property
    def crowded(self) -> bool:
        """Whether the next stage takes less than it is given."""
        return self._line.connection.unsent_bytes > LINK_UNSENT_BYTES

    def give(self, work: Work, payload: memoryview) -> None:
        """Hand over what the next stage takes; ``payload`` stays unchanged. Raises ``ConnectionLost``."""
        self._line.connection.send_with_bulk(work, payload, generation=0, stream=CHAIN_STREAM)

    async def room(self) -> None:
        """Wait until all that was given is in the kernel. That may take long, as long as the next stage lives.

        Raises:
            ConnectionLost, DeadlineExceeded, ProtocolError, Refused: it does not.
        """
        while True:
            try:
                return await self._line.connection.flush(timeout_s=self._line.silence_s)
            except DeadlineExceeded:
                if self._line.connection.close_cause is not None:
                    raise

    def close(self) -> None:
        """Let go of it. Nobody is told."""
        self.closed = True
        self._line.connection.abort()
        self._task.cancel()

    async def _listen(self) -> None:
        problem: P2PTrainError = ConnectionLost("the next stage closed the connection")
        try:
            async with self._line.alive():
                while True:
                    message = await self._line.receive()
                    raise ProtocolError(f"the next stage sent {type(message).__name__}, and it has nothing to say here")
        except P2PTrainError as error:
            problem = error
        if not self.closed:
            self.closed = True
            self._on_lost(problem)


def of_session(hello: Hello) -> tuple[str, int]:
    """Which session, and which of its stages, a caller of purpose ``stage`` means."""
    return hello.job, hello.generation
