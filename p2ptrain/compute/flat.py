"""A model as a few flat arrays, and AdamW over them.

All parameters are views of one array and all gradients views of another, in two segments::

    parameters   | matrices (weight-decayed)          | vectors: norms, biases (not decayed) |
    gradients    | the same                           | the same                             | loss |

So the ring reduces one array, healing copies three, the optimizer makes two calls, and zeroing is one. Each parameter
starts on a 64-byte boundary; the padding stays zero.

Both segments hold the parameters in the reverse of the order in which the model registered them, which is about the
order in which a backward pass makes their gradients: the output's and the last layer's first, the embedding's last. So
the front of the array is final early, and the ring may have it while the rest is still being computed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2ptrain.compute.device import flushed_denormals, one_thread

_ALIGN_NUMEL = 16  # 64 bytes of fp32
_SQUARE_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one parameter lies in the flat arrays."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class FlatModel:
    """``model`` on ``device``, its parameters and gradients made views of flat fp32 arrays. Tied parameters appear
    once.

    Attributes:
        parameters: shape (numel,).
        gradients: shape (numel + 1,); the last element is the sum of losses.
        numel: elements of the parameters, padding included.
        decayed_numel: of them, those under weight decay, which come first.
        layout: SHA-256 over names, offsets and shapes: flat arrays of equal layout mean the same.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in reversed(named.items())}
        self.segments, self.decayed_numel, self.numel = _placed(shapes)
        self.layout = hashlib.sha256(repr([(s.name, s.offset, s.shape) for s in self.segments]).encode()).hexdigest()
        self.parameters = torch.zeros(self.numel, device=device)
        self.gradients = torch.zeros(self.numel + 1, device=device)
        for segment in self.segments:
            parameter = named[segment.name]
            view = self._view(self.parameters, segment)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self._view(self.gradients, segment)
        model.to(device)  # the buffers, such as rotary frequencies; parameters are there already
        self.model = model

    @property
    def stops(self) -> list[int]:
        return [segment.offset for segment in self.segments[1:]] + [self.numel]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {segment.name: segment.shape for segment in self.segments}

    @property
    def loss_sum(self) -> Tensor:
        """The loss slot, shape ()."""
        return self.gradients[self.numel]

    def copy_tensors(self, source: Mapping[str, Tensor]) -> None:
        """Take over parameters, by name. Raises ``ValueError`` where they are those of another model."""
        if {name: tuple(tensor.shape) for name, tensor in source.items()} != self.shapes:
            raise ValueError("the models have different parameters")
        for segment in self.segments:
            self._view(self.parameters, segment).copy_(source[segment.name].detach())

    def _view(self, flat: Tensor, segment: Segment) -> Tensor:
        return flat[segment.offset : segment.offset + segment.numel].view(segment.shape)


def _placed(shapes: dict[str, tuple[int, ...]]) -> tuple[list[Segment], int, int]:
    """Segments of parameters in this order, matrices before vectors; elements of the matrices, and of all."""
    segments: list[Segment] = []
    ends = []
    numel = 0
    for is_matrix in (True, False):
        for name, shape in shapes.items():
            if (len(shape) >= 2) is is_matrix:
                segments.append(Segment(name, numel, shape))
                numel += -(-segments[-1].numel // _ALIGN_NUMEL) * _ALIGN_NUMEL
        ends.append(numel)
    return segments, ends[0], ends[1]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The ``[optimizer]`` table: AdamW (Loshchilov and Hutter, arXiv 1711.05101), linear warm-up, cosine decay.

    Attributes:
        min_lr_ratio: the last learning rate, as a part of ``lr``.
        clip_norm: the greatest global L2 norm of a gradient; 0 for no clipping.
    """

    lr: float = 3e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 40
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of the step after ``step`` applied ones: up to ``lr`` in ``warmup_steps``, down to its part at
        ``steps``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


class FlatAdamW:
    """``torch.optim.AdamW`` over the two segments of a ``FlatModel``.

    The same gradients give the same bits whatever the thread count: on a CPU the update runs on one thread, because
    where the work is cut decides which elements the vectorized loop leaves to the scalar one. It is 1 % of a step.

    Attributes:
        exp_avg, exp_avg_sq: the two moments, shape (numel,).
    """

    def __init__(self, flat: FlatModel, spec: OptimizerSpec) -> None:
        self.exp_avg = torch.zeros_like(flat.parameters)
        self.exp_avg_sq = torch.zeros_like(flat.parameters)
        self._numel = flat.numel
        on_cpu = flat.parameters.device.type == "cpu"
        # On a CPU the gradients are the reduce buffer, which a redo needs unchanged: clipping makes a copy.
        self._clipped = torch.zeros_like(flat.parameters) if on_cpu else flat.gradients[: flat.numel]
        self._parameters: list[nn.Parameter] = []
        groups = []
        cut = flat.decayed_numel
        for part, decay in ((slice(0, cut), spec.weight_decay), (slice(cut, flat.numel), 0.0)):
            parameter = nn.Parameter(flat.parameters[part])
            parameter.grad = self._clipped[part]
            self._parameters.append(parameter)
            groups.append({"params": [parameter], "weight_decay": decay})
        self._adamw = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
        for parameter, part in zip(self._parameters, (slice(0, cut), slice(cut, flat.numel)), strict=True):
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": self.exp_avg[part],
                "exp_avg_sq": self.exp_avg_sq[part],
            }

    def apply(self, gradients: Tensor, *, step: int, lr: float, scale: float) -> None:
        """One update with ``scale * gradients`` (numel,), after ``step`` earlier ones. ``gradients`` stay as they are
        on a CPU."""
        for group, parameter in zip(self._adamw.param_groups, self._parameters, strict=True):
            group["lr"] = lr
            self._adamw.state[parameter]["step"].fill_(step)
        with one_thread(), flushed_denormals():
            torch.mul(gradients, scale, out=self._clipped)
            self._adamw.step()

    def reset(self) -> None:
        """The moments of an untrained model."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()


def square_sum(values: npt.NDArray[np.generic]) -> float:
    """Sum of squares in fp64, blockwise in a fixed order and on one thread: the same bits whatever the thread count.

    NaN where one of them is not finite.
    """
    total = 0.0
    for start in range(0, len(values), _SQUARE_BLOCK):
        block = values[start : start + _SQUARE_BLOCK].astype(np.float64)
        np.square(block, out=block)
        total += float(np.add.reduce(block))
    return total if math.isfinite(total) else math.nan
