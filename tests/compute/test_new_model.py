"""A new model with a tokenizer of its own, or of a directory that has no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.text import USER, ChatFormat, ModelText, Turn
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.tokenizer_training import END, SampledText, save_new, train_vocabulary
from p2ptrain.compute.tuning import TuningSpec
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tokenizer_files import check_fit, embedding_of, vocabulary_size
from tests.compute.families import make
from tests.compute.saving import save
from tests.compute.tiny_trainer import run_step, state_bytes, tiny, tiny_trainer

VOCAB = 270


@pytest.fixture(scope="module")
def own(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the words of ``text_file``."""
    out = tmp_path_factory.mktemp("own") / "tokenizer"
    text = SampledText(str(text_file), "auto", "", 1 << 20)
    save_new(train_vocabulary(text, VOCAB, chat="tokens", on_read=lambda: None), out, chat="tokens")
    return out


def test_what_is_trained_is_what_the_library_trains(text_file: Path, own: Path) -> None:
    alone = tokenizers.ByteLevelBPETokenizer()  # type: ignore[no-untyped-call]
    special = [END, "<|system|>", "<|user|>", "<|assistant|>"]
    alone.train([str(text_file)], VOCAB, min_frequency=0, show_progress=False, special_tokens=special)
    auto, text = AutoTokenizer.from_pretrained(own), text_file.read_text() + "é😀 <|endoftext|>"
    assert auto.get_vocab() == alone.get_vocab()
    assert auto(text)["input_ids"] == alone.encode(text).ids
    assert auto.decode(auto(text)["input_ids"]) == text
    assert (auto.eos_token, len(auto)) == (END, VOCAB)


def test_a_large_text_is_sampled_evenly(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number:<65535}\n" for number in range(40)))
    text = SampledText(str(path), "auto", "", path.stat().st_size // 4)
    assert [int(piece) for piece in text.pieces()] == list(range(3, 40, 4))
    assert (text.sample_bytes, text.done_bytes) == (10 << 16, 40 << 16)


def test_a_chat_template_marks_the_answers(own: Path) -> None:
    form = ChatFormat(Tokenizer.of_directory(own))
    messages = [{"role": USER, "content": "def"}, {"role": "assistant", "content": "ring"}]
    (found,) = form.training_texts(messages)
    assert [found.text[start:stop] for start, stop in [found.bounds]] == [f"ring{END}"]
    assert found.text == AutoTokenizer.from_pretrained(own).apply_chat_template(messages, tokenize=False)
    asked = form.ids([Turn(USER, "def")])
    assert form.encode([found.text])[0].ids[: len(asked)] == asked


@pytest.mark.parametrize("alone", [False, True], ids=["directory", "file"])
def test_a_new_model_has_the_tokenizer_and_so_have_its_checkpoints(
    text_file: Path, own: Path, tmp_path: Path, alone: bool
) -> None:
    place = own
    if alone:
        place = tmp_path / "mine.json"
        place.write_bytes((own / "tokenizer.json").read_bytes())
    trainer = tiny_trainer(text_file, model=tiny(tokenizer=place))
    run_step(trainer, 0)
    saved = tmp_path / "saved"
    saved.mkdir()
    save(trainer, saved)
    model, auto = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    assert model.get_input_embeddings().weight.shape[0] == VOCAB
    ids = auto("def ring peer")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(own)("def ring peer")["input_ids"]
    assert len(ids) == 5
    found = ModelText(saved)
    assert found.tokenizer.digest == Tokenizer.of_directory(own).digest
    assert found.end_tokens == (frozenset() if alone else {0})
    assert found.tokenizer.has_template is not alone
    again = tiny_trainer(text_file, model=ModelSpec(path=saved))
    assert again.data.digest == trainer.data.digest, "the job goes on with the same tokens"


def test_a_configuration_alone_begins_a_new_model(text_file: Path, own: Path, tmp_path: Path) -> None:
    reference = tiny_trainer(text_file, model=tiny(tokenizer=own))
    full = tmp_path / "full"
    full.mkdir()
    save(reference, full)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((full / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        tiny_trainer(text_file, model=ModelSpec(path=bare))
    for model in (ModelSpec(path=bare, tokenizer=own), ModelSpec(path=bare)):
        trainer = tiny_trainer(text_file, model=model)
        assert state_bytes(trainer) == state_bytes(reference)
        for path in own.iterdir():  # for the second one
            (bare / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="LoRA needs a trained model"):
        tiny_trainer(text_file, model=ModelSpec(path=bare), tuning=TuningSpec(rank=2))
    (bare / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ConfigError, match="cannot load a model"):
        tiny_trainer(text_file, model=ModelSpec(path=bare))


def test_weights_keep_their_own_tokenizer(text_file: Path, own: Path, tmp_path: Path) -> None:
    make("llama", tmp_path)
    with pytest.raises(ConfigError, match="a tokenizer of their own"):
        tiny_trainer(text_file, model=ModelSpec(path=tmp_path, tokenizer=own))


def test_a_vocabulary_larger_than_the_embedding_is_refused_before_the_text_is_read(own: Path, tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for model in (ModelSpec(path=tmp_path, tokenizer=own), ModelSpec(path=tmp_path)):
        with pytest.raises(ConfigError, match=r"ids 0 to 269, and the model in .* has only 211") as caught:
            tiny_trainer(tmp_path / "no-such-text", model=model)
        assert "vocab_size = 270" in caught.value.remedy
        assert "--vocab 211" in caught.value.remedy
        for path in own.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert embedding_of(tmp_path) == 211
    check_fit(tmp_path, None, 270)


def test_a_trained_model_may_lack_added_tokens(own: Path, tmp_path: Path) -> None:
    make("llama", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(own / "tokenizer.json"))
    backend.add_special_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary_size(tmp_path / "tokenizer.json") == 271
    check_fit(tmp_path, None, 270)
    with pytest.raises(ConfigError, match="ids 0 to 269") as caught:
        check_fit(tmp_path, None, 269)
    assert "that it was trained with" in caught.value.remedy


def test_a_worker_without_the_tokenizer_says_what_to_do(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no .*gone on this machine") as caught:
        tiny_trainer(text_file, model=tiny(tokenizer=tmp_path / "gone"))
    assert "copy them there" in caught.value.remedy


@pytest.mark.parametrize("content", ["", "[]", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(text_file: Path, tmp_path: Path, content: str) -> None:
    place = tmp_path / "mine.json"
    place.write_text(content)
    with pytest.raises(ConfigError, match=r"mine\.json"):
        vocabulary_size(place)
    with pytest.raises(ConfigError, match=r"mine\.json"):
        tiny_trainer(text_file, model=tiny(tokenizer=place))


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 7}, [["a", 0.0]] * 8], ids=["map", "unigram"])
def test_the_size_of_a_vocabulary(tmp_path: Path, vocabulary: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 9}]}))
    assert vocabulary_size(tmp_path / "tokenizer.json") == 10
    assert vocabulary_size(tmp_path / "tokenizer.json", with_added=False) == 8


def test_members_with_private_texts_compare_tokenizers(text_file: Path, own: Path) -> None:
    own_digest = tiny_trainer(text_file, private=True, model=tiny(tokenizer=own)).data.digest
    assert own_digest == Tokenizer.of_directory(own).digest
    assert not tiny_trainer(text_file, private=True).data.digest
