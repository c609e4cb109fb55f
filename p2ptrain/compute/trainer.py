"""The training engine that uses torch (``roles.engine``): a model or one stage of it, its optimizer and its data.

Memory. Weights, gradients and moments are flat arrays (``compute.flat``). On a CPU the reduce buffer *is* the gradient
memory: nothing is copied between backward and the ring. On a GPU the gradients are copied to a host buffer, which is
pinned for CUDA, and copied back after the reduction. With CUDA a separate stream copies them piece by piece while
backward runs. In the last micro-batch of a share a hook on each parameter reports how far the gradients are final
(``compute.gradients``), so the ring can start with the front of the buffer. The hooks run on autograd's thread, inside
backward. In *exact* mode the reduce buffer is a separate array: the gradients' sum in fixed point (``compute.exact``).

Data. A pure function (``compute.sampling``) decides which text a micro-batch reads, so no token is sent between stages:
the first stage takes the inputs from its own corpus, the last stage the targets from its own. A step's loss, and its
gradient, is the mean over all targets of the global batch. With conversations micro-batches have different numbers of
targets. Each member counts those of the whole step in its own corpus, and divides by them. If the text is private, it
divides by as many as could be, and the members sum the share that theirs are of it (``SummedGradients``).

Gradients between stages. The last stage divides the loss as in one process. Every other stage
continues from the gradient that it receives and scales nothing. The gradients are sent as fp32 or bf16. With bf16, and
a cut at each of eight layers, the error in the first layer is 0.2 %. int8 gave 0.9 %; fp16 cannot represent 4 % of the
elements.

Tied models. The first and the last stage each hold the embedding matrix, and the gradient of their own use of it. Both
gradients are summed (a + b equals b + a, so the bits are equal); then both stages make the same update of the same
weights. The global norm counts the matrix once, on the first stage.

Recomputing. With ``recompute`` a stage keeps the inputs of a micro-batch, as they were received, instead of autograd's
graph, and repeats the forward pass before the backward pass. Only the latest micro-batch keeps its graph, until another
forward pass needs the memory. If its backward pass comes next, as always on the last stage with 1F1B, nothing is
computed twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from p2ptrain.compute.activations import decode_untrusted, encode
from p2ptrain.compute.checkpoint_files import PARAMETERS, CheckpointPlanner
from p2ptrain.compute.data import NO_TARGET, Corpus, DataSpec, load_corpus
from p2ptrain.compute.device import ComputeDevice, flushed_denormals, share_cores
from p2ptrain.compute.exact import FixedSum, constant_arithmetic, prepare_device
from p2ptrain.compute.fedex import ExactAverage
from p2ptrain.compute.flat import FlatModel, OptimizerSpec, square_sum, trained
from p2ptrain.compute.fsdp import ShardedModel, ShardSpec, build_rows, check_shard_memory, lost_members_told
from p2ptrain.compute.gradients import UNIT, BackwardProgress, HostCopier, OnFinal, bucket_bounds
from p2ptrain.compute.local import LocalSpec, LocalSteps
from p2ptrain.compute.model import ModelSpec, build_model, model_config
from p2ptrain.compute.part import PartModel
from p2ptrain.compute.process_group import Operations
from p2ptrain.compute.sampling import Indices, WindowSampler
from p2ptrain.compute.split_check import check_packs, check_splits
from p2ptrain.compute.stage import StageSpec, build_training_part, check_training_memory, initial_digest, most_in_flight
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.tuning import ALL_OF_IT, Tuning, TuningSpec
from p2ptrain.compute.update import CLIPPED_FACTOR, ClippedGradients, PlainGradients, StepUpdate, SummedGradients
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ConfigError, JobFailed, P2PTrainError, ResourceError, StorageError
from p2ptrain.core.footprint import LOCAL_FACTOR
from p2ptrain.core.training import Applied, Blob, FilePlan

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
Payload = npt.NDArray[np.uint8]
"""Encoded activations or gradients of one micro-batch: shape (bytes,), contiguous, on the host."""


@dataclass(slots=True)
class _Flight:
    step: int
    index: int
    inputs: Payload | None  # for recomputing, still encoded; None on the first stage or without recomputing
    graph: tuple[Tensor | None, Tensor] | None  # (inputs, None on the first stage; outputs)


@dataclass(frozen=True, slots=True)
class _Batch:
    """``compute.data.TokenBatch`` on the device: inputs, targets and positions (B, T)."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """Everything that determines the result of a training run, independent of the cluster. ``configs.schema`` has
    checked the values.

    Attributes:
        micro_batches: micro-batches in a global batch, M.
        micro_batch_sequences: sequences in a micro-batch, B.
        exact: exact mode, for a model that is not split. CPU kernels use ``device.threads`` threads, which must be the
            same at all members, or one thread if it is 0. They never use one thread per core by default.
        private: the text is this member's own. As long as its share is the same, each of its epochs has each sequence
            once.
        local: each micro-batch is an inner step (``compute.local``); None: their gradients are summed.
        clip_norm: largest gradient of a micro-batch, which is one sequence (``ClippedGradients``); 0: not clipped. A
            sequence counts once in a step.
        sgd: without moments, instead of AdamW.
    """

    model: ModelSpec
    data: DataSpec
    optimizer: OptimizerSpec
    steps: int
    seed: int
    micro_batches: int
    micro_batch_sequences: int
    validation_batches: int = 0
    precision: str = "fp32"
    exact: bool = False
    private: bool = False
    local: LocalSpec | None = None
    clip_norm: float = 0.0
    sgd: bool = False
    tuning: TuningSpec = ALL_OF_IT
    gradient_checkpointing: bool = False

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_sequences * self.data.sequence_tokens


class Trainer:
    """Trains one stage of a model. ``roles.engine`` documents the methods. All block; call them on one thread.

    Args:
        stage: the stage to hold; None for the whole model. Only the last stage computes losses, but ``apply`` expects
            their sum in ``reduce_buffer[-1]`` of every stage.
        shard: the rows of the whole model to hold; None for all. All members of the shard's mesh make the same calls of
            ``micro_batch`` and ``validate`` at the same time, with different micro-batches.

    Raises:
        ConfigError, UserError, ResourceError: see ``model_config``, ``load_corpus``, ``check_training_memory``.
    """

    def __init__(
        self, spec: TrainingSpec, device: ComputeDevice, stage: StageSpec | None = None, shard: ShardSpec | None = None
    ) -> None:
        self._spec, exact = spec, spec.exact
        self._shard = shard
        self._tokenizer, self._config = _tokenizer_and_config(spec.model)
        context = getattr(self._config, "max_position_embeddings", None)
        if context is not None and spec.data.sequence_tokens > context:
            raise ConfigError(
                f"data.sequence_tokens = {spec.data.sequence_tokens} is more than model.context = {context}",
                remedy="make the context at least as long as a sequence",
            )
        self._stage = stage = stage or StageSpec(0, (0, self._config.num_hidden_layers))
        self._part = stage.check(self._config.num_hidden_layers)
        if not stage.is_whole:
            check_splits(self._config)
        tokens, sequences = spec.micro_batch_tokens, spec.micro_batch_sequences
        in_bf16 = spec.precision == "bf16"
        self._tuning = tuning = Tuning(self._config, spec.tuning, spec.seed, spec.model.path, bf16=in_bf16)
        factor = LOCAL_FACTOR if spec.local else CLIPPED_FACTOR if spec.clip_norm else 1.0
        trains = tuning.trained * factor
        sizes: dict[str, Any] = {"micro_batch_tokens": tokens, "trained": trains, "held": tuning.held}
        sizes["layers_kept"] = not spec.gradient_checkpointing
        self.in_flight = stage.in_flight
        if shard is not None:
            kept = not spec.gradient_checkpointing
            check_shard_memory(self._config, shard, device, micro_batch_tokens=tokens, layers_kept=kept)
        else:
            check_training_memory(self._config, stage, device, exact=exact, **sizes)
            most = max(spec.micro_batches, stage.in_flight)
            self.in_flight = most_in_flight(self._config, stage, device, most=most, **sizes)
        self._corpus: Corpus = load_corpus(spec.data, self._tokenizer, self._config.vocab_size)
        if self._corpus.marks is not None:
            check_packs(self._config, split=not stage.is_whole)
        self._validation_batches = min(spec.validation_batches, -(-len(self._corpus.validation) // sequences))
        self._target_counts = self._corpus.target_counts()[self._corpus.training]
        self._sampler = WindowSampler(len(self._corpus.training), spec.seed)
        self._device, self._chosen = device.torch_device, device
        self._autocast_dtype = PRECISIONS[spec.precision] if shard is None else None  # FSDP2 casts the parameters
        self._is_host = device.kind == "cpu" or (shard is not None and shard.offload)
        self.exact, self._unit = exact, UNIT if exact else 1.0
        self._threads = (device.threads or 1) if exact else 0
        if exact:
            prepare_device(device.kind)
        self._model_part: PartModel | None = None
        with self._arithmetic():  # kernel threads start here and inherit that denormals are flushed
            self._flat = self._build_flat()
        self._model, self._counts = self._flat.model, True
        self._update = self._update_of(spec)
        self._fixed = FixedSum(self._flat.gradients, device.kind, spec.micro_batches) if exact else None
        self._summed = self._fixed.total if self._fixed else self._update.contribution
        on_host = self._fixed.on_host if self._fixed else self._is_host
        self._host = self._summed
        if not on_host:
            self._host = torch.zeros_like(self._summed, device="cpu", pin_memory=device.kind == "cuda")
        early = self._update.final_early
        self._host_copier = _host_copier(self._summed, self._host, self._summed.device.type) if early else None
        self._watch = BackwardProgress(self._flat.stops, self._host_copier, self._fixed.add if self._fixed else None)
        for index, segment in enumerate(self._flat.segments):
            hook = partial(self._watch.gradient_final, index)
            self._model.get_parameter(segment.name).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._mirrors: list[tuple[Tensor, Tensor]] = []  # (array on a GPU, its copy from state())
        self._is_initial, self._initial_digest = True, b""
        self._positions = torch.arange(spec.data.sequence_tokens, device=self._device)
        self._flights: dict[int, _Flight] = {}
        self._share = 0, spec.micro_batches  # first micro-batch and count
        self._seen: set[int] = set()  # sequences of this step, with a clip norm
        tied_name = self._model_part.tied_name if self._model_part else ""
        self._tied = next((segment for segment in self._flat.segments if segment.name == tied_name), None)
        self._files = self._files_of(self._flat)
        self.tokens_per_micro_batch = tokens
        self.device = device.label
        self.reduce_buffer: npt.NDArray[Any] = self._host.numpy()
        self.scalars = len(self._update.contribution) - self._update.numel
        self.exact_from = self._update.numel - (self._flat.numel - self._flat.decayed_numel)
        self.corpus_digest = "" if spec.private else self._corpus.digest
        self.windows, self.data_note = len(self._corpus.training), self._corpus.note
        if tuning.frozen_digest:
            base = tuning.frozen_digest if stage.is_whole else self.initial_digest().hex()
            self.corpus_digest = hashlib.sha256(f"{self.corpus_digest} {base}".encode()).hexdigest()
        self.activation_bytes = activation_bytes(stage.activations, tokens, self._config.hidden_size)
        self.gradient_bytes = activation_bytes(stage.gradients, tokens, self._config.hidden_size)
        self.layers = (self._part.start, self._part.stop, self._part.layers)

    def _files_of(self, flat: FlatModel) -> CheckpointPlanner:
        return CheckpointPlanner(
            flat,
            self._model_part,
            self._config,
            self._stage,
            self._tokenizer,
            "" if self._spec.private else self._corpus.digest,
            chat=self._spec.data.format == "chat",
            tied=self._tied,
            tuning=self._tuning,
            merged=self._update.places if isinstance(self._update, ExactAverage) else {},
            base=self._spec.model.path,
        )

    def _update_of(self, spec: TrainingSpec) -> StepUpdate:
        if spec.clip_norm:
            number, norm = spec.micro_batches, spec.clip_norm
            return ClippedGradients(self._flat, spec.optimizer, steps=spec.steps, micro_batches=number, clip_norm=norm)
        if spec.local is None:
            summed = PlainGradients if spec.sgd else SummedGradients
            return summed(self._flat, spec.optimizer, steps=spec.steps, unit=self._unit, weighed=spec.private)
        kind = ExactAverage if spec.local.slots else LocalSteps
        update = kind(self._flat, spec.optimizer, spec.local, steps=spec.steps)
        if spec.local.fragments == 1 and not spec.local.overlap:  # else it has inner steps of several steps
            update.most = 1.001 * spec.micro_batches  # of the weights, and of the targets in full micro-batches
        return update

    def share_cores(self, workers: int) -> None:
        share_cores(self._chosen, workers)

    def connect(self, operations: Operations) -> None:
        assert isinstance(self._flat, ShardedModel)
        self._flat.connect(operations)

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        """See ``roles.engine``. Also drops what an aborted step left. ``count`` -1: all micro-batches."""
        self._flights.clear()
        if self._fixed is not None:
            self._fixed.begin()
        self._watch.begin()
        count = self._spec.micro_batches if count < 0 else count
        self._share = first, count
        self._seen.clear()
        if isinstance(self._flat, ShardedModel):
            self._flat.begin_step(count)
        is_ready = self._update.begin_step(step, count)
        if self._spec.private:
            self._divisor = self._spec.micro_batches * self._spec.micro_batch_tokens
            self._flat.gradients[-2] = self._targets(step, first, count) / self._divisor
        else:
            self._divisor = self._targets(step, 0, self._spec.micro_batches)
        return is_ready

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None, *, counts: bool = True) -> None:
        if self._spec.clip_norm and self._is_repeated(step, index):
            return
        self._counts = counts
        with self._flat.one_pass() if isinstance(self._flat, ShardedModel) else nullcontext():
            self.forward(step, index, None)
            self.backward(index, None, on_final)

    def _is_repeated(self, step: int, index: int) -> bool:
        """Whether this step has the sequence already: it is where two epochs meet, or the text is short."""
        (window,) = self._samples(step, index).tolist()
        is_repeated = window in self._seen
        self._seen.add(window)
        return is_repeated

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        """See ``roles.engine``. The last stage adds its loss to the loss slot."""
        if index in self._flights:
            raise ValueError(f"micro-batch {index} of step {step} already had its forward pass")
        if self._stage.recompute:
            self._let_go()
        flight = _Flight(step, index, None, None)
        outputs = self._run(flight, inputs)
        if self._stage.recompute and inputs is not None:
            flight.inputs = inputs.copy()
        self._flights[index] = flight
        if not self._part.last:
            return _payload(outputs, self._stage.activations)
        if self._fixed is None and self._counts:
            divisor = self._spec.micro_batch_tokens if self._update.each_alone else self._divisor
            loss = (outputs.detach() / divisor).to(self._flat.loss_sum.device)  # with offload: the host's
            self._flat.loss_sum.add_(loss)
        return None

    def backward(self, index: int, gradient: Payload | None, on_final: OnFinal | None = None) -> Payload | None:
        """See ``roles.engine``."""
        flight = self._flights.get(index)
        if flight is None:
            raise ValueError(f"micro-batch {index} had no forward pass before its backward pass")
        arrived = None if gradient is None else self._decoded(gradient, self._stage.gradients)
        if (arrived is None) != self._part.last:
            raise ValueError(f"backward pass of stage {self._stage.stage}: missing or unexpected gradient as input")
        if flight.graph is None:
            self._let_go()
            self._run(flight, flight.inputs)
        assert flight.graph is not None
        inputs, outputs = flight.graph
        if self._fixed is not None:
            self._fixed.begin_micro_batch()
        self._tuning.micro_batch = flight.step, flight.index  # for layers that are computed again
        early = on_final if self._update.final_early else None
        place, number = self._round(index)
        divisor = self._targets(flight.step, place, number) if self._update.each_alone else self._divisor
        with self._arithmetic(), _out_of_memory_told(), self._watch.telling(early):
            if arrived is None:
                # Divided by infinity all gradients are 0.
                (outputs / (divisor if self._counts else math.inf)).backward()  # type: ignore[no-untyped-call]
            else:
                outputs.backward(arrived.to(outputs.dtype))  # type: ignore[no-untyped-call]
        if self._fixed is not None:
            self._flat.loss_sum.copy_(outputs.detach() / divisor)
            self._fixed.add(len(self._flat.gradients))
        self._update.after_backward(number, divisor / self._spec.micro_batch_tokens)
        del self._flights[index]
        if inputs is None:
            return None
        assert inputs.grad is not None
        return _payload(inputs.grad, self._stage.gradients)

    def _round(self, index: int) -> tuple[int, int]:
        """The micro-batches (first, count) of the backward pass of micro-batch ``index``."""
        return index, 1

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Copy the rest of the gradients, and the loss, into ``reduce_buffer``."""
        if self._flights:
            raise ValueError(f"micro-batches {sorted(self._flights)} had no backward pass")
        self._update.finish()
        if self._host_copier is not None:
            self._host_copier.finish(on_final or (lambda numel: None))
        elif self._host is not self._summed:
            self._host.copy_(self._summed)  # blocks until the device is done

    def use_slot(self, slot: int) -> None:
        """See ``roles.engine.SlottedEngine``."""
        assert isinstance(self._update, ExactAverage)
        self._update.slot = slot

    def use_noise(self, std: float, key: bytes) -> None:
        """See ``roles.engine.PrivateEngine``."""
        assert isinstance(self._update, LocalSteps | ClippedGradients)
        self._update.noise = std, key

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        return self._update.exchanged(step)

    def tied_gradient(self) -> npt.NDArray[np.float32] | None:
        """View of ``reduce_buffer``: the gradient of the matrix that the first and the last stage share, shape
        (numel,). None on other stages, in an untied model, and if one part holds all layers."""
        if self._tied is None:
            return None
        view: npt.NDArray[np.float32] = self.reduce_buffer[self._tied.offset : self._tied.offset + self._tied.numel]
        return view

    def contributed_square_sum(self, start: int, stop: int) -> float:
        """See ``roles.engine``. Also NaN if a number before the loss slot cannot be."""
        numel = len(self.reduce_buffer) - self.scalars
        if stop > numel and not (self._fixed.fits if self._fixed else self._is_plausible(self.reduce_buffer[numel:])):
            return math.nan
        return square_sum(self.reduce_buffer[start : min(stop, numel)]) * self._unit**2

    def _is_plausible(self, numbers: npt.NDArray[Any]) -> bool:
        *counts, loss = numbers.tolist()
        return math.isfinite(loss) and all(0 <= each <= self._update.most for each in counts)

    def partial_square_sum(self, start: int, stop: int) -> float:
        """``contributed_square_sum`` for the global norm: only the first stage counts the tied matrix."""
        if self._tied is None or self._part.first:
            return self.contributed_square_sum(start, stop)
        before = min(stop, self._tied.offset)
        after = max(start, self._tied.offset + self._tied.numel)
        total = self.contributed_square_sum(start, before) if start < before else 0.0
        return total + self.contributed_square_sum(after, stop) if after < stop else total

    def apply(self, step: int, square_sum: float) -> Applied:
        """See ``roles.engine``."""
        norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        loss = self._update.mean_loss(self.reduce_buffer)
        withheld = self._spec.clip_norm > 0 or (self._spec.local is not None and self._spec.local.clip_norm > 0)
        if not ((math.isfinite(loss) or withheld) and math.isfinite(norm)):
            raise JobFailed(
                f"step {step + 1} is not finite: loss {loss}, gradient norm {norm}",
                remedy="lower optimizer.lr, raise optimizer.warmup_steps, or use device.precision = 'fp32'",
            )
        lr, norm = self.take(step, norm)
        return Applied(step + 1, loss, lr, norm)

    def take(self, step: int, norm: float) -> tuple[float, float]:
        """Take the step with the sum in ``reduce_buffer``, of this norm. See ``compute.update.StepUpdate.apply``."""
        self._to_device()
        reported = self._update.apply(step, norm)
        self._moved_to()
        return reported

    def _to_device(self) -> None:
        if self._host is not self._update.contribution:
            self._update.contribution.copy_(self._host)

    # ------------------------------------------------------------------------------------------------------- validation

    def validation_batches(self) -> int:
        return self._validation_batches

    def validate(self, first: int, count: int) -> tuple[float, int]:
        """Run validation micro-batches ``range(first, first + count)`` through a whole model: sum of the losses (nats)
        and number of targets."""
        losses, targets = 0.0, 0
        for index in range(first, min(first + count, self._validation_batches)):
            _, loss, number = self.validation_forward(index, None)
            losses, targets = losses + loss, targets + number
        return losses, targets

    def validation_forward(self, index: int, inputs: Payload | None) -> tuple[Payload | None, float, int]:
        """See ``roles.engine``."""
        sequences = self._spec.micro_batch_sequences
        self._tuning.micro_batch = None
        lost = lost_members_told() if self._shard is not None else nullcontext()
        with torch.no_grad(), self._arithmetic(), _out_of_memory_told(), lost:
            windows = self._corpus.validation[index * sequences : (index + 1) * sequences]
            batch = self._batch(np.resize(windows, sequences))
            if len(windows) < sequences:  # the last one; repeated windows do not count
                batch = replace(batch, targets=batch.targets.clone())
                batch.targets[len(windows) :] = NO_TARGET
            outputs = self._through(self._entering(batch, inputs), batch)
        if not self._part.last:
            return _payload(outputs, self._stage.activations), 0.0, 0
        return None, float(outputs), int((batch.targets != NO_TARGET).sum())

    # ----------------------------------------------------------------------------------------------------------- state

    def state(self) -> list[Blob]:
        """The parameters that train, and what else the update shares, such as AdamW's moments. On a GPU these are fresh
        host copies; ``state_loaded`` copies them back."""
        arrays = self._state_arrays()
        if self._is_host:
            return [_blob(name, array) for name, array in arrays.items()]
        self._mirrors = [(array, array.to("cpu", copy=True)) for array in arrays.values()]
        return [_blob(name, host) for name, (_, host) in zip(arrays, self._mirrors, strict=True)]

    def load_initial(self) -> None:
        if not self._is_initial:
            with self._arithmetic():
                self._flat.copy_tensors(self._initial())
            if isinstance(self._update, ExactAverage):
                self._update.begin_again(self._build())
            self._update.reset()
            self._update.loaded()
            self._moved_to()
            self._is_initial = True

    def state_loaded(self, step: int) -> None:
        """Use the state of ``step``, which the caller has written into the blobs of ``state()``."""
        for array, host in self._mirrors:
            array.copy_(host)
        self._update.loaded()
        self._moved_to()

    def initial_digest(self) -> bytes:
        if not self._initial_digest:
            spec = self._spec
            self._initial_digest = initial_digest(self._config, spec.model.path, spec.seed, self._stage.bounds)
        return self._initial_digest

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        """Plan a Hugging Face model directory, or this stage's files of it, and the optimizer's file, from ranges of
        ``state()``'s blobs. Raises ``StorageError`` if there is no room for temporary files."""
        arrays = {name: array.numel() for name, array in self._state_arrays().items() if name != PARAMETERS}
        return self._files.of_step(step, arrays)

    def load(self, directory: Path) -> None:
        """Restore this stage from its own files in ``directory``; a shard also from those of a whole model. Other files
        are ignored.

        Raises:
            StorageError: the checkpoint does not fit this part, or cannot be read. The state is unchanged.
        """
        self._read(directory, self._flat, self._state_arrays())
        self._update.loaded()
        self._moved_to()

    def _read(self, directory: Path, flat: FlatModel, arrays: Mapping[str, Tensor]) -> None:
        """Read a checkpoint into ``arrays``, by name. Raises as ``load``."""
        moments = arrays.keys() - {PARAMETERS}
        try:
            if isinstance(flat, ShardedModel):
                layout, loaded = self._files.rows_in(directory, moments)
                notes = {"layout": layout}
            else:
                notes_file = directory / self._files.training
                if notes_file.stat().st_size > 1 << 20:  # it may have come from another worker
                    raise ValueError(f"{notes_file.name} is too large")
                notes = json.loads(notes_file.read_bytes())
                with safe_open(directory / self._files.optimizer, "pt") as file:
                    loaded = {name: file.get_tensor(name) for name in {*moments, PARAMETERS} & set(file.keys())}
            if (notes["layout"], notes.get("frozen", "")) != (self._flat.layout, self._tuning.frozen_digest):
                raise StorageError(
                    f"the checkpoint {directory} is of another model",
                    remedy="restore it into a job with its [model] table",
                )
            weights = {} if PARAMETERS in loaded else self._files.weights_in(directory)
        except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
            raise StorageError(f"cannot read the checkpoint {directory}: {error}") from error
        except StorageError:
            raise
        except P2PTrainError as error:
            raise StorageError(f"cannot read the checkpoint {directory}: {error.message}") from error
        if not loaded.keys() >= moments or any(arrays[name].shape != loaded[name].shape for name in loaded):
            raise StorageError(f"the optimizer's moments in {directory} do not fit this model")
        if weights:
            flat.copy_tensors(weights)
        for name, array in loaded.items():
            arrays[name].copy_(array)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _initial(self) -> Mapping[str, Tensor]:
        if self._tuning.adapters:
            return self._tuning.initial(self._flat.shapes)
        if self._shard is not None:
            return build_rows(self._config, self._shard, self._spec.model.path, self._spec.seed)[2]
        return trained(self._build())

    def _build_flat(self) -> FlatModel:
        device, spec = self._device, self._spec
        if self._shard is None:
            return FlatModel(self._build(), device)
        module, layers, rows = build_rows(self._config, self._shard, spec.model.path, spec.seed)
        if spec.gradient_checkpointing:
            self._checkpoint_activations(module)
        return ShardedModel(module, layers, rows, self._shard, device, bf16=spec.precision == "bf16")

    def _build(self) -> nn.Module:
        spec, names = self._spec, dict[str, str]()
        if self._stage.is_whole:
            module: Any = build_model(spec.model, self._tokenizer.vocab_size, spec.seed, config=self._config)
        else:
            built = build_training_part(self._config, self._part, spec.model.path, spec.seed)
            self._model_part = self._model_part or built
            module, names = built.module, dict(built.names)
        if spec.gradient_checkpointing:
            self._checkpoint_activations(module)
        self._tuning.prepare(module, names)
        return cast(nn.Module, module)

    def _checkpoint_activations(self, module: Any) -> None:
        enable = getattr(module, "activation_checkpointing_enable", None)  # the name from transformers 5.20 on
        try:
            (enable or module.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            text = f"a {self._config.model_type!r} model cannot be trained with device.gradient_checkpointing"
            raise ConfigError(text, remedy="leave it out") from error

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with flushed_denormals(), constant_arithmetic(self._threads) if self.exact else nullcontext():
            yield

    def _moved_to(self) -> None:
        self._is_initial, self._mirrors = False, []

    def _state_arrays(self) -> dict[str, Tensor]:
        return {PARAMETERS: self._flat.parameters, **self._update.shared}

    def _batch(self, windows: Indices) -> _Batch:
        batch = self._corpus.batch(windows)

        def moved(array: Indices) -> Tensor:
            return torch.from_numpy(array).to(self._device, non_blocking=True)

        positions = None if batch.positions is None else moved(batch.positions)
        return _Batch(moved(batch.inputs), moved(batch.targets), positions)

    def _entering(self, batch: _Batch, inputs: Payload | None) -> Tensor:
        """Inputs of the part: token ids (B, T) on the first stage, else hidden states (B, T, width)."""
        if (inputs is None) != self._part.first:
            raise ValueError(f"forward pass of stage {self._stage.stage}: missing or unexpected activations as input")
        return batch.inputs if inputs is None else self._decoded(inputs, self._stage.activations)

    def _through(self, x: Tensor, batch: _Batch) -> Tensor:
        """Hidden states (B, T, width); on the last stage the sum of the losses in nats."""
        kind, positions = self._autocast_dtype, batch.positions
        with nullcontext() if kind is None else torch.autocast(self._device.type, dtype=kind):
            if self._model_part is not None:
                outputs = self._model_part.forward(x, self._positions if positions is None else positions)
            else:
                placed = {} if positions is None else {"position_ids": positions}
                outputs = self._model(input_ids=x, use_cache=False, **placed).logits
        if not self._part.last:
            return outputs
        # (B T, vocab); targets of ``NO_TARGET`` do not count
        return F.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")

    def _run(self, flight: _Flight, inputs: Payload | None) -> Tensor:
        with self._arithmetic(), _out_of_memory_told():
            self._tuning.micro_batch = flight.step, flight.index
            batch = self._batch(self._corpus.training[self._samples(flight.step, flight.index)])
            x = self._entering(batch, inputs)
            entering = None if self._part.first else x.requires_grad_()
            outputs = self._through(x, batch)
        flight.graph = entering, outputs
        return outputs

    def _samples(self, step: int, index: int, count: int = 1) -> Indices:
        """The windows of micro-batches ``range(index, index + count)``, as numbers of training windows."""
        at, sequences = step * self._spec.micro_batches + index, self._spec.micro_batch_sequences
        if self._spec.private:
            first, share = self._share  # the order is this member's own, so its epochs do not depend on the others
            at = step * share + index - first
        return self._sampler.numbered(at * sequences, count * sequences)

    def _targets(self, step: int, index: int, count: int) -> int:
        """Number of targets in the micro-batches of ``_samples``."""
        return int(self._target_counts[self._samples(step, index, count)].sum()) if count else 0

    def _let_go(self) -> None:
        for flight in self._flights.values():
            flight.graph = None

    def _decoded(self, payload: Payload, encoding: str) -> Tensor:
        hidden = decode_untrusted(payload.data, encoding, self.tokens_per_micro_batch, self._config.hidden_size)
        return hidden.view(self._spec.micro_batch_sequences, self._spec.data.sequence_tokens, -1).to(self._device)


def stage_bounds(model: ModelSpec, stages: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Bounds (``StageSpec``) of a model that is not built yet: ``cuts``, or about equally many layers for each stage.

    Raises:
        ConfigError: the model has fewer layers than stages; see also ``model_config``.
    """
    layers = _tokenizer_and_config(model)[1].num_hidden_layers
    if not 1 <= stages <= layers:
        raise ConfigError(f"{layers} layers cannot make {stages} parts", remedy=f"use 1 to {layers} pipeline.stages")
    return (0, *cuts, layers) if cuts else tuple(layers * stage // stages for stage in range(stages + 1))


def _tokenizer_and_config(model: ModelSpec) -> tuple[Tokenizer, PretrainedConfig]:
    tokenizer = Tokenizer.of_bytes() if model.path is None else Tokenizer.of_directory(model.path)
    return tokenizer, model_config(model, tokenizer.vocab_size)


def _payload(hidden: Tensor, encoding: str) -> Payload:
    """Encode hidden states, or their gradient, of shape (B, T, width)."""
    return np.frombuffer(encode(hidden.flatten(0, 1), encoding), np.uint8)


@contextmanager
def _out_of_memory_told() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"a micro-batch does not fit into memory: {str(error).splitlines()[0]}",
            remedy="lower batch.micro_batch_sequences (raise batch.micro_batches), or use device.precision = 'bf16'",
        ) from error


def _blob(name: str, array: Tensor) -> Blob:
    return Blob(name, array.numpy().data.cast("B"))


def _host_copier(gradients: Tensor, host: Tensor, kind: str) -> HostCopier | None:
    """With CUDA: a copier of gradients to pinned memory, on a separate stream, while backward runs."""
    if kind != "cuda":
        return None
    stream = torch.cuda.Stream(gradients.device)  # type: ignore[no-untyped-call]

    def copy(start: int, stop: int) -> torch.cuda.Event:
        # In a hook the current stream is the one on which backward computes this gradient.
        stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(stream):
            host[start:stop].copy_(gradients[start:stop], non_blocking=True)
            landing = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landing.record(stream)
        return landing

    return HostCopier(copy, [stop for _, stop in bucket_bounds(len(gradients), gradients.element_size())])
