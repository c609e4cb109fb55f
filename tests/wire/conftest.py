"""The stages on which connections are tested: TCP and TLS on both event loops; memory, an emulated link and TLS over
memory on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache

import pytest
import uvloop

from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from p2ptrain.lab.memory import MemoryNetwork, VirtualClockLoop
from tests.wire import doubles
from tests.wire.doubles import run
from wire.credentials import Credentials
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.tls import TlsNetwork
from wire.transport import TcpNetwork

Scenario = Callable[[Network], Awaitable[None]]
Play = Callable[[Scenario], None]


@cache
def member(name: str, other: str) -> Credentials:
    return run().member(name, "worker", other)


class TwoPeers:
    """TLS, on which who dials is ``a1``, an operator too, and who listens is ``b2``, a seed too."""

    def __init__(self, network: Network) -> None:
        self._a1, self._b2 = (
            TlsNetwork(network, member(name, other), require_client_certificate=True)
            for name, other in (("a1", "operator"), ("b2", "seed"))
        )

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        await self._a1.connect(host, port, factory, timeout_s=timeout_s)

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        return await self._b2.listen(host, port, factory, on_problem)


FAR = LinkPreset("far", 30.0, 5.0, 1e9, burst_bytes=32 << 10)
STAGES: dict[str, tuple[Callable[[], asyncio.AbstractEventLoop], Callable[[], Network]]] = {
    "tcp-asyncio": (asyncio.new_event_loop, lambda: TcpNetwork(buffer_bytes=128 << 10)),
    "tcp-uvloop": (uvloop.new_event_loop, lambda: TcpNetwork(buffer_bytes=128 << 10)),
    "tls-asyncio": (asyncio.new_event_loop, lambda: TwoPeers(TcpNetwork(buffer_bytes=128 << 10))),
    "tls-uvloop": (uvloop.new_event_loop, lambda: TwoPeers(TcpNetwork(buffer_bytes=128 << 10))),
    "tls-memory": (VirtualClockLoop, lambda: TwoPeers(MemoryNetwork())),
    "memory": (VirtualClockLoop, MemoryNetwork),
    "emulated": (VirtualClockLoop, lambda: EmulatedNetwork(MemoryNetwork(), FAR, 1)),
}


def _player(stage: str) -> Play:
    loop, network = STAGES[stage]

    async def scene(scenario: Scenario) -> None:
        await scenario(network())

    return lambda scenario: doubles.play(scene(scenario), loop_factory=loop)


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario on each stage in turn."""
    return _player(request.param)


@pytest.fixture(params=["tcp-asyncio", "tcp-uvloop", "memory"])
def play_plain(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario, which puts TLS over the network itself, on TCP with both event loops and in memory."""
    return _player(request.param)


@pytest.fixture
def play_virtual() -> Play:
    """Runs a scenario in memory on virtual time: waiting is free, and every time is exact."""
    return _player("memory")
