"""Exact mode of the real engine: a micro-batch's bits depend on nothing but itself, and a run's on nothing but the job.

The reference is a loop of this file's own: a plain model's gradients, summed as Python's integers.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from p2ptrain.compute.data import DataSpec, load_corpus
from p2ptrain.compute.device import ComputeDevice, constant_arithmetic, flushed_denormals, pick_device
from p2ptrain.compute.gradients import FRACTION_BITS, UNIT, HostCopier, bucket_bounds
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, JobFailed
from tests.compute.contribution import contribution, in_another_process
from tests.compute.saving import save
from tests.compute.test_trainer import APART, Follower
from tests.compute.tiny_trainer import MICRO_BATCHES, OPTIMIZER, TINY, run_step, state_bytes, tiny

MakeTrainer = Callable[..., Trainer]


def sha256(trainer: Trainer) -> str:
    return hashlib.sha256(b"".join(state_bytes(trainer).values())).hexdigest()


# ------------------------------------------------------------------------------------------------------ a micro-batch


@pytest.mark.parametrize(("model", "precision"), [(TINY, "bf16"), (tiny(architecture="gpt2", kv_heads=4), "fp32")])
def test_the_bits_of_a_micro_batch_do_not_depend_on_those_before(
    make_trainer: MakeTrainer, model: ModelSpec, precision: str
) -> None:
    trainer = make_trainer(model=model, precision=precision, exact=True)
    seen = set()
    for others in ([], [0], [1, 3, 0], [2, 2]):
        trainer.begin_step(5)
        for index in others:
            trainer.micro_batch(5, index)
        seen.add(contribution(trainer, 5, 2))
    trainer.begin_step(5)
    trainer.micro_batch(5, 0)
    trainer.validate(0, 3)
    seen.add(contribution(trainer, 5, 2))
    trainer.begin_step(5)
    trainer.micro_batch(5, 2, lambda numel: None)  # as the last of a share: brought over piece by piece
    seen.add(trainer.reduce_buffer.tobytes())
    assert len(seen) == 1
    assert contribution(trainer, 5, 3) not in seen


def test_the_bits_of_a_micro_batch_do_not_depend_on_the_process(make_trainer: MakeTrainer, text_file: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=in_another_process, args=(text_file, [3, 1], answer))
    process.start()
    there = answer.get(timeout=120)
    process.join(60)
    trainer = make_trainer(exact=True)
    trainer.begin_step(5)
    assert contribution(trainer, 5, 2) == there


def test_the_bits_of_a_micro_batch_do_not_depend_on_this_machines_cores(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are seen to run with the constant number, for tiny ones may not care."""
    trainer = make_trainer(exact=True, device=pick_device("cpu"))
    seen: list[int] = []
    compute = trainer.pipeline.compute

    def watched(*args: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return compute(*args)

    monkeypatch.setattr(trainer.pipeline, "compute", watched)
    sums = set()
    for others in (1, 2):
        torch.set_num_threads(3)
        trainer.share_cores(others)
        trainer.begin_step(5)
        trainer.micro_batch(5, 1)
        trainer.validate(0, 1)
        sums.add(trainer.reduce_buffer.tobytes())
    assert seen == [1, 1, 1, 1]
    assert len(sums) == 1


def test_an_operation_without_a_deterministic_algorithm_is_refused() -> None:
    refused = (
        "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
    )
    with pytest.raises(ConfigError, match="put_") as caught, constant_arithmetic(1):
        raise RuntimeError(refused)
    assert "job.exact" in caught.value.remedy
    with pytest.raises(RuntimeError, match="another"), constant_arithmetic(1):
        raise RuntimeError("another")


# --------------------------------------------------------------------------------------------------------------- a run


class Plain:
    """The same job as a loop: transformers' model, one AdamW for each parameter, Python's integers."""

    def __init__(self, text: Path, model: ModelSpec) -> None:
        self.model = build_model(model, 256, seed=3)
        self._corpus = load_corpus(DataSpec(path=str(text), sequence_tokens=16), Tokenizer.of_bytes())
        self._sampler = WindowSampler(len(self._corpus.training), 3, MICRO_BATCHES, 2)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [item for item in named.values() if item.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [item for item in named.values() if item.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=1.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)

    def sums(self, step: int, order: list[int]) -> tuple[dict[str, list[int]], int]:
        """The integers of every parameter's gradient, and of the mean loss."""
        totals: dict[str, list[int]] = {}
        losses = 0
        for index in order:
            windows = self._corpus.training[self._sampler.sample(step, index)]
            tokens = torch.from_numpy(self._corpus.window_tokens(windows))
            for parameter in self.model.parameters():
                parameter.grad = None
            with flushed_denormals():
                logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
            losses += _fixed((loss.detach() / MICRO_BATCHES).item())
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                integers = [_fixed(value) for value in parameter.grad.flatten().tolist()]
                totals[name] = [a + b for a, b in zip(totals.get(name, [0] * len(integers)), integers, strict=True)]
        return totals, losses

    def apply(self, step: int, totals: dict[str, list[int]]) -> float:
        """One step; the squared norm."""
        squares = sum(integer * integer for integers in totals.values() for integer in integers)
        norm = math.sqrt(Fraction(squares, 4**FRACTION_BITS))
        scale = min(1.0, OPTIMIZER.clip_norm / (norm + 1e-6))
        for name, parameter in self.model.named_parameters():
            gradient = torch.tensor([float(integer) * UNIT for integer in totals[name]], dtype=torch.float64)
            parameter.grad = (gradient * scale).float().view(parameter.shape)
        for group in self.adamw.param_groups:
            group["lr"] = OPTIMIZER.lr_at(step, 30)
        self.adamw.step()
        return norm


def _fixed(value: float) -> int:
    integer: int = round(Fraction(value) * 2**FRACTION_BITS)
    return integer


def test_steps_are_those_of_a_loop_over_pythons_integers(make_trainer: MakeTrainer, text_file: Path) -> None:
    """The sums bit for bit, while both models hold the same bits; then AdamW within a few bits of its own loop."""
    model = tiny(layers=1)
    trainer, plain = make_trainer(model=model, exact=True), Plain(text_file, model)
    for step in range(2):
        totals, losses = plain.sums(step, [3, 1, 0, 2])
        trainer.begin_step(step)
        for index in range(MICRO_BATCHES):
            trainer.micro_batch(step, index)
        trainer.finish_gradients()
        for segment in trainer.built.flat.segments:
            ours = trainer.reduce_buffer[segment.offset : segment.offset + segment.numel]
            assert ours.tolist() == totals[segment.name], segment.name
        assert trainer.reduce_buffer[-1] == losses
        applied = trainer.apply(step, trainer.partial_square_sum(0, len(trainer.reduce_buffer)))
        assert applied.grad_norm == pytest.approx(plain.apply(step, totals), rel=1e-12)
        assert applied.loss == losses * UNIT
        for name, parameter in trainer.built.flat.model.named_parameters():
            theirs = plain.model.get_parameter(name)
            torch.testing.assert_close(theirs, parameter, rtol=2e-6, atol=1e-7)
            theirs.data.copy_(parameter.data)  # the next step begins with equal bits


def test_copied_and_loaded_states_continue_with_the_same_bits(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    whole, donor, newcomer, resumed = (make_trainer(exact=True, seed=3) for _ in range(4))
    run_step(newcomer, 0)
    for step in range(3):
        run_step(whole, step)
        run_step(donor, step)
    for source, target in zip(donor.state.blobs(), newcomer.state.blobs(), strict=True):
        target.view[:] = source.view
    newcomer.state.refresh(3)
    save(donor, tmp_path)
    resumed.state.load(tmp_path)
    for step in range(3, 6):
        buffers = []
        for trainer in (whole, newcomer, resumed):
            run_step(trainer, step)
            buffers.append(trainer.reduce_buffer.tobytes())
        assert len(set(buffers)) == 1
    assert sha256(whole) == sha256(newcomer) == sha256(resumed)


def test_a_step_can_be_applied_again_from_the_kept_sum(make_trainer: MakeTrainer) -> None:
    trainer, other = make_trainer(exact=True), make_trainer(exact=True)
    run_step(trainer, 0)
    kept = trainer.reduce_buffer.copy()
    other.begin_step(0)
    other.reduce_buffer[:] = kept
    other.apply(0, trainer.partial_square_sum(0, len(kept)))
    assert np.array_equal(trainer.reduce_buffer, kept)
    assert sha256(other) == sha256(trainer)


class SideStream:
    """Stands for a CUDA stream: a copy lands when the next one is started, or when somebody waits for it."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source, self.target = source, target
        self.copies: list[SideCopy] = []

    def copy(self, start: int, stop: int) -> SideCopy:
        if self.copies:
            self.copies[-1].synchronize()
        self.copies.append(SideCopy(self, start, stop))
        return self.copies[-1]


class SideCopy:
    def __init__(self, stream: SideStream, start: int, stop: int) -> None:
        self._stream, self._part = stream, slice(start, stop)
        self._landed = False

    def query(self) -> bool:
        return self._landed

    def synchronize(self) -> None:
        if not self._landed:
            self._stream.target[self._part] = self._stream.source[self._part]
        self._landed = True


def test_a_device_with_its_own_memory_gives_the_same_exact_sums(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, apart = make_trainer(exact=True), make_trainer(exact=True, device=APART)
    streams = []

    def host_copier(gradients: torch.Tensor, host: torch.Tensor) -> HostCopier:
        streams.append(SideStream(gradients, host))
        return HostCopier(streams[-1].copy, [stop for _, stop in bucket_bounds(len(gradients), 8, 4096)])

    monkeypatch.setattr("p2ptrain.compute.reduce_buffer.host_copier", host_copier)
    far = make_trainer(exact=True, device=FAR)
    follower = Follower(far)
    for step in range(3):
        follower.fronts.clear()
        follower.run(step, [1, 0, 3, 2])
        final = far.reduce_buffer.tobytes()
        assert all(final.startswith(front) for _, front in follower.fronts)
        far.apply(step, far.partial_square_sum(0, len(far.reduce_buffer)))
        run_step(near, step)
        run_step(apart, step)
        assert near.reduce_buffer.tobytes() == apart.reduce_buffer.tobytes() == final
    assert state_bytes(near) == state_bytes(apart) == state_bytes(far)


class Far(ComputeDevice):
    """A device with its own memory and with fp64, as far as the trainer can tell: its tensors are on the CPU."""

    @property
    def kind(self) -> str:
        return "far"


FAR = Far(torch.device("cpu"), "a device far away")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits_in_any_order(make_trainer: MakeTrainer) -> None:
    states = set()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        trainer = make_trainer(exact=True, device=pick_device("cuda"))
        for step in range(4):
            trainer.begin_step(step)
            for index in order:
                trainer.micro_batch(step, index, (lambda numel: None) if index == order[-1] else None)
            trainer.finish_gradients()
            trainer.apply(step, trainer.partial_square_sum(0, len(trainer.reduce_buffer)))
        states.add(sha256(trainer))
    assert len(states) == 1


# -------------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_a_contribution_out_of_range_is_never_applied(make_trainer: MakeTrainer, value: float) -> None:
    trainer = make_trainer(exact=True)
    run_step(trainer, 0)
    before, size = state_bytes(trainer), len(trainer.reduce_buffer)
    weight = trainer.built.flat.model.get_parameter(trainer.built.flat.segments[2].name)
    handle = weight.register_hook(lambda gradient: torch.full_like(gradient, value))  # type: ignore[no-untyped-call]
    trainer.begin_step(1)
    trainer.micro_batch(1, 0)
    handle.remove()
    trainer.micro_batch(1, 1)
    assert math.isnan(trainer.partial_square_sum(0, size))
    assert math.isnan(trainer.partial_square_sum(size - 1, size))
    with pytest.raises(JobFailed, match="step 2 is not finite"):
        trainer.apply(1, trainer.partial_square_sum(0, size))
    assert state_bytes(trainer) == before
    run_step(trainer, 1)
    assert math.isfinite(trainer.partial_square_sum(0, size))
