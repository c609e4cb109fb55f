"""The keys and values of a session in the layers of a part.

transformers' own caches copy their whole content for each token, and drop what is before a sliding window. This cache
allocates all memory when the session opens, writes a token after the last one, and rolls back by moving the end.
Attention gets the same numbers in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

LAYER_CACHES = {DynamicLayer, DynamicSlidingWindowLayer}
"""Kinds of a layer's cache that ``KeyValueCache`` has rollback for."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a layer caches of one position: keys and values, each (heads, width of a head)."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.keys) + math.prod(self.values)


class _Layer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, of shapes (1, heads, positions, head width). It attends to the last ``window``
    positions (None: to all) but keeps all: a rollback needs those before the window again. transformers' own
    ``get_mask_sizes`` makes a mask that fits the result of ``update``."""

    keys: Tensor
    values: Tensor

    def __init__(
        self, shape: CacheShape, positions: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(window or positions)
        self.is_initialized, self.is_sliding = True, window is not None
        self.keys, self.values = (
            torch.zeros(1, heads, positions, width, dtype=dtype, device=device)  # commits the memory
            for heads, width in (shape.keys, shape.values)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.cumulative_length
        stop = before + key_states.shape[-2]
        self.keys[:, :, before:stop], self.values[:, :, before:stop] = key_states, value_states
        self.cumulative_length = stop
        return self.read(max(0, before - self.sliding_window + 1), stop)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]


class KeyValueCache(DynamicCache):
    """Keys and values of one session: ``positions`` positions in each layer of ``config``, a part's configuration."""

    def __init__(
        self,
        config: PretrainedConfig,
        shapes: Sequence[CacheShape],
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config=config)
        self.positions = positions
        self._own = [
            _Layer(shape, positions, getattr(layer, "sliding_window", None), dtype, device)
            for layer, shape in zip(cast("list[Any]", self.layers), shapes, strict=True)
        ]
        self.layers = cast("list[Any]", self._own)

    @property
    def length(self) -> int:
        return self._own[0].cumulative_length

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._own)

    def memory(self, positions: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer's first ``positions`` positions, also of those that are not written yet."""
        return [layer.read(0, positions) for layer in self._own]

    def advance(self, length: int) -> None:
        """Let all layers have the first ``length`` positions, which were written into ``memory``."""
        for layer in self._own:
            layer.cumulative_length = length

    def cut(self, keep: int) -> None:
        """Keep the first ``keep`` positions, or as many as all layers have: after a failed pass some may have more."""
        self.advance(min(keep, *(layer.cumulative_length for layer in self._own)))
