"""What makes the host wait for the device in a step: none of it may be on the way of a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.device import ComputeDevice
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.passes import MicroBatchReader
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from tests.compute.tiny_trainer import APART, MICRO_BATCHES, take_step, tiny_spec, tiny_trainer

from .pipelines import Pipeline
from .saving import save

ADAM = OptimizerSpec(lr=1e-3, label_smoothing=0.1, z_loss=1e-4)
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select")


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operations in the block that need a value of a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        by_marks = name.startswith("aten::index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else [])
        )
        if name in WAITING or by_marks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def waits_of(compute: Callable[[], object]) -> list[str]:
    with Waits() as waits:
        compute()
    return waits.found


def copied_to_host(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    raise AssertionError("a micro-batch reads a tensor of the device")


def micro_batches(trainer: Trainer, step: int) -> Callable[[], None]:
    def compute() -> None:
        for index in range(MICRO_BATCHES):
            trainer.micro_batch(step, index)
        trainer.finish_gradients()

    trainer.begin_step(step)
    return compute


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talks") / "x.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "abcdefgh"}]
    path.write_text("\n".join([json.dumps({"messages": talk})] * 80))
    return path


@pytest.fixture(scope="module")
def base(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save(tiny_trainer(text_file), directory := tmp_path_factory.mktemp("base"))
    return directory


def trainer_of(kind: str, text_file: Path, talks: Path, base: Path) -> Trainer:
    changes: dict[str, dict[str, Any]] = {
        "whole": {},
        "z_loss": {"optimizer": ADAM},
        "checkpointed": {"gradient_checkpointing": True},
        "exact": {"exact": True},
        "lora": {"model": ModelSpec(path=base), "tuning": TuningSpec(rank=4, dropout=0.1)},
        "clipped": {"clip_norm": 1.0, "micro_batch_sequences": 1},
        "packed": {"data": DataSpec(path=str(talks), sequence_tokens=48, format="chat"), "optimizer": ADAM},
    }
    return tiny_trainer(text_file, device=APART, **changes[kind])


@pytest.mark.parametrize("kind", ["whole", "z_loss", "checkpointed", "exact", "lora", "clipped", "packed"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
def test_micro_batches_do_not_wait_for_the_device(
    kind: str, text_file: Path, talks: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(kind, text_file, talks, base)
    take_step(trainer, 0)
    with monkeypatch.context() as patch:
        for name in ("numpy", "cpu", "tolist", "item", "__bool__", "__float__"):
            patch.setattr(torch.Tensor, name, copied_to_host)
        assert waits_of(micro_batches(trainer, 1)) == []
    trainer.reduce_buffer[:] = 0
    assert waits_of(lambda: trainer.take(1, 1.0)) == []


def test_stages_do_not_wait_for_the_device(text_file: Path) -> None:
    pipeline = Pipeline(text_file, (0, 1, 4))
    pipeline.run(0)
    assert waits_of(lambda: pipeline.gradients(1)) == []


def test_an_inner_step_waits_once_for_the_norm_of_its_gradient(text_file: Path) -> None:
    """Whether that is finite decides on the host whether the member's copy is void."""
    trainer = tiny_trainer(text_file, local=LocalSpec(), device=APART)
    take_step(trainer, 0)
    assert waits_of(micro_batches(trainer, 1)) == ["aten::_local_scalar_dense"] * MICRO_BATCHES


# --------------------------------------------------------------------------------------------------------- read ahead


class Reads:
    """Counts the micro-batches that are read from a text."""

    def __init__(self, batches: MicroBatchReader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.windows: list[list[int]] = []
        read = batches.batch

        def batch(windows: Any) -> Any:
            self.windows.append(windows.tolist())
            return read(windows)

        monkeypatch.setattr(batches, "batch", batch)


def reader(text: Path, device: ComputeDevice = APART, processes: int = 1, **changes: Any) -> MicroBatchReader:
    return MicroBatchReader(ModelRecipe(tiny_spec(text, **changes), device), processes)


def inputs(batches: MicroBatchReader, step: int, index: int) -> np.ndarray[Any, Any]:
    return batches.training_batch(step, index).inputs.numpy()


def test_the_next_micro_batch_of_the_share_is_read_while_one_is_computed(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(text_file, device=APART)
    reads = Reads(trainer.batches, monkeypatch)
    counts = list[int]()
    monkeypatch.setattr(trainer._update, "after_backward", lambda *_: counts.append(len(reads.windows)))
    trainer.begin_step(0, 1, 3)
    for index in (1, 2, 3):
        trainer.micro_batch(0, index)
    assert counts == [2, 3, 3], "one ahead, and nothing behind the share"
    order = [trainer.batches.corpus.training[trainer.batches.window_numbers(0, index)].tolist() for index in (1, 2, 3)]
    assert reads.windows == order


@pytest.mark.parametrize("private", [False, True])
def test_what_was_read_ahead_is_what_would_be_read(text_file: Path, private: bool) -> None:
    """Also where a step begins anew with another share: the order of private text depends on the share."""
    ahead, plain = reader(text_file, private=private), reader(text_file, private=private)
    for first, count in ((0, 4), (1, 3), (1, 2)):
        for batches in (ahead, plain):
            batches.begin_step(first, count)
        ahead.read_ahead(5, first)
        for batches in (ahead, plain):
            batches.begin_step(first + 1, 2)
        assert (inputs(ahead, 5, first + 1) == inputs(plain, 5, first + 1)).all()
        ahead.read_ahead(5, first + 1)
        assert (inputs(ahead, 5, first + 2) == inputs(plain, 5, first + 2)).all()
        assert (inputs(ahead, 5, first + 1) == inputs(plain, 5, first + 1)).all(), "a forward pass is repeated"


def test_a_process_of_an_island_reads_its_own_next_one(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = reader(text_file, processes=2)
    reads = Reads(batches, monkeypatch)
    batches.begin_step(0, 4)
    batches.read_ahead(0, 1)
    batches.read_ahead(0, 2)
    batches.training_batch(0, 3)
    assert len(reads.windows) == 1


def test_a_cpu_reads_nothing_ahead(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = reader(text_file, replace(APART, torch_device=torch.device("cpu")))
    monkeypatch.setattr(type(APART), "kind", "cpu")
    reads = Reads(batches, monkeypatch)
    batches.read_ahead(0, 0)
    assert reads.windows == []
