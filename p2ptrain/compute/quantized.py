"""Linear layers that hold their weights in 8 or 4 bits, to serve a model in less memory.

- ``int8``: an output's weights are q · s, with q from -127 to 127 and one s, fp32.
- ``int4``: of each output, ``GROUP`` inputs have an s and a z, bf16: their weights are (q - 8) · s + z, q from 0 to 15.

Both are rounded to the nearest value; nothing is calibrated. Embeddings, norms, the head, the experts of a mixture (no
linear layers in transformers) and layers of shapes that torch's kernels do not take stay as they are.

On a CPU torch's own kernels multiply by the held weights. They are fast with inputs in bf16 only, so inputs are rounded
to it, and sums are in fp32. A kernel computes each row by itself: its bits do not depend on the other rows. On other
devices each pass restores the weights in the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from p2ptrain.core.serving import INT4

GROUP = 32
"""Inputs with a scale of their own in ``INT4``: a smaller group costs memory, a larger one accuracy."""
_LEAST = 1e-30  # of a scale, for weights that are all 0


class QuantizedLinear(nn.Module):
    """Replaces a linear layer, whose bias it takes over. It has no weights before ``hold``.

    Attributes:
        held: int8 (outputs, inputs), or uint8 (outputs, inputs / 2): on a CPU in the order of torch's kernel.
        scales: fp32 (outputs,), or bf16 (inputs / ``GROUP``, outputs, 2): s and z.
    """

    kernel_device = "cpu"
    held: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear | Conv1D, weights: str) -> None:
        super().__init__()
        outputs, inputs = _shape_of(layer)
        self._in_4_bits, self._transposed, self._dtype = weights == INT4, isinstance(layer, Conv1D), layer.weight.dtype
        self.bias = layer.bias
        with torch.device("meta"):
            if self._in_4_bits:
                self.register_buffer("held", torch.empty(outputs, inputs // 2, dtype=torch.uint8))
                self.register_buffer("scales", torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16))
            else:
                self.register_buffer("held", torch.empty(outputs, inputs, dtype=torch.int8))
                self.register_buffer("scales", torch.empty(outputs))

    def hold(self, weight: Tensor) -> None:
        """Quantize the layer's ``weight``, on its device."""
        weight = (weight.T if self._transposed else weight).float().contiguous()
        if not self._in_4_bits:
            self.scales = (weight.abs().amax(1) / 127).clamp(min=_LEAST)
            self.held = (weight / self.scales[:, None]).round().to(torch.int8)
            return
        groups = weight.view(len(weight), -1, GROUP)
        least, most = groups.aminmax(dim=2, keepdim=True)
        step = ((most - least) / 15).clamp(min=_LEAST).bfloat16()
        middle = (least + 8 * step).bfloat16()
        levels = ((groups - middle) / step + 8).round().clamp(0, 15).flatten(1).to(torch.uint8)
        self.scales = torch.stack([step, middle], -1).squeeze(2).transpose(0, 1).contiguous()
        if weight.device.type == self.kernel_device:
            self.held = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        else:
            self.held = levels[:, ::2] | levels[:, 1::2] << 4

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) → (..., outputs), in the dtype of ``x``."""
        if x.device.type != self.kernel_device:
            return F.linear(x, self._restored(), self.bias)
        rows = x.flatten(0, -2).bfloat16().contiguous()
        if self._in_4_bits:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.held, GROUP, self.scales).float()
        else:
            ones = torch.ones(len(self.held), dtype=torch.bfloat16)  # the kernel would round the scales
            out = torch.ops.aten._weight_int8pack_mm(rows, self.held, ones).float() * self.scales
        out = out if self.bias is None else out + self.bias
        return cast(Tensor, out.to(x.dtype).view(*x.shape[:-1], -1))

    def _restored(self) -> Tensor:
        """The weights (outputs, inputs) on a device without a kernel."""
        scales = self.scales.to(self._dtype)
        if not self._in_4_bits:
            return self.held.to(self._dtype) * scales[:, None]
        levels = torch.stack([self.held & 15, self.held >> 4], -1).view(len(self.held), -1, GROUP)
        step, middle = scales.transpose(0, 1).unsqueeze(2).unbind(-1)
        return ((levels.to(self._dtype) - 8) * step + middle).flatten(1)


def quantize_linears(layers: Iterable[nn.Module], weights: str) -> None:
    """Have the linear layers inside ``layers`` hold their weights as ``weights`` says; empty: as they are. Layers on
    the meta device get theirs later (``QuantizedLinear.hold``)."""
    for layer in layers if weights else ():
        for name, linear in [*layer.named_modules()]:
            if not isinstance(linear, nn.Linear | Conv1D) or linear is layer:
                continue
            outputs, inputs = _shape_of(linear)
            if outputs % 16 or inputs % GROUP:  # torch's kernels refuse them, or crash
                continue
            quantized = QuantizedLinear(linear, weights)
            if not linear.weight.is_meta:
                quantized.hold(linear.weight.detach())
            layer.set_submodule(name, quantized)


def _shape_of(layer: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    shape = layer.weight.T.shape if isinstance(layer, Conv1D) else layer.weight.shape
    return shape[0], shape[1]
