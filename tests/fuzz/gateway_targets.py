"""HTTP requests between a seed and a verifier, and the list of models of an existing server."""

from __future__ import annotations

import json
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any

from hypothesis import strategies as st

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.lab.memory import MemoryNetwork
from roles.http.passed_requests import pass_request, scope_untrusted
from roles.verifier.upstream import read_models_untrusted
from wire import http_messages as wire
from wire.connection import Connection
from wire.handshake import dial, local_hello, local_welcome, serve
from wire.messages import Hello, Message, Welcome
from wire.schema import instance_untrusted
from wire.text_messages import Serving, StreamRefused

from .engine import send_if_valid, target
from .strategies import TEXT, WHOLE, made, mostly

PORT = 5000
_REQUEST = made(
    wire.HttpRequest,
    method=st.sampled_from(["GET", "POST"]) | TEXT,
    target=st.sampled_from(["/v1/models", "/v1/%ff%00?a=%", "//", "/?"]) | TEXT,
    headers=st.dictionaries(st.sampled_from(["accept", "content-type", "x y"]) | TEXT, TEXT, max_size=3),
    size_bytes=mostly(st.just(0), WHOLE),
)


@target("http-requests", _REQUEST, "roles.http.passed_requests.scope_untrusted")
def _check_request(request: wire.HttpRequest) -> None:
    request = instance_untrusted(wire.HttpRequest, asdict(request))
    scope = scope_untrusted(request)
    assert scope["path"].startswith("/")
    assert scope["query_string"].isascii()
    assert 0 <= request.size_bytes <= wire.MOST_HTTP_BYTES


_ANSWERS = st.lists(
    made(
        wire.HttpPart,
        data=st.binary(max_size=9),
        is_last=st.booleans(),
        status=st.sampled_from([200, 100, 0]) | WHOLE,
        headers=st.just({"content-type": "text/plain"}),
    )
    | made(StreamRefused)
    | _REQUEST,
    max_size=5,
)


@target("http-answers", _ANSWERS, "roles.http.passed_requests._next_untrusted", peak_bytes=8 << 20, weight=30)
async def _check_answers(messages: list[Message]) -> None:
    """A verifier answers anything: the seed gets a whole answer, or an error."""
    network = MemoryNetwork()

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        return local_welcome(peer_id="v1", name="odd", wall=0.0)

    async def answer(connection: Connection, hello: Hello) -> None:
        await connection.expect(wire.HttpRequest, timeout_s=5)
        connection.post(memoryview(bytearray(2)), generation=0, stream=0, done=lambda: None)
        for message in messages:
            send_if_valid(connection, message)
        await connection.flush(timeout_s=5)

    server = await serve(network, "there", PORT, decide=decide, serve=answer, on_problem=lambda problem, _: None)
    hello = local_hello(peer_id="5eed", name="seed", roles=["seed"], purpose="http")
    with suppress(P2PTrainError):
        connection, _ = await dial(network, "there", PORT, hello, timeout_s=5)
        is_first = True
        async with aclosing(pass_request(connection, wire.HttpRequest("POST", "/v1/x", {}, 2), b"{}")) as parts:
            async for part in parts:
                assert len(part.data) <= wire.PART_BYTES
                assert 200 <= part.status <= 599 if is_first else part.status == 0
                is_first = False
    await server.close()


_CARD = st.fixed_dictionaries({"id": TEXT | st.none()}, optional={"max_model_len": WHOLE | st.none()})
_LIST = st.fixed_dictionaries({"data": st.lists(_CARD, max_size=3)}).map(lambda value: json.dumps(value).encode())


@target("upstream-models", _LIST | st.binary(max_size=20), "roles.verifier.upstream.read_models_untrusted")
def _check_models(body: bytes) -> None:
    served: list[Any] = read_models_untrusted(body)
    assert all(instance_untrusted(Serving, asdict(each)) == each for each in served)
