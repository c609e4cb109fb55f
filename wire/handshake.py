"""Hello, then Welcome or Refuse: decides which peers may connect, from a ``Hello`` of at most 4 KiB within 5 seconds.

::

    dial                                        serve
      Hello ───────────────────────────────────▶  judge_hello: refuses another version without asking the owner
                                                  decide(hello): Welcome or Refuse, by the owner
      judge_answer  ◀────────── Welcome | Refuse
      large frames allowed                        large frames allowed, serve(connection, hello) runs

The judges are pure; tests pair them without sockets. ``dial`` and ``serve`` are the shells around them.

Over TLS the caller's certificate decides what its ``Hello`` may claim: the peer id must be the certificate's, and its
roles must permit the purpose (``PERMITTED``). Only ``enrol`` needs no certificate. An enrolling caller stays within the
limits of the handshake (4 KiB, 5 s, ``wire.transport.HalfOpen``) until it has a certificate and connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from p2ptrain import __version__
from p2ptrain.core.background import Background
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    PeerError,
    ProtocolError,
    Refused,
    ResourceError,
    UserError,
)
from p2ptrain.core.texts import printable
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.address import MEMBER_PORT, format_address, is_loopback
from wire.circuits import peer_host, peer_of_host
from wire.connection import Connection, last_word
from wire.messages import PROTOCOL_VERSION, Hello, Message, RefusalCode, Refuse, Welcome
from wire.transport import HalfOpen, no_answer

if TYPE_CHECKING:  # an unencrypted cluster need not load cryptography
    from wire.credentials import PeerIdentity

HANDSHAKE_TIMEOUT_S = 5.0
DECISION_TIMEOUT_S = 15.0
"""For the owner's decision about a ``Hello``: a seed dials the caller back, which may be slow."""
CLOSE_TIMEOUT_S = 1.0
PADDING = "." * 2000
"""Of a ``Hello``: an Ethernet packet carries 1460 bytes, and a frame of the handshake has at most 4 KiB."""
SOFTWARE = f"p2ptrain {__version__}"
ENROL = "enrol"
"""Purpose of a caller that has no certificate yet."""
PERMITTED = MappingProxyType(
    {
        "peer": frozenset({"worker", "verifier", "drafter"}),
        "ring": frozenset({"worker"}),
        "heal": frozenset({"worker"}),
        "files": frozenset({"worker"}),
        "input": frozenset({"worker"}),
        "operator": frozenset({"operator"}),
        "probe": frozenset({"seed", "worker", "verifier", "drafter", "operator"}),
        "chain": frozenset({"operator", "verifier"}),
        "stage": frozenset({"worker"}),
        "model": frozenset({"worker", "operator", "verifier"}),
        "give": frozenset({"operator", "verifier"}),
        "draft": frozenset({"verifier"}),
        "generate": frozenset({"operator"}),
        "http": frozenset({"seed"}),
    }
)
"""Purpose → roles that permit it. The certificate must name one of them. So must the ``Hello`` if it names any
roles: a peer acts only in the roles that it names. Over TLS any other purpose but ``enrol`` is refused."""

_ANOTHER_TICKET = "ask for a ticket of the right role: p2ptrain ticket new --role ROLE, at the seed"

Decide = Callable[[Hello, Connection], Awaitable[Welcome | Refuse]]
Serve = Callable[[Connection, Hello], Awaitable[None]]


def local_hello(*, peer_id: str, name: str, roles: Sequence[str], purpose: str, **more: Any) -> Hello:
    return Hello(PROTOCOL_VERSION, SOFTWARE, peer_id, name, list(roles), purpose, **more)


def local_welcome(*, peer_id: str, name: str, wall: float, **more: Any) -> Welcome:
    return Welcome(PROTOCOL_VERSION, SOFTWARE, peer_id, name, wall, **more)


# ------------------------------------------------------------------------------------------------------ pure decisions


