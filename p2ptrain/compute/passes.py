"""The micro-batches of a job's steps: their text, and their passes through a member's part of the model.

Text. A pure function (``compute.sampling``) decides which text a micro-batch reads, so no token is sent between stages:
the first stage takes the inputs from its own corpus, the last stage the targets from its own. Each member counts the
targets of the whole step in its own corpus.

Gradients between stages. The last stage divides the loss as in one process. Every other stage continues from the
gradient that it receives and scales nothing. The gradients are sent as fp32 or bf16. With bf16, and a cut at each of
eight layers, the error in the first layer is 0.2 %. int8 gave 0.9 %; fp16 cannot represent 4 % of the elements.

Divisors. A step's loss, and its gradient, is the mean over all targets of the global batch. With conversations
micro-batches have different numbers of targets, and each member divides by those of the whole step. If the text is
private, it divides by as many as could be, and the members sum the share that theirs are of it (``SummedGradients``).

Recomputing. With ``StageSpec.recompute`` a stage keeps the inputs of a micro-batch, as they were received, instead of
autograd's graph, and repeats the forward pass before the backward pass. Only the latest micro-batch keeps its graph,
until another forward pass needs the memory. If its backward pass comes next, as always on the last stage with 1F1B,
nothing is computed twice.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from p2ptrain.compute.activations import decode_untrusted, encode
from p2ptrain.compute.attention import TrainingAttention, takes_bounds
from p2ptrain.compute.data import NO_TARGET, Corpus, load_corpus
from p2ptrain.compute.device import translate_out_of_memory
from p2ptrain.compute.fsdp import translate_lost_members
from p2ptrain.compute.preferences import counted_pairs, preference_loss, sequence_log_probs
from p2ptrain.compute.recipe import BuiltPart, ModelRecipe
from p2ptrain.compute.reduce_buffer import ReduceBuffer
from p2ptrain.compute.sampling import Indices, WindowSampler
from p2ptrain.compute.split_check import check_packs
from p2ptrain.compute.token_store import OnProgress, no_progress
from p2ptrain.compute.update import StepUpdate
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.training import OnFinal

PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "bf16-weights": torch.bfloat16}
"""The dtype of matrix products, by ``device.precision``; None: that of the weights, fp32."""
Payload = npt.NDArray[np.uint8]
"""Encoded activations or gradients of one micro-batch: shape (bytes,), contiguous, on the host."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """``compute.data.TokenBatch`` on the device: inputs, targets and positions (B, T).

    Attributes:
        bounds: of the conversations among all B T positions, int32: the start of each, and then B T, repeated so that
            compiled code meets few shapes. None without positions.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None
    bounds: Tensor | None = None


