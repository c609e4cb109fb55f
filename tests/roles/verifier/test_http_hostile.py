"""The HTTP endpoint and clients that mean no good, or do not know better."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from p2ptrain.core.errors import UserError
from p2ptrain.core.world import real_world
from p2ptrain.lab.memory import MemoryNetwork
from roles.http import answers, server
from roles.verifier import http_app
from roles.verifier.http.bodies import HARMLESS, HARMLESS_HERE, NOT_OBEYED
from roles.verifier.http_app import serving_http

from .conftest import KEY, PATIENCE_S, Endpoint, request
from .scripted import MODEL, ScriptedService, ScriptedWriting

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = json.dumps({"model": MODEL, "prompt": "x"}).encode()
STREAM = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WORLD = real_world(MemoryNetwork())


def code_of(body: bytes) -> str:
    code = json.loads(body)["error"]["code"]
    assert isinstance(code, str)
    return code


async def hung_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):  # cut off before
        await writer.wait_closed()


def posted(body: bytes) -> bytes:
    return request("POST", COMPLETIONS, f"Content-Length: {len(body)}") + body


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on the server gives no time for what these limits are for."""

    def end(*limits: str) -> None:
        for name in limits:
            monkeypatch.setattr(answers if name == "BODY_S" else server, name, 0.0)

    return end


async def test_a_request_without_the_key_is_refused(guarded: Endpoint) -> None:
    assert (await guarded.client.completions.create(model=MODEL, prompt="x")).choices[0].text == "Hello, world"
    for wrong in ("wrong", KEY[:-1], KEY + "x"):
        with pytest.raises(openai.AuthenticationError) as caught:
            await guarded.client.models.list(extra_headers={"Authorization": f"Bearer {wrong}"})
        assert KEY not in str(caught.value.body)
        assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    "shown",
    ["", f"Authorization: Basic {KEY}", f"Authorization: {KEY}", "Authorization: Bearer", "Authorization: Bearer é"],
)
async def test_the_key_is_a_bearer_token(guarded: Endpoint, shown: str) -> None:
    # Nobody without it has his body read: this one never comes.
    head = request("POST", COMPLETIONS, "Content-Length: 1000", *([shown] if shown else []))
    status, headers, body = await guarded.raw(head)
    assert status == 401
    assert code_of(body) in ("missing_api_key", "invalid_api_key")
    assert headers["content-type"] == "application/json"


async def test_health_needs_no_key(guarded: Endpoint) -> None:
    status, _, body = await guarded.raw(request("GET", "/health", "Origin: https://evil.example", host="evil.example"))
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    # With a key a page from elsewhere may try: it has none.
    with_key = request("GET", "/v1/models", f"Authorization: bearer {KEY}", host="model.example.org")
    assert (await guarded.raw(with_key))[0] == 200


@pytest.mark.parametrize("host", ["LOCALHOST:8000", "127.8.8.8", "[::1]:8000"])
@pytest.mark.parametrize("origin", ["", "Origin: http://localhost:3000", "Origin: https://[::1]"])
async def test_local_programs_are_served_without_a_key(endpoint: Endpoint, host: str, origin: str) -> None:
    assert (await endpoint.raw(request("GET", "/v1/models", *([origin] if origin else []), host=host)))[0] == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example", ""),
        ("127.0.0.1.evil.example:80", ""),
        ("", ""),
        ("127.0.0.1", "Origin: https://evil.example"),
        ("127.0.0.1", "Origin: null"),
        ("127.0.0.1", "Origin: http://localhost\r\nOrigin: https://evil.example"),
        ("127.0.0.1", "Origin: https://evil.example#://localhost"),
    ],
)
async def test_foreign_pages_are_refused(endpoint: Endpoint, host: str, origin: str) -> None:
    headers = [f"Content-Length: {len(ASK)}", *([origin] if origin else [])]
    status, answer_headers, body = await endpoint.raw(request("POST", COMPLETIONS, *headers, host=host) + ASK)
    assert (status, code_of(body)) == (403, "origin_refused" if origin else "host_refused")
    assert not any(name.startswith("access-control") for name in answer_headers)
    assert endpoint.service.wishes == []


async def test_a_public_address_needs_a_key() -> None:
    with pytest.raises(UserError, match="needs an API key") as caught:
        async with serving_http([ScriptedService()], "0.0.0.0", 0, world=WORLD):
            pass
    assert "--api-key-file" in caught.value.remedy


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/models/../../etc/passwd", 404, "model_not_found"),
        ("GET", "http://evil.example/v1/models", 404, "unknown_url"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
    ],
)
async def test_unknown_paths_and_methods_are_refused(
    endpoint: Endpoint, method: str, path: str, status: int, code: str
) -> None:
    given_status, headers, body = await endpoint.raw(request(method, path))
    assert (given_status, code_of(body)) == (status, code)
    assert ("allow" in headers) == (status == 405)


