"""Attention in training: by bounds, by a mask and by transformers' own mask it is the same; by which is one rule."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from p2ptrain.compute import attention, passes
from p2ptrain.compute.attention import NAME, TrainingAttention, attend, by_kernel, each_text, takes_bounds
from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.device import pick_device
from p2ptrain.compute.model import Auto, ModelSpec
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.trainer import Trainer
from tests.compute.families import FAMILIES, UNSPLIT, make_of_bytes
from tests.compute.test_packing import CONVERSATIONS, written
from tests.compute.tiny_trainer import take_step, tiny, tiny_spec, tiny_trainer

from .pipelines import Pipeline

BOUNDS = torch.tensor([0, 7, 8, 18, 25, 26, 36, 36, 36], dtype=torch.int32)


def rows(*, heads: int, width: int = 16, seed: int = 0) -> Tensor:
    """Of two windows of 18 positions: (2, heads, 18, width)."""
    return torch.randn(2, heads, 18, width, generator=torch.Generator().manual_seed(seed))


def settings(directory: Path) -> dict[str, Any]:
    data = DataSpec(path=str(written(directory / "x.jsonl", CONVERSATIONS)), sequence_tokens=160, format="chat")
    return {"data": data, "model": tiny(layers=4, context=160, tie_embeddings=True), "micro_batches": 2}


class Untouched:
    """Leaves the model to transformers."""

    def __init__(self, module: Any, *, by_bounds: bool) -> None:
        assert module.config._attn_implementation == "sdpa"

    def arguments(self, *_: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("by_bounds", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_losses_and_gradients_are_those_of_the_mask_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: bool, by_bounds: bool
) -> None:
    changes = settings(tmp_path)
    recipe = ModelRecipe(tiny_spec("unused", **changes), pick_device("cpu", 1))
    with monkeypatch.context() as patch:
        patch.setattr(passes, "TrainingAttention", Untouched)
        reference = Trainer(recipe)
        expected = take_step(reference, 0, 2)
    monkeypatch.setattr(passes, "takes_bounds", lambda *_, **__: by_bounds)
    if split:
        pipeline = Pipeline("unused", (0, 1, 4), **changes)
        found = pipeline.run(0)
        modules: list[Any] = [stage.built.stage.module for stage in pipeline.stages if stage.built.stage is not None]
    else:
        trainer = Trainer(recipe)
        found = take_step(trainer, 0, 2)
        assert np.allclose(trainer.reduce_buffer, reference.reduce_buffer, atol=1e-6)
        modules = [trainer.built.flat.model]
    assert {module.config._attn_implementation for module in modules} == {NAME}
    assert recipe.config._attn_implementation == "sdpa", "another model of this recipe computes as transformers does"
    assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox", "mixtral", "deepseek_v3"])
def test_running_text_is_attended_without_a_mask(
    text_file: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU can take FlashAttention."""
    make_of_bytes(family, tmp_path)
    spec = ModelSpec(path=tmp_path)
    whole, parts = tiny_trainer(text_file, model=spec), Pipeline(text_file, (0, 2, 6), model=spec)
    seen: set[Any] = set()
    function: Any = F.scaled_dot_product_attention

    def watched(*inputs: Tensor, attn_mask: Tensor | None, is_causal: bool, **options: Any) -> Tensor:
        seen.add((attn_mask is None, is_causal))
        attended: Tensor = function(*inputs, attn_mask=attn_mask, is_causal=is_causal, **options)
        return attended

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    take_step(whole, 0)
    assert seen == {(True, True)}
    seen.clear()
    parts.run(0)
    assert seen == {(True, True)}


class Kernel:
    """Takes what the kernel for 16-bit numbers takes, and computes the texts one after another."""

    calls = 0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        longest: int,
        longest_keys: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        self.calls += 1
        assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
        assert (q.shape, k.shape, v.shape) == ((36, 4, 16), (36, 2, 16), (36, 2, 16))
        assert (starts.tolist(), key_starts is starts, starts.dtype) == (BOUNDS.tolist(), True, torch.int32)
        assert (longest, longest_keys, window_size, enable_gqa) == (18, 18, (-1, 0), True), "causal"
        return each_text(q, k, v, starts, longest, scale=scale)


@pytest.mark.parametrize("scale", [None, 0.1])
def test_a_kernel_gets_the_texts_of_all_windows_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, scale: float | None
) -> None:
    """Under autocast queries and keys come in fp32, because rotary positions are."""
    q, k, v = rows(heads=4), rows(heads=2, seed=1), rows(heads=2, seed=2)
    placed = {"cu_seq_lens_q": BOUNDS, "scaling": scale}
    expected, _ = attend(SimpleNamespace(), q, k, v, None, **placed)
    assert not torch.allclose(expected, attend(SimpleNamespace(), q, k, v, None, **placed | {"scaling": 1.0})[0])
    kernel = Kernel()
    monkeypatch.setitem(attention.BY_DEVICE, "cpu", partial(by_kernel, kernel=kernel))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = attend(SimpleNamespace(), q, k, v.bfloat16(), None, **placed)
    assert (found.shape, found.dtype) == ((2, 18, 4, 16), torch.bfloat16)
    assert torch.allclose(found.float(), expected, atol=0.03)
    assert kernel.calls == 1


