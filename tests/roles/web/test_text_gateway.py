"""The seed's /v1: requests of HTTP clients reach verifiers over ordinary connections, and their answers come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from p2ptrain.core.errors import NetworkError, Refused
from p2ptrain.lab.memory import MemoryNetwork
from roles.http.access import Keys
from roles.http.passed_requests import answer_request
from roles.member import ServingMember
from roles.web.app import LocalRequests, WebApp
from roles.web.endpoints import OPERATE, READ
from roles.web.text_gateway import SLACK, TextGateway, order_verifiers
from tests.roles.in_process import DEADLINE_S, Cluster, Peer
from wire.handshake import dial, local_hello
from wire.http_messages import MOST_HTTP_BYTES, PART_BYTES
from wire.records import ServingInfo
from wire.text_messages import Serving

from .conftest import LOCAL, create

App = Callable[[Scope, Receive, Send], Awaitable[None]]
CHAT = "/v1/chat/completions"
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


class Application:
    """What a verifier's application does in these tests.

    Attributes:
        asked: method, path, query, headers and body of each request.
        held: it waits for ``go`` after so many parts; None: it does not.
        sent: parts that were taken from it.
    """

    def __init__(self, *parts: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.parts, self.status, self.headers = parts, status, headers or {"content-type": "application/json"}
        self.asked: list[tuple[str, str, str, dict[str, str], bytes]] = []
        self.held: int | None = None
        self.fails: Exception | None = None
        self.sent = 0
        self.waits, self.go, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append((scope["method"], scope["path"], scope["query_string"].decode(), headers, body))
        try:
            await self._hold(0)
            encoded = [(name.encode(), value.encode()) for name, value in self.headers.items()]
            await send({"type": "http.response.start", "status": self.status, "headers": encoded})
            for number, part in enumerate(self.parts, 1):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self.sent = number
                await self._hold(number)
            if self.fails is not None:
                raise self.fails
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _hold(self, number: int) -> None:
        if number == self.held:
            self.waits.set()
            await self.go.wait()


class Client:
    """A client of the seed's endpoint, without sockets.

    Attributes:
        body: what has arrived. is_over: whether the answer is complete.
    """

    def __init__(self, app: WebApp) -> None:
        self._app = app
        self._left, self._news = asyncio.Event(), asyncio.Event()
        self.reads, self.waits = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.status, self.headers, self.body, self.is_over = 0, dict[str, str](), b"", False

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in (LOCAL | headers).items()]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": pairs}
        told = [{"type": "http.request", "body": raw}]

        async def receive() -> Any:
            if told:
                return told.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async with asyncio.timeout(DEADLINE_S * 4):
            await self._app(scope, receive, self._take)
        return json.loads(self.body) if self.headers.get("content-type") == "application/json" else self.body

    async def _take(self, message: Any) -> None:
        self.waits.set()
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.is_over = not message.get("more_body")
        self._news.set()

    async def until(self, size_bytes: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.body) < size_bytes:
                self._news.clear()
                await self._news.wait()

    def leave(self) -> None:
        self._left.set()


class Endpoint:
    """A seed whose endpoint is asked, and its verifiers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, seed = cluster, cluster.seeds[-1]
        acceptor = seed.acceptor
        self.gateway = TextGateway(
            seed.overview.serving_infos, lambda info: acceptor.dial(info.host, info.port, info.peer, "http")
        )
        self.make = partial(WebApp, seed.overview, LocalRequests(seed), create)
        self.app = self.make(texts=self.gateway)
        self.members: dict[str, Peer] = {}

    async def serve(self, app: App, *served: Serving, **place: Any) -> str:
        """Start a verifier, and return its name once the seed lists it."""

        async def program(member: ServingMember) -> None:
            member.answer("http", partial(answer_request, app))
            member.serves(lambda: served)
            await asyncio.Event().wait()

        peer = self.cluster.serve("verifier", program, slot=len(self.members) + 1, **place)
        self.members[peer.identity.name] = peer
        async with asyncio.timeout(DEADLINE_S):
            with self.cluster.seeds[-1].overview.watching() as news:
                async for _ in news.rounds():
                    listed = [info.name for info in self.cluster.seeds[-1].overview.serving_infos()]
                    if listed.count(peer.identity.name) == len(served):
                        break
        return peer.identity.name

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[Client, Any]:
        client = Client(self.app)
        return client, await client.ask(method, path, body, **headers)


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    cluster = Cluster(tmp_path, MemoryNetwork(pipe_bytes=PART_BYTES))
    await cluster.start_seed()
    yield Endpoint(cluster)
    await cluster.close()


@asynccontextmanager
async def asking(client: Client, *request: Any) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(client.ask(*request))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield task
    finally:
        task.cancel()


BIG = Serving("org/big", context=4096, stats={"places": 2.0})


