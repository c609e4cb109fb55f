"""How a served part computes each row alike on a CPU, whatever other rows a pass has.

A CPU's product of rows and a matrix in its usual form has another order of sums for 1, for 2 to 15, and for 16 and
more rows. With the matrix packed by oneDNN, all numbers of rows from two on have one order, so a pass has no fewer. It
is also faster than the usual product, on some processors twice as fast. Where torch has no oneDNN, matrices are stored
by columns: one order for two rows and more, too.

Functions of single numbers, such as ``silu``, are computed for ``VECTOR`` numbers at once, and for the rest of an
array, or of a thread's share of it, one by one with other roundings. So the number of rows leaves no rest.
``tests/compute/test_served_part.py`` compares bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

LEAST_ROWS = 4
"""Of a pass. Four rows take oneDNN a fifth less time than two (AMD EPYC, 22 M and 80 M parameters)."""
VECTOR = 32
"""Numbers, at most, that are computed at once."""
SMALL_PRODUCT = 1_500_000
"""Multiply-adds of a matrix and rows. Of fewer, other threads save less time than it takes to wake them: with two of
them one text of 22 M parameters took a fifth longer."""
GRAIN = 32768
"""torch shares out arrays of more numbers over threads."""
EXPERTS = "p2ptrain-rows"
"""Of ``compute_experts`` among transformers' implementations of experts."""


class PackedLinear(nn.Module):
    """A linear layer with a ``weight`` (outputs, inputs) that oneDNN packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has the operations for numbers of this type, on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replace_linears(module: Any) -> None:
    """Pack the matrices of a part's module, or store them by columns, one after the other, so that memory holds no
    second copy of all. An embedding keeps a matrix that it shares with the output, which has a packed copy."""
    for owner in [other for other in module.modules() if not isinstance(other, nn.Embedding)]:
        for name, child in owner.named_children():
            if type(child) in (nn.Linear, Conv1D) and can_pack(child.weight.dtype):
                weight = child.weight.detach()
                packed = PackedLinear(weight.T.contiguous() if type(child) is Conv1D else weight, child.bias)
                setattr(owner, name, packed)
                child._parameters.clear()
        if hasattr(owner, "_apply_gate") and not (owner.has_bias or owner.is_transposed or not owner.has_gate):
            owner.config._experts_implementation = EXPERTS
            owner.gate_width = owner.down_proj.shape[-1]
            owner.products = [_products(owner._parameters.pop(name)) for name in ("gate_up_proj", "down_proj")]
        for weight in owner.parameters(recurse=False):
            if weight.ndim > 1 and not isinstance(owner, Conv1D):
                weight.data = _by_columns(weight.data)


def _products(experts: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """The product with each expert's matrix (outputs, inputs)."""
    weights = experts.detach().unbind()
    return [
        PackedLinear(each, None) if can_pack(each.dtype) else partial(F.linear, weight=_by_columns(each))
        for each in weights
    ]


def _by_columns(weight: Tensor) -> Tensor:
    return weight.mT.contiguous().mT


def compute_experts(experts: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the outputs of each row's experts. ``rows``: (T, width); ``chosen``, ``weights``: (T, k)."""
    out, (gate_up, down) = torch.zeros_like(rows), experts.products
    for expert in torch.unique(chosen).tolist():
        row, place = torch.where(chosen == expert)
        if expert < experts.num_experts:
            count = _without_rest(max(len(row), 2), [experts.gate_width])
            x = rows[torch.cat([row, row[-1:].expand(count - len(row))])]
            x = down[expert](experts._apply_gate(gate_up[expert](x)))
            out.index_add_(0, row, (x[: len(row)] * weights[row, place, None]).to(out.dtype))
    return out


ExpertsInterface.register(EXPERTS, compute_experts)


@dataclass(frozen=True, slots=True)
class RowPadding:
    """How many rows a pass has, so that functions of single numbers leave no rest of their arrays; and its threads.

    Attributes:
        least: of products, see above. numel: numbers of a matrix, on average.
        widths: numbers of a row that such functions may take: activations, the angles of positions, the scores of
            experts. ``logits_widths``: of the logits of a row.
    """

    least: int = 1
    numel: float = math.inf
    widths: frozenset[int] = frozenset()
    logits_widths: frozenset[int] = frozenset()

    @classmethod
    def of(cls, module: Any) -> RowPadding:
        """For a part's module after ``replace_linears``."""
        modules, config = [other for other in module.modules() if not isinstance(other, nn.Embedding)], module.config
        widths = {other.weight.shape[0] for other in modules if isinstance(other, Conv1D)}
        widths |= {other.in_features for other in modules if hasattr(other, "in_features")}
        widths |= {2 * len(buffer) for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
        widths |= {other.num_experts for other in modules if isinstance(getattr(other, "num_experts", None), int)}
        has_function = getattr(config, "final_logit_softcapping", None) is not None
        numels = [other.in_features * other.out_features for other in modules if hasattr(other, "in_features")]
        logits_widths = frozenset([config.vocab_size] if has_function else [])
        return cls(LEAST_ROWS, fmean(numels or [math.inf]), frozenset(widths), logits_widths)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Compute a pass of ``count`` rows in this context, on one thread if its products are small."""
        most = torch.get_num_threads()
        is_small = max(count, self.least) * self.numel < SMALL_PRODUCT
        if is_small:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if is_small:
                torch.set_num_threads(most)

    def rows(self, count: int) -> int:
        """The number of rows of a pass with ``count`` rows or more."""
        return _without_rest(max(count, self.least), self.widths)

    def logits_rows(self, count: int) -> int:
        """The number of rows that logits are computed of."""
        return _without_rest(max(count, self.least), self.logits_widths)


def _without_rest(rows: int, widths: Collection[int]) -> int:
    threads = torch.get_num_threads()
    while any(_has_rest(rows * width, threads) for width in widths):
        rows += 1
    return rows


def _has_rest(numel: int, threads: int) -> bool:
    shares = min(threads, math.ceil(numel / GRAIN))
    return math.ceil(numel / shares) % VECTOR > 0
