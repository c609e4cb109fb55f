"""TCP, and what all transports share: flow control without copies, error texts, and a limit on handshakes.

``TcpNetwork`` is a ``Network`` (``p2ptrain.core.world``). A failure to dial is ``Unreachable``, a failure to bind is
``UserError``. It passes the same conformance suite as the network inside one process (``p2ptrain.lab.memory``).

``SocketTransport`` replaces the event loops' own transports because of what they do between a write and the kernel:
asyncio joins and copies the parts of a write, uvloop delays writes to the end of the turn. ``SocketTransport`` uses the
loop's readiness calls. A write goes to the kernel within the call; what the kernel does not take waits, uncopied, until
the socket is writable. Reads go straight into the protocol's buffer, at most ``READS_A_TURN`` per turn, so that sending
also gets its turn. An all-reduce of 64 MiB over the loopback takes a tenth less time with it, on either loop.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import os
import socket
import struct
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, cast

from p2ptrain.core.errors import DeadlineExceeded, ResourceError, Unreachable, UserError
from p2ptrain.core.world import Listener, OnProblem, ProtocolFactory
from wire.address import format_address, is_loopback

WriteData: TypeAlias = bytes | bytearray | memoryview
Address: TypeAlias = tuple[str, int]


def bytes_view(data: WriteData) -> memoryview:
    """Return ``data`` as a flat view of bytes, not copied. Raises ``TypeError`` if it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise TypeError("only a contiguous buffer can be written without a copy")
    return view if (view.format == "B" and view.ndim == 1) or not view.nbytes else view.cast("B")


OUT_OF_FILES, MORE_FILES = "too many open files", "raise the limit where it was started: ulimit -n 65536"


def is_out_of_files(error: object) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def no_answer(
    host: str, port: int, timeout_s: float, *, did: str = "accepted the connection, and did not answer"
) -> DeadlineExceeded:
    """The error for a connected peer that sent nothing: small packets reach it."""
    text = f"{format_address(host, port)} {did} within {timeout_s:.3g} s"
    remedy = "is a p2ptrain there? If it is not busy, lower the interface's or VPN's MTU: `ip link set eth0 mtu 1280`"
    return DeadlineExceeded(f"{text}: it is very busy, or the network loses large packets", remedy=remedy)


def check_port(port: int, *, least: int) -> None:
    if not least <= port <= 65535:
        raise UserError(f"{port} is not a port", remedy=f"choose one from {max(least, 1)} to 65535")


def unreachable(host: str, port: int, error: Exception, timeout_s: float) -> Unreachable:
    code, cause = _code_and_cause(error)
    remedy = ""
    if cause == UNKNOWN_NAME:
        remedy = "check the name, or use the machine's IP address"
    elif isinstance(error, ConnectionRefusedError):
        cause, remedy = "connection refused", "is p2ptrain running there, and on this port?"
        if is_loopback(host):  # also where none was named
            remedy += " If it runs on another machine, give that machine's address"
    elif isinstance(error, TimeoutError):
        cause = f"no answer within {timeout_s:.3g} s"
        remedy = "is the machine up, and does its firewall let this port in?"
    elif is_out_of_files(error):
        cause, remedy = f"this process has {OUT_OF_FILES}", MORE_FILES
    elif code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        cause, remedy = "no route to it", "are both machines on the same network or VPN?"
    return Unreachable(f"cannot reach {format_address(host, port)}: {cause}", remedy=remedy)


def cannot_listen(host: str, port: int, error: Exception, *, option: str = "--port") -> UserError:
    code, cause = _code_and_cause(error)
    remedy = ""
    if code == errno.EADDRNOTAVAIL:
        cause = "it is not an address of this machine"
    if code == errno.EADDRNOTAVAIL or cause == UNKNOWN_NAME:
        remedy = "use 0.0.0.0 for every interface, or an address of this machine"
    elif code == errno.EADDRINUSE:
        cause, remedy = f"port {port} is in use", f"stop the program that has it, or choose another port with {option}"
    elif code == errno.EACCES:
        cause, remedy = f"port {port} is not permitted", f"choose a port above 1023 with {option}"
    return UserError(f"cannot listen on {format_address(host, port)}: {cause}", remedy=remedy)


