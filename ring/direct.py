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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError
from ring.dtypes import Array
from ring.links import ThisMember, dial_patiently
from ring.neighbours import UNLIMITED_S, RingBroken
from ring.session import RingSession
from ring.view import View
from wire.connection import Connection
from wire.frame import MAX_BULK_BYTES
from wire.job_messages import SendOffer, SendTaken
from wire.messages import Hello, RefusalCode, Refuse

CHANNEL = "direct"
MAX_OFFERS = 4096
"""Offers of one connection that wait for a receive. A sender keeps further messages to itself."""
DIAL_S = 20.0


@dataclass(eq=False, slots=True)
class _Message:
    """A message to send, or to receive.

    Attributes:
        peer: rank of the other end; None: that of any sender.
        connection: that may use ``memory``, from the offer on.
        future: gets the rank of the sender.
    """

    memory: memoryview
    tag: int
    peer: int | None
    sending: bool
    timeout_s: float
    future: asyncio.Future[int]
    connection: Connection | None = None

    def fits(self, rank: int, offer: SendOffer) -> bool:
        return not self.sending and self.connection is None and self.tag == offer.tag and self.peer in (None, rank)


@dataclass(eq=False, slots=True)
class _Outgoing:
    """The connection to one receiver, with the messages that are not offered yet, and those that are not taken yet."""

    rank: int
    waiting: deque[_Message] = field(default_factory=deque)
    offered: dict[int, _Message] = field(default_factory=dict)
    connection: Connection | None = None
    number: int = 0


@dataclass(eq=False, slots=True)
class _Incoming:
    """The connection of one sender, with its offers that match no receive yet."""

    rank: int
    connection: Connection
    offers: list[SendOffer] = field(default_factory=list)