async def test_request_passes_unchanged_and_so_does_the_answer(endpoint: Endpoint) -> None:
    text = bytes(range(256)) * 1000
    app = Application(text, b"end", headers={"content-type": "x/y", "p2ptrain-turns-left-out": "2", "set-cookie": "a"})
    name = await endpoint.serve(app, BIG)
    body = json.dumps({"model": "org/big", "messages": [{"content": "é"}]}).encode() + b" " * 3_000_000
    headers = {"content_type": "application/json", "anthropic_version": "7", "cookie": "secret"}
    client, answer = await endpoint.ask("POST", "/v1/some/new path?a=b", body, **headers)
    assert (client.status, answer, client.is_over) == (200, text + b"end", True)
    kept = {"content-type": "application/json", "anthropic-version": "7"}
    assert app.asked == [("POST", "/v1/some/new path", "a=b", kept, body)]
    assert client.headers["p2ptrain-verifier"] == name
    assert client.headers["p2ptrain-turns-left-out"] == "2"
    assert "set-cookie" not in client.headers
    refused, _ = await endpoint.ask("POST", CHAT, b" " * (MOST_HTTP_BYTES + 1))
    assert refused.status == 413


async def test_models_of_all_verifiers_are_listed(endpoint: Endpoint) -> None:
    _, nothing = await endpoint.ask("GET", "/v1/models")
    client, problem = await endpoint.ask("POST", CHAT, {"model": "org/big"})
    assert (nothing["data"], client.status, problem["error"]["code"]) == ([], 503, "no_verifier")
    await endpoint.serve(Application(), BIG, Serving("small", loaded=0.25, stats={"ready_s": 7.4}))
    await endpoint.serve(Application(), BIG, Serving("other", upstream=True))
    _, models = await endpoint.ask("GET", "/v1/models")
    cards = [(card["id"], card["context_length"], card["owned_by"]) for card in models["data"]]
    assert sorted(cards) == [("org/big", 4096, "p2ptrain"), ("other", None, "upstream")]
    assert (await endpoint.ask("GET", "/v1/models/org/big"))[1] in models["data"]
    client, problem = await endpoint.ask("POST", CHAT, {"model": "none"})
    assert (client.status, problem["error"]["code"]) == (404, "model_not_found")
    client, problem = await endpoint.ask("POST", CHAT, {"model": "small"})
    assert (client.status, client.headers["retry-after"]) == (503, "8")
    loading = {name: problem["error"][name] for name in ("code", "state", "percent", "ready_s")}
    assert loading == {"code": "model_loading", "state": "loading", "percent": 25, "ready_s": 7.4}


async def test_errors_have_the_form_of_the_interface(endpoint: Endpoint) -> None:
    _, missing = await endpoint.ask("POST", "/v1/messages", {"model": "claude"})
    assert (missing["type"], missing["error"]["type"]) == ("error", "overloaded_error")
    await endpoint.serve(Application(b"{}"), BIG, Serving("org/slow", loaded=0.5))
    _, missing = await endpoint.ask("POST", "/v1/messages/count_tokens", {"model": "claude"})
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
    _, loading = await endpoint.ask("POST", "/v1/messages", {"model": "org/slow"})
    assert (loading["error"]["type"], loading["error"]["percent"]) == ("overloaded_error", 50)
    endpoint.app = endpoint.make(texts=endpoint.gateway, keys=Keys({"operator-key-operator": OPERATE}))
    _, locked = await endpoint.ask("POST", "/v1/messages", {})
    assert (locked["type"], locked["error"]["type"]) == ("error", "authentication_error")


async def test_slow_client_slows_the_verifier_and_one_that_leaves_ends_the_text(endpoint: Endpoint) -> None:
    app = Application(*[bytes(PART_BYTES)] * 100, headers=EVENTS)
    app.held = 100
    await endpoint.serve(app, BIG)
    client = Client(endpoint.app)
    client.reads.clear()
    async with asking(client, "POST", CHAT, {"model": "org/big"}):
        await client.waits.wait()
        for _ in range(5000):  # turns of the loop: far more than all parts would take
            await asyncio.sleep(0)
        assert 0 < app.sent < 80, "at most what the connection's queues hold"
        client.reads.set()
        await app.waits.wait()
        await client.until(100 * PART_BYTES)
        assert not client.is_over
        client.leave()
        await app.left.wait()


async def test_lost_or_busy_verifier_is_replaced_before_the_first_byte(endpoint: Endpoint) -> None:
    dying, busy, good = Application(b"1"), Application(b"2", status=503), Application(b"3")
    dying.held = 0
    names = [await endpoint.serve(app, BIG) for app in (dying, busy, good)]
    beginnings = ({"model": "org/big", "prompt": f"{number}"} for number in range(1000))
    infos = endpoint.gateway._verifiers()
    order = {info.name: number for number, info in enumerate(infos)}
    wanted = next(
        body
        for body in beginnings
        if order_verifiers(infos, lambda info: order[info.name] / 1e3, _digest(body))[0].name == names[0]
    )
    client = Client(endpoint.app)
    async with asking(client, "POST", "/v1/completions", wanted) as task:
        await dying.waits.wait()
        await endpoint.members[names[0]].die()
        await task
    assert (client.body, client.headers["p2ptrain-verifier"]) == (b"3", names[2])


