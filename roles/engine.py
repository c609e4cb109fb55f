"""The interface between bytes and tensors: what a worker needs from the code that computes, to train and to serve.

``compute.trainer.Trainer`` and ``compute.served_part.ServedPart`` implement it with torch, ``p2ptrain.lab.stand_in``
without. All methods block: they run on the compute thread (``roles.compute_thread``), never on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.serving import PartSpec, Pass, Ran, Sampling
from p2ptrain.core.training import Applied, Blob, FilePlan, OnFinal, SettingsPeriod, TrainingData
from ring.chain import Payload

# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model: number ``index`` of ``count``. If ``count`` is 1, it is the whole model."""

    index: int
    count: int

    @property
    def split(self) -> bool:
        return self.count > 1

    def __str__(self) -> str:
        return f"part {self.index} of {self.count}"


WHOLE = Stage(0, 1)


class Engine(Protocol):
    """A model or a part of it, with optimizer and data, that takes the steps of a job.

    State, checkpoints and ``reduce_buffer`` are those of the part. ``micro_batch`` and ``validate`` work on whole
    models only. For split models the strategy exchanges what other parts need.

    Attributes:
        data: facts about the text.
        state: what heals, and what checkpoints have.
        device: for people, such as ``"cpu (2 threads)"`` or ``"cuda:0 NVIDIA H100"``.
        reduce_buffer: flat host array of the computing dtype, shape (numel + some,): the member's contribution to the
            step, such as gradients, and behind it a few numbers such as the sum of the losses. The ring sums it over
            the members in place. It begins with the front while the rest is still being computed. The engine does not
            change final elements before the next ``begin_step``, because they are kept for a redo.
        scalars: how many numbers are behind the gradients in ``reduce_buffer``.
        codec_numel: the codec encodes so many elements; the few after them (norms, biases, losses) stay plain.
        exact: whether ``reduce_buffer`` is int64 fixed point. Then the bits of all sums, and so of the whole run, do
            not depend on which member computes a micro-batch.
        notices: (level, text) of what the person should know; the worker takes them out.
        pipeline, shards, noise, slots: what only some strategies need; None if this engine lacks it.
    """

    data: TrainingData
    device: str

    @property
    def state(self) -> EngineState: ...
    @property
    def reduce_buffer(self) -> npt.NDArray[Any]: ...
    @property
    def scalars(self) -> int: ...
    @property
    def codec_numel(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def notices(self) -> list[tuple[str, str]]: ...
    @property
    def pipeline(self) -> PipelineEngine | None: ...
    @property
    def shards(self) -> ShardedEngine | None: ...
    @property
    def noise(self) -> NoiseInput | None: ...
    @property
    def slots(self) -> SlotInput | None: ...

    def share_cores(self, workers: int) -> None:
        """Use 1/``workers`` of this machine's cores: so many members of the ring compute on it."""

    def use_settings(self, periods: Sequence[SettingsPeriod]) -> None:
        """Compute each step with the settings of its period. The first period begins at step 0."""

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        """Begin step ``step``, counted from 0: it is the number of steps applied so far. This member's share are the
        micro-batches [``first``, ``first + count``); a ``count`` of -1 is all. Returns whether its contribution does
        not depend on them: then ``finish_gradients`` may come before them."""

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        """Run forward and backward of micro-batch ``index`` of step ``step``; add the gradient of its part of the mean
        over all targets of the global batch, or take an inner step (``compute.local``).

        ``on_final`` is given with the last micro-batch of this member's share.
        """

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Complete the contribution in ``reduce_buffer``. All of it is final when this returns."""

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        """Ranges of ``reduce_buffer`` that the members sum in ``step``, ascending. The other elements are zero."""

    def contributed_square_sum(self, start: int, stop: int) -> float:
        """Sum of squares of this member's own contribution, in the ranges that ``on_final`` reported, without the loss.

        Those of consecutive ranges add up to the whole; one that is measured on a device counts where its piece ends.
        NaN if an element is not finite. If the range includes the loss: also NaN if the loss is not finite, or if a
        value that this member added in this step did not fit into fixed point. So it is called for the last piece
        before the ring gets that piece. For a weight that the first and the last stage of a split model share, each
        counts its own gradient; the norm of the whole counts their sum, on one of them.
        """

    def partial_square_sum(self, start: int, stop: int) -> float:
        """This part's share of the global squared norm: of ``reduce_buffer[start:stop]`` without the loss, NaN as
        above. Independent of thread counts. May be called on any thread."""

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        """Clip by the global norm sqrt(``square_sum``), then take one optimizer step from ``reduce_buffer``.

        Args:
            is_own: it still is this member's own contribution, which a device need not get back.

        Raises:
            JobFailed: the loss or the norm is not finite. Parameters are unchanged. This is a last guard, because
                members refuse such a step in their vote.
        """

    def validate(self, index: int) -> tuple[float, int]:
        """Sum of the losses (nats) and number of targets of a validation micro-batch."""


class EngineState(Protocol):
    """All bytes that later steps depend on: parameters, moments."""

    def blobs(self) -> list[Blob]:
        """The bytes. Names and sizes are equal on every member."""

    def refresh(self, step: int) -> None:
        """Refresh all derived values, after the bytes of ``blobs()`` were replaced by those of ``step``."""

    def load_initial(self) -> None:
        """Load the state of step 0, a pure function of the job's seed and model (or the model directory's weights)."""

    def initial_digest(self) -> bytes:
        """Digest (16 bytes) of the whole initial model, even if this engine holds a part of it. All parts have the same
        digest, different models have different ones: the lineage of step 0 is made from it."""

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        """Plan the files of a checkpoint: a Hugging Face model and the optimizer. They are written from a copy of
        ``blobs()`` at ``step``. Raises ``StorageError``."""

    def load(self, directory: Path) -> None:
        """Load a checkpoint with the files of ``checkpoint_files``. Raises ``StorageError`` if it does not fit."""


class PipelineEngine(Protocol):
    """The passes of a stage. The first stage reads the data, the last one computes the loss.

    Attributes:
        activation_bytes: size of the activations for the next stage, the same on all stages.
        gradient_bytes: size of the gradient for the previous stage, the same on all stages.
        layers: (start, stop, total): it has layers [start, stop) of ``total``.
        in_flight: number of micro-batches between forward and backward that fit into memory; 0: any number.
    """

    activation_bytes: int
    gradient_bytes: int
    layers: tuple[int, int, int]
    in_flight: int

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        """Run micro-batch ``index`` of step ``step`` through the part, and keep what its backward needs.

        Args:
            inputs: activations of the previous stage, shape (activation_bytes,); None on the first stage. The caller
                reuses the buffer after the call, so the engine copies what it needs later.

        Returns:
            activations for the next stage, shape (activation_bytes,), uint8, contiguous, on the host; None on the last
            stage. The engine does not change them before the step ends.

        Raises:
            ProtocolError: ``inputs`` are no activations. The previous stage counts as lost.
        """

    def backward(self, index: int, gradient: Payload | None, on_final: OnFinal | None = None) -> Payload | None:
        """Add the micro-batch's gradients to those of the step, and free what ``forward`` kept.

        Args:
            gradient: of the loss with respect to the result of ``forward``, shape (gradient_bytes,); None on the last
                stage. The caller reuses the buffer, as with ``inputs``.
            on_final: as in ``micro_batch``.

        Returns:
            the gradient with respect to the inputs, under the rules of ``forward``'s result; None on the first stage.

        Raises:
            ProtocolError: ``gradient`` is no gradient. The next stage counts as lost.
        """

    def validation_forward(self, index: int, inputs: Payload | None) -> tuple[Payload | None, float, int]:
        """Run validation micro-batch ``index``. Returns the activations for the next stage; and on the last stage the
        sum of the losses (nats) and the number of targets, else 0. Raises as ``forward``."""

    def tied_gradient(self) -> npt.NDArray[np.float32] | None:
        """The slice of ``reduce_buffer``, shape (numel,), for the weight that the first and the last stage share; None
        on other stages, and if they share none."""


class ShardedEngine(Protocol):
    """The rows of a model that one member of a replica holds. All members of the replica call ``micro_batch`` and
    ``validate`` equally often, at the same time: each call waits for the others, and for the ring of ``connect``."""

    def connect(self, operations: Any) -> None:
        """Exchange rows by ``operations`` from now on (``compute.process_group.Operations``)."""

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None, *, counts: bool = True) -> None:
        """See ``Engine.micro_batch``. ``counts``: whether it adds to the gradients and the loss.

        Raises:
            ConnectionLost: another member of the replica is lost.
        """


class NoiseInput(Protocol):
    """Takes the noise of a job whose members' contributions are clipped (``compute.local``)."""

    def use_noise(self, std: float, key: bytes) -> None:
        """Add noise of this standard deviation, from this secret key, to the next contribution. An empty key: the next
        contribution is zero. Without another call all later ones are, too: no key is used twice."""