def test_torch_takes_the_call_of_its_kernel() -> None:
    """Without a GPU: torch only tells what the call gives."""
    with FakeTensorMode():
        q, k = (torch.empty(36, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        found = by_kernel(q, k, k, torch.empty(9, dtype=torch.int32, device="cuda"), 18, scale=None)
    assert (found.shape, found.dtype) == (q.shape, torch.bfloat16)


def test_a_compiled_block_has_the_call_of_the_kernel_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph: nothing falls back to Python."""
    monkeypatch.setitem(attention.BY_DEVICE, "cpu", partial(by_kernel, kernel=lambda q, *_, **__: 2 * q))
    kind, sizes = FAMILIES["llama"]
    model = Auto.from_config(AutoConfig.for_model(kind, **sizes | {"num_hidden_layers": 1}))
    model.get_input_embeddings().requires_grad_(False)  # torch.compile warns of inputs that are computed
    placed = TrainingAttention(model, by_bounds=True).arguments(torch.arange(18).expand(2, -1), BOUNDS)
    ids, (block,) = torch.arange(36).view(2, 18), model.model.layers
    forward = block.forward
    for given in ({}, placed):
        block.forward = forward
        expected = model(input_ids=ids, use_cache=False, **given).logits
        block.forward = torch.compile(forward, backend="eager", fullgraph=True)
        assert torch.allclose(model(input_ids=ids, use_cache=False, **given).logits, expected)


def test_bounds_are_the_starts_of_conversations_in_few_shapes(tmp_path: Path) -> None:
    recipe = ModelRecipe(tiny_spec("unused", **settings(tmp_path)), pick_device("cpu", 1))
    batches = passes.MicroBatchReader(recipe)
    batch = batches.training_batch(0, 0)
    assert batch.positions is not None
    assert batch.bounds is not None
    starts = (batch.positions.flatten() == 0).nonzero().flatten().tolist()
    assert len(starts) > 4
    padding = [batch.positions.numel()] * (len(batch.bounds) - len(starts))
    assert (batch.bounds.tolist(), batch.bounds.dtype) == (starts + padding, torch.int32)
    numbers = range(batches.count)
    sizes = [len(bounds) - 1 for index in numbers if (bounds := batches.training_batch(0, index).bounds) is not None]
    assert set(sizes) <= {4, 8, 16, 32}


@pytest.mark.parametrize(("width", "value_width"), [(16, 24), (12, 12), (264, 264)])
def test_widths_that_the_kernel_lacks_are_computed_without_it(
    monkeypatch: pytest.MonkeyPatch, width: int, value_width: int
) -> None:
    monkeypatch.setitem(attention.BY_DEVICE, "cpu", Kernel())
    q, k, v = rows(heads=4, width=width), rows(heads=4, width=width), rows(heads=4, width=value_width)
    found, _ = attend(SimpleNamespace(), q, k, v, None, cu_seq_lens_q=BOUNDS)
    assert found.shape == (2, 18, 4, value_width)


def test_family_that_makes_its_own_mask_looks_at_no_later_token() -> None:
    """Doge masks what it would not keep. If transformers made no mask, it would attend to all that follows."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = Auto.from_config(AutoConfig.for_model("doge", **sizes, **special, vocab_size=32))
    TrainingAttention(model, by_bounds=True)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        whole, front = (model(input_ids=each, use_cache=False).logits for each in (ids, ids[:, :4]))
    torch.testing.assert_close(whole[:, :4], front)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "gemma2-window", "gemma3-window", "falcon", "lfm2"])
def test_families_with_other_masks_keep_those_of_transformers(name: str) -> None:
    kind, sizes = FAMILIES[name] if name in FAMILIES else (name, UNSPLIT[name])
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = Auto.from_config(AutoConfig.for_model(kind, **sizes, **special))
    before = model.config._attn_implementation
    chosen = TrainingAttention(model, by_bounds=True)
    assert (chosen.is_plain, model.config._attn_implementation) == (False, before)
    assert chosen.arguments(torch.arange(18).expand(2, -1), BOUNDS) == {}


def test_a_cpu_takes_bounds_of_long_windows_and_other_devices_a_mask() -> None:
    assert not takes_bounds(torch.device("cpu"), 256, bf16=True)
    assert takes_bounds(torch.device("cpu"), 1024, bf16=False)
    assert not takes_bounds(torch.device("mps"), 1024, bf16=True)
    assert not takes_bounds(torch.device("cuda"), 1024, bf16=False), "the kernel has only 16 bits"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_of_torch_computes_what_single_texts_do() -> None:
    q, k, v = (
        rows(heads=heads, width=64, seed=heads).cuda().bfloat16().transpose(1, 2).flatten(0, 1).requires_grad_()
        for heads in (4, 2, 2)
    )
    weights = torch.randn(36, 4, 64, device="cuda")
    found = []
    for compute in (by_kernel, each_text):
        out = compute(q, k, v, BOUNDS.cuda(), 10, scale=None)
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.05, rtol=0.05)
