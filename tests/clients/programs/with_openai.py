"""OpenAI's own client: chats, tools, streams, formats, probabilities, and the newer interface."""

from __future__ import annotations

from typing import Literal

from common import MODEL, MOST, PARAMETERS, URL, WEATHER, attempt
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "max_tokens": MOST}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS},
}


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def tools(**more):
    made = client.chat.completions.create(**ASK, tools=[TOOL], **more).choices[0]
    return [
        made.finish_reason,
        made.message.content,
        [call.function.arguments for call in made.message.tool_calls or ()],
    ]


def conversation():
    first = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    call = first.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees"}
    asked = ASK | {"messages": [*ASK["messages"], first.choices[0].message, result]}
    return client.chat.completions.create(**asked, tools=[TOOL]).choices[0].message.content


def stream(**more):
    parts = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}, **more))
    assert parts[-1].usage.completion_tokens > 0
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def helper_stream():
    with client.chat.completions.stream(
        **ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as events:
        return events.get_final_completion().choices[0].message.tool_calls[0].function.arguments


def parse():
    return client.chat.completions.parse(**ASK, response_format=Trip).choices[0].message.parsed.model_dump()


def object_format():
    return (
        client.chat.completions.create(**ASK, response_format={"type": "json_object"}, temperature=0)
        .choices[0]
        .message.content
    )


def logprobs():
    made = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, n=2)
    assert len(made.choices) == 2
    first = made.choices[0].logprobs.content[0]
    return [first.token, first.logprob, len(first.top_logprobs)]


def completion():
    made = client.completions.create(model=MODEL, prompt=["def f(", "import "], max_tokens=8, logprobs=2, n=2, seed=1)
    assert len(made.choices) == 4
    return [choice.text for choice in made.choices]


def response():
    made = client.responses.create(model=MODEL, input=WEATHER, instructions="Be brief.", max_output_tokens=MOST)
    return made.output_text


def response_parse():
    return client.responses.parse(model=MODEL, input=WEATHER, text_format=Trip).output_parsed.model_dump()


def response_stream():
    tool = {"type": "function", **TOOL["function"], "strict": True}
    with client.responses.stream(model=MODEL, input=WEATHER, tools=[tool], tool_choice="required") as events:
        kinds = [event.type for event in events]
        return [len(kinds), events.get_final_response().output[0].arguments]


attempt("models", lambda: [model.id for model in client.models.list()])
attempt("chat", lambda: client.chat.completions.create(**ASK).choices[0].message.content)
attempt("tools, the model decides", tools)
attempt("tools, required", lambda: tools(tool_choice="required", parallel_tool_calls=False))
attempt("tools, a result and an answer", conversation)
attempt("stream with usage", stream)
attempt("stream helper with a tool", helper_stream)
attempt("parse, json_schema", parse)
attempt("json_object", object_format)
attempt("log-probabilities, n", logprobs)
attempt("completions", completion)
attempt("responses", response)
attempt("responses.parse", response_parse)
attempt("responses.stream with a tool", response_stream)
