"""Architectures that split, and those that must be refused: by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from p2ptrain.compute.split_check import check_splits
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tensor_files import SPLIT_FAMILIES

from .families import FAMILIES


def test_every_family_that_is_said_to_split_is_tried() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == set(SPLIT_FAMILIES)


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"num_hidden_layers": 80, "eos_token_id": [128001, 128009], "rope_parameters": LLAMA3_ROPE}),
        ("mistral", {"sliding_window": 4096, "num_hidden_layers": 32}),
        ("qwen2", {"num_hidden_layers": 28, "use_sliding_window": True, "max_window_layers": 20}),
        ("qwen3", {"head_dim": 128, "num_hidden_layers": 1}),
        ("gpt2", {"n_layer": 12, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    ],
)
def test_settings_of_published_models(kind: str, settings: dict[str, Any]) -> None:
    check_splits(AutoConfig.for_model(kind, **settings))


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3, "hidden_size": 64}, "its 4 query .* its 3 key"),
        ("mamba", {}, r"a state \(LinearAttentionLayer\) that cannot be rolled back"),
        ("rwkv", {}, "no attention heads"),
        ("lstm", {}, "no attention heads"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "a state"),
    ],
)
def test_an_architecture_that_does_not_split_is_refused_by_name(kind: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        check_splits(AutoConfig.for_model(kind, **settings))
    assert caught.value.message.startswith(f"a {kind!r} model cannot be split: ")
    assert all(family in caught.value.remedy for family in SPLIT_FAMILIES)
