"""transformers' assisted generation, and how well a drafter foresees a verifier."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.compute.assisted import AssistedPair, passes_with
from p2ptrain.compute.model import build_model, load_model
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.serving import Sampling
from tests.compute.tiny_trainer import tiny

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=5)
PROMPTS = [list(b"def main"), list(b"import ")]
TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one that is like it by half."""
    root = tmp_path_factory.mktemp("pair")
    for name, noise in (("verifier", 0.0), ("drafter", 0.02)):
        model = build_model(tiny(layers=2), 256, seed=1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(root / name)
        Tokenizer.of_bytes().save(root / name)
    return root / "verifier", root / "drafter"


def test_assisted_generation_writes_the_same_greedily(models: tuple[Path, Path]) -> None:
    pair = AssistedPair(*models, device="cpu", threads=1)
    for depth in (0, 4):
        for ids in PROMPTS:
            plain, assisted = pair.plain(ids, TOKENS, GREEDY), pair.assisted(ids, TOKENS, GREEDY, depth=depth)
            assert plain.tokens == assisted.tokens
            assert len(plain.tokens) == TOKENS
    assert len(pair.drafter_alone(PROMPTS[0], TOKENS, SAMPLED).tokens) == TOKENS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_what_a_drafter_foresees(models: tuple[Path, Path], sampling: Sampling) -> None:
    verifier, drafter = models
    itself = AssistedPair(verifier, verifier, device="cpu").agreement(PROMPTS, TOKENS, sampling, depth=5)
    assert (itself.positions, itself.alpha, itself.passes) == (2 * TOKENS, 1.0, 2 * TOKENS // 6)
    found = AssistedPair(verifier, drafter, device="cpu").agreement(PROMPTS, TOKENS, sampling, depth=5)
    assert 0.1 < found.alpha < 1.0
    assert 1.0 < found.tokens_a_pass < 6.0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_vocabularies_that_are_padded_differently(
    models: tuple[Path, Path], tmp_path: Path, sampling: Sampling
) -> None:
    """The same drafts; but transformers does not take such a pair."""
    shutil.copytree(models[1], tmp_path / "padded")
    padded = load_model(models[1])
    padded.resize_token_embeddings(272, mean_resizing=False)
    padded.save_pretrained(tmp_path / "padded")
    wanted = AssistedPair(*models, device="cpu").agreement(PROMPTS, TOKENS, sampling)
    pair = AssistedPair(models[0], tmp_path / "padded", device="cpu")
    assert pair.agreement(PROMPTS, TOKENS, sampling) == wanted
    with pytest.raises(ConfigError, match="256 and 272 entries"):
        pair.assisted(PROMPTS[0], TOKENS, sampling)
    larger = AssistedPair(tmp_path / "padded", models[0], device="cpu")
    assert larger.agreement(PROMPTS, TOKENS, sampling).positions == 2 * TOKENS


def test_where_rounding_decides(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Two tokens with one row of the head are exactly as likely, and no third one is near."""
    model: Any = load_model(models[0])
    (first, second, *_) = torch.topk(model(torch.tensor(PROMPTS[:1])).logits[0, -1], 2).indices.tolist()
    with torch.no_grad():
        head = model.lm_head.weight
        head[second] = head[first]
    model.save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    pair = AssistedPair(tmp_path, models[1], device="cpu", threads=1)
    ids, third = PROMPTS[0], ({7, 8, 9} - {first, second}).pop()
    for tokens, decides in (((first, second), True), ((second, first), True), ((first, third), False)):
        found = pair.rounding(ids, tokens, GREEDY, 0)
        assert found.decides is decides
        assert 0 < found.most < 1e-4
    one = pair.plain(ids, 1, SAMPLED).tokens[0]
    assert pair.rounding(ids, (one, one), SAMPLED, 0).decides
    assert not pair.rounding(ids, (first, second), SAMPLED, 0).decides, "noise parts them"


def test_it_computes_in_what_the_files_hold(models: tuple[Path, Path], tmp_path: Path) -> None:
    load_model(models[0], torch.bfloat16).save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    pair = AssistedPair(tmp_path, tmp_path, device="cpu", threads=1)
    assert len(pair.plain(PROMPTS[0], 4, GREEDY).tokens) == 4
    assert pair.rounding(PROMPTS[0], (1,), GREEDY, 0).most > 1e-4


def test_models_of_other_tokens_are_no_pair(models: tuple[Path, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(9)}
    fast: Any = PreTrainedTokenizerFast  # its annotations are partial
    fast(tokenizer_object=Fast(WordLevel(words, unk_token="w0"))).save_pretrained(tmp_path)
    build_model(tiny(), 9, seed=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="know other tokens: 256 and 9 tokens"):
        AssistedPair(models[0], tmp_path)


def test_a_pass_gives_what_is_right_and_one_token_more() -> None:
    right = [True, True, False, True, True, True, True, True]
    assert passes_with(right, 0) == len(right), "one token a pass"
    assert passes_with(right, 4) == 2  # 2 + 1, 4 + 1
    assert passes_with(right, 1) == 5  # 1 + 1, 0 + 1, 1 + 1, 1 + 1, 1
    assert passes_with([False] * 3, 8) == 3
    assert passes_with([], 8) == 0
