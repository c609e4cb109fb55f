"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's interface."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from p2ptrain.compute.text import Turn
from roles.http.answers import MESSAGES, Problem, wrong
from roles.serving.texts import TextRequest, TokenizingService
from roles.verifier.http import bodies, events
from roles.verifier.http.answer import (
    AnswerOrigin,
    OneTextAnswer,
    Question,
    ToolUse,
    frame,
    prompt_of,
    read_format,
    read_tool_use,
    text_request,
)

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_NEEDED = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}


class _Block(bodies.StrictModel):
    """``text``, a ``tool_use`` of the assistant, or the ``tool_result`` of a user."""

    type: Literal["text", "tool_use", "tool_result"]
    text: str | None = None
    id: bodies.CallId | None = None
    name: bodies.Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: bodies.CallId | None = None
    content: str | bodies.ContentParts | None = None


class _Message(bodies.StrictModel):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[_Block], Field(min_length=1, fail_fast=True)]


class _Tool(bodies.FunctionFields):
    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")


class _ToolChoice(bodies.StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: bodies.Name | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(bodies.StrictModel):
    """``effort`` is a hint, which changes nothing here."""

    effort: str | None = None
    format: bodies.AnswerFormat | None = None


class CountFields(bodies.SamplingFields):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | bodies.ContentParts | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None


class MessageFields(CountFields):
    max_tokens: int = Field(ge=1)
    stop_sequences: bodies.StopStrings | None = None


def read_count(body: bytes) -> Question:
    """Count the tokens of a conversation."""
    fields = bodies.read_body_of(CountFields, body)
    text, use = TextRequest(turns=_turns(fields)), _tool_use(fields)

    async def count(service: TokenizingService) -> dict[str, Any]:
        return {"input_tokens": len(await prompt_of(service, text, use))}

    return fields.model, count


def _turns(fields: CountFields) -> tuple[Turn, ...]:
    turns = bodies.TurnList()
    if fields.system:
        turns.add_text("system", bodies.joined(fields.system))
    for index, message in enumerate(fields.messages):
        if isinstance(message.content, str):
            turns.add_text(message.role, message.content)
        else:
            _add_blocks(turns, message.role, message.content, f"messages.{index}.content")
    return turns.finish("messages")


def _add_blocks(turns: bodies.TurnList, role: str, blocks: Sequence[_Block], where: str) -> None:
    """Successive blocks of text are one turn."""
    texts = list[str]()
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        bodies.check_needed(block, _NEEDED[block.type], place)
        if block.type != "text" and (block.type == "tool_use") != (role == "assistant"):
            raise wrong(f"{place}.type", f"a message of the {role} has no such block")
        if block.type == "text":
            texts.append(block.text or "")
            continue
        if texts:
            turns.add_text(role, "\n".join(texts))
            texts = []
        if block.type == "tool_use":
            turns.add_call(block.id or "", block.name or "", block.input or {}, place)
        else:
            turns.add_result(block.tool_use_id or "", bodies.joined(block.content), f"{place}.tool_use_id")
    if texts:
        turns.add_text(role, "\n".join(texts))


def _tool_use(fields: CountFields) -> ToolUse:
    choice = fields.tool_choice or _ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice.name", "the type tool has a name, and no other has one")
    function = bodies.FunctionFields(name=choice.name) if choice.name else None
    return read_tool_use(
        fields.tools or (),
        "input_schema",
        function or {"any": "required"}.get(choice.type, choice.type),
        is_parallel=not choice.disable_parallel_tool_use,
    )


class MessageAnswer(OneTextAnswer):
    """The content is a list of blocks, each of them text or a call. A stream opens and closes them in order."""

    def __init__(self, body: bytes, origin: AnswerOrigin) -> None:
        fields = bodies.read_body_of(MessageFields, body)
        config, most = fields.output_config or _OutputConfig(), fields.max_tokens
        bodies.check_others(config)
        grammar = read_format(config.format, "output_config.format.schema", is_strict=True)
        text = text_request(fields, origin, turns=_turns(fields), max_new_tokens=most, grammar=grammar)
        text = replace(text, stop=(*text.stop, *(fields.stop_sequences or ())))
        super().__init__(fields, origin, [text], _tool_use(fields))
        self._blocks = list[dict[str, Any]]()
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def frames(self, event: events.ChoiceEvent) -> Iterator[bytes]:
        match event:
            case events.ChoiceBegan():
                yield _event("message_start", message=self.document())
            case events.TextAdded() if event.text:
                if not self._blocks or self._blocks[-1]["type"] != "text":
                    yield self._open_block({"type": "text", "text": ""})
                self._blocks[-1]["text"] += event.text
                yield self._block_event("delta", delta={"type": "text_delta", "text": event.text})
            case events.CallAdded():
                yield from self._close_text()
                call = {"type": "tool_use", "id": f"toolu_{event.ident}", "name": event.name, "input": {}}
                yield self._open_block(call)
                call["input"] = json.loads(event.arguments)
                yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": event.arguments})
                yield self._block_event("stop")
            case events.ChoiceEnded():
                yield from self._close_text()
                is_asked = event.reason == "stop" and event.stop_reason in self.texts[0].stop
                reason = "stop_sequence" if is_asked else _REASONS[event.reason]
                self._end = {"stop_reason": reason, "stop_sequence": event.stop_reason if is_asked else None}

    def last_frames(self) -> Iterator[bytes]:
        yield _event("message_delta", delta=self._end, usage={"output_tokens": self.new_tokens})
        yield _event("message_stop")

    def error_frame(self, problem: Problem) -> bytes:
        return frame(problem.as_json(MESSAGES), "error")

    def document(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.origin.digits}",
            "type": "message",
            "role": "assistant",
            "model": self.service.model,
            "content": self._blocks,
            **self._end,
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": self.new_tokens},
        }

    def _open_block(self, block: dict[str, Any]) -> bytes:
        self._blocks.append(block)
        return self._block_event("start", content_block=block)

    def _close_text(self) -> Iterator[bytes]:
        """Close the last block if it is text; a call is closed at once."""
        if self._blocks and self._blocks[-1]["type"] == "text":
            yield self._block_event("stop")

    def _block_event(self, what: str, **fields: Any) -> bytes:
        return _event(f"content_block_{what}", index=len(self._blocks) - 1, **fields)


def _event(name: str, /, **fields: Any) -> bytes:
    return frame({"type": name, **fields}, name)
