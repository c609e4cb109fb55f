"""Circuits: connections between two peers of which neither may dial the other, through a point that both can dial.

``CircuitNetwork`` is a ``Network`` over another one, below TLS. So mutual TLS and the handshake of peers run from end
to end, and a relay sees encrypted bytes only. A peer that cannot be dialled has the host name ``<peer id>.peer``. To
dial it is to ask the seed for a circuit. The seed gives both ends a ``Circuit``, and orders the relay to expect it::

    caller                  meeting point: a relay, or the caller itself       answerer
      request(peer) → Circuit                     (seed)                         accept(Circuit)
      JoinCircuit ───────────▶                                     ◀─────────── JoinCircuit
                  ◀─────────── CircuitJoined         CircuitJoined ───────────▶
      what the protocols above send ═══════▶ passed on ◀═══════ what the protocols above send

``JoinCircuit`` is a control frame, sent before TLS to the port on which the meeting point listens for other peers, too.
A first byte of 0 and the frame's kind tell it from TLS records and from the first frame of any other conversation. The
listener reads the first bytes of each connection, and gives the others, with these bytes, to their own protocol.

If ``Circuit.tries_direct``, both ends meanwhile dial each other from the port from which they dialled the relay, and
listen on it. A router that keeps a connection's port lets the other end's packets in, because this end has sent some
to its address before (TCP simultaneous open, RFC 9293, section 3.5). The same finds a path over IPv6 and within a
home. The answerer sends ``CircuitPath`` on each path that opens; the caller answers on the first, or on the relay's.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NetworkError, P2PTrainError, Refused, Unreachable
from p2ptrain.core.ids import is_id
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.address import format_address
from wire.codec import encode
from wire.connection import Connection, last_word
from wire.frame import LENGTH_BYTES, encode_control
from wire.messages import (
    ANSWERER,
    CALLER,
    RELAYED,
    REVERSED,
    Circuit,
    CircuitJoined,
    JoinCircuit,
    Message,
    RefusalCode,
    SocketAddress,
)
from wire.punching import DirectTries
from wire.transport import Address, HalfOpen, TcpNetwork, can_share_ports, check_port, unreachable

JOIN_S = 5.0
"""From dialling a meeting point until both ends are there, and from accepting a connection to its first bytes."""
ORDER_S = 3.0
"""How long an end waits at a meeting point that has not heard of its circuit: the seed's order may come later."""
IDLE_S = 3600.0
"""A relayed circuit that carried nothing for so long ends. The kernel's keepalive ends those of dead machines."""
MAX_EXPECTED = 1024
PIECE_BYTES = 64 << 10
"""What a relay holds of each direction of a circuit."""

_SUFFIX = ".peer"


def peer_host(peer_id: str) -> str:
    """The host name of a peer that is reached by a circuit."""
    return peer_id + _SUFFIX


