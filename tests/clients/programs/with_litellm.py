"""LiteLLM: both interfaces, streams and tools."""

from __future__ import annotations

import litellm
from common import MODEL, MOST, PARAMETERS, URL, WEATHER, attempt

TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}
ASK = {"messages": [{"role": "user", "content": WEATHER}], "api_key": "none", "max_tokens": MOST, "num_retries": 0}
ROADS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
    "text": {"model": f"text-completion-openai/{MODEL}", "api_base": f"{URL}/v1"},
}
for name, road in ROADS.items():
    attempt(f"{name}: completion", lambda: litellm.completion(**road, **ASK).choices[0].message.content)
    attempt(
        f"{name}: stream",
        lambda: "".join(p.choices[0].delta.content or "" for p in litellm.completion(**road, **ASK, stream=True)),
    )
    if name != "text":
        attempt(
            f"{name}: tools",
            lambda: (
                litellm.completion(**road, **ASK, tools=[TOOL], tool_choice="required")
                .choices[0]
                .message.tool_calls[0]
                .function.arguments
            ),
        )
attempt(
    "json_schema",
    lambda: (
        litellm.completion(
            **ROADS["openai"],
            **ASK,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}},
        )
        .choices[0]
        .message.content
    ),
)


def conversation(road):
    """A call, its result, and the next answer: the message of the first one goes back as LiteLLM made it."""
    asked = {**ASK, "tools": [TOOL], **road}
    message = litellm.completion(**asked, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 degrees"}
    asked["messages"] = [*ASK["messages"], message, result]
    return litellm.completion(**asked).choices[0].finish_reason


for name, road in ROADS.items():
    if name != "text":
        attempt(f"{name}: tools, a result", lambda: conversation(road))
