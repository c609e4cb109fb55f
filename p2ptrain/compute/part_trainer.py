"""Training of one part of a model: what a stage of a pipeline computes. It is ``roles.part_engine.PartEngine`` by its
shape, and ``roles.engine.Engine`` but for ``micro_batch`` and ``validate``.

Data. Which text a micro-batch reads is a pure function (``compute.sampling``), so no token travels: the first stage
takes the inputs from its own corpus and the last one the targets from its own. The stages between read no text at all.
What follows from the text (``CorpusFacts``) they are told, and one that has text refuses other facts than its own.

Gradients. The last stage's loss is a micro-batch's mean / M, as in one process; every other stage goes on from the
gradient that it is sent, so nothing is scaled anywhere else. They travel as fp32 or bf16. Seen on a trained model of 8
layers cut at each, their relative error of one hop, and what the seven made of the first layer's gradients: bf16 0.2 %
and 0.2 %, int8 0.7 % and 0.9 %. fp16 errs more than bf16 (0.6 % in the first layer): 4 % of the elements are below
6e-8, where it has no numbers left. What int8 does where a few channels are far larger than the others, as in large
models, was not seen, and there is nothing to make up for what it rounds to zero: it is not offered.

Tied models. First and last stage each have the embedding's matrix, with the gradient of their own use of it. After both
sums (``add_tied_gradient``: a + b is b + a, so the bits are the same) both make the same update of the same weights. In
the global norm the matrix counts once, on the first stage.

Recomputing. With ``recompute`` a micro-batch's inputs are kept, as they came, instead of what autograd keeps, and its
forward pass runs again before its backward pass. Of the latest micro-batch alone the graph is kept until another one
needs the memory: where its backward pass is next, as always on the last stage with 1F1B, nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2ptrain.compute.activations import decode_untrusted, encode
from p2ptrain.compute.buckets import OnFinal
from p2ptrain.compute.checkpoint_files import PARAMETERS
from p2ptrain.compute.data import Corpus, DataSpec, load_corpus
from p2ptrain.compute.device import Device
from p2ptrain.compute.flat import OptimizerSpec, Segment
from p2ptrain.compute.flat_engine import (
    FlatEngine,
    check_context,
    check_run,
    cross_entropy,
    held_out_batches,
    out_of_memory_told,
)
from p2ptrain.compute.model import ModelSpec, model_config
from p2ptrain.compute.part_files import PartFiles
from p2ptrain.compute.sampling import Indices, WindowSampler
from p2ptrain.compute.split_check import check_splits
from p2ptrain.compute.stage import (
    PartBuilder,
    StageSpec,
    check_part_memory,
    even_bounds,
    initial_digest,
    most_in_flight,
)
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.training import FilePlan

Payload = npt.NDArray[np.uint8]
"""Shape (bytes,), contiguous, on the host: activations or gradients of one micro-batch as they travel."""


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """What a stage without text needs to know of it.

    Attributes:
        digest: see ``data.Corpus``.
        windows: to train on.
        validation_batches: how many validation micro-batches there are.
    """

    digest: str
    windows: int
    validation_batches: int


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its forward and its backward pass."""

    step: int
    index: int
    inputs: Payload | None  # to run it again: as they came; none on the first stage, and none where that is not wanted
    graph: tuple[Tensor | None, Tensor] | None  # what went in, where that has a gradient, and what came out


