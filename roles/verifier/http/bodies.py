"""Bodies of requests over HTTP: what the interfaces share.

There are three kinds of parameters. Obeyed ones are fields. Those that do not change the text are ignored
(``IGNORED``). All others are refused with the reason, except for values that request nothing (``NOT_OBEYED``): ignoring
a parameter that changes the text would be worse than a refusal.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from p2ptrain.compute.text import ASSISTANT, SYSTEM, TOOL, Turn
from p2ptrain.core.serving import MOST_BIAS, MOST_BIASES, MOST_SETTING
from p2ptrain.core.texts import shortened
from roles.http.answers import Problem, missing, read_model, wrong
from roles.serving.tool_calls import Tool
from wire.text_messages import MOST_PRIORITY

IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "truncation", "include"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control", "inference_geo"),
    *("reasoning", "reasoning_effort", "verbosity", "thinking", "client_metadata"),
}
"""Parameters for the service of OpenAI or Anthropic, and hints: the text is the same without them."""
NOT_OBEYED: dict[str, str] = {
    "n": "this interface has one answer: use /v1/chat/completions",
    "best_of": "the best of several texts is found by /v1/completions only",
    "echo": "only /v1/completions repeats the prompt",
    "suffix": "text is written after the prompt, not into a gap",
    "top_logprobs": "this interface returns no probabilities: use /v1/chat/completions",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "chats have tools: use /v1/chat/completions"),
    **dict.fromkeys(("functions", "function_call"), "it is the old name of tools: use tools and tool_choice"),
    **dict.fromkeys(("modalities", "audio"), "only text is supported"),
    **dict.fromkeys(
        ("web_search_options", "mcp_servers", "container", "max_tool_calls"), "this endpoint runs no tools itself"
    ),
    **dict.fromkeys(
        ("context_management", "previous_response_id", "conversation", "background", "thread"),
        "nothing is stored here: send the whole conversation",
    ),
    "prompt": "there are no stored prompts: send the text",
}
"""Parameters that would change the text → why they are refused, unless their value requests nothing."""
HARMLESS: tuple[Any, ...] = (None, False, 0, "", "none", "auto", [])
HARMLESS_HERE = {
    "n": 1,
    "best_of": 1,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
"""Values that request nothing: of any parameter, and of some."""
MOST_SCHEMA_CHARS, MOST_SCHEMA_MEMBERS, MOST_JSON_DEPTH = 1 << 17, 500, 32
"""Bounds of JSON schemas: characters of all of a request, members of an object or list in one, and its levels, which
arguments of calls share. The time to compile an object grows with the square of its members."""
MOST_TOOLS = 128


class StrictModel(BaseModel):
    """Fields of a body, without silent conversions. ``check_others`` checks all other parameters."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


_Stop = Annotated[str, Field(min_length=1, max_length=512)]
StopStrings = Annotated[list[_Stop], Field(max_length=4, fail_fast=True)]
ModelName = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=128)]


class ContentPart(StrictModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


ContentParts = Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)]


def joined(content: str | list[ContentPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class SamplingFields(StrictModel):
    """Parameters that all interfaces have here; those of vLLM are among them."""

    model: ModelName
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=MOST_SETTING)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-MOST_BIAS, le=MOST_BIAS)
    frequency_penalty: float | None = Field(default=None, ge=-MOST_BIAS, le=MOST_BIAS)
    repetition_penalty: float | None = Field(default=None, gt=0, le=MOST_BIAS)
    logit_bias: dict[str, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]] | None = Field(
        default=None, max_length=MOST_BIASES
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: _Stop | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculate: Literal["auto", "off"] = "auto"
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)


