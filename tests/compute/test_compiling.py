"""``device.compile``: what a model with compiled blocks learns beside one without, and when blocks are compiled."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from p2ptrain.compute.compiling import LEAST_REST_S, TIMED_PASSES, TIMED_STEPS, BlockCompiler
from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.device import ComputeDevice, pick_device
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.trainer import Trainer
from p2ptrain.compute.tuning import TuningSpec
from tests.compute import test_packing, test_preferences
from tests.compute.pipelines import Pipeline
from tests.compute.test_fsdp import Shards
from tests.compute.tiny_trainer import MICRO_BATCHES, run_step, tiny, tiny_spec, tiny_trainer

LAYERS, STEPS = 2, 4


class Backend:
    """Compiles for eager execution, and counts the calls of what it compiled. ``late``: of backward passes that were
    compiled inside one."""

    def __init__(self) -> None:
        self.calls = self.late = 0
        self.may_compile = threading.Event()
        self.may_compile.set()

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.may_compile.wait()
        compiled = aot_autograd(fw_compiler=self._compile, keep_inference_input_mutations=True)(graph, inputs)

        def call(*args: Any) -> Any:
            self.calls += 1
            return compiled(*args)

        return call

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.late += torch._C._current_graph_task_id() >= 0
        return boxed_nop(graph, inputs)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    torch.compiler.reset()
    backend = Backend()
    monkeypatch.setattr("p2ptrain.compute.compiling.BACKEND", backend)
    yield backend
    torch.compiler.reset()


@pytest.fixture
def device() -> ComputeDevice:
    return pick_device("cpu", 1)


def changes_of(case: str, base: Path, directory: Path) -> dict[str, Any]:
    """Of ``tiny_spec``."""
    lora = {"model": ModelSpec(path=base), "tuning": TuningSpec(rank=2, dropout=0.25, targets=["v_proj", "up_proj"])}
    data = {"sequence_tokens": 48, "validation_fraction": 0.3}
    match case:
        case "checkpointing":
            return {"gradient_checkpointing": True}
        case "lora":
            return lora
        case "local":
            return {"local": LocalSpec()}
        case "chats":
            path = test_packing.written(directory / "chats.jsonl", test_packing.CONVERSATIONS)
            return {"data": DataSpec(path=str(path), format="chat", **data)}
        case "pairs":
            path = test_preferences.written(directory / "pairs.jsonl", test_preferences.PAIRS)
            return {**lora, "data": DataSpec(path=str(path), format="preference", **data)}
        case _:
            return {}


def losses_of(case: str, text_file: Path, **changes: Any) -> list[float]:
    """Of steps whose last two use compiled blocks, if any do. Each one is validated."""
    run: Callable[[int], float]
    if case == "recompute":
        pipeline = Pipeline(text_file, (0, 1, 4), {"recompute": True}, **changes)
        trainers, run = pipeline.stages, lambda step: pipeline.run(step, [1, 0]).loss
    elif case == "shards":
        shards = Shards(text_file, 2, **changes)
        trainers, run = shards.trainers, shards.step
    else:
        trainer = tiny_trainer(text_file, **changes)
        trainers, run = [trainer], lambda step: run_step(trainer, step) + 0 * trainer.validate(0)[0]
    losses = []
    for step in range(STEPS):
        losses.append(run(step))
        for trainer in trainers:
            join(trainer)
    return losses


def join(trainer: Trainer) -> None:
    """Wait until its thread has compiled."""
    if trainer.compiler is not None and trainer.compiler.thread.ident is not None:
        trainer.compiler.thread.join()


@pytest.mark.parametrize(
    ("case", "precision", "kinds", "passes"),
    [
        ("whole", "bf16", 1, LAYERS * MICRO_BATCHES),
        ("whole", "bf16-weights", 1, LAYERS * MICRO_BATCHES),
        ("checkpointing", "fp32", 1, LAYERS * MICRO_BATCHES),
        ("lora", "bf16", 2, LAYERS * MICRO_BATCHES),  # the gradients end at the inputs of the first block
        ("local", "fp32", 1, LAYERS * MICRO_BATCHES),
        ("chats", "fp32", 1, LAYERS * MICRO_BATCHES),
        ("pairs", "fp32", 2, LAYERS * MICRO_BATCHES),
        ("recompute", "bf16", 2, (4 + 1) * MICRO_BATCHES),  # the first stage computes its block twice
        ("shards", "bf16", 2, LAYERS * MICRO_BATCHES),
    ],
)
def test_compiled_blocks_learn_what_others_do(
    text_file: Path,
    base: Path,
    tmp_path: Path,
    device: ComputeDevice,
    backend: Backend,
    case: str,
    precision: str,
    kinds: int,
    passes: int,
) -> None:
    """From the third step on every block computes with compiled code whenever it learns.

    kinds: of blocks, or copies that are compiled. passes: of blocks in a step.
    """
    changes = {"precision": precision, "device": device, **changes_of(case, base, tmp_path)}
    plain = losses_of(case, text_file, **changes)
    assert backend.calls == 0
    tolerance = 1e-5 if precision == "fp32" else 1e-3
    assert losses_of(case, text_file, compile="on", **changes) == pytest.approx(plain, rel=tolerance)
    assert backend.calls == (STEPS - 2) * passes + kinds * (1 + TIMED_PASSES)


def test_blocks_of_two_kinds_are_compiled_each(text_file: Path, device: ComputeDevice, backend: Backend) -> None:
    """Only one attends to a window."""
    extra = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    changes: dict[str, Any] = {"model": tiny(architecture="qwen2", extra=extra), "device": device}
    plain = losses_of("whole", text_file, **changes)
    assert losses_of("whole", text_file, compile="on", **changes) == pytest.approx(plain, rel=1e-5)
    assert backend.calls == (STEPS - 2) * LAYERS * MICRO_BATCHES + 2 * (1 + TIMED_PASSES)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile reads it
def test_code_fits_conversations_of_other_lengths(
    text_file: Path,
    base: Path,
    tmp_path: Path,
    device: ComputeDevice,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where attention takes their bounds, which are as many as there are conversations in a micro-batch."""
    monkeypatch.setattr("p2ptrain.compute.passes.takes_bounds", lambda *_, **__: True)
    changes = changes_of("chats", base, tmp_path) | {"model": tiny(context=160), "device": device}
    changes["data"] = changes["data"].model_copy(update={"sequence_tokens": 128})
    plain, trainer = tiny_trainer(text_file, **changes), tiny_trainer(text_file, compile="on", **changes)
    calls = []
    for step in range(6):
        assert run_step(trainer, step) == pytest.approx(run_step(plain, step), rel=1e-5)
        join(trainer)
        calls.append(backend.calls)
    assert calls[5] - calls[4] == calls[4] - calls[3]
    assert calls[5] > calls[4]


