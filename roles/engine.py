"""The seam between bytes and tensors: what a worker needs of whatever computes, for training and for serving.

``compute.trainer.Trainer`` and ``compute.served_part.ServedPart`` are the real ones; ``roles.stand_in`` trains without
torch. All methods block and are called on one dedicated compute thread (``roles.compute_thread``), never on the event
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.core.serving import PartSpec, Pass, Ran, Sampling
from p2ptrain.core.training import Applied, Blob, FilePlan
from ring.chain import Payload

__all__ = [
    "WHOLE", "Applied", "Blob", "BuildPart", "Engine", "OnFinal", "PartBuilder", "PartEngine", "PartSpec", "Pass",
    "Payload", "PipelineEngine", "Ran", "Sampling", "Stage", "StageEngine",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class Stage:
    """Which part of a model somebody holds: number ``index`` of ``count``; all of it where that is one."""

    index: int
    count: int

    @property
    def split(self) -> bool:
        return self.count > 1

    def __str__(self) -> str:
        return f"stage {self.index} of {self.count}"


WHOLE = Stage(0, 1)

OnFinal = Callable[[int], None]
"""Elements [0, given) of ``reduce_buffer`` are final in this step: the ring may have them. Called on any thread, once a
parameter or so, with numbers that do not fall."""


class Engine(Protocol):
    """A model or a part of it, with optimizer and data, ready to train.

    State, checkpoints and ``reduce_buffer`` are those of the part. What cannot be computed without the other parts is
    the strategy's affair: ``micro_batch`` and ``validate`` are of whole models.

    Attributes:
        corpus_digest: SHA-256 of the tokenized corpus, hex; members of a job must agree on it.
        tokens_per_micro_batch: targets in one micro-batch.
        device: for people, such as ``"cpu (2 threads)"`` or ``"cuda:0 NVIDIA H100"``.
        reduce_buffer: flat host array of the computing dtype, shape (numel + 1,): the gradients, then one slot for the
            sum of the micro-batches' losses. Reduced in place by the ring (sum over members), its front while the rest
            is still being computed. The engine leaves what it called final alone until the next ``begin_step``: it is
            the redo buffer.
        exact_from: elements from here on (norms, biases, the loss) are few, and travel as they are whatever the codec.
        exact: ``reduce_buffer`` is int64 fixed point, so its sums, hence the whole run, have the same bits whoever
            computes which micro-batch.
        windows: training sequences in the corpus.
    """

    corpus_digest: str
    tokens_per_micro_batch: int
    device: str
    reduce_buffer: npt.NDArray[Any]
    exact_from: int
    exact: bool
    windows: int

    def share_cores(self, workers: int) -> None:
        """So many members of the ring compute on this machine: take this one's part of its cores."""

    def begin_step(self, step: int) -> None:
        """Zero the gradients. ``step`` counts from 0: it is the number of steps applied so far."""

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        """Forward and backward of micro-batch ``index`` of step ``step``; adds its mean loss' gradient / M.

        M is the number of micro-batches in a global batch, whoever computes them. ``on_final`` is given with the last
        one of this member's share.
        """

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Bring the gradients and the loss into ``reduce_buffer``; when it returns all of that is final."""

    def partial_square_sum(self, start: int, stop: int) -> float:
        """Sum of squares, in fp64, of ``reduce_buffer[start:stop]`` without the loss slot; the same for any threads.

        NaN where one of them is not finite. Where the loss slot is among them, also where that is not, or where what
        this member added in this step did not fit into fixed point: so it is asked before the ring has the last piece.
        """

    def apply(self, step: int, square_sum: float) -> Applied:
        """Clip by the global norm sqrt(``square_sum``), then one optimizer step from ``reduce_buffer``.

        Raises:
            JobFailed: the loss or the norm is not finite; parameters are unchanged. A last guard: members refuse such a
                step when they vote.
        """

    def validate(self, first: int, count: int) -> tuple[float, int]:
        """Sum of the losses (nats) and number of targets over validation micro-batches [first, first + count)."""

    def validation_batches(self) -> int:
        """Number of validation micro-batches, the same on every member."""

    def state(self) -> list[Blob]:
        """Every byte that decides the future of the run: parameters, moments. Same names and sizes on every member."""

    def load_initial(self) -> None:
        """The state of step 0: a pure function of the job's seed and model (or the model directory's weights)."""

    def initial_digest(self) -> bytes:
        """A digest of the whole initial model, of which ``load_initial`` has loaded a part: equal for all parts, and
        for equal initial models only, because the lineage of step 0 is made of it. 16 bytes."""

    def state_loaded(self, step: int) -> None:
        """The bytes of ``state()`` were replaced by those of ``step``: refresh whatever derives from them."""

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        """A checkpoint of ``step``, to be written from a copy of ``state()`` at that step: a Hugging Face model, and
        the optimizer. Raises ``StorageError``."""

    def load(self, directory: Path) -> None:
        """Restore a checkpoint that was so written. Raises ``StorageError`` where it does not fit this model."""


class PartEngine(Protocol):
    """The passes of a part of a model. The first stage brings the data, the last one keeps the loss.

    Attributes:
        activation_bytes: of what ``forward`` makes for the next stage, the same on all stages.
        gradient_bytes: of what ``backward`` makes for the stage before, the same on all stages.
    """

    activation_bytes: int
    gradient_bytes: int

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        """Run micro-batch ``index`` of step ``step`` through the part, and keep what its backward needs.

        Args:
            inputs: activations of the stage before, shape (activation_bytes,); None on the first stage. They are the
                caller's, who changes them when this has returned: what is needed later is copied.

        Returns:
            activations for the next stage, shape (activation_bytes,), uint8, contiguous, on the host; None on the last
            stage. They are the caller's until the step is over: nobody changes them before.

        Raises:
            ProtocolError: ``inputs`` are no activations. The stage before counts as lost.
        """

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        """Add the micro-batch's gradients to those of the step, and let go of what was kept for it.

        Args:
            gradient: of the loss by what ``forward`` made, shape (gradient_bytes,); None on the last stage. The
                caller's, as ``inputs``.

        Returns:
            the gradient by the inputs, as ``forward`` returns activations; None on the first stage.

        Raises:
            ProtocolError: ``gradient`` is none. The next stage counts as lost.
        """


class PipelineEngine(Engine, PartEngine, Protocol):
    """A part whose micro-batches are passes of activations and gradients.

    Attributes:
        layers: it has layers [first, second) of so many as the third says.
        in_flight: micro-batches between their forward and their backward pass that it has memory for; 0: any number.
    """

    layers: tuple[int, int, int]
    in_flight: int

    def backward(self, index: int, gradient: Payload | None, on_final: OnFinal | None = None) -> Payload | None:
        """See ``PartEngine``. ``on_final``: given with the last one of this member's share, as in ``micro_batch``."""

    def validation_forward(self, index: int, inputs: Payload | None) -> tuple[Payload | None, float]:
        """Validation micro-batch ``index``: activations for the next stage, and, on the last stage, the sum of the
        losses (nats) over its targets, else 0. Raises ``ProtocolError``: ``inputs`` are no activations."""

    def contributed_square_sum(self, start: int, stop: int) -> float:
        """As ``partial_square_sum``, of what this member brings to the sum: of what the first and the last stage both
        have each brings its own gradient, while the whole's norm counts their sum once, on one of them."""

    def tied_gradient(self) -> npt.NDArray[np.float32] | None:
        """In ``reduce_buffer``, the gradient of what the first and the last stage both have, shape (numel,); None on
        other stages, and where there is nothing of that kind."""


