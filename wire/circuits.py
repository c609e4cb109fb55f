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
A first byte of 0 and the frame's kind tell it from TLS records and from the first frame of other conversations. The
listener reads the first bytes of each connection, and gives the others, with these bytes, to their own protocol.

If ``Circuit.tries_direct``, both ends meanwhile try to connect without the relay (``wire.punching``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from p2ptrain.core.background import Background
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    PeerError,
    Refused,
    Unreachable,
)
from p2ptrain.core.ids import is_id
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.address import format_address
from wire.connection import Connection, last_word
from wire.frame import LENGTH_BYTES
from wire.messages import ANSWERER, MOST_WAYS, RELAYED, REVERSED, Circuit, CircuitJoined, JoinCircuit, RefusalCode
from wire.punching import DirectTries
from wire.relay import RelayedCircuit, RelayLimits, RelayPace, remote_of, side_taken
from wire.transport import Address, HalfOpen, OpeningListener, TcpNetwork, can_share_ports, check_port

JOIN_S = 4.0
"""From dialling a meeting point until both ends are there, and from accepting a connection to its first bytes. Less
than ``wire.handshake`` waits for a connection, so that the error says who did not come."""
ORDER_S = 3.0
"""How long an end waits at a meeting point that has not heard of its circuit: the seed's order may come later."""
MAX_EXPECTED, MAX_UNUSED = 1024, 64  # of all callers; of one caller, with no end there yet

_SUFFIX = ".peer"
Meet = Callable[[JoinCircuit, Connection], None]
"""Takes an end that came to its circuit's meeting point. Raises ``Refused``, ``ConnectionLost``."""


def peer_host(peer_id: str) -> str:
    """The host name of a peer that is reached by a circuit."""
    return peer_id + _SUFFIX


def peer_of_host(host: str) -> str:
    """The peer id of a ``peer_host``; empty for every other host."""
    peer_id = host.removesuffix(_SUFFIX)
    return peer_id if peer_id != host and is_id(peer_id) else ""