class JsonSchema(StrictModel):
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class AnswerFormat(JsonSchema):
    """The format of an answer. Chats and completions have the schema in ``json_schema``, others beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionFields(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, where: str) -> Tool:
        schema = {"type": "object", **(self.parameters or {})}
        if schema["type"] != "object":
            raise wrong(f"{where}.type", "the arguments of a tool are an object")
        return Tool(self.name, self.description or "", schema, bool(self.strict))


_SomeBody = TypeVar("_SomeBody", bound=StrictModel)


def read_body_of(schema: type[_SomeBody], body: bytes) -> _SomeBody:
    """Parse a body and check its other parameters. Raises ``Problem``."""
    fields = read_model(schema, body)
    check_others(fields)
    return fields


def check_others(fields: StrictModel) -> None:
    for name, value in (fields.model_extra or {}).items():
        if name in IGNORED:
            continue
        if name not in NOT_OBEYED:
            named = shortened(name, 64)
            raise Problem(400, f"unknown parameter {named}: leave it out", code="unknown_parameter", param=named)
        if value not in HARMLESS and value != HARMLESS_HERE.get(name):
            raise unsupported(name, NOT_OBEYED[name])


def check_needed(item: StrictModel, names: Iterable[str], where: str) -> None:
    """Raise ``Problem`` if the item at ``where`` lacks a field that its type needs."""
    for name in names:
        if getattr(item, name) is None:
            raise missing(f"{where}.{name}")


def unsupported(param: str, why: str) -> Problem:
    # Anthropic's client then sends whole conversations.
    more = {"details": {"error_code": "thread_unsupported_request"}} if param == "thread" else {}
    text = f"{param} is not supported here: {why}"
    return Problem(400, text, code="unsupported_parameter", param=param, more=more)


def check_schemas(schemas: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ``Problem`` if schemas, with their places in the body, exceed the bounds."""
    chars = 0
    for where, schema in schemas:
        chars += len(json.dumps(schema))
        if chars > MOST_SCHEMA_CHARS:
            raise wrong(where, f"the schemas of a request may have {MOST_SCHEMA_CHARS} characters together")
        for groups in _levels(schema, where):
            if any(len(group) > MOST_SCHEMA_MEMBERS for group in groups):
                raise wrong(where, f"an object or a list of the schema has more than {MOST_SCHEMA_MEMBERS} members")


def _levels(value: Any, where: str) -> Iterator[list[Any]]:
    """The objects and lists of each level of a JSON value. Raises ``Problem`` if there are too many levels: templates
    and parsers recurse."""
    level = [value]
    for _ in range(MOST_JSON_DEPTH):
        groups = [each for each in level if isinstance(each, dict | list)]
        yield groups
        level = [inner for group in groups for inner in (group.values() if isinstance(group, dict) else group)]
    if level:
        raise wrong(where, f"this JSON is more than {MOST_JSON_DEPTH} levels deep")


class TurnList:
    """The turns of a conversation, as they are read. Methods raise ``Problem``; ``where``: the place in the body."""

    def __init__(self) -> None:
        self._turns = list[Turn]()
        self._calls = list[dict[str, Any]]()  # of the last turn, which is then the assistant's
        self._names = dict[str, str]()  # id of a call → name of the tool

    def add_text(self, role: str, text: str) -> None:
        """Add a turn. Texts of the system that follow one another are one: many templates know only a first one."""
        self._close_calls()
        role = SYSTEM if role == "developer" else role
        if role == SYSTEM and self._turns and self._turns[-1].role == SYSTEM:
            text = f"{self._turns.pop().text}\n{text}"
        self._turns.append(Turn(role, text))

    def add_call(self, ident: str, name: str, arguments: str | dict[str, Any], where: str) -> None:
        """Add a call to the assistant's turn that is the last one, or to a new one."""
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise wrong(where, "must be JSON text of an object")
        deque(_levels(parsed, where), maxlen=0)
        if not self._turns or self._turns[-1].role != ASSISTANT:
            self.add_text(ASSISTANT, "")
        self._names[ident] = name
        self._calls.append({"id": ident, "type": "function", "function": {"name": name, "arguments": parsed}})

    def add_result(self, ident: str, text: str, where: str) -> None:
        if ident not in self._names:
            raise wrong(where, "no call before it has this id")
        self._close_calls()
        self._turns.append(Turn(TOOL, text, "", ident, self._names[ident]))

    def finish(self, where: str) -> tuple[Turn, ...]:
        if next((turn.role for turn in reversed(self._turns) if turn.role != SYSTEM), ASSISTANT) == ASSISTANT:
            raise wrong(where, "the last message must be a user's or a tool's, for the model to answer")
        return tuple(self._turns)

    def _close_calls(self) -> None:
        if self._calls:
            self._turns[-1] = replace(self._turns[-1], tool_calls=json.dumps(self._calls))
            self._calls = []
