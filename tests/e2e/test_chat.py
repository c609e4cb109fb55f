"""``p2ptrain chat`` at a real terminal: typed to, cancelled, left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.terminal import DEADLINE_S, Terminal

LEFT_S = 5.0  # torch is taken down with the process
MODEL = """
import sys
from pathlib import Path
from p2ptrain.compute.model import build_model
from p2ptrain.compute.testing import tiny
from p2ptrain.compute.tokenizer import Tokenizer
build_model(tiny(context=100_000), 256, seed=1).save_pretrained(sys.argv[1])
Tokenizer.of_bytes().save(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MODEL, str(path)], check=True, timeout=DEADLINE_S)
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


def test_ctrl_d_leaves(chat: Terminal) -> None:
    chat.until(r"> ")
    chat.type("\x04")
    assert chat.left()[0] == 0
