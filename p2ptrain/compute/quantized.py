"""Linear layers that hold their weights in 8 or 4 bits, to serve a model in less memory.

- ``int8``: an output's weights are q · s, with q from -127 to 127 and one s, fp32.
- ``int4``: of each output, ``GROUP`` inputs have an s and a z, bf16: their weights are (q - 8) · s + z, q from 0 to 15.

Weights are rounded to the nearest of these; nothing is calibrated. Files that are quantized already, in the packed
format of compressed-tensors, are taken over as they are. Embeddings, norms, the head, the experts of a mixture (no
linear layers in transformers) and layers of shapes that torch's kernels do not take stay unquantized.

On a CPU torch's own kernels multiply by the held weights. They are fast with inputs in bf16 only, so inputs are rounded
to it, and sums are in fp32. A kernel computes each row by itself: its bits do not depend on the other rows. On other
devices each pass restores the weights in the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from p2ptrain.core.errors import ConfigError
from p2ptrain.core.serving import INT4, INT8

GROUP = 32
"""Inputs with a scale of their own in ``INT4``: a smaller group costs memory, a larger one accuracy."""
_STORED = {(8, "channel", 0): INT8} | {(4, "group", groups * GROUP): INT4 for groups in (1, 2, 4, 8)}
"""Bits, strategy and inputs of a group in files that are quantized already."""
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
        outputs, inputs = self.out_features, self.in_features = _shape_of(layer)
        self._in_4_bits, self._transposed, self._dtype = weights == INT4, isinstance(layer, Conv1D), layer.weight.dtype
        self.bias = layer.bias
        with torch.device("meta"):
            if self._in_4_bits:
                self.register_buffer("held", torch.empty(outputs, inputs // 2, dtype=torch.uint8))
                self.register_buffer("scales", torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16))
            else:
                self.register_buffer("held", torch.empty(outputs, inputs, dtype=torch.int8))
                self.register_buffer("scales", torch.empty(outputs))

    def allocate(self, device: torch.device) -> None:
        """Allocate what the layer will hold. If this is done between the copies that loading makes and frees, the
        process keeps their memory."""
        self.held, self.scales = (torch.empty_like(tensor, device=device) for tensor in (self.held, self.scales))

    def hold(self, weight: Tensor) -> None:
        """Quantize the layer's ``weight``, on its device."""
        weight = (weight.T if self._transposed else weight).float().contiguous()
        if not self._in_4_bits:
            scales = (torch.linalg.vector_norm(weight, torch.inf, 1) / 127).clamp(min=_LEAST)
            self._keep((weight / scales[:, None]).round_(), scales)
            return
        groups = weight.view(len(weight), -1, GROUP)
        least, most = groups.aminmax(dim=2, keepdim=True)
        step = ((most - least) / 15).clamp(min=_LEAST).bfloat16()
        middle = (least + 8 * step).bfloat16()
        levels = (groups - middle).div_(step).add_(8).round_().clamp_(0, 15).flatten(1).to(torch.uint8)
        self._hold_levels(levels, step.squeeze(2), middle.squeeze(2))

    def take(self, packed: Tensor, scale: Tensor) -> None:
        """Take over weights of files: ``packed`` int32, 4 or 8 of an output in each; ``scale`` (outputs, groups)."""
        stored = packed.contiguous().view(torch.uint8)  # q + 8, the first in the low half of a byte; or q + 128
        if not self._in_4_bits:
            self._keep((stored ^ 128).view(torch.int8), scale[:, 0])
            return
        levels = torch.stack([stored & 15, stored >> 4], -1).flatten(1)
        step = scale.repeat_interleave(levels.shape[1] // GROUP // scale.shape[1], 1).bfloat16()
        self._hold_levels(levels, step, torch.zeros_like(step))

    def _hold_levels(self, levels: Tensor, step: Tensor, middle: Tensor) -> None:
        """``levels``: q, uint8 (outputs, inputs). ``step``, ``middle``: s and z, (outputs, inputs / ``GROUP``)."""
        if levels.device.type == self.kernel_device:
            held = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        else:
            held = levels[:, ::2] | levels[:, 1::2] << 4
        self._keep(held, torch.stack([step, middle], -1).transpose(0, 1))

    def _keep(self, held: Tensor, scales: Tensor) -> None:
        if self.held.is_meta:
            self.allocate(held.device)
        self.held.copy_(held)
        self.scales.copy_(scales)

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


def choose_weights(config: PretrainedConfig, wanted: str = "") -> str:
    """How linear layers hold their weights: ``wanted``, one of ``QUANTIZED``; or as the model's files have them. Raises
    ``ConfigError``: the files are quantized, and not so, or in a format that is not known."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return wanted
    try:
        (group,) = stored["config_groups"].values()
        weights = group["weights"]
        form = stored["quant_method"], group.get("format") or stored["format"], weights["type"], weights["symmetric"]
        others = group.get("input_activations") or weights.get("actorder") or group["targets"] != ["Linear"]
        size = int(weights["group_size"]) if weights["strategy"] == "group" else 0
        kind = _STORED[weights["num_bits"], weights["strategy"], size]
        known = form == ("compressed-tensors", "pack-quantized", "int", True) and not others
    except (KeyError, ValueError, TypeError, AttributeError):
        known, kind = False, ""
    if not known:
        text = f"this {config.model_type!r} model is quantized in a format that is not supported"
        raise ConfigError(
            text, remedy="use its unquantized weights with --weights, or compressed-tensors' W4A16 or W8A16"
        )
    if wanted not in ("", kind):
        raise ConfigError(
            f"the model's files are quantized to {kind}", remedy="leave out --weights, or use other files"
        )
    return kind


def packed_shapes(config: PretrainedConfig, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The tensors of files that are quantized already, in place of the weight ``name`` of ``shape``."""
    (group,) = cast(Any, config).quantization_config["config_groups"].values()
    bits, each = group["weights"]["num_bits"], int(group["weights"].get("group_size") or shape[1])
    groups = shape[1] // each if bits == 4 else 1
    return {f"{name}_packed": (shape[0], shape[1] * bits // 32), f"{name}_scale": (shape[0], groups)}


def _shape_of(layer: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    shape = layer.weight.T.shape if isinstance(layer, Conv1D) else layer.weight.shape
    return shape[0], shape[1]