class MicroBatchReader:
    """The text of a member.

    Args:
        processes: processes that compute a round of micro-batches at the same time (``compute.island``).

    Attributes:
        corpus: the member's text.
        sampler: the order of its training windows.
        validation_count: micro-batches of a validation.
        first, count: this member's share of the step: micro-batches [``first``, ``first + count``).

    Raises:
        ConfigError, UserError, ResourceError: see ``load_corpus``, ``check_packs``.
    """

    def __init__(self, recipe: ModelRecipe, processes: int = 1, on_progress: OnProgress = no_progress) -> None:
        self._spec, self._device, self._processes = recipe.spec, recipe.device, processes
        spec, self._tokenizer, vocab = recipe.spec, recipe.tokenizer, recipe.config.vocab_size
        self.corpus: Corpus = load_corpus(spec.data, self._tokenizer, vocab, on_progress=on_progress)
        if self.corpus.marks is not None and not spec.is_preference:
            check_packs(recipe.config, split=not recipe.stage.is_whole)
        training, sequences = self.corpus.training, spec.micro_batch_sequences
        self.validation_count = min(spec.validation_batches, -(-len(self.corpus.validation) // sequences))
        self.sampler = WindowSampler(len(training), spec.seed)
        self._drawn: set[int] = set()  # sequences of this step that ``draws_again`` was asked for
        self.first, self.count = 0, spec.micro_batches
        self._ahead: dict[tuple[int, int], DeviceBatch] = {}  # by step and index; at most one

    @property
    def digest(self) -> str:
        """Digest of the text. If that is private, of a new model's tokenizer (``model.tokenizer``), else empty."""
        if self._spec.data.private:
            return self._tokenizer.digest if self._spec.model.tokenizer else ""
        return self.corpus.digest

    def begin_step(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._drawn.clear()
        self._ahead.clear()

    def draws_again(self, step: int, index: int) -> bool:
        """Whether an earlier micro-batch of this step, which is one sequence, was the same: it is where two epochs
        meet, or the text is short."""
        (window,) = self.window_numbers(step, index).tolist()
        is_repeated = window in self._drawn
        self._drawn.add(window)
        return is_repeated

    def round_of(self, index: int) -> tuple[int, int]:
        """The micro-batches (first, count) that are computed at the same time as micro-batch ``index``."""
        start = index - (index - self.first) % self._processes
        return start, max(1, min(self._processes, self.first + self.count - start))

    def targets(self, step: int, index: int, count: int) -> int:
        """Number of targets in micro-batches ``range(index, index + count)``."""
        return self.corpus.target_count(self.corpus.training[self.window_numbers(step, index, count)]) if count else 0

    def training_batch(self, step: int, index: int) -> DeviceBatch:
        ahead = self._ahead.pop((step, index), None)
        return ahead or self.batch(self.corpus.training[self.window_numbers(step, index)])

    def read_ahead(self, step: int, index: int) -> None:
        """Read what this process computes after micro-batch ``index``, while the device computes that. A CPU would
        only do it earlier."""
        following = index + self._processes
        if self._device.kind != "cpu" and following < self.first + self.count:
            self._ahead = {(step, following): self.training_batch(step, following)}

    def validation_batch(self, index: int) -> DeviceBatch:
        sequences = self._spec.micro_batch_sequences
        windows = self.corpus.validation[index * sequences : (index + 1) * sequences]
        batch = self.batch(np.resize(windows, sequences))
        if len(windows) < sequences:  # the last one; repeated windows do not count
            batch, rows = replace(batch, targets=batch.targets.clone()), len(batch.targets) // sequences
            batch.targets[rows * len(windows) :] = NO_TARGET
        return batch

    def batch(self, windows: Indices) -> DeviceBatch:
        batch = self.corpus.batch(windows)
        inputs, targets = self._on_device(batch.inputs), self._on_device(batch.targets)
        if batch.positions is None:
            return DeviceBatch(inputs, targets, None)
        starts = np.flatnonzero(batch.positions == 0)
        bounds = np.full((1 << (len(starts) - 1).bit_length()) + 1, batch.positions.size, np.int32)
        bounds[: len(starts)] = starts
        return DeviceBatch(inputs, targets, self._on_device(batch.positions), self._on_device(bounds))

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.kind == "cuda":  # a copy from memory that is not pinned waits for what the device has queued
            tensor = tensor.contiguous().pin_memory()
        return tensor.to(self._device.torch_device, non_blocking=True)

    def window_numbers(self, step: int, index: int, count: int = 1) -> Indices:
        """The windows of micro-batches ``range(index, index + count)``, as numbers of training windows."""
        at, sequences = step * self._spec.micro_batches + index, self._spec.micro_batch_sequences
        if self._spec.data.private:
            # The order is this member's own: as long as its share is the same, an epoch has each sequence once.
            at = step * self.count + index - self.first
        return self.sampler.numbered(at * sequences, count * sequences)


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its forward and its backward pass."""

    step: int
    index: int
    inputs: Payload | None  # for recomputing, still encoded; None on the first stage or without recomputing
    graph: tuple[Tensor | None, Tensor] | None  # (inputs, None on the first stage; outputs)


class Passes:
    """The passes of a step. ``roles.engine.PipelineEngine`` documents the methods and attributes."""

    def __init__(
        self, recipe: ModelRecipe, built: BuiltPart, batches: MicroBatchReader, update: StepUpdate, buffer: ReduceBuffer
    ) -> None:
        self._recipe, self._built, self._batches, self._update, self._buffer = recipe, built, batches, update, buffer
        self._flights: dict[int, _Flight] = {}
        self._divisor = 1
        stage, tokens, width = recipe.stage, recipe.spec.micro_batch_tokens, recipe.config.hidden_size
        device, window = recipe.device.torch_device, recipe.spec.data.sequence_tokens
        self._positions = torch.arange(window, device=device)
        by_bounds = takes_bounds(device, window, bf16=PRECISIONS[recipe.spec.precision] is not None)
        module = built.flat.model if built.stage is None else built.stage.module
        self._attention = TrainingAttention(module, by_bounds=by_bounds)
        self.activation_bytes = activation_bytes(stage.activations, tokens, width)
        self.gradient_bytes = activation_bytes(stage.gradients, tokens, width)
        self.layers = (recipe.part.start, recipe.part.stop, recipe.part.layers)
        self.in_flight = recipe.in_flight
        self.tied_gradient = buffer.tied_gradient
        self.recompute = stage.recompute

    @property
    def _device(self) -> torch.device:
        return self._recipe.device.torch_device

    def begin_step(self, step: int) -> None:
        """Drop what an aborted step left. Call after ``StepUpdate.begin_step`` and ``MicroBatchReader.begin_step``."""
        self._flights.clear()
        spec, batches = self._recipe.spec, self._batches
        if spec.data.private:
            self._divisor = spec.micro_batches * spec.micro_batch_tokens
            targets = batches.targets(step, batches.first, batches.count)
            self._built.flat.gradients[-2] = targets / self._divisor
        else:
            self._divisor = batches.targets(step, 0, spec.micro_batches)

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        if self.recompute:
            self._drop_graphs()
        flight = _Flight(step, index, None, None)
        outputs = self._run(flight, inputs)
        if self.recompute and inputs is not None:
            flight.inputs = inputs.copy()
        self._flights[index] = flight
        self._batches.read_ahead(step, index)
        return None if self._recipe.part.last else _payload(outputs, self._recipe.stage.activations)

    def backward(
        self, index: int, gradient: Payload | None, on_final: OnFinal | None = None, *, counts: bool = True
    ) -> Payload | None:
        """The last stage adds its loss to the loss slot. ``counts``: whether it adds to the gradients and the loss."""
        flight, stage = self._flights[index], self._recipe.stage
        arrived = None if gradient is None else self._decode(gradient, stage.gradients)
        if flight.graph is None:
            self._drop_graphs()
            self._run(flight, flight.inputs)
        assert flight.graph is not None
        inputs, outputs = flight.graph
        self._recipe.tuning.draw_masks((flight.step, flight.index), self._device)  # for layers that are computed again
        first, number = self._batches.round_of(index)
        tokens, divisor = self._recipe.spec.micro_batch_tokens, self._divisor
        if not self._update.adds_up:
            divisor = self._batches.targets(flight.step, first, number)
        with self._recipe.arithmetic(), _memory_errors(), self._buffer.filling(on_final):
            if arrived is not None:
                outputs.backward(arrived.to(outputs.dtype))  # type: ignore[no-untyped-call]
            else:
                if counts:
                    loss = outputs.detach() / (divisor if self._update.adds_up else tokens)
                    self._built.flat.loss_sum.add_(loss.to(self._built.flat.loss_sum.device))  # with offload the host's
                # Divided by infinity all gradients are 0.
                (outputs / (divisor if counts else math.inf)).backward()  # type: ignore[no-untyped-call]
        self._update.after_backward(number, divisor / tokens)
        del self._flights[index]
        if inputs is None:
            return None
        assert inputs.grad is not None
        return _payload(inputs.grad, stage.gradients)

    def validation_forward(self, index: int, inputs: Payload | None) -> tuple[Payload | None, float, int]:
        self._recipe.tuning.draw_masks(None, self._device)
        with torch.no_grad(), self._recipe.arithmetic(), _memory_errors(), translate_lost_members():
            batch = self._batches.validation_batch(index)
            outputs = self.compute(self._entering(batch, inputs), batch)
        if not self._recipe.part.last:
            return _payload(outputs, self._recipe.stage.activations), 0.0, 0
        counted = counted_pairs(batch.targets) if self._recipe.spec.is_preference else batch.targets != NO_TARGET
        return None, float(outputs), int(counted.sum())

    def _run(self, flight: _Flight, inputs: Payload | None) -> Tensor:
        with self._recipe.arithmetic(), _memory_errors():
            self._recipe.tuning.draw_masks((flight.step, flight.index), self._device)
            batch = self._batches.training_batch(flight.step, flight.index)
            x = self._entering(batch, inputs)
            entering = None if self._recipe.part.first else x.requires_grad_()
            outputs = self.compute(x, batch)
        flight.graph = entering, outputs
        return outputs

    def _entering(self, batch: DeviceBatch, inputs: Payload | None) -> Tensor:
        """Inputs of the part: token ids (B, T) on the first stage, else hidden states (B, T, width)."""
        return batch.inputs if inputs is None else self._decode(inputs, self._recipe.stage.activations)

    def compute(self, x: Tensor, batch: DeviceBatch) -> Tensor:
        """Compute the part's layers of ``x``: hidden states (B, T, width); on the last stage the sum of the losses in
        nats."""
        spec, tuning = self._recipe.spec, self._recipe.tuning
        if not spec.is_preference:
            outputs = self._forward(x, batch)
            return self._loss(outputs, batch.targets) if self._recipe.part.last else outputs
        with torch.no_grad(), tuning.without_adapters(self._built.flat.model):
            reference = sequence_log_probs(self._forward(x, batch), batch.targets)
        log_probs = sequence_log_probs(self._forward(x, batch), batch.targets)
        return preference_loss(log_probs, reference, counted_pairs(batch.targets), spec.beta)

    def _forward(self, x: Tensor, batch: DeviceBatch) -> Tensor:
        """Hidden states (B, T, width); on the last stage logits (B, T, vocab)."""
        built, positions = self._built, batch.positions
        apart = self._attention.arguments(positions, batch.bounds)
        # FSDP2 casts the parameters itself.
        is_mixed = self._recipe.spec.precision == "bf16" and self._recipe.shard is None
        with torch.autocast(self._device.type, dtype=torch.bfloat16) if is_mixed else nullcontext():
            if built.stage is not None:
                return built.stage.forward(x, self._positions if positions is None else positions, **apart)
            placed = apart if positions is None else {"position_ids": positions, **apart}
            return cast(Tensor, built.flat.model(input_ids=x, use_cache=False, **placed).logits)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of logits (B, T, vocab)."""
        logits, targets = outputs.flatten(0, 1).float(), targets.flatten()
        if not torch.is_grad_enabled():  # a validation
            return F.cross_entropy(logits, targets, reduction="sum")
        spec = self._recipe.spec.optimizer
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=spec.label_smoothing)
        if spec.z_loss:  # PaLM, arXiv 2204.02311; targets of ``NO_TARGET`` do not count
            loss += spec.z_loss * (logits.logsumexp(-1).square() * (targets != NO_TARGET)).sum()
        return loss

    def _drop_graphs(self) -> None:
        for flight in self._flights.values():
            flight.graph = None

    def _decode(self, payload: Payload, encoding: str) -> Tensor:
        spec = self._recipe.spec
        width, dtype = self._recipe.config.hidden_size, spec.weights_dtype
        hidden = decode_untrusted(payload.data, encoding, spec.micro_batch_tokens, width, dtype)
        shaped = hidden.view(spec.micro_batch_sequences, spec.data.sequence_tokens, -1)
        return shaped.to(self._device)


def _payload(hidden: Tensor, encoding: str) -> Payload:
    """Encode hidden states, or their gradient, of shape (B, T, width)."""
    return np.frombuffer(encode(hidden.flatten(0, 1), encoding), np.uint8)


def _memory_errors() -> AbstractContextManager[None]:
    remedy = "lower batch.micro_batch_sequences (raise batch.micro_batches), or use device.precision = 'bf16'"
    return translate_out_of_memory("a micro-batch", remedy)
