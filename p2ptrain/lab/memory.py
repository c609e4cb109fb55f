"""A network inside one process, and an event loop on virtual time: for simulations, benchmarks and tests.

On this loop time does not pass while callbacks run. When nothing is ready, the clock jumps to the next timer. When
there is no timer either, a real loop would hang; this one raises ``RuntimeError``. It does not wait for input from
threads or other processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import errno
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.core.world import Listener, OnProblem, ProtocolFactory
from wire.address import is_loopback
from wire.transport import Address, FlowControl, WriteData, bytes_view, cannot_listen, check_port, unreachable

EVERY_INTERFACE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - recognised, not bound
DEFAULT_HOST = "127.0.0.1"
ANY_NAME = ""


class MemoryNetwork:
    """A network inside one process and one event loop; works on virtual time.

    Any host name exists. ``at(host)`` is the same network as seen from another host: connections dialled there come
    from that name, and a listener there on every interface is reached under it. A listener on every interface of the
    default host is reached under any name.

    A pipe has no buffer of its own: bytes stay in the writer's memory, uncopied and counted as unsent, until they are
    in the reader's buffer. With a kernel in between, unread bytes could already count as sent.

    Args:
        pipe_bytes: the default high-water mark of a connection, and the most that one delivery moves.
        delay_s: source and target host → seconds until the next delivery; None for no delay. Order is kept.
    """

    def __init__(self, *, pipe_bytes: int = 256 << 10, delay_s: Callable[[str, str], float] | None = None) -> None:
        self._host = DEFAULT_HOST
        # All views of the network share these.
        self.pipe_bytes = pipe_bytes
        self.delay_s = delay_s
        self.listeners: dict[Address, _MemoryListener] = {}
        self.transports: dict[_MemoryTransport, None] = {}  # an ordered set
        self.cut_paths: set[frozenset[str]] = set()
        self.deaf: set[tuple[str, str]] = set()  # source, target
        self.closed: set[str] = set()  # hosts behind a router, which no other host can dial
        self._mended = asyncio.Event()
        self._ports = itertools.count(49152)

    def at(self, host: str) -> MemoryNetwork:
        view = copy.copy(self)
        view._host = host
        return view

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``. Raises ``Unreachable``; between silenced hosts only after ``timeout_s``."""
        check_port(port, least=1)
        target = self._host if is_loopback(host) else host
        path = frozenset((self._host, target))
        try:
            async with asyncio.timeout(timeout_s):
                while not self.deaf.isdisjoint({(self._host, target), (target, self._host)}):
                    await self._mended.wait()
        except TimeoutError as error:
            raise unreachable(host, port, error, timeout_s) from error
        listener = self.listeners.get((target, port)) or self.listeners.get((ANY_NAME, port))
        if listener is None or path in self.cut_paths or (target in self.closed and target != self._host):
            raise unreachable(host, port, ConnectionRefusedError(), timeout_s)
        here, there = (self._host, self._free_port()), (target, port)
        dialler = _MemoryTransport(self, factory(), sockname=here, peername=there)
        accepted = listener.context.run(listener.factory)
        acceptor = _MemoryTransport(self, accepted, sockname=there, peername=here, context=listener.context.copy())
        dialler.open(acceptor)
        acceptor.open(dialler)
        try:
            await asyncio.sleep(0)  # one turn: both protocols get their transports
        except asyncio.CancelledError:
            dialler.abort()
            raise

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        check_port(port, least=0)
        port = port or self._free_port()
        found_at = self._host if is_loopback(host) else host
        if host in EVERY_INTERFACE:
            found_at = ANY_NAME if self._host == DEFAULT_HOST else self._host
        context = contextvars.copy_context()
        listener = _MemoryListener(self, (host, port), (found_at, port), factory, self._host, context)
        if self.listeners.setdefault(listener.key, listener) is not listener:
            raise cannot_listen(host, port, OSError(errno.EADDRINUSE, ""))
        return listener

    def cut(self, a: str, b: str) -> None:
        """Reset every connection between two hosts, and refuse new ones until ``mend``."""
        path = frozenset((a, b))
        self.cut_paths.add(path)
        for transport in [t for t in self.transports if t.path == path]:
            transport.lose(ConnectionResetError(f"the link between {a} and {b} was cut"))

    def silence(self, a: str, b: str) -> None:
        """Deliver nothing between two hosts until ``mend``, not even the end of a connection: a pulled cable."""
        self.deaf |= {(a, b), (b, a)}

    def deafen(self, source: str, target: str) -> None:
        """Deliver nothing from ``source`` to ``target`` until ``mend``; the other direction works."""
        self.deaf.add((source, target))

    def mend(self, a: str, b: str) -> None:
        """End ``cut``, ``silence`` and ``deafen``; deliver what was held back."""
        self.cut_paths.discard(frozenset((a, b)))
        self.deaf -= {(a, b), (b, a)}
        self._mended.set()
        self._mended.clear()
        for transport in self.transports:
            transport.pump_soon()
            transport.other.pump_soon()  # it may be gone already, with its end of stream held back

    def crash(self, host: str) -> None:
        """Do what a kernel does when a process is killed: close the listeners of ``host``, reset its connections."""
        for key in [key for key, listener in self.listeners.items() if listener.host == host]:
            del self.listeners[key]
        for transport in [t for t in self.transports if t.host == host]:
            transport.abort()

    def connections(self, host: str) -> list[asyncio.BufferedProtocol]:
        return [transport._protocol for transport in self.transports if transport.host == host]

    def _free_port(self) -> int:
        taken = {port for _, port in self.listeners}
        return next(port for port in self._ports if port not in taken)


