"""Five hundred callers that say nothing, or no more than TLS's first word: what they cost, and who still gets in."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
import uvloop

from p2ptrain.core.world import Network
from tests.wire.doubles import credentials
from wire.connection import Connection
from wire.credentials import unverified_context
from wire.handshake import Server, dial, local_hello, local_welcome
from wire.messages import Hello, Leave, Welcome
from wire.tls import TlsNetwork
from wire.transport import HalfOpen, TcpNetwork

HELD = 500
MOST_BYTES = 32 << 20
DEADLINE_S = 60.0  # for a machine that does much else
PATIENCE_S = 60.0  # of the doorway: longer than the test, so that all are held at once


@pytest.fixture(autouse=True)
def _enough_descriptors() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * HELD
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        unverified_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def until(fits: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not fits():  # noqa: ASYNC110 - the doorway tells nobody who enters
            await asyncio.sleep(0)


async def opened(door: Network, doorway: HalfOpen) -> Server:
    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id="seed", name="seed", wall=0.0)

    async def echo(connection: Connection, hello: Hello) -> None:
        connection.send(await connection.expect(Leave, timeout_s=DEADLINE_S))

    server = Server(
        decide=decide, serve=echo, half_open=doorway, on_problem=lambda *problem: None, handshake_timeout_s=PATIENCE_S
    )
    await server.start(door, "127.0.0.1", 0)
    return server


@pytest.mark.parametrize(("encrypted", "begins"), [(False, False), (True, False), (True, True)])
def test_five_hundred_callers_that_wait(encrypted: bool, begins: bool, monkeypatch: pytest.MonkeyPatch):
    """``begins``: each has said the first word of TLS, so that OpenSSL holds a connection for it."""
    monkeypatch.setattr("wire.tls.HANDSHAKE_TIMEOUT_S", PATIENCE_S)
    doorway = HalfOpen(HELD + 1, HELD + 1)  # all are of one machine here

    async def scenario() -> None:
        door: Network = TcpNetwork()
        caller: Network = door
        if encrypted:
            door = TlsNetwork(door, credentials("seed", "seed"), require_client_certificate=False, half_open=doorway)
            caller = TlsNetwork(TcpNetwork(), credentials("a1"), require_client_certificate=True)
        server = await opened(door, doorway if not encrypted else HalfOpen())
        first = client_hello() if begins else b""
        callers: list[socket.socket] = []
        with ExitStack() as held:
            before = resident_bytes()
            for _ in range(HELD):
                sock = held.enter_context(socket.create_connection(server.address))
                sock.sendall(first)
                sock.setblocking(False)
                callers.append(sock)
                await asyncio.sleep(0)
            await until(lambda: doorway._by_machine.total() == HELD)
            if begins:
                async with asyncio.timeout(DEADLINE_S):
                    for sock in callers:
                        assert await asyncio.get_running_loop().sock_recv(sock, 1), "no answer to its first word"
            assert resident_bytes() - before <= MOST_BYTES
            hello = local_hello(peer_id="a1", name="anna", roles=["worker"], purpose="peer")
            connection, _ = await dial(caller, *server.address, hello, timeout_s=DEADLINE_S, expect_role="seed")
            connection.send(Leave("honest"))
            assert await connection.expect(Leave, timeout_s=DEADLINE_S) == Leave("honest")
            assert doorway._by_machine.total() == HELD, "they were held meanwhile"
            await connection.close()
        await until(lambda: not doorway._by_machine)
        await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
