"""Text from a checkpoint: reproducible, streamed in whole characters, refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.compute.generate import GenerateResult, LocalModel, generate
from p2ptrain.compute.model import build_model, load_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.serving import Sampling
from tests.compute.saving import save
from tests.compute.tiny_trainer import TINY, run_step, tiny

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
    arguments: dict[str, Any] = {"max_new_tokens": 20, "stop": ()} | changes
    shape = {name: arguments.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in arguments}
    sampling = Sampling(**({"seed": 1} | shape))
    model = LocalModel(directory, device="cpu")
    return generate(model, prompt, sampling=sampling, on_text=pieces.append, **arguments), pieces


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


def tokens_of(model: LocalModel, ids: list[int], most: int = 8, wanted: int = 99) -> list[int]:
    made: list[int] = []

    def take(token: int) -> bool:
        made.append(token)
        return len(made) < wanted

    model.tokens(ids, max_new_tokens=most, sampling=Sampling(temperature=0), on_token=take)
    return made


def test_a_text_ends_before_a_stop_string_and_nothing_more_is_computed(checkpoint: Path) -> None:
    whole = run(checkpoint, temperature=0)[0].text
    at = next(at for at in range(4, 18) if whole.index(whole[at : at + 2]) == at)
    result, pieces = run(checkpoint, temperature=0, stop=[whole[at : at + 2]])
    assert (result.text, result.ended) == (whole[:at], "stop")
    assert "".join(pieces) == result.text
    assert result.tokens < 20
    assert len(tokens_of(LocalModel(checkpoint, device="cpu"), [1, 2], wanted=3)) == 3


def test_what_was_computed_before_is_not_computed_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = LocalModel(checkpoint, device="cpu")
    model = LocalModel(checkpoint, device="cpu")
    first = tokens_of(model, list(b"hello"))
    widths: list[int] = []
    embed = model._model.get_input_embeddings()
    embed.register_forward_hook(lambda _module, given, _out: widths.append(given[0].shape[1]))
    longer = [*b"hello", *first, *b"more"]
    assert tokens_of(model, longer) == tokens_of(fresh, longer)
    assert widths[0] == len(b"more") + 1, "the last token of an answer was not fed"
    widths.clear()
    other = [*b"hello", *first[:3], *b"else"]
    assert tokens_of(model, other) == tokens_of(LocalModel(checkpoint, device="cpu"), other)
    assert widths[0] == len(b"else")
    widths.clear()
    assert tokens_of(model, other) == tokens_of(model, other)
    assert widths[0] == 1, "one position is computed at least"
    assert tokens_of(model, list(b"zzz")) == tokens_of(LocalModel(checkpoint, device="cpu"), list(b"zzz"))


def test_a_cache_that_cannot_be_cut_is_not_used_again(tmp_path: Path) -> None:
    sliding = tiny(architecture="mistral", extra={"sliding_window": 8})
    build_model(sliding, 256, seed=1).save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    model = LocalModel(tmp_path, device="cpu")
    first = tokens_of(model, list(b"hello, this is long"))
    ids = [*b"hello, this is long", *first[:2], *b"something else"]
    assert tokens_of(model, ids) == tokens_of(LocalModel(tmp_path, device="cpu"), ids)


def test_what_was_broken_off_leaves_nothing_behind(checkpoint: Path) -> None:
    model = LocalModel(checkpoint, device="cpu")
    tokens_of(model, list(b"hello, here I am"))

    def fail(token: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.tokens(list(b"hello, it is you"), max_new_tokens=8, sampling=Sampling(temperature=0), on_token=fail)
    expected = tokens_of(LocalModel(checkpoint, device="cpu"), list(b"hello, here I am!"))
    assert tokens_of(model, list(b"hello, here I am!")) == expected


def test_the_text_is_that_of_transformers(checkpoint: Path) -> None:
    """Greedy and sampled, whatever the directory's own settings say of sampling."""
    model: Any = load_model(checkpoint)
    model.eval()
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5)):
        torch.manual_seed(sampling.seed)
        shape = {"temperature": 0.7, "top_k": 20, "top_p": 0.9} if sampling.temperature else {}
        ids = torch.tensor([list(b"def ")])
        whole = model.generate(ids, max_new_tokens=20, do_sample=bool(shape), pad_token_id=0, **shape)
        made: list[int] = []
        LocalModel(checkpoint, device="cpu").tokens(
            list(b"def "), max_new_tokens=20, sampling=sampling, on_token=lambda t, made=made: not made.append(t)
        )
        assert made == whole[0, 4:].tolist()


def test_settings_of_the_directory_do_not_shape_the_text(checkpoint: Path, tmp_path: Path) -> None:
    expected = run(checkpoint, temperature=0)[0].text
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 9.0, "no_repeat_ngram_size": 1}')
    assert run(tmp_path, temperature=0)[0].text == expected
    unused = LocalModel(tmp_path, device="cpu").text.unused_settings()
    assert unused == {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1}
