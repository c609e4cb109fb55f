"""The training engine that uses torch (``roles.engine.Engine``): a model or a part of it, its optimizer and its data.

A ``Trainer`` is made of objects that each do one thing:

- ``ModelRecipe`` checks what fits into memory, and builds the part;
- ``MicroBatchReader`` reads the text;
- a ``StepUpdate`` decides what a member contributes, and how the members' sum changes the parameters;
- ``ReduceBuffer`` holds the contribution on the host, where the ring sums it;
- ``Passes`` computes the forward and backward passes;
- ``TrainingState`` gives the state to checkpoints and to members that heal.

Weights, gradients and moments are flat arrays (``compute.flat``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch import Tensor

from p2ptrain.compute.checkpoint_files import PARAMETERS, CheckpointPlanner, CheckpointReader
from p2ptrain.compute.device import share_cores
from p2ptrain.compute.flat import FlatModel, OptimizerSchedule
from p2ptrain.compute.fsdp import ShardedModel
from p2ptrain.compute.gradients import UNIT
from p2ptrain.compute.local import ExactAverage, LocalSteps
from p2ptrain.compute.passes import MicroBatchReader, Passes
from p2ptrain.compute.process_group import Operations
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe, TrainingSpec
from p2ptrain.compute.reduce_buffer import ReduceBuffer
from p2ptrain.compute.token_store import OnProgress, no_progress
from p2ptrain.compute.update import ClippedGradients, StepUpdate, SummedGradients
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.training import Applied, Blob, FilePlan, OnFinal, SettingsPeriod, TrainingData


def make_update(spec: TrainingSpec, flat: FlatModel) -> StepUpdate:
    """What the job's strategy contributes and applies."""
    schedule = OptimizerSchedule(spec.optimizer, spec.steps)
    if spec.clip_norm:
        return ClippedGradients(flat, schedule, spec.micro_batches, spec.clip_norm)
    if spec.local is None:
        unit = UNIT if spec.exact else 1.0
        return SummedGradients(flat, schedule, unit=unit, is_weighted=spec.data.private)
    local_kind = ExactAverage if spec.local.slots else LocalSteps
    update = local_kind(flat, schedule, spec.local)
    if spec.local.fragments == 1 and not spec.local.overlap:  # else it has inner steps of several steps
        update.max_scalar = 1.001 * spec.micro_batches  # of the weights, and of the targets in full micro-batches
    return update


class TrainingState:
    """The state of a part, in memory and in the files of a checkpoint. Implements ``roles.engine.EngineState``,
    which documents the methods.

    Args:
        corpus: digest of the corpus; empty if the text is private.
    """

    def __init__(self, recipe: ModelRecipe, built: BuiltPart, update: StepUpdate, corpus: str) -> None:
        self._recipe, self._built, self._update = recipe, built, update
        merged = update.places if isinstance(update, ExactAverage) else {}
        self._planner = CheckpointPlanner(recipe, built, corpus, merged)
        self._reader = CheckpointReader(recipe, built)
        self._mirrors: list[tuple[Tensor, Tensor]] = []  # (array on a GPU, its copy from blobs())
        self._read_kept_moments()

    def _read_kept_moments(self) -> None:
        """Read the moments of the checkpoint that the job begins from, if it keeps them. Raises ``StorageError``."""
        spec, update = self._recipe.spec, self._update
        if spec.keep_optimizer and spec.model.path is not None and isinstance(update, SummedGradients):
            self._reader.read(spec.model.path, self.arrays())
            update.earlier_steps = self._reader.optimizer_steps_of(spec.model.path)
        self._is_initial = True

    def arrays(self) -> dict[str, Tensor]:
        """The parameters that train, and what else the update shares, such as the optimizer's moments."""
        return {PARAMETERS: self._built.flat.parameters, **self._update.shared}

    def blobs(self) -> list[Blob]:
        """As in ``EngineState``. On a GPU these are fresh host copies; ``refresh`` copies them back."""
        arrays = self.arrays()
        if self._recipe.is_on_host:
            return [blob_of(name, array) for name, array in arrays.items()]
        self._mirrors = [(array, array.to("cpu", copy=True)) for array in arrays.values()]
        return [blob_of(name, host) for name, (_, host) in zip(arrays, self._mirrors, strict=True)]

    def refresh(self, step: int) -> None:
        for array, host in self._mirrors:
            array.copy_(host)
        self._forget_derived()

    def load_initial(self) -> None:
        if not self._is_initial:
            self._built.flat.copy_tensors(self._recipe.initial_tensors(self._built.flat.shapes))
            if isinstance(self._update, ExactAverage):
                self._update.begin_again(self._recipe.initial_module())
            self._update.reset()
            self._forget_derived()
            self._read_kept_moments()

    def initial_digest(self) -> bytes:
        return self._recipe.initial_digest

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        sizes = {name: array.numel() for name, array in self._update.shared.items()}
        earlier_steps = self._update.earlier_steps if isinstance(self._update, SummedGradients) else 0
        return self._planner.files_of(step, sizes, earlier_steps=earlier_steps)

    def load(self, directory: Path) -> None:
        """Restore this part from its own files in ``directory``; a shard also from those of a whole model. Other files
        are ignored. Raises ``StorageError``: the checkpoint does not fit this part, or cannot be read. The state is
        unchanged."""
        self._reader.read(directory, self.arrays())
        self._forget_derived()

    def changed(self) -> None:
        self._is_initial, self._mirrors = False, []
        self._built.flat.compute_with(self._built.flat.parameters)

    def _forget_derived(self) -> None:
        self._update.on_state_replaced()
        self.changed()


