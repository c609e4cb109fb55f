"""The parts of the HTTP endpoint that need no running one: keys, what bodies ask for; and all of it in another loop."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.core.errors import UserError
from roles.http.access import read_key
from roles.http.answers import Problem
from roles.verifier.http.answer import AnswerOrigin
from roles.verifier.http.bodies import IGNORED, NOT_OBEYED, StrictModel
from roles.verifier.http.chat import ChatAnswer, ChatFields
from roles.verifier.http.completions import CompletionAnswer, CompletionFields
from roles.verifier.http.messages import MessageAnswer, MessageFields
from roles.verifier.http.responses import ResponseAnswer, ResponseFields

from .conftest import KEY
from .scripted import MODEL, ScriptedService
from .test_http_hostile import under_way


def test_a_key_is_read(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "key"
    path.write_text(f" {KEY}\n")
    path.chmod(0o600)
    assert read_key(path, told.append) == KEY
    assert told == []
    path.chmod(0o640)
    assert read_key(path, told.append) == KEY
    assert len(told) == (0 if sys.platform == "win32" else 1)
    assert KEY not in "".join(told)
    for wrong in ("", "short", "two words of a key", "ключ-ключ-ключ-ключ", "x" * 513, f"{KEY}\n{KEY}"):
        path.write_text(wrong)
        with pytest.raises(UserError, match="has no valid API key") as caught:
            read_key(path, told.append)
        assert "chmod 600" in caught.value.remedy
        assert not wrong or wrong not in caught.value.message
    with pytest.raises(UserError, match="cannot read"):
        read_key(tmp_path / "none", told.append)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["user", "tool", "text", "auto", "function", MODEL]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "function", "id"]), inner)
    ),
    max_leaves=12,
)
INTERFACES: dict[type[StrictModel], Any] = {
    CompletionFields: CompletionAnswer,
    ChatFields: ChatAnswer,
    MessageFields: MessageAnswer,
    ResponseFields: ResponseAnswer,
}
FIELDS = {name for fields in INTERFACES for name in fields.model_fields}
NAMES = st.sampled_from(sorted(FIELDS | IGNORED | set(NOT_OBEYED)))


@settings(max_examples=50)
@given(body=st.binary() | st.dictionaries(NAMES | st.text(), VALUES).map(lambda said: json.dumps(said).encode()))
def test_any_body_is_a_request_or_is_refused(body: bytes) -> None:
    for interface in INTERFACES.values():
        try:
            is_valid = bool(interface(body, AnswerOrigin("", 5, 0)).texts)
        except Problem as problem:
            is_valid = problem.status == 400 and bool(problem.response().body)
        assert is_valid


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop")
def test_the_endpoint_runs_in_the_loop_of_commands() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        streamed, whole = runner.run(under_way(ScriptedService()))
    assert b'"code":"stopping"' in streamed
    assert whole.startswith(b"HTTP/1.1 503")
