"""What training a model in stages costs: memory, arithmetic and bytes. Pure.

A model is described by its sizes alone, so that a seed can place it without torch, numpy, or its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.footprint import (
    GPIPE,
    ModelSizes,
    copies,
    head_kept_bytes,
    in_flight_that_fit,
    layer_kept_bytes,
    least_in_flight,
    part_training_bytes,
)
from wire.schema import Bound, Record

MAX_LAYERS = 1024


def achieved(width: int) -> float:
    """Fraction of the speed of a plain matrix product that a micro-batch achieves. Measured: 0.70 at a width of 1,024,
    0.61 at 512 and 0.29 at 128, on one thread of a CPU in fp32."""
    return 0.88 * width / (width + 260)


_Size = Annotated[int, Bound(0, 1 << 50)]
_Entries = Annotated[int, Bound(1, 1 << 24)]  # more than any model's vocabulary or width


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class CandidateWorker:
    """A worker that may train a stage.

    Attributes:
        memory_bytes: that it offers; 0: unknown.
        flops: measured multiplications and additions per second; 0: unknown.
        on_host: it computes on a CPU.
        host, host_flops: workers of one host share its cores, which achieve so much together; 0: they do not.
    """

    id: str
    name: str
    memory_bytes: int = 0
    flops: float = 0.0
    on_host: bool = True
    host: str = ""
    host_flops: float = 0.0


@dataclass(frozen=True)
class Training:
    """What to train, and how.

    Attributes:
        tokens, sequence_tokens: of a micro-batch, and of one sequence of it.
        micro_batches: of a step, of all replicas.
        schedule, activations, recompute, max_in_flight: see ``[pipeline]`` of a profile.
        cuts: if already chosen; else empty.
        trained, held: see ``core.footprint.copies``.
    """

    shape: ModelShape
    stages: int
    replicas: int
    tokens: int
    sequence_tokens: int
    micro_batches: int
    schedule: str = "1f1b"
    activations: str = "fp32"
    recompute: bool = False
    max_in_flight: int = 0
    cuts: tuple[int, ...] = ()
    trained: float = 1.0
    held: float = 0.0

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

    @cached_property
    def layer_kept_bytes(self) -> int:
        return layer_kept_bytes(self.tokens, width=self.shape.width, inner=self.shape.inner)

    @cached_property
    def head_kept_bytes(self) -> int:
        return head_kept_bytes(self.tokens, vocab=self.shape.vocab)

    def in_flight(self, stage: int) -> int:
        return least_in_flight(self.schedule, self.micro_batches, self.stages - stage, self.max_in_flight)

    def kept_bytes(self, start: int, stop: int) -> int:
        return (stop - start) * self.layer_kept_bytes + self.head_kept_bytes * (stop == self.layers)

    def copies(self, *, on_host: bool) -> float:
        return copies(on_host=on_host, trained=self.trained, held=self.held)

    def need_bytes(self, stage: int, start: int, stop: int, *, on_host: bool = True) -> int:
        return part_training_bytes(
            int(self.copies(on_host=on_host) * self.sizes.weights_bytes(start, stop)),
            self.kept_bytes(start, stop),
            self.activation_bytes if start else 0,
            in_flight=self.in_flight(stage),
            recompute=self.recompute,
        )

    def fits(self, candidate: CandidateWorker, stage: int, bounds: Sequence[int]) -> bool:
        """Whether a worker has the memory for a stage with layers [bounds[stage], bounds[stage + 1])."""
        need_bytes = self.need_bytes(stage, bounds[stage], bounds[stage + 1], on_host=candidate.on_host)
        return not candidate.memory_bytes or need_bytes <= candidate.memory_bytes

    def most_in_flight(self, stage: int, start: int, stop: int, candidate: CandidateWorker) -> int:
        most = min(self.max_in_flight, self.micro_batches) or self.micro_batches
        if not candidate.memory_bytes:
            return most
        held_bytes = int(self.copies(on_host=candidate.on_host) * self.sizes.weights_bytes(start, stop))
        return in_flight_that_fit(
            candidate.memory_bytes - held_bytes,
            self.kept_bytes(start, stop),
            self.activation_bytes if start else 0,
            recompute=self.recompute,
            most=most,
        )

    def passes(self, stop: int) -> int:
        """Cost of a micro-batch, in forward passes, at the stage that ends there; see ``ring.planning.pipeline``."""
        again = self.recompute and (stop < self.layers or self.schedule == GPIPE)
        return 4 if again else 3

    def layer_flop(self, layer: int) -> float:
        """FLOPs of a micro-batch's forward pass: two per weight and token, and attention's own products."""
        weights = self.sizes.layers_bytes[layer] / 4
        return self.tokens * (2 * weights + 4 * self.sequence_tokens * self.shape.width)

    @property
    def head_flop(self) -> float:
        return 2.0 * self.tokens * self.shape.vocab * self.shape.width

    def flop(self, start: int, stop: int) -> float:
        forward = sum(self.layer_flop(layer) for layer in range(start, stop))
        return self.passes(stop) * (forward + self.head_flop * (stop == self.layers))

    def compute_s(self, start: int, stop: int, flops: float) -> float:
        return self.flop(start, stop) / (achieved(self.shape.width) * flops)
