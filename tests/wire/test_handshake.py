"""Hello, Welcome, Refuse: the judges paired without sockets, then dial and serve on every stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    P2PTrainError,
    ProtocolError,
    Refused,
    ResourceError,
    Unreachable,
    UserError,
)
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import VirtualClockLoop
from tests.wire.doubles import HOST, Owner, Recorder, in_memory, on_every_stage
from wire.address import MEMBER_PORT
from wire.codec import MESSAGE_TYPES, decode_untrusted, encode
from wire.connection import Connection
from wire.frame import ControlFrame, FrameDecoder, encode_control
from wire.handshake import (
    HANDSHAKE_TIMEOUT_S,
    PADDING,
    REFUSALS_S,
    Refusals,
    dial,
    judge_answer,
    judge_hello,
    local_hello,
    local_welcome,
    serve,
)
from wire.messages import PROTOCOL_VERSION, EventNotice, Hello, Message, RefusalCode, Refuse, Welcome
from wire.transport import MAX_HALF_OPEN, MAX_HALF_OPEN_PER_MACHINE, HalfOpen

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
def test_answerer_of_another_version_is_refused_by_the_caller(version: int, older: str):
    with pytest.raises(Refused) as caught:
        converse(HELLO, lambda hello: replace(WELCOME, version=version, software="p2ptrain x.y"))
    assert caught.value.code == "version-mismatch"
    assert f"answering side speaks protocol {version} (p2ptrain x.y)" in caught.value.message
    assert f"calling side speaks protocol {PROTOCOL_VERSION}" in caught.value.message
    newest = max(PROTOCOL_VERSION, version)
    assert caught.value.remedy == f"upgrade p2ptrain on the {older} side to a release that speaks protocol {newest}"


# --------------------------------------------------------------------------------------------------------------- shells


class BusyOwner(Owner):
    """Sends its callers a large frame at once, and serves them until ``finish``; then it raises ``failure``, if any."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__(WELCOME)
        self.failure = failure
        self.finish = asyncio.Event()
        if failure is not None:
            self.finish.set()

    async def serve(self, connection: Connection, hello: Hello) -> None:
        self.served.append(connection)
        connection.send(EventNotice("info", "welcome", "x" * 30_000))  # longer than a handshake frame
        await self.finish.wait()
        if self.failure is not None:
            raise self.failure


async def knock(network: Network, owner: Owner, hello: Hello = HELLO) -> tuple[Connection, Welcome]:
    return await dial(network, *owner.address, hello, timeout_s=5)


async def refusal(network: Network, owner: Owner, hello: Hello = HELLO) -> Refused:
    with pytest.raises(Refused) as caught:
        await knock(network, owner, hello)
    return caught.value


async def connect_silently(network: Network, owner: Owner) -> Connection:
    """A connection that has sent nothing yet."""
    connection = Connection()
    await network.connect(*owner.address, lambda: connection, timeout_s=5)
    return connection


@on_every_stage
async def test_accepted_caller_is_served(network: Network) -> None:
    async with BusyOwner().listening(network) as owner:
        connection, welcome = await knock(network, owner)
        assert welcome == WELCOME
        assert owner.hellos == [replace(HELLO, padding=PADDING)]
        assert len((await connection.expect(EventNotice, timeout_s=5)).text) == 30_000
        connection.send(EventNotice("info", "thanks", "x" * 30_000))
        assert (await owner.served[0].expect(EventNotice, timeout_s=5)).kind == "thanks"
        owner.finish.set()
        await connection.closed.wait()
        assert isinstance(connection.close_cause, ConnectionLost)
        await owner.served[0].closed.wait()
        assert owner.served[0].close_cause is None
    assert not owner.problems


@in_memory
async def test_name_of_a_stranger_is_cut_and_printable(network: Network) -> None:
    async with Owner(replace(WELCOME, name="\x1b[2J" + "x" * 500)).listening(network) as owner:
        with pytest.raises(Refused, match=r"another peer, .\[2Jx{59}…, answers"):
            await dial(network, *owner.address, HELLO, timeout_s=5, expect_peer="another")


