"""The frame core: bytes in, events out, without asyncio, sockets or a clock.

A frame on the wire is the fixed ``HEADER``, then ``header_bytes`` of msgpack (control frames) or a raw payload (bulk).

Theory of operation. The decoder never reads ahead: ``next_buffer()`` is exactly the rest of the part that is being read
(the fixed header, a control frame's body, a bulk payload's destination). So a payload arrives in its destination
without a copy, no byte of the next frame is left over, and the shell can stop reading between any two frames. Every
size is checked against a bound before memory of that size is allocated. The receiver posts the destination of a bulk
payload beforehand.

Transitions::

    HEADER   control, within bounds                → CONTROL   body whole    → HEADER, yields ControlFrame
    HEADER   bulk, a buffer of its size is posted  → BULK      payload whole → HEADER, yields BulkDone
    HEADER   bulk, nothing is posted               → WAITING
    WAITING  post() of its size                    → BULK
    HEADER   generation older than the fence       → DISCARD   all read      → HEADER
    CONTROL, BULK, WAITING   the fence passes it   → DISCARD
    any      anything else                         → FAILED, raises ProtocolError
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from p2ptrain.core.errors import ProtocolError, UserError
from wire.messages import BULK_KIND

HEADER = struct.Struct("!IBBHQI")
"""Length of all that follows these 4 bytes, kind, flags (0), header bytes, generation, stream."""

LENGTH_BYTES = 4
HANDSHAKE_FRAME_BYTES = 4 * 1024
"""Longest frame before the handshake ended, header included."""
CONTROL_FRAME_BYTES = 64 * 1024
"""Longest control frame after the handshake, header included."""
MAX_BULK_BYTES = 1 << 30
"""Longest bulk payload that a peer may announce; the effective limit is the size of the posted buffer."""
LAST_HANDSHAKE_KIND = 15

_SINK = memoryview(bytearray(64 * 1024))  # receives discarded bytes of all connections; never read
_OTHER_PROTOCOLS = {
    "TLS": (b"\x16\x03", b"\x15\x03"),
    "HTTP": (b"GET ", b"POST", b"HEAD", b"PUT ", b"HTTP"),
    "SSH": (b"SSH-",),
}
"""Protocol → how its first bytes begin."""


def encode_control(kind: int, body: bytes, *, generation: int, stream: int) -> bytes:
    """Encode a control frame. Raises ``UserError`` if it is longer than any receiver accepts."""
    size = HEADER.size + len(body)
    limit = HANDSHAKE_FRAME_BYTES if kind <= LAST_HANDSHAKE_KIND else CONTROL_FRAME_BYTES
    if size > limit:
        raise UserError(
            f"a control frame of {size} bytes cannot be sent, {limit} are allowed",
            remedy="ask for fewer items at a time",
        )
    return HEADER.pack(size - LENGTH_BYTES, kind, 0, len(body), generation, stream) + body


def encode_bulk_header(payload_bytes: int, *, generation: int, stream: int) -> bytes:
    """Encode the header of a bulk payload. Raises ``ValueError`` beyond ``MAX_BULK_BYTES``."""
    if payload_bytes > MAX_BULK_BYTES:
        raise ValueError(f"a bulk payload of {payload_bytes} bytes, {MAX_BULK_BYTES} are allowed")
    return HEADER.pack(HEADER.size - LENGTH_BYTES + payload_bytes, BULK_KIND, 0, 0, generation, stream)


@dataclass(frozen=True, slots=True)
class ControlFrame:
    """A whole control frame whose body is not decoded yet."""

    kind: int
    generation: int
    stream: int
    body: bytearray


@dataclass(frozen=True, slots=True)
class BulkDone:
    """A posted buffer is full. The receiver of the event must call ``done``, which was posted with it."""

    done: Callable[[], None]


Event = ControlFrame | BulkDone


class _State(Enum):
    HEADER = auto()
    CONTROL = auto()
    BULK = auto()
    WAITING = auto()
    DISCARD = auto()
    FAILED = auto()


class FrameDecoder:
    """Splits a stream of bytes into frames, in place.

    Args:
        kinds: the kinds of control frame that exist.

    Attributes:
        fence: frames of a generation in ``range(1, fence)`` are read and discarded.
    """

    def __init__(self, kinds: frozenset[int]) -> None:
        self._kinds = kinds
        self._large = False
        self.fence = 0
        self._posts: dict[tuple[int, int], deque[tuple[memoryview, Callable[[], None]]]] = {}
        self._header = memoryview(bytearray(HEADER.size))
        self._state = _State.HEADER
        self._rest = self._header  # where the next bytes go in HEADER, CONTROL and BULK
        self._left = 0  # bytes still to come in WAITING and DISCARD
        self._kind = self._generation = self._stream = 0
        self._body = bytearray()
        self._done: Callable[[], None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether a bulk frame waits for its post. The shell must not read until it is posted."""
        return self._state is _State.WAITING

    @property
    def between_frames(self) -> bool:
        return self._state is _State.HEADER and len(self._rest) == HEADER.size

    def allow_large(self) -> None:
        self._large = True

    def next_buffer(self) -> memoryview:
        """Return where the next bytes go: never empty, never longer than the part that is being read."""
        assert self._state not in (_State.WAITING, _State.FAILED), f"reading while {self._state.name}"
        return _SINK[: self._left] if self._state is _State.DISCARD else self._rest

    def received(self, nbytes: int) -> Event | None:
        """Process ``nbytes`` that were written to the front of ``next_buffer()``.

        Raises ``ProtocolError`` if the peer violated the protocol; the decoder must not be used again.
        """
        if self._state is _State.DISCARD:
            self._left -= nbytes
            if not self._left:
                self._begin_header()
            return None
        self._rest = self._rest[nbytes:]
        if self._state is _State.HEADER:
            return self._header_grew()
        return None if len(self._rest) else self._part_ended()

    def post(self, into: memoryview, *, generation: int, stream: int, done: Callable[[], None]) -> BulkDone | None:
        """Set the destination of the next bulk frame of (generation, stream) that has none yet.

        ``into`` is writable and contiguous, of any format. Returns ``BulkDone`` if the frame was waiting and is empty;
        otherwise ``received`` returns it. Raises ``ProtocolError`` if the waiting frame has another length.
        """
        if self._is_stale(generation):
            return None
        target = into.cast("B") if into.nbytes else memoryview(b"")
        if self.waiting and (generation, stream) == (self._generation, self._stream):
            return self._begin_bulk(target, done, self._left)
        self._posts.setdefault((generation, stream), deque()).append((target, done))
        return None

    def raise_fence(self, fence: int) -> None:
        """Drop everything of generations below ``fence``: frames, posts, and a frame that is half read."""
        self.fence = max(self.fence, fence)
        self._posts = {key: posts for key, posts in self._posts.items() if not self._is_stale(key[0])}
        if self._state in (_State.CONTROL, _State.BULK, _State.WAITING) and self._is_stale(self._generation):
            self._begin_discard(self._left if self.waiting else len(self._rest))

    # ------------------------------------------------------------------------------------------------------ internals

    def _is_stale(self, generation: int) -> bool:
        return 0 < generation < self.fence

    def _begin_header(self) -> None:
        self._state, self._rest = _State.HEADER, self._header
        self._done, self._body = None, bytearray()

    def _begin_discard(self, left: int) -> None:
        self._begin_header()
        if left:
            self._state, self._left, self._rest = _State.DISCARD, left, self._header[:0]

    def _begin_bulk(self, target: memoryview, done: Callable[[], None], payload_bytes: int) -> BulkDone | None:
        if target.nbytes != payload_bytes:
            raise self._failure(
                f"a bulk frame of {payload_bytes} bytes on stream {self._stream} of generation {self._generation}, "
                f"{target.nbytes} were planned"
            )
        if not payload_bytes:
            self._begin_header()
            return BulkDone(done)
        self._state, self._rest, self._done = _State.BULK, target, done
        return None

    def _part_ended(self) -> Event:
        if self._state is _State.BULK:
            assert self._done is not None
            event: Event = BulkDone(self._done)
        else:
            event = ControlFrame(self._kind, self._generation, self._stream, self._body)
        self._begin_header()
        return event

    def _header_grew(self) -> Event | None:
        if len(self._rest):
            if len(self._rest) <= HEADER.size - LENGTH_BYTES:  # other protocols' greetings may be shorter
                self._check_length(int.from_bytes(self._header[:LENGTH_BYTES], "big"))
            return None
        length, self._kind, flags, header_bytes, self._generation, self._stream = HEADER.unpack(self._header)
        self._check_length(length)
        if flags:
            raise self._failure(f"a frame with unknown flags {flags:#04x}")
        payload_bytes = length - (HEADER.size - LENGTH_BYTES)
        if self._kind == BULK_KIND and self._large:
            return self._bulk_announced(header_bytes, payload_bytes)
        return self._control_announced(header_bytes, payload_bytes)

    def _bulk_announced(self, header_bytes: int, payload_bytes: int) -> Event | None:
        if header_bytes:
            raise self._failure(f"a bulk frame with a header of {header_bytes} bytes")
        if self._is_stale(self._generation):
            self._begin_discard(payload_bytes)
            return None
        key = (self._generation, self._stream)
        posts = self._posts.get(key)
        if posts is None:
            self._state, self._left, self._rest = _State.WAITING, payload_bytes, self._header[:0]
            return None
        target, done = posts.popleft()
        if not posts:
            del self._posts[key]
        return self._begin_bulk(target, done, payload_bytes)

    def _control_announced(self, header_bytes: int, body_bytes: int) -> Event | None:
        if not self._large and self._kind > LAST_HANDSHAKE_KIND:
            raise self._failure(f"a frame of kind {self._kind} before the handshake ended")
        if self._kind not in self._kinds:
            raise self._failure(f"a frame of unknown kind {self._kind}")
        limit = CONTROL_FRAME_BYTES if self._large else HANDSHAKE_FRAME_BYTES
        if body_bytes > limit - HEADER.size:
            raise self._failure(f"a control frame of {body_bytes + HEADER.size} bytes, {limit} are allowed")
        if header_bytes != body_bytes or not body_bytes:
            raise self._failure(f"a control frame of {body_bytes} bytes that says its header has {header_bytes}")
        if self._is_stale(self._generation):
            self._begin_discard(body_bytes)
            return None
        self._body = bytearray(body_bytes)
        self._state, self._rest = _State.CONTROL, memoryview(self._body)
        return None

    def _check_length(self, length: int) -> None:
        limit = HEADER.size + MAX_BULK_BYTES if self._large else HANDSHAKE_FRAME_BYTES
        if not HEADER.size - LENGTH_BYTES <= length <= limit - LENGTH_BYTES:
            raise self._failure(f"a frame with an invalid length of {length + LENGTH_BYTES} bytes")

    def _failure(self, what: str) -> ProtocolError:
        start = bytes(self._header[:LENGTH_BYTES])
        self._begin_header()
        self._state, self._rest = _State.FAILED, self._header[:0]
        self._posts.clear()
        for protocol, beginnings in _OTHER_PROTOCOLS.items():
            if not self._large and start.startswith(beginnings):
                return ProtocolError(
                    f"the other side speaks {protocol}, not the protocol of p2ptrain",
                    remedy="check the address and the port: a seed listens on port 7337 by default",
                )
        return ProtocolError(what, remedy="is the other side a p2ptrain of the same release?")
