"""Anthropic's own client: messages, tools, streams, counting and structured output."""

from __future__ import annotations

from typing import Literal

from anthropic import Anthropic, beta_tool
from common import MODEL, MOST, PARAMETERS, URL, WEATHER, attempt
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "max_tokens": MOST}
TOOL = {"name": "weather", "description": "Weather of a city", "input_schema": PARAMETERS}


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def conversation():
    first = client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "7 degrees"}
    asked = ASK | {
        "messages": [
            *ASK["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
    }
    return [first.content[-1].input, client.messages.create(**asked, tools=[TOOL]).content[0].text]


def stream():
    with client.messages.stream(
        **ASK, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ) as events:
        return "".join(events.text_stream) + events.get_final_message().stop_reason


def stream_tool():
    with client.messages.stream(**ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}) as events:
        return events.get_final_message().content[0].input


def parse():
    return client.messages.parse(**ASK, output_format=Trip).parsed_output.model_dump()


@beta_tool
def weather(city: str) -> str:
    """Weather of a city."""
    return "7 degrees"


def runner():
    return [
        message.stop_reason for message in client.beta.messages.tool_runner(**ASK, tools=[weather], max_iterations=2)
    ]


attempt("models", lambda: [model.id for model in client.models.list()])
attempt("message", lambda: client.messages.create(**ASK).content[0].text)
attempt("count tokens", lambda: client.messages.count_tokens(model=MODEL, messages=ASK["messages"]).input_tokens)
attempt("tools, a result and an answer", conversation)
attempt("stream with a cached system text", stream)
attempt("stream with a tool", stream_tool)
attempt("parse, structured output", parse)
attempt("tool runner (beta)", runner)
more = {"stop_sequences": ["."], "extra_body": {"top_k": 5}}
attempt("top_k, stop_sequences", lambda: client.messages.create(**ASK, **more).stop_reason)
