"""Doubles of tests: a protocol and a server's owner that record what happens to them, and a CA with its members."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import shutil
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, P2PTrainError
from p2ptrain.core.world import Listener, Network
from p2ptrain.lab.memory import run_virtual
from wire.connection import Connection
from wire.credentials import (
    Credentials,
    new_authority,
    new_key_and_request,
    pem_of,
    request_of_untrusted,
    sign_certificate,
)
from wire.handshake import PeerServer, local_welcome, serve
from wire.messages import Hello, Refuse, Welcome

T = TypeVar("T")
HOST = "127.0.0.1"


def play(
    scenario: Coroutine[Any, Any, T],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    timeout_s: float = 60.0,
) -> T:
    """Run ``scenario`` on a fresh loop. Where it fails, its failure is told, not what it left open by failing."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await scenario

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(bounded())
        except BaseException:
            # uvloop never finishes closing a loop where these warnings are errors.
            warnings.simplefilter("ignore", ResourceWarning)
            raise


def scenario_of(player: str, *names: str) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Decorate a test that is a coroutine of ``names``: the fixture ``player`` makes these, and runs it."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            play = fixtures.pop(player)
            play(lambda *made: test(**dict(zip(names, made, strict=True)), **fixtures))

        parameters = inspect.signature(test).parameters.values()
        others = [each for each in parameters if each.name not in names]
        first = inspect.Parameter(player, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([first, *others])
        functools.update_wrapper(run, test).__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


on_every_stage = scenario_of("play", "network")
on_all_transports = scenario_of("play_everywhere", "network")
on_every_plain_stage = scenario_of("play_plain", "network")
in_memory = scenario_of("play_virtual", "network")


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a test that is a coroutine: waiting is free, and every time is exact."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_virtual(test(**fixtures))

    return run


class Recorder(asyncio.BufferedProtocol):
    """Receives everything, answers nothing.

    Args:
        buffer_bytes: size of the buffer it offers to each read.
        keep_open: what it answers to the end of the stream: whether its own direction stays open.
        on_bytes: called after each read with this recorder; may pause, write, close or raise.

    Attributes:
        received: all bytes so far, in order. ``arrivals``: (loop time, total bytes by then) of each read.
        events: ``made``, ``paused``, ``resumed``, ``eof``, ``lost``, in order. ``lost_by``: the argument of each
            ``connection_lost``.
    """

    def __init__(
        self,
        *,
        buffer_bytes: int = 64 << 10,
        keep_open: bool = False,
        on_bytes: Callable[[Recorder], None] | None = None,
    ) -> None:
        self.received = bytearray()
        self.arrivals: list[tuple[float, int]] = []
        self.events: list[str] = []
        self.lost_by: list[Exception | None] = []
        self.writing_paused = False
        self._buffer = bytearray(buffer_bytes)
        self._keep_open = keep_open
        self._on_bytes = on_bytes
        self._news = asyncio.Event()

    async def until(self, satisfied: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
        """Wait until something happened to this protocol that makes ``satisfied`` true. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            while not satisfied():
                self._news.clear()
                await self._news.wait()

    async def until_received(self, nbytes: int, *, timeout_s: float = 10.0) -> bytes:
        """The bytes received, once there are ``nbytes`` of them."""
        await self.until(lambda: len(self.received) >= nbytes, timeout_s=timeout_s)
        return bytes(self.received)

    async def until_lost(self, *, timeout_s: float = 10.0) -> Exception | None:
        """The cause given to ``connection_lost``."""
        await self.until(lambda: bool(self.lost_by), timeout_s=timeout_s)
        return self.lost_by[0]

    async def write_all(self, data: memoryview, *, chunk_bytes: int = 64 << 10, timeout_s: float = 10.0) -> int:
        """Write ``data`` in chunks, waiting while paused; the most that was ever unsent, in bytes."""
        most = 0
        for start in range(0, len(data), chunk_bytes):
            await self.until(lambda: not self.writing_paused, timeout_s=timeout_s)
            self.transport.write(data[start : start + chunk_bytes])
            most = max(most, self.transport.get_write_buffer_size())
        return most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._note("made")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        self.arrivals.append((asyncio.get_running_loop().time(), len(self.received)))
        self._news.set()
        if self._on_bytes is not None:
            self._on_bytes(self)

    def eof_received(self) -> bool:
        self._note("eof")
        return self._keep_open

    def pause_writing(self) -> None:
        self.writing_paused = True
        self._note("paused")

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._note("resumed")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost_by.append(exc)
        self._note("lost")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._news.set()


@asynccontextmanager
async def connected(
    network: Network, host: str = HOST, *, dial: dict[str, Any] | None = None, accept: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Recorder, Recorder, Listener]]:
    """A dialler, its acceptor, and the listener. At the end each connection is lost exactly once, last of all.

    ``dial``, ``accept``: arguments of the recorders.
    """
    accepted: asyncio.Queue[Recorder] = asyncio.Queue()
    dialler = Recorder(**(dial or {}))

    def factory() -> Recorder:
        acceptor = Recorder(**(accept or {}))
        accepted.put_nowait(acceptor)
        return acceptor

    listener = await network.listen(host, 0, factory)
    await network.connect(host, listener.address[1], lambda: dialler, timeout_s=5)
    assert dialler.events == ["made"]
    async with asyncio.timeout(5):
        acceptor = await accepted.get()
    await acceptor.until(lambda: acceptor.events == ["made"])
    yield dialler, acceptor, listener
    for end in (dialler, acceptor):
        end.transport.close()
        await end.until_lost()
        assert end.events.count("lost") == 1
        assert end.events[0] == "made"
        assert end.events[-1] == "lost"
    await listener.close()


async def connect_hosts(
    dialling: Network, listening: Network, host: str = "b", accept: Recorder | None = None
) -> tuple[Recorder, Recorder]:
    """A dialler and its acceptor, of two machines; nobody listens any more."""
    dialler, acceptor = Recorder(), accept or Recorder()
    listener = await listening.listen("0.0.0.0", 0, lambda: acceptor)
    await dialling.connect(host, listener.address[1], lambda: dialler, timeout_s=5)
    await acceptor.until(lambda: bool(acceptor.events))
    await listener.close()
    return dialler, acceptor


class Owner:
    """The owner of a server: admits whom the handshake admits, and records who came and what went wrong.

    ``answer``: to every ``Hello``; an error is raised.
    """

    server: PeerServer

    def __init__(self, answer: Welcome | Refuse | P2PTrainError | None = None) -> None:
        self.answer = answer or local_welcome(peer_id="seed", name="seed", wall=1.0)
        self.hellos: list[Hello] = []
        self.served: list[Connection] = []
        self.problems: list[P2PTrainError] = []
        self._news = asyncio.Event()

    @asynccontextmanager
    async def listening(self, network: Network, host: str = HOST) -> AsyncIterator[Any]:
        self.server = await serve(network, host, 0, decide=self.decide, serve=self.serve, on_problem=self.on_problem)
        try:
            yield self
        finally:
            await self.server.close()

    @property
    def address(self) -> tuple[str, int]:
        return self.server.address

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        self.hellos.append(hello)
        if isinstance(self.answer, P2PTrainError):
            raise self.answer
        return self.answer

    async def serve(self, connection: Connection, hello: Hello) -> None:
        self.served.append(connection)
        with suppress(ConnectionLost):
            await connection.receive(timeout_s=60)

    def on_problem(self, error: P2PTrainError, remote: tuple[str, int]) -> None:
        assert remote[0] in (HOST, "hostile", "good")
        self.problems.append(error)
        self._news.set()

    async def problem(self) -> P2PTrainError:
        """The first problem, once there is one."""
        await self._news.wait()
        return self.problems[0]


@dataclass(frozen=True)
class Run:
    """A CA, and where its members keep their credentials."""

    key_pem: bytes
    ca_pem: bytes
    directory: Path

    def sign(self, csr_der: bytes, *, roles: tuple[str, ...], age_s: float = 0.0, lifetime_s: float = 3600.0) -> bytes:
        peer_id, key = request_of_untrusted(csr_der)
        now = time.time() - age_s
        return sign_certificate(
            self.key_pem, self.ca_pem, key, peer_id=peer_id, roles=roles, now=now, lifetime_s=lifetime_s
        )

    def member(
        self, peer_id: str, *roles: str, age_s: float = 0.0, lifetime_s: float = 3600.0, ca_pem: bytes = b""
    ) -> Credentials:
        """Credentials of a peer, saved; ``ca_pem`` is whom it trusts where that is not this run."""
        key_pem, csr_der = new_key_and_request(peer_id)
        certificate = pem_of(self.sign(csr_der, roles=roles, age_s=age_s, lifetime_s=lifetime_s))
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        credentials = Credentials(directory, ca_pem or self.ca_pem, certificate, key_pem)
        credentials.save(RealDisk())
        return credentials


@functools.cache
def run(name: str = "run") -> Run:
    """The run of this name: the same whenever it is asked for."""
    directory = Path(tempfile.mkdtemp(prefix="p2ptrain-test-"))
    atexit.register(shutil.rmtree, directory)
    return Run(*new_authority(name, now=time.time()), directory)


@functools.cache
def credentials(peer_id: str = "peer", role: str = "worker") -> Credentials:
    return run().member(peer_id, role)
