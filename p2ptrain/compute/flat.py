"""A model stored in flat arrays, and AdamW over them.

All parameters that train are views of one array and all gradients views of another, in two sections::

    parameters   | matrices (weight-decayed)          | vectors: norms, biases (not decayed) |
    gradients    | the same                           | the same                             | 2 numbers |

So the ring reduces one array, healing copies three, and the optimizer makes two calls. Each parameter starts on a
64-byte boundary; the padding stays zero.

Both sections hold the parameters in reverse order of their registration in the model. This is roughly the order in
which a backward pass produces their gradients: output and last layer first, embedding last. So the front of the array
is final early, and the ring can reduce it while backward computes the rest.

With ``device.precision = "bf16-weights"`` a third array has the parameters in bf16, and the model computes with these.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from configs.schema import Optimizer
from p2ptrain.compute.device import flushed_denormals, one_thread
from p2ptrain.core.training import SettingsPeriod, period_at

_ALIGN_NUMEL = 16  # 64 bytes of fp32
_SQUARE_ROW, _SQUARE_ROWS = 256, 512


@dataclass(frozen=True, slots=True)
class Segment:
    """Position of one parameter in the flat arrays."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class FlatModel:
    """``model`` on ``device``, with parameters and gradients as views of flat fp32 arrays. Tied parameters appear once,
    those that require no gradient not at all.

    Args:
        dtype: of the weights that the model computes with. In bf16 those that train are views of a rounded copy of
            ``parameters``, which ``compute_with`` renews. The others are rounded for good.

    Attributes:
        parameters: shape (numel,).
        gradients: shape (numel + 2,); the last elements are a share of targets and the sum of losses.
        numel: elements of ``parameters``, padding included.
        decayed_numel: length of the first section, the weight-decayed matrices.
        layout: SHA-256 over names, offsets and shapes. Flat arrays of equal layout are interchangeable.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        named = trained_parameters(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in reversed(named.items())}
        self._allocate(shapes, shapes, device)
        self._rounded = None if dtype == torch.float32 else torch.empty_like(self.parameters, dtype=dtype)
        in_use = self.parameters if self._rounded is None else self._rounded
        for segment in self.segments:
            parameter = named[segment.name]
            self._view(self.parameters, segment).copy_(parameter.detach())
            parameter.data = self._view(in_use, segment)
            parameter.grad_dtype = torch.float32
            parameter.grad = self._view(self.gradients, segment)
        for parameter in model.parameters():
            if self._rounded is not None and parameter.is_floating_point() and not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        model.to(device)  # moves buffers, such as rotary frequencies, and what is frozen
        self.model = model
        self._named, self._in_use = named, self.parameters
        self.compute_with(self.parameters)

    def _allocate(
        self, shapes: dict[str, tuple[int, ...]], whole: dict[str, tuple[int, ...]], device: torch.device
    ) -> None:
        """Make the arrays for parameters of ``shapes``, of a model of ``whole``."""
        self.segments, self.decayed_numel, self.numel = place_segments(shapes)
        described = [(segment.name, segment.offset, segment.shape) for segment in place_segments(whole)[0]]
        self.layout = hashlib.sha256(repr(described).encode()).hexdigest()
        self.parameters = torch.zeros(self.numel, device=device)
        self.gradients = torch.zeros(self.numel + 2, device=device)

    def norm(self, flat: Tensor) -> float:
        """L2 norm of an array like ``parameters``, of the whole model. Of a model that is sharded this is a collective:
        all members of its mesh call it together."""
        return float(flat.norm())

    def compute_with(self, parameters: Tensor) -> None:
        """Let the model compute with ``parameters`` (numel,), which may be others than those of the attribute of that
        name. Call it after each change of them, too: the model may compute with a rounded copy."""
        if self._rounded is not None:
            self._rounded.copy_(parameters)
        elif parameters is not self._in_use:
            self._in_use = parameters
            for segment in self.segments:
                self._named[segment.name].data = self._view(parameters, segment)

    @property
    def stops(self) -> list[int]:
        return [segment.offset for segment in self.segments[1:]] + [self.numel]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {segment.name: segment.shape for segment in self.segments}

    @property
    def loss_sum(self) -> Tensor:
        """View of the loss slot, shape ()."""
        return self.gradients[-1]

    def copy_tensors(self, source: Mapping[str, Tensor]) -> None:
        """Copy parameters (of a shard: its rows) by name. Raises ``ValueError`` if names or shapes differ from this
        model's."""
        if {name: tuple(tensor.shape) for name, tensor in source.items()} != self.shapes:
            raise ValueError("its tensors have other names or shapes than this model's")
        for segment in self.segments:
            tensor = source[segment.name].detach()
            self._view(self.parameters, segment)[tuple(map(slice, tensor.shape))].copy_(tensor)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The parameter ``name`` in an array like ``parameters``."""
        return self._view(flat, next(segment for segment in self.segments if segment.name == name))

    def _view(self, flat: Tensor, segment: Segment) -> Tensor:
        return flat[segment.offset : segment.offset + segment.numel].view(segment.shape)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def place_segments(shapes: dict[str, tuple[int, ...]]) -> tuple[list[Segment], int, int]:
    """Place parameters of ``shapes`` in their order, matrices before vectors. Also returns the numel of the matrices,
    and of all."""
    segments: list[Segment] = []
    numel = decayed_numel = 0
    for is_matrix in (True, False):
        decayed_numel = numel
        for name, shape in shapes.items():
            if (len(shape) >= 2) is is_matrix:
                segments.append(Segment(name, numel, shape))
                numel += -(-segments[-1].numel // _ALIGN_NUMEL) * _ALIGN_NUMEL
    return segments, decayed_numel, numel


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda progress, share: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress, share: 1 - progress,
    "constant": lambda progress, share: 1.0,
    "wsd": lambda progress, share: min(1.0, (1 - progress) / share),
}
"""From (share of the steps after the warm-up that are done, ``decay_share``) to the height of the learning rate: 1 is
the highest, 0 the lowest. "wsd" stays at the highest, and falls evenly at the end (arXiv 2404.06395)."""


class OptimizerSpec(Optimizer):
    """The ``[optimizer]`` table. ``name``: a key of ``compute.optimizer.OPTIMIZERS``."""

    def lr_at(self, step: float, steps: int) -> float:
        """Learning rate of step ``step``, counted from 0, of a run of ``steps`` steps. A fraction of a step: that much
        of it is done."""
        if step < self.warmup_steps and self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        height = SCHEDULES[self.schedule](progress, self.decay_share)
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * height)

    def clip_scale(self, norm: float) -> float:
        """Factor for a gradient of L2 norm ``norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
        return min(1.0, self.clip_norm / (norm + 1e-6)) if self.clip_norm else 1.0


