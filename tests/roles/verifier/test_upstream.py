"""A verifier without a model: requests go to an existing server, and come back as that server answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from p2ptrain.core.errors import NetworkError
from roles.verifier.upstream import UpstreamServer

CARDS = [{"id": "org/big", "max_model_len": 4096, "owned_by": "vllm"}, {"id": "tiny"}]


class Double:
    """The existing server, and what it was asked. ``answer``: to what is no list of models."""

    def __init__(self) -> None:
        self.asked: list[httpx2.Request] = []
        self.answer: Callable[[], httpx2.Response] = lambda: httpx2.Response(200)
        self.listed: httpx2.Response | None = httpx2.Response(200, json={"object": "list", "data": CARDS})
        self.news: list[tuple[str, str]] = []
        self.told = asyncio.Event()

    async def serve(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        if request.url.path != "/base/v1/models":
            return self.answer()
        if self.listed is None:
            raise httpx2.ConnectError("refused")
        return self.listed

    def notify(self, level: str, kind: str, text: str) -> None:
        self.news.append((level, text))
        self.told.set()

    def server(self) -> UpstreamServer:
        return UpstreamServer("http://there/base", "its key", self.notify, httpx2.MockTransport(self.serve))


async def called(server: UpstreamServer, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []
    headers = [(b"content-type", b"application/json"), (b"cookie", b"1")]
    at = {"path": "/v1/x", "raw_path": b"/v1/x", "query_string": b"a=b"}
    scope = {"type": "http", "method": "POST", **at, "headers": headers, "state": {"model": "tiny"}}

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await server(scope, receive, send)
    answered = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    assert not sent[-1]["more_body"]
    return sent[0]["status"], answered, b"".join(message["body"] for message in sent[1:])


@pytest.mark.parametrize("status", [200, 400, 429])
async def test_request_passes_with_the_key_of_the_server_and_any_answer_comes_back(status: int) -> None:
    double = Double()
    double.answer = lambda: httpx2.Response(status, headers={"content-type": "text/event-stream"}, content=b"data: 1")
    server = double.server()
    assert await called(server, b'{"model": "tiny"}') == (
        status,
        {"content-type": "text/event-stream", "content-length": "7"},
        b"data: 1",
    )
    [request] = double.asked
    assert (request.method, str(request.url)) == ("POST", "http://there/base/v1/x?a=b")
    assert request.content == b'{"model": "tiny"}'
    headers = {name: request.headers.get(name) for name in ("authorization", "content-type", "cookie")}
    assert headers == {"authorization": "Bearer its key", "content-type": "application/json", "cookie": None}
    await server.aclose()


async def test_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Double()

    def refuse() -> httpx2.Response:
        raise httpx2.ConnectError("all attempts failed")

    double.answer = refuse
    server = double.server()
    with pytest.raises(NetworkError, match="the server http://there/base does not answer: all attempts failed"):
        await called(server)
    await server.aclose()


@pytest.mark.virtual_time
async def test_models_are_listed_again_and_are_away_with_their_server() -> None:
    double = Double()
    server = double.server()
    looking = asyncio.create_task(server.look())
    states: list[list[tuple[str, int, bool, bool]]] = []
    for listed in (
        double.listed,
        None,
        httpx2.Response(200, json={"data": "?"}),
        httpx2.Response(200, json={"data": []}),
    ):
        double.listed = listed
        await double.told.wait()
        double.told.clear()
        states.append([(each.model, each.context, each.upstream, each.is_ready) for each in server.describe()])
    looking.cancel()
    assert states[0] == [("org/big", 4096, True, True), ("tiny", 0, True, True)]
    assert states[1:] == [[(*facts[:3], False) for facts in states[0]]] * 3
    levels, texts = zip(*double.news, strict=True)
    assert levels == ("info", "warning", "warning", "warning")
    assert sum("does not answer" in text for text in texts) == 1
    await server.aclose()
