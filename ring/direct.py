"""Messages between any two members of a view, matched by source and tag, besides the ring.

A member that sends dials the receiver, once, and offers its messages (``SendOffer``). The receiver answers an offer
that matches a receive (``SendTaken``), and only then the bytes travel: from the sender's memory into the receiver's. So
nothing is buffered, no order of tags can block, and a send ends only after its receive has begun. Messages of the same
pair and tag are matched in the order in which they were sent.

Ends. A message fails if its connection ends, or its time. All messages fail if the ring lost a member. If a member left
on purpose, only messages with this member fail, and what it had sent still arrives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError
from ring.dtypes import Array
from ring.links import ThisMember, dial_patiently
from ring.neighbours import RingBroken
from ring.session import RingSession
from ring.view import View
from wire.connection import Connection
from wire.frame import MAX_BULK_BYTES
from wire.handshake import local_hello
from wire.job_messages import SendOffer, SendTaken
from wire.messages import Hello, Message, RefusalCode, Refuse

CHANNEL = "direct"
MAX_OFFERS = 4096
"""Offers of one connection that wait for a receive. A sender keeps further messages to itself."""
DIAL_S = 20.0
M = TypeVar("M", bound=Message)


@dataclass(eq=False, slots=True)
class _Message:
    """A message to send or to receive. ``source``: of a receive; None: any. ``future``: gets the source's rank."""

    memory: memoryview
    tag: int
    timeout_s: float
    future: asyncio.Future[int]
    source: int | None = None
    timer: asyncio.TimerHandle | None = None
    parts_left: int = 0


@dataclass(eq=False, slots=True)
class _Outgoing:
    """The connection to one receiver, and the messages that are not offered, not taken, or not sent yet."""

    rank: int
    waiting: deque[_Message] = field(default_factory=deque)
    offered: dict[int, _Message] = field(default_factory=dict)
    connection: Connection | None = None
    number: int = 0


@dataclass(eq=False, slots=True)
class _Incoming:
    """The connection of one sender: its offers that match no receive yet, and the receives that are under way."""

    rank: int
    connection: Connection
    offers: list[SendOffer] = field(default_factory=list)
    arriving: set[_Message] = field(default_factory=set)


