"""The real engine: a model, its optimizer and its data behind ``roles.engine.Engine``.

``compute.flat_engine`` has what does not depend on whether the model is whole.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from p2ptrain.compute.buckets import OnFinal
from p2ptrain.compute.checkpoint_files import OPTIMIZER_FILE, PARAMETERS, TRAINING_FILE, CheckpointFiles
from p2ptrain.compute.data import DataSpec, load_corpus
from p2ptrain.compute.device import Device
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.flat_engine import (
    FlatEngine,
    check_context,
    check_run,
    cross_entropy,
    held_out_batches,
    out_of_memory_told,
)
from p2ptrain.compute.model import ModelSpec, build_model, check_training_memory, load_model, model_config
from p2ptrain.compute.sampling import Indices, WindowSampler
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.training import FilePlan


class Trainer(FlatEngine):
    """See ``roles.engine.Engine`` for the methods. All block; call them on one thread.

    Args:
        steps: of the whole run; the learning rate's schedule ends there.
        seed: of the initial weights and of the samples' order.
        micro_batches: in a global batch, M, whoever computes them.
        micro_batch_sequences: B; its shape never depends on the cluster.
        validation_batches: at most; fewer where less text is held out.
        precision: ``fp32``, or ``bf16`` for autocast (weights, gradients and moments stay fp32).
        exact: the same bits whoever computes which micro-batch. Kernels of a CPU get ``device.threads``, which must be
            the same at all members, or one thread, never as many as there are cores.

    Raises:
        ConfigError, UserError, ResourceError: see ``model_config``, ``load_corpus``, ``check_training_memory``.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        data: DataSpec,
        optimizer: OptimizerSpec,
        steps: int,
        seed: int,
        micro_batches: int,
        micro_batch_sequences: int,
        validation_batches: int,
        device: Device,
        precision: str = "fp32",
        exact: bool = False,
    ) -> None:
        check_run(
            steps=steps,
            micro_batches=micro_batches,
            micro_batch_sequences=micro_batch_sequences,
            validation_batches=validation_batches,
            precision=precision,
        )
        self._tokenizer = Tokenizer.of_bytes() if model.path is None else Tokenizer.of_directory(model.path)
        config = model_config(model, self._tokenizer.vocab_size)
        check_context(config, data.sequence_tokens)
        micro_batch_tokens = micro_batch_sequences * data.sequence_tokens
        check_training_memory(config, device, micro_batch_tokens=micro_batch_tokens, exact=exact)
        self._corpus = load_corpus(data, self._tokenizer)
        super().__init__(
            partial(build_model, model, self._tokenizer.vocab_size, seed, config=config),
            optimizer,
            steps=steps,
            micro_batches=micro_batches,
            tokens_per_micro_batch=micro_batch_tokens,
            device=device,
            precision=precision,
            exact=exact,
        )
        self._sequences = micro_batch_sequences
        self._sampler = WindowSampler(len(self._corpus.training), seed, micro_batches, micro_batch_sequences)
        self._validation_batches = held_out_batches(self._corpus, validation_batches, micro_batch_sequences)
        self._files: CheckpointFiles | None = None
        self.corpus_digest = self._corpus.digest
        self.windows = len(self._corpus.training)

    # ---------------------------------------------------------------------------------------------------------- a step

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        """Forward and backward of one micro-batch; adds its mean loss' gradient / M.

        Args:
            on_final: given with the last one only: called on the way with how much of the buffer's front is final.
        """
        windows = self._corpus.training[self._sampler.sample(step, index)]
        if self._fixed is not None:
            self._fixed.begin_micro_batch()
        with self._arithmetic(), out_of_memory_told():
            loss = self._loss(windows, "mean")
            with self._watch.telling(on_final):
                (loss / self._micro_batches).backward()  # type: ignore[no-untyped-call]
        if self._fixed is not None:
            self._flat.loss_sum.copy_(loss.detach() / self._micro_batches)
            self._fixed.add(self._flat.numel + 1)
        else:
            self._flat.loss_sum.add_(loss.detach())

    # ------------------------------------------------------------------------------------------------------ validation

    def validation_batches(self) -> int:
        """Number of validation micro-batches, the same on every member."""
        return self._validation_batches

    def validate(self, first: int, count: int) -> tuple[float, int]:
        """Sum of the losses (nats) and number of targets over validation micro-batches ``range(first, first +
        count)``."""
        losses, targets = 0.0, 0
        with torch.no_grad(), self._arithmetic(), out_of_memory_told():
            for index in range(first, min(first + count, self._validation_batches)):
                windows = self._corpus.validation[index * self._sequences : (index + 1) * self._sequences]
                losses += float(self._loss(windows, "sum"))
                targets += self.tokens_per_micro_batch
        return losses, targets

    # ----------------------------------------------------------------------------------------------------------- state

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        """A Hugging Face model directory, and the optimizer beside it, made of ranges of ``state()``'s blobs.

        Raises:
            StorageError: there is no room for temporary files.
        """
        if self._files is None:
            moments = [name for name in self._state_arrays() if name != PARAMETERS]
            self._files = CheckpointFiles(self._flat, self._tokenizer, moments=moments, corpus=self.corpus_digest)
        return self._files.of_step(step)

    def load(self, directory: Path) -> None:
        """Restore a checkpoint. Raises ``StorageError`` where it does not fit this model; nothing is changed then."""
        self._restore(directory, TRAINING_FILE, OPTIMIZER_FILE, lambda: dict(load_model(directory).named_parameters()))

    # ---------------------------------------------------------------------------------------------------------- inside

    def _loss(self, windows: Indices, reduction: str) -> Tensor:
        """Cross entropy in nats over the targets of ``windows`` (B,): their mean or their sum."""
        tokens = torch.from_numpy(self._corpus.window_tokens(windows)).to(self._device, non_blocking=True)
        with self._autocast():
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits  # (B, T, vocabulary)
        return cross_entropy(logits, tokens[:, 1:], reduction)