@dataclass(eq=False, slots=True)
class _MemoryListener:
    network: MemoryNetwork
    address: Address
    key: Address
    factory: ProtocolFactory
    host: str
    context: contextvars.Context

    async def close(self) -> None:
        if self.network.listeners.get(self.key) is self:
            del self.network.listeners[self.key]


class _MemoryTransport(FlowControl):
    """One end of a connection. Its queue holds what this end wrote and the other end has not read.

    ``_pump`` delivers everything. It runs as a callback of the loop, never inside a call of a protocol. Bytes and the
    end of the stream wait until the other end reads. A reset waits until the other end reads or writes, as with a
    socket. A closed end no longer reads; what arrives there is lost.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        protocol: asyncio.BufferedProtocol,
        *,
        sockname: Address,
        peername: Address,
        context: contextvars.Context | None = None,
    ) -> None:
        super().__init__(protocol)
        self.host = sockname[0]
        # Calls of this end's protocol run in its owner's context, as if it had its own process.
        self.context = context or contextvars.copy_context()
        self._way = (sockname[0], peername[0])
        self.path = frozenset(self._way)
        self._network = network
        self._extra = {"sockname": sockname, "peername": peername}  # the base class answers ``get_extra_info`` from it
        self._loop = asyncio.get_running_loop()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._reading = True
        self._eof = self._eof_delivered = False
        self._lost = False
        self._reset: ConnectionResetError | None = None  # sent by the other end, not processed yet
        self._pump_scheduled = False

    def open(self, other: _MemoryTransport) -> None:
        self.other = other
        self._network.transports[self] = None
        self._loop.call_soon(self._protocol.connection_made, self, context=self.context)

    # What the protocol calls.

    def write(self, data: WriteData) -> None:
        if self._eof and not self._closing:
            raise RuntimeError("Cannot call write() after write_eof()")
        view = bytes_view(data)
        if self._closing or not view.nbytes:
            return
        self._queue.append(view)
        self._queued_bytes += view.nbytes
        self.pump_soon()
        self._maybe_pause()

    def write_eof(self) -> None:
        self._eof = True
        self.pump_soon()

    def close(self) -> None:
        self._closing = self._eof = True
        self.pump_soon()
        self.other.pump_soon()  # what it still sends is dropped

    def abort(self) -> None:
        if not self._lost:
            self._eof_delivered = True  # the other end gets a reset instead
            self.lose(None)
            self.other.be_reset()

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.pump_soon()
        self.other.pump_soon()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def get_write_buffer_size(self) -> int:
        return self._queued_bytes

    # The pipe.

    def pump_soon(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            delay_s = self._network.delay_s(*self._way) if self._network.delay_s is not None else 0.0
            if delay_s > 0:
                self._loop.call_later(delay_s, self._pump, context=self.other.context)
            else:
                self._loop.call_soon(self._pump, context=self.other.context)

    def be_reset(self) -> None:
        self._reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.pump_soon()

    def lose(self, error: Exception | None) -> None:
        """Drop what is queued and end. ``connection_lost`` follows once."""
        if self._lost:
            return
        self._lost = self._closing = True
        self._drop()
        self._network.transports.pop(self, None)
        self._loop.call_soon(self._protocol.connection_lost, error, context=self.context)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._way not in self._network.deaf:
            if self._reset is not None and (self._reading or self._queue or self._closing):
                self.lose(self._reset)
            self._move_bytes()
            self._move_eof()
        if self._closing and not self._queue:
            self.lose(None)

    def _move_bytes(self) -> None:
        if self.other._closing:
            if self._queue and self.other._eof_delivered and not self._closing:
                self.lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            self._drop()
        elif self._queue and self.other._reading:
            self._deliver()
            if self._queue:
                self.pump_soon()
        if not self._lost and self._writing_paused:
            self._loop.call_soon(self._resume, context=self.context)

    def _resume(self) -> None:
        if not self._lost:
            self._maybe_resume()

    def _move_eof(self) -> None:
        if self._eof and not self._eof_delivered and not self._queue and self.other.is_reading():
            self._eof_delivered = True
            try:
                keep_open = self.other._protocol.eof_received()
            except Exception as error:  # noqa: BLE001 - as in _deliver
                self.other._fail(error)
            else:
                if not keep_open:
                    self.other.close()

    def _deliver(self) -> None:
        reader = self.other._protocol
        try:
            # Release both views before buffer_updated, in which the protocol may resize its bytearray.
            with memoryview(reader.get_buffer(-1)) as buffer, buffer.cast("B") as into:
                if not into.nbytes:
                    raise RuntimeError("get_buffer() returned an empty buffer")
                nbytes = self._take(into)
            if nbytes:
                reader.buffer_updated(nbytes)
        except Exception as error:  # noqa: BLE001 - reported to the loop, as asyncio's transports do
            self.other._fail(error)

    def _take(self, into: memoryview) -> int:
        room = min(into.nbytes, self._network.pipe_bytes)
        taken = 0
        while self._queue and taken < room:
            head = self._queue.popleft()
            nbytes = min(head.nbytes, room - taken)
            into[taken : taken + nbytes] = head[:nbytes]
            if nbytes < head.nbytes:
                self._queue.appendleft(head[nbytes:])
            taken += nbytes
        self._queued_bytes -= taken
        return taken

    def _fail(self, error: Exception) -> None:
        self._report(error)
        self.lose(error)
        self.other.be_reset()

    def _drop(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0


# --------------------------------------------------------------------------------------------------------- virtual time


T = TypeVar("T")


class VirtualClockLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, which starts at 0 s. It has no selector: no sockets, pipes or signals."""

    # Attributes of asyncio's base class that typeshed does not list.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def run_handle(self, handle: asyncio.Handle) -> None:
        handle._run()

    def _run_once(self) -> None:
        """Run one turn as asyncio does: callbacks that are ready now, not those that become ready meanwhile."""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)
        if not ready and not self._stopping:
            if not scheduled:
                raise RuntimeError(f"deadlock at virtual time {self._now:g} s: nothing is ready and no timer is set")
            self._now = max(self._now, scheduled[0].when())
        # as asyncio: timers within the clock's resolution run in the same turn
        while scheduled and scheduled[0].when() < self._now + 1e-9:
            ready.append(heapq.heappop(scheduled))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                self.run_handle(handle)

    def _write_to_self(self) -> None:
        """Do nothing: there is no selector to wake."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no events."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