@pytest.mark.parametrize(
    "answer",
    [
        Refuse("corpus", "another corpus", "use the same text"),
        Refused("corpus", "another corpus", remedy="use the same text"),
    ],
)
@on_every_stage
async def test_owner_may_refuse(network: Network, answer: Refuse | Refused) -> None:
    async with Owner(answer).listening(network) as owner:
        error = await refusal(network, owner)
        assert (error.code, error.remedy) == ("corpus", "use the same text")
        assert error.message == f"{HOST}:{owner.address[1]} refuses: another corpus"
        assert [type(problem) for problem in owner.problems] == [Refused]
        assert not owner.served


@on_every_stage
async def test_caller_of_another_version_is_refused_without_asking_the_owner(network: Network) -> None:
    async with Owner().listening(network) as owner:
        error = await refusal(network, owner, replace(HELLO, version=PROTOCOL_VERSION + 1))
        assert error.code == RefusalCode.VERSION
        assert not owner.hellos


@pytest.mark.parametrize("failure", [DeadlineExceeded("enough"), KeyError("bug")])
@in_memory
async def test_error_of_serve_closes_its_connection_only(network: Network, failure: Exception) -> None:
    reported: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    async with BusyOwner(failure).listening(network) as owner:
        for _ in range(2):
            connection, _ = await knock(network, owner)
            await connection.closed.wait()
        await asyncio.sleep(0.1)  # virtual: the handlers have ended
    assert (owner.problems or reported) == [failure] * 2
    assert bool(reported) == isinstance(failure, KeyError), "a defect is reported to the loop"


@in_memory
async def test_silent_caller_is_refused_after_five_seconds(network: Network) -> None:
    async with Owner().listening(network) as owner:
        began = asyncio.get_running_loop().time()
        connection = await connect_silently(network, owner)
        answer = await connection.expect(Refuse, timeout_s=60)
        assert answer.code == RefusalCode.TOO_SLOW
        await connection.closed.wait()
        assert asyncio.get_running_loop().time() - began == pytest.approx(HANDSHAKE_TIMEOUT_S)


@in_memory
async def test_network_that_loses_large_packets_is_named(network: Network) -> None:
    accepted: list[Recorder] = []

    def accept() -> Recorder:  # and answer nothing that is longer than a packet
        accepted.append(Recorder())
        return accepted[-1]

    listener = await network.listen(HOST, 0, accept)
    with pytest.raises(DeadlineExceeded, match="loses large packets") as caught:
        await dial(network, *listener.address, HELLO, timeout_s=5)
    assert "MTU" in caught.value.remedy
    assert len(accepted[0].received) > 1460, "an Ethernet packet has room for so many bytes"
    await listener.close()


@in_memory
async def test_member_listens_on_the_usual_port_or_on_any_free_one(network: Network) -> None:
    owner = Owner()
    listen = partial(serve, network, decide=owner.decide, serve=owner.serve, on_problem=owner.on_problem)
    servers = [await listen(host, None) for host in ("0.0.0.0", "0.0.0.0", HOST)]
    first, second, alone = (server.address[1] for server in servers)
    assert first == MEMBER_PORT
    assert {second, alone}.isdisjoint({MEMBER_PORT, 0}), "on the loopback nobody needs the usual port"
    with pytest.raises(UserError, match="in use"):
        await listen("0.0.0.0", first)
    for server in servers:
        await server.close()


@in_memory
async def test_owner_must_decide_in_time(network: Network) -> None:
    class Slow(Owner):
        async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
            await asyncio.sleep(60)
            return WELCOME

    owner = Slow()
    async with owner.listening(network):
        connection = await connect_silently(network, owner)
        connection.send(HELLO)
        answer = await connection.expect(Refuse, timeout_s=60)
        assert (answer.code, answer.message) == (RefusalCode.TOO_SLOW, "no decision within 15 s")
        await connection.close()


@in_memory
async def test_half_open_connections_are_bounded(network: Network) -> None:
    async with BusyOwner().listening(network) as owner:
        silent = [await connect_silently(network, owner) for _ in range(MAX_HALF_OPEN_PER_MACHINE)]
        assert (await refusal(network, owner)).code == RefusalCode.BUSY
        silent[0].abort()
        await asyncio.sleep(0.1)  # virtual: the server notices
        accepted = [(await knock(network, owner))[0] for _ in range(2)]  # an accepted one is not half open any more
        for connection in (*accepted, *silent):
            await connection.close()


