"""The keys and values of all sessions in the layers of a part, and the passes that read and write them.

Each layer has one tensor of keys and one of values, in blocks of ``BLOCK_POSITIONS`` positions
(``compute.blocks.BlockPool``). A pass computes the new positions, the rows, of one session or of many. Three caches, in
terms of transformers, are the same memory in a pass:

    SessionCache  one session, of any model: transformers makes the mask.
    BatchCache    many sessions: ``attend`` is the model's attention, which computes each session by itself.
    PaddedCache   many sessions that have few rows each, in one call on copies of their keys, as suits a GPU.

The result of a row of ``BatchCache`` depends on its session alone. On a CPU, attention's sums depend on how many
queries and keys of a session a call has, also on masked keys. So a call has the rows of one block, a multiple of
``QUERIES`` queries, with the keys up to the block's end; beside them only blocks of other sessions that have as many of
both. Masked keys are zeros, or finite numbers of positions that were cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor
from transformers import AttentionInterface, Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from p2ptrain.core.serving import BLOCK_POSITIONS

LAYER_CACHES = {DynamicLayer, DynamicSlidingWindowLayer}
"""Kinds of a layer's cache that can be rolled back here."""
NAME = "p2ptrain-batch"
"""Of ``attend_rows`` among transformers' implementations of attention. It has no masks there, so transformers makes
none."""
QUERIES = 8
"""Calls of a CPU's attention with a multiple of so many queries compute each of them alike; twice as many where heads
are wider than ``WIDE``."""
WIDE = 128


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a layer caches of one position: keys and values, each (heads, width of a head)."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.keys) + math.prod(self.values)

    @property
    def is_latent(self) -> bool:
        """Whether the layer makes the keys and values of all positions from what it caches, in each pass."""
        return self.keys[1] != self.values[1]


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of a session in a pass: positions [``start``, ``stop``). ``table``: its blocks up to ``stop``."""

    table: Sequence[int]
    start: int
    stop: int

    def slots(self, start: int, stop: int) -> Tensor:
        """Where the memory has the positions [``start``, ``stop``), int64."""
        positions = torch.arange(start, stop)
        return torch.tensor(self.table)[positions // BLOCK_POSITIONS] * BLOCK_POSITIONS + positions % BLOCK_POSITIONS

    @property
    def extent(self) -> int:
        """Positions of the whole blocks."""
        return len(self.table) * BLOCK_POSITIONS

    @property
    def is_adjacent(self) -> bool:
        return list(self.table) == list(range(self.table[0], self.table[0] + len(self.table)))


class KeyValueMemory:
    """Keys and values of each layer of ``config``, a part's configuration: tensors (positions, heads, head width).

    Attributes:
        windows: by layer, the last positions that a position attends to, itself included; None: to all.
        positions: number of positions that there is memory for, a multiple of ``BLOCK_POSITIONS``.
    """

    def __init__(
        self, config: PretrainedConfig, shapes: Sequence[CacheShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.shapes, self.device, self.positions = config, shapes, device, 0
        layers = cast("list[Any]", DynamicCache(config=config).layers) if shapes else []
        self.windows: list[int | None] = [getattr(layer, "sliding_window", None) for layer in layers]
        empty = [[torch.zeros(0, *each, dtype=dtype, device=device) for each in (s.keys, s.values)] for s in shapes]
        self.layers: list[tuple[Tensor, Tensor]] = [(keys, values) for keys, values in empty]

    def grow(self, positions: int) -> None:
        """Allocate memory for so many positions. Those that it had keep their content."""
        for index, layer in enumerate(self.layers):
            keys, values = (tensor.new_zeros(positions, *tensor.shape[1:]) for tensor in layer)
            for new, tensor in zip((keys, values), layer, strict=True):
                new[: self.positions] = tensor[: self.positions]  # it has more after memory ran out for a later layer
            self.layers[index] = keys, values
        self.positions = positions

    def begin(self, block: int, source: int, count: int) -> None:
        """Set the first ``count`` positions of a block to those of ``source``, and the others to zero."""
        to, first = block * BLOCK_POSITIONS, source * BLOCK_POSITIONS
        for tensor in (tensor for layer in self.layers for tensor in layer):
            tensor[to : to + count] = tensor[first : first + count]
        self.clear(block, count)

    def clear(self, block: int, start: int) -> None:
        """Set the positions of a block from ``start`` to zero."""
        for tensor in (tensor for layer in self.layers for tensor in layer):
            tensor[block * BLOCK_POSITIONS + start : (block + 1) * BLOCK_POSITIONS].zero_()


# ---------------------------------------------------------------------------------------------------------- one session


class _Layer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """One layer of one session. It attends to the last ``window`` positions (None: to all) but keeps all: a rollback
    needs those before the window again. transformers' own ``get_mask_sizes`` makes a mask that fits ``update``."""

    def __init__(self, memory: tuple[Tensor, Tensor], slots: Tensor, start: int, window: int | None) -> None:
        super().__init__(window or len(slots))
        self.is_initialized, self.is_sliding, self.cumulative_length = True, window is not None, start
        self._memory, self._slots = memory, slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = self.cumulative_length
        self.cumulative_length = before + key_states.shape[-2]
        write(self._memory, self._slots[before : self.cumulative_length], key_states, value_states)
        read = self._slots[max(0, before - self.sliding_window + 1) : self.cumulative_length]
        keys, values = (tensor.index_select(0, read).transpose(0, 1)[None] for tensor in self._memory)
        return keys, values


