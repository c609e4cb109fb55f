"""A seed that tells of the demo cluster over the real protocol, on a network in memory and virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.lab.memory import MemoryNetwork, VirtualClockLoop
from tests.tui.demo import DemoCluster
from tui.source import SeedSource
from wire.client import SeedClient
from wire.connection import Connection
from wire.handshake import PeerServer, local_welcome, serve
from wire.messages import Hello, Refuse, Request, Response, Update, Welcome


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day are shown in local time: the tests live in Greenwich."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


class FakeSeed:
    """Answers what a viewer asks, from a demo cluster.

    Attributes:
        asked: methods and parameters, in order.
        answers: method → what to answer in place of the true result: a result, or (code, message, remedy) of a refusal.
        silent: methods that are never answered.
    """

    def __init__(self, network: MemoryNetwork, cluster: DemoCluster) -> None:
        self.network, self.cluster = network, cluster
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, dict[str, Any] | tuple[str, str, str]] = {}
        self.silent: set[str] = set()
        self.viewers: list[Connection] = []
        self.problems: list[P2PTrainError] = []
        self.refuse: Refuse | None = None
        self._server: PeerServer | None = None

    async def start(self) -> None:
        self._server = await serve(
            self.network, "seed", 7337, decide=self._decide, serve=self._serve, on_problem=self._on_problem
        )

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.close()
        self.viewers.clear()

    def tell(self, topic: str, items: list[dict[str, Any]]) -> None:
        for viewer in self.viewers:
            viewer.send(Update(topic, items))

    def tick(self) -> None:
        for update in self.cluster.tick():
            self.tell(update.topic, update.items)

    def _on_problem(self, error: P2PTrainError, remote: tuple[str, int]) -> None:
        self.problems.append(error)

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.refuse or local_welcome(peer_id="seed", name="seed", cluster_id="c0ffee", wall=0.0)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        while True:
            request = await connection.expect(Request, timeout_s=3600)
            self.asked.append((request.method, request.params))
            if request.method in self.silent:
                continue
            answer = self.answers.get(request.method) or self._answer(request.method, request.params)
            if isinstance(answer, tuple):
                connection.send(Response(request.id, {}, *answer))
                continue
            connection.send(Response(request.id, answer))
            if request.method == "subscribe":
                for update in self.cluster.told():
                    connection.send(update)
                self.viewers.append(connection)

    def _answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        cluster, limit = self.cluster, params.get("limit", 0)
        match method:
            case "subscribe":
                return {}
            case "probe.clock":
                return {"wall": 0.0}
            case "events.list":
                cluster.event_id = 0
                events = [event.to_map() for event in cluster.events()][params["after_id"] :]  # ids count from 1
                return {"events": events[:limit]}
            case "metrics.history":
                steps = range(max(params["after_step"], 0) + 1, cluster.step + 1) if params["job"] == "j1" else range(0)
                return {"rows": [cluster.row(step).to_map() for step in steps[:limit]]}
            case _:
                return {"job": params["job"]}


Play = Callable[[FakeSeed, SeedSource], Awaitable[None]]


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
        seed = FakeSeed(network, DemoCluster(6))
        await seed.start()
        source = SeedSource(partial(connected, network), "seed:7337")
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
