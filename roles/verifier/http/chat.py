"""``POST /v1/chat/completions``: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from p2ptrain.compute.text import TOOL
from p2ptrain.core.serving import MOST_TOP_LOGPROBS, TokenLogprob
from p2ptrain.core.texts import shortened
from roles.http.answers import missing, wrong
from roles.verifier.http import bodies, events
from roles.verifier.http.answer import AnswerOrigin, ToolUse, read_tool_use, text_request
from roles.verifier.http.completions import OpenAiAnswer, OpenAiFields, finite

_UNREAD = {"name", "provider_specific_fields", "reasoning_content", "annotations", "cache_control"}
"""Fields of messages that are ignored: other programs send back what other servers added to an answer."""


class _CalledFunction(bodies.StrictModel):
    name: bodies.Name
    arguments: str


class _Call(bodies.StrictModel):
    id: bodies.CallId
    type: Literal["function"] = "function"
    function: _CalledFunction


class ChatMessage(bodies.StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | bodies.ContentParts | None = None
    tool_calls: Annotated[list[_Call], Field(fail_fast=True)] | None = None
    tool_call_id: bodies.CallId | None = None


class ChatTool(bodies.StrictModel):
    type: Literal["function"]
    function: bodies.FunctionFields


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
Tools = Annotated[list[ChatTool], Field(fail_fast=True)]


class ChatFields(OpenAiFields):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatTool | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice.function if isinstance(self.tool_choice, ChatTool) else self.tool_choice
        return read_tools(self.tools, choice, is_parallel=self.parallel_tool_calls)


def read_tools(
    tools: list[ChatTool] | None, choice: str | bodies.FunctionFields | None = None, *, is_parallel: bool | None = None
) -> ToolUse:
    """As ``read_tool_use``."""
    functions = [tool.function for tool in tools or ()]
    return read_tool_use(functions, "function.parameters", choice, is_parallel=is_parallel)


def read_messages(messages: list[ChatMessage]) -> bodies.TurnList:
    """Raises ``Problem``."""
    turns = bodies.TurnList()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        for name, value in (message.model_extra or {}).items():
            if name not in _UNREAD and value not in (None, []):  # earlier answers may have empty fields
                raise bodies.unsupported(f"{where}.{shortened(name, 64)}", "only text and tools are supported")
        if message.tool_calls and message.role != "assistant":
            raise bodies.unsupported(f"{where}.tool_calls", "only an assistant's message calls tools")
        if message.content is None and not message.tool_calls:
            raise missing(f"{where}.content")
        if message.role == TOOL:
            turns.add_result(message.tool_call_id or "", bodies.joined(message.content), f"{where}.tool_call_id")
            continue
        turns.add_text(message.role, bodies.joined(message.content))
        for call in message.tool_calls or ():
            turns.add_call(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls")
    return turns


class ChatAnswer(OpenAiAnswer):
    prefix, kind, frame_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: bytes, origin: AnswerOrigin) -> None:
        fields = bodies.read_body_of(ChatFields, body)
        if fields.top_logprobs and not fields.logprobs:
            raise wrong("top_logprobs", "allowed only if logprobs is true")
        most = fields.most_tokens()
        if most == 0:
            raise wrong("max_tokens", "must be at least 1")
        text = text_request(
            fields,
            origin,
            turns=read_messages(fields.messages).finish("messages"),
            max_new_tokens=most,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            grammar=fields.grammar(),
        )
        count = fields.n or 1
        super().__init__(fields, origin, [text], fields.tool_use(), choices=count, candidates=count)

    def parts(self, event: events.ChoiceEvent) -> Iterator[dict[str, Any]]:
        match event:
            case events.ChoiceBegan():
                yield self.part(event, delta={"role": "assistant", "content": ""})
            case events.TextAdded() if event.text or event.logprobs:
                yield self.part(event, self._logprobs(event.logprobs), delta={"content": event.text})
            case events.CallAdded():
                function = {"name": event.name, "arguments": event.arguments}
                call = {"index": event.number, "id": f"call_{event.ident}", "type": "function", "function": function}
                yield self.part(event, delta={"tool_calls": [call]})
            case events.ChoiceEnded():
                yield self.part(event, delta={})

    def whole(self, choices: Sequence[Sequence[events.ChoiceEvent]]) -> dict[str, Any]:
        document = super().whole(choices)
        for choice in document["choices"]:
            message = choice["message"] = choice.pop("delta")
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" in message and not message["content"].strip():
                message["content"] = None
        return document

    def _logprobs(self, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        if self.texts[0].logprobs is None:
            return None
        rows = [
            {
                **self._token(each.token, each.logprob),
                "top_logprobs": [self._token(token, value) for token, value in each.top],
            }
            for each in logprobs
            if each is not None
        ]
        return {"content": rows, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.service.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}
