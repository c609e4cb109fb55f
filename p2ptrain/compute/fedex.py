"""Exact averages of LoRA adapters (FedEx-LoRA, arXiv 2410.09432).

The mean of products B_i A_i is not the product of the means. So the members do not sum their adapters, they collect
them: each has a *slot* of the contribution. All then average the adapters, and add to the weights of the model what the
product of the averages lacks::

    W + mean(B_i A_i)  =  (W + mean(B_i A_i) - mean(B) mean(A))  +  mean(B) mean(A)

W is the weight beside the adapter, so it changes in every round. The shared state holds the left side, the *merged*
weights, because this is what is saved: a checkpoint is a whole model. The weights beside the adapters are always
computed from it, so all members, also new ones, have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from p2ptrain.compute.checkpoint_files import MERGED
from p2ptrain.compute.device import flushed_denormals, one_thread
from p2ptrain.compute.flat import FlatModel, OptimizerSpec, Segment
from p2ptrain.compute.local import LocalSpec, LocalSteps
from p2ptrain.compute.tuning import ADAPTER_NAME


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
    """A ``StepUpdate``. A contribution has for each slot the differences, as ``LocalSteps``, but without the weight;
    then the weight of each slot, the number of targets, and the sum of losses.

    Only adapters train.

    Attributes:
        places: name of each layer's weight → its place in the merged weights.
    """

    def __init__(self, flat: FlatModel, optimizer: OptimizerSpec, spec: LocalSpec, *, steps: int) -> None:
        super().__init__(flat, optimizer, spec, steps=steps)
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
        return self._optimizer.lr_at(step, self._steps), norm

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
