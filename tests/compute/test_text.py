"""Text from token ids beside the decoding of the whole, and what a model is given of a conversation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from p2ptrain.compute.text import (
    ASSISTANT,
    SYSTEM,
    USER,
    ChatFormat,
    Conversation,
    ModelText,
    TextWriter,
    Turn,
)
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, TooLong, UserError

BYTES = Tokenizer.of_bytes().backend


def pieces_of(ids: list[int], **options: Any) -> tuple[list[str], TextWriter]:
    writer = TextWriter(options.pop("backend", BYTES), **options)
    pieces = [writer.take(token) for token in ids] + [writer.finish()]
    return [piece for piece in pieces if piece], writer


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(0, 255), max_size=12))
def test_the_pieces_make_the_whole_for_any_bytes(ids: list[int], before: list[int]) -> None:
    pieces, writer = pieces_of(ids)
    assert "".join(pieces) == bytes(ids).decode(errors="replace")
    assert writer.ended == "length"
    text = bytes(before).decode(errors="ignore")  # a prompt is whole characters
    assert "".join(pieces_of(ids, prompt=list(text.encode()))[0]) == bytes(ids).decode(errors="replace")


def test_a_character_is_never_cut() -> None:
    assert pieces_of(list("aé😀b".encode()))[0] == ["a", "é", "😀", "b"]
    assert pieces_of(list("a😀".encode()[:-1]))[0] == ["a", "\ufffd"]


def test_a_stop_string_that_spans_tokens_is_never_shown_in_part() -> None:
    pieces, writer = pieces_of(list(b"one\n\nEND two"), stop=["\n\nEND", "zzz"])
    assert (pieces, writer.ended) == (["o", "n", "e"], "stop"), "what comes after the end is not taken"
    pieces, writer = pieces_of(list(b"one\n\nEN!"), stop=["\n\nEND"])
    assert (pieces, writer.ended) == (["o", "n", "e", "\n\nEN!"], "length")
    assert pieces_of(list(b"one\n\nEN"), stop=["\n\nEND"])[0] == ["o", "n", "e", "\n\nEN"]


def test_an_end_token_ends_the_text_and_is_no_part_of_it() -> None:
    pieces, writer = pieces_of([*b"ab", 0, *b"cd"], end_tokens=frozenset({0}), stop=["bX"])
    assert (pieces, writer.ended) == (["a", "b"], "end")
    pieces, writer = pieces_of(["😀".encode()[0], 0], end_tokens=frozenset({0}))  # type: ignore[list-item]
    assert (pieces, writer.ended) == (["\ufffd"], "end")


def test_a_special_token_is_a_stop_string() -> None:
    backend = Backend.from_str(BYTES.to_str())
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens(["<note>"])
    end, note = backend.token_to_id("<|im_end|>"), backend.token_to_id("<note>")
    for stop, text in (("<|im_end|>", "a<note>"), ("<note>", "a"), ("im_end", "a<note>b")):
        writer = TextWriter(backend, stop=[stop])
        written = "".join(writer.take(token) for token in (ord("a"), note, end, ord("b"))) + writer.finish()
        assert (written, writer.ended) == (text, "length" if stop == "im_end" else "stop")


def spaced() -> Backend:
    """Words whose decoder leaves out the space before the first one, as SentencePiece's."""
    backend = Backend(WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<s>": 3}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    assert pieces_of([0, 2, 1], backend=spaced())[0] == ["a", "c", " b"]
    assert pieces_of([0, 2, 1], backend=spaced(), prompt=[1])[0] == [" a", "c", " b"]
    assert pieces_of([0, 3, 1], backend=spaced(), prompt=[3])[0][0] in ("a", " a"), "special tokens are left out"


def byte_fallback() -> Backend:
    """A SentencePiece-like vocabulary that spells what it does not know in bytes."""
    vocabulary = {"a": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    backend = Backend(BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def test_a_prompt_that_ends_within_spelled_bytes() -> None:
    prompt = [byte + 1 for byte in "中中中".encode()]
    new = [byte + 1 for byte in "文文".encode()]
    assert pieces_of(new, backend=byte_fallback(), prompt=prompt)[0] == ["文", "文"]


# ------------------------------------------------------------------------------------------------- a model directory


def directory(root: Path, config: Any, generation: Any = None, backend: Backend = BYTES) -> Path:
    (root / "config.json").write_text(json.dumps(config))
    backend.save(str(root / "tokenizer.json"))
    if generation is not None:
        (root / "generation_config.json").write_text(json.dumps(generation))
    return root


@pytest.mark.parametrize(
    ("config", "generation", "context", "ends"),
    [
        ({"max_position_embeddings": 64, "eos_token_id": 7}, None, 64, {7}),
        ({"n_positions": 32, "eos_token_id": [7, 8]}, {"eos_token_id": [9]}, 32, {9}),
        ({"text_config": {"max_position_embeddings": 16}, "eos_token_id": 7}, {}, 16, set()),
        ({}, {"eos_token_id": None}, None, set()),
    ],
)
def test_what_a_directory_says(tmp_path: Path, config: Any, generation: Any, context: int, ends: set[int]) -> None:
    text = ModelText(directory(tmp_path, config, generation))
    assert (text.context, text.end_tokens) == (context, ends)


def test_settings_that_nothing_applies_are_told(tmp_path: Path) -> None:
    neutral = {"temperature": 0.6, "min_length": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "x": 1}
    assert ModelText(directory(tmp_path, {}, neutral)).unused_settings() == ""
    generation = neutral | {"typical_p": 0.9, "stop_strings": ["x"]}
    said = ModelText(directory(tmp_path, {}, generation)).unused_settings()
    assert said.endswith("also says typical_p = 0.9, stop_strings = ['x']: not applied")


def test_a_prompt_gets_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    backend = spaced()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    text = ModelText(directory(tmp_path, {}, backend=backend))
    assert text.prompt_ids("a b") == [3, 0, 1]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 100_000])
def test_a_configuration_that_is_none(tmp_path: Path, content: bytes) -> None:
    (directory(tmp_path, {}) / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelText(tmp_path)


def test_more_than_the_context_is_refused_with_the_numbers(tmp_path: Path) -> None:
    text = ModelText(directory(tmp_path, {"max_position_embeddings": 10}))
    text.check_length(4, 6)
    with pytest.raises(UserError) as refused:
        text.check_length(10, 1)
    assert refused.value.remedy == "shorten the prompt"
    with pytest.raises(UserError, match="4 tokens of prompt and 7 new ones are more than the context of 10"):
        text.check_length(4, 7)
    with pytest.raises(UserError, match="empty"):
        text.check_length(0, 1)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [Turn(SYSTEM, "Be brief."), Turn(USER, " hi "), Turn(ASSISTANT, "hello"), Turn(USER, "well?")]


def text_of(root: Path, *, context: int = 200, template: str = "", **settings: str) -> ModelText:
    Tokenizer.of_bytes().save(root)
    (root / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    if template:
        (root / "chat_template.jinja").write_text(template)
    if settings:
        path = root / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return ModelText(root)


def test_a_template_writes_the_turns_as_transformers_does(tmp_path: Path) -> None:
    text = text_of(tmp_path, template=TEMPLATE, bos_token="^", eos_token="$")
    form = ChatFormat(text.tokenizer)
    messages = [{"role": turn.role, "content": turn.text} for turn in TURNS]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert form.ids(TURNS) == list(expected)
    assert bytes(form.ids(TURNS)).decode().startswith("^<system>Be brief.</>\n<user>hi</>\n")
    assert (form.is_plain, form.stop, form.end_tokens) == (False, (), frozenset({ord("$")}))


TOOLS_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id }}{{ m.name }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "form", "has_tools"),
    [
        ("{{ tools }}<tool_call>", "hermes", True),
        ("{{ tools }}[TOOL_CALLS]{{ '\"parameters\": ' }}", "mistral", True),
        ("{{ tools }}{{ '\"parameters\": ' }}", "llama3", True),
        ("{{ messages }}", "json", False),
    ],
)
def test_the_format_of_calls_is_that_of_the_template(tmp_path: Path, template: str, form: str, has_tools: bool) -> None:
    made = ChatFormat(text_of(tmp_path, template=template).tokenizer)
    assert (made.tool_format, made.has_tools) == (form, has_tools)


