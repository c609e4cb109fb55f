"""The encrypted network: TLS 1.3 under a run's own CA, over any other ``Network``."""

from __future__ import annotations

import asyncio
import ssl

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, Refused, Unreachable
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.codec import encode
from wire.credentials import Credentials
from wire.frame import encode_control
from wire.half_open import HalfOpen
from wire.messages import Refuse
from wire.tls_problems import tls_problem
from wire.tls_transport import READ_BYTES, NotTlsError, TlsTransport
from wire.transport_base import Address, format_address

HANDSHAKE_TIMEOUT_S = 5.0
"""From a caller's arrival to the end of TLS's handshake: that of ``wire.handshake`` follows, with a time of its own."""
BUSY_ALERT = b"\x15\x03\x03\x00\x02\x02\x50"
"""The record of a fatal internal_error alert (RFC 8446, section 6): what a caller understands before TLS has begun."""


class TlsDialler:
    """Dials with TLS: the half of ``TlsNetwork`` that a newcomer without a certificate may use.

    Args:
        context: of ``wire.credentials``; whom it trusts.
    """

    def __init__(self, network: Network, context: ssl.SSLContext) -> None:
        self._network = network
        self._client_context = context
        self._shared = memoryview(bytearray(READ_BYTES))

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial and shake hands, all within ``timeout_s``. That the other side takes our certificate shows later only:
        TLS 1.3 lets the caller speak first, so a refusal is the first thing that is read.

        Raises:
            Unreachable: nothing, or no TLS, answers in time.
            Refused: its certificate is not of the run's CA, or expired; or it does not speak TLS; or it says no.
            ConnectionLost, ProtocolError: the handshake broke.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        shaking = _Dialled(self._client_context, factory, self._shared)
        await self._network.connect(host, port, lambda: shaking, timeout_s=timeout_s)
        who = format_address(host, port)
        try:
            async with asyncio.timeout_at(deadline):
                await shaking.settled
        except TimeoutError:
            shaking.abort()
            text = f"cannot reach {who}: it did not answer in TLS within {timeout_s:g} s"
            raise Unreachable(text, remedy="is a p2ptrain listening on this port?") from None
        except OSError as error:
            await shaking.gone.wait()  # within LINGER_S
            raise dialling_problem(error, who) from error
        except BaseException:
            shaking.abort()
            raise


