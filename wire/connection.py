"""One framed connection: the asyncio shell around ``wire.frame``.

It runs on any loop and any ``asyncio.Transport``. Control frames are queued for ``receive``; bulk payloads go from the
socket into posted buffers and from the caller's memory to the socket. There is no task, future or timer per frame.

Reading pauses while a bulk frame waits for its post or while the queue of control frames is full, so a peer that sends
faster than we take is held back by TCP, not by our memory. Before the handshake ended the queue holds one frame: what
the other side sends right behind its last handshake frame stays in the kernel until ``allow_large`` was called.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    ProtocolError,
    Refused,
)
from p2ptrain.core.texts import shortened
from wire.codec import MESSAGE_TYPES, decode_untrusted, encode
from wire.frame import (
    BulkDone,
    ControlFrame,
    FrameDecoder,
    encode_bulk_header,
    encode_control,
)
from wire.messages import Message, Refuse
from wire.tls import tls_problem
from wire.transport import tune_for_bulk

if TYPE_CHECKING:  # a plain cluster need not load cryptography
    from wire.credentials import PeerIdentity

INBOX_FRAMES = 64
GARBLED = "protocol-error"
"""Code of the ``Refuse`` that is the last word to a peer whose bytes made no sense."""

_KINDS = frozenset(MESSAGE_TYPES)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Received:
    """One control frame, decoded. ``body_bytes``: it was so long, without the header."""

    message: Message
    generation: int
    stream: int
    body_bytes: int = 0


class Connection(asyncio.BufferedProtocol):
    """One framed connection, made by a factory given to ``Network.connect`` or ``Network.listen``.

    All methods are called on the event loop's thread.

    Args:
        opened: called once the transport is there; how a server learns of what it accepted.
        send_limit_bytes: control bytes that may wait unsent before the peer counts as not reading.

    Attributes:
        bytes_in, bytes_out: running totals, headers included, for people.
        last_heard: loop time of the last byte received.
        on_drained: called each time the kernel has taken all that was handed to the transport; for a sender that keeps
            the link busy without a task.
        closed: set when the transport is gone.
        close_cause: why the connection ended; None while it lives and where this side closed it on purpose.
        encrypted: whether the transport is TLS.
        identity: whom the other side's certificate names, once TLS has verified it; None without TLS or certificate.
    """

    def __init__(
        self, opened: Callable[[Connection], None] | None = None, *, send_limit_bytes: int = (1 << 20)
    ) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.last_heard = 0.0
        self.on_drained: Callable[[], None] | None = None
        self.closed = asyncio.Event()
        self.close_cause: P2PTrainError | None = None
        self.encrypted = False
        self.identity: PeerIdentity | None = None
        self._called = ""
        self._opened = opened
        self._send_limit_bytes = send_limit_bytes
        self._decoder = FrameDecoder(_KINDS)
        self._inbox: deque[Received] = deque()
        self._inbox_limit = 1
        self._refusal: Refuse | None = None
        self._waiters: set[asyncio.Future[None]] = set()  # of receive and flush: woken by any news, they look again
        self._attached = False
        self._ended = False
        self._reading = True
        self._control_unsent = 0  # control bytes sent since nothing was left unsent: an upper bound of those unsent
        self.remote = self.local = ("?", 0)  # host and port of each end

    # ---------------------------------------------------------------------------------------------------- for callers

    def call(self, name: str) -> None:
        """What the other side calls itself, for what is told of it. Not checked: it is made short, and printable."""
        self._called = "".join(char for char in name[:64] if char.isprintable())

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._ended or not self._attached else self._transport.get_write_buffer_size()

    @property
    def least_rtt_s(self) -> float | None:
        """The shortest round trip that the kernel saw, however busy the processes are; None where nothing tells it."""
        rtt_s = self._transport.get_extra_info("rtt_s") if self._attached and not self._ended else None
        return float(rtt_s) if rtt_s is not None else None

    @property
    def fence(self) -> int:
        """Frames of a generation in ``range(1, fence)`` are dropped by rule, posted buffers too. It only grows."""
        return self._decoder.fence

    @fence.setter
    def fence(self, generation: int) -> None:
        self._decoder.raise_fence(generation)
        self._steer_reading()

    def tune_for_bulk(self) -> None:
        sock = self._transport.get_extra_info("socket") if self._attached and not self._ended else None
        if sock is not None:
            tune_for_bulk(sock)

    def allow_large(self) -> None:
        """The handshake ended: 64 KiB control frames of every kind, and bulk frames, are welcome."""
        self._decoder.allow_large()
        self._inbox_limit = INBOX_FRAMES
        self._steer_reading()

    async def receive(self, *, timeout_s: float) -> Received:
        """The next control frame. What arrived before the peer closed is still handed out.

        Raises:
            DeadlineExceeded: none came in time; the connection lives on.
            ConnectionLost, ProtocolError, Refused: the connection ended, by this cause.
        """
        if not self._inbox:
            await self._until(lambda: bool(self._inbox), timeout_s, "sent nothing")
        received = self._inbox.popleft()
        self._steer_reading()
        return received

    async def expect(self, kind: type[M], *, timeout_s: float) -> M:
        """The next control frame, which must be a ``kind``.

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
        error = ProtocolError(f"{self._name} sent {type(message).__name__} where {kind.__name__} was due")
        self.abort(error)
        raise error

    def send(self, message: Message, *, generation: int = 0, stream: int = 0) -> int:
        """Hand one control frame to the transport. Never blocks.

        Returns:
            Bytes of the message, as of ``Received.body_bytes``.

        Raises:
            ConnectionLost: the connection ended, or the peer does not read and the connection is closed for it.
            UserError: the message is longer than a frame may be.
        """
        self._check_open()
        body = encode(message)
        self._write_control(encode_control(message.KIND, body, generation=generation, stream=stream))
        self._check_read()
        return len(body)

    def send_with_bulk(self, message: Message, payload: memoryview, *, generation: int, stream: int) -> None:
        """``send`` and then ``send_bulk`` of what it announces, as one write: the other side wakes up once for both.

        Raises: as both.
        """
        self._check_open()
        header = encode_bulk_header(payload.nbytes, generation=generation, stream=stream)
        self._write_control(encode_control(message.KIND, encode(message), generation=0, stream=0), header, payload)
        self._check_read()

    def send_bulk(self, payload: memoryview, *, generation: int, stream: int) -> None:
        """Hand a header and the caller's memory to the transport, without a copy. Never blocks.

        Args:
            payload: contiguous, of any format; unchanged by the caller until ``flush`` returned.

        Raises:
            ConnectionLost: the connection ended.
        """
        self._check_open()
        header = encode_bulk_header(payload.nbytes, generation=generation, stream=stream)
        self.bytes_out += len(header) + payload.nbytes
        self._transport.writelines([header, payload] if payload.nbytes else [header])

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until all that was sent is in the kernel; from then on sent memory may change.

        Raises:
            DeadlineExceeded: the peer does not read; the memory is still in use until the connection is closed.
            ConnectionLost: the connection ended.
        """
        self._check_open()
        if self._transport.get_write_buffer_size():
            await self._until(
                lambda: not self._ended and not self._transport.get_write_buffer_size(), timeout_s, "took no more bytes"
            )

    def post(self, into: memoryview, *, generation: int, stream: int, done: Callable[[], None]) -> None:
        """The next bulk frame of (generation, stream), in order of posting, lands in ``into``.

        ``done`` is called from the event loop, never from within this call, when it is complete; not at all where the
        connection ends or ``fence`` passes ``generation`` before. A frame of another length is a ``ProtocolError``.

        Raises:
            ConnectionLost: the connection ended.
        """
        self._check_open()
        try:
            event = self._decoder.post(into, generation=generation, stream=stream, done=done)
        except ProtocolError as error:
            self.abort(error)
            return
        if event is not None:
            self._loop.call_soon(event.done)
        self._steer_reading()

    async def close(self, *, timeout_s: float = 1.0) -> None:
        """Send what is queued, then close; after ``timeout_s`` give up on it. Never raises, may be called twice."""
        self._inbox.clear()
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
        # an aborted transport reports its end in the next turn of the loop; this is for one that has a bug
        await self._wait_closed(1.0)

    def abort(self, cause: P2PTrainError | None = None) -> None:
        """Close now and drop what is queued. Every waiter gets ``cause``, ``ConnectionLost`` where there is none.

        A peer at fault (``ProtocolError``) is told so, where the kernel takes these bytes at once.
        """
        self._inbox.clear()
        if self._ended:
            return
        self._end(cause or self._closed_here())
        if not self._attached:
            return
        if isinstance(cause, ProtocolError) and not self._transport.get_write_buffer_size():
            self._write_control(encode_control(Refuse.KIND, encode(last_word(GARBLED, cause)), generation=0, stream=0))
            if not self._transport.get_write_buffer_size():
                self._transport.close()
                return
        self._transport.abort()

    # ------------------------------------------------------------------------------------- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._attached = True
        self._loop = asyncio.get_running_loop()
        self.remote = _address(transport.get_extra_info("peername"))
        self.local = _address(transport.get_extra_info("sockname"))
        self.last_heard = self._loop.time()
        try:
            self._identify(transport.get_extra_info("ssl_object"))
        except ProtocolError as error:  # signed by the run's CA, and yet it names no peer
            self._loop.call_soon(self.abort, error)
        self._transport.set_write_buffer_limits(high=0)  # so resume_writing means that the kernel has all
        if self._ended:  # given up while it was dialled; not at once, for uvloop must come to own the socket first
            self._loop.call_soon(self._transport.abort)
        elif self._opened is not None:
            self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.next_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        self.last_heard = self._loop.time()
        try:
            event = self._decoder.received(nbytes)
            if event is None:
                return
            if isinstance(event, BulkDone):
                event.done()
            elif isinstance(event, ControlFrame):
                self._deliver(event)
            else:
                self._steer_reading()
        except ProtocolError as error:
            self.abort(ProtocolError(f"{self._name}: {error.message}", remedy=error.remedy))

    def eof_received(self) -> bool:
        middle = "" if self._decoder.between_frames else " in the middle of a frame"
        self._end_by_peer(f"{self._name} closed the connection{middle}")
        self._transport.abort()  # what it did not read by now it never will
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError):
            self._end(tls_problem(exc, self._name))
        self._end_by_peer(f"the connection to {self._name} broke: {exc or 'it was reset'}")
        self.closed.set()

    def pause_writing(self) -> None:
        """The kernel took less than all. Nothing to do: senders are bounded by ``flush`` and the send limit."""

    def resume_writing(self) -> None:
        self._wake()
        if self.on_drained is not None:
            self.on_drained()

    # ------------------------------------------------------------------------------------------------------ internals

    @property
    def _name(self) -> str:
        address = f"{self.remote[0]}:{self.remote[1]}"
        return f"{self._called} ({address})" if self._called else address

    def _identify(self, ssl_object: ssl.SSLObject | None) -> None:
        self.encrypted = ssl_object is not None
        if ssl_object is None or ssl_object.context.verify_mode == ssl.CERT_NONE:
            return  # a certificate that nobody verified names nobody
        certificate_der = ssl_object.getpeercert(binary_form=True)
        if certificate_der is not None:
            from wire.credentials import identity_of_untrusted  # loaded already, where TLS is

            self.identity = identity_of_untrusted(certificate_der)

    def _check_open(self) -> None:
        if self._ended:
            cause = self.close_cause or self._closed_here()
            if isinstance(cause, ConnectionLost):
                raise cause.with_traceback(None)
            raise ConnectionLost(f"the connection to {self._name} ended: {cause.message}", remedy=cause.remedy)

    def _closed_here(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._name} was closed by this side")

    def _refused(self, refuse: Refuse) -> Refused:
        return Refused(refuse.code, f"{self._name} refuses: {refuse.message}", remedy=refuse.remedy)

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
            raise DeadlineExceeded(f"{self._name} {silence} for {timeout_s:g} s") from None

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
        self._end(self._refused(self._refusal) if self._refusal else ConnectionLost(how))

    def _deliver(self, frame: ControlFrame) -> None:
        message = decode_untrusted(frame.kind, frame.body)
        if isinstance(message, Refuse):
            self._refusal = message  # its last word, and so the cause of the end that follows
        self._inbox.append(Received(message, frame.generation, frame.stream, len(frame.body)))
        self._steer_reading()
        self._wake()

    def _steer_reading(self) -> None:
        wanted = not self._decoder.waiting and len(self._inbox) < self._inbox_limit
        if wanted == self._reading or self._ended:
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _write_control(self, frame: bytes, *behind: bytes | memoryview) -> None:
        """``behind``: bulk that goes with it, and does not count as control frames."""
        if not self._transport.get_write_buffer_size():
            self._control_unsent = 0
        self._control_unsent += len(frame)
        self.bytes_out += len(frame) + sum(memoryview(part).nbytes for part in behind)
        if behind:
            self._transport.writelines([frame, *(part for part in behind if len(part))])
        else:
            self._transport.write(frame)

    def _check_read(self) -> None:
        unsent = self._transport.get_write_buffer_size()
        if min(unsent, self._control_unsent) > self._send_limit_bytes:
            self.abort(DeadlineExceeded(f"{self._name} does not read: {unsent} bytes wait to be sent"))
            self._check_open()


def last_word(code: str, error: P2PTrainError) -> Refuse:
    """The ``Refuse`` that tells a peer of ``error``, cut to what a handshake frame holds."""
    return Refuse(code, _printable(error.message), _printable(error.remedy))


def _printable(text: str) -> str:
    # twice this, in any script, fits the 4 KiB of a handshake frame
    return shortened(text.encode("utf-8", "replace").decode(), 400)


def _address(name: object) -> tuple[str, int]:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else ("?", 0)
