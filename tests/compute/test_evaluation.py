"""Scores of a text beside plain loops over transformers' models."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.evaluation import Evaluation, score_here
from p2ptrain.compute.text import ChatFormat
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.tokenizer_training import SampledText, save_new, train_vocabulary
from p2ptrain.core.errors import ConfigError, UserError
from tests.compute.families import make

WIDTH, STRIDE = 24, 7
TEXTS = ["def ring(peer): é" * 9, "x", "seed = 1\nring.peer = 2\n" * 11]
CHATS = [[("user", "a ring?"), ("assistant", "a peer")], [("user", "b"), ("assistant", "c d"), ("user", "e"),
         ("assistant", "f")]]  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "own"])
def model(request: pytest.FixtureRequest, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of bytes, which have no end token; and of a vocabulary that has one."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "bytes":
        Tokenizer.of_bytes().save(directory)
    else:
        text = SampledText(str(text_file), "auto", "", 1 << 20)
        own = directory / "own"
        save_new(train_vocabulary(text, 270, chat="tokens", on_read=lambda: None), own, chat="tokens")
        for path in own.iterdir():
            path.rename(directory / path.name)
    make("llama", directory, vocab_size=270, max_position_embeddings=64)
    return directory


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three documents in two files."""
    directory = tmp_path / "texts"
    directory.mkdir()
    (directory / "a.txt").write_text(TEXTS[0])
    (directory / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    return directory


def evaluate(model: Path, path: Path, *, stride: int | None = None, width: int = WIDTH, **data: Any) -> Evaluation:
    spec = DataSpec(path=str(path), sequence_tokens=width, **data)
    found = Evaluation(Tokenizer.of_directory(model), spec, stride=stride)
    score_here(found, model, "cpu", "fp32")
    return found


def token_ids(model: Path) -> list[list[int]]:
    """Of each document, with what training puts behind it."""
    auto = AutoTokenizer.from_pretrained(model)
    end = [] if auto.eos_token_id is None else [auto.eos_token_id]
    return [auto(text if end or text.endswith("\n") else text + "\n")["input_ids"] + end for text in TEXTS]


def check(found: Evaluation, expected: list[list[float]]) -> None:
    """``expected``: the losses of each document."""
    assert [score.tokens for score in found.documents] == [len(losses) for losses in expected]
    for score, losses in zip([*found.documents, found.total], [*expected, list(chain(*expected))], strict=True):
        if losses:
            assert score.to_map()["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
            assert score.to_map()["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
            bits = sum(losses) / math.log(2) / score.text_bytes
            assert score.to_map()["bits_a_byte"] == pytest.approx(bits, rel=1e-5)
    assert found.total.text_bytes == sum(len(text.encode()) + text_has_no_end(found, text) for text in TEXTS)


def text_has_no_end(found: Evaluation, text: str) -> bool:
    return found.documents[0].text_bytes > len(TEXTS[0].encode()) and not text.endswith("\n")


def test_joined_documents_are_scored_in_the_windows_of_training(model: Path, texts: Path) -> None:
    ids = token_ids(model)
    stream = torch.tensor(list(chain(*ids)))
    owners = [number for number, tokens in enumerate(ids) for _ in tokens]
    expected: list[list[float]] = [[] for _ in ids]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for start in range(0, len(stream) - 1, WIDTH):
        window = stream[start : start + WIDTH + 1]
        with torch.no_grad():
            losses = F.cross_entropy(reference(window[None, :-1]).logits[0], window[1:], reduction="none")
        for at, loss in enumerate(losses.tolist(), start + 1):
            expected[owners[at]].append(loss)
    check(evaluate(model, texts), expected)


@pytest.mark.parametrize("stride", [STRIDE, WIDTH])
def test_with_a_stride_the_loss_is_that_of_transformers_guide(model: Path, texts: Path, stride: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected: list[list[float]] = []
    for tokens in token_ids(model):
        encoded, done, losses = torch.tensor([tokens]), 0, list[float]()
        for start in range(0, len(tokens), stride):  # the guide's loop
            stop = min(start + WIDTH, len(tokens))
            labels = encoded[:, start:stop].clone()
            labels[:, : -(stop - done)] = -100
            count = int((labels[:, 1:] != -100).sum())
            if count:
                with torch.no_grad():
                    losses += [reference(encoded[:, start:stop], labels=labels).loss.item()] * count
            done = stop
            if stop == len(tokens):
                break
        expected.append(losses)
    check(evaluate(model, texts, stride=stride), expected)


def test_of_conversations_the_answers_count(model: Path, tmp_path: Path) -> None:
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    form = ChatFormat(Tokenizer.of_directory(model))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = list[list[float]]()
    for chat in chats:
        (text,) = form.training_texts(chat)
        (encoding,) = form.encode([text.text])
        ids = torch.tensor([encoding.ids])
        with torch.no_grad():
            losses = F.cross_entropy(reference(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none").tolist()
        expected.append([])
        for (start, _), loss in zip(encoding.offsets[1:], losses, strict=True):
            if any(first <= start < stop for first, stop in zip(text.bounds[::2], text.bounds[1::2], strict=True)):
                expected[-1].append(loss)
    found = evaluate(model, path, format="chat", width=60)
    assert [score.name for score in found.documents] == [f"{path}:1", f"{path}:2"]
    assert [score.tokens for score in found.documents] == [len(losses) for losses in expected]
    for score, losses in zip([*found.documents, found.total], [*expected, list(chain(*expected))], strict=True):
        assert score.to_map()["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert score.to_map()["bits_a_byte"] is None
    assert found.done_bytes == found.total_bytes


@pytest.mark.parametrize("stride", [None, STRIDE])
def test_a_text_is_the_same_in_pieces_and_its_windows_in_any_order(
    model: Path, texts: Path, stride: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(model, texts, stride=stride)
    monkeypatch.setattr("p2ptrain.compute.tokenizing.PIECE_CHARS", 40)
    monkeypatch.setattr("p2ptrain.compute.tokenizing.OVERLAP_CHARS", 20)
    pieces = evaluate(model, texts, stride=stride)
    assert [*pieces.documents, pieces.total] == [*whole.documents, whole.total]
    shuffled = Evaluation(
        Tokenizer.of_directory(model), DataSpec(path=str(texts), sequence_tokens=WIDTH), stride=stride
    )
    forward = Evaluation(Tokenizer.of_directory(model), DataSpec(path=str(texts), sequence_tokens=WIDTH), stride=stride)
    random = np.random.default_rng(1)
    windows = [
        (window, -(10.0 ** random.uniform(-9, 3, len(window.tokens) - window.first)).astype(np.float32))
        for window in shuffled.windows(270)
    ]
    assert len(list(forward.windows(270))) == len(windows) > 9
    for evaluation, order in ((forward, windows), (shuffled, reversed(windows))):
        for window, scores in order:
            evaluation.add(window, scores)
    assert forward.total == shuffled.total


def test_what_cannot_be_scored_is_refused(model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        evaluate(model, tmp_path / "gone")
    short = tmp_path / "short.txt"
    short.write_text("\n")
    with pytest.raises(ConfigError, match="no two tokens"):
        evaluate(model, short, document_end="none")
