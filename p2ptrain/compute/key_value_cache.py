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


class _Room:
    """Keys and values of one layer, of shapes (1, heads, positions, head width)."""

    def __init__(self, shape: CacheShape, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(heads: int, width: int) -> Tensor:
            return torch.zeros(1, heads, positions, width, dtype=dtype, device=device)  # commits the memory

        self.keys, self.values = zeros(*shape.keys), zeros(*shape.values)

    def write(self, start: int, keys: Tensor, values: Tensor) -> int:
        """Write new positions after the first ``start``. Returns the new number of positions."""
        stop = start + keys.shape[-2]
        self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
        return stop

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]


class _FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    def __init__(self, room: _Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.room = room
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.length = self.room.write(self.length, key_states, value_states)
        return self.room.read(0, self.length)

    def get_seq_length(self) -> int:
        return self.length

    def cut(self, keep: int) -> None:
        self.length = keep


class _WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Attends to the last positions but keeps all: a rollback needs those before the window again. transformers' own
    ``get_mask_sizes`` makes a mask that fits the result of ``update``."""

    def __init__(self, room: _Room, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.is_initialized = True
        self.room = room

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.cumulative_length
        self.cumulative_length = self.room.write(before, key_states, value_states)
        return self.room.read(max(0, before - self.sliding_window + 1), self.cumulative_length)

    def cut(self, keep: int) -> None:
        self.cumulative_length = keep


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
        made: list[_FullLayer | _WindowLayer] = []
        for layer, shape in zip(cast("list[Any]", self.layers), shapes, strict=True):
            room = _Room(shape, positions, dtype, device)
            is_window = type(layer) is DynamicSlidingWindowLayer
            made.append(_WindowLayer(room, layer.sliding_window) if is_window else _FullLayer(room))
        self._own = made
        self.layers = cast("list[Any]", made)

    @property
    def length(self) -> int:
        return self._own[0].get_seq_length()

    @property
    def nbytes(self) -> int:
        return sum(layer.room.keys.nbytes + layer.room.values.nbytes for layer in self._own)

    def memory(self, positions: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer's first ``positions`` positions, also of those that are not written yet."""
        return [layer.room.read(0, positions) for layer in self._own]

    def advance(self, length: int) -> None:
        """Let all layers have the first ``length`` positions, which were written into ``memory``."""
        for layer in self._own:
            layer.cut(length)

    def cut(self, keep: int) -> None:
        """Keep the first ``keep`` positions, or as many as all layers have: after a failed pass some may have more."""
        keep = min(keep, *(layer.get_seq_length() for layer in self._own))
        for layer in self._own:
            layer.cut(keep)