def judge_hello(hello: Hello) -> Refuse | None:
    """Refuse a caller of another protocol version; None: the owner decides."""
    if hello.version == PROTOCOL_VERSION:
        return None
    return _version_refusal((hello.version, hello.software), (PROTOCOL_VERSION, SOFTWARE))


def judge_answer(answer: Message, address: str) -> Welcome:
    """Return the answer to a ``Hello`` if it is an acceptable ``Welcome``.

    Raises:
        Refused: the answer is a ``Refuse``, or a ``Welcome`` of another protocol version.
        ProtocolError: it does not answer a ``Hello``.
    """
    if isinstance(answer, Welcome) and answer.version != PROTOCOL_VERSION:
        answer = _version_refusal((PROTOCOL_VERSION, SOFTWARE), (answer.version, answer.software))
    if isinstance(answer, Refuse):
        text = f"{address} refuses: {answer.message}"
        raise Refused(answer.code, text, remedy=answer.remedy)
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"{address} answered a Hello with {type(answer).__name__}")
    return answer


def judge_caller(hello: Hello, identity: PeerIdentity | None) -> Refuse | None:
    """Refuse what a caller's certificate over TLS (None: it has none) does not allow; None: the owner decides."""
    if hello.purpose == ENROL:
        return None
    if identity is None:
        text = "the caller presented no certificate, but this cluster is encrypted"
        return Refuse(RefusalCode.NOT_PERMITTED, text, "join with a ticket: p2ptrain ticket new, at the seed")
    if hello.peer_id != identity.peer_id:
        text = f"the caller's peer id is {hello.peer_id[:64]!r}, but its certificate names {identity.peer_id!r}"
        return Refuse(RefusalCode.IDENTITY, text, "give each worker its own --state, or join again with a ticket")
    permitted, text = PERMITTED.get(hello.purpose, frozenset()), ""
    if not identity.roles.issuperset(hello.roles):
        claim = ", ".join(hello.roles)[:64]
        text = f"the caller claims {claim!r}, but its certificate is for {_named(identity.roles)}"
    elif identity.roles.isdisjoint(permitted):
        text = f"the caller's certificate is for {_named(identity.roles)}, which does not permit {hello.purpose[:40]!r}"
    elif hello.roles and permitted.isdisjoint(hello.roles):
        claim = _named(frozenset(hello.roles))[:128]
        text = f"{hello.purpose!r} is for {_named(permitted)}, but the caller claims {claim}"
    return Refuse(RefusalCode.NOT_PERMITTED, text, _ANOTHER_TICKET) if text else None


def _named(roles: frozenset[str]) -> str:
    return ", ".join(sorted(roles)) or "nothing"


def judge_answerer(identity: PeerIdentity | None, *, peer_id: str, role: str) -> Refuse | None:
    """Return the ``Refuse`` for a peer that answered over TLS but is not the one dialled; None if it is.

    ``identity`` is None without a verified certificate. An empty ``peer_id`` or ``role`` accepts any.
    """
    if not peer_id and not role:
        return None
    found = f"peer {identity.peer_id!r} ({', '.join(sorted(identity.roles))})" if identity else "no known peer"
    if identity is not None and peer_id in ("", identity.peer_id) and (not role or role in identity.roles):
        return None
    wanted = " ".join(filter(None, (f"peer {peer_id!r}" if peer_id else "", f"a {role}" if role else "")))
    text = f"expected {wanted}, but the certificate names {found}"
    return Refuse(RefusalCode.IDENTITY, text, "check the address: another peer may use it now")


def _version_refusal(caller: tuple[int, str], answerer: tuple[int, str]) -> Refuse:
    older = "calling" if caller < answerer else "answering"
    return Refuse(
        RefusalCode.VERSION,
        f"the calling side speaks protocol {caller[0]} ({caller[1][:64]}), "
        f"the answering side speaks protocol {answerer[0]} ({answerer[1][:64]})",
        remedy=f"upgrade p2ptrain on the {older} side to a release that speaks protocol {max(caller[0], answerer[0])}",
    )


