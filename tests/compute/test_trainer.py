"""The engine: its gradients are those of autograd, its steps those of a plain loop, its checkpoints bit-equal."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from p2ptrain.compute.data import DataSpec, load_corpus
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.errors import ConfigError, JobFailed, ResourceError
from p2ptrain.core.training import SettingsPeriod
from tests.compute.saving import save
from tests.compute.tiny_trainer import APART, MICRO_BATCHES, OPTIMIZER, TINY, run_step, state_bytes, tiny, validate_all

MakeTrainer = Callable[..., Trainer]


class Follower:
    """Looks at the reduce buffer's front whenever it is said to be final, from within the backward pass."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.fronts: list[tuple[int, bytes]] = []
        self.backward_ended_at = 0

    def __call__(self, numel: int) -> None:
        self.fronts.append((numel, self.trainer.reduce_buffer[:numel].tobytes()))

    def run(self, step: int, share: list[int]) -> None:
        self.trainer.begin_step(step)
        for index in share:
            self.trainer.micro_batch(step, index, self if index == share[-1] else None)
        self.backward_ended_at = len(self.fronts)
        self.trainer.finish_gradients(self)


@pytest.mark.parametrize(
    ("model", "share", "exact"),
    [
        (TINY, [0], False),
        (tiny(tie_embeddings=False), [2, 0, 3], False),
        (tiny(architecture="gpt2", kv_heads=4), [2, 0, 3], False),
        (TINY, [0], True),
        (TINY, [2, 0, 3], True),
    ],
)
def test_final_elements_of_the_reduce_buffer_do_not_change(
    make_trainer: MakeTrainer, model: ModelSpec, share: list[int], exact: bool
) -> None:
    trainer, plain = (make_trainer(model=model, exact=exact) for _ in range(2))
    follower = Follower(trainer)
    for step in (0, 1):
        follower.fronts.clear()
        follower.run(step, share)
        final = trainer.reduce_buffer.tobytes()
        numels = [numel for numel, _ in follower.fronts]
        assert numels == sorted(numels)
        assert len(set(numels)) > len(trainer.built.flat.segments) / 3, "the layout is far from the order of backward"
        assert all(final.startswith(front) for _, front in follower.fronts)
        early = max(numel for numel, _ in follower.fronts[:-1] if numel < trainer.codec_numel)
        assert early > trainer.codec_numel / 2, "the embedding is what comes last"
        assert max(numels) <= trainer.built.flat.numel
        plain.begin_step(step)
        for index in share:
            plain.micro_batch(step, index)
        plain.finish_gradients()
        assert final == plain.reduce_buffer.tobytes()


def test_a_trainer_is_freed_with_its_last_reference(make_trainer: MakeTrainer) -> None:
    """The hooks must not make a ring of references: the next job needs the memory at once."""
    trainer = make_trainer()
    run_step(trainer, 0)
    watched = weakref.ref(trainer)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert watched() is None
    finally:
        gc.enable()


def _batch_tokens(text_file: Path, step: int, indices: list[int]) -> torch.Tensor:
    """The windows of micro-batches, cut by this test itself from the text."""
    corpus = load_corpus(DataSpec(path=str(text_file), sequence_tokens=16), Tokenizer.of_bytes())
    sampler = WindowSampler(len(corpus.training), 3)
    windows = np.concatenate([corpus.training[sampler.numbered(2 * (4 * step + index), 2)] for index in indices])
    text = text_file.read_bytes() + b"\n"
    return torch.tensor([list(text[window * 16 : window * 16 + 17]) for window in windows])


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


@pytest.mark.parametrize("change_at", [20, 12])
def test_twenty_steps_match_a_plain_loop(make_trainer: MakeTrainer, text_file: Path, change_at: int) -> None:
    """Losses within 1e-4 relative of transformers + AdamW + LambdaLR + clip_grad_norm_ (seen: below 2e-6), also if
    settings change in the middle."""
    trainer = make_trainer()
    changed = OPTIMIZER.model_copy(update={"lr": 4e-3, "warmup_steps": 0, "weight_decay": 0.3, "clip_norm": 0.2})
    periods = [SettingsPeriod(0, OPTIMIZER.model_dump(), 30), SettingsPeriod(change_at, changed.model_dump(), 24)]
    trainer.use_settings(periods)
    losses = [run_step(trainer, step) for step in range(20)]

    plain = build_model(TINY, 256, seed=3)
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in plain.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: (done + 1) / 5 if done < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * (done - 5) / 25)) / 2,
    )
    expected, clipped, clip_norm = [], 0, 0.5
    for step in range(20):
        if step >= change_at:
            optimizer.param_groups[0]["weight_decay"], clip_norm = 0.3, 0.2
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 24)) / 2)
        optimizer.zero_grad()
        loss = _loss(plain, _batch_tokens(text_file, step, [0, 1, 2, 3]))
        loss.backward()  # type: ignore[no-untyped-call]
        clipped += bool(torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm) > clip_norm)
        optimizer.step()
        schedule.step()
        expected.append(loss.item())
    worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True))
    print(f"largest relative difference of a loss: {worst:.1e}")
    assert worst < 1e-4
    assert clipped > 3, "the clipping was exercised"
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(("slot", "value"), [(0, math.nan), (0, math.inf), (-1, math.nan), (-1, -math.inf)])
def test_a_sum_that_is_not_finite_fails_the_job(make_trainer: MakeTrainer, slot: int, value: float) -> None:
    trainer = make_trainer()
    run_step(trainer, 0)
    before = state_bytes(trainer)
    trainer.reduce_buffer[slot] = value
    with pytest.raises(JobFailed, match="step 2 is not finite") as caught:
        trainer.apply(1, trainer.partial_square_sum(0, len(trainer.reduce_buffer)))
    assert "optimizer.lr" in caught.value.remedy
    assert state_bytes(trainer) == before


@pytest.mark.parametrize("precision", ["fp32", "bf16-weights"])
def test_a_device_with_its_own_memory_gives_the_same_bits(
    make_trainer: MakeTrainer, tmp_path: Path, precision: str
) -> None:
    near, apart = (make_trainer(precision=precision, **memory) for memory in ({}, {"device": APART}))
    healed = make_trainer(precision=precision, device=APART)
    assert apart.reduce_buffer.ctypes.data != apart.built.flat.gradients.data_ptr()
    for step in range(4):
        assert run_step(near, step) == run_step(apart, step)
        assert np.array_equal(near.reduce_buffer, apart.reduce_buffer)
    assert state_bytes(near) == state_bytes(apart)
    blobs = healed.state.blobs()
    for source, target in zip(apart.state.blobs(), blobs, strict=True):
        target.view[:] = source.view
    assert state_bytes(healed) != state_bytes(apart), "not before it is told"
    blobs = healed.state.blobs()
    for source, target in zip(apart.state.blobs(), blobs, strict=True):
        target.view[:] = source.view
    healed.state.refresh(4)
    assert state_bytes(healed) == state_bytes(apart)
    save(apart, tmp_path)
    run_step(healed, 4)
    healed.state.blobs()
    healed.state.load(tmp_path)
    healed.state.refresh(4)  # said once more: an earlier copy must not come back
    assert state_bytes(healed) == state_bytes(near)
    assert run_step(healed, 4) == run_step(near, 4)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}


@pytest.mark.parametrize(
    "model",
    [
        tiny(tie_embeddings=True),
        tiny(tie_embeddings=False),
        tiny(architecture="gpt2", kv_heads=TINY.heads),
        tiny(architecture="qwen3_moe", extra=MOE),  # transformers opens joined experts, too
    ],
    ids=["tied", "untied", "gpt2", "mixture"],
)
def test_the_files_are_those_of_save_pretrained(make_trainer: MakeTrainer, tmp_path: Path, model: ModelSpec) -> None:
    trainer = make_trainer(model=model)
    run_step(trainer, 0)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save(trainer, ours)
    network: Any = trainer.built.flat.model
    network.config.use_cache = True  # it is off in training
    network.save_pretrained(theirs)
    Tokenizer.of_bytes().save(theirs)
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} | {
        "optimizer.safetensors",
        "training.json",
    }
    for path in theirs.iterdir():
        if path.suffix == ".safetensors" and model.architecture != "qwen3_moe":
            written, expected = load_file(ours / path.name), load_file(path)
            assert written.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(written[name], tensor), name
        elif path.suffix != ".safetensors":
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    with safe_open(ours / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    opened: Any = AutoModelForCausalLM.from_pretrained(ours)
    for name, parameter in trainer.built.flat.model.named_parameters():
        assert torch.equal(opened.get_parameter(name), parameter), name
    other = make_trainer(model=model, seed=99)
    other.state.load(ours)
    assert state_bytes(other) == state_bytes(trainer)


def test_job_begins_with_the_moments_of_a_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Its first step is the one that the earlier job would have taken, with the same text and rate."""
    constant = OPTIMIZER.model_copy(update={"warmup_steps": 0, "schedule": "constant"})
    earlier = make_trainer(optimizer=constant)
    for step in range(4):
        run_step(earlier, step)
    save(earlier, tmp_path, 4)
    begun = make_trainer(optimizer=constant, model=ModelSpec(path=tmp_path), keep_optimizer=True)
    run_step(begun, 0)
    begun.state.load_initial()
    assert state_bytes(begun) == state_bytes(earlier)
    run_step(begun, 0)
    earlier.begin_step(0)
    for index in range(MICRO_BATCHES):
        earlier.micro_batch(0, index)
    earlier.finish_gradients()
    earlier.apply(4, earlier.partial_square_sum(0, len(earlier.reduce_buffer)))
    assert state_bytes(begun) == state_bytes(earlier)
    save(begun, tmp_path, 1)
    third = make_trainer(optimizer=constant, model=ModelSpec(path=tmp_path), keep_optimizer=True)
    for trainer, step in ((third, 0), (begun, 1)):
        trainer.begin_step(0)
        for index in range(MICRO_BATCHES):
            trainer.micro_batch(0, index)
        trainer.finish_gradients()
        trainer.apply(step, trainer.partial_square_sum(0, len(trainer.reduce_buffer)))
    assert state_bytes(third) == state_bytes(begun)


def test_a_micro_batch_too_large_for_the_device_is_a_resource_error(make_trainer: MakeTrainer) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines")

    trainer = make_trainer()
    trainer.built.flat.model.register_forward_pre_hook(out_of_memory)
    for compute in (lambda: trainer.micro_batch(0, 0), lambda: trainer.validate(0)):
        with pytest.raises(ResourceError, match="Tried to allocate 2 GiB") as caught:
            compute()
        assert "batch.micro_batch_sequences" in caught.value.remedy


def test_validation_adds_up_over_shares(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    assert trainer.data.validation_batches == 3
    whole, targets = validate_all(trainer)
    assert targets == 3 * 32
    parts = [trainer.validate(index) for index in range(3)]
    assert sum(loss for loss, _ in parts) == whole
    assert whole / targets == pytest.approx(math.log(256), abs=1)
    assert not trainer.reduce_buffer.any()


def test_sequences_longer_than_the_context_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigError, match=r"data\.sequence_tokens = 16 is more than model\.context = 8"):
        make_trainer(model=tiny(context=8))


def test_only_tokens_of_the_text_must_be_in_the_embedding(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """Such as one for padding, which ``tokenizer_config.json`` alone names."""
    build_model(TINY, 256, seed=1).save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    text = tmp_path / "a.txt"
    text.write_text("one and two " * 60)
    trainer = make_trainer(model=ModelSpec(path=tmp_path), data=DataSpec(path=str(text), sequence_tokens=16))
    assert math.isfinite(run_step(trainer, 0))
    text.write_text("one and two <pad>" * 60)
    with pytest.raises(ConfigError, match="has the token '<pad>', id 256, but the model has only the ids 0 to 255"):
        make_trainer(model=ModelSpec(path=tmp_path), data=DataSpec(path=str(text), sequence_tokens=16))
