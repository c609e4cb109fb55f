"""A text of made-up words, and trainers on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from p2ptrain.compute.model import build_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from tests.compute.tiny_trainer import tiny, tiny_trainer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and lose much where the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 KB, the same every time."""
    words = random.Random(5)
    lines = (" ".join(words.choice(["def", "ring", "peer", "seed", "x =", "1"]) for _ in range(9)) for _ in range(500))
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture
def limit_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on the host has so many bytes of memory left."""
    return lambda size_bytes: monkeypatch.setattr("p2ptrain.compute.device.memory_left_bytes", lambda _: size_bytes)


@pytest.fixture
def make_trainer(text_file: Path) -> Callable[..., Trainer]:
    """``tiny_trainer`` on that text."""
    return partial(tiny_trainer, text_file)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model to begin with."""
    directory = tmp_path_factory.mktemp("base")
    build_model(tiny(), 256, seed=1).save_pretrained(directory)
    Tokenizer.of_bytes().save(directory)
    return directory