class OptimizerSchedule:
    """The optimizer's settings of each step of a run. ``use``: the settings were changed from some steps on."""

    def __init__(self, spec: OptimizerSpec, steps: int) -> None:
        self._periods: Sequence[SettingsPeriod] = [SettingsPeriod(0, spec.model_dump(), steps)]

    def use(self, periods: Sequence[SettingsPeriod]) -> None:
        self._periods = periods

    def at(self, step: int) -> OptimizerSpec:
        return OptimizerSpec(**period_at(self._periods, step).optimizer)

    def steps_at(self, step: int) -> int:
        """Steps of the run, as known at step ``step``."""
        return period_at(self._periods, step).steps

    def lr_at(self, step: int, progress: float = 0.0) -> float:
        """Learning rate at ``progress`` (negative: before its end, in steps) of step ``step``, counted from 0."""
        return self.at(step).lr_at(step + progress, period_at(self._periods, step).steps)


class FlatAdamW:
    """``torch.optim.AdamW`` over the two sections of the flat arrays.

    Equal gradients give equal bits for every thread count. For this a CPU makes the update on one thread: the division
    of the work decides which elements the scalar loop computes instead of the vectorized one. It is 1 % of a step.

    Args:
        parameters: those to update, shape (numel,); those of ``flat`` if it is None.
        keeps: on a CPU, leave the gradients as they are, which needs a copy of them.
        matrices: ranges of ``parameters`` to update with weight decay; None: the first section.

    Attributes:
        state: the two moments, ``exp_avg`` and ``exp_avg_sq``, one-dimensional; of the whole model (numel,).
    """

    def __init__(
        self,
        flat: FlatModel,
        spec: OptimizerSpec,
        parameters: Tensor | None = None,
        *,
        keeps: bool = True,
        matrices: Sequence[slice] | None = None,
    ) -> None:
        parameters = flat.parameters if parameters is None else parameters
        on_cpu = parameters.device.type == "cpu"
        # On a CPU the gradients can be the reduce buffer, which a redo needs unchanged.
        self._clipped = torch.zeros_like(parameters) if keeps and on_cpu else flat.gradients[: flat.numel]
        cut = flat.decayed_numel
        parts = [*([slice(0, cut)] if matrices is None else matrices), slice(cut, flat.numel)]
        sizes = [part.stop - part.start for part in parts]
        self.state = {name: parameters.new_zeros(sum(sizes)) for name in ("exp_avg", "exp_avg_sq")}
        views = [self._updated(parameters[part], self._clipped[part]) for part in parts]
        groups = [{"params": views[:-1], "decays": True}, {"params": views[-1:], "decays": False}]
        adamw = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
        for view, *moments in zip(views, *(torch.split(array, sizes) for array in self.state.values()), strict=True):
            step = torch.zeros((), device=parameters.device)
            adamw.state[view] = {"step": step, **dict(zip(self.state, moments, strict=True))}
        self._adamw = adamw
        self._optimizers: list[torch.optim.Optimizer] = [adamw]

    @staticmethod
    def _updated(values: Tensor, gradient: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(values)
        parameter.grad = gradient
        return parameter

    def apply(self, gradients: Tensor, *, step: int, lr: float, scale: float, weight_decay: float) -> None:
        """Make one update with ``scale * gradients`` (numel,), after ``step`` earlier ones. With ``keeps``, on a CPU,
        ``gradients`` stay unchanged. ``weight_decay``: of matrices."""
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group |= {"lr": lr, "weight_decay": weight_decay if group["decays"] else 0.0}
        for state in self._adamw.state.values():
            state["step"].fill_(step)
        with one_thread(), flushed_denormals():
            torch.mul(gradients, scale, out=self._clipped)
            for optimizer in self._optimizers:
                optimizer.step()

    def reset(self) -> None:
        for array in self.state.values():
            array.zero_()


def square_sum(values: npt.NDArray[Any]) -> float:
    """Sum of squares, or NaN if a value is not finite. The order is fixed: equal bits for any thread count. fp32 is
    summed as such in rows, and the rows' sums in fp64: the relative error is about 1e-8."""
    rows = values[: len(values) // _SQUARE_ROW * _SQUARE_ROW].reshape(-1, _SQUARE_ROW)
    rest, total = values[rows.size :].astype(np.float64), 0.0
    for start in range(0, len(rows), _SQUARE_ROWS):
        block = rows[start : start + _SQUARE_ROWS]
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.vecdot(block, block) if block.dtype == np.float32 else None
        if squares is None or not np.isfinite(squares).all():  # fixed point; too large for the squares in fp32
            wide = block.astype(np.float64)
            squares = np.vecdot(wide, wide)
        total += float(np.add.reduce(squares, dtype=np.float64))
    total += float(np.vecdot(rest, rest))
    return total if math.isfinite(total) else math.nan
