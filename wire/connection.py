"""One framed connection: the asyncio shell around ``wire.frame``.

It runs on any loop and any ``asyncio.Transport``. Control frames are queued for ``receive``. Bulk payloads go from the
socket into posted buffers, and from the caller's memory to the socket. There is no task, future or timer per frame.

Reading pauses while a bulk frame waits for its post, and while the queue of control frames is full. So TCP slows down a
peer that sends too fast, and memory stays bounded. Until ``allow_large`` is called the queue holds one frame: what the
peer sends after its last handshake frame stays in the kernel.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.texts import shortened
from wire.address import format_address
from wire.codec import MESSAGE_TYPES, decode_untrusted, encode
from wire.frame import BulkDone, ControlFrame, FrameDecoder, encode_bulk_header, encode_control
from wire.messages import DIRECT, Message, RefusalCode, Refuse
from wire.tls import translate_ssl_error

if TYPE_CHECKING:  # an unencrypted cluster need not load cryptography
    from wire.credentials import PeerIdentity

INBOX_FRAMES = 64
SEND_LIMIT_BYTES = 1 << 20
"""Limit of unsent control bytes. Beyond it the connection is closed, because the peer does not read."""

_KINDS = frozenset(MESSAGE_TYPES)
_NOT_CONNECTED = asyncio.Transport()

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded control frame. ``body_bytes`` is the length of its encoded body, without the header."""

    message: Message
    generation: int
    stream: int
    body_bytes: int = 0


class ConnectionEnds:
    """The two ends of a connection.

    Attributes:
        remote, local: host and port.
        encrypted: whether the transport is TLS.
        identity: the peer named by the certificate that TLS verified; None without TLS or certificate.
        way: one of ``wire.messages.WAYS``.
    """

    def __init__(self) -> None:
        self.remote = self.local = ("?", 0)
        self.encrypted = False
        self.identity: PeerIdentity | None = None
        self.way = DIRECT
        self._peer_name, self._place = "", "?"

    def identify(self, transport: asyncio.BaseTransport) -> None:
        """Read what a connected transport knows of its ends. Raises ``ProtocolError`` if the run's CA signed the
        peer's certificate, but it names no peer."""
        self.remote = _address(transport.get_extra_info("peername"))
        self.local = _address(transport.get_extra_info("sockname"))
        way = transport.get_extra_info("way")  # of a circuit, whose remote host is no address that a person knows
        self.way, self._place = way or DIRECT, way or format_address(*self.remote)
        ssl_object = transport.get_extra_info("ssl_object")
        self.encrypted = ssl_object is not None
        if ssl_object is None or ssl_object.context.verify_mode == ssl.CERT_NONE:
            return  # an unverified certificate proves no identity
        certificate_der = ssl_object.getpeercert(binary_form=True)
        if certificate_der is not None:
            from wire.credentials import identity_of_untrusted  # TLS has loaded it already

            self.identity = identity_of_untrusted(certificate_der)

    def name_peer(self, name: str) -> None:
        """Set the peer's own name for itself, for error messages. It is unverified: it is cut and made printable."""
        self._peer_name = "".join(char for char in name[:64] if char.isprintable())

    def __str__(self) -> str:
        return f"{self._peer_name} ({self._place})" if self._peer_name else format_address(*self.remote)


class IncomingFrames:
    """The receiving half of a connection: the decoder, and the control frames that nobody took yet."""

    def __init__(self) -> None:
        self.decoder = FrameDecoder(_KINDS)
        self.frames: deque[Received] = deque()
        self.limit = 1  # number of ``frames`` from which on nothing more is read
        self.refusal: Refuse | None = None  # the peer closes after it: it is the cause of the end
        self.reading = True

    def add(self, frame: ControlFrame) -> None:
        message = decode_untrusted(frame.kind, frame.body)
        if isinstance(message, Refuse):
            self.refusal = message
        self.frames.append(Received(message, frame.generation, frame.stream, len(frame.body)))

    def steer(self, transport: asyncio.Transport) -> None:
        """Pause or resume reading as ``decoder`` and ``limit`` require."""
        before, self.reading = self.reading, not self.decoder.waiting and len(self.frames) < self.limit
        if self.reading and not before:
            transport.resume_reading()
        elif before and not self.reading:
            transport.pause_reading()


