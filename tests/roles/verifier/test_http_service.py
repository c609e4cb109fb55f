"""The HTTP endpoint over the real text service: the model's own text, and what is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from p2ptrain.core.serving import Sampling
from roles.serving import text_session as session
from roles.verifier.http_app import serving_http
from roles.verifier.service import VerifierService
from tests.roles.verifier.doubles import ScriptedTarget, reference, service, text_of, world

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
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_the_text_is_the_models_own(asked: QuestionAccepted, stream: bool, temperature: float) -> None:
    client, serving, _ = asked
    made: Any = await client.completions.create(
        model=serving.model, prompt="def f(x):", max_tokens=40, temperature=temperature, seed=11, stream=stream
    )
    expected = reference("def f(x):", 40, Sampling(0.9, 50, 1.0, 11) if temperature else Sampling(0.0))
    choices = [event.choices[0] async for event in made] if stream else [made.choices[0]]
    assert "".join(choice.text for choice in choices) == text_of(expected)
    assert choices[-1].finish_reason == "length"
    if not stream:
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (9, 40)


async def test_a_conversation_is_answered(asked: QuestionAccepted) -> None:
    client, serving, _ = asked
    messages: list[Any] = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    made = await client.chat.completions.create(model=serving.model, messages=messages, max_tokens=8)
    assert made.choices[0].message.content is not None
    assert made.usage is not None
    assert made.usage.completion_tokens <= 8


@pytest.mark.parametrize("asks", [{"prompt": "x" * 5000}, {"prompt": "x", "max_tokens": 5000}])
async def test_a_text_beyond_the_context_is_refused(asked: QuestionAccepted, asks: dict[str, Any]) -> None:
    client, serving, _ = asked
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=serving.model, **asks)
    assert caught.value.code == "context_length_exceeded"


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