MESSAGE = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CALLS = {"role": "assistant"}
CALL_5 = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "5"}}
DEEP_CALL = {"id": "a", "function": {"name": "f", "arguments": '{"a":' + "[" * 985 + "]" * 985 + "}"}}
USED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": ""}
NAMED_G = {"type": "function", "function": {"name": "g"}}
MISSING = "missing_required_parameter"
SCHEMA = "response_format.json_schema"


def tool_of(name: str, parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def deep(levels: int) -> object:
    return {"type": "object", "x": deep(levels - 1)} if levels else 5


WRONG: list[tuple[str, dict[str, object], str, str]] = [
    (COMPLETIONS, {"model": "gpt-4"}, "model_not_found", "model"),
    (COMPLETIONS, {"prompt": 5}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [1, -2]}, "invalid_value", "prompt.1"),
    (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 4097}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": "x" * 70_000, "n": 60, "echo": True, "logprobs": 1}, "invalid_value", "echo"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 41}, "invalid_value", "prompt"),
    (COMPLETIONS, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (COMPLETIONS, {"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_tokens"),
    (COMPLETIONS, {"temperature": -0.1}, "invalid_value", "temperature"),
    (COMPLETIONS, {"top_p": 1.1}, "invalid_value", "top_p"),
    (COMPLETIONS, {"seed": 2**63}, "invalid_value", "seed"),
    (COMPLETIONS, {"stop": ["a"] * 5}, "invalid_value", "stop"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    (COMPLETIONS, {"speculate": "maybe"}, "invalid_value", "speculate"),
    (COMPLETIONS, {"n": 2, "best_of": 1}, "invalid_value", "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "invalid_value", "best_of"),
    (COMPLETIONS, {"logprobs": 21}, "invalid_value", "logprobs"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "missing_required_parameter", SCHEMA),
    (COMPLETIONS, {"temprature": 1}, "unknown_parameter", "temprature"),
    (CHAT, {"messages": "Hi"}, "invalid_value", "messages"),
    (CHAT, {"messages": [MESSAGE] * 4097}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages.0.content"),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "invalid_value", "messages.0.role"),
    (CHAT, {"messages": [MESSAGE, {"role": "assistant", "content": "x"}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "invalid_value", "messages.0.content.0.type"),
    (CHAT, {"messages": [MESSAGE | {"tool_calls": [{}]}]}, MISSING, "messages.0.tool_calls.0.id"),
    (CHAT, {"messages": [MESSAGE | {"tool_calls": [CALL_5]}]}, "unsupported_parameter", "messages.0.tool_calls"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages.0.tool_call_id"),
    (CHAT, {"messages": [CALLS | {"tool_calls": [CALL_5]}, MESSAGE]}, "invalid_value", "messages.0.tool_calls"),
    (CHAT, {"messages": [CALLS | {"tool_calls": [DEEP_CALL]}, MESSAGE]}, "invalid_value", "messages.0.tool_calls"),
    (CHAT, {"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    (CHAT, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (CHAT, {"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
    (CHAT, {"tools": [tool_of("f", {"type": "string"})]}, "invalid_value", "tools.0.function.parameters.type"),
    (CHAT, {"tools": [tool_of("f", deep(33))]}, "invalid_value", "tools.0"),
    (CHAT, {"tools": [tool_of("f", {"title": "x" * 140_000})]}, "invalid_value", "tools.0"),
    (CHAT, {"tools": [tool_of("f", {"enum": [0] * 501})]}, "invalid_value", "tools.0"),
    (CHAT, {"tools": [tool_of("f g", {})]}, "invalid_value", "tools.0.function.name"),
    (CHAT, {"tool_choice": "required"}, "invalid_value", "tool_choice"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": NAMED_G},
        "invalid_value",
        "tool_choice",
    ),
    (MESSAGES, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (MESSAGES, {"tools": [{"type": "bash", "name": "f", "input_schema": {}}]}, "invalid_value", "tools.0.type"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "invalid_value", "tool_choice.name"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "missing_required_parameter",
        "messages.0.content.0.text",
    ),
    (MESSAGES, {"messages": [{"role": "user", "content": [USED]}]}, "invalid_value", "messages.0.content.0.type"),
    (RESPONSES, {"input": [{"type": "message", "role": "user"}]}, MISSING, "input.0.content"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, "invalid_value", "input.0.type"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]},
        "invalid_value",
        "input.0.call_id",
    ),
    (CHAT, {"x" * 100: 1}, "unknown_parameter", "x" * 63 + "…"),
]


USUAL: dict[str, dict[str, object]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [MESSAGE]},
    MESSAGES: {"messages": [MESSAGE], "max_tokens": 5},
    RESPONSES: {"input": "x"},
}
NOT_HERE = {
    COMPLETIONS: {"suffix", "tools", "tool_choice", "parallel_tool_calls"},
    CHAT: {"best_of", "echo", "functions", "function_call", "modalities", "audio", "web_search_options"},
    MESSAGES: {"n", "thread", "mcp_servers", "container", "context_management"},
    RESPONSES: {"top_logprobs", "previous_response_id", "conversation", "background", "prompt", "max_tool_calls"},
}


async def test_every_refused_parameter_is_tried() -> None:
    assert set().union(*NOT_HERE.values()) == set(NOT_OBEYED)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in NOT_HERE.items() for name in names])
async def test_a_parameter_that_cannot_be_obeyed(endpoint: Endpoint, path: str, name: str) -> None:
    for value in (*HARMLESS, HARMLESS_HERE.get(name)):
        body = json.dumps({"model": MODEL} | USUAL[path] | {name: value}).encode()
        assert (await endpoint.post(path, body))[0] == 200
    status, _, body = await endpoint.post(path, json.dumps({"model": MODEL} | USUAL[path] | {name: ["?"]}).encode())
    assert status == 400
    assert NOT_OBEYED[name] in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(("path", "changed", "code", "param"), WRONG)
async def test_a_request_that_cannot_be_obeyed(
    endpoint: Endpoint, path: str, changed: dict[str, object], code: str, param: str
) -> None:
    status, _, body = await endpoint.post(path, json.dumps({"model": MODEL} | USUAL[path] | changed).encode())
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" or code == "model_not_found"
    assert len(error["message"]) < 300
    assert endpoint.service.wishes == []
    if path == MESSAGES:
        assert (status, param in error["message"]) == (400, True)
    else:
        assert (status, error["code"], error["param"]) == (404 if code == "model_not_found" else 400, code, param)


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        (COMPLETIONS, {"prompt": [5, "x"]}, "prompt.1: must be a whole number"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 5}, "stop: must have at most 4 items, not 5"),
        (COMPLETIONS, {"prompt": "x", "stop": "a" * 513}, "stop: must have at most 512 characters"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a", "b" * 513]}, "stop.1: must have at most 512 characters"),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content: must have at least 1 item, not 0"),
        (
            CHAT,
            {"messages": [MESSAGE | {"content": [IMAGE]}]},
            "messages.0.content.0.type: must be 'text', 'input_text' or 'output_text'",
        ),
    ],
)
async def test_a_message_names_the_field_and_the_limit(
    endpoint: Endpoint, path: str, given: dict[str, object], message: str
) -> None:
    _, _, body = await endpoint.post(path, json.dumps({"model": MODEL} | given).encode())
    assert json.loads(body)["error"]["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model": "\\ud800", "prompt": "x"}',
        b'{"model": "org/tiny-model", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "org/tiny-model", "prompt": "x", "temperature": NaN}',
        b'{"model": "org/tiny-model", "prompt": "x", "temperature": 1e999}',
        b'{"model": "org/tiny-model", "prompt": ' + b"[" * 100_000,
    ],
)
async def test_a_malformed_body_is_refused(endpoint: Endpoint, body: bytes) -> None:
    for path in (*USUAL, "/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        status, _, answer = await endpoint.post(path, body)
        assert status == 400
        assert len(answer) < 500
    assert endpoint.service.wishes == []


async def test_a_huge_body_is_not_buffered(
    endpoint: Endpoint, hurry: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_app, "MOST_BODY_BYTES", 100_000)
    status, headers, body = await endpoint.post(COMPLETIONS, b" " * 1_000_000)
    assert (status, code_of(body), headers["connection"]) == (413, "request_too_large", "close")
    assert (await endpoint.post(COMPLETIONS, ASK + b" " * (100_000 - len(ASK))))[0] == 200
    hurry("BODY_S")  # one that goes on for ever is cut off
    assert (await endpoint.raw(request("POST", COMPLETIONS, "Content-Length: 9999999") + b" " * 200_000))[0] == 408


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"x: y\r\n" * 4000 + b"Connection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1" + b"0" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\n \r\n" * (server.MOST_CHUNKS + 1)
        + b"0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: x\x00\r\n\r\n",
        b"x" * 100_000,
    ],
)
async def test_bytes_that_are_not_http_are_refused(endpoint: Endpoint, sent: bytes) -> None:
    status, headers, body = await endpoint.raw(sent)
    assert 400 <= status < 500 or status == 501
    assert headers["content-type"] == "application/json"
    assert "bytearray" not in json.loads(body)["error"]["message"]
    assert headers["connection"] == "close"
    assert code_of(body) in ("invalid_http", "host_refused", "unknown_url", "request_too_large")
    gc.collect()  # a task that failed, and that nobody asks, tells it when it is forgotten