class CircuitNetwork:
    """Reaches peers by circuits, meets the other ends of circuits, and relays those of others.

    Args:
        inner: carries the connections to meeting points, and all others, which cost nothing here.

    Attributes:
        request: asks the seed for a circuit to a peer; set by the owner. Raises ``P2PTrainError``.
        on_way: called with each circuit that this end joined and its way, one of ``WAYS``; empty: it failed, perhaps
            later, in the handshake of TLS.
        half_open: accepted connections that may be of a circuit, until that is known.
        relayed: the circuits that this process relays or expects to.
    """

    def __init__(self, inner: Network, *, limits: RelayLimits | None = None) -> None:
        self._inner = inner
        self.limits = limits or RelayLimits()
        self.request: Callable[[str], Awaitable[Circuit]] = _refuse_request
        self.on_way: Callable[[Circuit, str], None] = lambda circuit, way: None
        self.half_open = HalfOpen()
        self.relayed: set[RelayedCircuit] = set()
        self._pace = RelayPace(self.limits.bytes_per_s)
        self._accepts: tuple[ProtocolFactory, int] | None = None  # of the newest listener: factory and port
        self._meetings: dict[str, Meet] = {}  # by the id of circuits that ends may join here
        self._meeting_added = asyncio.Event()
        self._joining = Background()
        self._dialled: list[_CircuitTransport] = []  # the oldest first; perhaps some that have ended

    def ways(self) -> dict[str, str]:
        """The peers to which this end has dialled a circuit that is open, and the way of the newest one to each, as
        ``Heartbeat.ways``."""
        opened = [end for end in self._dialled if _is_open(end)][-MOST_WAYS:]
        return {
            end.circuit.answerer: end.facts["way"] + f" by {end.circuit.relay}" * (end.facts["way"] == RELAYED)
            for end in opened
        }

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``; a ``peer_host`` by a circuit. Raises as the inner network."""
        peer_id = peer_of_host(host)
        if not peer_id:
            await self._inner.connect(host, port, factory, timeout_s=timeout_s)
            return
        check_port(port, least=1)
        circuit: Circuit | None = None
        try:
            async with asyncio.timeout(timeout_s):
                circuit = await self.request(peer_id)
                transport, way = await self._join(circuit)
        except (TimeoutError, PeerError, NetworkError) as error:
            if circuit is not None:
                self.on_way(circuit, "")
            why, remedy = f"no circuit within {timeout_s:.3g} s", "is the other peer still connected to the seed?"
            if isinstance(error, P2PTrainError):
                why, remedy = error.message, error.remedy
            raise Unreachable(f"cannot reach {format_address(host, port)}: {why}", remedy=remedy) from error
        end = self._hand_over(transport, circuit, way, factory(), (host, port), (peer_host(circuit.caller), 0))
        self._dialled = [*filter(_is_open, self._dialled), end]

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept ordinary connections, ends of circuits that meet here, and circuits that ``accept`` joins.

        ``on_problem`` also gets the reasons why ends of circuits were refused.
        """
        opening: set[_FirstBytes] = set()
        accept = partial(_FirstBytes, self.half_open, factory, partial(self._join_soon, on_problem), opening)
        listener = await self._inner.listen(host, port, accept, on_problem)
        self._accepts = factory, listener.address[1]
        return OpeningListener(listener, opening)

    async def close(self) -> None:
        """End the circuits that are relayed or expected here. The connections of this peer's own circuits stay."""
        for relayed in list(self.relayed):
            relayed.end(ConnectionLost("the relay stops"))
        await self._joining.stop()

    # -------------------------------------------------------------------------------------------------- this end's side

    async def accept(self, circuit: Circuit) -> None:
        """Join ``circuit`` as its answerer. The newest listener's factory makes the protocol, as if it had accepted.

        Raises ``P2PTrainError``: the meeting point is not reached or refuses, or the caller does not come.
        """
        if self._accepts is None:
            raise Unreachable("this peer does not listen for others")
        factory, port = self._accepts
        transport, way = await self._join(circuit)
        remote, local = (peer_host(circuit.caller), 0), (peer_host(circuit.answerer), port)
        self._hand_over(transport, circuit, way, factory(), remote, local)

    def _hand_over(
        self,
        transport: asyncio.Transport,
        circuit: Circuit,
        way: str,
        protocol: asyncio.BufferedProtocol,
        remote: Address,
        local: Address,
    ) -> _CircuitTransport:
        """Give an end's ``transport``, whose reading is paused, to ``protocol``."""
        facts = {"peername": remote, "sockname": local, "way": way, "report_failure": lambda: self.on_way(circuit, "")}
        if way == RELAYED:
            facts["rtt_s"] = None  # the kernel measures the way to the relay
        end = _CircuitTransport(transport, circuit, facts)
        transport.set_protocol(protocol)
        transport.resume_reading()
        try:
            protocol.connection_made(cast(asyncio.BaseTransport, end))
        except BaseException:
            transport.abort()
            raise
        self.on_way(circuit, way)
        return end

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
                    tries = DirectTries(circuit)
                    addresses = await tries.dial_meeting(meeting)
                else:
                    await self._inner.connect(circuit.host, circuit.port, lambda: meeting, timeout_s=JOIN_S)
                    addresses = []
                meeting.send(JoinCircuit(circuit.id, circuit.side, addresses))
                joined = await meeting.expect(CircuitJoined, timeout_s=JOIN_S)
                if tries is not None and addresses and joined.addresses[1:]:  # both ends try
                    connection, way = await tries.choose(joined.addresses, meeting)
                    return connection.detach(), way
            meeting.pause_reading()
            return meeting.detach(), RELAYED if circuit.relay else REVERSED
        except TimeoutError:
            where = circuit.relay or format_address(circuit.host, circuit.port)
            raise DeadlineExceeded(f"the other end did not come to {where} within {JOIN_S:g} s") from None
        finally:
            meeting.abort()  # nothing, if it was detached
            if tries is not None:
                await tries.close()

    async def _meet_answerer(self, circuit_id: str) -> asyncio.Transport:
        """Wait for the answerer of this peer's own circuit at this peer's listener."""
        arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def enter(join: JoinCircuit, connection: Connection) -> None:
            if join.side != ANSWERER or arrived.done():
                raise side_taken(join)
            arrived.set_result(connection)

        self._add_meeting(circuit_id, enter)
        try:
            async with asyncio.timeout(JOIN_S):
                connection = await arrived
            connection.pause_reading()
            connection.send(CircuitJoined([remote_of(connection)]))
            await connection.flush(timeout_s=JOIN_S)
            return connection.detach()
        except TimeoutError:
            raise DeadlineExceeded(f"the other end did not dial this one within {JOIN_S:g} s") from None
        finally:
            del self._meetings[circuit_id]
            if arrived.done() and not arrived.cancelled():
                arrived.result().abort()

    # ------------------------------------------------------------------------------------------------ the meeting point

    def expect_circuit(self, circuit_id: str, lives_s: float, peers: Sequence[str] = ()) -> None:
        """Relay this circuit once both ends have named it, which they may do within ``lives_s``.

        ``peers``: ids of the ends, the caller first. Raises ``Refused`` if this process does not relay, or expects too
        many circuits, of all callers or of this one.
        """
        if not self.limits.circuits:
            raise Refused(RefusalCode.NOT_PERMITTED, "this peer is no relay")
        unused = sum(not each.is_used and each.peers[:1] == tuple(peers[:1]) for each in self.relayed)
        if len(self._meetings) >= MAX_EXPECTED or unused >= MAX_UNUSED:
            raise Refused(RefusalCode.BUSY, f"{len(self._meetings)} circuits are expected here already")
        if circuit_id not in self._meetings:
            relayed = RelayedCircuit(self._pace, tuple(peers), lives_s, partial(self._end_meeting, circuit_id))
            self.relayed.add(relayed)
            self._add_meeting(circuit_id, partial(self._enter_relayed, relayed))

    def count_relayed(self, peer_id: str = "") -> int:
        """The circuits that are relayed here: all, or those of one peer."""
        return sum(each.is_used and peer_id in ("", *each.peers) for each in self.relayed)

    def _enter_relayed(self, relayed: RelayedCircuit, join: JoinCircuit, connection: Connection) -> None:
        limits = self.limits
        for most, who in (limits.circuits, ""), *((limits.circuits_per_peer, peer_id) for peer_id in relayed.peers):
            if not relayed.is_used and self.count_relayed(who) >= most:
                raise Refused(RefusalCode.FULL, f"the relay serves {most} circuits{who and f' of {who}'} already")
        relayed.enter(join, connection)

    def _end_meeting(self, circuit_id: str, relayed: RelayedCircuit, is_over: bool) -> None:
        self._meetings.pop(circuit_id, None)
        if is_over:
            self.relayed.discard(relayed)

    def _add_meeting(self, circuit_id: str, meet: Meet) -> None:
        self._meetings[circuit_id] = meet
        self._meeting_added.set()
        self._meeting_added.clear()

    def _join_soon(self, on_problem: OnProblem | None, connection: Connection) -> None:
        self._joining.start(self._serve_join(on_problem, connection), "wire.circuits.join")

    async def _serve_join(self, on_problem: OnProblem | None, connection: Connection) -> None:
        """Bring an accepted end to its circuit, or refuse it."""
        host = connection.ends.remote[0]
        busy = self.half_open.enter(host)
        try:
            if busy:
                raise Refused(RefusalCode.BUSY, busy, remedy="try again in a few seconds")
            join = await connection.expect(JoinCircuit, timeout_s=JOIN_S)
            (await self._find_meeting(join.id))(join, connection)
        except P2PTrainError as error:
            if on_problem is not None:
                on_problem(error, connection.ends.remote)
            with suppress(ConnectionLost):
                connection.send(last_word(error))
            await connection.close()
        finally:
            if not busy:
                self.half_open.leave(host)

    async def _find_meeting(self, circuit_id: str) -> Meet:
        with suppress(TimeoutError):
            async with asyncio.timeout(ORDER_S):
                while circuit_id not in self._meetings:
                    await self._meeting_added.wait()
        if meet := self._meetings.get(circuit_id):
            return meet
        text = f"no such circuit was announced here within {ORDER_S:g} s, or it was used already"
        raise Refused(RefusalCode.UNKNOWN_CIRCUIT, text, remedy="dial again: the seed makes another circuit")