def peer_of_host(host: str) -> str:
    """The peer id of a ``peer_host``; empty for every other host."""
    peer_id = host.removesuffix(_SUFFIX)
    return peer_id if peer_id != host and is_id(peer_id) else ""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What this process does for others as a relay.

    Attributes:
        bytes_per_s: of all circuits together, which share it fairly; 0: no limit.
        circuits, circuits_per_peer: most relayed circuits at a time; 0: this process is no relay.
    """

    bytes_per_s: float = 0.0
    circuits: int = 256
    circuits_per_peer: int = 64


class CircuitNetwork:
    """Reaches peers by circuits, meets the other ends of circuits, and relays those of others.

    Args:
        inner: carries the connections to meeting points, and all others, which cost nothing here.

    Attributes:
        request: asks the seed for a circuit to a peer; set by the owner. Raises ``P2PTrainError``.
        on_way: called with each circuit that this end joined and its way, one of ``WAYS``.
        relayed_bytes: running total of the bytes passed on for others.
    """

    def __init__(self, inner: Network, *, limits: RelayLimits | None = None) -> None:
        self._inner = inner
        self.limits = limits or RelayLimits()
        self.request: Callable[[str], Awaitable[Circuit]] = _refuse_request
        self.on_way: Callable[[Circuit, str], None] = lambda circuit, way: None
        self.half_open = HalfOpen()  # of accepted connections that may be of a circuit, until it is found
        self.pace = RelayPace(self.limits.bytes_per_s)
        self.relayed_bytes = 0
        self._listening: list[_CircuitListener] = []  # the last one gets answered circuits
        self._meetings: dict[str, Callable[[JoinCircuit, Connection], None]] = {}  # circuits that ends may join here
        self._meeting_added = asyncio.Event()
        self._relayed: set[_RelayedCircuit] = set()
        self._joining: set[asyncio.Task[None]] = set()

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``; a ``peer_host`` by a circuit. Raises as the inner network."""
        peer_id = peer_of_host(host)
        if not peer_id:
            await self._inner.connect(host, port, factory, timeout_s=timeout_s)
            return
        check_port(port, least=1)
        try:
            async with asyncio.timeout(timeout_s):
                circuit = await self.request(peer_id)
                transport, way = await self._join(circuit)
        except TimeoutError as error:
            raise unreachable(host, port, error, timeout_s) from error
        except (Refused, NetworkError) as error:
            text = f"cannot reach {format_address(host, port)}: {error.message}"
            raise Unreachable(text, remedy=error.remedy) from error
        _hand_over(transport, factory(), peername=(host, port), sockname=(peer_host(circuit.caller), 0), way=way)
        self.on_way(circuit, way)

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept ordinary connections, ends of circuits that meet here, and circuits that ``accept`` joins.

        ``on_problem`` also gets the reasons why ends of circuits were refused.
        """
        undecided: set[_FirstBytes] = set()
        accept = partial(_FirstBytes, self, factory, undecided, on_problem)
        inner = await self._inner.listen(host, port, accept, on_problem)
        listener = _CircuitListener(inner, factory, undecided, self._listening)
        self._listening.append(listener)
        return listener

    async def close(self) -> None:
        """End the circuits that are relayed or expected here. The connections of this peer's own circuits stay."""
        for relayed in list(self._relayed):
            relayed.end(ConnectionLost("the relay stops"))
        for task in list(self._joining):
            task.cancel()
        if self._joining:
            await asyncio.wait(self._joining)

    # -------------------------------------------------------------------------------------------------- an end's side

    async def accept(self, circuit: Circuit) -> None:
        """Join ``circuit`` as its answerer. The newest listener's factory makes the protocol, as if it had accepted.

        Raises ``P2PTrainError``: the meeting point is not reached or refuses, or the caller does not come.
        """
        if not self._listening:
            raise Unreachable("this peer does not listen for others")
        listener = self._listening[-1]
        transport, way = await self._join(circuit)
        caller, answerer = (peer_host(circuit.caller), 0), (peer_host(circuit.answerer), listener.address[1])
        _hand_over(transport, listener.factory(), peername=caller, sockname=answerer, way=way)
        self.on_way(circuit, way)

    async def try_direct(self, circuit: Circuit) -> str:
        """Join ``circuit`` on this end's side, close it, and return the way that it found. Raises as ``accept``."""
        transport, way = await self._join(circuit)
        transport.abort()
        return way

    async def _join(self, circuit: Circuit) -> tuple[asyncio.Transport, str]:
        """Return a transport to the other end, with its reading paused, and its way."""
        if not circuit.host:
            return await self._meet_answerer(circuit.id), REVERSED
        meeting = Connection()
        tries: DirectTries | None = None
        try:
            async with asyncio.timeout(JOIN_S):
                if circuit.tries_direct and isinstance(self._inner, TcpNetwork) and can_share_ports():
                    tries = DirectTries(self._inner, circuit)
                    await tries.dial_meeting(meeting)
                else:
                    await self._inner.connect(circuit.host, circuit.port, lambda: meeting, timeout_s=JOIN_S)
                addresses = tries.own_addresses(meeting) if tries is not None else []
                meeting.send(JoinCircuit(circuit.id, circuit.side, addresses))
                joined = await meeting.expect(CircuitJoined, timeout_s=JOIN_S)
                if tries is not None and addresses and joined.addresses:  # both ends try
                    connection, way = await tries.choose(joined, meeting)
                    return connection.detach(), way
            meeting.pause_reading()
            return meeting.detach(), RELAYED if circuit.relay else REVERSED
        except TimeoutError:
            where = circuit.relay or format_address(circuit.host, circuit.port)
            raise DeadlineExceeded(f"the other end did not come to {where} within {JOIN_S:g} s") from None
        finally:
            meeting.abort()
            if tries is not None:
                await tries.close()

    async def _meet_answerer(self, circuit_id: str) -> asyncio.Transport:
        """Wait for the answerer of this peer's own circuit at this peer's listener."""
        arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def enter(join: JoinCircuit, connection: Connection) -> None:
            if join.side != ANSWERER or arrived.done():
                raise _taken(join.side)
            arrived.set_result(connection)

        self._add_meeting(circuit_id, enter)
        try:
            async with asyncio.timeout(JOIN_S):
                connection = await arrived
            # The answerer knows this end's address: it has dialled it.
            connection.send(CircuitJoined(_seen_of(connection)))
            await connection.flush(timeout_s=JOIN_S)
            return connection.detach()
        except TimeoutError:
            raise DeadlineExceeded(f"the other end did not dial this one within {JOIN_S:g} s") from None
        finally:
            del self._meetings[circuit_id]
            if arrived.done() and not arrived.cancelled():
                arrived.result().abort()  # nothing, if it was detached

    # --------------------------------------------------------------------------------------------- the meeting point

    def expect_circuit(self, circuit_id: str, lives_s: float, peers: Sequence[str] = ()) -> None:
        """Relay this circuit once both ends have named it, which they may do within ``lives_s``.

        ``peers``: ids of the ends. Raises ``Refused`` if this process does not relay, or expects too many circuits.
        """
        if not self.limits.circuits:
            raise Refused(RefusalCode.NOT_PERMITTED, "this peer is no relay")
        if len(self._meetings) >= MAX_EXPECTED:
            raise Refused(RefusalCode.BUSY, f"{len(self._meetings)} circuits are expected here already")
        if circuit_id not in self._meetings:
            relayed = _RelayedCircuit(self, tuple(peers), lives_s, partial(self._meetings.pop, circuit_id, None))
            self._add_meeting(circuit_id, relayed.enter)

    def count_relayed(self, peer_id: str = "") -> int:
        """The circuits that are relayed here: all, or those of one peer."""
        return sum(not peer_id or peer_id in relayed.peers for relayed in self._relayed)

    def add_relayed(self, relayed: _RelayedCircuit) -> None:
        """Raises ``Refused`` beyond the limits."""
        limits = self.limits
        if len(self._relayed) >= limits.circuits:
            raise Refused(RefusalCode.FULL, f"the relay serves {limits.circuits} circuits already")
        for peer_id in relayed.peers:
            if self.count_relayed(peer_id) >= limits.circuits_per_peer:
                text = f"the relay serves {limits.circuits_per_peer} circuits of {peer_id} already"
                raise Refused(RefusalCode.FULL, text)
        self._relayed.add(relayed)

    def remove_relayed(self, relayed: _RelayedCircuit) -> None:
        self._relayed.discard(relayed)

    def join_soon(self, host: str, on_problem: OnProblem | None, connection: Connection) -> None:
        """Serve an accepted connection, of an end of a circuit. ``host``: it holds a place in ``half_open``."""
        joining = self._serve_join(host, on_problem, connection)
        task = asyncio.get_running_loop().create_task(joining, name="wire.circuits.join")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _serve_join(self, host: str, on_problem: OnProblem | None, connection: Connection) -> None:
        entered = False
        try:
            join = await connection.expect(JoinCircuit, timeout_s=JOIN_S)
            connection.pause_reading()
            meet = await self._find_meeting(join.id)
            meet(join, connection)
            entered = True
        except P2PTrainError as error:
            if on_problem is not None:
                on_problem(error, connection.ends.remote)
            with suppress(ConnectionLost):
                connection.send(last_word(error.code if isinstance(error, Refused) else RefusalCode.PROTOCOL, error))
        finally:
            self.half_open.leave(host)
            if not entered:
                await connection.close()

    async def _find_meeting(self, circuit_id: str) -> Callable[[JoinCircuit, Connection], None]:
        with suppress(TimeoutError):
            async with asyncio.timeout(ORDER_S):
                while circuit_id not in self._meetings:
                    await self._meeting_added.wait()
        if meet := self._meetings.get(circuit_id):
            return meet
        text = f"no such circuit was announced here within {ORDER_S:g} s, or it was used already"
        raise Refused(RefusalCode.UNKNOWN_CIRCUIT, text, remedy="dial again: the seed makes another circuit")

    def _add_meeting(self, circuit_id: str, meet: Callable[[JoinCircuit, Connection], None]) -> None:
        self._meetings[circuit_id] = meet
        self._meeting_added.set()
        self._meeting_added.clear()


