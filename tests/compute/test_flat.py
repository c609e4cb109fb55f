"""Flat buffers and AdamW over them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.compute.flat import FlatAdamW, FlatModel, OptimizerSpec, square_sum
from p2ptrain.compute.model import build_model
from tests.compute.tiny_trainer import TINY, tiny

CPU = torch.device("cpu")


def flat_model(**changes: Any) -> FlatModel:
    return FlatModel(build_model(tiny(**changes), 256, seed=1), CPU)


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_and_gradients_are_views(tie: bool) -> None:
    original = build_model(tiny(tie_embeddings=tie), 256, seed=1)
    expected = {name: parameter.detach().clone() for name, parameter in original.named_parameters()}
    flat = FlatModel(original, CPU)
    assert flat.numel % 16 == 0
    assert flat.gradients.shape == (flat.numel + 2,)
    for name, parameter in flat.model.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert parameter.data_ptr() % 64 == flat.parameters.data_ptr() % 64
        assert parameter.untyped_storage().data_ptr() == flat.parameters.untyped_storage().data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == flat.gradients.untyped_storage().data_ptr()
    flat.parameters.zero_()
    assert all(parameter.count_nonzero() == 0 for parameter in flat.model.parameters())


def test_matrices_come_first_and_vectors_last() -> None:
    flat = flat_model(architecture="qwen2")  # which has biases
    for segment in flat.segments:
        assert (segment.offset < flat.decayed_numel) == (len(segment.shape) >= 2), segment
    assert {len(segment.shape) for segment in flat.segments} == {1, 2}


@pytest.mark.parametrize("tie", [True, False])
def test_the_last_layer_comes_first_and_the_embedding_last(tie: bool) -> None:
    flat = flat_model(tie_embeddings=tie)
    matrices = [segment.name for segment in flat.segments if segment.offset < flat.decayed_numel]
    assert (matrices[0] == "lm_head.weight") is not tie
    assert matrices[-1] == "model.embed_tokens.weight"
    layers = [int(name.split(".")[2]) for name in matrices if ".layers." in name]
    assert layers == sorted(layers, reverse=True)
    assert flat.stops == [*(segment.offset for segment in flat.segments[1:]), flat.numel]


def test_layout_tells_models_apart() -> None:
    assert flat_model().layout == flat_model().layout
    assert len({flat_model().layout, flat_model(layers=3).layout, flat_model(tie_embeddings=False).layout}) == 3


def _updated(threads: int, numel: int) -> bytes:
    """Parameters and moments after five updates with clipping, bit for bit."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    model = nn.Module()
    model.matrix = nn.Parameter(torch.randn(numel, 1, generator=generator))
    model.vector = nn.Parameter(torch.randn(333, generator=generator))
    flat = FlatModel(model, CPU)
    optimizer = FlatAdamW(flat, OptimizerSpec())
    for step in range(5):
        gradients = torch.randn(flat.numel, generator=generator)
        optimizer.apply(gradients, step=step, lr=1e-3, scale=0.37)
        assert torch.get_num_threads() == threads
    return b"".join(part.numpy().tobytes() for part in (flat.parameters, optimizer.exp_avg, optimizer.exp_avg_sq))


def test_the_update_has_the_same_bits_at_every_thread_count() -> None:
    assert _updated(1, 100_003) == _updated(2, 100_003) == _updated(3, 100_003)


def test_the_update_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that happen to be stable here need not be so elsewhere."""
    seen: list[int] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    flat = flat_model()
    FlatAdamW(flat, OptimizerSpec()).apply(flat.gradients[: flat.numel], step=0, lr=0.1, scale=1.0)
    assert seen == [1]
    assert torch.get_num_threads() == 2


def test_the_update_is_that_of_adamw_and_leaves_the_gradients() -> None:
    flat, plain = flat_model(), build_model(TINY, 256, seed=1)
    spec = OptimizerSpec(weight_decay=0.3)
    optimizer = FlatAdamW(flat, spec)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
    )
    generator = torch.Generator().manual_seed(3)
    for step, lr in enumerate([1e-2, 5e-3, 1e-3]):
        flat.gradients.copy_(torch.randn(flat.numel + 2, generator=generator))
        for segment in flat.segments:
            size = math.prod(segment.shape)
            gradient = flat.gradients[segment.offset : segment.offset + size].view(segment.shape)
            plain.get_parameter(segment.name).grad = gradient * 0.25
        kept = flat.gradients.clone()
        optimizer.apply(flat.gradients[: flat.numel], step=step, lr=lr, scale=0.25)
        assert torch.equal(flat.gradients, kept), "the redo buffer"
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for name, parameter in flat.model.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_the_schedule() -> None:
    spec = OptimizerSpec(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [spec.lr_at(step, 24) for step in range(30)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[14] == pytest.approx(0.55)
    assert rates[24:] == pytest.approx([0.1] * 6)
    assert all(after < before for before, after in pairwise(rates[4:25]))
    assert OptimizerSpec(lr=1.0, warmup_steps=0).lr_at(0, 1) == 1.0


def test_square_sum() -> None:
    values = np.random.default_rng(1).standard_normal(200_001).astype(np.float32)
    expected = math.fsum(float(value) ** 2 for value in values.tolist())
    assert square_sum(values) == pytest.approx(expected, rel=1e-14)
    assert square_sum(values) == square_sum(values.copy())
    assert square_sum(values[:0]) == 0.0
    assert square_sum(np.full(10, 1e30, np.float32)) == pytest.approx(1e61, rel=1e-6), "no overflow in fp32"
