"""A TCP proxy before one peer's port, by which its links are cut, slowed and damaged from outside.

A *silent* link neither reads nor writes, so bytes wait in the senders' kernels, and the end of either side is not
noticed: what a pulled cable looks like. It differs in one thing: TCP acknowledges what the proxy's own kernel took.
When the link is mended the bytes go on in order, as retransmitted ones would. A *reset* link ends its connections at
once and every new one as it is made.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import cast

WAITING_BYTES = 256 << 10
"""What a slow link holds of a connection before it reads no more; a sender then fills its own buffers."""
DIAL_S = 5.0  # the peer is on this machine: it listens, or refuses at once
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends RST


class Link(Enum):
    OPEN = "open"
    SILENT = "silent"
    RESET = "reset"


@dataclass(slots=True)
class _Piece:
    due_s: float
    data: bytes


class Proxy:
    """One listening port of the loopback that leads to one port of a peer.

    Attributes:
        address: what others dial.
        target: where the peer listens now; (host, port).
        damaged: bytes changed so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.address: tuple[str, int] = ("127.0.0.1", 0)
        self.damaged = 0
        self._link = Link.OPEN
        self._rate_bps = self._delay_s = 0.0
        self._skip_bytes: int | None = None
        self._sides: set[_Side] = set()
        self._dials: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on any free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accepted, "127.0.0.1", 0)
        self.address = ("127.0.0.1", int(self._server.sockets[0].getsockname()[1]))

    async def close(self) -> None:
        """End everything. May be called twice, and before ``start``."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._dials):
            task.cancel()
        for side in tuple(self._sides):
            side.reset()
        if self._server is not None:
            await self._server.wait_closed()

    def cut(self, *, silent: bool) -> None:
        """No byte passes from now on, and where it is not ``silent`` both ends learn so at once."""
        self._link = Link.SILENT if silent else Link.RESET
        for side in tuple(self._sides):
            side.regulate() if silent else side.reset()

    def slow(self, rate_bps: float, delay_s: float) -> None:
        """Every connection, each way, carries so many bytes per second from now on, so much later."""
        self._rate_bps, self._delay_s = rate_bps, delay_s

    def damage(self, skip_bytes: int) -> None:
        """Flip one bit of a byte: that after the next ``skip_bytes``, whichever way they go."""
        self._skip_bytes = skip_bytes

    def mend(self) -> None:
        """The link is as it was; what waits goes first."""
        self._link, self._rate_bps, self._delay_s, self._skip_bytes = Link.OPEN, 0.0, 0.0, None
        for side in tuple(self._sides):
            side.hurry()
            side.regulate()

    # ------------------------------------------------------------------------------------------------------- inside

    def _accepted(self) -> asyncio.Protocol:
        return _Side(self, dial=True)

    def dial(self, near: _Side) -> None:
        """Bring a connection that was accepted to the peer."""
        if self._link is Link.RESET:
            near.reset()
            return
        task = asyncio.get_running_loop().create_task(self._dial(near), name="proxy.dial")
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, near: _Side) -> None:
        far = _Side(self, dial=False)
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().create_connection(lambda: far, *self.target)
        except OSError:  # TimeoutError is one
            near.reset()  # as a port where nobody listens answers
            return
        if near.gone or self._link is Link.RESET:
            far.reset()
            near.reset()
            return
        near.other, far.other = far, near
        near.regulate()
        far.regulate()

    def opened(self, side: _Side) -> None:
        self._sides.add(side)

    def closed(self, side: _Side) -> None:
        self._sides.discard(side)

    @property
    def silent(self) -> bool:
        return self._link is Link.SILENT

    def spread(self, size_bytes: int) -> tuple[float, float]:
        """Seconds that a piece takes on the line of a connection, and how much later it arrives."""
        return (size_bytes / self._rate_bps if self._rate_bps else 0.0, self._delay_s)

    def changed(self, data: bytes) -> bytes:
        """The piece as it goes on: damaged, where its turn has come."""
        if self._skip_bytes is None:
            return data
        if self._skip_bytes >= len(data):
            self._skip_bytes -= len(data)
            return data
        hurt = bytearray(data)
        hurt[self._skip_bytes] ^= 1 << (self._skip_bytes % 8)
        self._skip_bytes = None
        self.damaged += 1
        return bytes(hurt)


class _Side(asyncio.Protocol):
    """One of the two connections of a pair: what it reads, ``other`` writes."""

    def __init__(self, proxy: Proxy, *, dial: bool) -> None:
        self.other: _Side | None = None
        self.gone = False
        self._proxy, self._dial = proxy, dial
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._queue: deque[_Piece] = deque()  # read, and not yet due at the other side
        self._queued_bytes = 0
        self._free_s = 0.0  # when the line has sent what is queued
        self._timer: asyncio.TimerHandle | None = None
        self._full = False  # the other side's kernel takes no more
        self._reading = True
        self._ended = False  # its peer sends no more
        self._told = False  # and the other one's peer knows

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy.opened(self)
        self.regulate()
        if self._dial:
            self._proxy.dial(self)

    def data_received(self, data: bytes) -> None:
        line_s, delay_s = self._proxy.spread(len(data))
        now = self._loop.time()
        self._free_s = max(self._free_s, now) + line_s
        self._queue.append(_Piece(self._free_s + delay_s if line_s or delay_s else 0.0, self._proxy.changed(data)))
        self._queued_bytes += len(data)
        self._pump()

    def eof_received(self) -> bool:
        self._ended = True
        self._pump()
        return True  # what the other side sends still passes

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone, self._ended = True, True
        self._proxy.closed(self)
        if exc is not None and self.other is not None:
            self.other.reset()
        self._pump()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._full = True
            self.other.regulate()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other._full = False
            self.other._pump()

    # What the proxy calls.

    def reset(self) -> None:
        """End this connection so that its peer knows at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        if self._transport is not None and not self.gone:
            sock: socket.socket = self._transport.get_extra_info("socket")
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            except OSError:
                return self._transport.abort()  # closed already: it needs no word more
            self._transport.abort()
        return None

    def hurry(self) -> None:
        """What waits is due now."""
        for piece in self._queue:
            piece.due_s = 0.0
        self._free_s = 0.0

    def regulate(self) -> None:
        """Read or do not, and hand on what may go."""
        self._pump()

    # ------------------------------------------------------------------------------------------------------- inside

    def _pump(self) -> None:
        """Hand on what is due, to a pair that takes it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        other = self.other
        if other is not None and other._transport is not None and not self._proxy.silent:
            now = self._loop.time()
            while self._queue and not self._full and not other.gone:
                if self._queue[0].due_s > now:
                    self._timer = self._loop.call_at(self._queue[0].due_s, self._pump)
                    break
                piece = self._queue.popleft()
                self._queued_bytes -= len(piece.data)
                other._transport.write(piece.data)  # may call ``pause_writing``, which sets ``_full``
            if self._ended and not self._queue:
                self._pass_on_the_end(other)
        self._watch()

    def _pass_on_the_end(self, other: _Side) -> None:
        """The other one's peer is told that no more comes; when that holds both ways, the pair is closed."""
        if (other._ended and not other._queue) or self.gone:
            other._close()
            self._close()
        elif not self._told and not other.gone and other._transport is not None:
            self._told = True
            other._transport.write_eof()

    def _close(self) -> None:
        if self._transport is not None and not self.gone:
            self._transport.close()

    def _watch(self) -> None:
        wanted = (
            self.other is not None
            and not self._proxy.silent
            and not self._full
            and not self._ended
            and self._queued_bytes < WAITING_BYTES
        )
        if self._transport is None or self.gone or wanted == self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        self._transport.resume_reading() if wanted else self._transport.pause_reading()
