"""Muon, SGD and the terms of the loss, beside loops of torch's own optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

from p2ptrain.compute.device import flushed_denormals, pick_device
from p2ptrain.compute.flat import FlatModel, OptimizerSpec
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.optimizer import hidden_matrices, make_optimizer
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from p2ptrain.core.errors import StorageError
from tests.compute.pipelines import Pipeline
from tests.compute.saving import save
from tests.compute.tiny_trainer import MICRO_BATCHES, run_step, state_bytes, tiny, tiny_spec, tiny_trainer, validate_all

MUON = OptimizerSpec(name="muon", lr=2e-3, warmup_steps=2, weight_decay=0.1, momentum=0.9, clip_norm=0.0)
"""Not clipped: the iteration makes much of a gradient's last bit, so both sides compute the same ones."""
STEPS = 6


class Reference:
    """The whole batch of each step in one process, with ``torch.optim.Muon`` and ``torch.optim.AdamW``. The gradients
    of each of ``members`` are added up first."""

    def __init__(self, trainer: Trainer, spec: OptimizerSpec, members: int = 1) -> None:
        self.trainer, self.spec, self.model = trainer, spec, copy.deepcopy(trainer.built.flat.model)
        self.share = MICRO_BATCHES // members
        named = {name: item for name, item in self.model.named_parameters() if item.requires_grad}
        hidden = [item for name, item in named.items() if item.ndim == 2 and ".layers." in name]
        matrices = [item for name, item in named.items() if item.ndim == 2 and ".layers." not in name]
        vectors = [item for item in named.values() if item.ndim < 2]
        decay = spec.weight_decay
        rest = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizers = [
            torch.optim.Muon(hidden, weight_decay=decay, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [group for group in rest if group["params"]] or hidden[:0] or [nn.Parameter()], fused=True
            ),
        ]
        for group in self.optimizers[1].param_groups:
            group["betas"] = spec.beta1, spec.beta2

    def step(self, step: int) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self.spec.lr_at(step, 30)
        batches, losses, summed = self.trainer.batches, 0.0, dict[str, torch.Tensor]()
        with flushed_denormals():
            for index in range(MICRO_BATCHES):
                tokens = batches.corpus.window_tokens(batches.corpus.training[batches.window_numbers(step, index)])
                outputs = self.model(input_ids=torch.from_numpy(tokens[:, :-1]), use_cache=False).logits.flatten(0, 1)
                targets = torch.from_numpy(tokens[:, 1:]).flatten()
                loss = F.cross_entropy(outputs, targets, label_smoothing=self.spec.label_smoothing, reduction="sum")
                if self.spec.z_loss:
                    loss = loss + self.spec.z_loss * outputs.logsumexp(-1).square().sum()
                (loss / (MICRO_BATCHES * len(targets))).backward()
                losses += loss.item() / (MICRO_BATCHES * len(targets))
                if (index + 1) % self.share == 0:
                    for name, parameter in self.model.named_parameters():
                        if parameter.grad is not None:
                            summed[name] = parameter.grad + summed[name] if name in summed else parameter.grad
                            parameter.grad = None
            for name, gradient in summed.items():
                self.model.get_parameter(name).grad = gradient
            for optimizer in self.optimizers:
                optimizer.step()
        return losses

    def check(self, trainer: Trainer, most: float = 1e-5) -> None:
        """The trainer's weights are within ``most``, relative."""
        ours = dict(trainer.built.flat.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            difference = float((ours[name] - parameter).detach().norm() / parameter.detach().norm())
            assert difference < most, (name, difference)


def step_together(trainers: list[Trainer], step: int) -> float:
    """The loss of a step of a ring of ``trainers`` that share the micro-batches."""
    share = MICRO_BATCHES // len(trainers)
    for number, trainer in enumerate(trainers):
        trainer.begin_step(step, number * share, share)
        for index in range(number * share, (number + 1) * share):
            trainer.micro_batch(step, index)
        trainer.finish_gradients()
    total = np.sum([trainer.reduce_buffer for trainer in trainers], axis=0)
    for trainer in trainers:
        trainer.reduce_buffer[:] = total
        loss = trainer.apply(step, trainer.partial_square_sum(0, len(total))).loss
    return loss


@pytest.mark.parametrize(("members", "tied"), [(1, True), (2, True), (2, False)])
def test_muon_is_torchs_muon_and_adamw_also_after_a_heal(text_file: Path, members: int, tied: bool) -> None:
    model = tiny(tie_embeddings=tied)
    trainers = [tiny_trainer(text_file, model=model, optimizer=MUON) for _ in range(members)]
    reference = Reference(trainers[0], MUON, members)
    for step in range(STEPS):
        if step == 3:  # the first one is lost, and another takes its place
            newcomer = tiny_trainer(text_file, model=model, optimizer=MUON)
            for source, target in zip(trainers[-1].state.blobs(), newcomer.state.blobs(), strict=True):
                target.view[:] = source.view
            newcomer.state.refresh(step)
            trainers[0] = newcomer
        assert step_together(trainers, step) == pytest.approx(reference.step(step), rel=1e-6)
    for trainer in trainers:
        assert state_bytes(trainer) == state_bytes(trainers[0])
        reference.check(trainer)


def test_the_terms_of_the_loss_are_trained_and_not_validated(text_file: Path) -> None:
    spec = MUON.model_copy(update={"name": "adamw", "schedule": "linear", "label_smoothing": 0.1, "z_loss": 1e-2})
    trainer, plain = tiny_trainer(text_file, optimizer=spec), tiny_trainer(text_file)
    assert validate_all(trainer) == validate_all(plain)
    reference = Reference(trainer, spec)
    everything = [{"params": [p for p in reference.model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
                  {"params": [p for p in reference.model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    reference.optimizers = [torch.optim.AdamW(everything, betas=(spec.beta1, spec.beta2))]
    for step in range(STEPS):
        assert run_step(trainer, step) == pytest.approx(reference.step(step), rel=1e-6)
    reference.check(trainer)


def test_muon_goes_on_from_a_checkpoint_and_refuses_that_of_adamw(text_file: Path, tmp_path: Path) -> None:
    one, other = (tiny_trainer(text_file, optimizer=MUON) for _ in range(2))
    for step in range(3):
        run_step(one, step)
    save(one, tmp_path, 3)
    other.state.load(tmp_path)
    for step in range(3, STEPS):
        assert run_step(one, step) == run_step(other, step)
    assert state_bytes(one) == state_bytes(other)
    with pytest.raises(StorageError, match="optimizer's arrays"):
        tiny_trainer(text_file).state.load(tmp_path)


def test_muon_has_the_same_bits_in_exact_mode_whoever_computes(text_file: Path) -> None:
    alone = tiny_trainer(text_file, optimizer=MUON, exact=True)
    trainers = [tiny_trainer(text_file, optimizer=MUON, exact=True) for _ in range(2)]
    for step in range(3):
        run_step(alone, step)
        step_together(trainers, step)
    assert state_bytes(alone) == state_bytes(trainers[0]) == state_bytes(trainers[1])


@pytest.mark.parametrize("tied", [True, False])
def test_muon_of_stages_is_that_of_the_whole_model(text_file: Path, tied: bool) -> None:
    settings = {"model": tiny(layers=4, tie_embeddings=tied), "optimizer": MUON}
    alone, pipeline = tiny_trainer(text_file, **settings), Pipeline(text_file, (0, 1, 2, 4), **settings)
    for step in range(4):
        assert pipeline.run(step).loss == pytest.approx(run_step(alone, step), rel=1e-5)
    whole = dict(alone.built.flat.model.named_parameters(remove_duplicate=False))
    for stage in pipeline.stages:
        assert stage.built.stage is not None
        for name, parameter in stage.built.flat.model.named_parameters():
            torch.testing.assert_close(parameter, whole[stage.built.stage.names[name]], rtol=0, atol=5e-4)
    numel = sum(stage.state.arrays()["momentum_buffer"].numel() for stage in pipeline.stages)
    assert numel == alone.state.arrays()["momentum_buffer"].numel()


def test_muon_of_adapters_is_torchs(text_file: Path, tmp_path: Path) -> None:
    build_model(tiny(), 256, seed=1).save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    trainer = tiny_trainer(text_file, model=ModelSpec(path=tmp_path), tuning=TuningSpec(rank=4), optimizer=MUON)
    reference = Reference(trainer, MUON)
    for step in range(STEPS):
        assert run_step(trainer, step) == pytest.approx(reference.step(step), rel=1e-5)
    reference.check(trainer)
    assert not trainer.state.arrays()["exp_avg"].numel()


def test_inner_steps_of_local_are_torchs_muon(text_file: Path) -> None:
    """One member, one outer step of rate 1 without momentum: it comes to where the inner steps came."""
    spec = MUON.model_copy(update={"warmup_steps": 0, "schedule": "constant"})
    trainer = tiny_trainer(text_file, local=LocalSpec(outer_lr=1.0, outer_momentum=0.0), optimizer=spec)
    reference, batches = Reference(trainer, spec), trainer.batches
    run_step(trainer, 0)
    for index in range(MICRO_BATCHES):
        tokens = batches.corpus.window_tokens(batches.corpus.training[batches.window_numbers(0, index)])
        outputs = reference.model(input_ids=torch.from_numpy(tokens[:, :-1]), use_cache=False).logits.flatten(0, 1)
        for optimizer in reference.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = spec.lr
        loss = F.cross_entropy(outputs, torch.from_numpy(tokens[:, 1:]).flatten(), reduction="sum")
        (loss / len(outputs)).backward()
        for optimizer in reference.optimizers:
            optimizer.step()
    reference.check(trainer)


def _updated(threads: int) -> bytes:
    torch.set_num_threads(threads)
    flat = FlatModel(build_model(tiny(hidden_size=256, intermediate_size=700), 256, seed=1), torch.device("cpu"))
    optimizer = make_optimizer(flat, MUON)
    for step in range(2):
        gradients = torch.randn(flat.numel, generator=torch.Generator().manual_seed(step))
        optimizer.apply(gradients, step=step, lr=1e-3, scale=0.37, weight_decay=0.1)
    return b"".join(part.numpy().tobytes() for part in (flat.parameters, *optimizer.state.values()))


def test_muon_has_the_same_bits_at_every_thread_count() -> None:
    assert _updated(1) == _updated(2)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_the_estimate_of_memory_counts_what_the_optimizer_keeps(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    counted: dict[str, Any] = {}
    monkeypatch.setattr("p2ptrain.compute.recipe.fit_training", lambda *args, **options: counted.update(options) or 1)
    recipe = ModelRecipe(tiny_spec(text_file, optimizer=OptimizerSpec(name=name)), pick_device("cpu", 1))
    flat = recipe.build().flat
    kept = sum(array.numel() for array in make_optimizer(flat, OptimizerSpec(name=name)).state.values())
    assert counted["moments"] == pytest.approx(kept / flat.numel, rel=1e-3)


def test_a_family_with_other_names_has_its_embeddings_apart() -> None:
    model = build_model(ModelSpec(architecture="gpt2", hidden_size=32, layers=1, heads=4, context=64), 256, seed=1)
    assert hidden_matrices(model) == {
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
