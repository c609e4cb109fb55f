"""DiLoCo (arXiv 2311.08105): every member takes many AdamW steps on its own copy, then all take one outer step.

A step is an outer step. Each of its micro-batches is one *inner step* of the member that computes it. The member's
*pseudo-gradient* is where it began minus where it came to. The members' mean of it, weighted by their inner steps, is
the gradient of one update with Nesterov momentum of the parameters that all share.

The shared state is the shared parameters and the outer momentum. Private to a member are its own copy of the
parameters and the inner moments. Both may be lost at any time: it goes on from the shared parameters and with fresh
moments.

With *fragments* (Streaming DiLoCo, arXiv 2501.18512) step s exchanges only fragment s mod P of the parameters, so a
member keeps its own copy of the rest. If steps *overlap*, a member contributes the inner steps that it has when the
step begins, and the sum travels while it takes more. It then mixes the result into its own copy. With either, the
inner steps of an aborted step stay in the member's own copy, and count when the step is repeated.

The learning rate of the inner steps follows the schedule of the outer steps, evenly divided.

With a *clip norm* (DP-FedAvg, arXiv 1710.06963) a contribution is the pseudo-gradient, scaled down to that L2 norm,
plus Gaussian noise. It weighs 1, however many inner steps it is the sum of, so the text of one member changes the sum
by at most the clip norm. Losses would tell about the text: they are withheld.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from p2ptrain.compute.device import flushed_denormals, one_thread
from p2ptrain.compute.flat import FlatAdamW, FlatModel, OptimizerSpec
from p2ptrain.compute.update import NO_NOISE, add_noise, clip

MIXING = 0.5
"""Share of its own copy that a member keeps when the result of an overlapping step arrives (arXiv 2501.18512)."""
SCALARS = 3
"""Elements of a contribution behind the parameters: its weight, its targets, and the sum of their losses in nats. The
last two in units of a full micro-batch: fixed point has no room for larger numbers."""


@dataclass(frozen=True, slots=True)
class LocalSpec:
    """The ``[local]`` table, whose values ``configs.schema`` has checked.

    Attributes:
        proximal: factor of the pull towards the shared parameters (FedProx, arXiv 1812.06127).
        fresh: each step begins with fresh inner moments.
        clip_norm: largest contribution of a member; 0: contributions are neither clipped nor noised.
        slots: members whose adapters are averaged exactly (``compute.fedex``); 0: parameters are averaged.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap: bool = False
    proximal: float = 0.0
    fresh: bool = False
    clip_norm: float = 0.0
    slots: int = 0


