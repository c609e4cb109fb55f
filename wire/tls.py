"""The encrypted network: TLS 1.3 under a run's own CA, over the transport of any other ``Network``.

The event loops' own TLS has three defects here. It drops the alert that tells a refused peer why. Its write buffer
leaves out what the transport below holds, so ``resume_writing`` does not mean that the kernel has all. And each
connection holds 256 KiB from the start. This transport sends alerts, passes the conformance suite of plain transports,
holds nothing before the first byte, and behaves alike on every loop.

Copies. In: kernel → a buffer that all connections of a network share (a read ends before the next begins) → OpenSSL →
decrypted into the buffer of the protocol above, which is a bulk payload's destination. Out: the caller's memory is
encrypted ``PIECE_BYTES`` at a time, only as fast as the kernel takes it. So a slow peer costs one piece of memory.

States of a ``TlsTransport``, with what it does as it enters the next one::

    QUIET      this side dialled, or a byte arrives  → HANDSHAKE
    HANDSHAKE  the handshake succeeded               → OPEN     connection_made
    QUIET, HANDSHAKE  the handshake failed           → FAILED   send alert and FIN; read and drop what still comes
    OPEN       close(), or the peer's close_notify   → CLOSING  send all that was written, close_notify, FIN
    any        the transport below is lost           → LOST     connection_lost, if connection_made was called
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.address import format_address, is_loopback
from wire.codec import encode
from wire.credentials import Credentials
from wire.frame import LENGTH_BYTES, encode_control
from wire.messages import Hello, RefusalCode, Refuse
from wire.transport import (
    Address,
    FlowControl,
    HalfOpen,
    OpeningListener,
    WriteData,
    bytes_view,
    no_answer,
)

JOIN = "join with a ticket: p2ptrain ticket new, at the seed"
JOIN_AGAIN = "join again with a fresh ticket: p2ptrain ticket new, at the seed"
CHECK_CLOCKS = "check the date and time of both machines; a seed whose authority is not valid says so when it starts"

# OpenSSL's X509_V_ERR_*, for which the ssl module has no names → code, what the peer presented, remedy.
_CERTIFICATE_ERRORS = {
    9: (RefusalCode.CERTIFICATE_NOT_YET_VALID, "a certificate that is not valid yet", CHECK_CLOCKS),
    10: (RefusalCode.CERTIFICATE_EXPIRED, "an expired certificate", f"{CHECK_CLOCKS}, or {JOIN_AGAIN}"),
    26: (RefusalCode.CERTIFICATE_UNTRUSTED, "a certificate for another purpose", JOIN_AGAIN),
}
_UNTRUSTED = (
    RefusalCode.CERTIFICATE_UNTRUSTED,
    "a certificate not signed by this cluster's CA: of another cluster, or the connection is intercepted",
    f"check the address; if the seed was set up anew, {JOIN_AGAIN}",
)

# The end of SSLError.reason for an alert that the peer sent (RFC 8446, section 6.2) → code, why it refuses, remedy.
_ALERTS = {
    "CERTIFICATE_REQUIRED": (RefusalCode.NOT_PERMITTED, "it requires a certificate of this side", JOIN_AGAIN),
    "CERTIFICATE_EXPIRED": (RefusalCode.CERTIFICATE_EXPIRED, "this side's certificate has expired", JOIN_AGAIN),
    "UNKNOWN_CA": (RefusalCode.CERTIFICATE_UNTRUSTED, "this side's certificate is from another cluster", JOIN_AGAIN),
    "BAD_CERTIFICATE": (RefusalCode.CERTIFICATE_UNTRUSTED, "this side's certificate is not valid yet", CHECK_CLOCKS),
    "INTERNAL_ERROR": (RefusalCode.BUSY, "too many handshakes are under way there", "try again in a few seconds"),
}


def translate_ssl_error(error: ssl.SSLError, address: str) -> P2PTrainError:
    """Translate ``error``, which ended the TLS connection with ``address`` (host and port)."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code, what, remedy = _CERTIFICATE_ERRORS.get(error.verify_code, _UNTRUSTED)
        return Refused(code, f"{address} presented {what}", remedy=remedy)
    reason = error.reason or ""
    words = reason.replace("_", " ").lower()
    if "ALERT" in reason:
        for name, (code, what, remedy) in _ALERTS.items():
            if reason.endswith(name):
                return Refused(code, f"{address} refuses: {what}", remedy=remedy)
        return ConnectionLost(f"{address} ended TLS: {words}")
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Refused(RefusalCode.NOT_PERMITTED, f"{address} presented no certificate", remedy=JOIN_AGAIN)
    return ProtocolError(f"{address} does not speak TLS correctly: {words or 'no reason given'}")


