"""An endpoint on the loopback for the tests of a module, and OpenAI's client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from p2ptrain.core.world import real_world
from p2ptrain.lab.memory import MemoryNetwork
from roles.verifier.http_app import serving_http

from .scripted import ScriptedService

if TYPE_CHECKING:
    from openai import AsyncOpenAI

PATIENCE_S = 20.0
KEY = "correct-horse-battery-staple"


@dataclass
class Endpoint:
    """Attributes:
    mistakes: what the loop's exception handler was told.
    other: of another model.
    """

    service: ScriptedService
    host: str
    port: int
    client: AsyncOpenAI
    mistakes: list[dict[str, Any]]
    other: ScriptedService = field(default_factory=lambda: ScriptedService("other"))

    async def raw(self, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body that a connection brings, which is read to its end."""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(sent)
                answer = await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, body

    async def post(self, path: str, body: bytes, *headers: str) -> tuple[int, dict[str, str], bytes]:
        return await self.raw(request("POST", path, f"Content-Length: {len(body)}", *headers) + body)


def request(method: str, path: str, *headers: str, host: str = "127.0.0.1") -> bytes:
    """A request's head, of a client that closes."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Endpoint]:
    from openai import AsyncOpenAI

    service, other, mistakes = ScriptedService(), ScriptedService("other"), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: mistakes.append(context))
    async with serving_http([service, other], "127.0.0.1", 0, world=real_world(MemoryNetwork())) as (host, port):
        url = f"http://{host}:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield Endpoint(service, host, port, client, mistakes, other)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded() -> AsyncIterator[Endpoint]:
    """Everywhere, with a key."""
    from openai import AsyncOpenAI

    service = ScriptedService()
    async with serving_http([service], "0.0.0.0", 0, KEY, world=real_world(MemoryNetwork())) as (_, port):
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
            yield Endpoint(service, "127.0.0.1", port, client, [])


@pytest.fixture
def endpoint(served: Endpoint) -> Iterator[Endpoint]:
    """As if new; no mistake is made meanwhile, but for those that a test takes out."""
    served.service.begin_anew()
    served.other.begin_anew()
    yield served
    assert served.mistakes == []
    assert all(writing.closed.is_set() for writing in served.service.writings)
