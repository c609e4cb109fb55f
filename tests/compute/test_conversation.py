"""What a model is given of a conversation: by its chat template, plainly, and within its context."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from p2ptrain.compute.text import ASSISTANT, SYSTEM, USER, ChatFormat, Conversation, ModelText, Turn, written
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, UserError

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
    form = ChatFormat(text)
    messages = [{"role": turn.role, "content": turn.text} for turn in TURNS]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert form.ids(TURNS) == list(expected)
    assert bytes(form.ids(TURNS)).decode().startswith("^<system>Be brief.</>\n<user>hi</>\n")
    assert (form.is_plain, form.stop, form.end_tokens) == (False, (), frozenset({ord("$")}))


def test_a_template_within_the_settings_of_a_tokenizer(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, chat_template="{{ messages[-1].content }}!"))
    assert bytes(form.ids(TURNS)) == b"well?!"


def test_without_a_template_turns_are_plain(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path))
    assert bytes(form.ids(TURNS)).decode() == ("Be brief.\n\nUser:  hi \nAssistant: hello\nUser: well?\nAssistant:")
    assert (form.is_plain, form.stop, form.end_tokens) == (True, ("\nUser:",), frozenset())


def test_an_answer_continues_the_ids_before_it(tmp_path: Path) -> None:
    """So that a cache of them is of use for the next question."""
    form = ChatFormat(text_of(tmp_path))
    before = form.ids(TURNS)
    longer = form.ids([*TURNS, Turn(ASSISTANT, "fine"), Turn(USER, "more")])
    assert longer[: len(before)] == before


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system here') }}", "{{ messages[0].missing.field }}", "{% for %}", "{{ 1 + 'a' }}"],
)
def test_a_template_that_refuses_is_told(tmp_path: Path, template: str) -> None:
    form = ChatFormat(text_of(tmp_path, template=template))
    with pytest.raises(UserError, match="the chat template of"):
        form.ids(TURNS)


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, template="{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(UserError, match="the chat template of"):
        form.ids(TURNS)


def test_settings_of_a_tokenizer_that_are_none(tmp_path: Path) -> None:
    text = text_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ')
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        ChatFormat(text)


def test_no_code_of_the_directory_is_run(tmp_path: Path) -> None:
    text = text_of(tmp_path, template=TEMPLATE, tokenizer_class="Mine")
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    path.write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: ...\n")
    assert ChatFormat(text).ids(TURNS)
    assert not (tmp_path / "ran").exists()


def test_a_template_needs_no_torch(tmp_path: Path) -> None:
    text_of(tmp_path, template=TEMPLATE)
    code = (
        "import sys; from pathlib import Path\n"
        "from p2ptrain.compute.text import ChatFormat, Turn\n"
        "from p2ptrain.compute.text import ModelText\n"
        f"assert ChatFormat(ModelText(Path({str(tmp_path)!r}))).ids([Turn('user', 'hi')])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------- the context


def asked(conversation: Conversation, *texts: str) -> None:
    for number, text in enumerate(texts):
        (conversation.answer if number % 2 else conversation.ask)(text)


def test_the_oldest_turns_are_dropped_until_there_is_room_for_an_answer(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, context=100))
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
    form = ChatFormat(text_of(tmp_path))
    talk = Conversation()
    talk.ask("x" * 50)
    length = len(form.ids(talk.turns))
    assert talk.fit(form, None, 999)[1:] == (999, 0)
    assert talk.fit(form, 200, 999)[1:] == (200 - length, 0), "what is left, a quarter of the context at least"
    assert talk.fit(form, length + 10, 10)[1:] == (10, 0)
    with pytest.raises(UserError, match=rf"the question has {length} tokens, the model's context is {length + 9}"):
        talk.fit(form, length + 9, 10)
    talk.take_back()
    assert talk.turns == []


def test_a_question_that_cannot_be_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    form = ChatFormat(text_of(tmp_path, context=100))
    talk = Conversation()
    asked(talk, "one", "two", "x" * 200)
    with pytest.raises(UserError):
        talk.fit(form, 100, 10)
    talk.take_back()
    talk.ask("three")
    ids, _, dropped = talk.fit(form, 100, 10)
    assert (dropped, bytes(ids).decode()) == (0, "User: one\nAssistant: two\nUser: three\nAssistant:")
    assert written(talk.turns) == "User: one\nAssistant: two\nUser: three"


def test_thousands_of_turns_are_cut_with_a_few_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, talk = ChatFormat(text_of(tmp_path)), Conversation("Be brief.")
    looks = 0
    ids = form.ids

    def looked(turns: Sequence[Turn]) -> list[int]:
        nonlocal looks
        looks += 1
        return ids(turns)

    monkeypatch.setattr(form, "ids", looked)
    for number in range(2000):
        talk.ask(f"question {number}")
        talk.answer("yes")
    talk.ask("and now?")
    given, _, dropped = talk.fit(form, 200, 20)
    assert looks < 20
    text = bytes(given).decode()
    assert text.startswith("Be brief.\n\nUser: question 19")
    assert len(given) + 20 <= 200
    kept = text.count("User:")
    assert dropped == 2 * (2001 - kept)
    assert len(given) + 20 + len("User: question 1990\nAssistant: yes\n") > 200, "no more than must be"