# -------------------------------------------------------------------------------------------------------- the transport


READ_BYTES = 256 << 10
"""Size of the shared read buffer; the loops' own TLS reads as much at once."""
PIECE_BYTES = 128 << 10
"""Plaintext bytes per encryption: eight TLS records. From 32 to 256 KiB the processor time per byte was equal within
noise; smaller pieces use less memory for a slow peer."""
LINGER_S = 1.0
"""How long a failed connection stays open for the peer to read the alert; closing at once would reset it."""

ANSWERS_BYTES = 16 << 10
"""Limit of TLS's own answers per connection: about 600 key updates. An honest peer stays far below: one is due after
2**24.5 records (RFC 8446, section 5.5). Each answer costs time and memory here."""


class NotTlsError(ConnectionError):
    """The peer's first byte does not begin a TLS record."""


class _State(Enum):
    QUIET = auto()
    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    FAILED = auto()
    LOST = auto()


class TlsRecords:
    """The record layer of one connection: OpenSSL between plaintext and encrypted bytes. It knows no transport."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._context, self._server_side = context, server_side
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._backlog: deque[memoryview] = deque()  # in the writers' memory; the first view shrinks
        self.backlog_bytes = 0
        self.answers_bytes = 0  # encrypted bytes that OpenSSL made while it decrypted, such as key updates
        self.is_tls = False  # whether the peer's first byte begins a TLS record

    def begin_handshake(self) -> None:
        self.ssl = self._context.wrap_bio(self._incoming, self._outgoing, server_side=self._server_side)

    def take_encrypted(self) -> bytes:
        return self._outgoing.read()

    def feed(self, encrypted: memoryview) -> None:
        self._incoming.write(encrypted)

    def has_input(self) -> bool:
        return bool(self._incoming.pending or self.ssl.pending())

    def decrypt(self, into: memoryview) -> tuple[int, Exception | None]:
        """Decrypt into ``into``. Return the number of bytes, and the exception that ended reading, if any did.

        ``EOFError``: the peer's close_notify. ``SSLWantReadError``: the rest of a record is missing. Another
        ``SSLError``: the connection is broken.
        """
        end: Exception | None = None
        filled, size = 0, into.nbytes
        read, incoming, pending = self.ssl.read, self._incoming, self.ssl.pending
        try:
            while filled < size and (incoming.pending or pending()):  # SSLWantReadError costs as much as a record
                nbytes = cast(int, read(size - filled, into[filled:]))
                if not nbytes:
                    end = EOFError()
                    break
                filled += nbytes
        except ssl.SSLError as error:
            end = error
        self.answers_bytes += self._outgoing.pending
        return filled, end

    def write(self, plaintext: memoryview) -> None:
        self._backlog.append(plaintext)
        self.backlog_bytes += plaintext.nbytes

    def encrypt_piece(self) -> None:
        encrypt, left = self.ssl.write, PIECE_BYTES
        while self._backlog and left > 0:
            view = self._backlog[0]
            taken = encrypt(view)  # one record of 16 KiB; a memory BIO is never full
            if taken == view.nbytes:
                self._backlog.popleft()
            else:
                self._backlog[0] = view[taken:]
            self.backlog_bytes -= taken
            left -= taken

    def drop_backlog(self) -> None:
        self._backlog.clear()
        self.backlog_bytes = 0


class TlsTransport(FlowControl, asyncio.BufferedProtocol):
    """A transport to the protocol above, and a protocol to the transport below. This class is the dialling side.

    Args:
        factory: makes the protocol above when the handshake succeeded.
        read_buffer: the transport below reads into it. The connections of a thread share it.

    Attributes:
        handshake_result: raises what made the handshake fail.
        below_lost: set when the transport below is lost.
    """

    def __init__(
        self, context: ssl.SSLContext, factory: ProtocolFactory, read_buffer: memoryview, *, server_side: bool = False
    ) -> None:
        super().__init__(_NO_PROTOCOL)
        self._records = TlsRecords(context, server_side=server_side)
        self._factory = factory
        self._read_buffer = read_buffer
        self._loop = asyncio.get_running_loop()
        self.handshake_result: asyncio.Future[None] = self._loop.create_future()
        self.below_lost = asyncio.Event()
        self._state = _State.QUIET
        self._below_full = False
        self._reading = True
        self._eof_below = self._eof_delivered = False
        self._error: Exception | None = None  # the cause for connection_lost
        self._linger: asyncio.TimerHandle | None = None

    # --------------------------------------------------------------------------------------------- around the handshake

    @property
    def _is_opening(self) -> bool:
        return self._state in (_State.QUIET, _State.HANDSHAKE)

    def _on_connected(self) -> None:
        self.begin_handshake()

    def _on_handshake_done(self) -> None:
        if not self.handshake_result.done():
            self.handshake_result.set_result(None)

    def _on_handshake_failed(self, error: Exception) -> None:
        if not self.handshake_result.done():
            self.handshake_result.set_exception(error)

    def begin_handshake(self) -> None:
        self._state = _State.HANDSHAKE
        self._records.begin_handshake()
        self._continue_handshake()

    def fail_handshake(self, error: Exception, last_words: bytes = b"") -> None:
        """Abandon the handshake, if there still is one. ``last_words``: sent without TLS: an alert or a ``Refuse``."""
        if not self._is_opening:
            return
        self._state = _State.FAILED
        if last_words:
            self._below.write(last_words)
        self._on_handshake_failed(error)
        if not self._below.is_closing():
            self._below.write_eof()
            self._linger = self._loop.call_later(LINGER_S, self._below.abort)

    def _continue_handshake(self) -> None:
        try:
            self._records.ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._send_encrypted()
            return
        except ssl.SSLError as error:
            self.fail_handshake(error, self._records.take_encrypted())
            return
        self._send_encrypted()
        self._state = _State.OPEN
        self._protocol = self._factory()
        self._protocol.connection_made(self)
        self._on_handshake_done()
        self._loop.call_soon(self._deliver_and_resume)  # deliver what came right after the handshake

    # ------------------------------------------------------------------------------------ for the protocol above: reads

    def pause_reading(self) -> None:
        self._reading = False
        if self._state is _State.OPEN:
            self._below.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._deliver_and_resume)

    def is_reading(self) -> bool:
        return self._reading and self._state is _State.OPEN

    def _deliver_and_resume(self) -> None:
        try:
            self._deliver()
        except Exception as error:  # noqa: BLE001 - reported to the loop, as every transport of asyncio does
            self._report(error)
            self._error = error
            self.abort()
        if self.is_reading():
            self._below.resume_reading()

    def _deliver(self) -> None:
        while self.is_reading() and not self._eof_delivered and self._records.has_input():
            nbytes, end = self._decrypt()
            if self._records.answers_bytes <= ANSWERS_BYTES:
                self._send_encrypted()
            else:
                self._error = ConnectionAbortedError("it sent too many TLS key updates")
                self.abort()
            if nbytes and self._state is _State.OPEN:
                self._protocol.buffer_updated(nbytes)
            if isinstance(end, ssl.SSLWantReadError):
                break
            if isinstance(end, ssl.SSLError):
                self._close_after_error(end)
            elif end is not None:
                self._deliver_eof()
        if self._eof_below and self.is_reading():
            self._deliver_eof()

    def _decrypt(self) -> tuple[int, Exception | None]:
        # Release both views before buffer_updated, in which the protocol may resize its bytearray.
        with memoryview(self._protocol.get_buffer(-1)) as buffer, buffer.cast("B") as into:
            if not into.nbytes:
                raise RuntimeError("get_buffer() returned an empty buffer")
            return self._records.decrypt(into)

    def _deliver_eof(self) -> None:
        if not self._eof_delivered:
            self._eof_delivered = True
            if not self._protocol.eof_received():
                self.close()

    def _close_after_error(self, error: ssl.SSLError) -> None:
        if self._state is _State.OPEN:
            self._error = error
            self._state = _State.CLOSING
            self._records.drop_backlog()
            self._send_encrypted()
            self._below.close()

    # ----------------------------------------------------------------------------------- for the protocol above: writes

    def write(self, data: WriteData) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[WriteData]) -> None:
        if self._state is not _State.OPEN:
            return
        for data in list_of_data:
            view = bytes_view(data)
            if view.nbytes:
                self._records.write(view)
        self._encrypt_backlog()
        self._maybe_pause()

    def get_write_buffer_size(self) -> int:
        if self._state is _State.LOST:
            return 0
        return self._records.backlog_bytes + self._below.get_write_buffer_size()

    def close(self) -> None:
        """Send what was written and close_notify, then close. Nothing more is read."""
        if self._is_opening:
            self.abort()
        elif self._state is _State.OPEN:
            self._state = _State.CLOSING
            self._below.pause_reading()
            self._close_when_sent()

    def abort(self) -> None:
        if self._state is _State.LOST:
            return
        self._records.drop_backlog()
        if self._state is not _State.FAILED:
            was_opening, self._state = self._is_opening, _State.CLOSING
            if was_opening:
                error = ConnectionAbortedError("this side closed the connection during the TLS handshake")
                self._on_handshake_failed(error)
        self._below.abort()

    def is_closing(self) -> bool:
        return self._state in (_State.CLOSING, _State.FAILED, _State.LOST)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._records.ssl
        return self._below.get_extra_info(name, default)

    def _encrypt_backlog(self) -> None:
        try:
            while self._records.backlog_bytes and not self._below_full:
                self._records.encrypt_piece()
                self._send_encrypted()
        except ssl.SSLError as error:
            self._close_after_error(error)

    def _send_encrypted(self) -> None:
        if encrypted := self._records.take_encrypted():
            self._below.write(encrypted)

    def _close_when_sent(self) -> None:
        if not self._records.backlog_bytes and not self._below.is_closing():
            with suppress(ssl.SSLError):  # the peer has not answered; no need to wait (RFC 8446, 6.1)
                self._records.ssl.unwrap()
            self._send_encrypted()
            self._below.close()

    # ------------------------------------------------------------------------------------------ for the transport below

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._below.set_write_buffer_limits(high=0)
        self._on_connected()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._state in (_State.CLOSING, _State.FAILED):
            return
        if not self._records.is_tls:
            if self._read_buffer[0] not in (0x16, 0x15):  # a handshake record, or an alert
                self._refuse_plain(bytes(self._read_buffer[: min(nbytes, 16)]))
                return
            self._records.is_tls = True
        self._records.feed(self._read_buffer[:nbytes])
        if self._state is _State.OPEN:
            self._deliver()
        elif self._state is _State.HANDSHAKE:
            self._continue_handshake()
        else:
            self.begin_handshake()

    def _refuse_plain(self, first_bytes: bytes) -> None:
        self.fail_handshake(NotTlsError(f"it began with {first_bytes[:4]!r}"))

    def eof_received(self) -> bool:
        if self._is_opening:
            self.fail_handshake(ConnectionResetError("it closed the connection in the middle of the TLS handshake"))
        if self._state is not _State.OPEN:
            return False
        self._eof_below = True
        self._deliver()
        return True  # close() closes it after the unsent bytes

    def connection_lost(self, exc: Exception | None) -> None:
        was_opening, self._state = self._is_opening, _State.LOST
        if self._linger is not None:
            self._linger.cancel()
        self._records.drop_backlog()
        if was_opening:
            error = exc or ConnectionResetError("the connection broke in the middle of the TLS handshake")
            self._on_handshake_failed(error)
        elif self._protocol is not _NO_PROTOCOL:
            self._protocol.connection_lost(self._error or exc)
        self.below_lost.set()

    def pause_writing(self) -> None:
        self._below_full = True

    def resume_writing(self) -> None:
        self._below_full = False
        self._encrypt_backlog()
        if self._state is _State.CLOSING:
            self._close_when_sent()
        elif self._state is _State.OPEN:
            self._maybe_resume()


_NO_PROTOCOL = asyncio.BufferedProtocol()  # the protocol above until the handshake is done


# ---------------------------------------------------------------------------------------------------------- the network


HANDSHAKE_TIMEOUT_S = 5.0
"""From accept to the end of the TLS handshake. That of ``wire.handshake`` follows, with a time of its own."""
BUSY_ALERT = b"\x15\x03\x03\x00\x02\x02\x50"
"""A fatal internal_error alert (RFC 8446, section 6), which a caller understands before TLS has begun."""


class TlsDialler:
    """Dials over TLS; the half of ``TlsNetwork`` that a newcomer without a certificate can use."""

    def __init__(self, network: Network, context: ssl.SSLContext) -> None:
        self._network = network
        self._client_context = context
        self.read_buffer = memoryview(bytearray(READ_BYTES))

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial and complete the TLS handshake within ``timeout_s``.

        In TLS 1.3 the client finishes first. If the server rejects this side's certificate, the first read reports it.

        Raises:
            Unreachable: nothing accepts the connection.
            DeadlineExceeded: what accepted it did not complete the TLS handshake in time.
            Refused: the server is not of the run's CA, its certificate expired, it does not speak TLS, or it refuses.
            ConnectionLost, ProtocolError: the handshake broke.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        transport = TlsTransport(self._client_context, factory, self.read_buffer)
        await self._network.connect(host, port, lambda: transport, timeout_s=timeout_s)
        address = format_address(host, port)
        try:
            async with asyncio.timeout_at(deadline):
                await transport.handshake_result
        except OSError as error:
            if report := transport.get_extra_info("report_failure"):  # of a circuit: the next one takes another path
                report()
            if isinstance(error, TimeoutError):
                transport.abort()
                raise no_answer(host, port, timeout_s) from None
            await transport.below_lost.wait()  # within LINGER_S
            raise translate_handshake_error(error, address, dialled=True) from error
        except BaseException:
            transport.abort()
            raise


class TlsNetwork(TlsDialler):
    """A ``Network`` on which every byte is encrypted and every peer has a certificate of the run's CA.

    Args:
        network: carries the encrypted bytes.
        credentials: this peer's; already saved, because OpenSSL reads the key from a file.
        require_client_certificate: whether TLS refuses a caller without a certificate. A seed accepts one, as it may
            want to enrol; ``wire.handshake`` permits it nothing else.
    """

    def __init__(self, network: Network, credentials: Credentials, *, require_client_certificate: bool) -> None:
        super().__init__(network, credentials.client_context())
        self._require_client_certificate = require_client_certificate
        self.half_open = HalfOpen()  # of callers whose TLS handshake has not ended
        self.present(credentials)

    def present(self, credentials: Credentials) -> None:
        """Present ``credentials`` on new connections; open connections stay. Raises ``StorageError``."""
        server_context = credentials.server_context(require_client_certificate=self._require_client_certificate)
        self._client_context, self.server_context = credentials.client_context(), server_context

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept on ``host:port``; call ``factory`` after each successful TLS handshake. Raises ``UserError``."""
        handshakes: set[_AcceptedTransport] = set()
        accept = partial(_AcceptedTransport, self, factory, handshakes, on_problem)
        return OpeningListener(await self._network.listen(host, port, accept, on_problem), handshakes)


