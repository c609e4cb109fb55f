"""LangChain: tools and structured output in all its methods, for both interfaces, and an agent."""

from __future__ import annotations

from typing import Literal

from common import MODEL, MOST, URL, WEATHER, attempt
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Trip(BaseModel):
    """A trip. Other fields are forbidden: a random model would add some without end."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return "7 degrees"


def agent(model):
    from langchain.agents import create_agent

    made = create_agent(model, [weather]).invoke({"messages": [("user", WEATHER)]}, {"recursion_limit": 8})
    return [type(message).__name__ for message in made["messages"]]


models = {
    "openai": ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, max_tokens=MOST),
    "openai responses": ChatOpenAI(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, use_responses_api=True, max_tokens=MOST
    ),
    "anthropic": ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_retries=0, max_tokens=MOST),
}
for name, model in models.items():
    attempt(f"{name}: invoke", lambda: model.invoke(WEATHER).text)
    attempt(f"{name}: stream", lambda: "".join(part.text for part in model.stream(WEATHER)))
    attempt(f"{name}: bind_tools", lambda: model.bind_tools([weather]).invoke(WEATHER).tool_calls)
    attempt(
        f"{name}: bind_tools, any", lambda: model.bind_tools([weather], tool_choice="any").invoke(WEATHER).tool_calls
    )
    methods = ["function_calling", "json_schema"] + (["json_mode"] if name != "anthropic" else [])
    for method in methods:
        asked = WEATHER + (' Answer as JSON such as {"city": "Oslo", "days": 3}.' if method == "json_mode" else "")
        wanted = dict if method == "json_mode" else Trip
        schema = None if wanted is dict else Trip
        attempt(f"{name}: {method}", lambda: str(model.with_structured_output(schema, method=method).invoke(asked)))
    attempt(f"{name}: agent", lambda: agent(model))
