"""Stages of a pipeline in one process: payloads are handed over directly, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from p2ptrain.compute.device import pick_device
from p2ptrain.compute.passes import Payload
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.stage import StageSpec
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.training import Applied
from tests.compute.tiny_trainer import tiny, tiny_spec

MODEL = tiny(layers=4, tie_embeddings=True)


class Pipeline:
    """All stages of one replica.

    Args:
        bounds: see ``StageSpec``.
        changes: of ``Trainer``'s arguments.
    """

    def __init__(self, text: Path | str, bounds: Sequence[int], split: Mapping[str, Any] | None = None, **changes: Any):
        self.device = changes.pop("device", None) or pick_device("cpu", 1)
        self.spec = tiny_spec(text, **({"model": MODEL} | changes))
        self.stages = [
            Trainer(ModelRecipe(self.spec, self.device, StageSpec(stage, tuple(bounds), **(split or {}))))
            for stage in range(len(bounds) - 1)
        ]
        self.micro_batches = self.spec.micro_batches

    def set_weights(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of a whole model, by its names."""
        for stage in self.stages:
            assert stage.built.stage is not None
            flat, names = stage.built.flat, stage.built.stage.names
            flat.copy_tensors({segment.name: whole[names[segment.name]] for segment in flat.segments})

    def set_recompute(self, recompute: bool) -> None:
        """From the next step on."""
        for stage in self.stages:
            stage.pipeline.recompute = recompute

    def gradients(self, step: int, warm_ups: Sequence[int] | None = None, share: Sequence[int] | None = None) -> None:
        """All forwards and backwards of a step, each stage in its order: ``warm_ups`` of each, then a forward and a
        backward in turn; then the sum of the tied gradients, and the loss told to all."""
        indices = list(range(self.micro_batches)) if share is None else list(share)
        orders = [order(indices, warm) for warm in (warm_ups or [0] * len(self.stages))]
        sent: dict[tuple[str, int, int], Payload | None] = {("F", -1, index): None for index in indices}
        sent |= {("B", len(self.stages), index): None for index in indices}
        for stage in self.stages:
            stage.begin_step(step)
        while any(orders):
            moved = False
            for number, stage in enumerate(self.stages):
                while orders[number]:
                    kind, index = orders[number][0]
                    source = (kind, number - 1 if kind == "F" else number + 1, index)
                    if source not in sent:
                        break
                    payload = sent.pop(source)
                    passes = stage.pipeline
                    made = passes.forward(step, index, payload) if kind == "F" else passes.backward(index, payload)
                    if payload is not None:
                        payload = payload.copy()
                        payload.fill(0xFF)
                    sent[kind, number, index] = made
                    orders[number].pop(0)
                    moved = True
            assert moved, "stages wait for ever"
        for stage in self.stages:
            stage.finish_gradients()
        self.exchange()

    def exchange(self) -> None:
        first, last = self.stages[0], self.stages[-1]
        if (one := first.pipeline.tied_gradient()) is not None:
            other = last.pipeline.tied_gradient()
            assert other is not None
            copies = one.copy(), other.copy()
            one += copies[1]
            other += copies[0]
        for stage in self.stages:
            stage.reduce_buffer[-1] = last.reduce_buffer[-1]

    def apply(self, step: int) -> Applied:
        squares = sum(stage.partial_square_sum(0, len(stage.reduce_buffer)) for stage in self.stages)
        return [stage.apply(step, squares) for stage in self.stages][-1]

    def run(self, step: int, warm_ups: Sequence[int] | None = None) -> Applied:
        self.gradients(step, warm_ups)
        return self.apply(step)

    def named(self, stage: Trainer, array: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters' parts of a flat array, by the whole model's names."""
        assert stage.built.stage is not None
        names = stage.built.stage.names
        return {names[s.name]: array[s.offset : s.offset + s.numel].view(s.shape) for s in stage.built.flat.segments}

    def named_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Of all stages, so a tied matrix twice."""
        return [
            item
            for stage in self.stages
            for item in self.named(stage, torch.from_numpy(np.asarray(stage.reduce_buffer))).items()
        ]

    def validation_loss(self) -> float:
        losses, targets = 0.0, 0
        for index in range(self.stages[0].data.validation_batches):
            payload: Payload | None = None
            for stage in self.stages:
                payload, loss, number = stage.pipeline.validation_forward(index, payload)
                losses, targets = losses + loss, targets + number
        return losses / targets


def order(indices: Sequence[int], warm_up: int) -> list[tuple[str, int]]:
    """One stage's: some forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm = min(warm_up, len(indices) - 1)
    result = [("F", index) for index in indices[:warm]]
    for number in range(len(indices) - warm):
        result += [("F", indices[warm + number]), ("B", indices[number])]
    return result + [("B", index) for index in indices[len(indices) - warm :]]