class LocalSteps:
    """A ``StepUpdate``. A contribution is the pseudo-gradient times its weight, and ``SCALARS`` more. Its weight is the
    number of inner steps that it is the sum of; an inner step of several micro-batches (in an island) counts for each
    of them.

    Attributes:
        noise: with a clip norm: standard deviation and secret key of the next contribution's noise; see
            ``roles.engine.PrivateEngine.use_noise``.
    """

    each_alone, most = True, math.inf
    final_early = False

    def __init__(self, flat: FlatModel, optimizer: OptimizerSpec, spec: LocalSpec, *, steps: int) -> None:
        self._flat, self._optimizer, self._spec, self._steps = flat, optimizer, spec, steps
        self._own = torch.empty_like(flat.parameters)
        self._inner = FlatAdamW(flat, optimizer, self._own, keeps=False)
        self.numel = flat.numel
        self.contribution = torch.zeros(flat.numel + SCALARS, device=flat.parameters.device)
        self.shared = {"momentum": torch.zeros_like(flat.parameters)} if spec.outer_momentum else {}
        self._is_fresh = True  # the next step begins with a new copy of the parameters
        self._moments_steps = 0  # inner steps since the moments were zero
        self._taken = [0] * spec.fragments  # by fragment: inner steps since it was exchanged
        self._targets = 0.0  # of the losses in ``FlatModel.loss_sum``
        self.noise = NO_NOISE
        self._sent = 0  # inner steps in the contribution; ``_take_up`` subtracts them when it was applied
        self._step = -1

    def begin_step(self, step: int, count: int) -> bool:
        spec = self._spec
        if self._is_fresh or not (spec.overlap or spec.fragments > 1):
            self._own.copy_(self._flat.parameters)
            self._taken = [0] * spec.fragments
            self._targets, self._sent = 0.0, 0
            self._flat.gradients.zero_()
            self._is_fresh = False
        self._flat.gradients[: self._flat.numel].zero_()
        if spec.fresh:
            self._inner.reset()
            self._moments_steps = 0
        self._step, self._count, self._done = step, count, 0
        self._flat.compute_with(self._own)
        # A member that has no inner steps or losses yet computes first, and sends only its losses. They count again
        # with the inner steps, in the next step.
        self._waits = spec.overlap and not (self._taken[step % spec.fragments] and self._targets)
        return spec.overlap and not self._waits

    def after_backward(self, micro_batches: int, targets: float) -> None:
        self._done += micro_batches
        lr = self._optimizer.lr_at(self._step - 1 + self._done / self._count, self._steps)
        gradients = self._flat.gradients[: self._flat.numel]
        if self._spec.proximal:
            gradients.add_(self._own - self._flat.parameters, alpha=self._spec.proximal)
        norm = self._flat.norm(gradients)
        if math.isfinite(norm):
            self._inner.apply(gradients, step=self._moments_steps, lr=lr, scale=self._optimizer.clip_scale(norm))
            self._moments_steps += 1
        else:  # the guard refuses the step, because its contribution is not finite either
            self._own.fill_(math.nan)
            self._is_fresh = True
        gradients.zero_()
        self._targets += targets
        self._taken = [taken + micro_batches for taken in self._taken]

    def finish(self) -> None:
        self._sent = 0 if self._waits else self._taken[self._step % self._spec.fragments]
        if self._spec.clip_norm:
            self._contribute_privately()
            return
        start, stop = self._fragment(self._step)
        self._contribute(start, slice(start, stop), self._sent, self.numel)

    def _contribute(self, place: int, part: slice, weight: int, weight_at: int) -> None:
        """Fill ``contribution``: ``part`` of the pseudo-gradient times ``weight``, from ``place`` on; the numbers."""
        self.contribution.zero_()
        difference = self.contribution[place : place + part.stop - part.start]
        torch.sub(self._flat.parameters[part], self._own[part], out=difference)
        difference *= weight
        self.contribution[weight_at] = self._sent
        self.contribution[-2] = self._targets
        self.contribution[-1] = self._flat.loss_sum
        if not self._waits:
            self._flat.loss_sum.zero_()
            self._targets = 0.0

    def _contribute_privately(self) -> None:
        (std, key), self.noise = self.noise, NO_NOISE
        self.contribution.zero_()
        self._flat.loss_sum.zero_()
        if not key:
            return
        difference = self.contribution[: self.numel]
        if self._sent:
            torch.sub(self._flat.parameters, self._own, out=difference)
            clip(difference, self._spec.clip_norm)
            self.contribution[self.numel] = 1
        add_noise(difference, std, key)

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        start, stop = self._fragment(step)
        numel = self._flat.numel
        return [(start, numel + SCALARS)] if stop == numel else [(start, stop), (numel, numel + SCALARS)]

    def mean_loss(self, summed: npt.NDArray[Any]) -> float:
        return float(summed[-1]) / float(summed[-2]) if summed[-2] else math.nan

    def apply(self, step: int, norm: float) -> tuple[float, float]:
        part, spec = slice(*self._fragment(step)), self._spec
        weight = float(self.contribution[-SCALARS])
        shared = self._flat.parameters[part]
        if weight:
            with one_thread(), flushed_denormals():  # as ``FlatAdamW``: equal bits for every thread count
                gradient = self.contribution[part] / weight
                if spec.outer_momentum:
                    momentum = self.shared["momentum"][part].mul_(spec.outer_momentum).add_(gradient)
                    gradient.add_(momentum, alpha=spec.outer_momentum)
                shared.sub_(gradient, alpha=spec.outer_lr)
        self._take_up(part, step)
        return self._optimizer.lr_at(step, self._steps), norm / max(weight, 1.0)

    def _take_up(self, part: slice, step: int) -> None:
        """Go on from the shared parameters, which have changed in ``part``."""
        self._is_fresh = self._is_fresh or step != self._step  # it took no part, such as after an outlier
        if not self._is_fresh:
            kept = MIXING if self._spec.overlap else 0.0
            self._own[part].lerp_(self._flat.parameters[part], 1 - kept)
            self._taken[step % self._spec.fragments] -= self._sent
            self._sent = 0
        self._flat.compute_with(self._flat.parameters)

    def reset(self) -> None:
        for array in self.shared.values():
            array.zero_()

    def loaded(self) -> None:
        self._is_fresh, self._moments_steps = True, 0
        self._inner.reset()
        self._flat.compute_with(self._flat.parameters)

    def _fragment(self, step: int) -> tuple[int, int]:
        """Range of the parameters that ``step`` exchanges. The last one includes the vectors, which are few."""
        index, count, numel = step % self._spec.fragments, self._spec.fragments, self._flat.decayed_numel
        start, stop = (numel * each // count // 16 * 16 for each in (index, index + 1))
        return start, self._flat.numel if index == count - 1 else stop
