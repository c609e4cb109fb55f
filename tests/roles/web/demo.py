"""The seed's HTTP endpoint over the scripted cluster of tests/tui/demo.py.

python -m tests.roles.web.demo --peers 32 --port 8080     look at the page
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from p2ptrain.core.errors import ConnectionLost
from p2ptrain.lab.experiments.endpoints import ExperimentInfo, Experiments
from roles.http.answers import Delivery, JsonApp, Problem, json_bytes, json_response, send_head, send_part
from roles.http.server import serving
from roles.seed.events import STATE_TOPICS, Announcements, Subscription
from roles.web.app import WebApp
from tests.tui.demo import DemoCluster
from wire.messages import Update
from wire.records import TOPICS, EventInfo, JobInfo, MetricRow, RecoveryInfo

TICK_S = 0.25
PIECE_S = 0.03
ANSWER = """\
A ring sums gradients in **two rounds**; each member sends `2 (n - 1) / n` of them. <img src=x onerror=alert(1)>

| round | what a member has then | sent |
|---|---|---:|
| reduce-scatter | the sum of one *part* | (n - 1) / n |
| all-gather | the sum of all parts | (n - 1) / n |

1. Cut the gradient into `n` parts.
2. Send a part to the right, add what comes from the left.

```python
def neighbours(rank: int, size: int) -> tuple[int, int]:
    return (rank - 1) % size, (rank + 1) % size  # of a ring
```

More is in [the paper](https://example.org/ring), nothing [here](javascript:alert(1)).
"""


class FeedSeed:
    """A seed as far as a stream uses it. ``records``: topic → id → record of state."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, dict[str, Any]]] = {topic: {} for topic in STATE_TOPICS}
        self.announcements = Announcements(
            MagicMock(), MagicMock(), lambda topic, ident: self.records[topic].get(ident), lambda event: None
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


class DemoModels(JsonApp):
    """Models that verifiers serve, at ``/v1``. They write ``ANSWER`` word by word.

    Attributes:
        asked: the bodies of the requests.
        loads: percent of a model that loads, for each of the next requests.
        left: set when a client has left before the end.
        refusal: the answer to every request, if it is not None.
    """

    def __init__(self, pause: Callable[[], Awaitable[object]]) -> None:
        """``pause``: awaited between words."""
        self._pause = pause
        self.asked: list[dict[str, Any]] = []
        self.loads: list[float] = []
        self.left = asyncio.Event()
        self.refusal: Problem | None = None
        write = Route("/v1/chat/completions", self._write, methods=["POST"])
        super().__init__([Route("/v1/models", self._models), write], lambda error: Problem(500, error.message))

    def let_in(self, asked: HTTPConnection) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [{"id": "code-400m"}, {"id": "llama-3.2-3b"}]})

    async def _write(self, request: Request) -> Response | Delivery:
        if self.loads:
            problem = Problem(503, "vera cannot write with code-400m yet", code="model_loading").as_json()
            problem["error"] |= {"state": "loading", "percent": self.loads.pop(0), "ready_s": 20.0}
            return json_response(problem, status=503, headers={"retry-after": "1"})
        self.asked.append(await request.json())
        return Delivery(self._send, self, lambda problem: b"")

    async def _send(self, send: Send) -> None:
        try:
            await send_head(send, 200, {"content-type": "text/event-stream", "p2ptrain-verifier": "vera"})
            async for event in self.events():
                await send_part(send, b"data: " + json_bytes(event) + b"\n\n")
            await send_part(send, b"data: [DONE]\n\n", more=False)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        words = ANSWER.split(" ")
        for index, word in enumerate(words):
            if index:
                await self._pause()
            before = "" if index else "\n    "  # as small models begin
            yield {"choices": [{"delta": {"content": before + word + " " * (index < len(words) - 1)}}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2 * len(words)}}


class _DemoApp(WebApp):
    models: DemoModels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").startswith("/v1/"):
            await self.models(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def stop(self) -> None:
        super().stop()
        self.models.stop()


@asynccontextmanager
async def endpoint(seed: DemoSeed, sock: socket.socket, models: DemoModels | None = None) -> AsyncIterator[str]:
    """Answer HTTP while the body runs. Yields the address."""

    async def create(*given: Any) -> str:
        seed.created += 1
        return "j1"

    experiments = Experiments(Path("nowhere"), cast(Any, None))
    experiments.infos["rates"] = ExperimentInfo("rates", "running", 5, 12, "lr=0.01, repeat 2: step 40 of 100", 420.0)
    app = _DemoApp(cast(Any, seed), cast(Any, seed), create, experiments.endpoints())
    app.models = models or DemoModels(lambda: asyncio.sleep(PIECE_S))
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
