"""How a served part computes each row alike, whatever other rows a pass has (fp32 on a CPU).

A CPU's product of rows and a matrix in its usual form has another order of sums for 1, for 2 to 15, and for 16 and more
rows. With the matrix stored by columns, and as oneDNN packs it, all products of two rows or more have one order. Packed
ones take a fixed time more per call, and then up to eight rows take hardly longer than one: so large ones are packed.

Functions of single numbers, such as ``silu``, are computed for ``VECTOR`` numbers at once, and for the rest of an
array, or of a thread's share of it, one by one with other roundings. So the number of rows leaves no rest.
``tests/compute/test_served_part.py`` compares bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

LEAST_PACKED = 1 << 20
"""Elements of a matrix from which packing is faster than columns."""
PACKED_FOR = 16
"""Rows that oneDNN chooses the packed form for."""
VECTOR = 32
"""Numbers of fp32, at most, that are computed at once."""
GRAIN = 32768
"""torch shares out arrays of more numbers over threads."""
EXPERTS = "p2ptrain-rows"
"""Of ``compute_experts`` among transformers' implementations of experts."""


class PackedLinear(nn.Module):
    """A linear layer with a weight that oneDNN packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return cast(Tensor, out)


def can_pack() -> bool:
    """Whether this build of torch has the operations."""
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def replace_linears(module: Any) -> None:
    """Store each matrix of a part's module by columns or packed, one after the other, so that memory holds no second
    copy of all. A matrix that the part's embedding shares is not packed."""
    embeddings = [other for other in module.modules() if isinstance(other, nn.Embedding)]
    looked_up = {id(other.weight) for other in embeddings}
    for owner in [other for other in module.modules() if not isinstance(other, nn.Embedding | Conv1D)]:
        for name, child in owner.named_children():
            is_large = type(child) is nn.Linear and child.weight.numel() >= LEAST_PACKED
            if is_large and id(child.weight) not in looked_up and can_pack():
                setattr(owner, name, PackedLinear(child))
                child._parameters.clear()
        for weight in owner.parameters(recurse=False):
            if weight.ndim > 1:
                weight.data = weight.data.mT.contiguous().mT
        if hasattr(owner, "_apply_gate") and not (owner.has_bias or owner.is_transposed or not owner.has_gate):
            owner.config._experts_implementation = EXPERTS


def compute_experts(experts: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the outputs of each row's experts. ``rows``: (T, width); ``chosen``, ``weights``: (T, k)."""
    out = torch.zeros_like(rows)
    for expert in torch.unique(chosen).tolist():
        row, place = torch.where(chosen == expert)
        if expert < experts.num_experts:
            x = rows[row if len(row) > 1 else row.repeat(2)]
            x = F.linear(experts._apply_gate(F.linear(x, experts.gate_up_proj[expert])), experts.down_proj[expert])
            out.index_add_(0, row, x[: len(row)] * weights[row, place, None])
    return out


ExpertsInterface.register(EXPERTS, compute_experts)


def function_widths(module: Any) -> set[int]:
    """How many numbers of a row a part's functions of single numbers may take: activations, the angles of positions,
    the scores of experts."""
    widths = {other.weight.shape[0] for other in module.modules() if isinstance(other, Conv1D)}
    widths |= {other.in_features for other in module.modules() if hasattr(other, "in_features")}
    widths |= {2 * len(buffer) for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
    widths |= {other.num_experts for other in module.modules() if isinstance(getattr(other, "num_experts", None), int)}
    return widths


def padded_rows(count: int, widths: Collection[int], threads: int) -> int:
    """The least number of rows from ``count`` on, and from 2, that leaves no rest of arrays of these widths."""
    total = max(2, count)
    while any(_has_rest(total * width, threads) for width in widths):
        total += 1
    return total


def _has_rest(numel: int, threads: int) -> bool:
    shares = min(threads, math.ceil(numel / GRAIN))
    return math.ceil(numel / shares) % VECTOR > 0
