"""What the parts of a model weigh, read off the names of its tensors, beside the model that torch builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import model_sizes
from p2ptrain.cli.model_sizes import ELEMENT_BYTES, model_layout
from p2ptrain.compute.activations import DTYPES
from p2ptrain.compute.part import layer_sizes
from p2ptrain.compute.served_part import config_of
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.tensor_files import TensorTable
from tests.compute.families import FAMILIES, make
from wire.chain_messages import TensorRecord

BUILT = ("falcon", "gpt_neox", "opt", "deepseek")
"""Families whose names do not tell."""


def records(directory: Path) -> dict[str, TensorRecord]:
    entries = TensorTable(directory).entries
    return {
        name: TensorRecord(name, entry.dtype, list(entry.shape), entry.size_bytes, bytes(32))
        for name, entry in entries.items()
    }


def built(config: str, dtype: str) -> ModelSizes:
    return layer_sizes(config_of(config), DTYPES[dtype])


@pytest.mark.parametrize("family", [each for each in FAMILIES if not each.startswith(BUILT)])
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_names_tell_what_the_built_model_tells(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> ModelSizes:
        raise AssertionError("it was built")

    monkeypatch.setattr(model_sizes, "_by_building", refuse)
    make(family, tmp_path)
    config = (tmp_path / "config.json").read_text()
    found = model_layout(config, records(tmp_path), dtype)
    assert found.dtype == (dtype or "fp32")
    assert found.sizes == built(config, found.dtype)
    assert found.width == 64


def test_the_configuration_says_in_which_numbers_it_is_computed(tmp_path: Path) -> None:
    make("llama", tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    for said, dtype in (("bfloat16", "bf16"), ("torch.float16", "fp16"), ("float64", "fp32"), (None, "fp32")):
        found = model_layout(json.dumps(table | {"dtype": said}), records(tmp_path))
        assert found.dtype == dtype
        assert found.sizes.cache_bytes[0] == 2 * 2 * 16 * ELEMENT_BYTES[dtype]


def test_buffers_that_old_files_hold_weigh_nothing(tmp_path: Path) -> None:
    make("gpt2", tmp_path)
    config, table = (tmp_path / "config.json").read_text(), records(tmp_path)
    expected = model_layout(config, table)
    for name in ("h.0.attn.bias", "transformer.h.1.attn.masked_bias"):
        table[name] = TensorRecord(name, "F32", [1, 1, 128, 128], 65536, bytes(32))
    assert model_layout(config, table) == expected


def test_a_head_in_the_files_of_a_tied_model_weighs_nothing(tmp_path: Path) -> None:
    make("llama-tied", tmp_path)
    config, table = (tmp_path / "config.json").read_text(), records(tmp_path)
    expected = model_layout(config, table)
    table["lm_head.weight"] = table["model.embed_tokens.weight"]
    assert model_layout(config, table) == expected


def test_a_name_that_is_not_known_has_the_model_built(tmp_path: Path) -> None:
    make("llama", tmp_path)
    config, table = (tmp_path / "config.json").read_text(), records(tmp_path)
    table["model.something.weight"] = TensorRecord("model.something.weight", "F32", [4], 16, bytes(32))
    assert model_layout(config, table).sizes == built(config, "fp32")


def test_what_does_not_split_is_refused() -> None:
    config = json.dumps({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50})
    with pytest.raises(ConfigError, match="cannot be split"):
        model_layout(config, {})
