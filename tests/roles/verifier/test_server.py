"""A verifier over the wire: its clients get their texts, and what they do harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import (
    ConnectionLost,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
    ResourceError,
    UserError,
)
from p2ptrain.core.serving import Sampling, SamplingOptions
from p2ptrain.core.world import real_world
from p2ptrain.lab.memory import MemoryNetwork
from roles.http import passed_requests
from roles.http.passed_requests import answer_request
from roles.line import Line
from roles.serving.texts import TextRequest
from roles.serving.worker_peer import ClientContext
from roles.verifier import server as server_module
from roles.verifier.client import RemoteText, VerifierClient
from roles.verifier.server import encode_question, request_untrusted, text_app
from roles.verifier.service import ModelTextService
from tests.roles.verifier.doubles import ScriptedTarget, connected_drafters, failing_at, reference, service, text_of
from wire import text_messages as wire
from wire.connection import Connection
from wire.handshake import dial, local_hello, local_welcome, serve
from wire.http_messages import MOST_HTTP_BYTES, HttpPart, HttpRequest
from wire.messages import Hello, KeepAlive, Request, Welcome
from wire.records import ServingInfo
from wire.text_messages import TextNews

pytestmark = pytest.mark.virtual_time

PROMPT = "def f(x):"
ID = "0" * 32
PORT = 5000
AT = ServingInfo(
    id=f"{ID}/stand-in",
    peer=ID,
    name="big one",
    role="verifier",
    host="verifier",
    port=PORT,
    model="stand-in",
    context=600,
)


@dataclass
class Scene:
    network: MemoryNetwork
    target: ScriptedTarget
    service: ModelTextService
    problems: list[P2PTrainError] = field(default_factory=list)

    def client(self, host: str = "client", model: str = AT.model) -> VerifierClient:
        context = ClientContext(real_world(self.network.at(host)), "1" * 32, host, "seed")
        return VerifierClient(context, replace(AT, model=model))

    async def raw(self, request: TextRequest | None = None) -> Connection:
        """A connection that says what a test says."""
        hello = local_hello(peer_id="2" * 32, name="odd", roles=["operator"], purpose="generate")
        connection, _ = await dial(self.network.at("odd"), "verifier", PORT, hello, timeout_s=5)
        if request is not None:
            _send_question(connection, *encode_question(AT.model, request))
        return connection


def _send_question(connection: Connection, question: HttpRequest, body: bytes) -> None:
    connection.send(question)
    connection.send_bulk(memoryview(body), generation=0, stream=0)


@asynccontextmanager
async def verifier(directory: Path, **options: Any) -> AsyncIterator[Scene]:
    network = MemoryNetwork(pipe_bytes=4096)
    target = options.pop("target", None) or ScriptedTarget()
    made = service(directory, target, options.pop("drafters", None), network=network, **options)
    scene = Scene(network, target, made)

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id=ID, name="big one", wall=0.0)

    server = await serve(
        network.at("verifier"),
        "0.0.0.0",
        PORT,
        decide=decide,
        serve=partial(answer_request, text_app([made])),
        on_problem=lambda problem, _: scene.problems.append(problem),
    )
    try:
        yield scene
    finally:
        await server.close()
        await made.close()
    assert not target.open_now
    assert made.sessions == 0


@pytest.fixture(autouse=True)
async def nothing_fails_unheard() -> AsyncIterator[None]:
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    yield
    assert not wrong, wrong


async def read(text: RemoteText) -> tuple[str, tuple[int, ...]]:
    said, tokens = "", tuple[int, ...]()
    async for piece in text:
        said += piece.text
        tokens += piece.tokens
    return said, tokens


def wish(tokens: int | None = 40, **more: Any) -> TextRequest:
    return TextRequest(prompt=more.pop("prompt", PROMPT), max_new_tokens=tokens, **more)


@pytest.mark.parametrize("at_once", [server_module.MOST_AT_ONCE, 1])
async def test_a_text_arrives_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(server_module, "MOST_AT_ONCE", at_once)
    async with connected_drafters() as (drafters, _), verifier(tmp_path, drafters=drafters) as there:
        client = there.client()
        text = await client.write(wish(sampling=SamplingOptions(temperature=0.8, seed=3)))
        assert text.prompt_tokens == len(PROMPT)
        said, tokens = await read(text)
        assert tokens == reference(PROMPT, 40, Sampling(0.8, 50, 1.0, 3))
        assert said == text_of(tokens)
        assert text.ended == "length"
        assert text.stats()["tokens"] == 40
        assert text.stats()["drafters"][0]["peer_id"] == "d1"


async def test_question_for_another_model_is_refused(tmp_path: Path) -> None:
    async with verifier(tmp_path) as there:
        client = there.client(model="other")
        with pytest.raises(UserError) as refused:
            await client.write(wish())
        assert refused.value.message == "big one: the model other is not served here"
        assert refused.value.remedy == "name one of stand-in"
        assert not there.target.runs


async def _read_of(client: VerifierClient, wanted: TextRequest) -> tuple[str, tuple[int, ...]]:
    return await read(await client.write(wanted))


async def test_a_closed_text_is_cancelled(tmp_path: Path) -> None:
    async with verifier(tmp_path, sessions=1) as there:
        client = there.client()
        text = await client.write(wish(500))
        await anext(text)
        await text.close()
        assert (await _read_of(client, wish()))[1] == reference(PROMPT, 40)
        assert len(there.target.runs) < 100
        # One that waits for its turn, and one that nobody reads.
        first = await client.write(wish(400))
        waiting = asyncio.create_task(client.write(wish()))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await first.close()
        assert (await _read_of(client, wish()))[1] == reference(PROMPT, 40)


@pytest.mark.parametrize("how", ["close", "abort", "silence"])
async def test_the_texts_of_a_client_that_leaves_end(tmp_path: Path, how: str) -> None:
    slow = ScriptedTarget(pass_s=0.5)
    async with (
        connected_drafters() as (drafters, (host,)),
        verifier(tmp_path, target=slow, drafters=drafters, sessions=2) as there,
    ):
        client = there.client()
        texts = [await client.write(wish(580)) for _ in range(2)]
        waiting = asyncio.create_task(client.write(wish()))
        await asyncio.sleep(0.3)
        match how:
            case "close":
                waiting.cancel()
                for text in texts:
                    await text.close()
            case "abort":
                waiting.cancel()
                for text in texts:
                    text._connection.abort()
            case "silence":
                there.network.silence("client", "verifier")
        await asyncio.sleep(30)
        assert there.service.sessions == 0
        assert not host.drafter.sessions
        assert not there.target.open_now
        with pytest.raises(asyncio.CancelledError if how != "silence" else NetworkError):
            await waiting
        if how != "close":
            with pytest.raises(NetworkError, match="lost in the middle"):
                await read(texts[0])


async def test_a_slow_reader_gets_its_text_and_delays_no_other(tmp_path: Path) -> None:
    async with verifier(tmp_path) as there:
        slow, other = await there.raw(wish(400)), there.client()
        line, data = Line(slow), [b""]
        async with line.keep_alive():  # it says so, and reads nothing yet
            assert (await _read_of(other, wish(300)))[1] == reference(PROMPT, 300)
            assert len(there.target.runs) < 600
            is_last = False
            while not is_last:
                part = (await line.receive()).message
                assert isinstance(part, HttpPart)
                data.append(part.data)
                is_last = part.is_last
        news = [TextNews.from_map_untrusted(msgpack.unpackb(each)) for each in data if each]
        assert [token for each in news for token in each.tokens] == list(reference(PROMPT, 400))


async def test_a_client_that_reads_nothing_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_requests, "READ_S", 20.0)

    async with verifier(tmp_path, target=ScriptedTarget(pass_s=0.001)) as there:
        stuck = await there.raw(wish(580))
        for _ in range(100):  # it says that it lives, and reads nothing
            await asyncio.sleep(2)
            if stuck.closed.is_set():
                break
            stuck.send(KeepAlive())
        assert stuck.closed.is_set()
        assert there.service.sessions == 0
        stuck.abort()


async def test_a_refusal_keeps_its_class(tmp_path: Path) -> None:
    async with verifier(tmp_path, positions=100, sessions=1, waiting=0) as there:
        client = there.client()
        for wrong, kind in (
            (wish(prompt=""), UserError),
            (wish(400), UserError),
            (TextRequest(turns=(Turn("judge", "no"),)), UserError),
            (wish(prompt="x" * (MOST_HTTP_BYTES + 1)), UserError),
        ):
            with pytest.raises(kind):
                await client.write(wrong)
        text = await client.write(wish(90))
        with pytest.raises(Refused, match="the verifier is busy"):
            await client.write(wish())
        await text.close()


@pytest.mark.parametrize("kind", [ResourceError, ConnectionLost])
async def test_a_model_that_fails_in_mid_text(tmp_path: Path, kind: type[P2PTrainError]) -> None:
    problem = kind("it cannot go on", remedy="wait")
    async with verifier(tmp_path, target=ScriptedTarget(before=failing_at(5, problem))) as there:
        client = there.client()
        text = await client.write(wish())
        with pytest.raises(P2PTrainError, match="it cannot go on") as raised:
            await read(text)
        assert raised.value.message == "big one: it cannot go on (after 5 tokens of the text)"
        assert raised.value.exit_code == problem.exit_code
        assert raised.value.remedy == "wait"


async def test_a_verifier_that_is_lost_in_mid_text(tmp_path: Path) -> None:
    async with verifier(tmp_path) as there:
        client = there.client()
        text = await client.write(wish(500))
        for _ in range(11):
            await anext(text)
        there.network.cut("client", "verifier")
        with pytest.raises(NetworkError, match=r"lost in the middle of a text: .*; 11 tokens"):
            await anext(text)
        with pytest.raises(NetworkError):
            await client.write(wish())


def test_priority_and_time_to_try_again_reach_the_other_side() -> None:
    ask, data = encode_question("stand-in", wish(4, priority=-3))
    assert (ask.size_bytes, request_untrusted(data).priority) == (len(data), -3)
    told = wire.error_untrusted(wire.encode_refusal(Refused("busy", "too busy", retry_after_s=17)))
    assert isinstance(told, Refused)
    assert told.retry_after_s == 17


def _question(**changed: Any) -> bytes:
    packed: bytes = msgpack.packb(asdict(wish()) | changed)
    return packed


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": "x" * MOST_HTTP_BYTES},
        {"turns": (Turn("user", "x"),) * 1025},
        {"stop": ("x",) * 17},
        {"stop": ("",)},
        {"max_new_tokens": 0},
        {"grammar": "start: /x/"},
        {"logprobs": 1},
        {"prompt_logprobs": True},
        {"prompt": "half of a character: \ud83d"},
        {"max_new_tokens": 1 << 64},
        {"turns": (Turn("assistant", "", "[{"), Turn("tool", "x"))},
    ],
)
def test_a_question_beyond_the_limits_is_not_sent(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the question is not valid"):
        encode_question("stand-in", replace(wish(), **changed))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        _question(prompt=5),
        _question(sampling=asdict(SamplingOptions()) | {"temperature": float("nan")}),
        _question(ids=[-1]),
    ],
)
async def test_an_invalid_question_is_refused(tmp_path: Path, data: bytes) -> None:
    async with verifier(tmp_path) as there:
        odd = await there.raw()
        text = await there.client().write(wish())
        _send_question(odd, HttpRequest("POST", "/", size_bytes=len(data), model=AT.model), data)
        answer = await odd.expect(wire.StreamRefused, timeout_s=20)
        assert answer.code == "protocol-error"
        assert (await read(text))[1] == reference(PROMPT, 40)
        odd.abort()


async def test_another_message_than_a_question_ends_the_connection(tmp_path: Path) -> None:
    async with verifier(tmp_path) as there:
        odd = await there.raw()
        odd.send(Request(1, "peers.list", {}))
        await asyncio.sleep(3)
        assert odd.closed.is_set()
        assert isinstance(there.problems[-1], ProtocolError)
        odd.abort()


async def test_a_bulk_frame_that_nobody_announced_is_not_taken(tmp_path: Path) -> None:
    async with verifier(tmp_path) as there:
        odd = await there.raw()
        odd.send_bulk(memoryview(bytes(1 << 20)), generation=0, stream=7)
        await asyncio.sleep(30)
        assert odd.closed.is_set()
        odd.abort()
