"""A TCP transport over the loop's readiness calls: what is written goes to the kernel within the call.

The loops' own transports would serve, but for what they do between a write and the kernel. asyncio (before 3.12) joins
the parts of ``writelines`` and copies what the kernel did not take; uvloop collects writes until the turn of its loop
ends, and reads a socket empty before it sends. A ring wants to send a sum the moment that it is made, from where it
lies, and to read and send in turn, while the bytes are in the processor's cache: an all-reduce of 64 MiB over a
loopback was a tenth faster for it, and as much on the one loop as on the other.

Reading: ``recv_into`` the protocol's buffer until there is no more, at most ``READS_A_TURN`` times, so that sending has
its turn. A short read is no reason to stop: the rest of a payload is often there by the time that it was looked at.
Writing: ``sendmsg`` at once; what the kernel does not take waits, uncopied, for the socket to be writable. The rules of
pausing, closing and aborting are asyncio's, as the conformance suite has them.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from wire.transport_base import FlowControl, WriteData, bytes_view, is_loopback

READS_A_TURN = 4
BULK_BUFFER_BYTES = 4 << 20  # of each side; several times what a ring has on its way between near members
PARTS_A_CALL = 16  # far below any system's IOV_MAX
HIGH_BYTES, ACCEPT_REST_S = 64 << 10, 1.0  # asyncio's
_NOT_NOW = (BlockingIOError, InterruptedError)


_TCP_INFO_BYTES, _MIN_RTT = 152, struct.Struct("=148xI")  # linux/tcp.h: struct tcp_info up to tcpi_min_rtt


class TunableSocket(Protocol):
    """What ``tune_for_bulk`` needs of a socket, or of what a loop's transport shows of its own."""

    def getpeername(self) -> Any: ...

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


class SocketTransport(FlowControl):
    """``sock``, connected and non-blocking, given to ``protocol``; it belongs to the transport from now on.

    For loops with ``add_reader``. The protocol's ``connection_made`` is called within the constructor.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: asyncio.BufferedProtocol
    ) -> None:
        super().__init__(protocol, high_bytes=HIGH_BYTES)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._reading = self._writing = False  # whether the loop watches for it
        self._paused = False
        self._eof = self._closing = self._lost = False
        self._extra = {"socket": sock, "peername": _name(sock.getpeername), "sockname": _name(sock.getsockname)}
        try:
            protocol.connection_made(self)
        except Exception as error:  # noqa: BLE001 - a protocol's defect ends its own connection only
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

    def can_write_eof(self) -> bool:
        return True

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

    def is_closing(self) -> bool:
        return self._closing

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
                if not received:
                    self._peer_ended()
                    return
                self._protocol.buffer_updated(received)
            except _NOT_NOW:
                return
            except OSError as error:
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001 - as above
                self._protocol_failed(error)
                return

    def _peer_ended(self) -> None:
        stays_open = self._protocol.eof_received()
        self._paused = True  # there is nothing more to read
        self._watch_reading()
        if not stays_open:
            self.close()

    def _writable(self) -> None:
        self._send()
        if not self._lost:
            self._maybe_resume()

    def _send(self) -> None:
        """Hand over what the kernel takes, and watch for it to take more."""
        while self._queue:
            try:
                sent = self._sock.sendmsg([view for view, _ in zip(self._queue, range(PARTS_A_CALL), strict=False)])
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
        context = {"message": "a protocol failed", "exception": error, "transport": self, "protocol": self._protocol}
        self._loop.call_exception_handler(context)
        self._fail(error)

    def _fail(self, error: Exception | None) -> None:
        """Drop what is queued, and end."""
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


class SocketListener:
    """Accepts connections of ``sock``, which is bound and listens, and gives each to a protocol of ``factory``."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        factory: Callable[[], asyncio.BufferedProtocol],
        *,
        backlog: int,
    ) -> None:
        self._loop, self._sock, self._factory, self._backlog = loop, sock, factory, backlog
        self._retry: asyncio.TimerHandle | None = None
        host, port, *_ = sock.getsockname()
        self._address: tuple[str, int] = host, port
        loop.add_reader(sock.fileno(), self._acceptable)

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    async def close(self) -> None:
        """Stop listening. Established connections live on."""
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
        """Out of file descriptors or memory: a busy loop over the one waiting connection would make it worse."""
        self._loop.call_exception_handler({"message": "accepting a connection failed", "exception": error})
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(ACCEPT_REST_S, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._acceptable)


def tune_for_bulk(sock: TunableSocket) -> None:
    """Prepare ``sock`` for payloads that should go as fast as they can.

    Kernel buffers of ``BULK_BUFFER_BYTES`` each way: a full buffer stops its sender, and an empty one its reader. On
    Linux a size that was set does not grow with the link any more, and what a program may set is often less than what
    the system grows to: then it is left to the system.

    Within one machine: congestion control that does not pace. Where the system's choice is BBR, its pacing timers and
    its small window made a loopback half as fast, after the first gigabyte.
    """
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _may_set_bytes(limit) >= BULK_BUFFER_BYTES:
            with suppress(OSError):  # it is gone, or another system's limit is lower
                sock.setsockopt(socket.SOL_SOCKET, option, BULK_BUFFER_BYTES)
    if hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):  # not connected any more, or not to be had
            if is_loopback(str(sock.getpeername()[0])):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # every Linux has it, for everybody


@cache
def _may_set_bytes(limit: str) -> float:
    if not sys.platform.startswith("linux"):
        return math.inf
    try:
        return int(Path("/proc/sys/net/core", limit).read_text())
    except (OSError, ValueError):
        return 0


def can_watch(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether ``loop`` tells when sockets are ready, and they send from several places: not on Windows, where its
    default loop does not do the one, and its sockets not the other.
    """
    return hasattr(socket.socket, "sendmsg") and not type(loop).__name__.startswith("Proactor")


def _name(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except OSError:  # it was reset before anybody looked
        return None


def _least_round_trip_s(sock: socket.socket) -> float | None:
    """The shortest round trip that the kernel saw, s: no process' delay is in it. None where it does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # the connection is gone
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (least_us,) = _MIN_RTT.unpack(info)
    return float(least_us) / 1e6 if least_us < 0xFFFFFFFF else None
