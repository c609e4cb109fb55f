"""A trainer small enough for tests: some twenty thousand parameters, four micro-batches of two windows of 16 tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.device import ComputeDevice, pick_device
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.recipe import ModelRecipe, TrainingSpec
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.training import Applied

TINY = ModelSpec(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, context=64)
OPTIMIZER = OptimizerSpec(lr=1e-2, warmup_steps=5, weight_decay=0.1, clip_norm=0.5)
MICRO_BATCHES = 4


class Apart(ComputeDevice):
    """A device with memory of its own, as far as the trainer can tell: its tensors are on the CPU all the same."""

    @property
    def kind(self) -> str:
        return "mps"


APART = Apart(torch.device("cpu"), "a device apart")


def tiny(**changes: Any) -> ModelSpec:
    """The tiny model's table with changes."""
    return replace(TINY, **changes)


def tiny_trainer(text: Path, *, threads: int = 1, **changes: Any) -> Trainer:
    """A trainer of the tiny model on the text of a file; keywords override ``Trainer``'s arguments."""
    device = changes.pop("device", None) or pick_device("cpu", threads)
    return Trainer(ModelRecipe(tiny_spec(text, **changes), device))


def tiny_spec(text: Path | str, **changes: Any) -> TrainingSpec:
    """What such a trainer trains."""
    data = DataSpec(path=str(text), sequence_tokens=16, private=changes.pop("private", False))
    return replace(TrainingSpec(TINY, data, OPTIMIZER, 30, 3, MICRO_BATCHES, 2, validation_batches=3), **changes)


def take_step(trainer: Trainer, step: int, micro_batches: int = MICRO_BATCHES) -> Applied:
    """One step of a ring of one."""
    trainer.begin_step(step)
    for index in range(micro_batches):
        trainer.micro_batch(step, index)
    trainer.finish_gradients()
    return trainer.apply(step, trainer.partial_square_sum(0, len(trainer.reduce_buffer)))


def run_step(trainer: Trainer, step: int, micro_batches: int = MICRO_BATCHES) -> float:
    """The loss of ``take_step``."""
    return take_step(trainer, step, micro_batches).loss


def validate_all(trainer: Trainer) -> tuple[float, int]:
    """Sum of the losses, and number of targets, of all validation micro-batches."""
    parts = [trainer.validate(index) for index in range(trainer.data.validation_batches)]
    return sum(loss for loss, _ in parts), sum(number for _, number in parts)


def state_bytes(trainer: Trainer) -> dict[str, bytes]:
    """A copy of everything that decides the future, by name."""
    return {blob.name: bytes(blob.view) for blob in trainer.state.blobs()}
