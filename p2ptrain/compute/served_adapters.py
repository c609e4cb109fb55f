"""LoRA adapters beside the weights of a served model, so that sessions of several of them share a pass.

A linear layer computes y = W x for the rows of all sessions, and then adds (alpha / rank) B A x to the rows of each
adapter's sessions. Unlike ``compute.adapter`` it merges nothing: the base's weights are in memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from p2ptrain.compute.adapter import MergedTable
from p2ptrain.compute.linears import product_of
from p2ptrain.core.serving import HASH_BYTES

Rows = slice | Tensor


class LowRankFactors:
    """Of an adapter in one layer. ``down``: A (rank, in); ``up``: B, scaled (out, rank)."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        self.nbytes = down.nbytes + up.nbytes
        self._down, self._up = product_of(down), product_of(up)

    def product(self, x: Tensor) -> Tensor:
        """Rows (T, in) → (T, out). They are two at least, as ``compute.linears`` says."""
        return self._up(self._down(x if len(x) > 1 else x.expand(2, -1)))[: len(x)]


class _Layer:
    """Forward hook of a linear layer. ``rows``: those of each adapter in the pass under way."""

    def __init__(self, rows: dict[str, Rows]) -> None:
        self.factors: dict[str, LowRankFactors] = {}
        self._rows = rows

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        own = [(self.factors[name], rows) for name, rows in self._rows.items() if name in self.factors]
        if not own:
            return output
        x, out = args[0].flatten(0, -2), output.flatten(0, -2)
        for factors, rows in own:
            out[rows] += factors.product(x[rows])
        return out.view_as(output)


class ServedAdapters:
    """The adapters of a model. ``model``: transformers' whole one.

    Attributes:
        names: of the adapters.
    """

    def __init__(self, model: Any) -> None:
        self.names: set[str] = set()
        self._model = model
        self._layers: dict[str, _Layer] = {}
        self._rows: dict[str, Rows] = {}
        self._head_rows: dict[str, Rows] = {}

    def add(self, name: str, table: MergedTable, dtype: torch.dtype, device: torch.device) -> int:
        """Load an adapter. Returns the bytes of its factors. Raises ``StorageError``: its file cannot be read."""
        head, size_bytes = self._model.get_output_embeddings(), 0
        for path, down, up in table.factors():
            module = self._model.get_submodule(path)
            layer = self._layers.get(path)
            if layer is None:
                layer = self._layers[path] = _Layer(self._head_rows if module is head else self._rows)
                module.register_forward_hook(layer)
            layer.factors[name] = LowRankFactors(*(factor.to(device, dtype) for factor in (down, up)))
            size_bytes += layer.factors[name].nbytes
        self.names.add(name)
        return size_bytes

    def use(self, sessions: Sequence[tuple[str, int, int]], total: int) -> None:
        """Compute the next pass with the adapters of these sessions, in the order of their rows: of each its adapter,
        or "", its number of rows, and how many of them the model's head gets. ``total``: number of rows of the pass;
        those beyond the sessions' are copies of the last one."""
        owners = [name for name, count, _ in sessions for _ in range(count)]
        self._set(self._rows, owners + owners[-1:] * (total - len(owners)))
        self._set(self._head_rows, [name for name, _, count in sessions for _ in range(count)])

    def _set(self, rows: dict[str, Rows], owners: Sequence[str]) -> None:
        rows.clear()
        for name in self.names.intersection(owners):
            rows[name] = torch.tensor([row for row, owner in enumerate(owners) if owner == name])

    def use_one(self, adapter: str) -> None:
        """Compute the next passes with this adapter, or with none if it is "", in all rows."""
        for rows in (self._rows, self._head_rows):
            rows.clear()
            rows[adapter] = slice(None)


def own_hashes(adapter: str, hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The hashes of blocks that no session of another adapter has."""
    if not adapter:
        return hashes
    return [blake2b(adapter.encode() + hashed, digest_size=HASH_BYTES).digest() for hashed in hashes]
