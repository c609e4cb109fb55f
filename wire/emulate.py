"""Link emulation: any ``Network``, made as slow and unsteady as a ``LinkPreset`` says.

``EmulatedNetwork`` wraps the transport of each connection, dialled or accepted, and shapes **what this side sends**;
what it receives is passed through untouched. Where both ends are emulated each direction is shaped once; where only
one end is, only the direction from it is. Dialling costs one round trip of the preset before the inner network is
asked. Connections do not compete: each has the preset's rate for itself.

Each connection has what a kernel has: a send buffer, somewhat larger than the link's bandwidth-delay product. What is
written is cut into views of at most ``PIECE_BYTES``; those that find room in that buffer are copied there, and are no
more the writer's concern, though on their way they may be for long. The others count as unsent until there is room:
``get_write_buffer_size`` tells how much, the writer must not change them, and ``pause_writing`` is called beyond the
high-water mark. Each piece is handed to the inner transport when the shaper says that its last byte arrives.

``close()`` and ``write_eof()`` reach the other side after what was written before, and no sooner than the link's
delay; ``abort()`` is at once. A cut aborts the connection; its protocol's ``connection_lost`` is given a
``ConnectionResetError``.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.shaper import LinkPreset, LinkShaper
from wire.transport_base import FlowControl, WriteData, bytes_view, unreachable

PIECE_BYTES = 16 << 10
SPARE_BYTES = 128 << 10
MOST_WINDOW_BYTES = 8 << 20
HIGH_BYTES = 64 << 10  # asyncio's
PresetOf = Callable[[str, int], LinkPreset]
"""The other side's host and port → the link to it. An accepted connection's port says nothing: it is any free one."""
UNLIMITED_BPS = 1e9  # what an unlimited rate counts as when the send buffer's size is chosen


class EmulatedNetwork:
    """A ``Network`` over another one, each of whose connections sends through its own ``LinkShaper``.

    Args:
        preset: of every connection; or a function from the other side's (host, port) to it, for links that differ.
        seed: fixes jitter, losses and stalls of the n-th connection of this network.
    """

    def __init__(self, inner: Network, preset: LinkPreset | PresetOf, seed: int) -> None:
        self._inner = inner
        self._preset_of = (lambda host, port: preset) if isinstance(preset, LinkPreset) else preset
        self._seeds = random.Random(seed)  # noqa: S311 - the weather of a link is no secret

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``, one round trip later. Raises ``Unreachable``."""
        preset = self._preset_of(host, port)
        round_trip_s = preset.rtt_s
        await asyncio.sleep(min(round_trip_s, timeout_s))
        if round_trip_s >= timeout_s:
            raise unreachable(host, port, TimeoutError(), timeout_s)
        emulated = self._emulated(factory, lambda remote_host, remote_port: preset)
        await self._inner.connect(host, port, emulated, timeout_s=timeout_s - round_trip_s)

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept connections on ``host:port``. Raises ``UserError`` where it cannot be bound."""
        return await self._inner.listen(host, port, self._emulated(factory, self._preset_of), on_problem)

    def _emulated(self, factory: ProtocolFactory, preset_of: PresetOf) -> ProtocolFactory:
        def wrapped() -> asyncio.BufferedProtocol:
            rng = random.Random(self._seeds.getrandbits(64))  # noqa: S311
            opened_at = asyncio.get_running_loop().time()

            def shaper_to(host: str, port: int) -> LinkShaper:
                return LinkShaper(preset_of(host, port), rng, opened_at=opened_at)

            return _InnerProtocol(factory(), shaper_to)

        return wrapped


class _InnerProtocol(asyncio.BufferedProtocol):
    """Stands between the inner transport and the real protocol: passes reading through, keeps writing for itself."""

    def __init__(self, protocol: asyncio.BufferedProtocol, shaper_to: Callable[[str, int], LinkShaper]) -> None:
        self._protocol = protocol
        self._shaper_to = shaper_to
        self._transport: EmulatedTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        inner = cast(asyncio.Transport, transport)  # uvloop's are none by name
        peername = transport.get_extra_info("peername") or ("", 0)  # of a connection that is lost already: none
        self._transport = EmulatedTransport(inner, self._protocol, self._shaper_to(*peername[:2]))
        self._protocol.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport.inner_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        return self._protocol.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        if self._transport is not None:
            self._transport.inner_eof()
        return True  # the inner transport is kept open: it knows nothing of what is still on the emulated link

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.inner_full()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.inner_drained()


class _Mark(enum.Enum):
    """What else than bytes travels in order."""

    EOF = enum.auto()
    CLOSE = enum.auto()


@dataclass(eq=False, slots=True)
class _Piece:
    """Bytes on their way, ``due_at`` the other side; the writer's own where they are not ``held`` yet."""

    due_at: float
    data: memoryview
    held: bool = False


