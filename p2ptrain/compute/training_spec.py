"""What determines the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.local import LocalSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.tuning import ALL_OF_IT, TuningSpec


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

    @property
    def withholds_losses(self) -> bool:
        """Whether contributions are clipped: then losses would tell about the text."""
        return self.clip_norm > 0 or (self.local is not None and self.local.clip_norm > 0)
