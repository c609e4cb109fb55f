"""The memory that training a part of a model takes, from its sizes alone: what the worker that builds it checks, and
what the seed places it by. Standard library only.

Counted per parameter, in fp32 (``compute.flat``): the weight, the gradient and two moments, where the model computes.
On a CPU the gradient is the reduce buffer, and a clipped copy of it is made; with an accelerator that copy is not
needed, and the host has the buffer instead. Beside that, what is kept of each micro-batch in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_COPIES = 5
DEVICE_COPIES = 4
"""How often a part's weights are held where it computes: on a CPU, on an accelerator."""
GPIPE = "gpipe"


def layer_kept_bytes(tokens: int, *, width: int, inner: int) -> int:
    """Of a micro-batch of so many tokens, from a layer's forward pass to its backward pass: about 16 times its width,
    and 3 times that of its feed-forward part. A lower bound: attention comes on top."""
    return 4 * tokens * (16 * width + 3 * inner)


def head_kept_bytes(tokens: int, *, vocab: int) -> int:
    """The same of the head: the logits, their softmax and its gradient."""
    return 12 * tokens * vocab


def least_in_flight(schedule: str, micro_batches: int, to_end: int, most: int) -> int:
    """Micro-batches that a stage must have memory for.

    Args:
        schedule: ``1f1b`` or ``gpipe``.
        micro_batches: of a step.
        to_end: stages from this one to the last, both counted.
        most: what a person allows; 0: what the schedule asks for.
    """
    return min(most, micro_batches) or (micro_batches if schedule == GPIPE else min(to_end, micro_batches))


def part_training_bytes(
    weights_bytes: int, kept_bytes: int, inputs_bytes: int, *, in_flight: int, recompute: bool, on_host: bool
) -> int:
    """What training a part takes where it computes.

    Args:
        weights_bytes: in fp32.
        kept_bytes: of one micro-batch: of the part's layers, and of the head where it has that.
        inputs_bytes: of one micro-batch, as they came from the stage before; 0 on the first.
        in_flight: micro-batches between their forward and their backward pass. With ``recompute`` all is kept of one,
            and the inputs of all.
        on_host: it computes on a CPU.
    """
    held = weights_bytes * (HOST_COPIES if on_host else DEVICE_COPIES)
    return held + (kept_bytes + in_flight * inputs_bytes if recompute else in_flight * kept_bytes)


def in_flight_that_fit(memory_bytes: int, kept_bytes: int, inputs_bytes: int, *, recompute: bool, most: int) -> int:
    """Micro-batches that fit into the memory that the weights leave: 1 at least, ``most`` at most. Arguments as of
    ``part_training_bytes``."""
    each = inputs_bytes if recompute else kept_bytes
    return max(1, min(most, (memory_bytes - (kept_bytes if recompute else 0)) // each)) if each else most


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model's parts weigh.

    Attributes:
        layers_bytes: weights of each layer.
        cache_bytes: of each layer, the KV cache of one position.
        first_bytes: what the first stage holds besides layers: the embedding.
        last_bytes: what the last stage holds besides layers: norm and head, be the head's matrix the embedding or not.
        tied_bytes: of ``last_bytes``, what the first stage holds as well. A peer that is both holds it once.
    """

    layers_bytes: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    first_bytes: int = 0
    last_bytes: int = 0
    tied_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.layers_bytes or len(self.cache_bytes) != len(self.layers_bytes):
            raise ValueError("a model has layers, and each of them a size of its cache")
        if min(*self.layers_bytes, *self.cache_bytes, self.first_bytes, self.last_bytes, self.tied_bytes) < 0:
            raise ValueError("sizes are not negative")
        if self.tied_bytes > min(self.first_bytes, self.last_bytes):
            raise ValueError("what is tied is part of both ends")

    @property
    def layers(self) -> int:
        return len(self.layers_bytes)

    def weights_bytes(self, start: int, stop: int) -> int:
        """What a stage with layers [start, stop) holds."""
        size_bytes = sum(self.layers_bytes[start:stop])
        if start == 0:
            size_bytes += self.first_bytes
        if stop == self.layers:
            size_bytes += self.last_bytes - (self.tied_bytes if start == 0 else 0)
        return size_bytes

    def streamed_bytes(self, start: int, stop: int) -> int:
        """What such a stage reads of its weights for one token."""
        return sum(self.layers_bytes[start:stop]) + (self.last_bytes if stop == self.layers else 0)
