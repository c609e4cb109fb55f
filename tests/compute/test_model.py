"""Models built from a table or a directory, the same bits from the same seed, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.compute.device import pick_device
from p2ptrain.compute.model import (
    ModelSpec,
    build_model,
    flops_per_token,
    load_model,
    model_config,
)
from p2ptrain.compute.stage import StageSpec, fit_training
from p2ptrain.core.errors import ConfigError, ResourceError
from tests.compute.tiny_trainer import TINY, tiny


def weights(model: nn.Module) -> dict[str, list[float]]:
    return {name: parameter.tolist() for name, parameter in model.named_parameters()}


def test_gpt2() -> None:
    model: Any = build_model(tiny(architecture="gpt2", kv_heads=4), 256, seed=1)
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (32, 48)
    assert model.config.resid_pdrop == model.config.embd_pdrop == model.config.attn_pdrop == 0.0
    ids = torch.zeros(1, 5, dtype=torch.int64)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits), "no dropout in training mode"
    with pytest.raises(ConfigError, match=r"no model\.kv_heads"):
        build_model(tiny(architecture="gpt2"), 256, seed=1)


def test_equal_seeds_give_equal_bits_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_model(TINY, 256, seed=1)
    assert torch.equal(torch.rand(3), expected)
    torch.set_num_threads(2)
    assert weights(build_model(TINY, 256, seed=1)) == weights(first)
    assert weights(build_model(TINY, 256, seed=2)) != weights(first)


def test_weights_begin_at_the_scale_of_the_width() -> None:
    model: Any = build_model(tiny(hidden_size=64), 256, seed=1)
    assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert model_config(tiny(extra={"initializer_range": 0.01}), 256).initializer_range == 0.01


@pytest.mark.parametrize("architecture", ["reformer"])
def test_an_architecture_that_cannot_be_built_is_named(architecture: str) -> None:
    with pytest.raises(ConfigError, match=f"'{architecture}' model cannot be built here") as caught:
        build_model(tiny(architecture=architecture, kv_heads=4), 256, seed=1)
    assert "llama" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architecture": "lama"}, "model.architecture = 'lama'"),
        ({"architecture": "vit"}, "model.architecture = 'vit'"),
        ({"extra": {"rms_norm_eps": "much"}}, "table is not a valid 'llama'"),
    ],
)
def test_bad_values_name_their_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config(tiny(**changes), 256)
    assert key in caught.value.message


def test_a_model_too_large_is_refused_before_it_is_built() -> None:
    huge = ModelSpec(hidden_size=1 << 16, layers=200, heads=64, kv_heads=64, intermediate_size=1 << 18)
    with pytest.raises(ResourceError, match=r"training layers 0 to 200 \(1\d+\.\d+ M parameters\) .* needs .* GiB"):
        fit_training(model_config(huge, 256), StageSpec(0, (0, 200)), pick_device("cpu"), micro_batch_tokens=1)


def test_a_local_directory(tmp_path: Path) -> None:
    model = build_model(tiny(architecture="gpt2", kv_heads=4), 256, seed=1)
    model.config.resid_pdrop = 0.5
    model.save_pretrained(tmp_path)
    again: Any = build_model(ModelSpec(path=tmp_path), 256, seed=9)
    assert weights(again) == weights(model)
    assert again.config.resid_pdrop == 0.0
    assert model_config(ModelSpec(path=tmp_path), 300).vocab_size == 256  # what a text has decides, see load_corpus


def test_a_directory_that_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model directory") as caught:
        model_config(ModelSpec(path=tmp_path), 256)
    assert "config.json" in caught.value.remedy
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match=r"model\.architecture"):
        model_config(ModelSpec(path=tmp_path), 256)
    for text in ("[", '{"model_type": "llama", "hidden_size": "abc"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a model directory") as caught:
            model_config(ModelSpec(path=tmp_path), 256)
        assert caught.value.remedy == "correct its config.json, or use another model"


def test_weights_that_are_missing_or_damaged(tmp_path: Path) -> None:
    build_model(TINY, 256, seed=1).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot load a model"):
        load_model(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")  # a pickle by name: never opened
    with pytest.raises(ConfigError, match="cannot load a model"):
        load_model(tmp_path)


def test_weights_of_fewer_layers_are_refused(tmp_path: Path) -> None:
    build_model(TINY, 256, seed=1).save_pretrained(tmp_path)
    deeper = model_config(tiny(layers=3), 256)
    with pytest.raises(ConfigError, match=r"lack model\.layers\.2"):
        load_model(tmp_path, config=deeper)


LAYER = (
    32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
)  # of TINY: queries, two of four heads of keys and values, output, MLP


@pytest.mark.parametrize(
    ("spec", "multiplied", "attention"),
    [
        (tiny(), 2 * LAYER + 256 * 32, 2 * 32),
        (tiny(tie_embeddings=False), 2 * LAYER + 256 * 32, 2 * 32),  # the input's matrix is only looked up
        (tiny(architecture="gpt2", kv_heads=4), 2 * (4 * 32 * 32 + 2 * 32 * 48) + 256 * 32, 2 * 32),  # and positions
        (tiny(architecture="lstm"), 2 * 8 * 32 * 32 + 256 * 32, 0),
    ],
)
def test_a_tokens_flop_are_those_of_matrix_products_and_attention(
    spec: ModelSpec, multiplied: int, attention: int
) -> None:
    assert flops_per_token(model_config(spec, 256), 10) == 6 * multiplied + 12 * attention * 10
