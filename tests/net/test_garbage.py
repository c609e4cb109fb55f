"""A real port on the loopback, and everything that must not bring it down."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused
from wire.codec import MESSAGE_TYPES, decode_untrusted, encode
from wire.connection import Connection
from wire.frame import BULK_KIND, HEADER, ControlFrame, FrameDecoder, encode_control
from wire.handshake import RefusalCode, Server, dial, local_hello, local_welcome, serve
from wire.messages import Hello, Leave, Message, Refuse, Welcome
from wire.transport import TcpNetwork

HELLO = local_hello(peer_id="a1", name="anna", roles=["worker"], purpose="peer")
HELLO_FRAME = encode_control(Hello.KIND, encode(HELLO), generation=0, stream=0)
SHORT_S = 0.2

CLIENT_HELLO = bytes.fromhex("16030100f1010000ed0303") + random.Random(0).randbytes(240)
GARBAGE = {
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "random": random.Random(1).randbytes(100_000),
    "http": b"GET / HTTP/1.1\r\nHost: seed\r\n\r\n",
    "tls": CLIENT_HELLO,
    "4 GiB length prefix": struct.pack("!I", 0xFFFFFFFF),
    "4 GiB bulk frame": HEADER.pack(0xFFFFFFFF, BULK_KIND, 0, 0, 0, 0),
    "hello of 4 KiB + 1": HEADER.pack(4096 - 4 + 1, Hello.KIND, 0, 4096 - 20 + 1, 0, 0) + bytes(4096 - 20 + 1),
    "message before the hello": encode_control(Leave.KIND, encode(Leave("")), generation=0, stream=0),
    "no msgpack": HEADER.pack(16 + 4, Hello.KIND, 0, 4, 0, 0) + b"\xc1\xc1\xc1\xc1",
    "deep msgpack": HEADER.pack(16 + 4000, Hello.KIND, 0, 4000, 0, 0) + b"\x91" * 4000,
    "welcome as hello": encode_control(
        Welcome.KIND, encode(local_welcome(peer_id="b", name="b", wall=0.0)), generation=0, stream=0
    ),
}

Scenario = Callable[[Server, "Watch"], Awaitable[None]]


class Watch:
    """What the server's owner saw."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.problems: asyncio.Queue[P2PTrainError] = asyncio.Queue()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario against a server, then checks that an honest caller is still served."""

    async def against_a_server(scenario: Scenario) -> None:
        watch = Watch()

        async def decide(hello: Hello, connection: Connection) -> Welcome:
            return local_welcome(peer_id="s1", name="seed", wall=1.0)

        async def answer(connection: Connection, hello: Hello) -> None:
            watch.served.append(hello.peer_id)
            connection.send(await connection.expect(Leave, timeout_s=5))

        server = await serve(
            TcpNetwork(),
            "127.0.0.1",
            0,
            decide=decide,
            serve=answer,
            on_problem=lambda error, remote: watch.problems.put_nowait(error),
            handshake_timeout_s=SHORT_S,
        )
        async with asyncio.timeout(20):
            await scenario(server, watch)
            connection, _ = await dial(TcpNetwork(), *server.address, HELLO, timeout_s=5)
            connection.send(Leave("honest"))
            assert await connection.expect(Leave, timeout_s=5) == Leave("honest")
            await connection.close()
            assert watch.served == ["a1"]
            await server.close()

    def run(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(against_a_server(scenario))

    return run


async def knock(server: Server, data: bytes, *, hang_up: bool = False) -> bytes:
    """Send raw bytes; returns all that the server says until it closes."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    try:
        if hang_up:
            return b""
        return await reader.read()
    except ConnectionResetError:  # the server left with some of our bytes unread
        return b""
    finally:
        writer.transport.abort()


def last_word(answer: bytes) -> Message:
    decoder = FrameDecoder(frozenset(MESSAGE_TYPES))
    while answer:
        buffer = decoder.next_buffer()
        nbytes = min(len(buffer), len(answer))
        buffer[:nbytes], answer = answer[:nbytes], answer[nbytes:]
        event = decoder.received(nbytes)
    assert isinstance(event, ControlFrame)
    return decode_untrusted(event.kind, event.body)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_and_the_next_caller_served(play: Callable[[Scenario], None], garbage: bytes):
    async def scenario(server: Server, watch: Watch) -> None:
        answer = await knock(server, garbage)
        assert isinstance(await watch.problems.get(), ProtocolError)
        if answer:  # lost where the server closed with bytes unread
            refuse = last_word(answer)
            assert isinstance(refuse, Refuse)
            assert refuse.code == RefusalCode.PROTOCOL

    play(scenario)


def test_what_is_wrong_is_said_where_it_can_be_heard(play: Callable[[Scenario], None]):
    async def scenario(server: Server, watch: Watch) -> None:
        refuse = last_word(await knock(server, GARBAGE["no msgpack"]))  # all of it was read: no reset
        assert isinstance(refuse, Refuse)
        assert "msgpack" in refuse.message

    play(scenario)


@pytest.mark.parametrize("length", [0, 1, 4, HEADER.size, len(HELLO_FRAME) - 1])
def test_half_a_frame_and_then_nothing(play: Callable[[Scenario], None], length: int):
    async def scenario(server: Server, watch: Watch) -> None:
        refuse = last_word(await knock(server, HELLO_FRAME[:length]))
        assert isinstance(refuse, Refuse)
        assert refuse.code == RefusalCode.TOO_SLOW
        assert isinstance(await watch.problems.get(), Refused)

    play(scenario)


@pytest.mark.parametrize("length", [0, 1, HEADER.size, len(HELLO_FRAME) - 1])
def test_half_a_frame_and_then_gone(play: Callable[[Scenario], None], length: int):
    async def scenario(server: Server, watch: Watch) -> None:
        await knock(server, HELLO_FRAME[:length], hang_up=True)
        assert isinstance(await watch.problems.get(), P2PTrainError)

    play(scenario)


def test_many_at_once(play: Callable[[Scenario], None]):
    async def scenario(server: Server, watch: Watch) -> None:
        await asyncio.gather(*[knock(server, garbage) for garbage in GARBAGE.values() for _ in range(5)])
        for _ in range(5 * len(GARBAGE)):
            await watch.problems.get()

    play(scenario)


def test_a_peer_that_resets(play: Callable[[Scenario], None]):
    async def scenario(server: Server, watch: Watch) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
            await loop.sock_connect(sock, server.address)
            await loop.sock_sendall(sock, HELLO_FRAME[:30])
        assert isinstance(await watch.problems.get(), P2PTrainError)

    play(scenario)
