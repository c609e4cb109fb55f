"""Inner and outer steps of DiLoCo, beside loops of torch's own optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name

from p2ptrain.compute.gradients import MIXING
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.trainer import Trainer
from tests.compute.tiny_trainer import OPTIMIZER, state_bytes, tiny_trainer, validate_all

STEPS, MICRO_BATCHES = 6, 7
SHARES = ((0, 4), (4, 3))
WARMED_UP = OPTIMIZER.model_copy(update={"warmup_steps": 1})
"""(first, count) of two members: one is faster."""


def members(text_file: Path, count: int = 2, **local: Any) -> list[Trainer]:
    changes = {"steps": STEPS, "micro_batches": MICRO_BATCHES, "optimizer": WARMED_UP}
    made = [tiny_trainer(text_file, local=LocalSpec(**local), **changes) for _ in range(count)]
    for trainer in made:
        trainer.state.load_initial()
    return made


def contribute(trainer: Trainer, step: int, first: int, count: int) -> None:
    """In the order of ``roles.strategies.sync``."""
    is_ready = trainer.begin_step(step, first, count)
    if is_ready:
        trainer.finish_gradients()
    sent = trainer.reduce_buffer.copy()
    for index in range(first, first + count):
        trainer.micro_batch(step, index)
    if is_ready:
        assert np.array_equal(trainer.reduce_buffer, sent), "it changed while it travelled"
    else:
        trainer.finish_gradients()


def outer_step(trainers: list[Trainer], step: int) -> float:
    """A step of a ring of ``trainers``; returns its loss."""
    for trainer, share in zip(trainers, SHARES, strict=False):
        contribute(trainer, step, *share)
    total = np.zeros_like(trainers[0].reduce_buffer)
    for start, stop in trainers[0].exchanged(step):
        total[start:stop] = sum(trainer.reduce_buffer[start:stop] for trainer in trainers)
    applied = []
    for trainer in trainers:
        trainer.reduce_buffer[:] = total
        applied.append(trainer.apply(step, trainer.partial_square_sum(0, len(total))))
    assert all(state_bytes(trainer) == state_bytes(trainers[0]) for trainer in trainers)
    assert len(set(applied)) == 1
    return applied[0].loss


class Reference:
    """The same with ``torch.optim.AdamW``, ``torch.optim.SGD`` and a model for each member."""

    def __init__(self, trainer: Trainer, *, fragments: int = 1, overlap: bool = False) -> None:
        self.trainer, self.fragments, self.overlap = trainer, fragments, overlap
        self.shared = copy.deepcopy(trainer.built.flat.model)
        self.own = [copy.deepcopy(self.shared) for _ in SHARES]
        self.inner = [torch.optim.AdamW(groups(model), betas=(0.9, 0.95), eps=1e-8) for model in self.own]
        self.outer = torch.optim.SGD(self.shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def inner_steps(self, member: int, step: int) -> float:
        first, count = SHARES[member]
        model, losses = self.own[member], 0.0
        for number, index in enumerate(range(first, first + count), start=1):
            windows = self.trainer.batches.corpus.training[self.trainer.batches.window_numbers(step, index)]
            tokens_bt = torch.from_numpy(self.trainer.batches.corpus.window_tokens(windows))
            logits_btv = model(input_ids=tokens_bt[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits_btv.flatten(0, 1), tokens_bt[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
            for group in self.inner[member].param_groups:
                group["lr"] = WARMED_UP.lr_at(step - 1 + number / count, STEPS)
            self.inner[member].step()
            losses += loss.item()
        return losses

    def step(self, step: int) -> float:
        for model in self.own:
            model.load_state_dict(self.shared.state_dict())
        losses = sum(self.inner_steps(member, step) for member in range(len(SHARES)))
        for name, parameter in self.shared.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            for model, (_, count) in zip(self.own, SHARES, strict=True):
                own = dict(model.named_parameters())[name]
                parameter.grad += (parameter - own).detach() * (count / MICRO_BATCHES)
        self.outer.step()
        return losses / MICRO_BATCHES


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def test_outer_and_inner_steps_are_those_of_torchs_optimizers(text_file: Path) -> None:
    trainers = members(text_file)
    reference = Reference(trainers[0])
    for step in range(STEPS):
        assert outer_step(trainers, step) == pytest.approx(reference.step(step), rel=1e-6)
    for name, parameter in reference.shared.named_parameters():
        difference = (trainers[1].built.flat.model.get_parameter(name) - parameter).norm() / parameter.norm()
        assert difference < 1e-6, name


def test_fragments_are_exchanged_in_turn(text_file: Path) -> None:
    trainers = members(text_file, fragments=3)
    size = len(trainers[0].reduce_buffer)
    seen = np.zeros(size, np.int64)
    for step in range(3):
        before = state_bytes(trainers[0])["parameters"]
        outer_step(trainers, step)
        for start, stop in trainers[0].exchanged(step):
            seen[start:stop] += 1
        changed = np.frombuffer(before, np.float32) != np.frombuffer(state_bytes(trainers[0])["parameters"], np.float32)
        inside = np.zeros(size, np.bool_)
        for start, stop in trainers[0].exchanged(step):
            inside[start:stop] = True
        assert not (changed & ~inside[: changed.size]).any()
        assert changed.any()
    assert (seen[:-3] == 1).all()
    assert (seen[-3:] == 3).all()


def test_an_overlapping_step_sends_the_inner_steps_of_the_one_before(text_file: Path) -> None:
    alone, plain = members(text_file, 1, overlap=True)[0], members(text_file, 1)[0]
    start = np.frombuffer(state_bytes(alone)["parameters"], np.float32).copy()
    outer_step([alone], 0)  # nothing can travel yet
    assert np.array_equal(np.frombuffer(state_bytes(alone)["parameters"], np.float32), start)
    assert alone.begin_step(1, *SHARES[0])
    alone.finish_gradients()
    contribute(plain, 0, *SHARES[0])
    # Half of the way: its own copy was mixed with the shared parameters, which had not moved.
    assert np.allclose(alone.reduce_buffer[:-3], MIXING * plain.reduce_buffer[:-3], atol=1e-6)
    assert alone.reduce_buffer[-3] == plain.reduce_buffer[-3] == SHARES[0][1]


LOCALS = [{}, {"fragments": 2}, {"overlap": True}, {"fragments": 2, "overlap": True}]


@pytest.mark.parametrize("local", LOCALS)
def test_members_learn_and_a_newcomer_joins_with_fresh_moments(text_file: Path, local: dict[str, Any]) -> None:
    trainers = members(text_file, **local)
    losses = [outer_step(trainers, step) for step in range(4)]
    late = members(text_file, 1, **local)[0]
    for source, target in zip(trainers[0].state.blobs(), late.state.blobs(), strict=True):
        target.view[:] = source.view
    late.state.refresh(4)
    losses += [outer_step([trainers[0], late], step) for step in range(4, STEPS)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("local", LOCALS)
def test_a_step_that_was_given_up_is_taken_again(text_file: Path, local: dict[str, Any]) -> None:
    trainers, others = members(text_file, **local), members(text_file, **local)
    for step in range(3):
        outer_step(trainers, step)
        outer_step(others, step)
    for trainer in trainers:  # the ring breaks before any of them has computed a micro-batch, and after
        if trainer.begin_step(3, *SHARES[1]):
            trainer.finish_gradients()
    contribute(trainers[0], 3, *SHARES[1])
    assert outer_step(trainers, 3) < 1.05 * outer_step(others, 3)  # inner steps that were taken already help
    assert validation(trainers[0]) == validation(trainers[1])


@pytest.mark.parametrize("local", LOCALS)
def test_a_gradient_that_is_not_finite_spoils_no_later_step(text_file: Path, local: dict[str, Any]) -> None:
    trainers = members(text_file, **local)
    for step in range(2):
        outer_step(trainers, step)
    trainers[0].begin_step(2, *SHARES[0])
    trainers[0].built.flat.gradients.fill_(float("nan"))
    trainers[0].micro_batch(2, 0)
    trainers[0].finish_gradients()
    assert not np.isfinite(trainers[0].partial_square_sum(0, len(trainers[0].reduce_buffer)))
    for step in range(2, STEPS):
        assert np.isfinite(outer_step(trainers, step))


def test_an_impossible_weight_makes_the_norm_nan(text_file: Path) -> None:
    """A member that told 1e30 would have each update divided by it."""
    (trainer,) = members(text_file, 1)
    contribute(trainer, 0, 0, MICRO_BATCHES)
    buffer = trainer.reduce_buffer
    assert np.isfinite(trainer.partial_square_sum(0, len(buffer)))
    for weight in (1e30, -1.0, float("nan")):
        buffer[-3] = weight
        assert np.isnan(trainer.partial_square_sum(0, len(buffer)))


def validation(trainer: Trainer) -> float:
    return validate_all(trainer)[0]