class TlsNetwork(TlsDialler):
    """A ``Network`` on which every byte is encrypted and every peer has a certificate of the run's CA.

    Args:
        network: what carries the encrypted bytes.
        credentials: this peer's; saved, for OpenSSL reads the key from its file.
        require_client_certificate: whether a caller without a certificate is turned away by TLS itself. A seed lets it
            through, for it may want to enrol: ``wire.handshake`` lets it do nothing else.
        half_open: bounds of callers whose TLS handshake has not ended; the default ones where it is None.
    """

    def __init__(
        self,
        network: Network,
        credentials: Credentials,
        *,
        require_client_certificate: bool,
        half_open: HalfOpen | None = None,
    ) -> None:
        super().__init__(network, credentials.client_context())
        self._require_client_certificate = require_client_certificate
        self._half_open = half_open or HalfOpen()
        self.use(credentials)

    def use(self, credentials: Credentials) -> None:
        """Present ``credentials`` from the next connection on; established ones live on. Raises ``StorageError``."""
        server_context = credentials.server_context(require_client_certificate=self._require_client_certificate)
        self._client_context, self._server_context = credentials.client_context(), server_context

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept on ``host:port``; ``factory`` makes a protocol only for who shook hands. Raises ``UserError``."""
        strangers: set[_Accepted] = set()
        listener = await self._network.listen(
            host,
            port,
            lambda: _Accepted(self._server_context, factory, self._shared, self._half_open, strangers, on_problem),
        )
        return _TlsListener(listener, strangers)


class _TlsListener:
    def __init__(self, listener: Listener, strangers: set[_Accepted]) -> None:
        self._listener = listener
        self._strangers = strangers

    @property
    def address(self) -> Address:
        return self._listener.address

    async def close(self) -> None:
        await self._listener.close()
        for stranger in list(self._strangers):
            stranger.abort()


class _Dialled(TlsTransport):
    """Attributes: ``settled`` ends with the handshake, ``gone`` with the connection."""

    def __init__(self, context: ssl.SSLContext, factory: ProtocolFactory, shared: memoryview) -> None:
        super().__init__(context, factory, shared, server_side=False)
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self.gone = asyncio.Event()

    def _arrived(self) -> None:
        self.begin()

    def _opened(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

    def _failed(self, error: Exception) -> None:
        if not self.settled.done():
            self.settled.set_exception(error)

    def _gone(self) -> None:
        self.gone.set()


class _Accepted(TlsTransport):
    """A stranger at the door: bounded in number and time until it shook hands."""

    def __init__(
        self,
        context: ssl.SSLContext,
        factory: ProtocolFactory,
        shared: memoryview,
        half_open: HalfOpen,
        strangers: set[_Accepted],
        on_problem: OnProblem | None,
    ) -> None:
        super().__init__(context, factory, shared, server_side=True)
        self._half_open = half_open
        self._strangers = strangers
        self._on_problem = on_problem
        self._remote: Address = ("?", 0)
        self._deadline: asyncio.TimerHandle | None = None

    def _arrived(self) -> None:
        name = self._below.get_extra_info("peername")
        if name is not None:  # it was reset before anybody looked
            self._remote = (str(name[0]), int(name[1]))
        if busy := self._half_open.enter(self._remote[0]):
            self._tell(Refused("busy", busy, remedy="try again in a few seconds"))
            self._on_problem = None  # once is enough
            self._below.write(BUSY_ALERT)
            self._below.close()
            return
        self._strangers.add(self)
        self._deadline = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._too_slow)

    def _opened(self) -> None:
        self._leave()

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, ConnectionAbortedError):  # which is our own doing
            self._tell(accepting_problem(error, format_address(*self._remote)))

    def _gone(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._strangers.discard(self)
            self._half_open.leave(self._remote[0])

    def _not_tls(self, start: bytes) -> None:
        refuse = Refuse(
            "tls-required", "this cluster is encrypted", "join with a ticket: p2ptrain ticket new, at the seed"
        )
        self.fail(NotTlsError(f"it began with {start[:4]!r}"), _plain(refuse))

    def _too_slow(self) -> None:
        error = TimeoutError(f"it did not shake hands in TLS within {HANDSHAKE_TIMEOUT_S:g} s")
        quiet = not self._heard
        self.fail(error, _plain(Refuse("too-slow", str(error), "try again")) if quiet else BUSY_ALERT)

    def _tell(self, problem: P2PTrainError) -> None:
        if self._on_problem is not None:
            self._on_problem(problem, self._remote)


def dialling_problem(error: OSError, who: str) -> P2PTrainError:
    """Why a TLS handshake with ``who``, who was dialled, failed."""
    if isinstance(error, ssl.SSLError):
        return tls_problem(error, who)
    if isinstance(error, NotTlsError):
        remedy = "check the port; or, if that cluster is on this machine and plain, use its address without a ticket"
        return Refused("not-encrypted", f"{who} does not speak TLS: {error}", remedy=remedy)
    return ConnectionLost(f"{who}: {error}", remedy="is it p2ptrain that listens there, and is its cluster encrypted?")


def accepting_problem(error: Exception, who: str) -> P2PTrainError:
    """Why a TLS handshake with ``who``, who called, failed."""
    if isinstance(error, ssl.SSLError):
        return tls_problem(error, who)
    if isinstance(error, NotTlsError):
        return Refused("tls-required", f"{who} does not speak TLS: {error}", remedy="let it join with a ticket")
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"{who}: {error}")
    return ConnectionLost(f"{who}: {error}")


def _plain(refuse: Refuse) -> bytes:
    return encode_control(Refuse.KIND, encode(refuse), generation=0, stream=0)