def test_a_template_writes_tools_their_calls_and_what_they_answered(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, template=TOOLS_TEMPLATE, context=90).tokenizer)
    calls = json.dumps([{"id": "c1", "type": "function", "function": {"name": "sky", "arguments": {"city": "Bern"}}}])
    tools = json.dumps([{"type": "function", "function": {"name": "sky"}}])
    turns = [Turn("user", "hi?"), Turn("assistant", "", calls), Turn("tool", "blue", tool_call_id="c1", name="sky")]
    written = "<user>hi?<assistant><tool_call>sky Bern</tool_call><tool>bluec1sky<assistant>"
    assert bytes(form.ids(turns, tools)).decode() == "sky;" + written
    assert bytes(form.ids(turns)).decode() == written
    assert (form.has_tools, form.tool_format) == (True, "hermes")
    # What a tool answered is never without the question that led to it.
    chat = Conversation()
    chat.turns += [Turn("user", "long ago " * 5), Turn("assistant", "yes"), *turns]
    ids, _, dropped = chat.fit(form, 90, 5, tools)
    assert (bytes(ids).decode(), dropped) == ("sky;" + written, 2)
    with pytest.raises(TooLong):
        chat.fit(form, 60, 5, tools)


def test_without_a_template_turns_are_plain(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path).tokenizer)
    assert bytes(form.ids(TURNS)).decode() == ("Be brief.\n\nUser:  hi \nAssistant: hello\nUser: well?\nAssistant:")
    assert (form.is_plain, form.stop, form.end_tokens) == (True, ("\nUser:",), frozenset())


