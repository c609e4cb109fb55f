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
        optimizer.apply(gradients, step=step, lr=1e-3, scale=0.37, weight_decay=0.1)
        assert torch.get_num_threads() == threads
    return b"".join(part.numpy().tobytes() for part in (flat.parameters, *optimizer.state.values()))


def test_the_update_has_the_same_bits_at_every_thread_count() -> None:
    assert _updated(1, 100_003) == _updated(2, 100_003) == _updated(3, 100_003)


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
        optimizer.apply(flat.gradients[: flat.numel], step=step, lr=lr, scale=0.25, weight_decay=0.3)
        assert torch.equal(flat.gradients, kept), "the redo buffer"
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for name, parameter in flat.model.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_the_schedules() -> None:
    spec = OptimizerSpec(lr=1.0, min_lr_ratio=0.1, warmup_steps=4, decay_share=0.25)
    cosine, linear, constant, wsd = (
        [spec.model_copy(update={"schedule": name}).lr_at(step, 24) for step in range(30)]
        for name in ("cosine", "linear", "constant", "wsd")
    )
    assert cosine[:5] == linear[:5] == constant[:5] == wsd[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert cosine[14] == linear[14] == pytest.approx(0.55)
    assert cosine[24:] == linear[24:] == wsd[24:] == pytest.approx([0.1] * 6)
    assert all(after < before for before, after in pairwise(cosine[4:25]))
    assert [before - after for before, after in pairwise(linear[4:25])] == pytest.approx([0.9 / 20] * 20)
    assert set(constant[3:]) == set(wsd[3:20]) == {1.0}
    assert [before - after for before, after in pairwise(wsd[19:25])] == pytest.approx([0.9 / 5] * 5)
    for step in range(30):  # the formula before there were others, bit for bit
        done = min(1.0, (step - 4) / 20)
        assert step < 4 or cosine[step] == 0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * done))
    assert OptimizerSpec(lr=1.0, warmup_steps=0).lr_at(0, 1) == 1.0


def test_square_sum() -> None:
    values = np.random.default_rng(1).standard_normal(200_001).astype(np.float32)
    expected = math.fsum(float(value) ** 2 for value in values.tolist())
    assert square_sum(values) == pytest.approx(expected, rel=1e-9)
    assert square_sum(values.astype(np.int64)) == float(np.square(values.astype(np.int64)).sum())
    assert math.isnan(square_sum(np.append(values, np.float32(math.inf))[1:]))
    assert square_sum(values) == square_sum(values.copy())
    assert square_sum(values[:0]) == 0.0
    assert square_sum(np.full(1000, 1e30, np.float32)) == pytest.approx(1e63, rel=1e-6), "no overflow in fp32"