class SlotInput(Protocol):
    """Takes this member's slot, if the members' LoRA adapters are averaged exactly (``compute.local.ExactAverage``)."""

    def use_slot(self, slot: int) -> None:
        """Contribute in this slot from now on. Members that take part in the same step have different ones."""


# -------------------------------------------------------------------------------------------------------------- serving


class StageEngine(Protocol):
    """A loaded part of a model, with the caches of its sessions.

    Attributes:
        width: elements of the hidden state of one position.
        vocab_size: token ids are below it.
        encoding: default encoding of hidden states on the wire: the dtype in which the model computes.
        weights_bytes: size of the part's weights.
        cache_position_bytes: size of the keys and values of one position.
        device: for people.
        is_batched: whether passes of several sessions are computed together.
        free_positions: positions in blocks that no session has. Some may be remembered for sessions that begin alike.
    """

    width: int
    vocab_size: int
    encoding: str
    weights_bytes: int
    cache_position_bytes: int
    device: str

    @property
    def is_batched(self) -> bool: ...
    @property
    def free_positions(self) -> int: ...

    def reserve(self, positions: int) -> None:
        """Have memory for so many positions of all sessions together; it may be called again with more. ``open``
        allocates none, and passes may be ``Preempted``. Raises ``ResourceError``."""

    def open(
        self,
        session: str,
        *,
        positions: int,
        sampling: Sampling,
        block_hashes: Sequence[bytes] = (),
        adapter: str = "",
        order: float = 0.0,
    ) -> int:
        """Begin a session of at most ``positions`` positions. Raises ``UserError`` if the model supports fewer, or
        fewer are reserved.

        Args:
            block_hashes: of the text's blocks, as of ``p2ptrain.core.serving.hash_blocks``.
            adapter: name of one of the engine's adapters; empty: the model itself. Sessions of several do not share
                blocks.
            order: sessions of a lower one are preempted later, whenever they were opened.

        Returns:
            number of positions that the session has already, because other sessions computed these blocks.
        """

    def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        """Compute a pass of each of these sessions, in one batch where the model allows it.

        The error of a pass does not concern the others; its session is as before, or is cut to ``keep``, if not more is
        said:

            ProtocolError: ``keep`` is beyond the history, a token id is not in the vocabulary, the session would become
                too long, or the payload is malformed.
            Preempted: there is no memory for its new positions; the session has none any more.
            JobFailed: hidden states or logits are not finite.
            ResourceError: the device is out of memory, or scores need more than it has.
        """

    def close(self, session: str) -> None:
        """Forget a session and its cache. An unknown session is ignored."""


class PartBuilder(Protocol):
    """A part that is being loaded. Its tensors come one at a time, in any order, so memory holds only the part.

    Attributes:
        wanted: name in the model's files → shape, of every tensor of the part.
        weights_bytes: size in the dtype of the computation; at least that of the finished engine.
        cache_position_bytes: as in ``StageEngine``.
    """

    wanted: Mapping[str, tuple[int, ...]]
    weights_bytes: int
    cache_position_bytes: int

    def place(self, name: str, dtype: str, data: memoryview) -> None:
        """Copy a tensor in. ``data``: its bytes in safetensors' ``dtype`` (``F32``, ``BF16``, ...). Raises
        ``ConfigError`` if the dtype cannot be used."""

    def finish(self) -> StageEngine:
        """Return the loaded part. Raises ``ConfigError`` if a tensor is missing, or the architecture cannot be split
        (``compute.split_check.check_splits``)."""


BuildPart = Callable[[PartSpec, tuple[str, ...]], PartBuilder]
"""Arguments: the part, and the names of all tensors in the model's files. Raises ``ConfigError`` if the architecture
cannot be split, ``ResourceError`` if memory is too small."""
