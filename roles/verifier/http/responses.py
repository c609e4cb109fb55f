"""``POST /v1/responses``: OpenAI's newer interface, as far as text and functions go. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from p2ptrain.compute.text import ASSISTANT, Turn
from roles.http.answers import Problem
from roles.verifier.http import bodies, events
from roles.verifier.http.answer import (
    AnswerOrigin,
    OneTextAnswer,
    ToolUse,
    frame,
    read_format,
    read_tool_use,
    text_request,
)


class _Item(bodies.StrictModel):
    """A message, a ``function_call`` of the assistant, or its ``function_call_output``."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | bodies.ContentParts | None = None
    call_id: bodies.CallId | None = None
    name: bodies.Name | None = None
    arguments: str | None = None
    output: str | bodies.ContentParts | None = None


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class _Function(bodies.FunctionFields):
    type: Literal["function"]


class _Text(bodies.StrictModel):
    format: bodies.AnswerFormat | None = None


class ResponseFields(bodies.SamplingFields):
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Annotated[list[_Function], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Function | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None

    def turns(self) -> tuple[Turn, ...]:
        """Raises ``Problem``."""
        turns = bodies.TurnList()
        if self.instructions:
            turns.add_text("system", self.instructions)
        if isinstance(self.input, str):
            turns.add_text("user", self.input)
            return turns.finish("input")
        for index, item in enumerate(self.input):
            where = f"input.{index}"
            bodies.check_needed(item, _NEEDED[item.type], where)
            if item.type == "message":
                turns.add_text(item.role or "", bodies.joined(item.content))
            elif item.type == "function_call":
                turns.add_call(item.call_id or "", item.name or "", item.arguments or "", f"{where}.arguments")
            else:
                turns.add_result(item.call_id or "", bodies.joined(item.output), f"{where}.call_id")
        return turns.finish("input")

    def tool_use(self) -> ToolUse:
        return read_tool_use(self.tools or (), "parameters", self.tool_choice, is_parallel=self.parallel_tool_calls)


class ResponseAnswer(OneTextAnswer):
    """The output is a list of items: messages, and calls of functions. A stream opens and closes them in order."""

    def __init__(self, body: bytes, origin: AnswerOrigin) -> None:
        self._fields = fields = bodies.read_body_of(ResponseFields, body)
        grammar = read_format(fields.text.format if fields.text else None, "text.format.schema")
        most, turns = fields.max_output_tokens, fields.turns()
        text = text_request(fields, origin, turns=turns, max_new_tokens=most, grammar=grammar)
        super().__init__(fields, origin, [text], fields.tool_use())
        self._output = list[dict[str, Any]]()
        self._status = "in_progress"
        self._number = 0  # of the next frame

    def frames(self, event: events.ChoiceEvent) -> Iterator[bytes]:
        match event:
            case events.ChoiceBegan():
                yield self._frame("response.created", response=self.document())
                yield self._frame("response.in_progress", response=self.document())
            case events.TextAdded() if event.text:
                if not self._output or self._output[-1]["type"] != "message":
                    yield from self._open_message()
                part = self._output[-1]["content"][0]
                part["text"] += event.text
                yield self._frame("response.output_text.delta", **self._place(), delta=event.text, logprobs=[])
            case events.CallAdded():
                yield from self._close_message()
                yield from self._add_call(event)
            case events.ChoiceEnded():
                yield from self._close_message()
                self._status = "incomplete" if event.reason == "length" else "completed"

    def last_frames(self) -> Iterator[bytes]:
        yield self._frame(f"response.{self._status}", response=self.document())

    def error_frame(self, problem: Problem) -> bytes:
        return self._frame("error", code=problem.code, message=problem.message, param=problem.param or None)

    def _open_message(self) -> Iterator[bytes]:
        ident = f"msg_{self.origin.digits}{len(self._output)}"
        content, part = list[dict[str, Any]](), {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": ident, "type": "message", "role": ASSISTANT, "status": "in_progress", "content": content}
        self._output.append(item)
        yield self._item_frame("added")
        content.append(part)
        yield self._frame("response.content_part.added", **self._place(), part=part)

    def _close_message(self) -> Iterator[bytes]:
        if self._output and (item := self._output[-1])["type"] == "message":
            item["status"] = "completed"
            part = item["content"][0]
            yield self._frame("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            yield self._frame("response.content_part.done", **self._place(), part=part)
            yield self._item_frame("done")

    def _add_call(self, call: events.CallAdded) -> Iterator[bytes]:
        item = {"id": f"fc_{call.ident}", "type": "function_call", "call_id": f"call_{call.ident}", "name": call.name}
        item |= {"status": "in_progress", "arguments": ""}
        where = {"item_id": item["id"], "output_index": len(self._output)}
        self._output.append(item)
        yield self._item_frame("added")
        yield self._frame("response.function_call_arguments.delta", **where, delta=call.arguments)
        item |= {"status": "completed", "arguments": call.arguments}
        whole = {"name": call.name, "arguments": call.arguments}
        yield self._frame("response.function_call_arguments.done", **where, **whole)
        yield self._item_frame("done")

    def _item_frame(self, what: str) -> bytes:
        index = len(self._output) - 1
        return self._frame(f"response.output_item.{what}", output_index=index, item=self._output[index])

    def _place(self) -> dict[str, Any]:
        """Where the text of the last item is."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _frame(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return frame({"type": name, "sequence_number": number, **fields}, name)

    def document(self) -> dict[str, Any]:
        """The response so far."""
        use = self.tool_use
        named = {"type": "function", "name": use.named}
        is_cut = self._status == "incomplete"
        return {
            "id": f"resp_{self.origin.digits}",
            "object": "response",
            "created_at": self.origin.created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.service.model,
            "output": self._output,
            "parallel_tool_calls": use.has_many,
            "store": False,
            "tool_choice": named if use.named else use.choice,
            "tools": [tool.model_dump() for tool in self._fields.tools or ()],
            "usage": None if self._status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }
