"""Sharded models against whole ones."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2ptrain.compute.device import pick_device
from p2ptrain.compute.fsdp import ShardSpec, shard_rows
from p2ptrain.compute.process_group import Array
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.trainer import Trainer
from p2ptrain.core.checkpoints import Draft, join_rows
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, ResourceError, StorageError
from tests.compute.saving import check_kept, make_given, save
from tests.compute.shards import Exchange, in_lockstep, meshes
from tests.compute.tiny_trainer import MICRO_BATCHES, run_step, state_bytes, tiny, tiny_spec, tiny_trainer


class Shards:
    def __init__(self, text_file: Path, count: int, *, accumulate: bool = True, **changes: Any) -> None:
        self.count, self.exchange = count, Exchange(count)
        device = changes.pop("device", None) or pick_device("cpu", 1)
        self._spec = tiny_spec(text_file, **changes)
        self.trainers = [
            Trainer(ModelRecipe(self._spec, device, shard=ShardSpec(mesh, accumulate=accumulate)))
            for mesh in meshes(self.exchange)
        ]

    def contribute(self, step: int, *, most: int = MICRO_BATCHES) -> None:
        passes = -(-MICRO_BATCHES // self.count)

        def work(rank: int) -> None:
            trainer = self.trainers[rank]
            trainer.begin_step(step)
            for number in range(min(passes, most)):
                index = number * self.count + rank
                trainer.micro_batch(step, min(index, MICRO_BATCHES - 1), counts=index < MICRO_BATCHES)
            trainer.finish_gradients()

        in_lockstep(self.count, work)

    def step(self, step: int) -> float:
        self.contribute(step)
        square_sum = sum(it.partial_square_sum(0, len(it.reduce_buffer)) for it in self.trainers)
        loss = sum(float(it.reduce_buffer[-1]) for it in self.trainers)
        for trainer in self.trainers:
            trainer.apply(step, square_sum)
        return loss


@pytest.mark.parametrize(("count", "accumulate"), [(2, True), (3, False)])
def test_shards_learn_what_the_whole_model_does(text_file: Path, count: int, accumulate: bool) -> None:
    whole, shards = tiny_trainer(text_file), Shards(text_file, count, accumulate=accumulate)
    losses = [run_step(whole, step) for step in range(10)]
    assert [shards.step(step) for step in range(10)] == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_rounded_weights_are_what_shards_gather_in_bf16(text_file: Path) -> None:
    gathered, rounded = (Shards(text_file, 2, precision=precision) for precision in ("bf16", "bf16-weights"))
    for step in range(3):
        assert gathered.step(step) == rounded.step(step)


@pytest.mark.parametrize("tie", [True, False])
def test_the_first_weights_are_those_of_the_whole_model_bit_for_bit(text_file: Path, tmp_path: Path, tie: bool) -> None:
    new = tiny(tie_embeddings=tie)
    directory = tmp_path / "model"
    save(tiny_trainer(text_file, model=new), directory)
    for model in (new, tiny(path=directory)):
        flat = tiny_trainer(text_file, model=model).built.flat
        for rank, trainer in enumerate(Shards(text_file, 3, model=model).trainers):
            shard = trainer.built.flat
            for segment in shard.segments:
                rows = shard_rows(len(flat.view(flat.parameters, segment.name)), rank, 3)
                ours = shard.view(shard.parameters, segment.name)
                assert torch.equal(ours[: len(rows)], flat.view(flat.parameters, segment.name)[rows.start : rows.stop])
                assert not ours[len(rows) :].any()


@pytest.mark.parametrize(("accumulate", "precision"), [(True, "fp32"), (False, "fp32"), (True, "bf16")])
def test_an_abandoned_step_of_shards_changes_no_later_step(text_file: Path, accumulate: bool, precision: str) -> None:
    """Between two passes, and inside of one."""
    shards, again = (Shards(text_file, 2, accumulate=accumulate, precision=precision) for _ in range(2))
    expected = shards.step(0)
    again.contribute(0, most=1)
    calls, exchange = 0, again.exchange.all_of

    def lost(rank: int, mine: Array) -> list[Array]:
        nonlocal calls
        calls += 1
        if calls > 16:  # in the second pass
            again.exchange.lose()
        return exchange(rank, mine)

    again.exchange.all_of = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionLost):
        again.contribute(0)
    again.exchange.all_of = exchange  # type: ignore[method-assign]
    again.exchange.renew()
    assert again.step(0) == expected
    for ours, theirs in zip(shards.trainers, again.trainers, strict=True):
        assert state_bytes(ours) == state_bytes(theirs)


def save_joined(shards: Shards, directory: Path, step: int) -> None:
    """As ``roles.worker.checkpoint_assembler`` does."""
    draft = Draft(RealDisk(), directory, step)
    for trainer in shards.trainers:
        save(trainer, directory, step)
    for path in directory.iterdir():
        draft.sums[path.name] = path.stat().st_size, ""
    join_rows(RealDisk(), draft)


@pytest.mark.parametrize("tie", [True, False])
def test_a_checkpoint_is_that_of_a_whole_model_and_resumes_at_any_number_of_shards(
    text_file: Path, tmp_path: Path, tie: bool
) -> None:
    model = tiny(tie_embeddings=tie, hidden_size=40)  # no multiple of the alignment in the flat arrays
    shards, directory, apart = Shards(text_file, 2, model=model), tmp_path / "joined", tmp_path / "apart"
    for step in range(3):
        shards.step(step)
    save_joined(shards, directory, 3)
    save(shards.trainers[1], apart, 3)
    more = [shards.step(step) for step in (3, 4)]

    whole = tiny_trainer(text_file, model=model)
    whole.state.load(directory)
    save(whole, tmp_path / "whole", 3)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (directory / path.name).read_bytes(), path.name
    assert {path.name for path in directory.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    assert [run_step(whole, step) for step in (3, 4)] == pytest.approx(more, abs=1e-5)

    other = Shards(text_file, 3, model=model)
    for trainer in other.trainers:
        trainer.state.load(directory)
    assert [other.step(step) for step in (3, 4)] == pytest.approx(more, abs=1e-5)

    again = Shards(text_file, 2, model=model)
    again.trainers[0].state.load(directory)
    again.trainers[1].state.load(apart)
    assert [again.step(step) for step in (3, 4)] == more


def test_shards_keep_settings_and_dtypes_of_the_base_model(text_file: Path, tmp_path: Path) -> None:
    given, saved = tmp_path / "given", tmp_path / "saved"
    make_given(given, torch.float16)
    shards, again = (Shards(text_file, 2, model=tiny(path=given)) for _ in range(2))
    shards.step(0)
    save_joined(shards, saved, 1)
    check_kept(given, saved)
    for ours, theirs in zip(again.trainers, shards.trainers, strict=True):
        ours.state.load(saved)
        assert state_bytes(ours) == state_bytes(theirs)


def test_a_collection_frees_the_memory_of_a_model(text_file: Path) -> None:
    """FSDP2's modules refer to each other, so the last reference to a trainer does not."""
    shards = Shards(text_file, 2)
    shards.step(0)
    watched = [weakref.ref(trainer.built.flat.parameters) for trainer in shards.trainers]
    del shards
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def test_a_shard_that_does_not_fit_is_refused_with_the_numbers(text_file: Path) -> None:
    mesh = meshes(Exchange(2))[0]
    with pytest.raises(ResourceError, match=r"training 1/2 of 0.0. M parameters .* but this worker offers 64.0 KiB"):
        Trainer(ModelRecipe(tiny_spec(text_file), pick_device("cpu", 1), shard=ShardSpec(mesh, memory_bytes=64 << 10)))


def test_a_checkpoint_that_does_not_fit_is_refused(text_file: Path, tmp_path: Path) -> None:
    """It may come from another worker, or from a job with another model."""
    shards, other, directory = Shards(text_file, 2), Shards(text_file, 2, model=tiny(layers=1)), tmp_path / "joined"
    save_joined(shards, directory, 0)
    with pytest.raises(StorageError, match="of another model"):
        other.trainers[1].state.load(directory)
    weights = load_file(directory / "model.safetensors")
    name, tensor = next((name, it) for name, it in weights.items() if it.ndim == 2)
    before = state_bytes(shards.trainers[1])
    for wrong in (tensor[:3].contiguous(), tensor[:1, :1].contiguous(), tensor[0, 0].clone()):
        save_file(weights | {name: wrong}, directory / "model.safetensors")
        with pytest.raises(StorageError, match="cannot read the checkpoint"):
            shards.trainers[1].state.load(directory)
    assert state_bytes(shards.trainers[1]) == before