async def test_bytes_after_the_answer_end_the_connection(endpoint: Endpoint) -> None:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 403")
        writer.write(b"ZZ\r\n")
        assert b"HTTP/1.1" not in await reader.read()
        await hung_up(writer)


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nHost: loc"])
async def test_a_silent_client_is_disconnected(endpoint: Endpoint, hurry: Callable[..., None], sent: bytes) -> None:
    hurry("HEADERS_S")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(sent)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        await hung_up(writer)


async def test_a_body_that_goes_on_after_the_answer_ends_the_connection(
    endpoint: Endpoint, hurry: Callable[..., None]
) -> None:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    async with asyncio.timeout(PATIENCE_S):
        hurry("HEADERS_S", "KEEP_ALIVE_S")
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nno more than this")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        writer.write(b"but this")  # that it says anything at all does not count
        with suppress(ConnectionError):
            await reader.read()
        await hung_up(writer)


async def test_a_request_that_follows_at_once_has_its_time(endpoint: Endpoint, hurry: Callable[..., None]) -> None:
    held = ScriptedWriting(held_at=0)
    endpoint.service.script = lambda asked: held if asked.sampling.seed == 2 else ScriptedWriting()
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(request("GET", "/health").replace(b"close", b"keep-alive"))
        await reader.readuntil(b"}")
        hurry("HEADERS_S", "KEEP_ALIVE_S")
        first, second = (posted(json.dumps({"model": MODEL, "prompt": "x", "seed": seed}).encode()) for seed in (1, 2))
        writer.write(first.replace(b"close", b"keep-alive") + second)
        await held.waits.wait()
        assert b"200 OK" in await reader.readuntil(b"}}")  # the first one is over, with all that follows it
        held.go.set()
        assert b"200 OK" in await reader.read()
        await hung_up(writer)


