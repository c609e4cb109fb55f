"""Averages of LoRA adapters over members: exact ones beside the mean of the products, and the other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from tests.compute.families import randomize
from tests.compute.saving import save
from tests.compute.tiny_trainer import state_bytes, tiny, tiny_trainer

SHARES = ((0, 1), (1, 2), (3, 4))
MICRO_BATCHES = 7


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    trainer = tiny_trainer(text_file, model=tiny(layers=2, kv_heads=4, architecture=request.param))
    randomize(trainer.built.flat.model)
    save(trainer, directory)
    return directory


def members(text: Path, base: Path, count: int = 3, *, slots: int = 3, freeze_a: bool = False) -> list[Trainer]:
    local = LocalSpec(outer_lr=1.0, outer_momentum=0.0, fresh=True, slots=slots)
    tuning = TuningSpec(rank=2, alpha=8, freeze_a=freeze_a)
    changes: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "local": local, "tuning": tuning}
    made = [tiny_trainer(text, model=ModelSpec(path=base), **changes) for _ in range(count)]
    for trainer in made:
        trainer.state.load_initial()
    return made


def play(trainers: list[Trainer], step: int) -> None:
    """One round."""
    for slot, (trainer, (first, count)) in enumerate(zip(trainers, SHARES, strict=True)):
        if trainer.slots is not None:
            trainer.slots.use_slot(slot)
        trainer.begin_step(step, first, count)
        for index in range(first, first + count):
            trainer.micro_batch(step, index)
        trainer.finish_gradients()
    total = np.sum([trainer.reduce_buffer for trainer in trainers], axis=0)
    for trainer in trainers:
        trainer.reduce_buffer[:] = total
        trainer.apply(step, trainer.partial_square_sum(0, total.size))


def effective(trainer: Trainer, parameters: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The weights that each adapted layer computes with."""
    if parameters is not None:
        trainer.built.flat.compute_with(parameters)
    layers = {name: it for name, it in trainer.built.flat.model.named_modules() if hasattr(it, "lora_A")}
    return {
        name: (it.base_layer.weight + it.get_delta_weight("default")).detach().clone() for name, it in layers.items()
    }


def ideal(trainers: list[Trainer], step: int) -> dict[str, torch.Tensor]:
    """The mean of what the members' layers compute with after their own steps, weighted by their steps."""
    sums: dict[str, torch.Tensor] = {}
    for trainer, (first, count) in zip(trainers, SHARES, strict=True):
        trainer.begin_step(step, first, count)
        for index in range(first, first + count):
            trainer.micro_batch(step, index)
        for name, weight in effective(trainer).items():
            sums[name] = sums.get(name, torch.zeros_like(weight)) + weight * (count / MICRO_BATCHES)
    return sums


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("kind", ["exact", "frozen-a", "naive"])
def test_exact_and_frozen_a_averages_are_those_of_the_products(text_file: Path, base: Path, kind: str) -> None:
    options = {"slots": 3 if kind == "exact" else 0, "freeze_a": kind == "frozen-a"}
    trainers, others = (members(text_file, base, **options) for _ in range(2))
    for step in range(2):
        wanted = ideal(others, step)
        play(trainers, step)
        play(others, step)
        off = worst(effective(trainers[0]), wanted)
        assert all(state_bytes(trainer) == state_bytes(trainers[0]) for trainer in trainers)
        assert (off < 1e-6) == (kind != "naive" or off == 0), off
    assert kind != "naive" or off > 1e-5


def test_a_checkpoint_of_exact_averages_is_a_whole_model(text_file: Path, base: Path, tmp_path: Path) -> None:
    trainers = members(text_file, base)
    play(trainers, 0)
    save(trainers[0], tmp_path, step=1)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(40).view(2, 20) * 5
    with torch.no_grad():
        own = trainers[0].built.flat.model
        assert torch.allclose(opened(input_ids=ids).logits, own(input_ids=ids).logits, atol=1e-5)
    late = members(text_file, base, 1)[0]
    late.state.load(tmp_path)
    assert state_bytes(late) == state_bytes(trainers[0])
    again = members(text_file, base, 1)[0]
    before = state_bytes(again)
    play([again, *trainers[1:]], 0)
    again.state.load_initial()
    assert state_bytes(again) == before
    assert worst(effective(again), effective(members(text_file, base, 1)[0])) == 0


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_a_member_without_a_share_adds_nothing(text_file: Path, base: Path) -> None:
    trainers, others = members(text_file, base), members(text_file, base, 4)
    play(trainers, 0)
    idle = others.pop()
    idle.slots.use_slot(2)  # that of the last one who takes part
    idle.begin_step(0, 7, 0)
    idle.finish_gradients()
    assert not idle.reduce_buffer.any()
    play(others, 0)
    assert state_bytes(others[0]) == state_bytes(trainers[0])


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_a_newcomer_ends_with_the_same_bits(text_file: Path, base: Path) -> None:
    trainers = members(text_file, base)
    play(trainers, 0)
    late = members(text_file, base, 1)[0]
    for source, target in zip(trainers[0].state.blobs(), late.state.blobs(), strict=True):
        target.view[:] = source.view
    late.state.refresh(1)
    play([*trainers[:2], late], 1)
    assert state_bytes(late) == state_bytes(trainers[0])
    assert worst(effective(late), effective(trainers[0])) == 0