class DirectMessages:
    """A member's messages in one view. The owner hands over connections of channel ``CHANNEL`` (``decide``, ``serve``)
    and attaches the session once it is formed."""

    def __init__(self, me: ThisMember, view: View, rank: int) -> None:
        self._me, self._view, self._rank = me, view, rank
        self._session: RingSession | None = None
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._wanted: list[_Message] = []  # receives that match no offer yet
        self._gone: dict[int, P2PTrainError] = {}  # members from which nothing more comes
        self._failure: P2PTrainError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, session: RingSession) -> None:
        self._session = session
        session.broken.add_done_callback(self._ring_ended)

    # ------------------------------------------------------------------------------------------------- for the owner

    def send(self, array: Array, to: int, tag: int, *, timeout_s: float) -> asyncio.Future[int]:
        """Begin to send a contiguous array to rank ``to``. It must not change until the future is done.

        The future fails with a ``NetworkError`` that names the receiver.
        """
        message = self._message(array, tag, timeout_s)
        if self._failure is not None:
            _fail(message, self._failure)
            return message.future
        link = self._outgoing.get(to)
        if link is None:
            link = self._outgoing[to] = _Outgoing(to)
            task = asyncio.get_running_loop().create_task(self._send_all(link), name=f"messages to rank {to}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        link.waiting.append(message)
        self._offer(link)
        return message.future

    def receive(self, array: Array, source: int | None, tag: int, *, timeout_s: float) -> asyncio.Future[int]:
        """Begin to receive into a contiguous array, from rank ``source``, or from any if it is None.

        The future gets the source's rank, or fails with a ``NetworkError`` or ``ProtocolError`` that names it.
        """
        message = self._message(array, tag, timeout_s)
        message.source = source
        for link in self._incoming.values():
            offer = next((item for item in link.offers if source in (None, link.rank) and item.tag == tag), None)
            if offer is not None:
                link.offers.remove(offer)
                self._take(link, offer, message)
                return message.future
        failure = self._failure or (self._gone.get(source) if source is not None else None)
        if failure is not None:
            _fail(message, failure)
        else:
            self._wanted.append(message)
        return message.future

    def decide(self, hello: Hello) -> Refuse | None:
        """Why a caller may not connect, or None. Serves the handshake's decision and changes nothing."""
        if self._view.rank_of(hello.peer_id) is None or hello.generation != self._view.generation:
            text = f"{hello.peer_id[:64]} is no member of generation {self._view.generation}"
            return Refuse(RefusalCode.NOT_A_NEIGHBOUR, text, "wait for the next view")
        return None

    async def serve(self, connection: Connection, hello: Hello) -> None:
        """Receive the messages of one sender until its connection ends."""
        rank = self._view.rank_of(hello.peer_id)
        if rank is None or self._failure is not None:
            return
        link = self._incoming[rank] = _Incoming(rank, connection)
        self._gone.pop(rank, None)
        connection.tune_for_bulk()
        error: P2PTrainError = ConnectionLost("this member left")
        try:
            while True:
                offer = await self._next(connection, SendOffer)
                if len(link.offers) >= MAX_OFFERS:
                    raise ProtocolError(f"more than {MAX_OFFERS} messages wait to be received")
                self._match(link, offer)
        except P2PTrainError as problem:
            error = problem
        finally:
            self._lost(link, error)

    def close(self) -> None:
        """Fail what is not finished, and close the connections. ``wait_closed`` waits for that."""
        self._end(ConnectionLost("this member left the group"))

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- sending

    async def _send_all(self, link: _Outgoing) -> None:
        error: P2PTrainError = ConnectionLost("this member left the group")
        try:
            member = self._view.members[link.rank]
            hello = local_hello(
                peer_id=self._me.peer_id,
                name=self._me.name,
                roles=["worker"],
                purpose="ring",
                capabilities={"channel": CHANNEL},
                job=self._view.job,
                generation=self._view.generation,
            )
            deadline = self._me.world.clock.now() + DIAL_S
            connection = await dial_patiently(self._me, member, hello, deadline=deadline, title="member")
            link.connection = connection
            connection.tune_for_bulk()
            self._offer(link)
            while True:
                taken = await self._next(connection, SendTaken)
                message = link.offered.pop(taken.number, None)
                if message is None:
                    raise ProtocolError(f"it took message {taken.number}, which was not offered")
                await self._send(connection, taken.number, message)
                self._offer(link)
        except P2PTrainError as problem:
            error = problem
        finally:
            if self._outgoing.get(link.rank) is link:
                del self._outgoing[link.rank]
            for message in [*link.offered.values(), *link.waiting]:
                _fail(message, self._failure or self._named(link.rank, error))
            if link.connection is not None:
                await link.connection.close()

    def _offer(self, link: _Outgoing) -> None:
        while link.connection is not None and link.waiting and len(link.offered) < MAX_OFFERS:
            message = link.waiting.popleft()
            if message.future.done():  # its time was up
                continue
            number, link.number = link.number, (link.number + 1) % 2**32
            link.offered[number] = message
            try:
                link.connection.send(
                    SendOffer(number, message.tag, message.memory.nbytes), generation=self._view.generation
                )
            except P2PTrainError:
                return  # ``_send_all`` gets the same error

    async def _send(self, connection: Connection, number: int, message: _Message) -> None:
        try:
            for part in _parts(message.memory):
                connection.send_bulk(part, generation=self._view.generation, stream=number)
                await connection.flush(timeout_s=message.timeout_s)
        except P2PTrainError as error:
            _fail(message, error)
            connection.abort()  # it may still read the message's memory
            raise
        _finish(message, self._rank)

    # ----------------------------------------------------------------------------------------------------- receiving

    def _match(self, link: _Incoming, offer: SendOffer) -> None:
        for message in self._wanted:
            if message.source in (None, link.rank) and message.tag == offer.tag:
                self._wanted.remove(message)
                self._take(link, offer, message)
                return
        link.offers.append(offer)

    def _take(self, link: _Incoming, offer: SendOffer, message: _Message) -> None:
        if offer.size_bytes != message.memory.nbytes:
            name, size = self._view.members[link.rank].name, message.memory.nbytes
            text = f"{name} sent {offer.size_bytes} bytes with tag {offer.tag}, but {size} are to be received"
            error = ProtocolError(text, remedy="both sides need tensors of the same shape and type")
            _fail(message, error)
            link.connection.abort(error)
            return
        message.source = link.rank
        link.arriving.add(message)
        parts = _parts(message.memory)
        message.parts_left = len(parts)

        def arrived() -> None:
            message.parts_left -= 1
            if not message.parts_left:
                link.arriving.discard(message)
                _finish(message, link.rank)

        try:
            for part in parts:
                link.connection.post(part, generation=self._view.generation, stream=offer.number, done=arrived)
            link.connection.send(SendTaken(offer.number), generation=self._view.generation)
        except P2PTrainError as error:  # ``serve`` gets the same one
            _fail(message, self._named(link.rank, error))

    # -------------------------------------------------------------------------------------------------------- ending

    def _lost(self, link: _Incoming, error: P2PTrainError) -> None:
        """Fail all receives from the sender of ``link``, whose connection ended."""
        if self._incoming.get(link.rank) is not link:
            failing = list(link.arriving)  # the sender has dialled again
        else:
            del self._incoming[link.rank]
            failing = [*link.arriving, *(item for item in self._wanted if item.source == link.rank)]
            self._gone[link.rank] = self._named(link.rank, error)
        for message in failing:
            _fail(message, self._failure or self._named(link.rank, error))
        self._wanted = [message for message in self._wanted if not message.future.done()]

    def _ring_ended(self, ended: asyncio.Future[RingBroken]) -> None:
        broken = ended.result()
        rank = self._view.rank_of(broken.suspect)
        if not broken.left or rank is None:
            self._end(broken.cause)
        elif rank not in self._incoming:  # else its connection ends after what it has sent
            self._gone[rank] = broken.cause
            for message in [item for item in self._wanted if item.source == rank]:
                _fail(message, broken.cause)
            self._wanted = [message for message in self._wanted if not message.future.done()]

    def _end(self, failure: P2PTrainError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        for task in self._tasks:
            task.cancel()
        for message in self._wanted:
            _fail(message, failure)
        self._wanted.clear()
        for outgoing in self._outgoing.values():
            for message in [*outgoing.offered.values(), *outgoing.waiting]:
                _fail(message, failure)
        for link in list(self._incoming.values()):
            for message in link.arriving:
                _fail(message, failure)
            link.connection.abort()

    def _out_of_time(self, message: _Message) -> None:
        """Fail a message. A connection that may still use its memory ends."""
        if message.future.done():
            return
        _fail(message, DeadlineExceeded(f"no message with tag {message.tag} within {message.timeout_s:g} s"))
        self._wanted = [item for item in self._wanted if item is not message]
        for incoming in self._incoming.values():
            if message in incoming.arriving:
                incoming.connection.abort()
        for outgoing in self._outgoing.values():
            if message in outgoing.offered.values() and outgoing.connection is not None:
                outgoing.connection.abort()

    def _message(self, array: Array, tag: int, timeout_s: float) -> _Message:
        loop = asyncio.get_running_loop()
        message = _Message(array.reshape(-1).view("uint8").data, tag, timeout_s, loop.create_future())
        message.timer = loop.call_later(timeout_s, self._out_of_time, message)
        return message

    async def _next(self, connection: Connection, kind: type[M]) -> M:
        while True:
            try:
                return await connection.expect(kind, timeout_s=3600)  # messages have deadlines of their own
            except DeadlineExceeded:
                if connection.close_cause is not None:
                    raise

    def _named(self, rank: int, error: P2PTrainError) -> P2PTrainError:
        return ConnectionLost(f"lost {self._view.members[rank].name}: {error.message}", remedy=error.remedy)


def _parts(memory: memoryview) -> list[memoryview]:
    return [memory[start : start + MAX_BULK_BYTES] for start in range(0, max(memory.nbytes, 1), MAX_BULK_BYTES)]


def _finish(message: _Message, rank: int) -> None:
    if message.timer is not None:
        message.timer.cancel()
    if not message.future.done():
        message.future.set_result(rank)


def _fail(message: _Message, error: P2PTrainError) -> None:
    if message.timer is not None:
        message.timer.cancel()
    if not message.future.done():
        kind = type(error) if type(error) in (DeadlineExceeded, ProtocolError) else ConnectionLost
        message.future.set_exception(kind(error.message, remedy=error.remedy))
        message.future.exception()  # marks it as retrieved