async def _refuse_request(peer_id: str) -> Circuit:
    raise Unreachable(f"{peer_id} is behind a router, and no seed is here that could help to reach it")


def _taken(side: str) -> Refused:
    return Refused(RefusalCode.DUPLICATE_PEER, f"the circuit has a {side} already")


def _seen_of(connection: Connection) -> SocketAddress:
    host, port = connection.ends.remote
    if not port:
        raise ConnectionLost("the connection was reset")
    return SocketAddress(host, port)


def _hand_over(transport: asyncio.Transport, protocol: asyncio.BufferedProtocol, **facts: Any) -> None:
    """Give ``transport``, whose reading is paused, to ``protocol``, to which ``get_extra_info`` answers ``facts``."""
    transport.set_protocol(protocol)
    transport.resume_reading()
    try:
        protocol.connection_made(cast(asyncio.BaseTransport, _CircuitTransport(transport, facts)))
    except BaseException:
        transport.abort()
        raise


class _CircuitTransport:
    """An end's transport as the protocol above knows it: named by the other end, not by the meeting point."""

    def __init__(self, transport: asyncio.Transport, facts: dict[str, Any]) -> None:
        self._transport, self._facts = transport, facts

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "rtt_s" and self._facts["way"] == RELAYED:
            return default  # the kernel measures the way to the relay
        return self._facts[name] if name in self._facts else self._transport.get_extra_info(name, default)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


