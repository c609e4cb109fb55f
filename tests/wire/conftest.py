"""The stages on which connections are tested: TCP on both event loops; memory and an emulated link on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from p2ptrain.core.world import Network
from wire.emulate import EmulatedNetwork
from wire.shaper import LinkPreset
from wire.transport import MemoryNetwork, TcpNetwork
from wire.virtual import VirtualClockLoop

Scenario = Callable[[Network], Awaitable[None]]
Play = Callable[[Scenario], None]

FAR = LinkPreset("far", 30.0, 5.0, 1e9, burst_bytes=32 << 10)
STAGES: dict[str, tuple[Callable[[], asyncio.AbstractEventLoop], Callable[[], Network]]] = {
    "tcp-asyncio": (asyncio.new_event_loop, lambda: TcpNetwork(buffer_bytes=128 << 10)),
    "tcp-uvloop": (uvloop.new_event_loop, lambda: TcpNetwork(buffer_bytes=128 << 10)),
    "memory": (VirtualClockLoop, MemoryNetwork),
    "emulated": (VirtualClockLoop, lambda: EmulatedNetwork(MemoryNetwork(), FAR, 1)),
}


def _player(stage: str) -> Play:
    loop, network = STAGES[stage]

    def play(scenario: Scenario) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):  # virtual seconds, where time is
                await scenario(network())

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(bounded())

    return play


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario on each stage in turn."""
    return _player(request.param)


@pytest.fixture
def play_virtual() -> Play:
    """Runs a scenario in memory on virtual time: waiting is free, and every time is exact."""
    return _player("memory")