class PartTrainer(FlatEngine):
    """See ``roles.part_engine.PartEngine`` and ``roles.engine.Engine`` for the methods. All block; call them on one
    thread.

    ``apply`` wants the sum of the losses, which only the last stage makes, in ``reduce_buffer[-1]`` of every stage.

    Args:
        micro_batches: in a global batch, M, of all replicas.
        micro_batch_sequences: B.

    Attributes:
        corpus_digest: empty where this stage reads no text and was not told of it.
        windows: 0 there.

    Raises:
        ConfigError, UserError, ResourceError: as ``Trainer``; the architecture does not split.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        data: DataSpec,
        optimizer: OptimizerSpec,
        stage: StageSpec,
        steps: int,
        seed: int,
        micro_batches: int,
        micro_batch_sequences: int,
        validation_batches: int,
        device: Device,
        precision: str = "fp32",
    ) -> None:
        check_run(
            steps=steps,
            micro_batches=micro_batches,
            micro_batch_sequences=micro_batch_sequences,
            validation_batches=validation_batches,
            precision=precision,
        )
        self._tokenizer = Tokenizer.of_bytes() if model.path is None else Tokenizer.of_directory(model.path)
        self._config = model_config(model, self._tokenizer.vocab_size)
        self._part, self._stage = stage.check(self._config.num_hidden_layers), stage
        check_context(self._config, data.sequence_tokens)
        check_splits(self._config)
        tokens = micro_batch_sequences * data.sequence_tokens
        check_part_memory(self._config, self._part, stage, device, micro_batch_tokens=tokens)
        self.in_flight = most_in_flight(
            self._config, self._part, stage, device, micro_batch_tokens=tokens, most=micro_batches
        )
        self._seed, self._data, self._validation_batches = seed, data, validation_batches
        self._directory = model.path
        builder = PartBuilder(self._config, self._part, model.path, seed)
        super().__init__(
            builder,
            optimizer,
            steps=steps,
            micro_batches=micro_batches,
            tokens_per_micro_batch=tokens,
            device=device,
            precision=precision,
            exact=False,
        )
        assert builder.first is not None
        self._model_part = builder.first
        self._sequences, self._sequence_tokens = micro_batch_sequences, data.sequence_tokens
        self._positions = torch.arange(data.sequence_tokens, device=self._device)
        self._flights: dict[int, _Flight] = {}
        self._step = -1
        self.activation_bytes = activation_bytes(stage.activations, tokens, self._model_part.width)
        self.gradient_bytes = activation_bytes(stage.gradients, tokens, self._model_part.width)
        self.layers = (self._part.start, self._part.stop, self._part.layers)
        self._tied = self._tied_segment()
        self._files = PartFiles(
            self._flat,
            self._model_part,
            self._config,
            stage.parts,
            self._tokenizer,
            copied=self._tied if self._part.last else None,
        )
        self._facts: CorpusFacts | None = None
        self._corpus: Corpus | None = None
        self.corpus_digest, self.windows = "", 0
        if self._part.first or self._part.last:
            self._corpus = load_corpus(data, self._tokenizer)
            held_out = held_out_batches(self._corpus, validation_batches, micro_batch_sequences)
            self.told_corpus(CorpusFacts(self._corpus.digest, len(self._corpus.training), held_out))

    # --------------------------------------------------------------------------------------------------------- the text

    @property
    def corpus_facts(self) -> CorpusFacts | None:
        """None where this stage reads no text and was not told of it."""
        return self._facts

    def told_corpus(self, facts: CorpusFacts) -> None:
        """Take over what follows from the text. Raises ``ConfigError`` where this stage knows otherwise."""
        if self._facts not in (None, facts):
            raise ConfigError(
                "this stage's text is not that of another stage",
                remedy="give the same data.path, with the same files, to the workers of the first and the last stage",
            )
        self._facts = facts
        self.corpus_digest, self.windows = facts.digest, facts.windows
        self._sampler = WindowSampler(facts.windows, self._seed, self._micro_batches, self._sequences)

    def read_corpus_facts(self) -> None:
        """On a stage that reads no text: read it this once, for what follows from it. Raises as ``load_corpus``."""
        if self._facts is None:
            corpus = load_corpus(self._data, self._tokenizer)
            held_out = held_out_batches(corpus, self._validation_batches, self._sequences)
            self.told_corpus(CorpusFacts(corpus.digest, len(corpus.training), held_out))

    # ----------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        """Zero the gradients and the loss slot; let go of what a step that was given up has kept."""
        super().begin_step(step)
        self._flights.clear()
        self._step = step

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        """Run micro-batch ``index`` of step ``step`` through the part. On the last stage its loss is added up.

        Args:
            inputs: activations of the stage before, shape (activation_bytes,); None on the first stage.

        Returns:
            activations for the next stage, shape (activation_bytes,); None on the last stage.

        Raises:
            ProtocolError: ``inputs`` are no activations.
            ValueError: out of turn.
        """
        if step != self._step or index in self._flights:
            raise ValueError(
                f"forward of micro-batch {index} of step {step} in step {self._step}, or for a second time"
            )
        if self._stage.recompute:
            self._let_go()
        flight = _Flight(step, index, None, None)
        outputs = self._run(flight, inputs)
        if self._stage.recompute and inputs is not None:
            flight.inputs = inputs.copy()
        self._flights[index] = flight
        if self._part.last:
            self._flat.loss_sum.add_(outputs.detach())
            return None
        return _payload(outputs, self._stage.activations)

    def backward(self, index: int, gradient: Payload | None, on_final: OnFinal | None = None) -> Payload | None:
        """Add the micro-batch's gradients, and let go of what was kept for it.

        Args:
            gradient: of the loss by what ``forward`` made, shape (gradient_bytes,); None on the last stage.
            on_final: given with the step's last one only: see ``Trainer.micro_batch``.

        Returns:
            the gradient by the inputs, shape (gradient_bytes,); None on the first stage.

        Raises:
            ProtocolError: ``gradient`` is none.
            ValueError: out of turn.
        """
        flight = self._flights.get(index)
        if flight is None:
            raise ValueError(f"backward of micro-batch {index} without a forward")
        arrived = None if gradient is None else self._decoded(gradient, self._stage.gradients)
        if (arrived is None) != self._part.last:
            raise ValueError(f"the backward of stage {self._stage.stage} with a gradient of the next stage, or without")
        if flight.graph is None:
            self._let_go()
            self._run(flight, flight.inputs)
        assert flight.graph is not None
        inputs, outputs = flight.graph
        with self._arithmetic(), out_of_memory_told(), self._watch.telling(on_final):
            if arrived is None:
                (outputs / self._micro_batches).backward()  # type: ignore[no-untyped-call]
            else:
                outputs.backward(arrived.to(outputs.dtype))  # type: ignore[no-untyped-call]
        del self._flights[index]
        if inputs is None:
            return None
        assert inputs.grad is not None
        return _payload(inputs.grad, self._stage.gradients)

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Bring what is left of the gradients, and the loss, into ``reduce_buffer``."""
        if self._flights:
            raise ValueError(f"micro-batches {sorted(self._flights)} have had no backward")
        super().finish_gradients(on_final)

    def tied_gradient(self) -> npt.NDArray[np.float32] | None:
        """In ``reduce_buffer``, the gradient of the matrix that first and last stage both have, shape (numel,); None
        where there is none, or it is in one part."""
        if self._tied is None:
            return None
        view: npt.NDArray[np.float32] = self.reduce_buffer[self._tied.offset : self._tied.offset + self._tied.numel]
        return view

    def add_tied_gradient(self, other: npt.NDArray[np.float32]) -> None:
        """Add the other stage's ``tied_gradient``, as it was before this; the same bits on both.

        Raises:
            ValueError: there is none, or it is of another size.
        """
        own = self.tied_gradient()
        if own is None or own.shape != other.shape:
            raise ValueError(f"{len(other)} elements of a tied gradient, to {0 if own is None else len(own)}")
        np.add(own, other, out=own)

    def contributed_square_sum(self, start: int, stop: int) -> float:
        """See ``roles.engine.PipelineEngine``: before the tied gradients are summed, both stages count theirs."""
        return super().partial_square_sum(start, stop)

    def partial_square_sum(self, start: int, stop: int) -> float:
        """As ``Engine``'s; a matrix that the first stage has, too, is counted there."""
        if self._tied is None or self._part.first:
            return super().partial_square_sum(start, stop)
        before = min(stop, self._tied.offset)
        after = max(start, self._tied.offset + self._tied.numel)
        total = super().partial_square_sum(start, before) if start < before else 0.0
        return total + super().partial_square_sum(after, stop) if after < stop else total

    # ------------------------------------------------------------------------------------------------------- validation

    def validation_batches(self) -> int:
        """Number of validation micro-batches; 0 where this stage was not told of the text."""
        return self._facts.validation_batches if self._facts else 0

    def validation_forward(self, index: int, inputs: Payload | None) -> tuple[Payload | None, float]:
        """Run validation micro-batch ``index`` through the part: activations for the next stage, or, on the last stage,
        None and the sum of the losses (nats) over ``tokens_per_micro_batch`` targets. Raises ``ProtocolError``."""
        with torch.no_grad(), self._arithmetic(), out_of_memory_told():
            first = index * self._sequences
            tokens = None
            if self._corpus is not None:
                tokens = self._tokens(self._corpus.validation[first : first + self._sequences])
            outputs = self._through(self._entering(tokens, inputs), tokens, "sum")
        return (None, float(outputs)) if self._part.last else (_payload(outputs, self._stage.activations), 0.0)

    # ------------------------------------------------------------------------------------------------------------ state

    def initial_digest(self) -> bytes:
        """See ``roles.engine.StagedEngine``."""
        return initial_digest(self._config, self._directory, self._seed, self._stage.bounds)

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        """This stage's files of a Hugging Face model directory, and its optimizer beside them, made of ranges of
        ``state()``'s blobs. Raises ``StorageError``: there is no room for temporary files."""
        moments = [name for name in self._state_arrays() if name != PARAMETERS]
        return self._files.of_step(step, moments=moments, corpus=self.corpus_digest)

    def load(self, directory: Path) -> None:
        """Restore this stage's own files, whatever else is in ``directory``. Raises ``StorageError`` where they do not
        fit this part; nothing is changed then."""
        self._restore(directory, self._files.training, self._files.optimizer, self._files.read(directory))

    # ----------------------------------------------------------------------------------------------------------- inside

    def _tied_segment(self) -> Segment | None:
        """Where the matrix lies that another stage has, too."""
        if not self._model_part.tied or self._part.first == self._part.last:
            return None
        model: Any = self._model
        weight = (model.get_input_embeddings() if self._part.first else model.get_output_embeddings()).weight
        name = next(name for name, parameter in self._model.named_parameters() if parameter is weight)
        return next(segment for segment in self._flat.segments if segment.name == name)

    def _tokens(self, windows: Indices) -> Tensor:
        assert self._corpus is not None
        return torch.from_numpy(self._corpus.window_tokens(windows)).to(self._device, non_blocking=True)

    def _entering(self, tokens: Tensor | None, inputs: Payload | None) -> Tensor:
        """What goes into the first layer: ids (B, T), or hidden states (B, T, width) as they arrived."""
        if (inputs is None) != self._part.first:
            raise ValueError(f"the forward of stage {self._stage.stage} with activations of a stage before, or without")
        if inputs is not None:
            return self._decoded(inputs, self._stage.activations)
        assert tokens is not None
        return tokens[:, :-1]

    def _through(self, x: Tensor, tokens: Tensor | None, reduction: str) -> Tensor:
        """Hidden states (B, T, width); on the last stage the loss."""
        with self._autocast():
            outputs = self._model_part.forward(x, self._positions)
        if not self._part.last:
            return outputs
        assert tokens is not None
        return cross_entropy(outputs, tokens[:, 1:], reduction)

    def _run(self, flight: _Flight, inputs: Payload | None) -> Tensor:
        """Forward pass, with its graph."""
        with self._arithmetic(), out_of_memory_told():
            tokens = None
            if self._corpus is not None:
                tokens = self._tokens(self._corpus.training[self._sampler.sample(flight.step, flight.index)])
            x = self._entering(tokens, inputs)
            entering = None if self._part.first else x.requires_grad_()
            outputs = self._through(x, tokens, "mean")
        flight.graph = entering, outputs
        return outputs

    def _let_go(self) -> None:
        """Of graphs that can be made again."""
        for flight in self._flights.values():
            flight.graph = None

    def _decoded(self, payload: Payload, encoding: str) -> Tensor:
        rows = self._sequences * self._sequence_tokens
        hidden = decode_untrusted(payload.data, encoding, rows, self._model_part.width)
        return hidden.view(self._sequences, self._sequence_tokens, -1).to(self._device)


def stage_bounds(model: ModelSpec, stages: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Bounds (``StageSpec``) of a model that is not built yet: at ``cuts``, or ``even_bounds``.

    Raises:
        ConfigError, UserError: see ``even_bounds``, ``model_config``.
    """
    tokenizer = Tokenizer.of_bytes() if model.path is None else Tokenizer.of_directory(model.path)
    config = model_config(model, tokenizer.vocab_size)
    return (0, *cuts, config.num_hidden_layers) if cuts else even_bounds(config, stages)


def _payload(hidden: Tensor, encoding: str) -> Payload:
    """Hidden states, or their gradient, (B, T, width) as they travel."""
    return np.frombuffer(encode(hidden.flatten(0, 1), encoding), np.uint8)
