"""A seed that tells of the demo cluster over the real protocol, on a network in memory and virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from p2ptrain.core.errors import Refused
from p2ptrain.lab.memory import MemoryNetwork, VirtualClockLoop
from tests.fake_seed import FakeSeed
from tests.tui.demo import DemoCluster, DemoSource
from tui.source import SeedSource
from wire.client import SeedClient
from wire.connection import Connection
from wire.messages import Request, Update


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day are shown in local time: the tests live in Greenwich."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


class DemoFakeSeed(FakeSeed):
    """Answers what a viewer asks, from a demo cluster."""

    def __init__(self, network: MemoryNetwork, cluster: DemoCluster) -> None:
        super().__init__()
        self.network, self.cluster = network, cluster
        self.viewers: list[Connection] = []

    async def begin(self) -> None:
        await self.start(self.network, "seed", 7337)

    async def stop(self) -> None:
        await super().stop()
        self.viewers.clear()

    def tell(self, topic: str, items: list[dict[str, Any]]) -> None:
        for viewer in self.viewers:
            viewer.send(Update(topic, items))

    def tick(self) -> None:
        for update in self.cluster.tick():
            self.tell(update.topic, update.items)

    def subscribed(self, connection: Connection) -> None:
        for update in self.cluster.told():
            connection.send(update)
        self.viewers.append(connection)

    def answer_for(self, request: Request) -> dict[str, Any] | Refused:
        cluster, params = self.cluster, request.params
        match request.method:
            case "subscribe":
                return {}
            case "probe.clock":
                return {"wall": 0.0}
            case "events.list":
                cluster.event_id = 0
                events = [event.to_map() for event in cluster.events()][params["after_id"] :]  # ids count from 1
                return {"events": events[: params["limit"]]}
            case "metrics.history":
                steps = range(max(params["after_step"], 0) + 1, cluster.step + 1) if params["job"] == "j1" else range(0)
                return {"rows": [cluster.row(step).to_map() for step in steps[: params["limit"]]]}
            case _:
                return {"job": params["job"]}


Play = Callable[[DemoFakeSeed, SeedSource], Awaitable[None]]


@pytest.fixture
def watch() -> Callable[[Play], None]:
    """Runs a scenario with a started seed and a running source, on virtual time: back-off costs nothing."""

    @asynccontextmanager
    async def connected(network: MemoryNetwork) -> AsyncIterator[SeedClient]:
        client = await SeedClient.connect(network, "seed", 7337, name="tui")
        try:
            yield client
        finally:
            await client.close()

    async def scenario(play: Play) -> None:
        network = MemoryNetwork()
        seed = DemoFakeSeed(network, DemoCluster(6))
        await seed.begin()
        source = SeedSource(partial(connected, network), "seed:7337", DemoSource(None).actions)
        running = asyncio.get_running_loop().create_task(source.run())
        try:
            async with asyncio.timeout(600):
                await play(seed, source)
        finally:
            running.cancel()
            await asyncio.wait([running])
            await seed.stop()
        assert running.cancelled(), running.exception()

    def run(play: Play) -> None:
        with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
            runner.run(scenario(play))

    return run