async def _refuse_request(peer_id: str) -> Circuit:
    raise Unreachable(f"{peer_id} is behind a router, and no seed is here that could help to reach it")


@dataclass(frozen=True, slots=True)
class _CircuitTransport:
    """An end's transport as the protocol above knows it: named by the other end, not by the meeting point.

    ``facts``: answers of ``get_extra_info``. ``report_failure``: call it if what was sent above did not come through.
    """

    transport: asyncio.Transport
    circuit: Circuit
    facts: dict[str, Any]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.facts[name] if name in self.facts else self.transport.get_extra_info(name, default)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


def _is_open(end: _CircuitTransport) -> bool:
    return not end.transport.is_closing()


_KIND_AT = LENGTH_BYTES
FIRST_BYTES = 16
"""Less than the shortest frame, so that no protocol can have enough while it is given them."""


class _FirstBytes(asyncio.BufferedProtocol):
    """Reads the first bytes of an accepted connection, and passes it on to the protocol that they are for.

    One that is silent for ``JOIN_S``, or that comes while too many are, goes to the ordinary protocol.

    Args:
        factory: makes the ordinary protocol. join: called with the connection of an end of a circuit.
        opening: holds this object until it has decided.
    """

    def __init__(
        self,
        half_open: HalfOpen,
        factory: ProtocolFactory,
        join: Callable[[Connection], None],
        opening: set[_FirstBytes],
    ) -> None:
        self._half_open, self._factory, self._join, self._opening = half_open, factory, join, opening
        self._buffer = bytearray(FIRST_BYTES)
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._host = str((transport.get_extra_info("peername") or "?")[0])
        if self._half_open.enter(self._host):
            self._pass_on(self._factory())
        else:
            self._opening.add(self)
            self._timer = asyncio.get_running_loop().call_later(JOIN_S, lambda: self._pass_on(self._factory()))

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._buffer[0] or self._filled > _KIND_AT:
            joins = not self._buffer[0] and self._buffer[_KIND_AT] == JoinCircuit.KIND
            self._pass_on(Connection(self._join) if joins else self._factory())

    def connection_lost(self, exc: Exception | None) -> None:
        self._decide()

    def abort(self) -> None:
        self._transport.abort()

    def _decide(self) -> None:
        if self in self._opening:
            self._opening.discard(self)
            self._timer.cancel()
            self._half_open.leave(self._host)

    def _pass_on(self, protocol: asyncio.BufferedProtocol) -> None:
        self._decide()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        first = memoryview(self._buffer)[: self._filled]
        while first and not self._transport.is_closing():
            # The view is released before buffer_updated, in which the protocol may resize its bytearray.
            with memoryview(protocol.get_buffer(-1)) as buffer:
                nbytes = min(buffer.nbytes, first.nbytes)
                buffer[:nbytes] = first[:nbytes]
            protocol.buffer_updated(nbytes)
            first = first[nbytes:]