class Connection(asyncio.BufferedProtocol):
    """A framed connection, made by a factory given to ``Network.connect`` or ``Network.listen``.

    All methods are called on the event loop's thread.

    Args:
        opened: called when the transport is connected; a server learns of accepted connections by it.

    Attributes:
        bytes_in, bytes_out: running totals, headers included, for display.
        last_heard: loop time of the last byte received.
        on_drained: called each time the kernel has taken all that was handed to the transport; lets a sender keep the
            link busy without a task.
        closed: set when the transport is gone.
        close_cause: why the connection ended; None while it is open, and if this side closed it on purpose.
    """

    def __init__(self, opened: Callable[[Connection], None] | None = None) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.last_heard = 0.0
        self.on_drained: Callable[[], None] | None = None
        self.closed = asyncio.Event()
        self.close_cause: P2PTrainError | None = None
        self.ends = ConnectionEnds()
        self._opened = opened
        self._incoming = IncomingFrames()
        self._transport = _NOT_CONNECTED
        self._waiters: set[asyncio.Future[None]] = set()  # receive and flush: any change wakes all, and they check
        self._ended = False
        self._control_unsent = 0  # control bytes sent since the buffer was empty: at least the unsent ones

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._open else 0

    @property
    def least_rtt_s(self) -> float | None:
        """Shortest round trip that the kernel measured, unaffected by busy processes; None if unknown."""
        rtt_s: float | None = self._transport.get_extra_info("rtt_s") if self._open else None
        return rtt_s

    def raise_fence(self, generation: int) -> None:
        """Drop frames and posted buffers of generations from 1 up to below this one, from now on."""
        self._incoming.decoder.raise_fence(generation)
        self._steer_reading()

    def allow_large(self) -> None:
        """End the handshake: accept 64 KiB control frames of every kind, and bulk frames."""
        self._incoming.decoder.allow_large()
        self._incoming.limit = INBOX_FRAMES
        self._steer_reading()

    def pause_reading(self) -> None:
        """Read no more frames: what comes next is not for this connection."""
        self._incoming.limit = 0
        self._steer_reading()

    def detach(self) -> asyncio.Transport:
        """Give up the transport, which gets another protocol at once. Raises ``ConnectionLost``.

        That protocol hears nothing of bytes sent before, after ``flush``, and gets none too late, after
        ``pause_reading``.
        """
        self._check_open()
        self._end(None)
        transport, self._transport = self._transport, _NOT_CONNECTED
        self.closed.set()
        return transport

    async def receive(self, *, timeout_s: float) -> Received:
        """Return the next control frame. Frames that arrived before the peer closed are still returned.

        Raises:
            DeadlineExceeded: no frame came in time; the connection stays open.
            ConnectionLost, ProtocolError, Refused: the connection ended for this cause.
        """
        frames = self._incoming.frames
        if not frames:
            await self._until(lambda: bool(frames), timeout_s, "sent nothing")
        received = frames.popleft()
        self._steer_reading()
        return received

    async def expect(self, kind: type[M], *, timeout_s: float) -> M:
        """Return the next control frame, which must be a ``kind``.

        Raises:
            Refused: it is a ``Refuse``.
            ProtocolError: it is anything else; the connection is closed.
            DeadlineExceeded, ConnectionLost: as ``receive``.
        """
        message = (await self.receive(timeout_s=timeout_s)).message
        if isinstance(message, kind):
            return message
        if isinstance(message, Refuse):
            raise self._refused(message)
        error = ProtocolError(f"{self.ends} sent {type(message).__name__} where {kind.__name__} was due")
        self.abort(error)
        raise error

    def send(self, message: Message, *, generation: int = 0, stream: int = 0) -> int:
        """Hand one control frame to the transport, without blocking. Return the length of its encoded body in bytes.

        Raises:
            ConnectionLost: the connection ended, or was closed because the peer does not read.
            UserError: the message is longer than a frame may be.
        """
        self._check_open()
        body = encode(message)
        self._write_control(message, body, generation=generation, stream=stream)
        unsent = self._transport.get_write_buffer_size()
        if min(unsent, self._control_unsent) > SEND_LIMIT_BYTES:
            self.abort(DeadlineExceeded(f"{self.ends} does not read: {unsent} bytes wait to be sent"))
            self._check_open()
        return len(body)

    def send_bulk(self, payload: memoryview, *, generation: int, stream: int) -> None:
        """Hand a header and the caller's memory to the transport, without a copy and without blocking.

        ``payload`` is contiguous, of any format; keep it unchanged until ``flush`` returned. Raises ``ConnectionLost``.
        """
        self._check_open()
        header = encode_bulk_header(payload.nbytes, generation=generation, stream=stream)
        self.bytes_out += len(header) + payload.nbytes
        self._transport.writelines([header, payload] if payload.nbytes else [header])

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until the kernel has taken all that was sent; from then on sent memory may change.

        Raises:
            DeadlineExceeded: the peer does not read; the memory stays in use until the connection is closed.
            ConnectionLost: the connection ended.
        """
        self._check_open()
        if self._transport.get_write_buffer_size():
            await self._until(
                lambda: not self._ended and not self._transport.get_write_buffer_size(), timeout_s, "took no more bytes"
            )

    def post(self, into: memoryview, *, generation: int, stream: int, done: Callable[[], None]) -> None:
        """Set the destination of the next bulk frame of (generation, stream). Posts are filled in order.

        ``done`` is called from the event loop, never within this call, when ``into`` is full. It is not called if the
        connection ends before, or if ``raise_fence`` passes ``generation``. A frame of another length closes the
        connection with a ``ProtocolError``. Raises ``ConnectionLost``.
        """
        self._check_open()
        try:
            event = self._incoming.decoder.post(into, generation=generation, stream=stream, done=done)
        except ProtocolError as error:
            self.abort(error)
            return
        if event is not None:
            self._loop.call_soon(event.done)
        self._steer_reading()

    async def close(self, *, timeout_s: float = 1.0) -> None:
        """Send what is queued, then close. Give up after ``timeout_s``. Never raises, may be called twice."""
        self._incoming.frames.clear()
        if not self._ended:
            self._end(None)
            if self._attached:
                self._transport.close()
        if not self._attached:
            return
        try:
            await self._wait_closed(timeout_s)
        finally:
            if not self.closed.is_set():
                self._transport.abort()
        # An aborted transport reports its end in the next turn of the loop. The timeout is for a defective one.
        await self._wait_closed(1.0)

    def abort(self, cause: P2PTrainError | None = None) -> None:
        """Close now and drop what is queued. Every waiter gets ``cause``, or ``ConnectionLost`` if there is none.

        On a ``ProtocolError`` the peer gets a last ``Refuse`` that says so, if the kernel takes it at once.
        """
        self._incoming.frames.clear()
        if self._ended:
            return
        self._end(cause or self._closed_here())
        if not self._attached:
            return
        if isinstance(cause, ProtocolError) and not self._transport.get_write_buffer_size():
            refuse = last_word(cause)
            self._write_control(refuse, encode(refuse))
            if not self._transport.get_write_buffer_size():
                self._transport.close()
                return
        self._transport.abort()

    # ------------------------------------------------------------------------------------- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self.last_heard = self._loop.time()
        try:
            self.ends.identify(transport)
        except ProtocolError as error:
            self._loop.call_soon(self.abort, error)
        self._transport.set_write_buffer_limits(high=0)  # so resume_writing means: the kernel took all
        if self._ended:  # aborted while dialling; deferred, because uvloop must own the socket first
            self._loop.call_soon(self._transport.abort)
        elif self._opened is not None:
            self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.decoder.next_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        self.last_heard = self._loop.time()
        try:
            event = self._incoming.decoder.received(nbytes)
            if isinstance(event, BulkDone):
                event.done()
            elif isinstance(event, ControlFrame):
                self._incoming.add(event)
                self._steer_reading()
                self._wake()
            elif self._incoming.decoder.waiting:
                self._steer_reading()
        except ProtocolError as error:
            self.abort(ProtocolError(f"{self.ends}: {error.message}", remedy=error.remedy))

    def eof_received(self) -> bool:
        middle = "" if self._incoming.decoder.between_frames else " in the middle of a frame"
        self._end_by_peer(f"{self.ends} closed the connection{middle}")
        self._transport.abort()  # the peer will not read what is still unsent
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError):
            self._end(translate_ssl_error(exc, str(self.ends)))
        self._end_by_peer(f"the connection to {self.ends} broke: {exc or 'it was reset'}")
        self.closed.set()

    def resume_writing(self) -> None:
        self._wake()
        if self.on_drained is not None:
            self.on_drained()

    # ------------------------------------------------------------------------------------------------------ internals

    @property
    def _attached(self) -> bool:
        return self._transport is not _NOT_CONNECTED

    @property
    def _open(self) -> bool:
        return self._attached and not self._ended

    def _check_open(self) -> None:
        if self._ended:
            cause = self.close_cause or self._closed_here()
            if isinstance(cause, ConnectionLost):
                raise cause.with_traceback(None)
            raise ConnectionLost(f"the connection to {self.ends} ended: {cause.message}", remedy=cause.remedy)

    def _closed_here(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.ends} was closed by this side")

    def _refused(self, refuse: Refuse) -> Refused:
        return Refused(refuse.code, f"{self.ends} refuses: {refuse.message}", remedy=refuse.remedy)

    async def _until(self, satisfied: Callable[[], bool], timeout_s: float, silence: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not satisfied():
                    if self._ended:
                        raise (self.close_cause or self._closed_here()).with_traceback(None)
                    waiter = self._loop.create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.ends} {silence} for {timeout_s:g} s") from None

    async def _wait_closed(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.closed.wait()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _end(self, cause: P2PTrainError | None) -> None:
        if not self._ended:
            self._ended = True
            self.close_cause = cause
            self._wake()

    def _end_by_peer(self, how: str) -> None:
        refusal = self._incoming.refusal
        self._end(self._refused(refusal) if refusal else ConnectionLost(how))

    def _steer_reading(self) -> None:
        if not self._ended:
            self._incoming.steer(self._transport)

    def _write_control(self, message: Message, body: bytes, *, generation: int = 0, stream: int = 0) -> None:
        frame = encode_control(message.KIND, body, generation=generation, stream=stream)
        if not self._transport.get_write_buffer_size():
            self._control_unsent = 0
        self._control_unsent += len(frame)
        self.bytes_out += len(frame)
        self._transport.write(frame)


def last_word(error: P2PTrainError) -> Refuse:
    """Make the ``Refuse`` that reports ``error`` to a peer, cut to fit a handshake frame."""
    codes = ((ProtocolError, RefusalCode.PROTOCOL), (DeadlineExceeded, RefusalCode.TOO_SLOW))
    code = next((code for kind, code in codes if isinstance(error, kind)), error.code)
    return Refuse(code, _printable(error.message), _printable(error.remedy))


def _printable(text: str) -> str:
    # two texts of 400 characters fit the 4 KiB of a handshake frame in any script
    return shortened(text.encode("utf-8", "replace").decode(), 400)


def _address(name: object) -> tuple[str, int]:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else ("?", 0)
