"""Where streams of bytes come from: TCP, and (from ``wire.memory``) a network inside one process.

Both are a ``Network`` (``p2ptrain.core.world``) and pass one conformance suite. Foreign exceptions are translated here:
whatever goes wrong while dialling is ``Unreachable``, whatever goes wrong while binding is ``UserError``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

from p2ptrain.core.world import Listener, OnProblem, ProtocolFactory
from wire.memory import MemoryNetwork
from wire.sockets import SocketListener, SocketTransport, can_watch
from wire.transport_base import Address, cannot_listen, check_port, unreachable

__all__ = ["MemoryNetwork", "TcpNetwork"]

BACKLOG = 256


class TcpNetwork:
    """TCP over the running event loop, asyncio's own or uvloop.

    Args:
        buffer_bytes: the kernel's send and receive buffer of each socket; 0 leaves them to the system, which grows them
            with the link (better, except where it is forbidden to grow them far enough for a long fat pipe).
        keepalive_s: idle seconds before the kernel begins to ask whether the other machine still exists.
        user_timeout_s: how long sent data may stay unacknowledged, or the peer's window closed, before the kernel gives
            the connection up (RFC 5482; on Linux it also takes the place of the keepalive's count); 0 leaves the
            system's rules. Long on purpose: a member that still computes does not read, which is a closed window and
            no death. Silence is judged by heartbeats, far sooner.
    """

    def __init__(self, *, buffer_bytes: int = 0, keepalive_s: float = 15.0, user_timeout_s: float = 600.0) -> None:
        self._buffer_bytes = buffer_bytes
        self._tcp_options = {
            "TCP_NODELAY": 1,
            "TCP_KEEPIDLE": max(1, round(keepalive_s)),
            "TCP_KEEPALIVE": max(1, round(keepalive_s)),  # the name of KEEPIDLE on macOS
            "TCP_KEEPINTVL": max(1, round(keepalive_s / 3)),
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": round(user_timeout_s * 1000),
        }

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``: each address of the name in turn, all within ``timeout_s``. Raises ``Unreachable``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        check_port(port, least=1)
        try:
            async with asyncio.timeout_at(deadline):
                places = await _resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise unreachable(host, port, error, timeout_s) from error
        problem: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
        for index, (family, address) in enumerate(places):
            # An address that swallows packets must leave time for the ones after it.
            share_s = (deadline - loop.time()) / (len(places) - index)
            try:
                async with asyncio.timeout(share_s):
                    return await self._dial(family, address, factory)
            except OSError as error:  # TimeoutError is one
                problem = error
        raise unreachable(host, port, problem, timeout_s) from problem

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept connections on ``host:port``, IPv4 first where the name has both. Raises ``UserError``.

        An empty host is every IPv4 interface; ``"::"`` is every interface wherever the system lets one socket do both.
        """
        sock = await self.bound(host, port)
        loop = asyncio.get_running_loop()
        if can_watch(loop):
            return SocketListener(loop, sock, factory, backlog=BACKLOG)
        server = await loop.create_server(factory, sock=sock, backlog=BACKLOG)
        return _TcpListener(server, sock.getsockname()[:2])

    async def bound(self, host: str, port: int, *, option: str = "--port") -> socket.socket:
        """A socket that listens there, for another protocol than the peers'; as ``listen``.

        Args:
            option: of the command line, by which another port is chosen.
        """
        check_port(port, least=0)
        try:
            places = await _resolve(host, port, passive=True)
            family, address = min(places, key=lambda place: place[0] != socket.AF_INET)
            return self._bound(family, address)
        except (OSError, UnicodeError) as error:
            raise cannot_listen(host, port, error, option=option) from error

    async def _dial(self, family: int, address: Any, factory: ProtocolFactory) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._tune(sock)
            await loop.sock_connect(sock, address)
            protocol = factory()
        except BaseException:
            sock.close()
            raise
        if can_watch(loop):
            SocketTransport(loop, sock, protocol)
        else:
            await loop.create_connection(lambda: protocol, sock=sock)  # which owns the socket, also when it fails

    def _bound(self, family: int, address: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # elsewhere the option would let two programs share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._tune(sock)  # accepted sockets inherit the options
            sock.bind(address)
            sock.listen(BACKLOG)  # here, so that a port taken in this instant is told like any other
        except BaseException:
            sock.close()
            raise
        return sock

    def _tune(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in self._tcp_options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self._buffer_bytes:  # before connect and listen: the window's scale is agreed on with the first packet
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)


class _TcpListener:
    def __init__(self, server: asyncio.AbstractServer, address: Address) -> None:
        self._server = server
        self._address = address

    @property
    def address(self) -> Address:
        return self._address

    async def close(self) -> None:
        # Not wait_closed(): since Python 3.12 it waits for the established connections too, and they live on.
        self._server.close()


async def _resolve(host: str, port: int, *, passive: bool = False) -> list[tuple[int, Any]]:
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE if passive else 0
    )
    return [(family, address) for family, _, _, _, address in found]
