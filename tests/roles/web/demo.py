"""The seed's HTTP endpoint over the scripted cluster of tests/tui/demo.py.

python -m tests.roles.web.demo --peers 32 --port 8080     look at the page
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from p2ptrain.core.errors import ConnectionLost
from roles.background import Background
from roles.http.server import serving
from roles.web.app import WebApp
from roles.web.experiments import ExperimentInfo, Experiments
from roles.web.feed import Feed
from tests.tui.demo import DemoCluster
from wire.messages import Update
from wire.records import ClusterInfo, EventInfo, JobInfo, MetricRow, RecoveryInfo

TICK_S = 0.25


class DemoSeed:
    """A ``SeedClient``, as far as the endpoint uses one.

    Attributes:
        told: job and verb of each request to a job.
        fetched: ``after_step`` of each request for metrics.
    """

    def __init__(self, peers: int) -> None:
        self.demo = DemoCluster(peers, serving=True)
        self.told: list[tuple[str, str]] = []
        self.fetched: list[int] = []
        self._news: asyncio.Queue[Update | None] = asyncio.Queue()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[DemoSeed]:
        self._news = asyncio.Queue()
        everything = [update for update in self.demo.everything() if update.topic != "metrics"]
        for update in sorted(everything, key=lambda update: update.topic == "events"):  # as a seed: the log is last
            self._news.put_nowait(update)
        yield copy.copy(self)  # another connection is another client

    def tick(self) -> None:
        """One more step."""
        for update in self.demo.tick():
            self._news.put_nowait(update)

    def lose(self) -> None:
        """The connection between the endpoint and the seed ends."""
        self._news.put_nowait(None)

    async def request(self, method: str) -> dict[str, Any]:
        assert method == "subscribe"
        return {}

    async def updates(self) -> AsyncIterator[Update]:
        while (update := await self._news.get()) is not None:
            yield update
        raise ConnectionLost("the seed is gone")

    async def cluster(self) -> ClusterInfo:
        return self.demo.cluster()

    async def job(self, job: str) -> tuple[JobInfo, str]:
        return next(item for item in [self.demo.job(), *self.demo.other_jobs()] if item.id == job), "{}"

    async def tell_job(self, job: str, verb: str) -> str:
        self.told.append((job, verb))
        self.demo.state = {"pause": "paused", "resume": "running", "cancel": "cancelled"}.get(verb, self.demo.state)
        self._news.put_nowait(Update("jobs", [self.demo.job().to_map()]))
        return job

    async def metrics(self, job: str, after_step: int, limit: int) -> list[MetricRow]:
        self.fetched.append(after_step)
        last = min(self.demo.step, after_step + limit) if job == "j1" else 0
        return [self.demo.row(step) for step in range(max(1, after_step + 1), last + 1)]

    async def recoveries(self, job: str, limit: int) -> list[RecoveryInfo]:
        return self.demo.recoveries() if job == "j1" else []

    async def events(self, after_id: int, limit: int) -> list[EventInfo]:
        return [event for event in self.demo.events() if event.id > after_id]


@asynccontextmanager
async def endpoint(seed: DemoSeed, sock: socket.socket) -> AsyncIterator[str]:
    """Answer HTTP while the body runs. Yields the address."""

    async def refuse(*given: Any) -> str:
        raise ConnectionLost("the demo creates no jobs")

    def connect() -> AbstractAsyncContextManager[Any]:
        return seed.connect()

    feed, beside, experiments = Feed(connect), Background(), Experiments(Path("nowhere"), connect)
    experiments.infos["rates"] = ExperimentInfo("rates", "running", 5, 12, "lr=0.01, repeat 2: step 40 of 100", 420.0)
    beside.start(feed.run(), "web feed")
    app = WebApp(feed, refuse, experiments)
    try:
        async with serving(app, sock, websockets=True):
            host, port = sock.getsockname()[:2]
            yield f"http://{host}:{port}"
            app.stop()
    finally:
        await beside.stop()


async def _show(peers: int, port: int) -> None:
    seed = DemoSeed(peers)
    async with endpoint(seed, socket.create_server(("127.0.0.1", port))) as address:
        print(address)
        while True:
            await asyncio.sleep(TICK_S)
            seed.tick()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.roles.web.demo", description="A scripted cluster's page.")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--port", type=int, default=8080)
    arguments = parser.parse_args()
    asyncio.run(_show(arguments.peers, arguments.port))


if __name__ == "__main__":
    main()
