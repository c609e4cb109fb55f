"""The HTTP endpoint over the real text service: the model's own text, and what is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from roles.serving import text_service as session
from roles.verifier.http_app import serving_http
from roles.verifier.service import VerifierService
from tests.roles.verifier.doubles import ScriptedTarget, service, world

from .conftest import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


QuestionAccepted = tuple[openai.AsyncOpenAI, VerifierService, ScriptedTarget]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QuestionAccepted]:
    target = ScriptedTarget(pass_s=0.0)
    directory: Path = tmp_path_factory.mktemp("model")
    serving = service(directory, target)
    async with serving_http(serving, "127.0.0.1", 0, world=world()) as (host, port):
        url = f"http://{host}:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield client, serving, target
    await serving.close()
    assert not target.open_now


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_model(
    asked: QuestionAccepted, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    client, serving, target = asked
    monkeypatch.setattr(session, "PATIENCE_S", 0.0)  # the pass under way, which never ends here, is not waited for
    ended = asyncio.Event()
    monkeypatch.setattr(serving, "_on_change", lambda: serving.sessions or ended.set())
    waits, go = asyncio.Event(), asyncio.Event()
    began = len(target.runs)

    async def held() -> None:
        waits.set()
        await go.wait()

    target.before = lambda count: held() if count == began + 5 else None
    asking = asyncio.create_task(
        client.completions.create(model=serving.model, prompt="def g():", max_tokens=200, stream=stream)
    )
    async with asyncio.timeout(PATIENCE_S):
        await waits.wait()
        if stream:
            await (await asking).close()
        else:
            asking.cancel()
        await ended.wait()
    target.before = lambda count: None
    assert serving.sessions == 0
    assert len(target.runs) == began + 6