class _AcceptedTransport(TlsTransport):
    """The accepting side. The number of handshakes under way and the time of each are limited."""

    def __init__(
        self,
        network: TlsNetwork,
        factory: ProtocolFactory,
        handshakes: set[_AcceptedTransport],
        on_problem: OnProblem | None,
    ) -> None:
        super().__init__(network.server_context, factory, network.read_buffer, server_side=True)
        self._half_open = network.half_open
        self._handshakes = handshakes
        self._on_problem = on_problem
        self._remote: Address = ("?", 0)
        self._deadline: asyncio.TimerHandle | None = None

    def _on_connected(self) -> None:
        name = self._below.get_extra_info("peername")
        if name is not None:  # None: the connection was reset already
            self._remote = (str(name[0]), int(name[1]))
        if busy := self._half_open.enter(self._remote[0]):
            self._report_problem(Refused(RefusalCode.BUSY, busy, remedy="try again in a few seconds"))
            self._on_problem = None  # report it once
            self._below.write(BUSY_ALERT)
            self._below.close()
            return
        self._handshakes.add(self)
        self._deadline = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._end_slow_handshake)

    def _on_handshake_done(self) -> None:
        self._release_place()

    def _on_handshake_failed(self, error: Exception) -> None:
        if not isinstance(error, ConnectionAbortedError):  # this side aborted
            self._report_problem(translate_handshake_error(error, format_address(*self._remote), dialled=False))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._release_place()

    def _release_place(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._handshakes.discard(self)
            self._half_open.leave(self._remote[0])

    def _refuse_plain(self, first_bytes: bytes) -> None:
        local_end = self._below.get_extra_info("sockname") or ("",)  # the same address at both ends: this machine's
        is_hello = first_bytes[LENGTH_BYTES : LENGTH_BYTES + 1] == bytes((Hello.KIND,))
        if is_hello and (is_loopback(self._remote[0]) or local_end[0] == self._remote[0]):
            self._on_problem = None  # a command of this machine asks whether the cluster is encrypted
        refuse = Refuse(RefusalCode.TLS_REQUIRED, "this cluster is encrypted", JOIN)
        self.fail_handshake(NotTlsError(f"it began with {first_bytes[:4]!r}"), _encode_plain(refuse))

    def _end_slow_handshake(self) -> None:
        error = TimeoutError(f"it did not complete the TLS handshake within {HANDSHAKE_TIMEOUT_S:g} s")
        refuse = _encode_plain(Refuse(RefusalCode.TOO_SLOW, str(error), "try again"))
        self.fail_handshake(error, BUSY_ALERT if self._records.is_tls else refuse)

    def _report_problem(self, problem: P2PTrainError) -> None:
        if self._on_problem is not None:
            self._on_problem(problem, self._remote)


def translate_handshake_error(error: Exception, address: str, *, dialled: bool) -> P2PTrainError:
    if isinstance(error, ssl.SSLError):
        return translate_ssl_error(error, address)
    if isinstance(error, NotTlsError):
        code, remedy = RefusalCode.TLS_REQUIRED, "run p2ptrain join with a ticket there"
        if dialled:
            code = RefusalCode.NOT_ENCRYPTED
            remedy = "check the port; if that cluster is here and not encrypted, use its address without a ticket"
        return Refused(code, f"{address} does not speak TLS: {error}", remedy=remedy)
    if isinstance(error, TimeoutError) and not dialled:
        return Refused(RefusalCode.TOO_SLOW, f"{address}: {error}")
    remedy = "check that p2ptrain listens there and that its cluster is encrypted" if dialled else ""
    return ConnectionLost(f"{address}: {error}", remedy=remedy)


def _encode_plain(refuse: Refuse) -> bytes:
    return encode_control(Refuse.KIND, encode(refuse), generation=0, stream=0)
