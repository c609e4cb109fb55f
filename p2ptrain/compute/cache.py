"""Keys and values of a part's layers: room for all positions from the start, and any number of them taken back.

transformers' own caches grow by copying all that they hold for each token, and forget what lies before a sliding
window. Here the memory that a session was promised is there when it begins, a token is written behind the last one, and
taking positions back moves an end. What attention sees are the same numbers in the same order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class _Room:
    """Keys and values of one layer, each of shape (batch, heads, positions, width of a head)."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._keys = torch.zeros(shape, dtype=dtype, device=device)  # not empty(): so that the memory is really there
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._positions = shape[2]

    def write(self, start: int, keys: Tensor, values: Tensor) -> int:
        """Put new positions behind the first ``start``; returns how many there are now."""
        stop = start + keys.shape[-2]
        if stop > self._positions:
            raise ValueError(f"a cache of {self._positions} positions cannot hold {stop}")
        self._keys[:, :, start:stop], self._values[:, :, start:stop] = keys, values
        return stop

    def seen(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._keys[:, :, start:stop], self._values[:, :, start:stop]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes


class _FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """All positions are seen."""

    def __init__(self, room: _Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.room = room
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.length = self.room.write(self.length, key_states, value_states)
        return self.room.seen(0, self.length)

    def get_seq_length(self) -> int:
        return self.length

    def cut(self, keep: int) -> None:
        self.length = keep


class _WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """The last positions are seen, and all are kept: those before the window are needed again when some are taken
    back. ``get_mask_sizes`` is transformers' own; it tells the mask of what ``update`` gives."""

    def __init__(self, room: _Room, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.is_initialized = True
        self.room = room

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.cumulative_length
        self.cumulative_length = self.room.write(before, key_states, value_states)
        return self.room.seen(max(0, before - self.sliding_window + 1), self.cumulative_length)

    def cut(self, keep: int) -> None:
        self.cumulative_length = keep


class PartCache(DynamicCache):
    """The cache of one session: room for ``positions`` in each layer of ``config``, which is a part's.

    Raises:
        TypeError: a layer keeps a state of another kind, from which nothing can be taken back.
    """

    def __init__(
        self, config: PretrainedConfig, positions: int, dtype: torch.dtype, device: torch.device, *, batch: int = 1
    ) -> None:
        super().__init__(config=config)
        shape = (batch, *kv_shape(config, positions))
        self.positions = positions
        self.layers = [self._with_room(layer, _Room(shape, dtype, device)) for layer in self.layers]

    @property
    def length(self) -> int:
        """Positions that it holds now."""
        return int(self.layers[0].get_seq_length())  # type: ignore[union-attr]

    @property
    def nbytes(self) -> int:
        return sum(layer.room.nbytes for layer in self._own())

    def cut(self, keep: int) -> None:
        """Keep the first ``keep`` positions.

        Raises:
            ValueError: a layer has fewer.
        """
        layers = self._own()
        fewest = min(layer.get_seq_length() for layer in layers)
        if not 0 <= keep <= fewest:
            raise ValueError(f"cannot keep {keep} of {fewest} positions")
        for layer in layers:
            layer.cut(keep)

    def cut_to_at_most(self, keep: int) -> None:
        """Make all layers equally long again, and no longer than ``keep``: after a forward pass that failed."""
        shortest = min(layer.get_seq_length() for layer in self._own())
        self.cut(min(keep, shortest))

    def _own(self) -> list[_FullLayer | _WindowLayer]:
        return cast("list[_FullLayer | _WindowLayer]", self.layers)

    @staticmethod
    def _with_room(layer: object, room: _Room) -> _FullLayer | _WindowLayer:
        if type(layer) is DynamicLayer:
            return _FullLayer(room)
        if type(layer) is DynamicSlidingWindowLayer:
            return _WindowLayer(room, layer.sliding_window)
        raise TypeError(f"its state ({type(layer).__name__}) cannot be taken back")


def kv_shape(config: PretrainedConfig, positions: int) -> tuple[int, int, int]:
    """Heads, positions, and width of a head, of the keys of one layer. Of the values, too, in what splits."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, positions, width
