"""Noise from a key, and contributions that are clipped and noised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from p2ptrain.compute.local import SCALARS, LocalSpec
from p2ptrain.compute.noise import KEY_BYTES, gaussian
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.update import clip
from tests.compute.tiny_trainer import tiny_trainer

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
def trainer(tmp_path: Path) -> Trainer:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number * number % 97} of a text\n" for number in range(400)))
    made = tiny_trainer(text, local=LocalSpec(1.0, 0.0, fresh=True, clip_norm=CLIP))
    made.load_initial()
    return made


def contributed(trainer: Trainer, noise: tuple[float, bytes] | None, count: int = 3) -> np.ndarray:
    if noise is not None:
        trainer.use_noise(*noise)
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


def test_a_contribution_of_many_elements_is_no_longer_than_the_norm() -> None:
    values = torch.full((1_000_000,), 0.37)  # its norm, summed in fp32, is 0.05 % too small
    clip(values, CLIP)
    assert CLIP * 0.999 < np.linalg.norm(values.double().numpy()) <= CLIP
    for bad in (np.nan, np.inf):
        values[7] = bad
        clip(values, CLIP)
        assert not values.any()


def test_nothing_leaves_without_a_new_key(trainer: Trainer) -> None:
    contributed(trainer, (1.0, KEY))
    assert not contributed(trainer, None).any()
    assert not contributed(trainer, (1.0, b"")).any()


def test_a_member_without_a_share_adds_its_part_of_the_noise(trainer: Trainer) -> None:
    sent = contributed(trainer, (1.0, KEY), count=0)
    assert np.array_equal(sent[:-SCALARS], gaussian(KEY, len(sent) - SCALARS, 1.0))
    assert sent[-SCALARS:].tolist() == [0, 0, 0]
