"""Text from a checkpoint: reproducible, streamed in whole characters, refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.compute.generate import GenerateResult, _TextStreamer, generate
from p2ptrain.compute.model import build_model, load_model
from p2ptrain.compute.testing import TINY, run_step
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, UserError
from tests.compute.saving import save

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: they give all sorts of bytes."""
    directory = tmp_path_factory.mktemp("checkpoint")
    build_model(TINY, 256, seed=1).save_pretrained(directory)
    Tokenizer.of_bytes().save(directory)
    return directory


def run(directory: Path, prompt: str = "def ", **changes: Any) -> tuple[GenerateResult, list[str]]:
    pieces: list[str] = []
    arguments: dict[str, Any] = {"max_new_tokens": 20, "device": "cpu", "seed": 1}
    return generate(directory, prompt, on_text=pieces.append, **(arguments | changes)), pieces


def test_the_same_seed_gives_the_same_text(checkpoint: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    result, pieces = run(checkpoint)
    assert torch.equal(torch.rand(2), expected), "the global random state is left alone"
    assert result.tokens == 20
    assert result.seconds > 0
    assert "".join(pieces) == result.text
    assert run(checkpoint)[0].text == result.text
    assert run(checkpoint, seed=2)[0].text != result.text


def test_greedy_is_the_likeliest_token_each_time(checkpoint: Path) -> None:
    model: Any = load_model(checkpoint)
    model.eval()
    ids = torch.tensor([list(b"def ")])
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    expected = bytes(ids[0, 4:].tolist()).decode(errors="replace")
    assert run(checkpoint, temperature=0)[0].text == expected
    assert run(checkpoint, temperature=1e-300)[0].text == expected
    assert run(checkpoint, top_k=1, seed=7)[0].text == expected
    assert run(checkpoint, top_p=1e-6, seed=8)[0].text == expected


def test_a_trained_checkpoint_speaks_its_language(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    for step in range(30):
        run_step(trainer, step)
    save(trainer, tmp_path)
    text = run(tmp_path, temperature=0)[0].text
    assert set(text) <= set("def ring peer seed x = 1\n")


def _streamed(ids: list[int]) -> list[str]:
    pieces: list[str] = []
    streamer = _TextStreamer(Tokenizer.of_bytes(), pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for number in ids:
        streamer.put(torch.tensor([number]))
    streamer.end()
    assert streamer.ids == ids
    return pieces


@given(st.lists(st.integers(0, 255)))
@settings(deadline=None)
def test_the_pieces_make_the_whole_for_any_bytes(ids: list[int]) -> None:
    assert "".join(_streamed(ids)) == bytes(ids).decode(errors="replace")


def test_a_character_is_never_cut() -> None:
    assert _streamed(list("aé😀b".encode())) == ["a", "é", "😀", "b"]
    assert _streamed(list("a😀".encode()[:-1])) == ["a", "\ufffd"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"max_new_tokens": 61}, "4 tokens of prompt and 61 new ones are more than the context of 64"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(UserError) as caught:
        run(checkpoint, **changes)
    assert cause in caught.value.message
    assert caught.value.remedy


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run(tmp_path)
    with pytest.raises(ConfigError):
        run(tmp_path / "missing")
