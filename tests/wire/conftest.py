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
from tests.wire.circuit_doubles import ThreePeers
from tests.wire.doubles import run
from wire import transport
from wire.circuits import CircuitNetwork
from wire.credentials import Credentials
from wire.emulate import EmulatedNetwork, LinkPreset
from wire.relay import RelayLimits
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
        self._network = network
        self._a1, self._b2 = (
            TlsNetwork(network, member(name, other), require_client_certificate=True)
            for name, other in (("a1", "operator"), ("b2", "seed"))
        )

    async def close(self) -> None:
        if isinstance(self._network, ThreePeers):
            await self._network.close()

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        await self._a1.connect(host, port, factory, timeout_s=timeout_s)

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        return await self._b2.listen(host, port, factory, on_problem)


FAR = LinkPreset("far", 0.03, 0.005, 1e9, burst_bytes=32 << 10)
QUICK = LinkPreset("quick", 1e-3, 5e-4, 2e9, burst_bytes=32 << 10)
ROUGH = LinkPreset("rough", 0.02, 0.01, 2e8, 0.01, stall_every_s=0.5, stall_s=0.1, burst_bytes=8 << 10)
STAGES: dict[str, tuple[Callable[[], asyncio.AbstractEventLoop], Callable[[], Network]]] = {
    "tcp-asyncio": (asyncio.new_event_loop, TcpNetwork),
    "tcp-uvloop": (uvloop.new_event_loop, TcpNetwork),
    "tls-asyncio": (asyncio.new_event_loop, lambda: TwoPeers(TcpNetwork())),
    "tls-uvloop": (uvloop.new_event_loop, lambda: TwoPeers(TcpNetwork())),
    "tls-memory": (VirtualClockLoop, lambda: TwoPeers(MemoryNetwork())),
    "memory": (VirtualClockLoop, MemoryNetwork),
    "emulated": (VirtualClockLoop, lambda: EmulatedNetwork(MemoryNetwork(), FAR, 1)),
}
MORE_STAGES = {
    "relayed-memory": (VirtualClockLoop, lambda: ThreePeers(MemoryNetwork().at)),
    "tls-relayed-uvloop": (uvloop.new_event_loop, lambda: TwoPeers(ThreePeers(TcpNetwork()))),
    "relayed-asyncio": (asyncio.new_event_loop, lambda: ThreePeers(TcpNetwork())),
    "relayed-emulated": (VirtualClockLoop, lambda: ThreePeers(EmulatedNetwork(MemoryNetwork(), QUICK, 1))),
    "relayed-limited": (VirtualClockLoop, lambda: ThreePeers(MemoryNetwork().at, limits=RelayLimits(1e7))),
    "tls-relayed-memory": (VirtualClockLoop, lambda: TwoPeers(ThreePeers(MemoryNetwork().at))),
    "reversed-memory": (VirtualClockLoop, lambda: ThreePeers(MemoryNetwork().at, reversed_=True)),
    "punched-uvloop": (uvloop.new_event_loop, lambda: ThreePeers(TcpNetwork(), tries_direct=True)),
    "tls-punched-asyncio": (
        asyncio.new_event_loop,
        lambda: TwoPeers(ThreePeers(TcpNetwork(), tries_direct=True)),
    ),
    "tls-ordinary-uvloop": (uvloop.new_event_loop, lambda: TwoPeers(CircuitNetwork(TcpNetwork()))),
    "tls-reversed-asyncio": (asyncio.new_event_loop, lambda: TwoPeers(ThreePeers(TcpNetwork(), reversed_=True))),
    "tls-emulated": (VirtualClockLoop, lambda: TwoPeers(EmulatedNetwork(MemoryNetwork(), ROUGH, 1))),
    "emulated-tls-uvloop": (uvloop.new_event_loop, lambda: EmulatedNetwork(TwoPeers(TcpNetwork()), QUICK, 1)),
    "memory-asyncio": (asyncio.new_event_loop, MemoryNetwork),
    "emulated-rough": (VirtualClockLoop, lambda: EmulatedNetwork(MemoryNetwork(), ROUGH, 1)),
    "emulated-tcp-asyncio": (asyncio.new_event_loop, lambda: EmulatedNetwork(TcpNetwork(), QUICK, 1)),
    "emulated-tcp-uvloop": (uvloop.new_event_loop, lambda: EmulatedNetwork(TcpNetwork(), QUICK, 1)),
}


def _player(stage: str) -> Play:
    loop, network = (STAGES | MORE_STAGES)[stage]

    async def scene(scenario: Scenario) -> None:
        made = network()
        await scenario(made)
        if isinstance(made, TwoPeers | ThreePeers):
            await made.close()

    return lambda scenario: doubles.play(scene(scenario), loop_factory=loop)


@pytest.fixture(autouse=True)
def small_socket_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BULK_BUFFER_BYTES", 128 << 10)


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario on each stage in turn."""
    return _player(request.param)


@pytest.fixture(params=[*STAGES, *MORE_STAGES])
def play_everywhere(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario on each stage, and with TLS and emulated links in every order."""
    return _player(request.param)


@pytest.fixture(params=["tcp-asyncio", "tcp-uvloop", "memory"])
def play_plain(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario, which puts TLS over the network itself, on TCP with both event loops and in memory."""
    return _player(request.param)


@pytest.fixture
def play_virtual() -> Play:
    """Runs a scenario in memory on virtual time: waiting is free, and every time is exact."""
    return _player("memory")
