"""Exact mode of the real engine: a micro-batch's bits depend on nothing but itself."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from p2ptrain.compute.device import ComputeDevice, constant_arithmetic, pick_device
from p2ptrain.compute.gradients import bucket_bounds
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.reduce_buffer import HostCopier
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, JobFailed
from tests.compute.contribution import contribution, in_another_process
from tests.compute.test_trainer import Follower
from tests.compute.tiny_trainer import APART, TINY, run_step, state_bytes, tiny, validate_all

MakeTrainer = Callable[..., Trainer]


def sha256(trainer: Trainer) -> str:
    return hashlib.sha256(b"".join(state_bytes(trainer).values())).hexdigest()


# ------------------------------------------------------------------------------------------------------ a micro-batch


@pytest.mark.parametrize(
    ("model", "precision"), [(TINY, "bf16"), (TINY, "bf16-weights"), (tiny(architecture="gpt2", kv_heads=4), "fp32")]
)
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
    validate_all(trainer)
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


def test_the_bits_of_a_micro_batch_do_not_depend_on_this_machines_cores(make_trainer: MakeTrainer) -> None:
    """Kernels are seen to run with the constant number, for tiny ones may not care."""
    trainer = make_trainer(exact=True, device=pick_device("cpu"))
    seen: list[int] = []
    trainer.built.flat.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    sums = set()
    for others in (1, 2):
        torch.set_num_threads(3)
        trainer.share_cores(others)
        trainer.begin_step(5)
        trainer.micro_batch(5, 1)
        trainer.validate(0)
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
    """Stands for a CUDA stream: a copy, and its norm, lands when the next one is started, or when somebody waits."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, norms: torch.Tensor, numel: int) -> None:
        self.source, self.target, self.norms, self.numel = source, target, norms, numel
        self.copies: list[SideCopy] = []

    def copy(self, start: int, stop: int, piece: int) -> SideCopy:
        if self.copies:
            self.copies[-1].synchronize()
        self.copies.append(SideCopy(self, start, stop, piece))
        return self.copies[-1]


class SideCopy:
    def __init__(self, stream: SideStream, start: int, stop: int, piece: int) -> None:
        self._stream, self._part, self._piece = stream, slice(start, stop), piece
        self._landed = False

    def query(self) -> bool:
        return self._landed

    def synchronize(self) -> None:
        if not self._landed:
            stream, part = self._stream, self._part
            stream.target[part] = stream.source[part]
            stream.norms[self._piece] = stream.source[part][: max(0, stream.numel - part.start)].double().norm()
        self._landed = True


def side_copier(gradients: torch.Tensor, host: torch.Tensor, numel: int) -> HostCopier:
    stops = [stop for _, stop in bucket_bounds(len(gradients), gradients.element_size(), 4096)]
    norms = torch.zeros(len(stops), dtype=torch.float64)
    return HostCopier(SideStream(gradients, host, norms, numel).copy, stops, norms)


def test_a_device_with_its_own_memory_gives_the_same_exact_sums(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, apart = make_trainer(exact=True), make_trainer(exact=True, device=APART)
    monkeypatch.setattr("p2ptrain.compute.reduce_buffer.host_copier", side_copier)
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


def test_a_device_measures_what_it_contributes_and_keeps_it_if_it_is_alone(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = make_trainer()
    monkeypatch.setattr("p2ptrain.compute.reduce_buffer.host_copier", side_copier)
    alone, among = make_trainer(device=FAR), make_trainer(device=FAR)
    for step in range(2):
        run_step(near, step)
        for far in (alone, among):
            follower = Follower(far)
            follower.run(step, [0, 1, 2, 3])
            stops = [numel for numel, _ in follower.fronts]
            ranges = zip([0, *stops], stops, strict=False)
            own = sum(far.contributed_square_sum(start, stop) for start, stop in ranges)
            assert own == pytest.approx(far.partial_square_sum(0, len(far.reduce_buffer)), rel=1e-7)
            sums = far.reduce_buffer.copy()
            far.reduce_buffer[:-1] *= 0.5  # as the ring does, but for the loss
            if far is among:
                far.reduce_buffer[:] = sums
            far.apply(step, own, is_own=far is alone)
    assert state_bytes(alone) == state_bytes(among)
    for name, data in state_bytes(near).items():
        expected = np.frombuffer(data, np.float32)
        np.testing.assert_allclose(np.frombuffer(state_bytes(alone)[name], np.float32), expected, rtol=1e-5, atol=1e-7)


def test_a_device_shows_a_gradient_that_is_not_finite(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.compute.reduce_buffer.host_copier", side_copier)
    far = make_trainer(device=FAR)
    weight = far.built.flat.model.get_parameter(far.built.flat.segments[2].name)
    weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))  # type: ignore[no-untyped-call]
    Follower(far).run(0, [0])
    assert math.isnan(far.contributed_square_sum(0, len(far.reduce_buffer)))


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