def test_steps_go_on_while_blocks_are_compiled(text_file: Path, device: ComputeDevice, backend: Backend) -> None:
    trainer = tiny_trainer(text_file, device=device, compile="on")
    backend.may_compile.clear()
    for step in range(4):
        run_step(trainer, step)
    assert (backend.calls, trainer.notices) == (0, [])
    backend.may_compile.set()
    join(trainer)
    run_step(trainer, 4)
    ((level, text),) = trainer.notices
    assert level == "info"
    assert text.startswith("compiled the model's blocks in ")
    assert text.endswith(" times as fast: used from step 5")
    assert backend.late == 0, "on a GPU all backward passes run on one thread, which would wait"


def test_memory_of_a_job_is_freed_while_its_blocks_are_compiled(
    text_file: Path, device: ComputeDevice, backend: Backend
) -> None:
    """The next job of the worker may need it."""
    trainer = tiny_trainer(text_file, device=device, compile="on")
    backend.may_compile.clear()
    for step in range(2):
        run_step(trainer, step)
    assert trainer.compiler is not None
    thread, weight = trainer.compiler.thread, weakref.ref(next(trainer.built.flat.model.model.layers.parameters()))
    del trainer
    gc.collect()
    assert thread.is_alive()
    is_freed = weight() is None
    backend.may_compile.set()
    thread.join()
    assert is_freed


def test_step_without_micro_batches_does_not_end_compiling(text_file: Path, device: ComputeDevice) -> None:
    """A slow member may have no share of a step, and a step may be aborted before its first pass."""
    trainer = tiny_trainer(text_file, device=device, compile="on")
    trainer.begin_step(0, 0, 0)
    trainer.finish_gradients()
    for step in range(1, 4):
        run_step(trainer, step)
        join(trainer)
    assert [level for level, _ in trainer.notices] == ["info"]