# -------------------------------------------------------------------------------------------------------------- shells


class Dialler(Protocol):
    """The half of a ``Network`` that dials."""

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None: ...


CIRCUIT_AFTER_S = 1.5
"""A peer that was not reached so long after it was dialled is also dialled over a circuit."""
_WRONG_MACHINE = frozenset(
    {RefusalCode.IDENTITY, RefusalCode.CERTIFICATE_UNTRUSTED, RefusalCode.TLS_REQUIRED, RefusalCode.NOT_ENCRYPTED}
)
"""Refusals of, or by, a machine that is not the peer that was dialled: in this network its address is another's."""


async def dial(
    network: Dialler,
    host: str,
    port: int,
    hello: Hello,
    *,
    timeout_s: float,
    expect_peer: str = "",
    expect_role: str = "",
    direct_only: bool = False,
) -> tuple[Connection, Welcome]:
    """Connect, send ``hello``, and wait for the ``Welcome``. Any failure, also cancellation, closes the connection.

    If the peer is known by its id, and does not answer at its address soon, it is dialled over a circuit, too: perhaps
    the seed can reach it there and this peer cannot. The first connection counts.

    Args:
        timeout_s: for everything, from the first packet to the answer; ``HANDSHAKE_TIMEOUT_S`` of it to connect.
        expect_peer, expect_role: what the peer's certificate must name, over TLS. If it does not, ``hello`` is not
            sent, the peer gets the reason, and ``Refused`` ("wrong-identity") is raised. A plain connection has no
            certificate: it is on the loopback, and the machine is trusted. Its ``Welcome`` must name ``expect_peer``.
        direct_only: the peer is not dialled over a circuit as well.

    Raises:
        Unreachable, Refused, ProtocolError, DeadlineExceeded, ConnectionLost: those of the address.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    at = partial(_dial_at, network, port=port, hello=hello, expect_peer=expect_peer, expect_role=expect_role)
    if not expect_peer or direct_only or peer_of_host(host):
        return await at(host, timeout_s=timeout_s)
    direct = asyncio.create_task(at(host, timeout_s=timeout_s), name="dial")
    tasks = [direct]
    try:
        await asyncio.wait(tasks, timeout=min(CIRCUIT_AFTER_S, timeout_s / 2))
        if _may_be_elsewhere(direct):
            over = at(peer_host(expect_peer), timeout_s=max(deadline - now(), 0.0))
            tasks.append(asyncio.create_task(over, name="dial over a circuit"))
        while not (reached := [task for task in tasks if task.done() and task.exception() is None]):
            waiting = [task for task in tasks if not task.done()]
            if not waiting or not _may_be_elsewhere(direct):
                break
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        chosen = reached[0] if reached else direct
        tasks.remove(chosen)
        return chosen.result()
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                result[0].abort()


def _may_be_elsewhere(dialling: asyncio.Task[tuple[Connection, Welcome]]) -> bool:
    """Whether the peer may live although it has not answered at its address."""
    if not dialling.done():
        return True
    problem = dialling.exception()
    wrong_machine = isinstance(problem, Refused) and problem.code in _WRONG_MACHINE
    return wrong_machine or isinstance(problem, NetworkError | ProtocolError)


async def _dial_at(
    network: Dialler,
    host: str,
    port: int,
    hello: Hello,
    *,
    timeout_s: float,
    expect_peer: str,
    expect_role: str,
) -> tuple[Connection, Welcome]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    connection = Connection()
    try:
        await network.connect(host, port, lambda: connection, timeout_s=min(timeout_s, HANDSHAKE_TIMEOUT_S))
    except BaseException:
        connection.abort()  # do not wait: an abandoned transport may never report its end
        raise
    try:
        if connection.ends.encrypted:
            await _check_answerer(connection, peer_id=expect_peer, role=expect_role)
        with suppress(ConnectionLost):  # a frame sent before closing, such as a Refuse, explains more
            connection.send(replace(hello, padding=PADDING))
        try:
            answer = await connection.receive(timeout_s=max(0.0, deadline - loop.time()))
        except DeadlineExceeded:
            raise no_answer(host, port, timeout_s) from None
        welcome = judge_answer(answer.message, format_address(host, port))
        if connection.ends.identity is not None:  # the Welcome must name the certificate's peer
            await _check_answerer(connection, peer_id=welcome.peer_id, role="")
        elif expect_peer not in ("", welcome.peer_id):
            text = f"another peer, {printable(welcome.name, 64)}, answers at {format_address(host, port)}"
            raise Refused(RefusalCode.IDENTITY, text, remedy="check the address: another peer may use it now")
        connection.ends.name_peer(welcome.name)
        if hello.purpose != ENROL:
            connection.allow_large()
    except BaseException:
        connection.abort()
        await connection.close()
        raise
    return connection, welcome


async def _check_answerer(connection: Connection, *, peer_id: str, role: str) -> None:
    refuse = judge_answerer(connection.ends.identity, peer_id=peer_id, role=role)
    if refuse is None:
        return
    host, port = connection.ends.remote
    with suppress(ConnectionLost):
        connection.send(refuse)
    await connection.close(timeout_s=CLOSE_TIMEOUT_S)
    raise Refused(refuse.code, f"not connected to {format_address(host, port)}: {refuse.message}", remedy=refuse.remedy)


REFUSALS_S = 60.0


class Refusals:
    """Tells people of refused callers in at most one line a minute. An instance is an ``OnProblem``.

    The first refusal is told at once; those of the next minute are counted. Problems of the network are not told.

    Args:
        tell: gets the line. alarm: gets problems of this machine, each at once; default: ``tell``.
    """

    def __init__(self, tell: Callable[[str], None], alarm: Callable[[str], None] | None = None) -> None:
        self._tell, self._alarm = tell, alarm or tell
        self._count = 0  # refusals that are not told yet
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, problem: P2PTrainError, address: tuple[str, int]) -> None:
        if isinstance(problem, ResourceError):
            self._alarm(problem.with_remedy)
        expected = isinstance(problem, Refused) and problem.code == RefusalCode.LOOPBACK_ONLY  # it comes again
        if not isinstance(problem, PeerError) or expected:
            return
        caller, text = format_address(*address), problem.message
        self._last = text if caller in text else f"{caller}: {text}"
        if self._timer is None:
            self._tell(f"refused a caller: {self._last}")
            self._start_timer()
        else:
            self._count += 1

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(REFUSALS_S, self._sum_up)

    def _sum_up(self) -> None:
        self._timer = None
        if self._count:
            callers = "caller" if self._count == 1 else "callers"
            self._tell(f"refused {self._count} more {callers} in a minute; last {self._last}")
            self._count = 0
            self._start_timer()


class PeerServer:
    """Accepts connections, does the handshake, and runs the owner's ``serve`` for each. Made by ``serve()``."""

    def __init__(self, *, decide: Decide, serve: Serve, on_problem: OnProblem) -> None:
        self._decide = decide
        self._serve = serve
        self._half_open = HalfOpen()
        self._on_problem = on_problem
        self._handlers, self._served = Background(), set[Connection]()
        self._closing = False
        self._listener: Listener | None = None
        self.address = ("", 0)  # the actual host and port

    async def close(self) -> None:
        """Stop listening, cancel the handlers, close their connections, in about a second. May be called twice."""
        self._closing = True
        if self._listener is not None:
            await self._listener.close()
        served = list(self._served)
        self._handlers.cancel()
        await self._handlers.settle(timeout_s=CLOSE_TIMEOUT_S)
        for connection in served:  # of handlers that had not begun or do not end
            connection.abort()

    def _accept(self, connection: Connection) -> None:
        if self._closing:
            connection.abort()
            return
        self._served.add(connection)
        handler = self._handlers.start(self._handle(connection), "wire.handshake.serve")
        handler.add_done_callback(lambda _: self._served.discard(connection))

    async def _handle(self, connection: Connection) -> None:
        try:
            admission = await self._admit(connection)
            if admission is not None:
                hello, welcome = admission
                connection.ends.name_peer(hello.name)
                connection.allow_large()  # before the answer: the caller may send as soon as it has it
                connection.send(welcome)
                await self._serve(connection, hello)
        except P2PTrainError as error:
            self._on_problem(error, connection.ends.remote)
        finally:
            await connection.close(timeout_s=CLOSE_TIMEOUT_S)

    async def _admit(self, connection: Connection) -> tuple[Hello, Welcome] | None:
        host = connection.ends.remote[0]
        if busy := self._half_open.enter(host):
            self._refuse(connection, Refuse(RefusalCode.BUSY, busy, "try again in a few seconds"))
            return None
        try:
            verdict = await self._judge(connection)
            if isinstance(verdict, Refuse):
                self._refuse(connection, verdict)
                return None
            hello, welcome = verdict
            if hello.purpose != ENROL:
                return verdict
            connection.send(welcome)
            await self._enrol(connection, hello)
            return None
        finally:
            self._half_open.leave(host)

    def _refuse(self, connection: Connection, refuse: Refuse) -> None:
        self._on_problem(Refused(refuse.code, refuse.message, remedy=refuse.remedy), connection.ends.remote)
        connection.send(refuse)

    async def _enrol(self, connection: Connection, hello: Hello) -> None:
        """Serve a caller without a certificate, in small frames and within the handshake's time."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await self._serve(connection, hello)
        except TimeoutError:
            text = f"enrolment did not end within {HANDSHAKE_TIMEOUT_S:g} s"
            self._refuse(connection, Refuse(RefusalCode.TOO_SLOW, text, "try again"))

    async def _judge(self, connection: Connection) -> tuple[Hello, Welcome] | Refuse:
        try:
            hello = await connection.expect(Hello, timeout_s=HANDSHAKE_TIMEOUT_S)
            if refuse := judge_hello(hello) or (
                judge_caller(hello, connection.ends.identity) if connection.ends.encrypted else None
            ):
                return refuse
            async with asyncio.timeout(DECISION_TIMEOUT_S):
                answer = await self._decide(hello, connection)
        except DeadlineExceeded:
            silent = no_answer(*connection.ends.remote, HANDSHAKE_TIMEOUT_S, did="connected, and said nothing")
            return last_word(silent)
        except TimeoutError:
            return Refuse(RefusalCode.TOO_SLOW, f"no decision within {DECISION_TIMEOUT_S:g} s", "try again")
        except Refused as error:
            return last_word(error)
        return answer if isinstance(answer, Refuse) else (hello, answer)


async def serve(
    network: Network,
    host: str,
    port: int | None,
    *,
    decide: Decide,
    serve: Serve,
    on_problem: OnProblem,
) -> PeerServer:
    """Listen on ``host:port`` and serve each caller that ``decide`` accepts. Raises ``UserError`` if it cannot bind.

    Args:
        port: None: ``MEMBER_PORT``, or any free one if that is taken or ``host`` is the loopback.
        decide: answers a ``Hello`` of this protocol version in time. Raising ``Refused`` equals returning a ``Refuse``.
        serve: runs as a task per connection. When it returns or raises a ``P2PTrainError``, the connection is closed.
        on_problem: called with every refusal and every error of a handshake or of ``serve``, and the peer's address.
    """
    server = PeerServer(decide=decide, serve=serve, on_problem=on_problem)
    listen = partial(network.listen, host, factory=lambda: Connection(server._accept), on_problem=on_problem)
    preferred = (0 if is_loopback(host) else MEMBER_PORT) if port is None else port
    try:
        server._listener = await listen(preferred)
    except UserError:
        if port is not None:
            raise
        server._listener = await listen(0)
    server.address = server._listener.address
    return server
