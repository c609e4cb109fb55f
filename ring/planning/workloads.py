"""What a stage of a model costs, in training and in serving: memory, arithmetic and bytes. Pure.

A *stage* is layers [start, stop) of the model. A model is described by its sizes alone, so that a seed can place it
without torch, numpy, or its files. The memory formulas are those of ``p2ptrain.core.footprint``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.footprint import (
    ModelSizes,
    copies,
    in_flight_that_fit,
    kept_moments,
    layers_kept_bytes,
    part_training_bytes,
)
from ring.planning.measurements import CandidateWorker, Edges, Links
from wire.schema import Bound, Record

MAX_LAYERS = 1024


def achieved(width: int) -> float:
    """Fraction of the speed of a plain matrix product that a micro-batch achieves. Measured: 0.70 at a width of 1,024,
    0.61 at 512 and 0.29 at 128, on one thread of a CPU in fp32."""
    return 0.88 * width / (width + 260)


_Size = Annotated[int, Bound(0, 1 << 50)]
_Entries = Annotated[int, Bound(1, 1 << 24)]  # more than any model's vocabulary or width


class ModelShape(Record):
    """The sizes of a model that placing its training needs.

    Attributes:
        layers_bytes, first_bytes, last_bytes, tied_bytes: of its weights in fp32, as in ``ModelSizes``.
        width, inner: of a hidden state, and of a feed-forward layer.
    """

    layers_bytes: Annotated[tuple[Annotated[int, Bound(1, 1 << 50)], ...], Bound(1, MAX_LAYERS)]
    first_bytes: _Size
    last_bytes: _Size
    tied_bytes: _Size
    width: _Entries
    inner: _Entries
    vocab: _Entries

    @classmethod
    def of(cls, sizes: ModelSizes, width: int, inner: int, vocab: int) -> ModelShape:
        ends = sizes.first_bytes, sizes.last_bytes, sizes.tied_bytes
        return cls(sizes.layers_bytes, *ends, width, inner, vocab)

    def check(self) -> None:
        if self.tied_bytes > min(self.first_bytes, self.last_bytes):
            raise ProtocolError("tied_bytes must not exceed first_bytes or last_bytes")

    @property
    def sizes(self) -> ModelSizes:
        """The sizes without a cache."""
        no_cache = (0,) * len(self.layers_bytes)
        return ModelSizes(self.layers_bytes, no_cache, self.first_bytes, self.last_bytes, self.tied_bytes)


@dataclass(frozen=True)
class TrainingWorkload:
    """What to train, and how.

    Attributes:
        tokens, sequence_tokens: of a micro-batch, and of one sequence of it.
        micro_batches: of a step, of all replicas.
        activations, recompute: see ``[pipeline]`` of a profile.
        cuts: if already chosen; else empty.
        trained, held: see ``core.footprint.copies``.
        optimizer, precision: their names in the profile.
    """

    shape: ModelShape
    stages: int
    replicas: int
    tokens: int
    sequence_tokens: int
    micro_batches: int
    activations: str = "fp32"
    recompute: bool = False
    cuts: tuple[int, ...] = ()
    trained: float = 1.0
    held: float = 0.0
    optimizer: str = "adamw"
    precision: str = "fp32"

    @cached_property
    def sizes(self) -> ModelSizes:
        return self.shape.sizes

    @property
    def layers(self) -> int:
        return self.sizes.layers

    @property
    def workers(self) -> int:
        return self.stages * self.replicas

    @cached_property
    def activation_bytes(self) -> int:
        return activation_bytes(self.activations, self.tokens, self.shape.width)

    @cached_property
    def gradient_bytes(self) -> int:
        return activation_bytes("fp32" if self.activations == "fp32" else "bf16", self.tokens, self.shape.width)

    def in_flight(self, stage: int) -> int:
        """Micro-batches that a stage must have memory for: as many as there are stages from it to the last one."""
        return min(self.stages - stage, self.micro_batches)

    def held_bytes(self, start: int, stop: int, *, on_host: bool) -> int:
        """Memory of the weights, gradients and moments of a stage."""
        moments = self.kept_moments(start, stop)
        shares = {"trained": self.trained, "held": self.held, "moments": moments}
        factor = copies(on_host=on_host, precision=self.precision, **shares)
        return int(factor * self.sizes.weights_bytes(start, stop))

    def kept_moments(self, start: int, stop: int) -> float:
        """Arrays that the optimizer keeps of a stage, see ``core.footprint``. With LoRA only matrices train."""
        layers_bytes, weights_bytes = sum(self.sizes.layers_bytes[start:stop]), self.sizes.weights_bytes(start, stop)
        return kept_moments(self.optimizer, 1.0 if self.held else layers_bytes / weights_bytes)

    def trained_bytes(self, start: int, stop: int) -> int:
        """Bytes of what trains of a stage's weights; its gradients have as many."""
        return int(self.trained * self.sizes.weights_bytes(start, stop))

    def kept_bytes(self, start: int, stop: int, *, layers_kept: bool = True) -> int:
        """Memory that a stage keeps for a micro-batch's backward pass."""
        shape, vocab = self.shape, self.shape.vocab if stop == self.layers else 0
        kinds = {"width": shape.width, "inner": shape.inner, "vocab": vocab}
        return layers_kept_bytes(stop - start, self.tokens, **kinds, layers_kept=layers_kept)

    def inputs_bytes(self, start: int) -> int:
        return self.activation_bytes if start else 0

    def need_bytes(self, stage: int, start: int, stop: int, *, on_host: bool = True) -> int:
        return part_training_bytes(
            self.held_bytes(start, stop, on_host=on_host),
            self.kept_bytes(start, stop),
            self.inputs_bytes(start),
            in_flight=self.in_flight(stage),
            recompute=self.recompute,
        )

    def fits(self, candidate: CandidateWorker, stage: int, bounds: Sequence[int]) -> bool:
        """Whether a worker has the memory for a stage with layers [bounds[stage], bounds[stage + 1])."""
        need_bytes = self.need_bytes(stage, bounds[stage], bounds[stage + 1], on_host=candidate.on_host)
        return need_bytes <= candidate.memory_bytes

    def most_in_flight(self, start: int, stop: int, candidate: CandidateWorker) -> int:
        """Micro-batches for which a worker has the memory; 0: any number."""
        if math.isinf(candidate.memory_bytes):
            return 0
        return in_flight_that_fit(
            int(candidate.memory_bytes) - self.held_bytes(start, stop, on_host=candidate.on_host),
            self.kept_bytes(start, stop),
            self.inputs_bytes(start),
            recompute=self.recompute,
            most=self.micro_batches,
        )

    def passes(self, stop: int) -> int:
        """Cost of a micro-batch at the stage that ends there, in forward passes: a backward pass costs two of them. A
        stage that recomputes makes one more; the last stage recomputes nothing."""
        return 4 if self.recompute and stop < self.layers else 3

    def compute_s(self, start: int, stop: int, flops: float) -> float:
        """Seconds of a micro-batch at a stage: two FLOPs per weight and token, attention's own products, the head."""
        weights = sum(self.sizes.layers_bytes[start:stop]) / 4
        attention = 4 * self.sequence_tokens * self.shape.width * (stop - start)
        head = 2 * self.shape.vocab * self.shape.width if stop == self.layers else 0
        forward_flop = self.tokens * (2 * weights + attention + head)
        return self.passes(stop) * forward_flop / (achieved(self.shape.width) * flops)


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """A model to serve, and the links to use. To decode a token a stage streams the weights of its layers once. The
    last stage also streams the norm and the head; of an embedding only a row is read.

    Attributes:
        positions: cache positions, of all sessions together.
        activation_bytes: of one position, as sent from stage to stage.
        client: peer id of the client, which sends and gets the tokens and holds no stage.
        links: (from, to), ids of peers and client → measurement.
        apart: (from, to) if ``from`` cannot dial ``to``. A peer that the client cannot dial holds no stage.
    """

    sizes: ModelSizes
    positions: int
    activation_bytes: int
    client: str
    links: Links
    apart: Edges = frozenset()

    def cache_bytes(self, start: int, stop: int) -> int:
        return self.positions * sum(self.sizes.cache_bytes[start:stop])

    def need_bytes(self, start: int, stop: int) -> int:
        return self.sizes.weights_bytes(start, stop) + self.cache_bytes(start, stop)

    def compute_s(self, start: int, stop: int, byte_s: float) -> float:
        """Seconds of a token at a stage, on a worker that streams a byte in ``byte_s``."""
        return byte_s * self.sizes.streamed_bytes(start, stop)