UNKNOWN_NAME = "the host name is not known"


def _code_and_cause(error: Exception) -> tuple[int | None, str]:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return None, UNKNOWN_NAME
    return getattr(error, "errno", None), str(getattr(error, "strerror", None) or error)


class FlowControl(asyncio.Transport):
    """Base of transports. The protocol's writing is paused while any byte is unsent (a high-water mark of 0).

    A subclass implements ``get_write_buffer_size``. It calls ``_maybe_pause`` when the buffer grew, and
    ``_maybe_resume`` when it shrank.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._closing = False
        self._writing_paused = False

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.BufferedProtocol, protocol)

    def writelines(self, list_of_data: Iterable[WriteData]) -> None:
        for data in list_of_data:
            self.write(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0, "no protocol uses another limit"

    def _maybe_pause(self) -> None:
        if not self._writing_paused and self.get_write_buffer_size():
            self._writing_paused = True
            self._protocol.pause_writing()

    def _maybe_resume(self) -> None:
        if self._writing_paused and not self.get_write_buffer_size():
            self._writing_paused = False
            self._protocol.resume_writing()

    def _report(self, error: Exception) -> None:
        context = {"message": "a protocol failed", "exception": error, "transport": self, "protocol": self._protocol}
        asyncio.get_running_loop().call_exception_handler(context)


# -------------------------------------------------------------------------------------------------------------- sockets


READS_A_TURN = 4
BULK_BUFFER_BYTES = 4 << 20  # each way; a ring has at most half of it in flight between near members
_NOT_NOW = (BlockingIOError, InterruptedError)
_TCP_INFO_BYTES, _MIN_RTT = 152, struct.Struct("=148xI")  # linux/tcp.h: struct tcp_info up to tcpi_min_rtt


class SocketTransport(FlowControl):
    """A transport that takes over ``sock``, connected and non-blocking, on behalf of ``protocol``.

    It needs a loop with ``add_reader``. The constructor calls the protocol's ``connection_made``.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: asyncio.BufferedProtocol
    ) -> None:
        super().__init__(protocol)
        tune_for_bulk(sock)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._reading = self._writing = False  # whether the loop watches for this readiness
        self._paused = False
        self._eof = self._lost = False
        self._extra = {"socket": sock, "peername": _name(sock.getpeername), "sockname": _name(sock.getsockname)}
        try:
            protocol.connection_made(self)
        except Exception as error:  # noqa: BLE001 - a defective protocol ends its own connection only
            self._protocol_failed(error)
        self._watch_reading()

    # What the protocol calls: reading.

    def pause_reading(self) -> None:
        self._paused = True
        self._watch_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._watch_reading()

    def is_reading(self) -> bool:
        return not (self._paused or self._closing)

    # Writing.

    def write(self, data: WriteData) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[WriteData]) -> None:
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        parts = [view for view in map(bytes_view, list_of_data) if view.nbytes]
        if self._closing or not parts:
            return
        was_empty = not self._queue
        self._queue.extend(parts)
        self._queued_bytes += sum(view.nbytes for view in parts)
        if was_empty:
            self._send()
        self._maybe_pause()

    def get_write_buffer_size(self) -> int:
        return self._queued_bytes

    def write_eof(self) -> None:
        if not (self._eof or self._closing):
            self._eof = True
            if not self._queue:
                self._shut_down()

    # Ending.

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._watch_reading()
        if not self._queue:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._fail(None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "rtt_s":
            return _least_round_trip_s(self._sock)
        return self._extra.get(name, default)

    # What the loop calls.

    def _readable(self) -> None:
        for _ in range(READS_A_TURN):
            if self._paused or self._closing:
                return
            try:
                buffer = memoryview(self._protocol.get_buffer(-1))
                received = self._sock.recv_into(buffer)
                if received:
                    self._protocol.buffer_updated(received)
                    continue
                stays_open = self._protocol.eof_received()
                self.pause_reading()  # there is nothing more to read
                if not stays_open:
                    self.close()
            except _NOT_NOW:
                return
            except OSError as error:
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001 - as above
                self._protocol_failed(error)
                return

    def _writable(self) -> None:
        self._send()
        if not self._lost:
            self._maybe_resume()

    def _send(self) -> None:
        while self._queue:
            try:
                # far below any system's IOV_MAX
                sent = self._sock.sendmsg([view for view, _ in zip(self._queue, range(16), strict=False)])
            except _NOT_NOW:
                break
            except OSError as error:
                self._fail(error)
                return
            self._queued_bytes -= sent
            while sent:
                first = self._queue[0]
                if sent < first.nbytes:
                    self._queue[0] = first[sent:]
                    self._watch_writing()
                    return
                sent -= first.nbytes
                self._queue.popleft()
        self._watch_writing()
        if not self._queue:
            if self._closing:
                self._loop.call_soon(self._end, None)
            elif self._eof:
                self._shut_down()

    # Inside.

    def _watch_reading(self) -> None:
        wanted = not (self._paused or self._closing or self._lost)
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.remove_reader(self._fd)

    def _watch_writing(self) -> None:
        wanted = bool(self._queue) and not self._lost
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)

    def _shut_down(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._fail(error)

    def _protocol_failed(self, error: Exception) -> None:
        self._report(error)
        self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        self._closing = True
        self._queue.clear()
        self._queued_bytes = 0
        self._watch_reading()
        self._watch_writing()
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._watch_reading()
        self._watch_writing()
        try:
            self._protocol.connection_lost(error)
        finally:
            self._sock.close()


QUIET_S = 60.0


class SocketListener:
    """Accepts connections of ``sock``, which is bound and listens; ``factory`` makes the protocol of each.

    ``on_problem`` is told that file descriptors ran out, once until ``QUIET_S`` have passed without it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        factory: Callable[[], asyncio.BufferedProtocol],
        *,
        backlog: int,
        on_problem: OnProblem | None = None,
    ) -> None:
        self._loop, self._sock, self._factory, self._backlog = loop, sock, factory, backlog
        self._on_problem, self._failed_at = on_problem, -math.inf
        self._retry: asyncio.TimerHandle | None = None
        host, port, *_ = sock.getsockname()
        self.address: Address = host, port
        loop.add_reader(sock.fileno(), self._acceptable)

    async def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _acceptable(self) -> None:
        for _ in range(self._backlog):
            try:
                sock, _ = self._sock.accept()
            except (*_NOT_NOW, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            sock.setblocking(False)
            SocketTransport(self._loop, sock, self._factory())

    def _rest(self, error: OSError) -> None:
        # Out of file descriptors or memory. The connection stays acceptable, so without a pause the loop would spin.
        before, self._failed_at = self._failed_at, self._loop.time()
        if self._on_problem is None or not is_out_of_files(error):
            self._loop.call_exception_handler({"message": "accepting a connection failed", "exception": error})
        elif self._failed_at - before > QUIET_S:
            text = f"{OUT_OF_FILES}: new connections wait"
            self._on_problem(ResourceError(text, remedy=MORE_FILES), self.address)
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(1.0, self._resume)  # as in asyncio

    def _resume(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._acceptable)


@dataclass(frozen=True, eq=False, slots=True)
class OpeningListener:
    """A listener, and its connections that are ``opening``, in a handshake, and end with it by their ``abort``."""

    listener: Listener
    opening: set[Any]

    @property
    def address(self) -> Address:
        return self.listener.address

    async def close(self) -> None:
        await self.listener.close()
        for connection in list(self.opening):
            connection.abort()


def tune_for_bulk(sock: socket.socket) -> None:
    """Set kernel buffers of ``BULK_BUFFER_BYTES`` each way: a full buffer stops the sender, an empty one the reader.

    On Linux a buffer of a set size no longer grows with the link. So sizes stay automatic where programs may not set as
    much. On the loopback the congestion control does not pace: BBR was half as fast after the first gigabyte.
    """
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _may_set_bytes(limit) >= BULK_BUFFER_BYTES:
            with suppress(OSError):  # the socket is closed, or this system's limit is lower
                sock.setsockopt(socket.SOL_SOCKET, option, BULK_BUFFER_BYTES)
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):  # no longer connected, or reno is not available
            if is_loopback(str(sock.getpeername()[0])):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # every Linux allows it


@cache
def _may_set_bytes(limit: str) -> float:
    if not sys.platform.startswith("linux"):
        return math.inf
    try:
        return int(Path("/proc/sys/net/core", limit).read_text())
    except (OSError, ValueError):
        return 0


def can_watch(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether ``loop`` reports readiness of sockets, and sockets have ``sendmsg``. Windows lacks both by default."""
    return hasattr(socket.socket, "sendmsg") and not type(loop).__name__.startswith("Proactor")


def can_share_ports() -> bool:
    """Whether ``TcpNetwork.share_port`` works here."""
    return hasattr(socket, "SO_REUSEPORT") and can_watch(asyncio.get_running_loop())


def _name(get: Callable[[], Any]) -> Any:
    """The address of one end, IPv4's own on a socket for both families, and with the zone if it is link-local."""
    try:
        host, *rest = get()
        if rest[2:] and rest[2]:
            host += f"%{socket.if_indextoname(rest[2])}"
    except OSError:  # the connection was reset already
        return None
    return (host.removeprefix("::ffff:") if "." in host else host, *rest)


def _least_round_trip_s(sock: socket.socket) -> float | None:
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (least_us,) = _MIN_RTT.unpack(info)
    except (OSError, AttributeError, struct.error):  # the connection is gone, or the system has no TCP_INFO
        return None
    return float(least_us) / 1e6 if least_us < 0xFFFFFFFF else None


# ------------------------------------------------------------------------------------------------------------------ TCP


BACKLOG, BACKLOG_SHARED = 256, 8


class TcpNetwork:
    """TCP over the running event loop, asyncio's own or uvloop.

    Args:
        user_timeout_s: how long sent data may stay unacknowledged, or the peer's window closed, before the kernel drops
            the connection (RFC 5482; on Linux it also replaces the keepalive's count). 0 leaves the system's rules. It
            is long because a member that computes does not read: its window is closed, but it is alive. Heartbeats
            detect dead peers far sooner.
    """

    def __init__(self, *, user_timeout_s: float = 600.0) -> None:
        self._tcp_options = {
            "TCP_NODELAY": 1,
            "TCP_KEEPIDLE": 15,  # idle seconds before the kernel probes whether the other machine is alive
            "TCP_KEEPALIVE": 15,  # the name of KEEPIDLE on macOS
            "TCP_KEEPINTVL": 5,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": round(user_timeout_s * 1000),
        }
        self._ports: dict[int, int] = {}  # family → the port of share_port

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``: try each address of the name, all within ``timeout_s``. Raises ``Unreachable``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        check_port(port, least=1)
        try:
            async with asyncio.timeout_at(deadline):
                places = await resolve(host, port)
        except TimeoutError as error:
            text = f"cannot reach {format_address(host, port)}: no name server answered within {timeout_s:.3g} s"
            raise Unreachable(text, remedy="check the name, or use the machine's IP address") from error
        except (OSError, UnicodeError) as error:
            raise unreachable(host, port, error, timeout_s) from error
        problem: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
        for index, (family, address) in enumerate(places):
            # An address that drops packets must leave time for the next ones.
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
        """Accept connections on ``host:port``, on IPv4 if the name has both families. Raises ``UserError``.

        An empty host is every IPv4 interface; ``"::"`` is every interface of both families (``every_interface``).
        """
        sock = await self.bound(host, port)
        loop = asyncio.get_running_loop()
        if can_watch(loop):
            return SocketListener(loop, sock, factory, backlog=BACKLOG, on_problem=on_problem)
        server = await loop.create_server(factory, sock=sock, backlog=BACKLOG)
        return _TcpListener(server, sock.getsockname()[:2])

    async def bound(self, host: str, port: int, *, option: str = "--port") -> socket.socket:
        """Return a listening socket for a protocol other than the peers'. Raises as ``listen``.

        ``option`` is the command-line option for another port, named in the error.
        """
        check_port(port, least=0)
        try:
            places = await resolve(host, port, passive=True)
            family, address = min(places, key=lambda place: place[0] != socket.AF_INET)
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                if os.name == "posix":  # on Windows the option would let two programs share the port
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if host == "::":
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                self._tune(sock)  # accepted sockets inherit the options
                sock.bind(address)
                sock.listen(BACKLOG)  # here, so that a port taken since bind() is reported like any other
            except BaseException:
                sock.close()
                raise
        except (OSError, UnicodeError) as error:
            raise cannot_listen(host, port, error, option=option) from error
        return sock

    def share_port(self, family: int, factory: ProtocolFactory) -> SocketListener:
        """Accept on a free port. From then on ``connect`` dials addresses of ``family`` from it.

        Raises ``OSError``. Call it where ``can_share_ports``.
        """
        self._ports[family] = 0
        sock = self._socket(family)
        self._ports[family] = sock.getsockname()[1]
        sock.listen(BACKLOG_SHARED)
        return SocketListener(asyncio.get_running_loop(), sock, factory, backlog=BACKLOG_SHARED)

    def _socket(self, family: int) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._tune(sock)
            if family in self._ports:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(("", self._ports[family]))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _dial(self, family: int, address: Any, factory: ProtocolFactory) -> None:
        loop = asyncio.get_running_loop()
        sock = self._socket(family)
        try:
            await _connect(loop, sock, address)
            protocol = factory()
        except BaseException:
            sock.close()
            raise
        if can_watch(loop):
            SocketTransport(loop, sock, protocol)
        else:
            await loop.create_connection(lambda: protocol, sock=sock)  # owns the socket, even if it fails

    def _tune(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in self._tcp_options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(frozen=True, slots=True)
class _TcpListener:
    server: asyncio.AbstractServer
    address: Address

    async def close(self) -> None:
        # Not wait_closed(): since Python 3.12 it also waits for established connections, which stay open.
        self.server.close()


async def _connect(loop: asyncio.AbstractEventLoop, sock: socket.socket, address: Any) -> None:
    """Connect ``sock``. Raises ``OSError``."""
    if len(address) < 4 or not address[3] or not can_watch(loop):
        await loop.sock_connect(sock, address)
        return
    code, connected = sock.connect_ex(address), loop.create_future()  # uvloop's own call loses the zone
    if code == errno.EINPROGRESS:
        loop.add_writer(sock.fileno(), connected.cancel)
        try:
            await asyncio.wait({connected})
        finally:
            loop.remove_writer(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


async def resolve(host: str, port: int, *, passive: bool = False) -> list[tuple[int, Any]]:
    """(family, address) of each address of ``host``. Raises ``OSError``, ``UnicodeError``."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE if passive else 0
    if "%" in host:  # a number with a zone, which uvloop loses; to read it takes no time
        found = socket.getaddrinfo(host, port, type=kind, flags=flags | socket.AI_NUMERICHOST)
    else:
        found = await asyncio.get_running_loop().getaddrinfo(host or None, port, type=kind, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def every_interface() -> str:
    """The host to listen on for callers of both families, or of IPv4 where there is no IPv6."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - other machines must reach this one


# --------------------------------------------------------------------------------------------------- pending handshakes


MAX_HALF_OPEN = 256
MAX_HALF_OPEN_PER_MACHINE = 64


class HalfOpen:
    """Limits the connections whose handshake has not ended, in all and from one address (IPv6: one /64 network)."""

    def __init__(self) -> None:
        self._by_machine: Counter[str] = Counter()

    def enter(self, host: str) -> str:
        """Count a connection from ``host`` until ``leave``. Return why it is not allowed, or an empty string."""
        machine = machine_of(host)
        if self._by_machine[machine] >= MAX_HALF_OPEN_PER_MACHINE:
            return f"{self._by_machine[machine]} handshakes with {machine} are under way"
        if self._by_machine.total() >= MAX_HALF_OPEN:
            return f"{self._by_machine.total()} handshakes are under way"
        self._by_machine[machine] += 1
        return ""

    def leave(self, host: str) -> None:
        machine = machine_of(host)
        self._by_machine[machine] -= 1
        if not self._by_machine[machine]:
            del self._by_machine[machine]


def machine_of(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "this machine"
    if isinstance(address, ipaddress.IPv6Address) and not address.is_link_local:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(address)
