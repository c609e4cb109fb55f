"""DiLoCo (arXiv 2311.08105): every member takes many steps on its own copy, then all take one outer step. With Muon
for the steps on the copies it is MuLoCo (arXiv 2505.23725).

A step is an outer step. Each of its micro-batches is one *inner step* of the member that computes it. The member's
*pseudo-gradient* is where it began minus where it came to. The members' mean of it, weighted by their inner steps, is
the gradient of one update with Nesterov momentum of the parameters that all share.

The shared state is the shared parameters and the outer momentum. Private to a member are its own copy of the
parameters and the inner moments. Both may be lost at any time: it goes on from the shared parameters and with fresh
moments.

With *fragments* (Streaming DiLoCo, arXiv 2501.18512) step s exchanges only fragment s mod P of the parameters. If steps
*overlap*, the sum travels while a member takes more inner steps. It then mixes the result into its own copy.
``InnerSteps`` counts which inner steps a contribution holds.

The learning rate of the inner steps follows the schedule of the outer steps, evenly divided.

With a *clip norm* (DP-FedAvg, arXiv 1710.06963) a contribution is the pseudo-gradient, scaled down to that L2 norm,
plus Gaussian noise. It weighs 1, however many inner steps it is the sum of, so the text of one member changes the sum
by at most the clip norm. Losses would tell about the text: they are withheld.

``ExactAverage`` (FedEx-LoRA, arXiv 2410.09432) averages LoRA adapters exactly. The mean of products B_i A_i is not the
product of the means. So the members do not sum their adapters, they collect them: each has a *slot* of the
contribution. All then average the adapters, and add to the model's weights what the product of the averages lacks::

    W + mean(B_i A_i)  =  (W + mean(B_i A_i) - mean(B) mean(A))  +  mean(B) mean(A)

W is the weight beside the adapter, so it changes in every round. The shared state holds the left side, the *merged*
weights, because a checkpoint is a whole model. The weights beside the adapters are always computed from it, so all
members, also new ones, have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from configs.schema import Local
from p2ptrain.compute.device import flushed_denormals, one_thread
from p2ptrain.compute.flat import FlatModel, OptimizerSchedule, Segment
from p2ptrain.compute.gradients import InnerSteps
from p2ptrain.compute.optimizer import make_optimizer
from p2ptrain.compute.tuning import ADAPTER_NAME
from p2ptrain.compute.update import NO_NOISE, StepUpdate, add_noise, clip

MERGED = "merged"
"""Name of the shared array that ``ExactAverage`` has."""
SCALARS = 3
"""Elements of a contribution behind the parameters: its weight, its targets, and the sum of their losses in nats. The
last two in units of a full micro-batch: fixed point has no room for larger numbers."""


class LocalSpec(Local):
    """The ``[local]`` table, and what other strategies that average models need.

    Attributes:
        proximal: factor of the pull towards the shared parameters (FedProx, arXiv 1812.06127).
        fresh: each step begins with fresh inner moments.
        clip_norm: largest contribution of a member; 0: contributions are neither clipped nor noised.
        slots: members whose adapters are averaged exactly (``ExactAverage``); 0: parameters are averaged.
    """

    proximal: float = 0.0
    fresh: bool = False
    clip_norm: float = 0.0
    slots: int = 0


class LocalSteps(StepUpdate):
    """A contribution is the pseudo-gradient times its weight, and ``SCALARS`` more. Its weight is the number of inner
    steps that it is the sum of; an inner step of several micro-batches (in an island) counts for each of them.
    """

    max_scalar = math.inf

    def __init__(self, flat: FlatModel, schedule: OptimizerSchedule, spec: LocalSpec) -> None:
        self._flat, self.schedule, self._spec = flat, schedule, spec
        self._own = torch.empty_like(flat.parameters)
        self._inner = make_optimizer(flat, schedule.at(0), self._own, keeps=False)
        self.numel = flat.numel
        self.contribution = torch.zeros(flat.numel + SCALARS, device=flat.parameters.device)
        self.shared = {"momentum": torch.zeros_like(flat.parameters)} if spec.outer_momentum else {}
        self._counts = InnerSteps(flat.numel, flat.decayed_numel, fragments=spec.fragments, overlap=spec.overlap)
        self._moments_steps = 0  # inner steps since the moments were zero
        self._targets = 0.0  # of the losses in ``FlatModel.loss_sum``
        self._share, self._done = 1, 0  # micro-batches of the step at this member; those of its inner steps so far

    def begin_step(self, step: int, count: int) -> bool:
        if self._counts.begin_step(step, has_losses=self._targets > 0):
            self._own.copy_(self._flat.parameters)
            self._targets = 0.0
            self._flat.gradients.zero_()
        self._flat.gradients[: self._flat.numel].zero_()
        if self._spec.fresh:
            self._reset_moments()
        self._share, self._done = count, 0
        self._flat.compute_with(self._own)
        return self._counts.is_ready

    def after_backward(self, micro_batches: int, targets: float) -> None:
        self._done += micro_batches
        settings = self.schedule.at(self._counts.step)
        lr = self.schedule.lr_at(self._counts.step, self._done / self._share - 1)
        gradients = self._flat.gradients[: self._flat.numel]
        if self._spec.proximal:
            gradients.add_(self._own - self._flat.parameters, alpha=self._spec.proximal)
        norm = self._flat.norm(gradients)
        if math.isfinite(norm):
            scale, decay = settings.clip_scale(norm), settings.weight_decay
            self._inner.apply(gradients, step=self._moments_steps, lr=lr, scale=scale, weight_decay=decay)
            self._moments_steps += 1
        else:  # the guard refuses the step, because its contribution is not finite either
            self._own.fill_(math.nan)
            self._counts.is_copy_void = True
        self._flat.compute_with(self._own)
        gradients.zero_()
        self._targets += targets
        self._counts.count(micro_batches)

    def finish(self) -> None:
        sent = self._counts.send()
        if self._spec.clip_norm:
            self._contribute_privately()
            return
        part = self._counts.fragment(self._counts.step)
        self._contribute(part.start, part, sent, self.numel)

    def _contribute(self, place: int, part: slice, weight: int, weight_at: int) -> None:
        """Fill ``contribution``: ``part`` of the pseudo-gradient times ``weight``, from ``place`` on; the numbers."""
        self.contribution.zero_()
        difference = self.contribution[place : place + part.stop - part.start]
        torch.sub(self._flat.parameters[part], self._own[part], out=difference)
        difference *= weight
        self.contribution[weight_at] = self._counts.sent
        self.contribution[-2] = self._targets
        self.contribution[-1] = self._flat.loss_sum
        if not self._counts.waits:
            self._flat.loss_sum.zero_()
            self._targets = 0.0

    def _contribute_privately(self) -> None:
        (std, key), self._noise = self._noise, NO_NOISE
        self.contribution.zero_()
        self._flat.loss_sum.zero_()
        if not key:
            return
        difference = self.contribution[: self.numel]
        if self._counts.sent:
            torch.sub(self._flat.parameters, self._own, out=difference)
            clip(difference, self._spec.clip_norm)
            self.contribution[self.numel] = 1
        add_noise(difference, std, key)

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        return self._counts.exchanged(step, SCALARS)

    def mean_loss(self, summed: npt.NDArray[Any]) -> float:
        return float(summed[-1]) / float(summed[-2]) if summed[-2] else math.nan

    def apply(self, step: int, norm: float) -> tuple[float, float]:
        part, spec = self._counts.fragment(step), self._spec
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
        return self.schedule.lr_at(step), norm / max(weight, 1.0)

    def _take_up(self, part: slice, step: int) -> None:
        """Go on from the shared parameters, which have changed in ``part``."""
        if self._counts.take_up(step):
            self._own[part].lerp_(self._flat.parameters[part], 1 - self._counts.kept)

    def on_state_replaced(self) -> None:
        self._counts.is_copy_void = True
        self._reset_moments()

    def _reset_moments(self) -> None:
        self._moments_steps = 0
        self._inner.reset()


# ----------------------------------------------------------------------------------------- exact averages of adapters


class _Layer:
    """A linear layer of peft with an adapter: the names of its factors, (rank, in) and (out, rank), and its weight
    beside them, (out, in), or (in, out) if it is transposed."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = f"{name}.base_layer.weight"
        self.a, self.b = (f"{name}.{factor}.{ADAPTER_NAME}.weight" for factor in ("lora_A", "lora_B"))
        self.weight: Tensor = module.base_layer.weight.data
        self.scale: float = module.scaling[ADAPTER_NAME]
        self.transposed: bool = module.fan_in_fan_out


