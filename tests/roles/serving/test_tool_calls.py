"""Calls of tools: every format is read in any division, and a grammar allows what a reader finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from p2ptrain.compute.text import Turn
from p2ptrain.compute.tokenizer import Tokenizer
from roles.serving.tool_calls import FORMATS, CallReader, Tool, ToolCall, call_grammar, explain_tools, json_grammar

NAMES = {"find", "add"}
FIND = {
    "type": "object",
    "properties": {"q": {"$ref": "#/$defs/Q"}},
    "required": ["q"],
    "$defs": {"Q": {"type": "string"}},
}
TOOLS = [Tool("find", "", FIND, is_strict=True), Tool("add", "", {"type": "object"})]


def read(form: str, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    """The text and the calls."""
    reader = CallReader(FORMATS[form], NAMES)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCall)]


def find(q: str) -> ToolCall:
    return ToolCall("find", json.dumps({"q": q}, ensure_ascii=False))


CASES: list[tuple[str, str, str, list[ToolCall]]] = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "find", "arguments": {"q": "é }\\"{"}}\n</tool_call>',
        "Let me see.\n",
        [find('é }"{')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"find","arguments":{"q":"<tool_call>"}}</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\nDone',
        "Done",
        [find("<tool_call>"), ToolCall("add", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"q": "x"}}', "", [find("x")]),
    ("hermes", '{"name": "find", "arguments": {"q": "x"}}', '{"name": "find", "arguments": {"q": "x"}}', []),
    ("hermes", "a < b <tool <tool_call> 5", "a < b <tool <tool_call> 5", []),
    (
        "llama3",
        ' {"name": "find", "parameters": {"q": "x"}}; {"name": "add", "parameters": {"a": [1]}} ',
        "",
        [find("x"), ToolCall("add", '{"a": [1]}')],
    ),
    ("llama3", '<|python_tag|>{"name": "find", "parameters": {"q": "x"}}', "", [find("x")]),
    ("llama3", 'See {"name": "find", "parameters": {"q": "x"}}', 'See {"name": "find", "parameters": {"q": "x"}}', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "find", "arguments": {"q": "x"}, "id": "123456789"}, {"name": "add", "arguments": {}}]',
        "",
        [find("x"), ToolCall("add", "{}")],
    ),
    ("mistral", ' [{"name": "find", "arguments": {"q": "x"}}]', "", [find("x")]),
    (
        "json",
        '{"name": "find", "arguments": {"q": "x"}}\n{"name": "add", "arguments": {}}\nDone',
        "Done",
        [find("x"), ToolCall("add", "{}")],
    ),
    ("json", "Hello [1]", "Hello [1]", []),
]
MALFORMED = [
    '{"name": "other", "arguments": {}}',
    '{"name": "find", "arguments": "x"}',
    '{"name": "find"}',
    '{"name": "find", "arguments": {"x": NaN}}',
    '{"name": "find", "arguments": {}, "more": 1}',
    '{"name": "find", "arguments": {"q": "x"}',
    '{"name": ["find"], "arguments": {}}',
    '{"name": "find", "arguments": }}',
    "[" * 9000 + "]" * 9000,
    "[5]",
    "[]",
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_calls_are_found_in_any_division(form: str, text: str, shown: str, calls: list[ToolCall]) -> None:
    assert read(form, [text]) == (shown, calls)
    assert read(form, list(text)) == (shown, calls)
    for at in range(len(text)):
        assert read(form, [text[:at], text[at:]]) == (shown, calls)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("call", MALFORMED)
def test_a_malformed_call_remains_text(form: str, call: str) -> None:
    text = f"{FORMATS[form].begin}{call}{FORMATS[form].end}"
    assert read(form, [text]) == (text, [])
    assert read(form, [text[start : start + 7] for start in range(0, len(text), 7)]) == (text, [])


PARTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "add", "arguments": {}}', *'{}"\\[] \n;<x']


@given(form=st.sampled_from(sorted(FORMATS)), pieces=st.lists(st.sampled_from(PARTS), max_size=12))
def test_the_division_does_not_matter(form: str, pieces: list[str]) -> None:
    assert read(form, pieces) == read(form, ["".join(pieces)]) == read(form, list("".join(pieces)))


@pytest.fixture(scope="module", params=[False, True], ids=["letters", "tokens"])
def matches(request: pytest.FixtureRequest) -> Any:
    """Whether a grammar allows a text, for a tokenizer of bytes; and the marks that are tokens of it."""
    import tokenizers

    backend = Tokenizer.of_bytes().backend
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]"] if request.param else []
    backend.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks])
    table = LLTokenizer(backend.to_str(), eos_token=0)

    def allows(grammar: str, text: str) -> bool:
        matcher = LLMatcher(table, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = backend.encode(text).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    return allows, {mark: backend.token_to_id(mark) for mark in marks}


VALID = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>',
    "llama3": '{"name": "find", "parameters": {"q": "x"}}',
    "mistral": '[TOOL_CALLS][{"name": "find", "arguments": {"q": "x"}}]',
    "json": '{"name": "find", "arguments": {"q": "x"}}',
}


@pytest.mark.parametrize("form", FORMATS)
def test_grammars_allow_valid_calls_only(matches: Any, form: str) -> None:
    allows, ids = matches
    options: dict[str, Any] = {"ids": ids}
    valid, wrong = VALID[form], VALID[form].replace('"x"', "5")
    between = FORMATS[form].between
    two = valid + between + valid if not FORMATS[form].is_list else valid[:-1] + between + valid[len("[TOOL_CALLS][") :]
    forced = call_grammar(FORMATS[form], TOOLS, is_forced=True, has_many=True, **options)
    single = call_grammar(FORMATS[form], TOOLS, is_forced=True, has_many=False, **options)
    free = call_grammar(FORMATS[form], TOOLS, is_forced=False, has_many=True, **options)
    answer = call_grammar(
        FORMATS[form],
        TOOLS,
        is_forced=False,
        has_many=True,
        answer=json_grammar({"type": "integer"}, is_strict=True),
        **options,
    )
    for grammar in (forced, single, free, answer):
        assert allows(grammar, valid)
        assert not allows(grammar, wrong)
        assert allows(grammar, two) == (grammar != single)
    assert [allows(grammar, "Hi") for grammar in (forced, free, answer)] == [False, True, False]
    assert allows(answer, "17")
    assert len(read(form, [two])[1]) == 2


def test_a_grammar_of_json_bounds_space(matches: Any) -> None:
    allows, _ = matches
    grammar = json_grammar({"type": "object"}, is_strict=True)
    assert allows(grammar, '{\n    "a": [1, 2]\n}')
    assert not allows(grammar, "{" + " " * 50 + "}")


def test_a_template_without_tools_gets_them_as_text() -> None:
    calls = json.dumps([{"id": "1", "type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}])
    turns = [
        Turn("system", "Be kind"),
        Turn("user", "Q"),
        Turn("assistant", "", calls),
        Turn("tool", "R", "", "1", "find"),
    ]
    system, question, call, result = explain_tools(turns, TOOLS)
    assert system.text.startswith("Be kind\n\nYou may call")
    assert '"name": "find"' in system.text
    assert (question, result) == (Turn("user", "Q"), Turn("user", "Result of find: R"))
    assert read("json", [call.text]) == ("", [find("x")])
