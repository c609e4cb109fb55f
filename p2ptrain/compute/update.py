"""How a step changes the parameters: what a member contributes to it, and what every member does with the sum."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from p2ptrain.compute.flat import FlatModel, OptimizerSchedule
from p2ptrain.compute.gradients import gaussian
from p2ptrain.compute.optimizer import make_optimizer

NO_NOISE = (0.0, b"")
_NORM_BLOCK_NUMEL = 1 << 20
CLIPPED_FACTOR = 1.25
"""Memory for what trains, beside that of summed gradients: the sum of clipped ones has an array of its own."""


class StepUpdate(ABC):
    """What a strategy computes and applies; ``roles.strategies`` exchange it. ``Trainer`` calls it on its thread.

    ``Trainer`` adds the losses to ``FlatModel.loss_sum``, the last element of ``FlatModel.gradients``. The guard of the
    members sees only contributions, so a number that is not finite must stay visible in them.

    Attributes:
        contribution: this member's part of a step's sum, on the computing device, shape (numel + some,): gradients or
            differences, then a few *scalars*, the last one for the losses. After ``finish`` it stays as it is until
            ``apply``; only the ring writes the members' sum into it.
        adds_up: whether ``contribution`` is ``FlatModel.gradients``, to which each micro-batch adds: their front may be
            sent while the last backward pass still runs. The members' sum of a step is the mean over all targets of the
            step, and so is that of ``loss_sum``. False: ``after_backward`` uses the gradient of each call, which is a
            mean over the targets of the call's micro-batches, and ``loss_sum`` is in nats / tokens of a micro-batch.
        numel: elements of ``contribution`` before the scalars.
        shared: the state beside the parameters that is equal on all members: name → flat array. May be empty.
        schedule: the settings of each step.
        max_scalar: largest sum of each of the scalars, but for the losses.
    """

    contribution: Tensor
    adds_up: bool = False
    numel: int
    shared: dict[str, Tensor]
    schedule: OptimizerSchedule
    max_scalar: float
    _noise: tuple[float, bytes] = NO_NOISE  # of the next contribution

    @abstractmethod
    def begin_step(self, step: int, count: int) -> bool:
        """Begin step ``step``, of which this member computes ``count`` micro-batches, maybe none. Returns whether the
        contribution does not need them: then ``finish`` may come first."""

    def after_backward(self, micro_batches: int, targets: float) -> None:
        """Use the gradient in ``FlatModel.gradients``, of so many micro-batches, if it does not add up. ``targets``:
        theirs / tokens of a micro-batch."""
        return

    def use_noise(self, std: float, key: bytes) -> None:
        """See ``roles.engine.NoiseInput``; of updates that clip contributions."""
        self._noise = std, key

    def finish(self) -> None:
        """Complete ``contribution``."""
        return

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        """Ranges of ``contribution`` that step ``step`` sums over the members, ascending. Elsewhere it is zero."""
        return [(0, len(self.contribution))]

    @abstractmethod
    def mean_loss(self, summed: npt.NDArray[Any]) -> float:
        """Mean loss of the step in nats, from the members' sum of ``contribution``."""

    @abstractmethod
    def apply(self, step: int, norm: float) -> tuple[float, float]:
        """Change parameters and ``shared`` by the members' sum, which is in ``contribution``: on a CPU it stays there,
        for members that heal; on a device it may be overwritten. Must give the same bits on every member, so it runs
        on one thread and flushes denormals, as ``FlatAdamW``. Returns the learning rate and the gradient norm to
        report. ``norm``: L2 norm of the sum."""

    def reset(self) -> None:
        """Set ``shared`` to that of step 0."""
        for array in self.shared.values():
            array.zero_()

    def on_state_replaced(self) -> None:
        """Parameters and ``shared`` were replaced: forget what belongs to the old ones."""
        return


