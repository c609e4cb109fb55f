"""The samples of one micro-batch, as a loop in a test reads them."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.compute.sampling import Indices, WindowSampler


@dataclass(frozen=True, slots=True)
class StepSampler(WindowSampler):
    """Of global batches of ``micro_batches``, with ``sequences`` each."""

    micro_batches: int
    sequences: int

    def sample(self, step: int, micro_batch: int) -> Indices:
        """Window numbers of one micro-batch, shape (sequences,)."""
        return self.numbered((step * self.micro_batches + micro_batch) * self.sequences, self.sequences)
