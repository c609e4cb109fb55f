"""Tools and formats of answers over HTTP, as the official clients see them: OpenAI's two interfaces and Anthropic's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import NetworkError

from .conftest import KEY, PATIENCE_S, Endpoint, request
from .scripted import MODEL, ScriptedWriting

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOL: Any = {"type": "function", "function": {"name": "find", "description": "Finds", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
CALLED = {"q": "é"}


def calling(text: str = "Let me see.\n" + CALL) -> Any:
    return lambda wish: ScriptedWriting([text[start : start + 5] for start in range(0, len(text), 5)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(served: Endpoint) -> AsyncIterator[AsyncAnthropic]:
    url = f"http://{served.host}:{served.port}"
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


# ---------------------------------------------------------------------------------------------------- chat.completions


async def test_a_chat_calls_a_tool(endpoint: Endpoint) -> None:
    endpoint.service.script = calling()
    made = await endpoint.client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    choice = made.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.\n")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "find", CALLED)
    [wish] = endpoint.service.wishes
    assert json.loads(wish.tools)[0]["function"]["parameters"] == SCHEMA
    assert wish.grammar == ""

    messages: list[Any] = [*HI, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "R"}]
    endpoint.service.script = lambda wish: ScriptedWriting()
    await endpoint.client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    answered, result = endpoint.service.wishes[1].turns[1:]
    assert (answered.role, answered.text) == ("assistant", "Let me see.\n")
    function = {"name": "find", "arguments": CALLED}
    assert json.loads(answered.tool_calls) == [{"id": call.id, "type": "function", "function": function}]
    assert result == Turn("tool", "R", "", call.id, "find")


async def test_calls_come_in_a_stream(endpoint: Endpoint) -> None:
    endpoint.service.script = calling(f"Hm {CALL}\n{CALL}")
    async with endpoint.client.chat.completions.stream(model=MODEL, messages=HI, tools=[TOOL]) as stream:
        texts = [event.delta async for event in stream if event.type == "content.delta"]
        choice = (await stream.get_final_completion()).choices[0]
    assert "".join(texts) == choice.message.content == "Hm "
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [CALLED] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_several_calls_without_a_text_have_no_content(endpoint: Endpoint) -> None:
    endpoint.service.script = calling(f"\n{CALL}\n{CALL}")
    made = await endpoint.client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    message = made.choices[0].message
    assert (message.content, len(message.tool_calls or ())) == (None, 2)


async def test_one_call_ends_the_text_if_only_one_is_allowed(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting([CALL, "more"], held_at=1)
    made = await endpoint.client.chat.completions.create(
        model=MODEL, messages=HI, tools=[TOOL], parallel_tool_calls=False
    )
    assert made.choices[0].finish_reason == "tool_calls"
    assert endpoint.service.writings[0].given == 0  # it waits before its second piece, and is closed


@pytest.mark.parametrize(
    ("choice", "tool", "has_grammar", "has_tools"),
    [
        ("auto", TOOL, False, True),
        ("auto", {"type": "function", "function": TOOL["function"] | {"strict": True}}, True, True),
        ("none", TOOL, False, False),
        ("required", TOOL, True, True),
        ({"type": "function", "function": {"name": "find"}}, TOOL, True, True),
    ],
)
async def test_a_choice_forces_calls(
    endpoint: Endpoint, choice: Any, tool: Any, has_grammar: bool, has_tools: bool
) -> None:
    endpoint.service.script = calling(CALL)
    made = await endpoint.client.chat.completions.create(
        model=MODEL, messages=HI, tools=[tool], tool_choice=choice, parallel_tool_calls=True
    )
    [wish] = endpoint.service.wishes
    assert (bool(wish.grammar), bool(wish.tools)) == (has_grammar, has_tools)
    assert made.choices[0].finish_reason == ("tool_calls" if has_tools else "stop")


async def test_a_format_is_a_grammar(endpoint: Endpoint, claude: AsyncAnthropic) -> None:
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}):
        response_format: Any = wanted
        await endpoint.client.chat.completions.create(model=MODEL, messages=HI, response_format=response_format)
    await endpoint.client.responses.create(model=MODEL, input="Hi", text={"format": {"type": "json_object"}})
    output: Any = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    await claude.messages.create(model=MODEL, max_tokens=9, messages=HI, output_config=output)
    with pytest.raises(anthropic.BadRequestError, match="task_budget"):
        await claude.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=HI,
            output_config=output,
            extra_body={"output_config": {"task_budget": 1}},
        )
    anything, schema, response, message = (wish.grammar for wish in endpoint.service.wishes)
    assert '"properties"' in schema
    assert "%json" in anything
    assert response == anything
    assert message == schema.replace('"lenient": true', '"lenient": false')


async def test_a_template_without_tools_gets_a_system_text(endpoint: Endpoint) -> None:
    endpoint.service.has_tools = False
    endpoint.service.script = calling('{"name": "find", "arguments": {"q": "é"}}')
    made = await endpoint.client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL])
    assert made.choices[0].message.tool_calls is not None
    [wish] = endpoint.service.wishes
    assert (wish.tools, wish.turns[0].role, wish.turns[1]) == ("", "system", Turn("user", "Hi"))
    assert '"name": "find"' in wish.turns[0].text


async def test_mistral_gets_short_ids(endpoint: Endpoint) -> None:
    endpoint.service.tool_format = "mistral"
    function = {"name": "find", "arguments": "{}"}
    call = {"id": "call_0123456789", "type": "function", "function": function}
    result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "R"}
    messages: list[Any] = [*HI, {"role": "assistant", "tool_calls": [call]}, result]
    await endpoint.client.chat.completions.create(model=MODEL, messages=messages)
    _, answered, answer = endpoint.service.wishes[0].turns
    assert len(answer.tool_call_id) == 9
    assert json.loads(answered.tool_calls)[0]["id"] == answer.tool_call_id


# ----------------------------------------------------------------------------------------------------------- responses

FUNCTION: Any = {"type": "function", "strict": False, **TOOL["function"]}


async def test_a_response(endpoint: Endpoint) -> None:
    made = await endpoint.client.responses.create(
        model=MODEL, input="Hi", instructions="Be kind", max_output_tokens=9, store=True
    )
    assert (made.output_text, made.status, made.model_extra) == ("Hello, world", "completed", {"store": False})
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (3, 12, 15)
    [wish] = endpoint.service.wishes
    assert wish.turns == (Turn("system", "Be kind"), Turn("user", "Hi"))
    assert wish.max_new_tokens == 9
    endpoint.service.script = lambda wish: ScriptedWriting(ends="length")
    cut = await endpoint.client.responses.create(model=MODEL, input="Hi")
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_calls_a_function(endpoint: Endpoint, stream: bool) -> None:
    endpoint.service.script = calling()
    if stream:
        async with endpoint.client.responses.stream(model=MODEL, input="Hi", tools=[FUNCTION]) as events:
            kinds = [event.type async for event in events]
            made: Any = await events.get_final_response()
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-1] == "response.completed"
    else:
        made = await endpoint.client.responses.create(model=MODEL, input="Hi", tools=[FUNCTION])
    message, call = made.output
    assert (made.output_text, message.role, call.name) == ("Let me see.\n", "assistant", "find")
    assert json.loads(call.arguments) == CALLED

    endpoint.service.script = lambda wish: ScriptedWriting()
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "R"}
    items: list[Any] = [*HI, *made.output, result]
    await endpoint.client.responses.create(model=MODEL, input=items, tools=[FUNCTION], tool_choice="none")
    asked, answered, answer = endpoint.service.wishes[-1].turns
    assert (asked, answered.text, answer) == (
        Turn("user", "Hi"),
        "Let me see.\n",
        Turn("tool", "R", "", call.call_id, "find"),
    )
    assert json.loads(answered.tool_calls)[0]["function"] == {"name": "find", "arguments": CALLED}


async def test_a_response_that_fails_amid_its_stream(endpoint: Endpoint) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(fails=NetworkError("a stage is away"))
    stream = await endpoint.client.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "error"
    assert (events[-1].code, events[-1].message) == ("model_unreachable", "a stage is away")


# ------------------------------------------------------------------------------------------------------------ messages

CLAUDE_TOOL: Any = {"name": "find", "description": "Finds", "input_schema": SCHEMA}


async def test_a_message(endpoint: Endpoint, claude: AsyncAnthropic) -> None:
    endpoint.service.script = lambda wish: ScriptedWriting(ends="stop", stop_reason="END")
    made = await claude.messages.create(
        model=MODEL, max_tokens=9, system="Be kind", messages=HI, stop_sequences=["END"], extra_body={"top_k": 3}
    )
    assert (made.role, made.stop_reason, made.stop_sequence) == ("assistant", "stop_sequence", "END")
    assert [block.text for block in made.content if block.type == "text"] == ["Hello, world"]
    assert (made.usage.input_tokens, made.usage.output_tokens) == (3, 12)
    [wish] = endpoint.service.wishes
    assert wish.turns == (Turn("system", "Be kind"), Turn("user", "Hi"))
    assert (wish.max_new_tokens, wish.stop, wish.sampling.top_k) == (9, ("END",), 3)


@pytest.mark.parametrize(("ends", "reason"), [("end", "end_turn"), ("length", "max_tokens"), ("stop", "end_turn")])
async def test_a_message_has_its_reason(endpoint: Endpoint, claude: AsyncAnthropic, ends: str, reason: str) -> None:
    # A stop string that nobody asked for is one of the model's format.
    endpoint.service.script = lambda wish: ScriptedWriting(ends=ends, stop_reason="\nUser:" if ends == "stop" else None)
    made = await claude.messages.create(model=MODEL, max_tokens=9, messages=HI)
    assert (made.stop_reason, made.stop_sequence) == (reason, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_uses_a_tool(endpoint: Endpoint, claude: AsyncAnthropic, stream: bool) -> None:
    endpoint.service.script = calling()
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 99, "messages": HI, "tools": [CLAUDE_TOOL]}
    if stream:
        async with claude.messages.stream(**asked) as events:
            texts = [event.text async for event in events if event.type == "text"]
            made = await events.get_final_message()
        assert "".join(texts) == "Let me see.\n"
    else:
        made = await claude.messages.create(**asked)
    text, call = made.content
    assert text.type == "text"
    assert call.type == "tool_use"
    assert (text.text, call.name, call.input, made.stop_reason) == ("Let me see.\n", "find", CALLED, "tool_use")
    assert made.usage.output_tokens == len("Let me see.\n" + CALL)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "R"}]}
    messages: list[Any] = [*HI, {"role": "assistant", "content": made.content}]
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "And?"}]})
    endpoint.service.script = lambda wish: ScriptedWriting()
    await claude.messages.create(**(asked | {"messages": messages, "tool_choice": {"type": "any"}}))
    wish = endpoint.service.wishes[-1]
    assert [(turn.role, turn.text) for turn in wish.turns[1:]] == [
        ("assistant", "Let me see.\n"),
        ("tool", "R"),
        ("user", "And?"),
    ]
    assert wish.grammar


async def test_tokens_are_counted(endpoint: Endpoint, claude: AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model=MODEL, system="12", messages=HI, tools=[CLAUDE_TOOL])
    assert counted.input_tokens == 4
    [(turns, tools)] = endpoint.service.counted
    assert turns == (Turn("system", "12"), Turn("user", "Hi"))
    assert json.loads(tools)[0]["function"]["name"] == "find"


async def test_errors_have_the_form_of_the_interface(endpoint: Endpoint, claude: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(model="claude", max_tokens=9, messages=HI)
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["error"]["type"] == "not_found_error"
    endpoint.service.script = lambda wish: ScriptedWriting(fails=NetworkError("a stage is away"))
    with pytest.raises(anthropic.APIStatusError, match="a stage is away"):
        async with claude.messages.stream(model=MODEL, max_tokens=9, messages=HI) as events:
            await events.get_final_message()


async def test_tool_runner_goes_on_without_a_thread(endpoint: Endpoint, claude: AsyncAnthropic) -> None:
    @anthropic.beta_async_tool
    async def find(what: str) -> str:
        """Find."""
        return f"found {what}"

    call = '<tool_call>{"name": "find", "arguments": {"what": "it"}}</tool_call>'
    endpoint.service.script = lambda wish: ScriptedWriting(["Done" if wish.turns[-1].role == "tool" else call])
    runner = claude.beta.messages.tool_runner(model=MODEL, max_tokens=9, messages=HI, tools=[find])
    assert [message.stop_reason async for message in runner] == ["tool_use", "end_turn"]
    assert endpoint.service.wishes[-1].turns[-1].text == "found it"


async def test_coding_agents_are_answered(endpoint: Endpoint) -> None:
    """What Claude Code and LiteLLM add to a request changes nothing."""
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    hints = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [edit]},
        "output_config": {"effort": "high"},
    }
    told = [{"role": "system", "content": "One"}, {"role": "user", "content": "Hi"}]
    late = {"messages": [*told[1:], {"role": "system", "content": "Two"}, {"role": "system", "content": "Three"}]}
    body = {"model": MODEL, "max_tokens": 9, "system": "One"} | late | hints
    assert (await endpoint.post("/v1/messages", json.dumps(body).encode()))[0] == 200
    assert endpoint.service.wishes[-1].turns == (
        Turn("system", "One"),
        Turn("user", "Hi"),
        Turn("system", "Two\nThree"),
    )
    added = {"provider_specific_fields": {"refusal": None}, "reasoning_content": "hm", "annotations": [{}]}
    body = {"model": MODEL, "messages": [*told, {"role": "assistant", "content": "Ho"} | added, told[1]]}
    assert (await endpoint.post("/v1/chat/completions", json.dumps(body).encode()))[0] == 200
    body = {"model": MODEL, "input": "Hi", "client_metadata": {"session_id": "1"}}
    assert (await endpoint.post("/v1/responses", json.dumps(body).encode()))[0] == 200


async def test_the_key_of_anthropics_client_is_accepted(guarded: Endpoint) -> None:
    assert (await guarded.raw(request("GET", "/v1/models", f"x-api-key: {KEY}")))[0] == 200
    status, _, body = await guarded.raw(request("POST", "/v1/messages", "Content-Length: 0", "x-api-key: wrong"))
    assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")


# -------------------------------------------------------------------------------------------------------------- tokens


async def test_text_is_tokenized(endpoint: Endpoint) -> None:
    async def ask(path: str, **body: Any) -> Any:
        status, _, answer = await endpoint.post(path, json.dumps(body).encode())
        return json.loads(answer) if status == 200 else status

    assert await ask("/tokenize", model=MODEL, prompt="ab", return_token_strs=True) == {
        "count": 3,
        "max_model_len": 100,
        "tokens": [1, 97, 98],
        "token_strs": ["\x01", "a", "b"],
    }
    assert (await ask("/tokenize", prompt="ab", add_special_tokens=False))["tokens"] == [97, 98]
    assert (await ask("/tokenize", messages=HI))["tokens"] == [72, 105]
    assert await ask("/detokenize", model=MODEL, tokens=[97, 98]) == {"prompt": "ab"}
    assert await ask("/tokenize", prompt="ab", messages=HI) == 400
    assert await ask("/detokenize", model="other model", tokens=[]) == 404


async def test_openai_sees_no_change_of_the_form(endpoint: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported here"):
        await endpoint.client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