class DirectMessages:
    """A member's messages in one view. The owner hands over connections of channel ``CHANNEL`` (``decide``, ``serve``)
    and attaches the session once it is formed."""

    def __init__(self, me: ThisMember, view: View, rank: int) -> None:
        self._me, self._view, self._rank = me, view, rank
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._messages: dict[_Message, None] = {}  # unfinished ones, in their order
        self._ended: dict[int, P2PTrainError] = {}  # members from which nothing more comes
        self._failure: P2PTrainError | None = None
        self.bytes_in = self.bytes_out = 0  # of finished messages
        self._tasks = Background()

    def attach(self, session: RingSession) -> None:
        session.broken.add_done_callback(self._ring_ended)

    # ------------------------------------------------------------------------------------------------- for the owner

    def send(self, array: Array, to: int, tag: int, *, timeout_s: float) -> asyncio.Future[int]:
        """Begin to send a contiguous array to rank ``to``. It must not change until the future is done.

        The future fails with a ``NetworkError`` that names the receiver.
        """
        message = self._begin(array, to, tag, timeout_s, sending=True)
        if self._failure is not None:
            self._fail(message, self._failure)
            return message.future
        link = self._outgoing.get(to)
        if link is None:
            link = self._outgoing[to] = _Outgoing(to)
            self._tasks.start(self._send_all(link), f"messages to rank {to}")
        link.waiting.append(message)
        self._offer(link)
        return message.future

    def receive(self, array: Array, source: int | None, tag: int, *, timeout_s: float) -> asyncio.Future[int]:
        """Begin to receive into a contiguous array, from rank ``source``, or from any if it is None.

        The future gets the source's rank, or fails with a ``NetworkError`` or ``ProtocolError`` that names it.
        """
        message = self._begin(array, source, tag, timeout_s, sending=False)
        for link in self._incoming.values():
            offer = next((item for item in link.offers if message.fits(link.rank, item)), None)
            if offer is not None:
                link.offers.remove(offer)
                self._take(link, offer, message)
                return message.future
        if failure := self._failure or (self._ended.get(source) if source is not None else None):
            self._fail(message, failure)
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
        self._ended.pop(rank, None)
        error: P2PTrainError = ConnectionLost("this member left")
        try:
            while True:
                offer = await connection.expect(SendOffer, timeout_s=UNLIMITED_S)
                if len(link.offers) >= MAX_OFFERS:
                    raise ProtocolError(f"more than {MAX_OFFERS} messages wait to be received")
                message = next((item for item in self._messages if item.fits(rank, offer)), None)
                if message is None:
                    link.offers.append(offer)
                else:
                    self._take(link, offer, message)
        except P2PTrainError as problem:
            error = problem
        finally:
            self._lost(link, self._named(rank, error))

    def close(self) -> None:
        """Fail what is not finished, and close the connections. ``wait_closed`` waits for that."""
        self._end(ConnectionLost("this member left the group"))

    async def wait_closed(self) -> None:
        await self._tasks.settle()

    # ------------------------------------------------------------------------------------------------------- sending

    async def _send_all(self, link: _Outgoing) -> None:
        error: P2PTrainError = ConnectionLost("this member left the group")
        try:
            deadline, member = self._me.world.clock.now() + DIAL_S, self._view.members[link.rank]
            link.connection = await dial_patiently(
                self._me, self._view, member, CHANNEL, deadline=deadline, title="member"
            )
            self._offer(link)
            while True:
                taken = await link.connection.expect(SendTaken, timeout_s=UNLIMITED_S)
                message = link.offered.pop(taken.number, None)
                if message is None:
                    raise ProtocolError(f"it took message {taken.number}, which was not offered")
                await self._send(link.connection, taken.number, message)
                self._offer(link)
        except P2PTrainError as problem:
            error = problem
        finally:
            if self._outgoing.get(link.rank) is link:
                del self._outgoing[link.rank]
            for message in [*link.offered.values(), *link.waiting]:
                self._fail(message, self._named(link.rank, error))
            if link.connection is not None:
                await link.connection.close()

    def _offer(self, link: _Outgoing) -> None:
        while link.connection is not None and link.waiting and len(link.offered) < MAX_OFFERS:
            message = link.waiting.popleft()
            if message.future.done():  # its time was up
                continue
            number, link.number = link.number, (link.number + 1) % 2**32
            link.offered[number], message.connection = message, link.connection
            offer = SendOffer(number, message.tag, message.memory.nbytes)
            with suppress(P2PTrainError):  # ``_send_all`` gets the same error
                link.connection.send(offer, generation=self._view.generation)

    async def _send(self, connection: Connection, number: int, message: _Message) -> None:
        try:
            for part in _parts(message.memory):
                connection.send_bulk(part, generation=self._view.generation, stream=number)
                await connection.flush(timeout_s=message.timeout_s)
        except P2PTrainError as error:
            self._fail(message, self._named(message.peer or 0, error))
            connection.abort()  # it may still read the message's memory
            raise
        self._finish(message, self._rank)

    # ----------------------------------------------------------------------------------------------------- receiving

    def _take(self, link: _Incoming, offer: SendOffer, message: _Message) -> None:
        if offer.size_bytes != message.memory.nbytes:
            name, size = self._view.members[link.rank].name, message.memory.nbytes
            text = f"{name} sent {offer.size_bytes} bytes with tag {offer.tag}, but {size} are to be received"
            error = ProtocolError(text, remedy="both sides need tensors of the same shape and type")
            self._fail(message, error)
            link.connection.abort(error)
            return
        message.connection = link.connection
        *parts, last = _parts(message.memory)
        how = {"generation": self._view.generation, "stream": offer.number}
        with suppress(P2PTrainError):  # ``serve`` gets the same one
            for part in parts:
                link.connection.post(part, done=lambda: None, **how)
            link.connection.post(last, done=partial(self._finish, message, link.rank), **how)
            link.connection.send(SendTaken(offer.number), generation=self._view.generation)

    # -------------------------------------------------------------------------------------------------------- ending

    def _lost(self, link: _Incoming, error: P2PTrainError) -> None:
        """Fail all receives from the sender of ``link``, whose connection ended."""
        current = self._incoming.get(link.rank) is link  # else the sender has dialled again
        if current:
            del self._incoming[link.rank]
            self._ended[link.rank] = error
        for message in list(self._messages):
            waits = current and not message.sending and message.peer == link.rank and message.connection is None
            if waits or message.connection is link.connection:
                self._fail(message, error)

    def _ring_ended(self, ended: asyncio.Future[RingBroken]) -> None:
        broken = ended.result()
        rank = self._view.rank_of(broken.suspect)
        if not broken.left or rank is None:
            self._end(broken.cause)
        elif rank not in self._incoming:  # else its connection ends after what it has sent
            self._ended[rank] = broken.cause
            for message in list(self._messages):
                if not message.sending and message.peer == rank:
                    self._fail(message, broken.cause)

    def _end(self, failure: P2PTrainError) -> None:
        if self._failure is None:
            self._failure = failure
            for message in list(self._messages):
                self._fail(message, failure)
            self._tasks.cancel()
            for link in self._incoming.values():
                link.connection.abort()

    def _begin(self, array: Array, peer: int | None, tag: int, timeout_s: float, *, sending: bool) -> _Message:
        loop = asyncio.get_running_loop()
        memory = array.reshape(-1).view("uint8").data
        message = _Message(memory, tag, peer, sending, timeout_s, loop.create_future())
        self._messages[message] = None
        timer = loop.call_later(timeout_s, self._give_up, message)
        message.future.add_done_callback(lambda _: timer.cancel())
        message.future.add_done_callback(lambda _: self._give_up(message))  # if the caller cancelled it
        return message

    def _give_up(self, message: _Message) -> None:
        """Fail a message whose time is over, unless its caller cancelled it. A connection that may still use its memory
        ends."""
        if message not in self._messages:
            return
        self._fail(message, DeadlineExceeded(f"no message with tag {message.tag} within {message.timeout_s:g} s"))
        self._messages.pop(message, None)
        if message.connection is not None:
            message.connection.abort()

    def _finish(self, message: _Message, rank: int) -> None:
        if message in self._messages and not message.future.done():
            del self._messages[message]
            self.bytes_in += 0 if message.sending else message.memory.nbytes
            self.bytes_out += message.memory.nbytes if message.sending else 0
            message.future.set_result(rank)

    def _fail(self, message: _Message, error: P2PTrainError) -> None:
        if message in self._messages and not message.future.done():
            del self._messages[message]
            kind = type(error) if isinstance(error, DeadlineExceeded | ProtocolError) else ConnectionLost
            message.future.set_exception(kind(error.message, remedy=error.remedy))
            message.future.exception()  # marks it as retrieved

    def _named(self, rank: int, error: P2PTrainError) -> P2PTrainError:
        return ConnectionLost(f"lost {self._view.members[rank].name}: {error.message}", remedy=error.remedy)


def _parts(memory: memoryview) -> list[memoryview]:
    return [memory[start : start + MAX_BULK_BYTES] for start in range(0, max(memory.nbytes, 1), MAX_BULK_BYTES)]