async def test_a_missing_body_ends_the_connection(endpoint: Endpoint, hurry: Callable[..., None]) -> None:
    hurry("BODY_S")
    status, _, body = await endpoint.raw(request("POST", COMPLETIONS, "Content-Length: 5"))
    assert (status, code_of(body)) == (408, "request_timeout")


async def test_a_client_that_does_not_read_is_disconnected(endpoint: Endpoint, hurry: Callable[..., None]) -> None:
    hurry("SEND_S")
    endpoint.service.script = lambda wish: ScriptedWriting(["x" * (1 << 20)] * 64)
    _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=1)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(posted(STREAM))
        await endpoint.service.asks.wait()
        [writing] = endpoint.service.writings
        await writing.closed.wait()
    assert writing.given < 64
    await hung_up(writer)


async def test_connections_are_bounded(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    async with serving_http([ScriptedService()], "127.0.0.1", 0, world=WORLD) as (host, port):
        few = Endpoint(endpoint.service, host, port, endpoint.client, [])
        assert (await few.raw(request("GET", "/health")))[0] == 200
        _, writer = await asyncio.open_connection(host, port)
        status, headers, body = await few.raw(request("GET", "/health"))
        assert (status, code_of(body), headers["retry-after"]) == (503, "overloaded", "2")
        await hung_up(writer)


async def test_nothing_is_logged(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await endpoint.raw(request("GET", f"/v1/models?{KEY}", f"Authorization: Bearer {KEY}"))
        await endpoint.raw(b"no http\r\n\r\n")
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def under_way(service: ScriptedService) -> tuple[bytes, bytes]:
    """What two clients hear, one of them of a stream, when the endpoint ends while it writes for them."""
    service.script = lambda wish: ScriptedWriting(held_at=1)
    interrupt = signal.getsignal(signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        async with serving_http([service], "127.0.0.1", 0, world=WORLD) as (host, port):
            assert signal.getsignal(signal.SIGINT) is interrupt  # Ctrl+C belongs to whoever runs the process
            idle = await asyncio.open_connection(host, port)
            streamed, whole = await asyncio.open_connection(host, port), await asyncio.open_connection(host, port)
            streamed[1].write(posted(STREAM))
            await streamed[0].readuntil(b"Hello")
            whole[1].write(posted(ASK))
            while len(service.writings) < 2:
                service.asks.clear()
                await service.asks.wait()
            await service.writings[1].waits.wait()
        assert all(writing.closed.is_set() for writing in service.writings)
        assert await idle[0].read() == b""
        heard = await streamed[0].read(), await whole[0].read()
        for _, writer in (idle, streamed, whole):
            await hung_up(writer)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
    return heard


async def test_a_shutdown_is_reported_to_all_clients() -> None:
    streamed, whole = await under_way(ScriptedService())
    assert b'"code":"stopping"' in streamed
    assert b"[DONE]" not in streamed
    assert whole.startswith(b"HTTP/1.1 503")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nobody counts open files")
async def test_no_file_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await under_way(ScriptedService())
    assert len(os.listdir("/proc/self/fd")) <= before
