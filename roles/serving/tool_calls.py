"""Calls of tools in a model's text: how chat templates write them, a reader of them, and grammars that force them.

A chat template defines the format, because the model was trained on it. ``FORMATS`` lists the known ones:

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...      Qwen, SmolLM, Hermes
    llama3    {"name": "f", "parameters": {...}}; ...                          Llama 3; <|python_tag|> may be before it
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]             Mistral
    json      {"name": "f", "arguments": {...}}, one a line                    templates without tools: explain_tools

Special tokens are no part of a text, so the marks of ``llama3`` and ``mistral`` are usually not in it. There a text has
calls if it begins with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2ptrain.compute.text import SYSTEM, TOOL, USER, Turn


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. ``parameters``: JSON schema of its arguments, an object. ``is_strict``: the
    arguments of every call must match it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    def as_json(self) -> dict[str, Any]:
        """The tool as in OpenAI's interface, which templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments``: JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written.

    Attributes:
        begin, end: marks around each call, or around the list of calls.
        is_bare: calls are at the beginning of a text only, and the mark before them may be missing.
        is_list: the calls are one JSON list.
        key: of the arguments. between: what separates calls.
    """

    begin: str = ""
    end: str = ""
    is_bare: bool = True
    is_list: bool = False
    key: str = "arguments"
    between: str = "\n"


FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", is_bare=False),
    "llama3": CallFormat("<|python_tag|>", key="parameters", between="; "),
    "mistral": CallFormat("[TOOL_CALLS]", is_list=True, between=", "),
    "json": CallFormat(),
}
_SPACE = r"[ \n]{0,40}"
"""White space in JSON that a grammar allows: without a limit a model may write nothing else."""
_EXPLANATION = """You may call these functions, each described by the JSON schema of its arguments. To call them, \
answer with nothing but one line of JSON for each call: {"name": NAME, "arguments": {...}}. Their results follow."""


# -------------------------------------------------------------------------------------------------------------- reading

_OUTSIDE, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'"|\\.?', re.DOTALL)
_KEYS = {"name", "arguments", "parameters", "id", "type"}


class CallReader:
    """Finds the calls in a text that arrives in pieces; the division into pieces does not matter.

    A call is returned when it is complete; until then its text is held back. What is no valid call of a known tool
    remains text. Space between calls is dropped.
    """

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._found = list[str | ToolCall]()
        self._reading = self._read()

    def feed(self, piece: str) -> list[str | ToolCall]:
        """Take the next piece. Returns the text and the calls that are certain now."""
        self._held += piece
        next(self._reading)
        found, self._found = self._found, []
        return found

    def finish(self) -> list[str | ToolCall]:
        """End the text. Returns what was held back."""
        return [self._held] if self._held else []

    def _read(self) -> Iterator[None]:
        """Read ``_held`` from its beginning. Yields when it needs more text."""
        form, space = self._form, " \t\r\n;" if self._form.is_bare else None
        while True:
            if not form.is_bare:
                while (at := self._held.find(form.begin)) < 0:
                    self._take_text(len(self._held) - self._size_of_mark_at_end())
                    yield
                self._take_text(at)
            while not (rest := self._behind_mark()):
                yield
            start = len(self._held) - len(rest)
            stop = (yield from self._find_end(start)) if rest[0] in "{[" else len(form.begin)
            calls = self._calls(self._held[start:stop])
            if not calls:
                self._take_text(stop)
                while form.is_bare:  # no call can follow
                    self._take_text(len(self._held))
                    yield
                continue
            self._found += calls
            self._held = self._held[stop:].lstrip()
            while self._held != form.end and form.end.startswith(self._held):
                yield
                self._held = self._held.lstrip()
            self._held = self._held.removeprefix(form.end)  # it may be missing
            while not self._held.strip(space):
                self._held = ""
                yield
            self._held = self._held.lstrip(space)

    def _take_text(self, size: int) -> None:
        if size:
            self._found.append(self._held[:size])
            self._held = self._held[size:]

    def _size_of_mark_at_end(self) -> int:
        """Of what may become a mark."""
        mark = self._form.begin
        return next((size for size in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:size])), 0)

    def _behind_mark(self) -> str:
        """What is behind the mark, if there is one; empty: more text shows it."""
        mark, rest = self._form.begin, self._held.lstrip()
        if rest.startswith(mark):
            return rest[len(mark) :].lstrip()
        return "" if mark.startswith(rest) else rest

    def _find_end(self, at: int) -> Generator[None, None, int]:
        """Return the end of the JSON value that begins at ``at``."""
        depth, is_in_string = 0, False
        while True:
            while match := (_IN_STRING if is_in_string else _OUTSIDE).search(self._held, at):
                sign, at = match[0], match.end()
                if sign == "\\":  # the next piece has what it escapes
                    at -= 1
                    break
                if sign == '"':
                    is_in_string = not is_in_string
                elif len(sign) == 1:
                    depth += 1 if sign in "{[" else -1
                    if not depth:
                        return at
            else:
                at = len(self._held)
            yield

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls of a JSON value; empty if one of them is invalid."""
        found = list[ToolCall]()
        try:
            value = json.loads(text)
            for item in value if isinstance(value, list) else [value]:
                arguments = item.get("arguments", item.get("parameters"))
                if item.get("name") not in self._names or not isinstance(arguments, dict) or item.keys() - _KEYS:
                    return []
                found.append(ToolCall(item["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return []
        return found


# ------------------------------------------------------------------------------------------------------------- grammars


def json_grammar(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A grammar of llguidance for the JSON values that match ``schema``. ``is_strict``: keywords that it does not know
    are an error."""
    return f"start: answer\nanswer: {_json_rule(schema, is_strict=is_strict)}\n"


def call_grammar(
    form: CallFormat,
    tools: Sequence[Tool],
    *,
    is_forced: bool,
    has_many: bool,
    answer: str = "",
    ids: Mapping[str, int],
) -> str:
    """A grammar of llguidance for texts with valid calls.

    Args:
        is_forced: the text is calls only. Else it may be other text, and calls.
        has_many: several calls are allowed.
        answer: ``json_grammar`` of a text without calls; empty: it is free.
        ids: mark → token id, of marks that are one token.
    """
    begin, end = (f"<[{ids[mark]}]>" if mark in ids else _literal(mark) for mark in (form.begin, form.end))
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{form.key}": '
        rules.append(f'call_{index}: {_literal(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {_json_rule(tool.parameters, is_strict=tool.is_strict)}")
    more = f" ({_literal(form.between)} {{0}})*" if has_many else ""
    marked = rf'"\n" call "\n" {end}'  # behind the mark
    if form.is_list:
        rules.append(f'calls: {begin} "[" call{more.format("call")} "]"')
    elif form.is_bare:
        rules.append(f"calls: call{more.format('call')}")
    else:
        rules += [f"marked: {begin} {marked}", f"calls: marked{more.format('marked')}"]
    if is_forced:
        rules.append("start: calls")
    elif answer:
        rules += ["start: calls | answer", answer.partition("\n")[2].strip()]
    elif form.is_bare:
        rules += ["start: calls | PLAIN", r"PLAIN: /([^\s{\[](.|\n)*)?/"]
    else:
        rules += [f"start: text_call{'*' if has_many else '?'} TEXT", r"TEXT: /(.|\n)*/"]
        rules.append(f"text_call: lead {marked}")
        # A mark that is no token is the first place with its letters: what is lazy ends as soon as it can.
        rules.append(f"lead: TEXT {begin}" if form.begin in ids else f"lead[lazy]: TEXT {begin}")
    return "\n".join(["%llguidance {}", *rules, ""])


def _json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE, "lenient": not is_strict}})


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


# ------------------------------------------------------------------------------------- templates that know no tools


def explain_tools(turns: Sequence[Turn], tools: Sequence[Tool]) -> tuple[Turn, ...]:
    """A conversation for a template that knows no tools: a system text explains them, and calls and results are text in
    the format ``json``."""
    plain = list[Turn]()
    for turn in turns:
        if turn.tool_calls:
            calls = [call["function"] for call in json.loads(turn.tool_calls)]
            lines = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls]
            turn = Turn(turn.role, "\n".join([*filter(None, [turn.text]), *lines]))
        elif turn.role == TOOL:
            turn = Turn(USER, f"Result of {turn.name}: {turn.text}")
            if plain and plain[-1].role == USER:
                turn = Turn(USER, f"{plain.pop().text}\n{turn.text}")
        plain.append(turn)
    if tools:
        lines = [json.dumps(tool.as_json()["function"]) for tool in tools]
        text = "\n".join([_EXPLANATION, *lines])
        if plain and plain[0].role == SYSTEM:
            text = f"{plain.pop(0).text}\n\n{text}"
        plain.insert(0, Turn(SYSTEM, text))
    return tuple(plain)