class SessionCache(DynamicCache):
    """The rows of one session, as transformers computes them."""

    def __init__(self, memory: KeyValueMemory, rows: SessionRows) -> None:
        super().__init__(config=memory.config)
        slots = rows.slots(0, rows.stop).to(memory.device)
        both = zip(memory.layers, memory.windows, strict=True)
        self.layers: list[Any] = [_Layer(layer, slots, rows.start, window) for layer, window in both]


def write(memory: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values (1, heads, T, width) at ``slots`` (T,)."""
    for tensor, new in zip(memory, (keys, values), strict=True):
        tensor.index_copy_(0, slots, new[0].transpose(0, 1))


# -------------------------------------------------------------------------------------------------------- many sessions


def attend_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: BatchCache | PaddedCache,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of ``attend``: queries (1, heads, T, width), and what ``update`` returned."""
    attended = rows.attend(module.layer_idx, query[0], key[0], value[0], _Scores(scaling, softcap))
    return attended.transpose(0, 1)[None], None


AttentionInterface.register(NAME, attend_rows)


def attend_in_batches(module: Any) -> None:
    """Let the layers of a part attend to the rows of many sessions from now on."""
    for part in module.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = NAME


@dataclass(frozen=True, slots=True)
class _Scores:
    scaling: float | None
    softcap: float | None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of queries, keys and values (B, heads, length, width), with ``mask`` added to the scores."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
        scale = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = self.softcap * torch.tanh(query @ keys.transpose(-1, -2) * (scale / self.softcap))
        return (scores + mask).softmax(-1, dtype=torch.float32).to(query.dtype) @ values


class _RowsCache(Cache):
    """Gives each layer the memory, or a copy of what its sessions have there, if the layer expands that."""

    def __init__(self, memory: KeyValueMemory, slots: Tensor, read: Tensor, start: int) -> None:
        super().__init__(layers=[])
        self._memory, self._slots, self._read, self._start = memory, slots, read, start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self._memory.layers[layer_idx]
        write(layer, self._slots, key_states, value_states)
        if self._memory.shapes[layer_idx].is_latent:
            layer = layer[0].index_select(0, self._read), layer[1].index_select(0, self._read)
        return layer[0].transpose(0, 1)[None], layer[1].transpose(0, 1)[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models take only sizes from it, because a part gives them positions."""
        return self._start


@dataclass(slots=True)
class _Call:
    """One call of attention, for blocks of queries that have as many queries and keys as each other.

    Attributes:
        positions: of the queries of each block. extent: their keys are at positions [0, ``extent``).
        first: where the memory has the first key of the first block; that of each other is ``distance`` further.
        scattered: where the memory has the keys of the only block, if that is not in order.
    """

    positions: list[list[int]]
    extent: int
    first: int
    distance: int = 0
    scattered: Tensor | None = None

    def add(self, positions: list[int], extent: int, first: int) -> bool:
        """Compute another block, too, if it has as many queries and keys, and its keys are as far from those of the
        last one as these from those before."""
        distance = first - self.first if len(self.positions) == 1 else self.distance
        fits = (len(positions), extent) == (len(self.positions[0]), self.extent) and self.scattered is None
        if not fits or distance <= 0 or first != self.first + distance * len(self.positions):
            return False
        self.distance = distance
        self.positions.append(positions)
        return True

    def keys_in(self, tensor: Tensor, heads: int, start: int) -> Tensor:
        """The keys or values (B, ``heads``, length, width) from position ``start``, of ``tensor`` (heads, ..., width),
        whose only head may stand for all."""
        if self.scattered is not None:
            return select(tensor, self.scattered[start:])[None].expand(-1, heads, -1, -1)
        to_head, to_position, to_number = tensor.stride()
        sizes = len(self.positions), heads, self.extent - start, tensor.shape[-1]
        strides = self.distance * to_position, to_head if len(tensor) > 1 else 0, to_position, to_number
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + (self.first + start) * to_position)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The calls of a pass. ``padded``: which row each of their queries is. ``real``: which query each row is."""

    calls: list[_Call]
    padded: Tensor
    real: Tensor


class BatchCache(_RowsCache):
    """The rows of many sessions, one session after another. The last row may be there several times."""

    def __init__(self, memory: KeyValueMemory, sessions: Sequence[SessionRows], total: int) -> None:
        slots = torch.cat([rows.slots(rows.start, rows.stop) for rows in sessions])
        slots = torch.cat([slots, slots[-1:].expand(total - len(slots))])
        has_latent = any(shape.is_latent for shape in memory.shapes)
        read = torch.cat([rows.slots(0, rows.extent) for rows in sessions]) if has_latent else slots
        super().__init__(memory, slots, read, max(rows.start for rows in sessions))
        self._sessions = sessions
        self._plans: dict[tuple[int, bool], _Plan] = {}
        self._masks: dict[tuple[int, bool, int | None], list[tuple[int, Tensor]]] = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scores: _Scores) -> Tensor:
        """Attention of all rows: (heads, T, width)."""
        # A call for one head would share out its sums over threads by the number of queries.
        heads = len(query) if len(keys) == 1 else len(keys)
        share, is_latent = len(query) // heads, self._memory.shapes[layer].is_latent
        plan = self._plan(share, is_latent)
        masks = self._mask(share, is_latent, self._memory.windows[layer])
        queries, outs, done = query.index_select(1, plan.padded), [], 0
        for call, (start, mask) in zip(plan.calls, masks, strict=True):
            count = len(call.positions) * len(call.positions[0])
            k, v = call.keys_in(keys, heads, start), call.keys_in(values, heads, start)
            outs.append(attend_heads(queries[:, done : done + count], k, v, mask, scores))
            done += count
        return torch.cat(outs, 1).index_select(1, plan.real)

    def _plan(self, share: int, is_latent: bool) -> _Plan:
        """``share``: so many heads of a query have the same keys, and are queries of one head."""
        if (share, is_latent) not in self._plans:
            width = max(max(shape.keys[1], shape.values[1]) for shape in self._memory.shapes)
            queries = QUERIES if width <= WIDE else 2 * QUERIES
            step = queries // math.gcd(queries, share)
            calls: list[_Call] = []
            padded: list[int] = []
            real: list[int] = []
            before = 0  # positions of other sessions that a latent layer expands
            for rows in self._sessions:
                scattered = None if is_latent or rows.is_adjacent else rows.slots(0, rows.extent)
                first = before if is_latent else rows.table[0] * BLOCK_POSITIONS
                before += rows.extent
                for begin in range(rows.start // BLOCK_POSITIONS * BLOCK_POSITIONS, rows.stop, BLOCK_POSITIONS):
                    positions = [*range(max(begin, rows.start), min(begin + BLOCK_POSITIONS, rows.stop))]
                    row, count, fill = len(real), len(positions), -len(positions) % step
                    real += range(len(padded), len(padded) + count)
                    padded += [*range(row, row + count), *[row + count - 1] * fill]
                    positions += positions[-1:] * fill
                    extent = begin + BLOCK_POSITIONS
                    if scattered is not None:
                        calls.append(_Call([positions], extent, first, scattered=scattered[:extent]))
                    elif not calls or not calls[-1].add(positions, extent, first):
                        calls.append(_Call([positions], extent, first))
            real += [real[-1]] * (len(self._slots) - len(real))
            self._plans[share, is_latent] = _Plan(calls, torch.tensor(padded), torch.tensor(real))
        return self._plans[share, is_latent]

    def _mask(self, share: int, is_latent: bool, window: int | None) -> list[tuple[int, Tensor]]:
        """By call: the position of its first key, and its mask (B, 1, T, keys). With a window it begins with the first
        block that the first position of the queries' block attends to."""
        if (share, is_latent, window) not in self._masks:
            dtype, masks = self._memory.layers[0][0].dtype, []
            for call in self._plan(share, is_latent).calls:
                first = 0 if window is None else max(0, call.extent - BLOCK_POSITIONS - window + 1)
                start = first // BLOCK_POSITIONS * BLOCK_POSITIONS
                mask = mask_of(torch.tensor(call.positions), torch.arange(start, call.extent), window, dtype)
                masks.append((start, mask.repeat(1, share, 1)[:, None]))
            self._masks[share, is_latent, window] = masks
        return self._masks[share, is_latent, window]


class PaddedCache(_RowsCache):
    """The rows of S sessions, R of each, at ``positions`` (S, R), which are written at ``slots`` (S R,). ``read``
    (S, K): the slots of their first K positions."""

    def __init__(self, memory: KeyValueMemory, positions: Tensor, slots: Tensor, read: Tensor) -> None:
        super().__init__(memory, slots, read.flatten(), read.shape[1] - positions.shape[1])
        self._positions, self._extent = positions, read.shape[1]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scores: _Scores) -> Tensor:
        """Attention of all rows: (heads, S R, width)."""
        sessions = len(self._positions)
        if not self._memory.shapes[layer].is_latent:
            keys, values = select(keys, self._read), select(values, self._read)
        k, v = (x.reshape(len(x), sessions, self._extent, -1).transpose(0, 1) for x in (keys, values))
        every = torch.arange(self._extent, device=query.device)
        mask = mask_of(self._positions, every, self._memory.windows[layer], query.dtype)
        return attend_heads(query, k, v, mask.repeat(1, len(query) // len(keys), 1)[:, None], scores)


def select(tensor: Tensor, slots: Tensor) -> Tensor:
    """Copies of the positions ``slots`` of keys or values (heads, ..., width), whole positions at once, as they are in
    memory. By heads it took thirty times as long."""
    return tensor.transpose(0, 1).index_select(0, slots).transpose(0, 1)


def attend_heads(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: _Scores) -> Tensor:
    """Attention of the queries of B sessions, one session after another: (heads, B T, width). The queries of heads that
    share keys and values (B, their heads, length, width) are queries of one head for the ``mask``
    (B, 1, share T, length)."""
    sessions, heads = keys.shape[:2]
    share, rows = len(query) // heads, query.shape[1] // sessions
    q = query.view(heads, share, sessions, rows, -1).permute(2, 0, 1, 3, 4).flatten(2, 3)
    out = scores.attend(q, keys, values, mask).view(sessions, heads, share, rows, -1)
    return out.permute(1, 2, 0, 3, 4).reshape(len(query), sessions * rows, -1)


def mask_of(positions: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of queries at ``positions`` (..., T) for keys at the positions ``keys`` (K,): 0 or
    minus infinity, (..., T, K)."""
    at = positions[..., None]
    hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