@pytest.mark.parametrize(
    ("template", "error", "problem"),
    [
        ("{{ 1 / 0 }}", UserError, "fails for this chat: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", UserError, "fails for this chat: maximum recursion depth"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", UserError, "fails for this chat: maximum recursion depth"),
        ("{{ nothing.there }}", UserError, "fails for this chat: 'nothing' is undefined"),
        ("{{ raise_exception('no system here') }}", UserError, "no system here"),
        ("{% for %}", UserError, "the chat template of"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", UserError, "the chat template of"),
        ("{{ 7 ** (2 * 10 ** 7) }}", ConfigError, "takes more than 2 s of processor time"),
        ("{{ 'a' * (10 ** 10) }}", ConfigError, "takes more than 1 GiB of memory"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_hostile_template_ends_at_its_limit_and_the_next_chat_goes_on(
    tmp_path: Path, template: str, error: type[UserError], problem: str
) -> None:
    forms = []
    for name, written in (("bad", template), ("good", TEMPLATE)):
        (tmp_path / name).mkdir()
        forms.append(ChatFormat(text_of(tmp_path / name, template=written).tokenizer))
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        forms[0].ids(TURNS)
    assert type(caught.value) is error
    assert str(tmp_path / "bad") in caught.value.message
    assert bytes(forms[1].ids(TURNS)).decode().startswith("<system>Be brief.")


def asked(conversation: Conversation, *texts: str) -> None:
    for number, text in enumerate(texts):
        (conversation.answer if number % 2 else conversation.ask)(text)


def test_the_oldest_turns_are_dropped_until_there_is_room_for_an_answer(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, context=100).tokenizer)
    talk = Conversation("Be brief.")
    asked(talk, "first", "answer", "second", "answer two", "third")
    whole = form.ids(talk.turns)
    assert len(whole) + 10 > 100 > len(whole)
    ids, most, dropped = talk.fit(form, 100, 10)
    assert bytes(ids).decode() == ("Be brief.\n\nUser: second\nAssistant: answer two\nUser: third\nAssistant:"), (
        "the system's text stays"
    )
    assert (most, dropped) == (10, 2)
    assert talk.fit(form, 100, 10)[2] == 0, "what was dropped is told once"
    assert len(talk.turns) == 6, "nothing is forgotten that a person may save"
    talk.reset()
    assert [turn.text for turn in talk.turns] == ["Be brief."]
    talk.ask("new")
    assert bytes(talk.fit(form, 100, 10)[0]).decode() == "Be brief.\n\nUser: new\nAssistant:"


def test_the_room_of_an_answer(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path).tokenizer)
    talk = Conversation()
    talk.ask("x" * 50)
    length = len(form.ids(talk.turns))
    assert talk.fit(form, None, 999)[1:] == (999, 0)
    assert talk.fit(form, 200, 999)[1:] == (200 - length, 0), "what is left, a quarter of the context at least"
    assert talk.fit(form, length + 10, 10)[1:] == (10, 0)
    with pytest.raises(UserError, match=rf"the question has {length} tokens, .* is {length + 9}, and 10 are") as raised:
        talk.fit(form, length + 9, 10)
    assert raised.value.remedy == "shorten the question, or ask for at most 9 new tokens"
    assert talk.fit(form, length + 9, None)[1:] == (9, 0), "an answer of any length may use what is left"
    with pytest.raises(UserError, match="and 1 are kept for the answer"):
        talk.fit(form, length, None)
    talk.take_back()
    assert talk.turns == []


def test_a_question_that_cannot_be_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, context=100).tokenizer)
    talk = Conversation()
    asked(talk, "one", "two", "x" * 200)
    with pytest.raises(UserError):
        talk.fit(form, 100, 10)
    talk.take_back()
    talk.ask("three")
    ids, _, dropped = talk.fit(form, 100, 10)
    assert (dropped, bytes(ids).decode()) == (0, "User: one\nAssistant: two\nUser: three\nAssistant:")
    assert [turn.text for turn in talk.turns] == ["one", "two", "three"]
