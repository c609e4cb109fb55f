"""The seed's HTTP endpoint over the scripted cluster of tests/tui/demo.py.

python -m tests.roles.web.demo --peers 32 --port 8080     look at the page
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

from p2ptrain.core.errors import ConnectionLost
from p2ptrain.lab.experiments.endpoints import ExperimentInfo, Experiments
from roles.http.server import serving
from roles.seed.events import STATE_TOPICS, Announcements, Subscription
from roles.web.app import WebApp
from tests.tui.demo import DemoCluster
from wire.messages import Update
from wire.records import TOPICS, EventInfo, JobInfo, MetricRow, RecoveryInfo

TICK_S = 0.25


class FeedSeed:
    """A seed as far as a stream uses it. ``records``: topic → id → record of state."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, dict[str, Any]]] = {topic: {} for topic in STATE_TOPICS}
        self.announcements = Announcements(
            MagicMock(), MagicMock(), lambda topic, ident: self.records[topic].get(ident)
        )

    def put(self, topic: str, item: dict[str, Any]) -> None:
        self.records[topic][str(item.get("id"))] = item
        self.announcements.touch(topic, str(item.get("id")))

    @contextmanager
    def watching(self) -> Iterator[Subscription]:
        with self.announcements.subscribe() as news:
            for topic, records in self.records.items():
                news.touch(topic, records)
            yield news


class DemoSeed(FeedSeed):
    """A seed, and the requests to it, as far as the endpoint uses them.

    Attributes:
        told: job and verb of each request to a job.
        created: jobs that were asked for; none is made.
        fetched: ``after_step`` of each request for metrics.
    """

    def __init__(self, peers: int) -> None:
        super().__init__()
        self.demo = DemoCluster(peers, serving=True)
        self.told: list[tuple[str, str]] = []
        self.fetched: list[int] = []
        self.created = 0
        self._take(self.demo.everything())

    def _take(self, updates: list[Update]) -> None:
        for update in updates:
            for item in update.items:
                if update.topic in STATE_TOPICS:
                    self.put(update.topic, item)
                elif kind := TOPICS.get(update.topic):
                    self.announcements.add(cast(Any, kind.from_map_untrusted(item)))

    def tick(self) -> None:
        """One more step."""
        self._take(self.demo.tick())

    def lose(self) -> None:
        """The streams end, as those of a seed that stops."""
        self.announcements.end(ConnectionLost("the seed is gone"))

    def job_infos(self) -> list[JobInfo]:
        return [self.demo.job(), *self.demo.other_jobs()]

    async def watch_link(self) -> str:
        return "https://192.168.1.20:8443/#key=look"

    async def job(self, job: str) -> tuple[JobInfo, str]:
        return next(item for item in self.job_infos() if item.id == job), "{}"

    async def tell_job(self, job: str, verb: str) -> str:
        self.told.append((job, verb))
        self.demo.state = {"pause": "paused", "resume": "running", "cancel": "cancelled"}.get(verb, self.demo.state)
        self._take([Update("jobs", [self.demo.job().to_map()])])
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

    async def create(*given: Any) -> str:
        seed.created += 1
        return "j1"

    experiments = Experiments(Path("nowhere"), cast(Any, None))
    experiments.infos["rates"] = ExperimentInfo("rates", "running", 5, 12, "lr=0.01, repeat 2: step 40 of 100", 420.0)
    app = WebApp(cast(Any, seed), cast(Any, seed), create, experiments.endpoints())
    async with serving(app, sock, websockets=True):
        host, port = sock.getsockname()[:2]
        yield f"http://{host}:{port}"
        app.stop()


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
