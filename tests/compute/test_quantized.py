"""Weights in 8 and 4 bits: what they cost in memory and accuracy, and that a row's bits are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from p2ptrain.compute.layout import layer_sizes
from p2ptrain.compute.quantized import QuantizedLinear, quantize_linears
from p2ptrain.compute.served_part import ServedPartBuilder, config_of, load_whole
from p2ptrain.core.serving import QUANTIZED
from p2ptrain.core.tensor_files import TensorTable

from .families import make, make_unsplit
from .test_served_part import GREEDY, Client, load, prompt, spec_of

ERRORS = {"int8": 0.01, "int4": 0.1}
"""Of a layer's outputs, relative, with random weights."""


def _layer(kind: str, inputs: int, outputs: int) -> Any:
    layer: Any = nn.Linear(inputs, outputs) if kind == "linear" else Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(weights: str, kind: str) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleDict({"layer": _layer(kind, 96, 80)})
    x = torch.randn(3, 13, 96)
    with torch.inference_mode():
        expected = whole["layer"](x)
        quantize_linears([whole], weights)
        assert isinstance(whole["layer"], QuantizedLinear)
        together = whole["layer"](x)
        alone = torch.stack([torch.cat([whole["layer"](row[None]) for row in text]) for text in x])
        few = torch.cat([whole["layer"](x[:, :5]), whole["layer"](x[:, 5:])], 1)
    assert together.shape == expected.shape
    assert _relative(together, expected) < ERRORS[weights]
    assert torch.equal(together, alone)
    assert torch.equal(together, few)


@pytest.mark.parametrize("weights", QUANTIZED)
def test_a_device_without_a_kernel_computes_with_the_same_weights(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = _layer("linear", 64, 48), torch.randn(7, 64)
    by_kernel = QuantizedLinear(layer, weights)
    by_kernel.hold(layer.weight.detach())
    monkeypatch.setattr(QuantizedLinear, "kernel_device", "none")
    restored = QuantizedLinear(layer, weights)
    restored.hold(layer.weight.detach())
    with torch.inference_mode():
        monkeypatch.undo()
        expected = by_kernel(x)
        monkeypatch.setattr(QuantizedLinear, "kernel_device", "none")
        assert _relative(restored(x), expected) < 0.004  # inputs that are rounded to bf16, or not


def test_layers_that_are_all_zero_or_of_odd_shapes_are_computed_too() -> None:
    empty, odd = nn.Linear(32, 16, bias=False), nn.Linear(40, 16, bias=False)
    nn.init.zeros_(empty.weight)
    layers = nn.ModuleDict({"empty": empty, "odd": odd})
    for weights in QUANTIZED:
        quantize_linears([layers], weights)
        assert layers["odd"] is odd
        assert not layers["empty"](torch.randn(2, 32)).any()


@pytest.mark.parametrize(
    ("family", "weights", "share"),
    [
        ("llama-tied", "int8", 0.5),
        ("llama-tied", "int4", 0.4),
        ("gpt2", "int4", 0.2),  # its layers are no nn.Linear
        ("falcon-grouped", "int8", 0.5),  # linear layers of its own
        ("mixtral", "int8", 0.97),  # experts stay as they are
    ],
)
def test_parts_with_quantized_weights_write_the_text_of_the_whole_model(
    tmp_path: Path, family: str, weights: str, share: float
) -> None:
    """And take the memory that is planned for them."""
    make(family, tmp_path)
    whole = load_whole(tmp_path, weights=weights)
    text = Client([whole], "s", GREEDY).say(prompt(8), 8)
    assert Client(load(tmp_path, 2, 4, weights=weights), "s", GREEDY).say(prompt(8), 8) == text
    config = config_of((tmp_path / "config.json").read_text())
    sizes, usual = layer_sizes(config, weights=weights), layer_sizes(config)
    assert sizes.weights_bytes(0, 6) == whole.weights_bytes
    assert sum(sizes.layers_bytes) < share * sum(usual.layers_bytes)
    assert (sizes.first_bytes, sizes.cache_bytes) == (usual.first_bytes, usual.cache_bytes)


def test_weights_are_quantized_when_they_are_placed(tmp_path: Path) -> None:
    """So a worker's memory never holds the unquantized part."""
    make("llama", tmp_path)
    table = TensorTable(tmp_path)
    builder = ServedPartBuilder(spec_of(tmp_path, 0, 6, weights="int8"), tuple(table.entries))
    for name in builder.wanted:
        builder.place(name, table.entries[name].dtype, memoryview(table.read(name)))
        assert _allocated_bytes(builder) <= builder.weights_bytes
    assert _allocated_bytes(builder) == builder.weights_bytes


def _allocated_bytes(builder: Any) -> int:
    tensors = builder._whole.model.state_dict().values()
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)


def test_a_model_that_does_not_split_is_quantized_too(tmp_path: Path) -> None:
    make_unsplit("mamba", tmp_path)
    usual, held = load_whole(tmp_path), load_whole(tmp_path, weights="int8")
    assert held.weights_bytes < 0.6 * usual.weights_bytes
    assert len(Client([held], "s", GREEDY).say(prompt(8), 4)) == 4
