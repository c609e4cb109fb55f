"""The values of ``device.precision`` in which a model computes: TF32 products, and weights that are rounded to bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn

from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import build_model
from p2ptrain.compute.passes import PRECISIONS
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ResourceError
from tests.compute.rounding import rounded_call
from tests.compute.saving import save
from tests.compute.tiny_trainer import APART, MICRO_BATCHES, OPTIMIZER, TINY, run_step, tiny

MakeTrainer = Callable[..., Trainer]
ROUNDED = "bf16-weights"


def test_tf32_is_for_passes_alone(make_trainer: MakeTrainer) -> None:
    matmul = torch.backends.cuda.matmul
    trainer, plain, before = make_trainer(precision="tf32"), make_trainer(), matmul.fp32_precision
    seen: list[str] = []
    model = trainer.built.flat.model
    handle = model.register_forward_pre_hook(lambda *_: seen.append(matmul.fp32_precision))
    next(model.parameters()).register_hook(lambda _: seen.append(matmul.fp32_precision))
    assert run_step(trainer, 0) == run_step(plain, 0), "a CPU computes as with fp32"
    assert seen == 2 * MICRO_BATCHES * ["tf32"]
    assert matmul.fp32_precision == before != "tf32"
    trainer.validate(0)
    assert seen[-1] == "tf32"
    handle.remove()

    def fail(*_: object) -> None:
        raise ResourceError("a failure in a pass")

    model.register_forward_pre_hook(fail)
    with pytest.raises(ResourceError):
        trainer.micro_batch(1, 0)
    assert matmul.fp32_precision == before


def rounded(flat: FlatModel, parameters: Tensor) -> bool:
    """Whether the model's weights are ``parameters``, rounded."""
    return all(
        torch.equal(flat.model.get_parameter(segment.name), flat.view(parameters, segment.name).bfloat16())
        for segment in flat.segments
    )


def test_gradients_of_rounded_weights_are_summed_in_fp32() -> None:
    """In bf16 a sum of 256 stays as it is if 1 is added."""
    model = nn.Module()
    model.matrix = nn.Parameter(torch.tensor([[1.001, 2.0]]))
    flat = FlatModel(model, torch.device("cpu"), torch.bfloat16)
    assert flat.parameters[:2].tolist() == pytest.approx([1.001, 2.0])
    assert rounded(flat, flat.parameters)
    assert model.matrix.tolist() == [[1.0, 2.0]]
    for factor in (256, 1, 1):
        (model.matrix * factor).sum().backward()
    assert flat.gradients[:2].tolist() == [258, 258]
    others = torch.full_like(flat.parameters, 3.0)
    flat.compute_with(others)
    assert model.matrix.tolist() == [[3.0, 3.0]]
    others.fill_(4.0)
    flat.compute_with(others)
    assert model.matrix.tolist() == [[4.0, 4.0]]


def test_steps_are_those_of_a_loop_that_rounds_the_weights_anew(make_trainer: MakeTrainer) -> None:
    """Losses of a plain loop with weights in fp32, for each pass of which they are rounded again."""
    trainer, mixed = make_trainer(precision=ROUNDED), make_trainer(precision="bf16")
    plain = build_model(TINY, 256, seed=3)
    parts = [[p for p in plain.parameters() if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def loss_of(batch: Any) -> Tensor:
        logits = rounded_call(plain, batch.inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")

    for step in range(8):
        adamw.zero_grad()
        losses = [loss_of(trainer.batches.training_batch(step, index)) for index in range(MICRO_BATCHES)]
        targets = trainer.batches.targets(step, 0, MICRO_BATCHES)
        for loss in losses:
            (loss / targets).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), OPTIMIZER.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = OPTIMIZER.lr_at(step, 30)
        adamw.step()
        assert run_step(trainer, step) == pytest.approx(
            sum(map(float, (loss.detach() for loss in losses))) / targets, rel=2e-3
        )
        with torch.no_grad():
            held_out = float(loss_of(trainer.batches.validation_batch(0)))
        assert trainer.validate(0)[0] == pytest.approx(held_out, rel=2e-3)
        run_step(mixed, step)
    assert trainer.built.flat.parameters.dtype == torch.float32
    assert run_step(trainer, 8) == pytest.approx(run_step(mixed, 8), rel=0.02)


@pytest.mark.parametrize("memory", [{}, {"device": APART}], ids=["host", "apart"])
@pytest.mark.parametrize(
    "local", [None, LocalSpec(), LocalSpec(fragments=2, overlap=True)], ids=["sync", "local", "fragments"]
)
def test_each_pass_computes_with_the_present_weights(
    make_trainer: MakeTrainer, tmp_path: Path, memory: dict[str, Any], local: LocalSpec | None
) -> None:
    settings = {"precision": ROUNDED, "local": local, **memory}
    trainer, other = make_trainer(**settings), make_trainer(**settings, seed=9)
    flat, passes = other.built.flat, 0
    inner: Any = None if local is None else other._update  # its micro-batches change a copy of the parameters

    def check(*_: object) -> None:
        nonlocal passes
        passes += 1
        assert rounded(flat, inner._own if inner is not None and torch.is_grad_enabled() else flat.parameters)

    flat.model.register_forward_pre_hook(check)

    def take(step: int) -> None:
        other.validate(0)
        other.begin_step(step)
        other.micro_batch(step, 0)  # given up
        run_step(other, step)
        other.validate(0)

    run_step(trainer, 0)
    save(trainer, tmp_path, 1)
    take(0)
    for source, target in zip(trainer.state.blobs(), other.state.blobs(), strict=True):
        target.view[:] = source.view
    other.state.refresh(1)
    take(1)
    other.state.load(tmp_path)
    take(1)
    other.state.load_initial()
    take(0)
    assert passes == 4 * (3 + MICRO_BATCHES)


def test_kernels_for_16_bits_are_for_all_arithmetic_in_bf16(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, bool] = {}

    def takes_bounds(device: torch.device, window: int, *, bf16: bool) -> bool:
        asked[precision] = bf16
        return False

    monkeypatch.setattr("p2ptrain.compute.passes.takes_bounds", takes_bounds)
    for precision in PRECISIONS:
        make_trainer(precision=precision)
    assert asked == {"fp32": False, "tf32": False, "bf16": True, "bf16-weights": True}


def test_a_recurrent_model_computes_with_rounded_weights(make_trainer: MakeTrainer) -> None:
    lstm, plain = (make_trainer(model=tiny(architecture="lstm"), precision=kind) for kind in (ROUNDED, "fp32"))
    for step in range(3):
        assert run_step(lstm, step) == pytest.approx(run_step(plain, step), rel=0.01)
