"""Parts of a model against the whole one, bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from p2ptrain.compute.key_value_cache import SessionCache, SessionRows
from p2ptrain.compute.layout import LayerRange, layer_sizes
from p2ptrain.compute.part import PartModel, build_part
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.serving import BLOCK_POSITIONS
from p2ptrain.core.tensor_files import TensorTable

from .families import VOCAB, chars_read, config_of, cut_at, load_part, load_parts, make, opened

Saved = tuple[Path, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def of(family: str) -> Saved:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = directory, make(family, directory)
        return made[family]

    return of


class Chain:
    """Parts one after the other, and the whole model, each with its cache."""

    def __init__(self, whole: Any, parts: Sequence[PartModel]) -> None:
        self.whole, self.parts = whole, parts
        self.length = 0
        self.memories = [part.new_memory() for part in parts]
        for memory in self.memories:
            memory.grow(BLOCK_POSITIONS)
        self.reference = DynamicCache(config=whole.config)
        for layer in self.reference.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()

    def both(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of the new positions, of the parts and of the whole."""
        x = torch.tensor([ids])
        with torch.no_grad():
            expected = self.whole(input_ids=x, past_key_values=self.reference, use_cache=True).logits
            positions = torch.arange(self.length, self.length + len(ids))
            for part, memory in zip(self.parts, self.memories, strict=True):
                x = part.forward(
                    x, positions, SessionCache(memory, SessionRows([0], self.length, self.length + len(ids)))
                )
        self.length += len(ids)
        return x, expected

    def check(self, ids: list[int]) -> None:
        got, expected = self.both(ids)
        assert got.isfinite().all()
        assert torch.equal(got, expected)

    def back(self, keep: int) -> None:
        self.reference.crop(keep - self.length)  # transformers' own, after one forward pass, as it wants it
        self.length = keep


def tokens(count: int, start: int = 0) -> list[int]:
    return [(start + 17 * index) % VOCAB for index in range(count)]


@pytest.mark.parametrize("family", ["llama-tied", "gemma3-window", "falcon-alibi", "deepseek_v3"])
def test_parts_compute_the_same_bits_as_the_whole(saved: Callable[[str], Saved], family: str) -> None:
    """`check_splits`, which every part passes that is served, compares the other families."""
    directory, whole = saved(family)
    chain = Chain(whole, load_parts(directory, 1, 4))
    chain.check(tokens(11))  # a prompt
    for token in tokens(4, 5):
        chain.check([token])
    chain.check(tokens(5, 100))  # several at once, to verify
    chain.back(chain.length - 3)
    chain.check(tokens(2, 50))  # others instead
    chain.back(chain.length - 1)
    chain.check(tokens(6, 60))
    chain.check([9])


@pytest.mark.parametrize("family", ["llama-tied", "mistral-window"])
def test_bf16_parts_equal_a_bf16_whole(tmp_path: Path, family: str) -> None:
    whole = make(family, tmp_path, dtype=torch.bfloat16)
    parts = load_parts(tmp_path, 1, 4, dtype=torch.bfloat16)
    assert {parameter.dtype for part in parts for parameter in part.module.parameters()} == {torch.bfloat16}
    chain = Chain(whole, parts)
    chain.check(tokens(11))
    chain.check(tokens(3, 7))
    chain.back(12)
    chain.check(tokens(2, 9))


def test_files_of_a_bare_base_model(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """As GPT-2's on the hub: no prefix, no head, and masks that nobody reads."""
    directory, whole = saved("gpt2")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(directory / "model.safetensors").items()
    }
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8) for layer in range(6)}
    save_file({**weights, **masks}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    chain = Chain(whole, load_parts(tmp_path, 2, 5))
    chain.check(tokens(9))
    chain.check([4])


def test_files_that_hold_both_of_two_tied_matrices(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    directory, _ = saved("llama-tied")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    weights = load_file(directory / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    whole = opened(tmp_path)
    for cuts in ((), (3,)):
        parts = load_parts(tmp_path, *cuts)
        Chain(whole, parts).check(tokens(9))
        shared = sum(parameter.numel() for part in parts for parameter in part.module.parameters())
        once = sum(parameter.numel() for parameter in whole.parameters())
        assert shared - once == (embedding.numel() if cuts else 0)
    save_file({**weights, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    for part in cut_at(6, 3):
        with pytest.raises(ConfigError, match="differ in"):
            load_part(config_of(tmp_path), part, TensorTable(tmp_path))


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_part_reads_its_own_bytes_only(tmp_path: Path, family: str) -> None:
    """Headers included; counted by the system."""
    wider = {"n_embd": 256} if family == "gpt2" else {"hidden_size": 256, "intermediate_size": 600}
    make(family, tmp_path, **wider)
    config = config_of(tmp_path)
    for part in cut_at(6, 1, 4):
        before = chars_read() if sys.platform == "linux" else 0
        table = TensorTable(tmp_path)
        built = load_part(config, part, table)
        by_system = chars_read() - before if sys.platform == "linux" else None
        own = sum(parameter.numel() * 4 for parameter in built.module.parameters())
        assert by_system is None or own <= by_system <= 1.01 * own
        assert own == layer_sizes(config).weights_bytes(part.start, part.stop) == built.weights_bytes


def test_a_model_far_larger_than_memory() -> None:
    """Its sizes and names are known, and nothing of it is allocated: it would be some 280 GB."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    sizes = layer_sizes(config, torch.float32)
    attention, feed_forward = 8192 * (8192 + 8192 + 1024 + 1024), 3 * 8192 * 28672
    assert sizes.layers_bytes == (4 * (attention + feed_forward + 2 * 8192),) * 80
    assert (sizes.first_bytes, sizes.last_bytes) == (4 * 128256 * 8192, 4 * (128256 + 1) * 8192)
    assert (sizes.tied_bytes, sizes.cache_bytes[0]) == (0, 4 * 2 * 8 * 128)


def test_layers_of_too_many_kinds() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=17, layer_numbers=list(range(17)))
    with pytest.raises(ConfigError, match="more than 16 kinds"):
        layer_sizes(config, torch.float32)


@pytest.mark.parametrize(("start", "stop", "layers"), [(-1, 2, 6), (2, 2, 6), (0, 7, 6)])
def test_no_such_part(start: int, stop: int, layers: int) -> None:
    with pytest.raises(ConfigError, match=f"layers {start} to {stop}"):
        LayerRange(start, stop, layers)


def test_what_does_not_fit_is_refused_by_name(saved: Callable[[str], Saved]) -> None:
    directory, _ = saved("llama")
    config = config_of(directory)
    weights = load_file(directory / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ConfigError, match="has 6 layers, not 7"):
        build_part(config, LayerRange(0, 2, 7), weights)
    with pytest.raises(ConfigError, match=f"lack {norm}"):
        build_part(config, LayerRange(0, 2, 6), {name: tensor for name, tensor in weights.items() if name != norm})
    too_few = torch.zeros(63), "as F32 has 252 bytes; config.json requires 256"
    for wrong, problem in (too_few, (torch.zeros(64, dtype=torch.int8), "has dtype I8")):
        with pytest.raises(ConfigError, match=f"{norm} {problem}") as caught:
            build_part(config, LayerRange(1, 2, 6), weights | {norm: wrong})
        assert caught.value.remedy