# ------------------------------------------------------------------------------------------------- accepted connections


_KIND_AT = LENGTH_BYTES
FIRST_BYTES = 16
"""Less than the shortest frame, so that no protocol can have enough while it is given them."""


class _FirstBytes(asyncio.BufferedProtocol):
    """Reads the first bytes of an accepted connection, and passes it on to the protocol that they are for.

    A connection that is silent for ``JOIN_S``, or that comes while too many are, goes to the ordinary protocol.
    """

    def __init__(
        self,
        network: CircuitNetwork,
        factory: ProtocolFactory,
        undecided: set[_FirstBytes],
        on_problem: OnProblem | None,
    ) -> None:
        self._network, self._factory, self._on_problem = network, factory, on_problem
        self._undecided = undecided
        self._buffer = bytearray(FIRST_BYTES)
        self._filled = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._host = str((transport.get_extra_info("peername") or "?")[0])
        if self._network.half_open.enter(self._host):
            self._pass_on(self._factory())
            return
        self._undecided.add(self)
        self._timer = asyncio.get_running_loop().call_later(JOIN_S, self._pass_on_ordinary)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._buffer[0] or (self._filled > _KIND_AT and self._buffer[_KIND_AT] != JoinCircuit.KIND):
            self._pass_on_ordinary()
        elif self._filled > _KIND_AT:
            self._forget()  # its place in half_open stays until the circuit is found
            self._pass_on(Connection(partial(self._network.join_soon, self._host, self._on_problem)))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._decide()

    def pause_writing(self) -> None:
        """Do nothing: it writes nothing."""

    def _pass_on_ordinary(self) -> None:
        self._decide()
        self._pass_on(self._factory())

    def _decide(self) -> None:
        if self._timer is not None:
            self._network.half_open.leave(self._host)
        self._forget()

    def _forget(self) -> None:
        self._undecided.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass_on(self, protocol: asyncio.BufferedProtocol) -> None:
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        first = memoryview(self._buffer)[: self._filled]
        while first and not self.transport.is_closing():
            # The view is released before buffer_updated, in which the protocol may resize its bytearray.
            with memoryview(protocol.get_buffer(-1)) as buffer:
                nbytes = min(buffer.nbytes, first.nbytes)
                buffer[:nbytes] = first[:nbytes]
            protocol.buffer_updated(nbytes)
            first = first[nbytes:]


