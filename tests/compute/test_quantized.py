"""Weights in 8 and 4 bits: what they cost in memory and accuracy, and that a row's bits are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from p2ptrain.compute.layout import layer_sizes
from p2ptrain.compute.quantized import QuantizedLinear, quantize_linears
from p2ptrain.compute.served_part import ServedPartBuilder, config_of, load_whole
from p2ptrain.core.errors import ConfigError
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


def _quantize_files(directory: Path, bits: int, size: int) -> None:
    """Rewrite a model's files as compressed-tensors writes them. ``size``: inputs of a group; 0: all."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".layers." in name and tensors[name].ndim == 2]:
        weight = tensors.pop(name)
        groups = weight.view(len(weight), -1, size or weight.shape[1])
        scale = (groups.abs().amax(2) / (2 ** (bits - 1) - 1)).bfloat16()
        levels = (groups / scale[..., None]).round().int().flatten(1)
        shifts = torch.arange(0, 32, bits)
        stored = levels.view(len(weight), -1, 32 // bits) + 2 ** (bits - 1)
        tensors[f"{name}_packed"] = (stored.long() << shifts).sum(2).to(torch.uint32).view(torch.int32)
        tensors |= {f"{name}_scale": scale, f"{name}_shape": torch.tensor(weight.shape)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = _packed(bits, size)
    (directory / "config.json").write_text(json.dumps(config))


def _packed(bits: int, size: int, **changes: Any) -> dict[str, Any]:
    kind = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if size else "channel"}
    group = {"weights": kind | {"group_size": size or None} | changes, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(("bits", "size", "weights"), [(8, 0, "int8"), (4, 32, "int4"), (4, 64, "int4")])
def test_files_that_are_quantized_already_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, size: int, weights: str
) -> None:
    monkeypatch.setattr(QuantizedLinear, "kernel_device", "none")  # it would round inputs
    usual = make("llama", tmp_path, intermediate_size=64)
    _quantize_files(tmp_path, bits, size)
    whole, parts = load_whole(tmp_path), load(tmp_path, 3)
    for name, layer in whole._model.module.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight = usual.get_parameter(f"{name}.weight")
            groups = weight.view(len(weight), -1, size or weight.shape[1])
            scale = (groups.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)).bfloat16()
            expected = ((groups / scale).round() * scale).flatten(1)
            assert torch.equal(layer._restored(), expected)
    assert Client(parts, "s", GREEDY).say(prompt(8), 8) == Client([whole], "s", GREEDY).say(prompt(8), 8)
    assert whole.weights_bytes == layer_sizes(config_of((tmp_path / "config.json").read_text())).weights_bytes(0, 6)
    with pytest.raises(ConfigError, match=f"files are quantized to {weights}"):
        load_whole(tmp_path, weights="int8" if weights == "int4" else "int4")


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "gptq", "bits": 4},
        {},
        _packed(4, 48),
        _packed(4, 0),
        _packed(8, 32),
        _packed(4, 32, actorder="group"),
        _packed(4, 32, symmetric=False),
    ],
)
def test_files_quantized_in_another_format_are_refused(tmp_path: Path, stored: dict[str, Any]) -> None:
    make("llama", tmp_path)
    text = json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": stored})
    with pytest.raises(ConfigError, match="quantized in a format that is not supported") as caught:
        config_of(text)
    assert "--weights" in caught.value.remedy


def test_quantized_files_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    make("llama", tmp_path)  # its layers of 80 inputs cannot be packed
    _quantize_files(tmp_path, 4, 16)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": _packed(4, 32)}
    with pytest.raises(ConfigError, match=r"lack .*down_proj\.weight"):
        ServedPartBuilder(spec_of(tmp_path, 0, 6, config=json.dumps(config)), tuple(TensorTable(tmp_path).entries))