async def test_answer_of_the_last_busy_verifier_passes(endpoint: Endpoint) -> None:
    await endpoint.serve(Application(b"{}", status=503, headers={"retry-after": "9"}), BIG)
    client, _ = await endpoint.ask("POST", CHAT, {"model": "org/big"})
    assert (client.status, client.headers["retry-after"], client.body) == (503, "9", b"{}")


@pytest.mark.parametrize("is_killed", [True, False])
async def test_stream_that_breaks_ends_with_an_error_event(endpoint: Endpoint, is_killed: bool) -> None:
    app = Application(b"data: 1\n\n", headers=EVENTS)
    app.held, app.fails = 1, NetworkError("the workers are gone")
    name = await endpoint.serve(app, BIG)
    client = Client(endpoint.app)
    async with asking(client, "POST", CHAT, {"model": "org/big"}) as task:
        await app.waits.wait()
        if is_killed:
            await endpoint.members[name].die()
        app.go.set()
        await task
    first, event = client.body.split(b"\n\n")[:2]
    problem = json.loads(event.removeprefix(b"event: error\ndata: "))
    assert (first, problem["type"], problem["error"]["code"]) == (b"data: 1", "error", "verifier_lost")
    assert is_killed or "the workers are gone" in problem["error"]["message"]
    assert client.is_over


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer read-key-read-key"}, 403),
        ({"authorization": "Bearer operator-key-operator"}, 200),
        ({"x_api_key": "operator-key-operator"}, 200),
        ({"authorization": "Bearer operator-key-operator", "origin": "https://evil.example"}, 403),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/models"])
async def test_only_the_operator_key_writes(
    endpoint: Endpoint, path: str, headers: dict[str, str], status: int
) -> None:
    await endpoint.serve(Application(b"{}"), BIG)
    keys = Keys({"read-key-read-key": READ, "operator-key-operator": OPERATE})
    endpoint.app = endpoint.make((), keys, texts=endpoint.gateway)
    client, _ = await endpoint.ask("GET" if path == "/v1/models" else "POST", path, None, **headers)
    assert client.status == status


async def test_only_the_seed_passes_requests_on_also_to_a_verifier_behind_a_router(tmp_path: Path) -> None:
    network = MemoryNetwork()
    network.closed.add("home")
    cluster = Cluster(tmp_path, network, host="seed", encrypted=True)
    await cluster.start_seed()
    try:
        endpoint = Endpoint(cluster)
        near, far = Application(b"1"), Application(b"2")
        await endpoint.serve(near, Serving("near"), host="vps")
        await endpoint.serve(far, Serving("far"), host="home")
        assert (await endpoint.ask("POST", CHAT, {"model": "near"}))[0].body == b"1"
        assert (await endpoint.ask("POST", CHAT, {"model": "far"}))[0].body == b"2"
        [info] = [info for info in endpoint.gateway._verifiers() if info.model == "near"]
        operator = await cluster.member(cluster.ticket("operator"), "0123456789ab", network.at("vps"))
        hello = local_hello(peer_id="0123456789ab", name="x", roles=[], purpose="http")
        with pytest.raises(Refused) as caught:
            await dial(operator.network, "vps", info.port, hello, timeout_s=5, expect_peer=info.peer)
        assert caught.value.code == "not-permitted"
    finally:
        await cluster.close()


def _digest(body: dict[str, Any]) -> bytes:
    from roles.web.text_gateway import read_beginning

    return read_beginning(json.dumps(body).encode())[1]


def info(name: str) -> ServingInfo:
    return ServingInfo(id=f"{name}/m", peer=name, name=name, role="verifier", host="h", port=1, model="m")


def test_conversation_keeps_its_verifier_while_that_is_not_much_busier() -> None:
    found, turns = [info(name) for name in "abcdef"], [{"content": "be kind"}, {"content": "hi"}]
    early, late = _digest({"messages": turns}), _digest({"messages": [*turns, {"content": "more"}]})
    own = order_verifiers(found, lambda info: 0.0, early)[0]
    assert order_verifiers(found, lambda info: SLACK * (info is own), late)[0] is own
    assert order_verifiers(found, lambda info: 1.1 * SLACK * (info is own), late)[0] is not own
    others = [info for info in found if info is not own]
    moved = [order_verifiers(others, lambda info: 0.0, _digest({"prompt": str(n)}))[0] for n in range(200)]
    before = [order_verifiers(found, lambda info: 0.0, _digest({"prompt": str(n)}))[0] for n in range(200)]
    assert all(now is then or then is own for now, then in zip(moved, before, strict=True))
    assert {info.name for info in before} == set("abcdef"), "they share the conversations"


def test_beginning_of_any_body_is_read() -> None:
    from roles.web.text_gateway import read_beginning

    for body in (b"", b"[]", b"{", b'{"model": 5}', b'{"messages": 1' + b"0" * 5000 + b"}"):
        assert read_beginning(body)[0] == ""
    for depth in range(900, 1000):
        read_beginning(b'{"model": "m", "messages": ' + b"[" * depth + b"]" * depth + b"}")
