"""How a served part computes each row alike on a CPU, whatever other rows a pass has.

A CPU's product of rows and a matrix in its usual form has another order of sums for 1, for 2 to 15, and for 16 and
more rows. With the matrix packed by oneDNN, all numbers of rows from two on have one order, so a pass has no fewer. It
is also faster than the usual product, on some processors twice as fast.

Some functions of single numbers, such as ``silu``, are computed for ``VECTOR`` numbers at once, and for the rest of an
array, or of a thread's share of it, one by one with other roundings. So their arrays are filled up to leave no rest.
``tests/compute/test_served_part.py`` compares bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

LEAST_ROWS = 4
"""Of a pass. Four rows take oneDNN a fifth less time than two (AMD EPYC, 22 M and 80 M parameters)."""
VECTOR = 64
"""Numbers, at most, that are computed at once."""
GRAIN = 32768
"""torch shares out arrays of more numbers over threads, and for ``gelu`` of more than half as many, over all."""
ACTIVATIONS = {each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()}
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


class WholeVectors(nn.Module):
    """An activation function whose array leaves no rest."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        numel, rows = x.numel(), x.flatten()
        if rest := _filled(numel, torch.get_num_threads()) - numel:
            rows = F.pad(rows, (0, rest))
        return cast(Tensor, self.function(rows)[:numel].view(x.shape))


class PackedMatrix(Tensor):
    """A matrix (outputs, inputs) of another module, such as a router of experts, whose ``F.linear`` is oneDNN's."""

    linears: dict[torch.dtype, PackedLinear]

    @classmethod
    def of(cls, weight: Tensor) -> PackedMatrix:
        matrix = weight.detach().as_subclass(cls)
        matrix.linears = {}
        return matrix

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.type:  # the product has the type of its rows
            return args[0]
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        x, matrix, bias = (*args, (kwargs or {}).get("bias"))[:3]
        if x.dtype not in matrix.linears:
            matrix.linears[x.dtype] = PackedLinear(matrix.as_subclass(Tensor).to(x.dtype), None)
        out = matrix.linears[x.dtype](x)
        return out if bias is None else out + bias


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Whether torch has the operations for numbers of this type, on a device of this type."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replace_linears(module: Any) -> None:
    """Pack the matrices of a part's module one after the other, so that memory holds no second copy of all. An
    embedding keeps a matrix that it shares with the output, which has a packed copy."""
    for owner in [other for other in module.modules() if not isinstance(other, nn.Embedding)]:
        for name, child in owner.named_children():
            if type(child) in (nn.Linear, Conv1D):
                weight = child.weight.detach()
                packed = PackedLinear(weight.T.contiguous() if type(child) is Conv1D else weight, child.bias)
                setattr(owner, name, packed)
                child._parameters.clear()
            elif type(child) in ACTIVATIONS:
                setattr(owner, name, WholeVectors(child))
        if hasattr(owner, "_apply_gate") and not (owner.has_bias or owner.is_transposed or not owner.has_gate):
            owner.config._experts_implementation = EXPERTS
            weights = [owner._parameters.pop(name).detach() for name in ("gate_up_proj", "down_proj")]
            owner.products = [[product_of(each) for each in weight] for weight in weights]
        matrices = {name: weight for name, weight in owner.named_parameters(recurse=False) if weight.ndim == 2}
        owner._parameters.update({name: PackedMatrix.of(weight) for name, weight in matrices.items()})


def product_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of rows and a matrix (outputs, inputs)."""
    if can_pack(weight.device.type, weight.dtype):
        return PackedLinear(weight, None)
    return partial(F.linear, weight=weight)


def compute_experts(experts: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the outputs of each row's experts. ``rows``: (T, width); ``chosen``, ``weights``: (T, k)."""
    out, (gate_up, down) = torch.zeros_like(rows), experts.products
    for expert in torch.unique(chosen).tolist():
        row, place = torch.where(chosen == expert)
        if expert < experts.num_experts:
            x = rows[row if len(row) > 1 else row.expand(2)]
            x = down[expert](experts._apply_gate(gate_up[expert](x)))
            out.index_add_(0, row, (x[: len(row)] * weights[row, place, None]).to(out.dtype))
    return out


ExpertsInterface.register(EXPERTS, compute_experts)


@dataclass(frozen=True, slots=True)
class RowPadding:
    """How many rows a pass has.

    Attributes:
        least: of products, see above.
        widths: numbers of a row that functions may take outside of activations: the scores of experts.
    """

    least: int = 1
    widths: frozenset[int] = frozenset()

    @classmethod
    def of(cls, module: Any) -> RowPadding:
        """For a part's module after ``replace_linears``."""
        modules = list(module.modules())
        widths = {other.num_experts for other in modules if isinstance(getattr(other, "num_experts", None), int)}
        return cls(LEAST_ROWS, frozenset(widths))

    def rows(self, count: int) -> int:
        """The number of rows of a pass with ``count`` rows or more."""
        rows, threads = max(count, self.least), torch.get_num_threads()
        while any(_has_rest(rows * width, threads) for width in self.widths):
            rows += 1
        return rows


@cache
def _filled(numel: int, threads: int) -> int:
    while _has_rest(numel, threads):
        numel += 1
    return numel


def _has_rest(numel: int, threads: int) -> bool:
    shares = {min(threads, math.ceil(numel / GRAIN)), threads if numel > GRAIN // 2 else 1}
    return any(numel % (count * VECTOR) for count in shares)
