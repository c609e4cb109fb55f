"""TCP proper: options of real sockets, real addresses, real deaths, and the words for what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from p2ptrain.core.errors import P2PTrainError, Unreachable, UserError
from p2ptrain.core.world import Network
from tests.wire import doubles
from tests.wire.doubles import Recorder, connected, on_every_stage
from wire.transport import SocketListener, TcpNetwork, cannot_listen, every_interface, unreachable

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=list(LOOPS))
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Network], Coroutine[Any, Any, None]]], None]:
    return lambda scenario: doubles.play(scenario(TcpNetwork()), loop_factory=LOOPS[request.param])


def addresses_here() -> list[str]:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return ["127.0.0.1", "::1", "localhost"]
    return ["127.0.0.1", "localhost"]


@pytest.mark.parametrize("host", addresses_here())
@on_every_stage
async def test_every_kind_of_address_carries_bytes(network: Network, host: str) -> None:
    async with connected(network, host) as (dialler, acceptor, _):
        acceptor.transport.write(b"hello")
        assert await dialler.until_received(5) == b"hello"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@on_every_stage
async def test_a_listener_on_every_interface_knows_callers_of_both_families_by_their_own_address(
    network: Network,
) -> None:
    accepted: asyncio.Queue[Recorder] = asyncio.Queue()

    def factory() -> Recorder:
        accepted.put_nowait(acceptor := Recorder())
        return acceptor

    listener = await network.listen(every_interface(), 0, factory)
    for host in addresses_here()[:2]:
        dialler = Recorder()
        await network.connect(host, listener.address[1], lambda end=dialler: end, timeout_s=5)
        acceptor = await accepted.get()
        await acceptor.until(lambda end=acceptor: bool(end.events))
        assert acceptor.transport.get_extra_info("peername")[0] == host
        for end in (dialler, acceptor):
            end.transport.abort()
            await end.until_lost()
    await listener.close()


class Full(socket.socket):
    """A listening socket of a process that has no free file descriptor."""

    def accept(self) -> tuple[socket.socket, Any]:
        raise OSError(errno.EMFILE, "Too many open files")


@on_every_stage
async def test_a_listener_without_file_descriptors_says_so_once(network: Network) -> None:
    told: asyncio.Queue[P2PTrainError] = asyncio.Queue()
    strange: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: strange.append(context))
    with Full() as full, socket.socket() as caller:
        full.bind(("127.0.0.1", 0))
        full.listen()
        full.setblocking(False)
        listener = SocketListener(loop, full, Recorder, backlog=1, on_problem=lambda it, _: told.put_nowait(it))
        caller.setblocking(False)
        await loop.sock_connect(caller, full.getsockname())
        assert (await told.get()).message == "too many open files: new connections wait"
        listener._acceptable()
        assert told.empty()
        assert not strange
        await listener.close()


@on_every_stage
async def test_both_ends_have_the_options_that_find_a_dead_peer(network: Network) -> None:
    async with connected(TcpNetwork(user_timeout_s=45)) as (*ends, _):
        for end in ends:
            sock = end.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name, value in {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": 45_000}.items():
                if hasattr(socket, name):
                    assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name


@on_every_stage
async def test_a_port_with_connections_in_time_wait_can_be_bound_again(network: Network) -> None:
    acceptor, dialler = Recorder(), Recorder()
    listener = await network.listen("127.0.0.1", 0, lambda: acceptor)
    await network.connect(*listener.address, lambda: dialler, timeout_s=5)
    await acceptor.until(lambda: bool(acceptor.events))
    acceptor.transport.close()  # who closes first keeps the port busy for a minute
    await dialler.until_lost()
    await acceptor.until_lost()
    await listener.close()
    again = await network.listen(*listener.address, Recorder)
    await again.close()


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address that answers nothing: a full backlog drops what comes next, as a firewall does."""
    with socket.socket() as full, contextlib.ExitStack() as fillers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()


@on_every_stage
async def test_a_machine_that_swallows_packets_is_given_up_in_time(
    network: Network, black_hole: tuple[str, int]
) -> None:
    host, port = black_hole
    with pytest.raises(Unreachable, match=r"no answer within 0\.2 s") as caught:
        await network.connect(host, port, Recorder, timeout_s=0.2)
    assert "firewall" in caught.value.remedy
    dialling = asyncio.ensure_future(network.connect(host, port, Recorder, timeout_s=60))
    await asyncio.sleep(0)
    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling


@pytest.mark.parametrize("play", ["asyncio"], indirect=True)  # uvloop asks the C library
@on_every_stage
async def test_each_address_of_a_name_is_tried(
    network: Network, monkeypatch: pytest.MonkeyPatch, black_hole: tuple[str, int]
) -> None:
    gone = await network.listen("127.0.0.1", 0, Recorder)
    await gone.close()
    there = await network.listen("127.0.0.1", 0, Recorder)
    places = (black_hole, gone.address, there.address)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
    dialler = Recorder()
    await network.connect("three.example", 1, lambda: dialler, timeout_s=1)
    assert dialler.transport.get_extra_info("peername") == there.address
    del found[::2]
    with pytest.raises(Unreachable, match=r"one\.example:1: connection refused"):
        await network.connect("one.example", 1, Recorder, timeout_s=5)
    dialler.transport.abort()
    await dialler.until_lost()
    await there.close()


@pytest.mark.parametrize("play", ["asyncio"], indirect=True)  # uvloop asks the C library
@on_every_stage
async def test_a_name_that_nobody_knows(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Unreachable, match="host name is not known") as caught:
        await network.connect("sede", 7337, Recorder, timeout_s=5)
    assert "check the name" in caught.value.remedy
    with pytest.raises(UserError, match="host name is not known"):
        await network.listen("sede", 7337, Recorder)
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: end.wait())
    with pytest.raises(Unreachable, match="no name server answered"):
        await network.connect("sede", 7337, Recorder, timeout_s=0.05)
    end.set()


@pytest.mark.parametrize(
    ("error", "message", "remedy"),
    [
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to it", "VPN"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route to it", "VPN"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "no answer within 5 s", "firewall"),
        (OSError(errno.EMFILE, "Too many open files"), "this process has too many open files", "ulimit -n"),
    ],
)
def test_why_a_peer_is_unreachable(error: OSError, message: str, remedy: str) -> None:
    said = unreachable("fd00::1", 7337, error, 5.0)
    assert said.message == f"cannot reach [fd00::1]:7337: {message}"
    assert remedy in said.remedy


def test_nobody_on_this_machine_may_mean_that_another_one_is_meant() -> None:
    assert "on another machine" in unreachable("127.0.0.1", 7337, ConnectionRefusedError(), 5.0).remedy
    assert "another" not in unreachable("10.0.0.1", 7337, ConnectionRefusedError(), 5.0).remedy


@pytest.mark.parametrize(
    ("error", "message", "remedy"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "port 80 is not permitted", "above 1023"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "port 80 is in use", "--port"),
        (OSError(errno.ENOBUFS, "No buffer space available"), "No buffer space available", ""),
    ],
)
def test_why_an_address_cannot_be_bound(error: OSError, message: str, remedy: str) -> None:
    said = cannot_listen("0.0.0.0", 80, error)
    assert said.message == f"cannot listen on 0.0.0.0:80: {message}"
    assert remedy in said.remedy