class SummedGradients(StepUpdate):
    """Each step is one update with the gradient of the global batch, which is the sum of all members' gradients.

    Args:
        unit: value of 1 in ``FlatModel.gradients`` when ``apply`` is called.
        is_weighted: gradients and losses were divided by the most targets that a step can have, because no member
            knows how many the others have. The scalar before the losses is the share that its own are of that.

    Attributes:
        earlier_steps: of the optimizer, whose moments the job began with.
    """

    adds_up = True
    max_scalar = 1.001  # rounded

    def __init__(
        self, flat: FlatModel, schedule: OptimizerSchedule, *, unit: float = 1.0, is_weighted: bool = False
    ) -> None:
        self._flat, self.schedule, self._unit = flat, schedule, unit
        self._is_weighted = is_weighted
        self.earlier_steps = 0
        self.contribution, self.numel = flat.gradients, flat.numel
        self._optimizer = make_optimizer(flat, schedule.at(0))
        self.shared = self._optimizer.state

    def begin_step(self, step: int, count: int) -> bool:
        self._flat.gradients.zero_()
        return False

    def mean_loss(self, summed: npt.NDArray[Any]) -> float:
        weight = self._weight(summed)
        return float(summed[-1]) * self._unit / weight if weight else math.nan

    def apply(self, step: int, norm: float) -> tuple[float, float]:
        weight = self._weight(self.contribution)
        settings, lr, norm = self.schedule.at(step), self.schedule.lr_at(step), norm / weight
        scale, decay = settings.clip_scale(norm) * self._unit / weight, settings.weight_decay
        done = self.earlier_steps + step
        self._optimizer.apply(self.contribution[: self.numel], step=done, lr=lr, scale=scale, weight_decay=decay)
        return lr, norm

    def _weight(self, summed: Tensor | npt.NDArray[Any]) -> float:
        return float(summed[-2]) if self._is_weighted else 1.0


class ClippedGradients(SummedGradients):
    """As ``SummedGradients``, but each micro-batch is one sequence. The gradient of the mean over its own targets is
    clipped; the members' sum gets Gaussian noise (DP-SGD, arXiv 1607.00133), and is divided by the number of sequences.
    Their targets and losses would tell about the text: they are withheld.
    The noise of ``use_noise`` is that of the sum of gradients, before it is divided by their number.
    """

    adds_up = False

    def __init__(self, flat: FlatModel, schedule: OptimizerSchedule, micro_batches: int, clip_norm: float) -> None:
        super().__init__(flat, schedule)
        self.contribution = torch.zeros_like(flat.gradients)
        self._micro_batches, self._clip_norm = micro_batches, clip_norm

    def begin_step(self, step: int, count: int) -> bool:
        self.contribution.zero_()
        return super().begin_step(step, count)

    def after_backward(self, micro_batches: int, targets: float) -> None:
        gradient = self._flat.gradients[: self.numel]
        clip(gradient, self._clip_norm)
        self.contribution[: self.numel].add_(gradient, alpha=1 / self._micro_batches)
        self._flat.gradients.zero_()

    def finish(self) -> None:
        (std, key), self._noise = self._noise, NO_NOISE
        if key:
            add_noise(self.contribution[: self.numel], std / self._micro_batches, key)
        else:
            self.contribution.zero_()

    def mean_loss(self, summed: npt.NDArray[Any]) -> float:
        return math.nan

    def apply(self, step: int, norm: float) -> tuple[float, float]:
        if norm:
            return super().apply(step, norm)
        return self.schedule.lr_at(step), norm  # the budget is spent: nobody contributed


def add_noise(values: Tensor, std: float, key: bytes) -> None:
    values += torch.from_numpy(gaussian(key, len(values), std)).to(values.device)


def clip(values: Tensor, norm: float) -> None:
    """Scale what a private member contributes down to the L2 norm ``norm``, in place; zeros if it is not finite: a
    refusal would tell about the text. The host does not wait for the device."""
    wide = values.cpu() if values.device.type == "mps" else values  # Apple GPUs have no fp64
    # fp64: a sum of many squares in fp32 may lack percents of it. In blocks: a CPU makes a copy in fp64.
    blocks = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in torch.split(wide, _NORM_BLOCK_NUMEL)]
    length = torch.linalg.vector_norm(torch.stack(blocks)).clamp(min=1e-30)
    factor = (norm * 0.9999 / length).clamp(max=1.0)  # less than ``norm`` also after rounding
    values *= torch.where(length.isfinite(), factor, 0.0).to(values)
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
