"""Direct tries: one end of a circuit connects with the other end without the meeting point, if their routers let it.

Each end listens on a port for each family of addresses, and dials the meeting point and every address of the other end
from the same port. So the meeting point sees the port to which a router that keeps ports maps it, and the packets of
each end open its own router or firewall for those of the other one (TCP simultaneous open, RFC 9293, section 3.5).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial

from p2ptrain.core.errors import P2PTrainError, Unreachable
from wire.connection import Connection
from wire.messages import ANSWERER, DIRECT, PUNCHED, RELAYED, Circuit, CircuitJoined, CircuitPath, SocketAddress
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
    """The direct tries of one end of ``circuit``.

    Attributes:
        ports: family → local port; the meeting point is dialled from it.
    """

    def __init__(self, network: TcpNetwork, circuit: Circuit) -> None:
        self._network, self._circuit = network, circuit
        self._listeners: dict[int, SocketListener] = {}
        for family in SOMEWHERE:
            with suppress(OSError):  # this machine lacks the family
                self._listeners[family] = network.share_port(family, lambda: Connection(self._confirm_soon))
        self.ports = {family: listener.address[1] for family, listener in self._listeners.items()}
        self._chosen: asyncio.Future[tuple[Connection, CircuitPath]] = asyncio.get_running_loop().create_future()
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def dial_meeting(self, relay: Connection) -> None:
        """Dial the meeting point. Raises ``Unreachable``."""
        host, port = self._circuit.host, self._circuit.port
        await self._network.connect(host, port, partial(_same, relay), timeout_s=DIAL_S, ports=self.ports)

    def own_addresses(self, relay: Connection) -> list[SocketAddress]:
        """Where the other end may reach this one, if no NAT is between. ``relay``: connected to the meeting point."""
        hosts = [relay.ends.local[0], *map(_source_host, self.ports)]
        numbers = [ipaddress.ip_address(host) for host in dict.fromkeys(hosts) if host and "%" not in host]
        return [
            SocketAddress(str(number), self.ports[family])
            for number in numbers
            if (family := socket.AF_INET if number.version == 4 else socket.AF_INET6) in self.ports
        ]

    async def choose(self, joined: CircuitJoined, relay: Connection) -> tuple[Connection, str]:
        """Return a connection to the other end, with its reading paused, and its way. Call ``close`` afterwards.

        Args:
            relay: the connection to the meeting point, on which the other end has joined.
        """
        own = self.own_addresses(relay)
        for address in dialable_untrusted([joined.seen, *joined.addresses], own):
            self._start(self._dial(address))
        if self._circuit.side == ANSWERER:
            self._start(self._confirm(relay))
            connection, path = await self._chosen
            return connection, path.way
        connection, way = relay, RELAYED
        with suppress(TimeoutError):
            async with asyncio.timeout(TRY_S):
                connection, _ = await self._chosen
                is_own = SocketAddress(*connection.ends.remote) in joined.addresses
                way = DIRECT if is_own else PUNCHED
        connection.pause_reading()
        connection.send(CircuitPath(self._circuit.id, way))
        await connection.flush(timeout_s=TRY_S)
        return connection, way

    async def close(self) -> None:
        """End all tries, and the connections that were not detached."""
        for listener in self._listeners.values():
            await listener.close()
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(work, name="wire.punching"))

    async def _dial(self, address: Address) -> None:
        while not self._chosen.done():
            connection = Connection(self._confirm_soon)
            try:
                await self._network.connect(*address, partial(_same, connection), timeout_s=TRY_S, ports=self.ports)
                return
            except Unreachable:
                await asyncio.sleep(RETRY_S)

    def _confirm_soon(self, connection: Connection) -> None:
        if len(self._connections) >= MAX_PATHS:
            connection.abort()
            return
        self._connections.add(connection)
        self._start(self._confirm(connection))

    async def _confirm(self, connection: Connection) -> None:
        """Choose ``connection``, if the other end of this circuit is there: on the answerer, if it was chosen there."""
        with suppress(P2PTrainError):
            if self._circuit.side == ANSWERER and connection in self._connections:
                connection.send(CircuitPath(self._circuit.id))
            path = await connection.expect(CircuitPath, timeout_s=2 * TRY_S)
            if path.id == self._circuit.id and not self._chosen.done():
                connection.pause_reading()
                self._chosen.set_result((connection, path))


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


def _same(connection: Connection) -> Connection:
    return connection


def _source_host(family: int) -> str:
    """The address from which this machine would send to the Internet; empty if it has none. Nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((SOMEWHERE[socket.AddressFamily(family)], 9))
        return str(sock.getsockname()[0])
    return ""
