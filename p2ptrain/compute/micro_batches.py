"""The micro-batches of a job's steps: which windows of the corpus they have, as tensors on the computing device.

A pure function (``compute.sampling``) decides which text a micro-batch reads, so no token is sent between stages: the
first stage takes the inputs from its own corpus, the last stage the targets from its own. Each member counts the
targets of the whole step in its own corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from p2ptrain.compute.data import NO_TARGET, Corpus, load_corpus
from p2ptrain.compute.recipe import ModelRecipe
from p2ptrain.compute.sampling import Indices, WindowSampler


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """``compute.data.TokenBatch`` on the device: inputs, targets and positions (B, T)."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None


class MicroBatchReader:
    """The text of a member. See the module's docstring.

    Args:
        processes: processes that compute a round of micro-batches at the same time (``compute.island``).

    Attributes:
        corpus: the member's text.
        sampler: the order of its training windows.
        validation_count: micro-batches of a validation.
        first, count: this member's share of the step: micro-batches [``first``, ``first + count``).

    Raises:
        ConfigError, UserError, ResourceError: see ``load_corpus``, ``ModelRecipe.check_corpus``.
    """

    def __init__(self, recipe: ModelRecipe, processes: int = 1) -> None:
        self._spec, self._device, self._processes = recipe.spec, recipe.device.torch_device, processes
        spec = recipe.spec
        self.corpus: Corpus = load_corpus(spec.data, recipe.tokenizer, recipe.config.vocab_size)
        recipe.check_corpus(self.corpus)
        training, sequences = self.corpus.training, spec.micro_batch_sequences
        self.validation_count = min(spec.validation_batches, -(-len(self.corpus.validation) // sequences))
        self._target_counts = self.corpus.target_counts()[training]
        self.sampler = WindowSampler(len(training), spec.seed)
        self._drawn: set[int] = set()  # sequences of this step that ``draws_again`` was asked for
        self.first, self.count = 0, spec.micro_batches

    @property
    def digest(self) -> str:
        """Digest of the text; empty if it is private."""
        return "" if self._spec.private else self.corpus.digest

    def begin_step(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._drawn.clear()

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
        return int(self._target_counts[self.window_numbers(step, index, count)].sum()) if count else 0

    def training_batch(self, step: int, index: int) -> DeviceBatch:
        return self.batch(self.corpus.training[self.window_numbers(step, index)])

    def validation_batch(self, index: int) -> DeviceBatch:
        sequences = self._spec.micro_batch_sequences
        windows = self.corpus.validation[index * sequences : (index + 1) * sequences]
        batch = self.batch(np.resize(windows, sequences))
        if len(windows) < sequences:  # the last one; repeated windows do not count
            batch = replace(batch, targets=batch.targets.clone())
            batch.targets[len(windows) :] = NO_TARGET
        return batch

    def batch(self, windows: Indices) -> DeviceBatch:
        batch = self.corpus.batch(windows)
        positions = None if batch.positions is None else self._on_device(batch.positions)
        return DeviceBatch(self._on_device(batch.inputs), self._on_device(batch.targets), positions)

    def _on_device(self, array: Indices) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def window_numbers(self, step: int, index: int, count: int = 1) -> Indices:
        """The windows of micro-batches ``range(index, index + count)``, as numbers of training windows."""
        at, sequences = step * self._spec.micro_batches + index, self._spec.micro_batch_sequences
        if self._spec.private:  # the order is this member's own, so its epochs do not depend on the others
            at = step * self.count + index - self.first
        return self.sampler.numbered(at * sequences, count * sequences)
