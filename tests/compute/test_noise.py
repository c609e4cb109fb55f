"""Noise from a key, and contributions that are clipped and noised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.compute.gradients import KEY_BYTES, gaussian
from p2ptrain.compute.local import SCALARS, LocalSpec
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.update import clip
from tests.compute.tiny_trainer import state_bytes, tiny_trainer

KEY = bytes(range(KEY_BYTES))
CLIP = 0.25


def test_noise_is_normal_independent_and_of_its_key() -> None:
    numel, std = 600_001, 3.0  # odd, and more than two blocks
    noise = gaussian(KEY, numel, std).astype(np.float64)
    assert noise.shape == (numel,)
    assert np.array_equal(noise, gaussian(KEY, numel, std))
    scaled = noise / std
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs(np.mean(scaled**power) - moment) < 10 * (2 * power) ** 2 / np.sqrt(numel), power
    for lag in (1, 2, 1 << 18):
        assert abs(np.mean(scaled[lag:] * scaled[:-lag])) < 10 / np.sqrt(numel)
    other = gaussian(bytes([1, *KEY[1:]]), numel, std) / std
    assert abs(np.mean(scaled * other)) < 10 / np.sqrt(numel)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number * number % 97} of a text\n" for number in range(400)))
    return path


@pytest.fixture
def trainer(text: Path) -> Trainer:
    made = tiny_trainer(text, local=LocalSpec(outer_lr=1.0, outer_momentum=0.0, fresh=True, clip_norm=CLIP))
    made.state.load_initial()
    return made


def contributed(trainer: Trainer, noise: tuple[float, bytes] | None, count: int = 3) -> np.ndarray:
    if noise is not None:
        trainer.noise.use_noise(*noise)
    trainer.begin_step(0, 0, count)
    for index in range(count):
        trainer.micro_batch(0, index)
    trainer.finish_gradients()
    return trainer.reduce_buffer.copy()


def test_a_contribution_is_clipped_and_has_the_noise_once(trainer: Trainer) -> None:
    bare = contributed(trainer, (0.0, KEY))
    assert np.linalg.norm(bare[:-SCALARS]) == pytest.approx(CLIP, rel=1e-3)
    assert np.linalg.norm(bare[:-SCALARS]) <= CLIP
    assert bare[-SCALARS:].tolist() == [1, 0, 0]  # weight 1 for three inner steps, and no loss
    noised = contributed(trainer, (2.0, KEY))
    assert np.array_equal(noised[:-SCALARS], bare[:-SCALARS] + gaussian(KEY, len(bare) - SCALARS, 2.0))
    assert noised[-SCALARS:].tolist() == [1, 0, 0]


def clipped_trainer(text: Path, **changes: Any) -> Trainer:
    changes = {"micro_batches": 6, "micro_batch_sequences": 1, "private": True, **changes}
    made = tiny_trainer(text, **changes)
    made.state.load_initial()
    return made


def test_each_sequence_is_clipped_alone_as_in_a_plain_loop(text: Path) -> None:
    trainer, plain = clipped_trainer(text, clip_norm=CLIP), clipped_trainer(text)
    numel = plain.reduce_buffer.size - plain.scalars
    expected, lengths = np.zeros(numel), []
    for index in range(6):
        plain.begin_step(0, 0, 6)
        plain.micro_batch(0, index)
        plain.finish_gradients()
        gradient = plain.reduce_buffer[:numel] / np.float64(plain.reduce_buffer[numel])  # of its own targets
        lengths.append(np.linalg.norm(gradient))
        expected += gradient * min(1.0, CLIP / lengths[-1]) / 6
    assert max(lengths) > CLIP
    bare = contributed(trainer, (0.0, KEY), count=6)
    np.testing.assert_allclose(bare[:numel], expected, rtol=1e-3, atol=1e-7)
    noised = contributed(trainer, (3.0, KEY), count=6)
    assert np.array_equal(noised[:numel], bare[:numel] + gaussian(KEY, numel, 3.0 / 6))
    assert not noised[numel:].any()
    assert not bare[numel:].any()
    assert math.isnan(trainer.apply(0, trainer.partial_square_sum(0, bare.size)).loss)
    state = state_bytes(trainer)
    assert not contributed(trainer, None, count=6).any()
    trainer.apply(1, 0.0)
    assert state_bytes(trainer) == state


def test_a_sequence_counts_once_in_a_step(text: Path) -> None:
    text.write_text(text.read_text()[:600])
    trainer = clipped_trainer(text, clip_norm=1e-3, micro_batches=100, validation_batches=1)
    windows = trainer.data.windows
    assert windows < 50
    contributed(trainer, (0.0, KEY), count=windows)
    once = trainer.reduce_buffer.copy()
    assert once.any()
    assert np.array_equal(contributed(trainer, (0.0, KEY), count=2 * windows), once)


def test_a_contribution_of_many_elements_is_no_longer_than_the_norm() -> None:
    values = torch.full((1_000_000,), 0.37)  # its norm, summed in fp32, is 0.05 % too small
    clip(values, CLIP)
    assert CLIP * 0.999 < np.linalg.norm(values.double().numpy()) <= CLIP
    for bad in (np.nan, np.inf):
        values[7] = bad
        clip(values, CLIP)
        assert not values.any()


def test_without_a_new_key_the_contribution_is_zero(trainer: Trainer) -> None:
    contributed(trainer, (1.0, KEY))
    assert not contributed(trainer, None).any()
    assert not contributed(trainer, (1.0, b"")).any()


def test_a_member_without_a_share_adds_its_part_of_the_noise(trainer: Trainer) -> None:
    sent = contributed(trainer, (1.0, KEY), count=0)
    assert np.array_equal(sent[:-SCALARS], gaussian(KEY, len(sent) - SCALARS, 1.0))
    assert sent[-SCALARS:].tolist() == [0, 0, 0]
