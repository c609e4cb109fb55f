"""The HTTP endpoint, as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import NetworkError, Refused, ResourceError, TooLong, UserError
from roles.http.answers import RETRY_AFTER_S
from roles.serving.texts import TextRequest
from roles.verifier.http.answer import AT_ONCE

from .conftest import PATIENCE_S, Endpoint
from .scripted import MODEL, ScriptedWriting

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_models_are_listed(endpoint: Endpoint) -> None:
    listed = await endpoint.client.models.list()
    assert [(model.id, model.created, model.object) for model in listed.data] == [
        (MODEL, 1_700_000_000, "model"),
        ("other", 1_700_000_000, "model"),
    ]
    one = await endpoint.client.models.retrieve(MODEL)
    assert one.id == MODEL
    assert one.model_extra is not None
    assert one.model_extra["context_length"] == 100
    with pytest.raises(openai.NotFoundError, match="this endpoint has only the models org/tiny-model, other"):
        await endpoint.client.models.retrieve("gpt-4")


async def test_a_completion(endpoint: Endpoint) -> None:
    made = await endpoint.client.completions.create(model=MODEL, prompt="Say")
    assert (made.object, made.model) == ("text_completion", MODEL)
    assert made.id.startswith("cmpl-")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in made.choices] == [
        (0, "Hello, world", "stop")
    ]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (3, 12, 15)
    other = await endpoint.client.completions.create(model=MODEL, prompt="Say")
    assert other.id != made.id
    assert other.system_fingerprint == made.system_fingerprint
    first, second = endpoint.service.wishes
    assert (first.prompt, first.turns, first.max_new_tokens, first.stop) == ("Say", (), None, ())
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (None, None, None)
    assert first.sampling.seed != second.sampling.seed  # nobody named one


async def test_named_model_writes(endpoint: Endpoint) -> None:
    endpoint.other.script = lambda wish: ScriptedWriting(["of the other"])
    made = await endpoint.client.completions.create(model="other", prompt="Say")
    assert (made.model, made.choices[0].text) == ("other", "of the other")
    assert (len(endpoint.other.wishes), endpoint.service.wishes) == (1, [])
    usual = await endpoint.client.completions.create(model=MODEL, prompt="Say")
    assert (usual.choices[0].text, usual.system_fingerprint != made.system_fingerprint) == ("Hello, world", True)


async def test_a_chat(endpoint: Endpoint) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "Three", "refusal": None, "annotations": []},
        {"role": "user", "content": "Four", "name": "Ada"},
    ]
    endpoint.service.script = lambda wish: ScriptedWriting(ends="length", left_out=2)
    raw = await endpoint.client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
    made = raw.parse()
    assert (made.object, made.choices[0].finish_reason) == ("chat.completion", "length")
    assert (made.choices[0].message.role, made.choices[0].message.content) == ("assistant", "Hello, world")
    assert raw.headers["p2ptrain-turns-left-out"] == "2"
    turns = (Turn("system", "Be kind"), Turn("user", "One\nTwo"), Turn("assistant", "Three"), Turn("user", "Four"))
    assert endpoint.service.wishes[0].turns == turns


async def test_parameters_reach_the_text_request(endpoint: Endpoint) -> None:
    extra = {"top_k": 7, "speculate": "off", "priority": -3, "min_p": 0.1, "repetition_penalty": 1.5}
    extra |= {"stop_token_ids": [5], "ignore_eos": True}
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0.5, "top_p": 0.9, "seed": 2**63 - 1, "stop": ["a", "b"]}
    asked |= {"frequency_penalty": -1, "presence_penalty": 2, "logit_bias": {"17": -100}}
    await endpoint.client.chat.completions.create(
        messages=HI, max_completion_tokens=9, extra_body=extra, user="me", n=1, tools=[], **asked
    )
    await endpoint.client.completions.create(prompt="x", max_tokens=9, extra_body=extra, best_of=1, echo=False, **asked)
    for wish in endpoint.service.wishes:
        sampling = wish.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 2**63 - 1)
        assert (sampling.min_p, sampling.repetition_penalty, sampling.logit_bias) == (0.1, 1.5, ((17, -100),))
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (-1, 2)
        assert (wish.stop_ids, wish.ignore_end) == ((5,), True)
        assert (wish.max_new_tokens, wish.stop, wish.speculate, wish.priority) == (9, ("a", "b"), False, -3)
    await endpoint.client.completions.create(model=MODEL, prompt="x", stop="END", seed=-5)
    assert endpoint.service.wishes[-1].stop == ("END",)
    assert endpoint.service.wishes[-1].sampling.seed == -5


async def test_a_completion_comes_piece_by_piece(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(["one", "", "two"], held_at=1)
    stream = await endpoint.client.completions.create(model=MODEL, prompt="x", stream=True)
    events = aiter(stream)
    assert (await anext(events)).choices[0].text == "one"
    endpoint.service.writings[0].go.set()  # the first piece was here before the second was written
    rest = [event async for event in events]
    assert [(event.choices[0].text, event.choices[0].finish_reason) for event in rest] == [("two", None), ("", "stop")]
    assert [event.usage for event in rest] == [None, None]


async def test_a_chat_comes_piece_by_piece(endpoint: Endpoint) -> None:
    stream = await endpoint.client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    *events, last = [event async for event in stream]
    deltas = [(event.choices[0].delta.role, event.choices[0].delta.content) for event in events]
    assert deltas == [("assistant", ""), (None, "Hello"), (None, ", "), (None, "world"), (None, None)]
    assert [event.choices[0].finish_reason for event in events] == [None] * 4 + ["stop"]
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert {event.id for event in [*events, last]} == {last.id}
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 12)


async def test_prompts_are_answered_in_order(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting([wish.prompt, "!"], prompt_tokens=len(wish.prompt))
    made = await endpoint.client.completions.create(model=MODEL, prompt=["a", "bb"], seed=4)
    assert [(choice.index, choice.text) for choice in made.choices] == [(0, "a!"), (1, "bb!")]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 5)
    assert [wish.sampling.seed for wish in endpoint.service.wishes] == [4, 4]
    stream = await endpoint.client.completions.create(
        model=MODEL, prompt=["a", "bb"], stream=True, stream_options={"include_usage": True}
    )
    *events, last = [event async for event in stream]
    texts = [[event.choices[0].text for event in events if event.choices[0].index == index] for index in (0, 1)]
    assert texts == [["a", "!", ""], ["bb", "!", ""]]
    assert last.usage is not None
    assert last.usage.total_tokens == 8


async def test_some_texts_of_a_request_are_written_at_a_time(endpoint: Endpoint) -> None:
    service, held = endpoint.service, list[ScriptedWriting]()

    def script(wish: TextRequest) -> ScriptedWriting:
        held.append(ScriptedWriting([wish.prompt], held_at=0))
        return held[-1]

    service.script = script
    asking = asyncio.create_task(endpoint.client.completions.create(model=MODEL, prompt=list("abcdefghijkl")))
    async with asyncio.timeout(PATIENCE_S):
        for number in range(12):
            while len(held) <= number:
                service.asks.clear()
                await service.asks.wait()
            await held[number].waits.wait()
            assert len(held) - number <= AT_ONCE
            if number >= AT_ONCE - 1:
                held[number - AT_ONCE + 1].go.set()
        for writing in held:
            writing.go.set()
        made = await asking
    assert [choice.text for choice in made.choices] == list("abcdefghijkl")


async def test_all_texts_end_if_one_fails(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: (
        ScriptedWriting(fails=NetworkError("lost")) if wish.prompt == "b" else ScriptedWriting(held_at=1)
    )
    with pytest.raises(openai.InternalServerError, match="lost"):
        await endpoint.client.completions.create(model=MODEL, prompt=["a", "b", "c"])


async def test_choices_have_seeds_of_their_own(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting([str(wish.sampling.seed)])
    made = await endpoint.client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=4)
    assert [(choice.index, choice.text) for choice in made.choices] == [(0, "4"), (1, "5"), (2, "4"), (3, "5")]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (6, 4)
    stream = await endpoint.client.chat.completions.create(model=MODEL, messages=HI, n=2, seed=4, stream=True)
    deltas = [event.choices[0] async for event in stream]
    assert {(each.index, each.delta.content) for each in deltas if each.delta.content} == {(0, "4"), (1, "5")}


async def test_a_prompt_is_computed_once_for_all_its_choices(endpoint: Endpoint) -> None:
    texts = {(prompt, seed): ScriptedWriting([f"{prompt}{seed}"]) for prompt in "ab" for seed in (4, 5)}
    texts["a", 4] = held = ScriptedWriting(["a4"], held_at=0)
    endpoint.service.script = lambda wish: texts[wish.prompt, wish.sampling.seed]
    asked = endpoint.client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=4)
    answer = asyncio.create_task(asked)
    await texts["b", 5].closed.wait()
    assert {(wish.prompt, wish.sampling.seed) for wish in endpoint.service.wishes} == {("a", 4), ("b", 4), ("b", 5)}
    held.go.set()
    assert [choice.text for choice in (await answer).choices] == ["a4", "a5", "b4", "b5"]


async def test_the_best_texts_are_the_likeliest(endpoint: Endpoint) -> None:
    # A token's log-probability is minus its number.
    endpoint.service.script = lambda wish: ScriptedWriting([" zaQb"[wish.sampling.seed], " "])
    made = await endpoint.client.completions.create(model=MODEL, prompt="x", n=2, best_of=4, seed=1)
    assert [(choice.index, choice.text, choice.logprobs) for choice in made.choices] == [
        (0, "Q ", None),
        (1, "a ", None),
    ]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_completion(endpoint: Endpoint, stream: bool) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(["é", "", "z"])
    made: Any = await endpoint.client.completions.create(
        model=MODEL, prompt="ab", echo=True, logprobs=2, stream=stream, max_tokens=5
    )
    choices = [event.choices[0] async for event in made] if stream else made.choices
    assert "".join(choice.text for choice in choices) == "abéz"
    tables = [choice.logprobs for choice in choices if choice.logprobs]
    assert [each for table in tables for each in table.tokens] == ["a", "b", "é", "z"]
    assert [each for table in tables for each in table.token_logprobs] == [None, -98, -233, -122]
    assert [each for table in tables for each in table.text_offset] == [0, 1, 2, 3]
    likeliest = [each for table in tables for each in table.top_logprobs]
    assert likeliest[0] is None
    assert likeliest[3] == {"z": -122, "{": -123}


async def test_a_prompt_alone_is_scored(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting([], ends="length")
    made = await endpoint.client.completions.create(model=MODEL, prompt=[97, 98], echo=True, logprobs=0, max_tokens=0)
    [wish] = endpoint.service.wishes
    assert (wish.ids, wish.prompt, wish.max_new_tokens, wish.logprobs, wish.prompt_logprobs) == (
        (97, 98),
        "",
        0,
        0,
        True,
    )
    assert made.choices[0].text == "ab"
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.top_logprobs == [None, {"b": -98}]


async def test_tables_of_a_long_prompt_do_not_block_the_loop(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, bytes_of = set[threading.Thread](), endpoint.service.token_bytes

    def token_bytes(token: int) -> bytes:
        threads.add(threading.current_thread())
        return bytes_of(token)

    monkeypatch.setattr(endpoint.service, "token_bytes", token_bytes)
    endpoint.service.script = lambda wish: ScriptedWriting([], ends="length")
    asked: dict[str, Any] = {"model": MODEL, "prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}
    await endpoint.client.completions.create(**asked)
    async for _ in await endpoint.client.completions.create(**asked, stream=True):
        pass
    await endpoint.post("/tokenize", b'{"prompt": "ab", "return_token_strs": true}')
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat(endpoint: Endpoint, stream: bool) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(["é"])
    made: Any = await endpoint.client.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=1, stream=stream
    )
    choices = [event.choices[0] async for event in made] if stream else made.choices
    [token] = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert (token.token, token.logprob, token.bytes) == ("é", -233, [0xC3, 0xA9])
    assert [(top.token, top.logprob) for top in token.top_logprobs] == [("é", -233)]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_in_any_script_arrives(endpoint: Endpoint, stream: bool) -> None:
    pieces = ["é", "漢字", "🎉", "\u2028", "\r\n\ndata: [DONE]\n\n", '"\\', "\x00\x85", "\ud83d"]
    endpoint.service.script = lambda wish: ScriptedWriting(pieces)
    if stream:
        events = await endpoint.client.completions.create(model=MODEL, prompt="¿🎉?", stream=True)
        text = "".join([event.choices[0].text async for event in events])
    else:
        text = (await endpoint.client.completions.create(model=MODEL, prompt="¿🎉?")).choices[0].text
    assert text == "".join(pieces)
    assert endpoint.service.wishes[0].prompt == "¿🎉?"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_a_client_that_leaves_is_closed(endpoint: Endpoint, stream: bool) -> None:
    writing = ScriptedWriting(held_at=1)
    endpoint.service.script = lambda wish: writing
    asking = asyncio.create_task(endpoint.client.completions.create(model=MODEL, prompt="x", stream=stream))
    async with asyncio.timeout(PATIENCE_S):
        await writing.waits.wait()
        if stream:
            await (await asking).close()
        else:
            asking.cancel()
        await writing.closed.wait()
    assert writing.given == 1


async def test_a_client_that_leaves_the_queue_gives_up_its_place(endpoint: Endpoint) -> None:
    endpoint.service.room.clear()
    asking = asyncio.create_task(endpoint.client.completions.create(model=MODEL, prompt="x", stream=True))
    async with asyncio.timeout(PATIENCE_S):
        await endpoint.service.asks.wait()
        asking.cancel()
        await endpoint.service.gave_up.wait()
    assert endpoint.service.writings == []


ERRORS: list[tuple[Exception, type[openai.APIStatusError], str, str]] = [
    (
        TooLong("too long", remedy="shorten it"),
        openai.BadRequestError,
        "context_length_exceeded",
        "too long: shorten it",
    ),
    (UserError("the prompt is empty"), openai.BadRequestError, "invalid_value", "the prompt is empty"),
    (Refused("busy", "too busy", retry_after_s=17), openai.InternalServerError, "overloaded", "too busy"),
    (ResourceError("no memory"), openai.InternalServerError, "overloaded", "no memory"),
    (NetworkError("a stage is away"), openai.InternalServerError, "model_unreachable", "a stage is away"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "kind", "code", "message"), ERRORS)
async def test_a_text_that_cannot_begin_is_answered_with_its_status(
    endpoint: Endpoint, stream: bool, error: Exception, kind: type[openai.APIStatusError], code: str, message: str
) -> None:
    def script(wish: TextRequest) -> ScriptedWriting:
        raise error

    endpoint.service.script = script
    with pytest.raises(kind) as caught:
        await endpoint.client.completions.create(model=MODEL, prompt="x", stream=stream)
    assert isinstance(caught.value.body, dict)
    assert (caught.value.code, caught.value.body["message"]) == (code, message)
    assert caught.value.status_code == (400 if kind is openai.BadRequestError else 503)
    after_s = str(getattr(error, "retry_after_s", 0) or RETRY_AFTER_S) if caught.value.status_code == 503 else None
    assert caught.value.response.headers.get("retry-after") == after_s


async def test_a_failure_amid_a_stream_ends_it(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(fails=NetworkError("a stage is away", remedy="wait"))
    stream = await endpoint.client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    events = aiter(stream)
    text = [(await anext(events)).choices[0].delta.content for _ in range(4)]
    assert text == ["", "Hello", ", ", "world"]
    with pytest.raises(openai.APIError, match="a stage is away: wait"):
        await anext(events)


@pytest.mark.parametrize("fails", [NetworkError("a stage is away"), None])
async def test_a_failure_before_the_answer_has_its_http_status(endpoint: Endpoint, fails: Exception | None) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(fails=fails, ends="cancelled")
    with pytest.raises(openai.InternalServerError) as caught:
        await endpoint.client.completions.create(model=MODEL, prompt="x")
    assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_shows_no_internals(endpoint: Endpoint, stream: bool) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(fails=ValueError("secret"))

    async def ask() -> None:
        made: Any = await endpoint.client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert [event async for event in made] == []

    with pytest.raises(openai.APIError, match="internal error") as caught:
        await ask()
    assert "secret" not in str(caught.value.body)
    [mistake] = endpoint.mistakes  # but whoever runs it is told
    assert str(mistake["exception"]) == "secret"
    endpoint.mistakes.clear()
