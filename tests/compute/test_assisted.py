"""transformers' assisted generation, and how well a drafter foresees a verifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.compute.assisted import AssistedPair
from p2ptrain.compute.model import build_model
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
    assert len(pair.assisted(PROMPTS[0], TOKENS, SAMPLED).tokens) == TOKENS


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
