"""The HTTP API of a cluster in this process, asked without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from configs.schema import Profile
from p2ptrain.lab.experiments.endpoints import Experiments
from p2ptrain.lab.memory import MemoryNetwork
from roles.web.app import LocalRequests, WebApp
from tests.roles.in_process import DEADLINE_S, Cluster
from wire.client import SeedRequests

LOCAL = {"host": "127.0.0.1"}


async def create(client: SeedRequests, name: str, label: str, profile: Profile) -> str:
    return await client.create_job(name, label, profile.to_spec())


@dataclass
class Api:
    cluster: Cluster
    experiments: Experiments
    app: WebApp

    async def ask(
        self, method: str, path: str, said: Any = None, headers: dict[str, str] = LOCAL
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, content and headers of an answer. ``path`` may have a query; ``said`` is sent as JSON."""
        body = said if isinstance(said, bytes) else b"" if said is None else json.dumps(said).encode()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path if path.startswith("/") else f"/api/v1/{path}",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        sent: list[Any] = []
        told = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return told.pop() if told else await asyncio.Event().wait()  # it stays

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(DEADLINE_S):
            await self.app(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in sent)
        given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        is_json = given.get("content-type") == "application/json"
        return sent[0]["status"], json.loads(content) if is_json else content.decode("latin-1"), given

    async def done(self, method: str, path: str, said: Any = None, status: int = 200) -> Any:
        given, content, _ = await self.ask(method, path, said)
        assert given == status, content
        return content

    async def until(self, path: str, fits: Any) -> Any:
        """Ask until the answer fits; something changes meanwhile."""
        content = None
        async with asyncio.timeout(DEADLINE_S):
            with self.cluster.seeds[-1].overview.watching() as news:
                async for changes in news.rounds():
                    list(changes)
                    if fits(content := await self.done("GET", path)):
                        break
        return content


@asynccontextmanager
async def api_of(root: Path, *, encrypted: bool = False) -> AsyncIterator[Api]:
    cluster = Cluster(root, MemoryNetwork(), encrypted=encrypted)
    await cluster.start_seed()
    experiments = Experiments(root / "experiments", cluster.operator)
    app = app_of(cluster, experiments)
    try:
        async with experiments.serving():
            yield Api(cluster, experiments, app)
    finally:
        app.stop()
        await cluster.close()


def app_of(cluster: Cluster, experiments: Experiments, *access: Any) -> WebApp:
    seed = cluster.seeds[-1]
    return WebApp(seed.overview, LocalRequests(seed), create, experiments.endpoints(), *access)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with api_of(tmp_path_factory.mktemp("seed")) as made:
        yield made
