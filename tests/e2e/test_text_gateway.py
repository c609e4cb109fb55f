"""One address for all verifiers: real processes, the official client, and a verifier that is killed."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from roles.http.answers import JsonApp, Problem, json_response
from roles.http.server import serving
from tests.compute.tiny_trainer import tiny
from tests.e2e.conftest import Machine
from wire.transport import TcpNetwork

pytestmark = pytest.mark.slow

TOKENS = 2000


class Double(JsonApp):
    """An existing server: it has one model, which repeats what is said in three pieces."""

    def __init__(self) -> None:
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._chat, methods=["POST"])]
        super().__init__(routes, lambda error: Problem(500, error.message))

    def let_in(self, asked: HTTPConnection) -> None:
        assert asked.headers["authorization"] == "Bearer its-key"

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [{"id": "echo", "object": "model", "max_model_len": 99}]})

    async def _chat(self, request: Request) -> Response:
        text = (await request.json())["messages"][0]["content"]
        events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in text.split("-")]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")


async def test_text_comes_although_its_verifier_is_killed_and_an_existing_server_takes_part(
    machine: Machine, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "little"
    build_model(tiny(layers=2, context=10_000), 256, seed=1).save_pretrained(checkpoint)
    Tokenizer.of_bytes().save(checkpoint)
    keys = [tmp_path / name for name in ("read.key", "operate.key", "upstream.key")]
    for path, key in zip(keys, ("read-key-" * 3, "operate-key-" * 3, "its-key"), strict=True):
        path.write_text(key)
        path.chmod(0o600)
    given = ("--http-read-key", str(keys[0]), "--http-operator-key", str(keys[1]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    await machine.seed("--no-job", "--http", place, *given)
    url = f"http://{place}"
    sock = await TcpNetwork().bound("127.0.0.1", 0, option="")
    async with serving(Double(), sock):
        upstream = f"http://127.0.0.1:{sock.getsockname()[1]}"
        role = ("--role", "verifier")
        await machine.join(*role, "--upstream", upstream, "--upstream-key-file", str(keys[2]), "--name", "existing")
        options = (*role, "--model", str(checkpoint), "--threads", "1")
        processes = {name: await machine.join(*options, "--name", name) for name in ("one", "two")}
        await machine.served_until(lambda found: sum(info.is_ready for info in found) == 3)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=keys[1].read_text(), max_retries=0) as client:
            assert {model.id async for model in client.models.list()} == {"little", "echo"}
            ask = client.completions.with_raw_response.create
            writing = asyncio.create_task(ask(model="little", prompt="a", max_tokens=TOKENS, extra_body={"seed": 1}))
            found = await machine.served_until(lambda found: any(info.sessions for info in found))
            [killed] = [info.name for info in found if info.sessions]
            await processes.pop(killed).kill()
            answer = await writing
            [other] = processes
            assert answer.headers["p2ptrain-verifier"] == other
            usage = answer.parse().usage
            assert usage is not None
            assert usage.completion_tokens == TOKENS
            stream = await client.completions.create(model="little", prompt="a", max_tokens=9, stream=True, seed=1)
            pieces = [event.choices[0].text async for event in stream]
            assert "".join(pieces) == answer.parse().choices[0].text[: len("".join(pieces))]
            messages: Any = [{"role": "user", "content": "says-the-same"}]
            said = await client.chat.completions.create(model="echo", messages=messages, stream=True)
            assert [event.choices[0].delta.content async for event in said] == ["says", "the", "same"]
        for key, error in ((keys[0].read_text(), PermissionDeniedError), ("wrong", AuthenticationError)):
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                with pytest.raises(error):
                    await client.completions.create(model="little", prompt="a")
        code, text = await machine.run("status", "--seed", f"127.0.0.1:{machine.port}")
        assert (code, "echo (upstream)" in text) == (0, True), text