class ExactAverage(LocalSteps):
    """A contribution has for each slot the differences, as ``LocalSteps``, but without the weight; then the weight of
    each slot, the number of targets, and the sum of losses.

    Only adapters train.

    Attributes:
        places: name of each layer's weight → its place in the merged weights.
    """

    def __init__(self, flat: FlatModel, schedule: OptimizerSchedule, spec: LocalSpec) -> None:
        super().__init__(flat, schedule, spec)
        self._slots, self._slot = spec.slots, 0
        self._layers = _layers_of(flat.model)
        stops = accumulate((layer.weight.numel() for layer in self._layers), initial=0)
        self.places = {
            layer.name: Segment(layer.name, start, tuple(layer.weight.shape))
            for layer, start in zip(self._layers, stops, strict=False)
        }
        device = flat.parameters.device
        self.numel = self._slots * flat.numel
        self.contribution = torch.zeros(self.numel + self._slots + 2, device=device)
        self._merged = torch.cat([layer.weight.flatten() for layer in self._layers])
        self.shared = {MERGED: self._merged}

    def use_slot(self, slot: int) -> None:
        """Contribute in ``slot``, below ``LocalSpec.slots``, from now on."""
        self._slot = slot

    def finish(self) -> None:
        self._counts.send()
        self._contribute(self._slot * self._flat.numel, slice(0, self._flat.numel), 1, self.numel + self._slot)

    def exchanged(self, step: int) -> Sequence[tuple[int, int]]:
        return [(0, len(self.contribution))]

    def apply(self, step: int, norm: float) -> tuple[float, float]:
        numel, shared = self._flat.numel, self._flat.parameters
        weights = self.contribution[self.numel : self.numel + self._slots]
        total = float(weights.sum())
        with one_thread(), flushed_denormals():
            mean, ideal = torch.zeros_like(shared), [torch.zeros_like(layer.weight) for layer in self._layers]
            for slot, weight in enumerate((weights / total).tolist()):
                if weight:
                    own = shared - self.contribution[slot * numel : (slot + 1) * numel]
                    mean.add_(own, alpha=weight)
                    for layer, update in zip(self._layers, ideal, strict=True):
                        update.add_(self._product(layer, own), alpha=weight)
            for layer, update, merged in zip(self._layers, ideal, self._merged_views(), strict=True):
                torch.add(layer.weight, update, out=merged)
            shared.copy_(mean)
        self._take_up(slice(0, numel), step)
        self._split()
        return self.schedule.lr_at(step), norm

    def begin_again(self, model: nn.Module) -> None:
        """Take the merged weights from ``model``, as it was before any step."""
        self._merged.copy_(torch.cat([layer.weight.flatten() for layer in _layers_of(model)]))

    def reset(self) -> None:
        """Does nothing: see ``begin_again``."""

    def on_state_replaced(self) -> None:
        super().on_state_replaced()
        self._split()

    def _split(self) -> None:
        """Set the weights beside the adapters to what the adapters leave of the merged ones."""
        with one_thread(), flushed_denormals():
            for layer, merged in zip(self._layers, self._merged_views(), strict=True):
                torch.sub(merged, self._product(layer, self._flat.parameters), out=layer.weight)

    def _product(self, layer: _Layer, parameters: Tensor) -> Tensor:
        product = layer.scale * (self._flat.view(parameters, layer.b) @ self._flat.view(parameters, layer.a))
        return product.T if layer.transposed else product

    def _merged_views(self) -> list[Tensor]:
        sizes = [layer.weight.numel() for layer in self._layers]
        pieces = torch.split(self._merged, sizes)
        return [piece.view(layer.weight.shape) for piece, layer in zip(pieces, self._layers, strict=True)]


def _layers_of(model: nn.Module) -> list[_Layer]:
    return [_Layer(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]
