"""What the parts of a model weigh. Without numpy: a seed has it in memory."""

from __future__ import annotations

from dataclasses import dataclass


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