def fails(graph: Any, inputs: Any) -> Any:
    raise FileNotFoundError("there is no compiler")


@pytest.mark.parametrize("case", ["backend", "blocks", "copy"])
def test_what_cannot_be_compiled_trains_without(
    text_file: Path, device: ComputeDevice, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    changes: dict[str, Any] = {"device": device}
    if case == "backend":
        monkeypatch.setattr("p2ptrain.compute.compiling.BACKEND", fails)
    elif case == "blocks":
        changes["model"] = tiny(architecture="lstm")
    trainer, plain = (tiny_trainer(text_file, compile=compile, **changes) for compile in ("on", "off"))
    if case == "copy":
        monkeypatch.setattr("p2ptrain.compute.compiling._copy_block", lambda block: fails(block, None))
    for step in range(4):
        assert run_step(trainer, step) == run_step(plain, step)
        join(trainer)
    ((level, text),) = trainer.notices
    assert level == "warning"
    reason = "it has none" if case == "blocks" else "there is no compiler"
    assert f"the model's blocks are not compiled: {reason}" in text.replace("FileNotFoundError: ", "")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def auto_trainer(text_file: Path, device: ComputeDevice) -> tuple[Trainer, Clock]:
    """One that compiles by itself on a CPU, and the clock of its decision."""
    trainer, clock = tiny_trainer(text_file, device=device), Clock()
    trainer.compiler = BlockCompiler(trainer.built.flat.model, device, always=False, clock=clock)
    return trainer, clock


@pytest.mark.parametrize(("share", "begins"), [(0.98, False), (1.02, True)])
def test_auto_compiles_if_the_rest_is_long_enough(
    auto_trainer: tuple[Trainer, Clock], share: float, begins: bool
) -> None:
    """The run lasts so many times the limit from the first step that can decide on. Slow steps do not count, and
    repeated ones are not measured."""
    (trainer, clock), steps = auto_trainer, 30
    assert trainer.compiler is not None
    for step in (0, 0, *range(1, TIMED_STEPS + 2)):
        assert trainer.compiler.thread.ident is None
        run_step(trainer, step)
        clock.now_s += share * LEAST_REST_S / (steps - TIMED_STEPS) * (9 if step == 1 else 1)
    trainer.begin_step(TIMED_STEPS + 2)
    assert (trainer.compiler.thread.ident is not None) == begins
    join(trainer)


@pytest.mark.parametrize(("least", "is_used"), [(0.0, True), (1e9, False)])
def test_auto_uses_blocks_that_are_fast_enough(
    auto_trainer: tuple[Trainer, Clock], backend: Backend, monkeypatch: pytest.MonkeyPatch, least: float, is_used: bool
) -> None:
    monkeypatch.setattr("p2ptrain.compute.compiling.LEAST_SPEEDUP", least)
    monkeypatch.setattr("p2ptrain.compute.compiling.LEAST_REST_S", 0.0)
    trainer, calls = auto_trainer[0], 0
    assert trainer.compiler is not None
    trainer.compiler._clock = time.perf_counter
    for step in range(TIMED_STEPS + 4):
        calls = backend.calls
        run_step(trainer, step)
        join(trainer)
    assert [text.endswith(f"used from step {TIMED_STEPS + 3}") for _, text in trainer.compiler.notices] == [is_used]
    assert backend.calls - calls == is_used * LAYERS * MICRO_BATCHES


class OnCuda(ComputeDevice):
    @property
    def kind(self) -> str:
        return "cuda"


def test_setting_decides_what_is_compiled(text_file: Path) -> None:
    """'auto' is for CUDA; the bits of an exact job do not depend on who has compiled."""
    cpu = pick_device("cpu", 1)
    cuda = OnCuda(cpu.torch_device, "")

    def compiles(device: ComputeDevice, compile: str, **changes: Any) -> bool:
        recipe = ModelRecipe(tiny_spec(text_file, compile=compile, **changes), cpu)
        recipe.device = device
        return recipe.block_compiler(nn.Module()) is not None

    assert [compiles(cuda, compile) for compile in ("off", "auto", "on")] == [False, True, True]
    assert [compiles(cpu, compile) for compile in ("off", "auto", "on")] == [False, False, True]
    assert not compiles(cuda, "auto", exact=True)
    assert not compiles(cuda, "auto", precision="tf32")
