"""Direct tries: one end of a circuit connects with the other end without the meeting point, if their routers let it.

Each end listens on a port for each family of addresses, and dials the meeting point and every address of the other end
from the same port. So the meeting point sees the port to which a router that keeps ports maps it, and the packets of
each end open its own router or firewall for those of the other one (TCP simultaneous open, RFC 9293, section 3.5).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress

from p2ptrain.core.background import Background
from p2ptrain.core.errors import P2PTrainError, Unreachable
from wire.connection import Connection
from wire.messages import ANSWERER, CALLER, DIRECT, PUNCHED, RELAYED, Circuit, JoinCircuit, SocketAddress
from wire.transport import Address, SocketListener, TcpNetwork

TRY_S = 1.5
"""How long the caller waits for a direct path. A router on each end that keeps ports needs one to two round trips."""
DIAL_S = 5.0
RETRY_S = 0.1
"""After a refusal: the other end, or its router, may not have dialled yet."""
MAX_PATHS = 16
SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses beyond every home (RFC 5737, RFC 3849), to learn from which address this machine would send there."""


class DirectTries:
    """The direct tries of one end of ``circuit``."""

    def __init__(self, circuit: Circuit) -> None:
        self._circuit, self._network = circuit, TcpNetwork()
        self._listeners: dict[int, SocketListener] = {}
        for family in SOMEWHERE:
            with suppress(OSError):  # this machine lacks the family
                self._listeners[family] = self._network.share_port(family, lambda: Connection(self._confirm_soon))
        self._own: list[SocketAddress] = []
        self._chosen: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._connections: set[Connection] = set()
        self._tasks = Background()

    async def dial_meeting(self, relay: Connection) -> list[SocketAddress]:
        """Connect ``relay`` to the meeting point. Return where the other end may reach this one, if no NAT is between.

        Raises ``Unreachable``.
        """
        await self._network.connect(self._circuit.host, self._circuit.port, lambda: relay, timeout_s=DIAL_S)
        for host in dict.fromkeys([relay.ends.local[0], *map(_source_host, self._listeners)]):
            with suppress(ValueError):  # the connection was reset
                number = ipaddress.ip_address(host)
                listener = self._listeners.get(socket.AF_INET if number.version == 4 else socket.AF_INET6)
                if listener is not None and not number.is_link_local:
                    self._own.append(SocketAddress(host, listener.address[1]))
        return self._own

    async def choose(self, addresses: list[SocketAddress], relay: Connection) -> tuple[Connection, str]:
        """Return a connection to the other end, with its reading paused, and its way. Call ``close`` afterwards.

        ``addresses``: of the other end, as ``CircuitJoined`` has them.
        """
        for address in dialable_untrusted(addresses, self._own):
            self._tasks.start(self._dial(address), "wire.punching")
        if self._circuit.side == ANSWERER:
            self._tasks.start(self._confirm(relay), "wire.punching")
            connection = await self._chosen
        else:
            connection = relay
            with suppress(TimeoutError):
                async with asyncio.timeout(TRY_S):
                    connection = await self._chosen
            connection.pause_reading()
            connection.send(JoinCircuit(self._circuit.id, CALLER))
            await connection.flush(timeout_s=TRY_S)
        if connection is relay:
            return connection, RELAYED
        return connection, DIRECT if SocketAddress(*connection.ends.remote) in addresses[1:] else PUNCHED

    async def close(self) -> None:
        """End all tries, and the connections that were not detached."""
        for listener in self._listeners.values():
            await listener.close()
        for connection in self._connections:
            connection.abort()
        await self._tasks.stop()

    async def _dial(self, address: Address) -> None:
        while not self._chosen.done():
            try:
                await self._network.connect(*address, lambda: Connection(self._confirm_soon), timeout_s=TRY_S)
                return
            except Unreachable:
                await asyncio.sleep(RETRY_S)

    def _confirm_soon(self, connection: Connection) -> None:
        if len(self._connections) >= MAX_PATHS:
            connection.abort()
            return
        self._connections.add(connection)
        self._tasks.start(self._confirm(connection), "wire.punching")

    async def _confirm(self, connection: Connection) -> None:
        """Choose ``connection``, if the other end of this circuit is there: on the answerer, if it was chosen there."""
        with suppress(P2PTrainError):
            if self._circuit.side == ANSWERER and connection in self._connections:
                connection.send(JoinCircuit(self._circuit.id, ANSWERER))
            join = await connection.expect(JoinCircuit, timeout_s=2 * TRY_S)
            if join.id == self._circuit.id and join.side != self._circuit.side and not self._chosen.done():
                connection.pause_reading()
                self._chosen.set_result(connection)


def dialable_untrusted(addresses: Sequence[SocketAddress], own: Sequence[SocketAddress]) -> list[Address]:
    """Return which of the other end's ``addresses`` may be dialled: numbers of single machines, and not this end.

    Loopback addresses only if this end has one itself: then both are on one machine.
    """
    is_here = any(ipaddress.ip_address(each.host).is_loopback for each in own)
    found: list[Address] = []
    for address in addresses:
        with suppress(ValueError):  # not a number
            number = ipaddress.ip_address(address.host)
            usable = not (number.is_multicast or number.is_unspecified or number.is_link_local)
            if usable and (is_here or not number.is_loopback) and address not in own:
                found.append((str(number), address.port))
    return list(dict.fromkeys(found))


def _source_host(family: int) -> str:
    """The address from which this machine would send to the Internet; empty if it has none. Nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((SOMEWHERE[socket.AddressFamily(family)], 9))
        return str(sock.getsockname()[0])
    return ""
