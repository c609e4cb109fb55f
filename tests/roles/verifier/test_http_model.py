"""The HTTP interfaces over a small real model: forced calls are valid, and log-probabilities are its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.world import real_world
from p2ptrain.lab.memory import MemoryNetwork
from roles.compute_thread import ComputeThread
from roles.serving.local_model import LocalModel, load_local_engine
from roles.verifier.http_app import serving_http
from roles.verifier.service import ModelTextService
from tests.compute.families import make

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_S = 120.0
"""Many tokens of a real model, on a machine that does other things."""
MODEL = "tiny"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass
class RealEndpoint:
    whole: Any
    client: AsyncOpenAI
    claude: AsyncAnthropic


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealEndpoint]:
    directory = tmp_path_factory.mktemp("model")
    whole = make("llama-tied", directory, vocab_size=258, max_position_embeddings=1024, num_hidden_layers=2)
    backend = Tokenizer.of_bytes().backend
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=backend, chat_template=TEMPLATE).save_pretrained(directory)
    world, compute = real_world(MemoryNetwork()), ComputeThread()
    engine, context = await load_local_engine(directory, compute, device="cpu")
    model = LocalModel(engine, compute, world.clock, context=context)
    service = ModelTextService(world, model, ModelText(directory), name=MODEL, created=0)
    async with serving_http([service], "127.0.0.1", 0, world=world) as (host, port):
        url = f"http://{host}:{port}"
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONG_S) as client,
            AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=LONG_S) as claude,
        ):
            yield RealEndpoint(whole, client, claude)
    await service.close()
    await model.close()


def check(arguments: Any) -> None:
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 99


async def test_a_forced_call_is_valid(real: RealEndpoint) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": [TOOL], "seed": 3, "temperature": 1.0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    made = await real.client.chat.completions.create(**asked, n=2)
    for choice in made.choices:
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or ()
        check(json.loads(call.function.arguments))
    async with real.client.chat.completions.stream(**asked) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message
    assert [call.function.arguments for call in streamed.tool_calls or ()] == [
        call.function.arguments for call in made.choices[0].message.tool_calls or ()
    ]


async def test_a_forced_call_is_valid_in_each_interface(real: RealEndpoint) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    response = await real.client.responses.create(
        model=MODEL, input="Hi", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    [call] = response.output
    assert call.type == "function_call"
    check(json.loads(call.arguments))
    used: Any = {"name": "weather", "input_schema": SCHEMA}
    message = await real.claude.messages.create(
        model=MODEL, max_tokens=200, messages=HI, tools=[used], tool_choice={"type": "tool", "name": "weather"}
    )
    [block] = message.content
    assert block.type == "tool_use"
    check(block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
    messages: list[Any] = [*HI, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    more: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [used]}
    counted = await real.claude.messages.count_tokens(**more)
    answered = await real.claude.messages.create(max_tokens=2, **more)
    assert answered.usage.input_tokens == counted.input_tokens


async def test_answers_match_their_schema(real: RealEndpoint) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    made = await real.client.chat.completions.create(
        model=MODEL, messages=HI, response_format=wanted, n=3, temperature=1.5
    )
    for choice in made.choices:
        check(json.loads(choice.message.content or ""))
        assert choice.finish_reason == "stop"
    wanted["json_schema"]["schema"] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}
    with pytest.raises(Exception, match="schema"):
        await real.client.chat.completions.create(model=MODEL, messages=HI, response_format=wanted)


async def test_schema_that_is_too_complex_is_refused(real: RealEndpoint) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
    with pytest.raises(BadRequestError, match="simplify the schema"):
        await real.client.chat.completions.create(model=MODEL, messages=HI, response_format=form, max_tokens=500)


async def test_choices_are_the_texts_of_their_seeds(real: RealEndpoint) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 12, "temperature": 1.0}
    both = await real.client.completions.create(**asked, n=2, seed=5)
    alone = [await real.client.completions.create(**asked, seed=seed) for seed in (5, 6)]
    assert [choice.text for choice in both.choices] == [made.choices[0].text for made in alone]


async def test_log_probabilities_are_those_of_the_model(real: RealEndpoint) -> None:
    prompt = "Some text"
    made = await real.client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=3, max_tokens=5, temperature=0
    )
    table = made.choices[0].logprobs
    assert table is not None
    ids = (await real.client.post("/../tokenize", cast_to=object, body={"model": MODEL, "prompt": prompt}))["tokens"]  # type: ignore[index]
    assert ids == list(prompt.encode())
    assert len(table.tokens or ()) == len(ids) + 5
    with torch.inference_mode():
        logits = real.whole(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    wanted = [float(logits[index, token]) for index, token in enumerate(ids[1:])]
    assert (table.token_logprobs or ())[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    likeliest = (table.top_logprobs or ())[1] or {}
    assert max(likeliest.values()) == pytest.approx(float(logits[0].max()), abs=1e-4)
    scored = await real.client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == prompt
    assert scored.choices[0].logprobs is not None
    assert (scored.choices[0].logprobs.token_logprobs or ())[1:] == pytest.approx(wanted, abs=1e-4)


async def test_the_evaluation_harness_reads_the_models_own_likelihoods(real: RealEndpoint) -> None:
    """Requests of ``local-completions`` of lm-evaluation-harness: prompts as ids in one request, and one token more."""
    contexts, ends = [b"Two and two are", b"A", "Größe: é".encode()], [b" four", b" much longer end", b"?"]
    prompts = [[*context, *end] for context, end in zip(contexts, ends, strict=True)]
    asked: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    made = await real.client.completions.create(prompt=prompts, **asked)
    for choice, context, ids in zip(made.choices, contexts, prompts, strict=True):
        table = choice.logprobs
        assert table is not None
        own, likeliest = (table.token_logprobs or ())[len(context) : -1], (table.top_logprobs or ())[len(context) : -1]
        with torch.inference_mode():
            logits = real.whole(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        places = range(len(context) - 1, len(ids) - 1)
        assert sum(own) == pytest.approx(sum(float(logits[place, ids[place + 1]]) for place in places), abs=1e-4)
        is_greedy = [each == max(top.values()) for each, top in zip(own, likeliest, strict=True)]
        assert is_greedy == [int(logits[place].argmax()) == ids[place + 1] for place in places]
    written = await real.client.completions.create(
        model=MODEL, prompt="Some text", max_tokens=16, temperature=0, seed=1234, stop=["\n\n"]
    )
    ids = list(b"Some text")
    with torch.inference_mode():
        whole = real.whole.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert bytes(token for token in whole if token < 256).decode(errors="replace").startswith(written.choices[0].text)
    assert written.choices[0].text