@dataclass(frozen=True, eq=False, slots=True)
class _CircuitListener:
    listener: Listener
    factory: ProtocolFactory
    undecided: set[_FirstBytes]
    listening: list[_CircuitListener]

    @property
    def address(self) -> Address:
        return self.listener.address

    async def close(self) -> None:
        if self in self.listening:
            self.listening.remove(self)
        await self.listener.close()
        for first in list(self.undecided):
            first.transport.abort()


# ---------------------------------------------------------------------------------------------------------------- relay


class _RelayedCircuit:
    """A circuit at its relay, from the seed's order to its end.

    Args:
        forget: called once, when no end may join any more.
    """

    def __init__(
        self, network: CircuitNetwork, peers: tuple[str, ...], lives_s: float, forget: Callable[[], object]
    ) -> None:
        self.network, self.peers = network, peers
        self.served_bytes = 0.0  # on the clock of the pace
        self.moved = False  # since the timer was set
        self._forget = forget
        self._ends: dict[str, _RelayEnd] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(lives_s, self._expire, lives_s)

    def enter(self, join: JoinCircuit, connection: Connection) -> None:
        """Take an end's connection. Raises ``Refused``, ``ConnectionLost``."""
        if join.side in self._ends:
            raise _taken(join.side)
        if not self._ends:
            self.network.add_relayed(self)
        self._ends[join.side] = _RelayEnd(self, join, connection)
        if len(self._ends) == len((CALLER, ANSWERER)):
            self._forget()
            self._watch_idle()
            one, other = self._ends.values()
            one.begin(other)
            other.begin(one)

    def end(self, error: P2PTrainError | None = None) -> None:
        """Close both ends, and tell those that wait for the other one why."""
        self._timer.cancel()
        self._forget()
        self.network.remove_relayed(self)
        for end in self._ends.values():
            end.close(error)

    def _expire(self, lives_s: float) -> None:
        self.end(DeadlineExceeded(f"the other end did not come to the relay within {lives_s:g} s"))

    def _watch_idle(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(IDLE_S, self._end_idle)
        self.moved = False

    def _end_idle(self) -> None:
        if self.moved:
            self._watch_idle()
        else:
            self.end()


class _RelayEnd(asyncio.BufferedProtocol):
    """Reads from one end of a circuit and writes to the other one, as fast as that takes it."""

    def __init__(self, circuit: _RelayedCircuit, join: JoinCircuit, connection: Connection) -> None:
        self.circuit, self._join = circuit, join
        self._seen = _seen_of(connection)
        self._pace = circuit.network.pace
        self._transport = connection.detach()
        self._transport.set_protocol(self)
        self._other: _RelayEnd | None = None
        self._buffer = bytearray()
        self._is_reading = self._eof = False
        self._waits = False  # for its turn

    def begin(self, other: _RelayEnd) -> None:
        self._other = other
        self._write(CircuitJoined(other._seen, other._join.addresses))
        self.steer()

    def close(self, error: P2PTrainError | None) -> None:
        if self._other is None and error is not None and not self._transport.is_closing():
            self._write(last_word(RefusalCode.UNREACHABLE, error))
            self._transport.close()
        else:
            self._transport.abort()

    def take_turn(self) -> None:
        self._waits = False
        self.steer()

    def steer(self) -> None:
        """Read if it is this end's turn and all that was read before is with the kernel."""
        wanted = self._other is not None and not self._waits and not self._other._transport.get_write_buffer_size()
        if wanted != self._is_reading:
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _write(self, message: Message) -> None:
        self._transport.write(encode_control(message.KIND, encode(message), generation=0, stream=0))

    # What the transport calls.

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._buffer:
            self._buffer = bytearray(self._pace.piece_bytes)
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        assert self._other is not None
        self._other._transport.write(memoryview(self._buffer)[:nbytes])
        self.circuit.moved = True
        self.circuit.network.relayed_bytes += nbytes
        self._waits = not self._pace.allow(self, nbytes)
        self.steer()

    def eof_received(self) -> bool:
        assert self._other is not None
        self._eof = True
        if self._other._eof:  # both directions have ended
            self.circuit.network.remove_relayed(self.circuit)
            self._transport.close()
            self._other._transport.close()
        else:
            self._other._transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if not (self._eof and self._other is not None and self._other._eof):
            self.circuit.end(ConnectionLost("the other end left"))

    def pause_writing(self) -> None:
        """Do nothing: ``steer`` looks at the buffer."""

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.steer()


BURST_S = 0.05
"""What a relay may send at once after a pause, in seconds of its limit: more than a loop is late."""


class RelayPace:
    """Shares so many bytes per second among the circuits of a relay, in both directions; 0: no limit.

    While the limit is reached, the circuit that was served least is read next, one piece (start-time fair queueing,
    Goyal et al., 1996). A circuit that was idle does not get back what it did not use.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.piece_bytes = min(PIECE_BYTES, max(1 << 10, round(bytes_per_s / 100))) if bytes_per_s else PIECE_BYTES
        self._paid_at = 0.0  # when the limit allows what was read so far
        self._served_bytes = 0.0  # by the circuit that was served last, on this clock
        self._waiting: list[tuple[float, int, _RelayEnd]] = []  # a heap
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def allow(self, end: _RelayEnd, nbytes: int) -> bool:
        """Account for what ``end`` has read. Return whether it may read on; if not, ``take_turn`` follows."""
        if not self._bytes_per_s:
            return True
        now = asyncio.get_running_loop().time()
        self._paid_at = max(self._paid_at, now - BURST_S) + nbytes / self._bytes_per_s
        circuit = end.circuit
        circuit.served_bytes = max(circuit.served_bytes, self._served_bytes) + nbytes
        if self._paid_at <= now and not self._waiting:
            self._served_bytes = circuit.served_bytes
            return True
        heapq.heappush(self._waiting, (circuit.served_bytes, next(self._order), end))
        self._serve_later(now)
        return False

    def _serve_later(self, now: float) -> None:
        if self._timer is None and self._waiting:
            # At least a turn of the loop, in which the end served before can read.
            at = max(self._paid_at, now + 0.001)
            self._timer = asyncio.get_running_loop().call_at(at, self._serve)

    def _serve(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        if self._paid_at <= now + 1e-6:
            self._served_bytes, _, end = heapq.heappop(self._waiting)
            end.take_turn()
        self._serve_later(now)
