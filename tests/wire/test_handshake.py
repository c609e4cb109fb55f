"""Hello, Welcome, Refuse: the judges paired without sockets, then dial and serve on every stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    ProtocolError,
    Refused,
    Unreachable,
    UserError,
)
from p2ptrain.core.world import Network
from tests.wire.doubles import Recorder, in_memory, on_every_stage
from wire.address import MEMBER_PORT
from wire.codec import MESSAGE_TYPES, decode_untrusted, encode
from wire.connection import Connection
from wire.frame import ControlFrame, FrameDecoder, encode_control
from wire.handshake import (
    HANDSHAKE_TIMEOUT_S,
    PADDING,
    PeerServer,
    dial,
    judge_answer,
    judge_hello,
    local_hello,
    local_welcome,
    serve,
)
from wire.messages import PROTOCOL_VERSION, EventNotice, Hello, Message, RefusalCode, Refuse, Welcome

HOST = "127.0.0.1"
HELLO = local_hello(peer_id="a1", name="anna", roles=["worker"], purpose="peer", capabilities={"cores": 8})
WELCOME = local_welcome(peer_id="b2", name="bert", wall=1.0, cluster_id="c3", heartbeat_s=5.0, death_s=15.0)


def over_the_wire(message: Message) -> Message:
    """What a core on the other side makes of ``message`` before the handshake ended, byte by byte."""
    decoder = FrameDecoder(frozenset(MESSAGE_TYPES))
    event = None
    for byte in encode_control(message.KIND, encode(message), generation=0, stream=0):
        decoder.next_buffer()[:1] = bytes([byte])
        event = decoder.received(1)
    assert isinstance(event, ControlFrame)
    return decode_untrusted(event.kind, event.body)


def converse(hello: Hello, decide: Callable[[Hello], Welcome | Refuse]) -> Welcome:
    arrived = over_the_wire(hello)
    assert isinstance(arrived, Hello)
    return judge_answer(over_the_wire(judge_hello(arrived) or decide(arrived)), "seed:7337")


# ------------------------------------------------------------------------------------------------------- the two judges


@pytest.mark.parametrize(("version", "older"), [(PROTOCOL_VERSION - 1, "answering"), (PROTOCOL_VERSION + 1, "calling")])
def test_another_answerers_version_is_refused_by_the_caller(version: int, older: str):
    with pytest.raises(Refused) as caught:
        converse(HELLO, lambda hello: replace(WELCOME, version=version, software="p2ptrain x.y"))
    check_version_refusal(caught.value, f"answering side speaks protocol {version} (p2ptrain x.y)", older)
    assert f"calling side speaks protocol {PROTOCOL_VERSION}" in caught.value.message


def check_version_refusal(refused: Refused, says: str, older: str) -> None:
    assert refused.code == "version-mismatch"
    assert says in refused.message
    newest = max(PROTOCOL_VERSION, int(says.split("protocol ")[1].split()[0]))
    assert refused.remedy == f"upgrade p2ptrain on the {older} side to a release that speaks protocol {newest}"


# --------------------------------------------------------------------------------------------------------------- shells


class Owner:
    """The owner of a server: lets in, remembers, and serves until told to stop."""

    def __init__(self) -> None:
        self.answer: Welcome | Refuse | P2PTrainError = WELCOME
        self.hellos: list[Hello] = []
        self.problems: list[P2PTrainError] = []
        self.problem = asyncio.Event()
        self.serving: list[Connection] = []
        self.finish = asyncio.Event()
        self.failure: Exception | None = None

    async def listen(self, network: Network, **options: Any) -> PeerServer:
        return await serve(
            network, HOST, 0, decide=self.decide, serve=self.serve, on_problem=self.on_problem, **options
        )

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        self.hellos.append(hello)
        if isinstance(self.answer, P2PTrainError):
            raise self.answer
        return self.answer

    async def serve(self, connection: Connection, hello: Hello) -> None:
        self.serving.append(connection)
        connection.send(EventNotice("info", "welcome", "x" * 30_000))  # at once, and longer than a handshake frame
        await self.finish.wait()
        if self.failure is not None:
            raise self.failure

    def on_problem(self, error: P2PTrainError, remote: tuple[str, int]) -> None:
        assert remote[0] == HOST
        self.problems.append(error)
        self.problem.set()


async def knock(network: Network, server: PeerServer, hello: Hello = HELLO) -> tuple[Connection, Welcome]:
    return await dial(network, *server.address, hello, timeout_s=5)


async def refusal(network: Network, server: PeerServer, hello: Hello = HELLO) -> Refused:
    with pytest.raises(Refused) as caught:
        await knock(network, server, hello)
    return caught.value


async def raw(network: Network, server: PeerServer) -> Connection:
    """A connection that said nothing yet."""
    connection = Connection()
    await network.connect(*server.address, lambda: connection, timeout_s=5)
    return connection


@on_every_stage
async def test_let_in_and_served(network: Network) -> None:
    owner = Owner()
    server = await owner.listen(network)
    connection, welcome = await knock(network, server)
    assert welcome == WELCOME
    assert owner.hellos == [replace(HELLO, padding=PADDING)]
    assert len((await connection.expect(EventNotice, timeout_s=5)).text) == 30_000
    connection.send(EventNotice("info", "thanks", "x" * 30_000))
    assert (await owner.serving[0].expect(EventNotice, timeout_s=5)).kind == "thanks"
    owner.finish.set()
    await connection.closed.wait()
    assert isinstance(connection.close_cause, ConnectionLost)
    await owner.serving[0].closed.wait()
    assert owner.serving[0].close_cause is None
    await server.close()
    assert not owner.problems


@in_memory
async def test_the_name_of_a_stranger_is_cut_and_printable(network: Network) -> None:
    owner = Owner()
    owner.answer = replace(WELCOME, name="\x1b[2J" + "x" * 500)
    server = await owner.listen(network)
    with pytest.raises(Refused, match=r"another peer, \?\[2Jx{59}…, answers"):
        await dial(network, *server.address, HELLO, timeout_s=5, expect_peer="another")
    await server.close()


@pytest.mark.parametrize("raised", [False, True])
@on_every_stage
async def test_refused_by_the_owner(network: Network, raised: bool) -> None:
    owner = Owner()
    say = ("corpus", "another corpus", "use the same text")
    owner.answer = Refused(say[0], say[1], remedy=say[2]) if raised else Refuse(*say)
    server = await owner.listen(network)
    error = await refusal(network, server)
    assert (error.code, error.remedy) == ("corpus", "use the same text")
    assert error.message == f"{HOST}:{server.address[1]} refuses: another corpus"
    assert [type(problem) for problem in owner.problems] == [Refused]
    assert not owner.serving
    await server.close()


@on_every_stage
async def test_another_version_is_refused_before_the_owner_is_asked(network: Network) -> None:
    owner = Owner()
    server = await owner.listen(network)
    error = await refusal(network, server, replace(HELLO, version=PROTOCOL_VERSION + 1))
    assert error.code == RefusalCode.VERSION
    assert not owner.hellos
    await server.close()


@on_every_stage
async def test_an_error_of_serve_closes_its_connection_only(network: Network) -> None:
    owner = Owner()
    owner.failure = DeadlineExceeded("enough")
    owner.finish.set()
    server = await owner.listen(network)
    for _ in range(2):
        connection, _ = await knock(network, server)
        await connection.closed.wait()
    await server.close()
    assert owner.problems == [owner.failure] * 2


@in_memory
async def test_a_bug_in_serve_is_reported_to_the_loop_and_closes_its_connection_only(network: Network) -> None:
    reported: asyncio.Queue[BaseException] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.put_nowait(context["exception"]))
    owner = Owner()
    owner.failure = KeyError("bug")
    owner.finish.set()
    server = await owner.listen(network)
    for _ in range(2):
        connection, _ = await knock(network, server)
        await connection.closed.wait()
        assert await reported.get() is owner.failure
    await server.close()


@in_memory
async def test_a_silent_caller_is_refused_after_five_seconds(network: Network) -> None:
    loop, owner = asyncio.get_running_loop(), Owner()
    server = await owner.listen(network)
    began = loop.time()
    connection = await raw(network, server)
    answer = await connection.expect(Refuse, timeout_s=60)
    assert answer.code == RefusalCode.TOO_SLOW
    await connection.closed.wait()
    assert loop.time() - began == pytest.approx(HANDSHAKE_TIMEOUT_S)
    await server.close()


@in_memory
async def test_a_network_that_loses_large_packets_is_said(network: Network) -> None:
    kept: list[Recorder] = []

    def lossy() -> Recorder:  # accepts, and answers nothing that is longer than a packet
        kept.append(Recorder())
        return kept[-1]

    listener = await network.listen(HOST, 0, lossy)
    with pytest.raises(DeadlineExceeded, match="loses large packets") as caught:
        await dial(network, *listener.address, HELLO, timeout_s=5)
    assert "MTU" in caught.value.remedy
    assert len(kept[0].received) > 1460, "an Ethernet packet has room for so many bytes"
    await listener.close()


@in_memory
async def test_a_member_listens_on_the_usual_port_or_on_any_free_one(network: Network) -> None:
    owner = Owner()
    servers = [
        await serve(network, host, None, decide=owner.decide, serve=owner.serve, on_problem=owner.on_problem)
        for host in ("0.0.0.0", "0.0.0.0", HOST)
    ]
    first, second, alone = (server.address[1] for server in servers)
    assert first == MEMBER_PORT
    assert {second, alone}.isdisjoint({MEMBER_PORT, 0}), "on the loopback nobody needs the usual port"
    with pytest.raises(UserError, match="in use"):
        await serve(network, "0.0.0.0", first, decide=owner.decide, serve=owner.serve, on_problem=owner.on_problem)
    for server in servers:
        await server.close()


@in_memory
async def test_an_owner_that_does_not_decide_in_time(network: Network) -> None:
    owner = Owner()

    async def hang(hello: Hello, connection: Connection) -> Welcome | Refuse:
        await asyncio.sleep(60)
        return WELCOME

    server = await serve(network, HOST, 0, decide=hang, serve=owner.serve, on_problem=owner.on_problem)
    connection = await raw(network, server)
    connection.send(HELLO)
    answer = await connection.expect(Refuse, timeout_s=60)
    assert (answer.code, answer.message) == (RefusalCode.TOO_SLOW, "no decision within 15 s")
    await connection.close()
    await server.close()


@in_memory
async def test_half_open_connections_are_bounded(network: Network) -> None:
    owner = Owner()
    server = await owner.listen(network, max_half_open=2)
    silent = [await raw(network, server) for _ in range(2)]
    assert (await refusal(network, server)).code == RefusalCode.BUSY
    silent[0].abort()
    await asyncio.sleep(0.1)  # virtual: the server notices
    connection, _ = await knock(network, server)
    other, _ = await knock(network, server)  # who was let in is not half open any more
    for each in (connection, other, *silent):
        await each.close()
    await server.close()


@on_every_stage
async def test_closing_the_server_ends_everything_within_a_second(network: Network) -> None:
    owner = Owner()
    server = await owner.listen(network)
    address = server.address
    served, _ = await knock(network, server)
    silent = await raw(network, server)
    await server.close()
    for connection in (served, silent):
        await connection.closed.wait()
        assert isinstance(connection.close_cause, ConnectionLost)
    with pytest.raises(Unreachable):
        await dial(network, *address, HELLO, timeout_s=1)
    await server.close()


# --------------------------------------------------------------------------------------------- what a dialler may meet


async def impostor(network: Network, greet: Callable[[Connection], object]) -> tuple[Any, list[Connection]]:
    """A listener that does as ``greet`` says with each connection, and shakes no hands."""
    accepted: list[Connection] = []

    def opened(connection: Connection) -> None:
        accepted.append(connection)
        greet(connection)

    return await network.listen(HOST, 0, lambda: Connection(opened)), accepted


async def ended(connection: Connection) -> None:
    """The dialler said its Hello and perhaps why it goes, and left nothing open."""
    said = []
    with suppress(ConnectionLost, Refused):
        while True:
            said.append(type((await connection.receive(timeout_s=5)).message))
    assert said in ([], [Hello], [Refuse], [Hello, Refuse])
    await connection.closed.wait()


@pytest.mark.parametrize(
    ("greet", "error", "says"),
    [
        (lambda connection: None, DeadlineExceeded, "did not answer"),
        (lambda connection: connection.abort(), ConnectionLost, None),
        (lambda connection: connection.send(HELLO), ProtocolError, "answered a Hello with Hello"),
        (lambda connection: connection._transport.write(b"HTTP/1.1 400 Bad Request\r\n"), ProtocolError, "speaks HTTP"),
        (lambda connection: connection._transport.write(b"\xff" * 100), ProtocolError, "4294967299 bytes"),
        (lambda connection: connection.send(Refuse("full", "no room")), Refused, "refuses: no room"),
    ],
)
@on_every_stage
async def test_who_answers_wrongly(
    network: Network, greet: Callable[[Connection], object], error: type[P2PTrainError], says: str | None
) -> None:
    listener, accepted = await impostor(network, greet)
    with pytest.raises(error, match=says) as caught:
        await dial(network, *listener.address, HELLO, timeout_s=0.5)
    assert type(caught.value) is error
    assert HOST in caught.value.message
    await listener.close()
    for connection in accepted:
        await ended(connection)


@on_every_stage
async def test_a_cancelled_dial_leaves_nothing_open(network: Network) -> None:
    silent = asyncio.Event()
    listener, accepted = await impostor(network, lambda connection: silent.set())
    dialling = asyncio.ensure_future(dial(network, *listener.address, HELLO, timeout_s=50))
    await silent.wait()
    dialling.cancel()
    await asyncio.wait([dialling])
    assert dialling.cancelled()
    await ended(accepted[0])
    await listener.close()
