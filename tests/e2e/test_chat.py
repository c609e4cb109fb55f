"""``p2ptrain chat`` at a real terminal: typed to, cancelled, left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from tests.compute.tiny_trainer import tiny
from tests.e2e.terminal import Terminal

LEFT_S = 5.0  # torch is taken down with the process
# The signal comes when the prompt is written and nobody waits yet. The C function itself is bound: Python's own kill
# would raise at once, in the hook, where readline drops it.
MISSED = """
import ctypes, functools, os, readline, signal
from p2ptrain.cli.chat import typed_line
kill = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGINT)
for turn in range(3):
    readline.set_pre_input_hook(kill)
    try:
        typed_line("> ")
    except KeyboardInterrupt:
        print("heard", turn)
readline.set_pre_input_hook()
print(typed_line("? "), "was typed")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(tiny(context=100_000), 256, seed=1).save_pretrained(path)
    Tokenizer.of_bytes().save(path)
    return path


@pytest.fixture
def chat(checkpoint: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", "-c", str(checkpoint), "--tokens", "50000", "--temperature", "0")
    yield terminal
    terminal.end()


def test_ctrl_c_cancels_an_answer_and_then_leaves(chat: Terminal) -> None:
    chat.until(r"plain turns, 100000 tokens of context.*> ")
    chat.type("hello\n")
    chat.until(r"hello\r\n.{40}")  # an answer comes
    chat.type("\x03")
    chat.until(r"tokens/s; cancelled\. Ctrl\+C again leaves\).*> ")
    chat.type("and now?\n")
    chat.until(r"now\?\r\n.{40}")
    chat.type("\x03")
    chat.until(r"cancelled.*> ")
    chat.type("\x03")
    code, seconds = chat.left()
    assert code == 0
    assert seconds < LEFT_S


def test_ctrl_c_between_the_prompt_and_the_wait_is_heard() -> None:
    terminal = Terminal(program=("-c", MISSED))
    try:
        terminal.until("heard 0.*heard 1.*heard 2.*[?] ")
        terminal.type("a line\n")
        terminal.until("a line was typed")
        assert terminal.left()[0] == 0
    finally:
        terminal.end()