@on_every_stage
async def test_closing_the_server_ends_everything_within_a_second(network: Network) -> None:
    async with BusyOwner().listening(network) as owner:
        served, _ = await knock(network, owner)
        silent = await connect_silently(network, owner)
        await owner.server.close()
        for connection in (served, silent):
            await connection.closed.wait()
            assert isinstance(connection.close_cause, ConnectionLost)
        with pytest.raises(Unreachable):
            await dial(network, *owner.address, HELLO, timeout_s=1)


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


# ----------------------------------------------------------------------------------------- many callers, many refusals


def fill(doorway: HalfOpen, host: str) -> int:
    count = 0
    while not doorway.enter(host):
        count += 1
    return count


def test_one_machine_leaves_room_for_others() -> None:
    doorway = HalfOpen()
    assert fill(doorway, "10.0.0.1") == MAX_HALF_OPEN_PER_MACHINE
    assert "with 10.0.0.1" in doorway.enter("10.0.0.1")
    assert not doorway.enter("10.0.0.2")
    doorway.leave("10.0.0.1")
    assert not doorway.enter("10.0.0.1")


def test_there_is_a_limit_in_all() -> None:
    doorway = HalfOpen()
    assert sum(fill(doorway, f"10.0.0.{index}") for index in range(10)) == MAX_HALF_OPEN
    assert doorway.enter("10.1.0.1") == f"{MAX_HALF_OPEN} handshakes are under way"


def test_the_loopback_is_one_machine_and_so_is_an_ipv6_network() -> None:
    for one, same, other in [
        ("127.0.0.1", "127.3.2.1", "10.0.0.1"),
        ("127.0.0.1", "::1", "::2"),
        ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"),
        ("fe80::1%eth0", "fe80::1%eth1", "fe80::2%eth0"),  # of one link; there is nothing else to tell them by
    ]:
        doorway = HalfOpen()
        fill(doorway, one)
        assert doorway.enter(same)
        assert not doorway.enter(other)


def test_first_refusal_is_told_at_once_and_the_others_are_counted() -> None:
    loop = VirtualClockLoop()
    lines: list[tuple[float, str]] = []
    refusals = Refusals(lambda line: lines.append((loop.time(), line)))

    def knock(at: float, problem: P2PTrainError, host: str) -> None:
        loop.call_at(at, refusals, problem, (host, 4242))

    knock(0, Refused("busy", "too many"), "10.0.0.1")
    for number in range(30):
        knock(1 + number, Refused("busy", "too many"), f"10.0.0.{number % 2}")
    knock(40, ConnectionLost("it went away"), "10.0.0.3")
    knock(50, ProtocolError("it does not speak our protocol"), "10.0.0.2")
    knock(71, Refused("what a caller made up", "no"), "2001:db8::8")
    knock(300, Refused("role", "this is a seed"), "10.0.0.1")
    loop.call_at(1000, loop.stop)
    loop.run_forever()
    loop.close()
    assert lines == [
        (0, "refused a caller: 10.0.0.1:4242: too many"),
        (
            REFUSALS_S,
            "refused 31 more callers in a minute; last 10.0.0.2:4242: it does not speak our protocol",
        ),
        (2 * REFUSALS_S, "refused 1 more caller in a minute; last [2001:db8::8]:4242: no"),
        (300, "refused a caller: 10.0.0.1:4242: this is a seed"),
    ]


def test_problems_of_this_machine_raise_an_alarm_and_expected_refusals_are_not_told() -> None:
    lines: list[str] = []
    alarms: list[str] = []
    refusals = Refusals(lines.append, alarms.append)
    refusals(Refused(RefusalCode.LOOPBACK_ONLY, "it listens on the loopback only"), ("127.0.0.1", 4242))
    refusals(ResourceError("too many open files", remedy="raise the limit"), ("127.0.0.1", 7337))
    assert (lines, alarms) == ([], ["too many open files; raise the limit"])