class EmulatedTransport(FlowControl):
    """One side of an emulated connection: a queue of pieces and marks before the inner transport."""

    def __init__(self, inner: asyncio.Transport, protocol: asyncio.BufferedProtocol, shaper: LinkShaper) -> None:
        super().__init__(protocol, high_bytes=HIGH_BYTES)
        self._buffer_bytes = _window_bytes(shaper.preset)
        self._inner = inner
        self._shaper = shaper
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Piece | tuple[float, _Mark]] = deque()
        self._unsent: deque[_Piece] = deque()  # of the queue, those that found no room yet
        self._unsent_bytes = self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._inner_full = False
        self._eof = self._read_ended = False
        self._closing = self._lost = False
        self._cut_error: ConnectionResetError | None = None
        # The inner transport reports each time it is empty, so that flow control here can count down to 0.
        inner.set_write_buffer_limits(high=0)
        self._cut_timer = self._loop.call_at(shaper.cut_at, self._cut) if math.isfinite(shaper.cut_at) else None

    # What the protocol calls.

    def write(self, data: WriteData) -> None:
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        view = bytes_view(data)
        if self._closing or not view.nbytes:
            return
        now = self._loop.time()
        for start in range(0, view.nbytes, PIECE_BYTES):
            data = view[start : start + PIECE_BYTES]
            piece = _Piece(self._shaper.send(now, data.nbytes), data)
            self._queue.append(piece)
            self._unsent.append(piece)
        self._unsent_bytes += view.nbytes
        self._take_in()
        self._arm()
        self._maybe_pause()

    def writelines(self, list_of_data: Iterable[WriteData]) -> None:
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return self._inner.can_write_eof()

    def write_eof(self) -> None:
        if not (self._eof or self._closing):
            self._eof = True
            self._send_mark(_Mark.EOF)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._inner.pause_reading()  # as asyncio: a closed transport delivers nothing more
            self._send_mark(_Mark.CLOSE)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._drop()
            self._inner.abort()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        if not (self._closing or self._read_ended):
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not (self._closing or self._read_ended):  # asyncio would report a second end of the stream
            self._inner.resume_reading()

    def is_reading(self) -> bool:
        return not self._closing and self._inner.is_reading()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (
            default if name == "rtt_s" else self._inner.get_extra_info(name, default)
        )  # the kernel knows no emulation

    # What the inner transport reports.

    def inner_lost(self, exc: Exception | None) -> None:
        self._lost = self._closing = True
        self._drop()
        self._protocol.connection_lost(self._cut_error or exc)

    def inner_eof(self) -> None:
        self._read_ended = True
        if not self._protocol.eof_received():
            self.close()

    def inner_full(self) -> None:
        self._inner_full = True

    def inner_drained(self) -> None:
        self._inner_full = False
        self._release(self._loop.time())

    # The link.

    def _send_mark(self, mark: _Mark) -> None:
        self._queue.append((self._shaper.send(self._loop.time(), 0), mark))
        self._arm()

    def _take_in(self) -> None:
        """Copy what finds room; a piece at least, however small the buffer is."""
        while self._unsent:
            piece = self._unsent[0]
            if self._held_bytes and self._held_bytes + piece.data.nbytes > self._buffer_bytes:
                return
            self._unsent.popleft()
            piece.data, piece.held = memoryview(bytes(piece.data)), True
            self._held_bytes += piece.data.nbytes
            self._unsent_bytes -= piece.data.nbytes

    def _arm(self) -> None:
        if self._timer is None and self._queue and not self._inner_full:
            due_at = _due_at(self._queue[0])
            self._timer = self._loop.call_at(due_at, self._on_timer, due_at)

    def _on_timer(self, due_at: float) -> None:
        self._timer = None
        # A loop with a coarse clock fires a little early; what it fired for is due all the same.
        self._release(max(due_at, self._loop.time()))

    def _release(self, now: float) -> None:
        if self._inner.is_closing():  # it failed by itself, and is about to say so
            return self._drop()
        while self._queue and _due_at(self._queue[0]) <= now and not self._inner_full:
            if together := self._due_together(now):
                self._inner.writelines(together)
                continue
            item = self._queue.popleft()
            assert not isinstance(item, _Piece)
            if item[1] is _Mark.EOF:
                self._inner.write_eof()
            else:
                self._inner.close()
        self._arm()
        return self._maybe_resume()

    def _due_together(self, now: float) -> list[memoryview]:
        """The pieces in front that are due, about ``PIECE_BYTES`` of them: small ones arrive together."""
        data: list[memoryview] = []
        size_bytes = 0
        while self._queue and size_bytes < PIECE_BYTES:
            piece = self._queue[0]
            if not isinstance(piece, _Piece) or piece.due_at > now:
                break
            assert piece.held, "what is due was never sent"
            self._queue.popleft()
            data.append(piece.data)
            size_bytes += piece.data.nbytes
            self._held_bytes -= piece.data.nbytes
            self._take_in()
        return data

    def _cut(self) -> None:
        age_s = self._shaper.preset.cut_after_s
        self._cut_error = ConnectionResetError(
            f"the emulated link {self._shaper.preset.name} was cut after {age_s:g} s"
        )
        self.abort()

    def _drop(self) -> None:
        self._queue.clear()
        self._unsent.clear()
        self._unsent_bytes = self._held_bytes = 0
        for timer in (self._timer, self._cut_timer):
            if timer is not None:
                timer.cancel()
        self._timer = None


def _due_at(item: _Piece | tuple[float, _Mark]) -> float:
    return item.due_at if isinstance(item, _Piece) else item[0]


def _window_bytes(preset: LinkPreset) -> int:
    """What must be under way at any time so that the link never runs dry: the bandwidth-delay product, and some."""
    in_flight_bytes = (preset.rate_bps or UNLIMITED_BPS) / 8 * (preset.delay_s + preset.jitter_s)
    return min(int(in_flight_bytes) + SPARE_BYTES, MOST_WINDOW_BYTES)