def blob_of(name: str, array: Tensor) -> Blob:
    return Blob(name, array.numpy().data.cast("B"))


class Trainer:
    """Takes the steps of a job. ``roles.engine.Engine`` documents methods and attributes. All block; call them on one
    thread.

    Args:
        recipe: of the model, a stage or a shard. Only the last stage computes losses, but ``apply`` expects their sum
            in ``reduce_buffer[-1]`` of every stage.
        processes: see ``MicroBatchReader``. on_progress: see ``load_corpus``.
        make_buffer, make_state: an island has its own.

    Attributes:
        built, batches: the part of the model, and the text.
        compiler: of the model's blocks; None: they are not compiled.

    Raises:
        ConfigError, UserError, ResourceError: see ``MicroBatchReader``, ``ModelRecipe.build``.
    """

    def __init__(
        self,
        recipe: ModelRecipe,
        *,
        processes: int = 1,
        on_progress: OnProgress = no_progress,
        make_buffer: Callable[[ModelRecipe, BuiltPart, StepUpdate], ReduceBuffer] = ReduceBuffer,
        make_state: Callable[[ModelRecipe, BuiltPart, StepUpdate, str], TrainingState] = TrainingState,
    ) -> None:
        self._recipe, self._spec = recipe, recipe.spec
        self.batches = MicroBatchReader(recipe, processes, on_progress)
        self.built = recipe.build()
        self.compiler = recipe.block_compiler(self.built.flat.model)
        self.notices = [] if self.compiler is None else self.compiler.notices
        self._sharded = self.built.flat if isinstance(self.built.flat, ShardedModel) else None
        self._update = update = make_update(recipe.spec, self.built.flat)
        self._buffer = make_buffer(recipe, self.built, update)
        self._passes = Passes(recipe, self.built, self.batches, update, self._buffer)
        self.state = make_state(recipe, self.built, update, self.batches.digest)
        self.pipeline = self._passes if self._sharded is None else None
        self.reduce_buffer: npt.NDArray[Any] = self._buffer.array
        self.scalars, self.codec_numel = self._buffer.scalars, self._buffer.codec_numel
        self.exact = recipe.spec.exact
        self.exchanged, self.partial_square_sum = self._buffer.exchanged, self._buffer.partial_square_sum
        self.contributed_square_sum = self._buffer.contributed_square_sum
        self.noise = update if self._spec.withholds_losses else None
        self.slots = update if isinstance(update, ExactAverage) else None
        self.device = recipe.device.label
        self.data = TrainingData(
            digest=self.batches.digest,
            note=self.batches.corpus.note,
            windows=len(self.batches.corpus.training),
            tokens_per_micro_batch=self._spec.micro_batch_tokens,
            validation_batches=self.batches.validation_count,
            store=self.batches.corpus.store.directory,
        )
        if frozen := recipe.tuning.frozen_digest:
            base = frozen if recipe.stage.is_whole else recipe.initial_digest.hex()
            self.data.digest = hashlib.sha256(f"{self.data.digest} {base}".encode()).hexdigest()

    @property
    def shards(self) -> Trainer | None:
        return None if self._sharded is None else self

    def share_cores(self, workers: int) -> None:
        share_cores(self._recipe.device, workers)

    def use_settings(self, periods: Sequence[SettingsPeriod]) -> None:
        self._update.schedule.use(periods)

    def connect(self, operations: Operations) -> None:
        assert self._sharded is not None
        self._sharded.connect(operations)

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        """Also drops what an aborted step left."""
        if self.compiler is not None:
            self.compiler.begin_step(step, self._update.schedule.steps_at(step))
        count = self._spec.micro_batches if count < 0 else count
        self.batches.begin_step(first, count)
        self._buffer.begin_step()
        if self._sharded is not None:
            self._sharded.begin_step(count)
        is_ready = self._update.begin_step(step, count)
        self._passes.begin_step(step)
        return is_ready

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None, *, counts: bool = True) -> None:
        if self._spec.clip_norm and self.batches.draws_again(step, index):
            return
        with self._sharded.during_pass() if self._sharded is not None else nullcontext():
            self._passes.forward(step, index, None)
            self._passes.backward(index, None, on_final, counts=counts)

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        self._buffer.finish(on_final)

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        loss = self._update.mean_loss(self.reduce_buffer)
        if not ((math.isfinite(loss) or self._spec.withholds_losses) and math.isfinite(norm)):
            raise JobFailed(
                f"step {step + 1} is not finite: loss {loss}, gradient norm {norm}",
                remedy="lower optimizer.lr, raise optimizer.warmup_steps, or use device.precision = 'fp32'",
            )
        self._buffer.is_own = is_own
        lr, norm = self.take(step, norm)
        return Applied(step + 1, loss, lr, norm)

    def take(self, step: int, norm: float) -> tuple[float, float]:
        """Take the step with the sum in ``reduce_buffer``, of this norm. See ``StepUpdate.apply``."""
        self._buffer.copy_back()
        reported = self._update.apply(step, norm)
        self.state.changed()
        return reported

    # ------------------------------------------------------------------------------------------------------- validation

    def validate(self, index: int) -> tuple[float, int]:
        """Run a validation micro-batch through a whole model: sum of the losses (nats) and number of targets."""
        return self._passes.validation_forward(index, None)[1:]