# -------------------------------------------------------------------------------------------------------------- serving


class StageEngine(Protocol):
    """A part of a model, loaded, with the caches of its sessions.

    Attributes:
        width: elements of the hidden state of one position.
        vocab_size: token ids are below it.
        encoding: that of hidden states on the wire when nobody asks for another: what the model computes in.
        weights_bytes: of the part.
        cache_position_bytes: of keys and values that one position takes.
        device: for people.
    """

    spec: PartSpec
    width: int
    vocab_size: int
    encoding: str
    weights_bytes: int
    cache_position_bytes: int
    device: str

    def open(self, session: str, *, positions: int, sampling: Sampling) -> None:
        """Begin a session of at most ``positions`` positions. Raises ``UserError`` where the model knows fewer."""

    def run(self, session: str, work: Pass) -> Ran:
        """Compute what ``work`` says.

        Raises:
            ProtocolError: ``keep`` is beyond the history, a token id is none of the vocabulary's, the session would
                be longer than it was opened for, or the payload is not what it should be.
        """

    def close(self, session: str) -> None:
        """Forget a session, its cache included; none of that name is fine."""


class PartBuilder(Protocol):
    """A part on its way: its tensors come one at a time, in any order, so that no more than it is ever in memory.

    Attributes:
        wanted: every tensor that the part owns, by its name in the model's files, with its shape.
        weights_bytes: of the part, as it computes with them: no less than the engine's will be.
        cache_position_bytes: as the engine's.
    """

    wanted: Mapping[str, tuple[int, ...]]
    weights_bytes: int
    cache_position_bytes: int

    def place(self, name: str, dtype: str, data: memoryview) -> None:
        """Take a tensor over: ``data`` are its bytes in safetensors' ``dtype`` (``F32``, ``BF16``, ...), copied before
        this returns. Raises ``ConfigError`` where the dtype cannot be used."""

    def finish(self) -> StageEngine:
        """The part, ready. Raises ``ConfigError`` where a tensor is missing, or where the architecture is none that
        splits (``compute.split.check_splits``)."""


BuildPart = Callable[[PartSpec, tuple[str, ...]], PartBuilder]
"""From what is wanted, and the names of all tensors in the model's files. Raises ``ConfigError`` (an architecture that
does not split), ``ResourceError`` (too little memory)."""
