"""A part of a model without torch that really computes, so that results can be compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ring.chain import Payload

Vector = npt.NDArray[np.float64]


class ArithmeticPart:
    """Layers [start, stop) of ``layers``, each ``y = tanh(w * roll(x, 1) + b)``, with the loss ``mean(y * target)``.

    All of it is elementwise in float64, so a part's results do not depend on where the model was cut: over a whole
    chain, gradients and losses have the bits that one process gets which holds all layers.

    Attributes:
        gradients: shape (layers held, 2, width): by w and b, summed over the micro-batches in the order of their
            backwards.
        losses: of each micro-batch whose forward came last, by index; on the last stage.
        kept: micro-batches between forward and backward, now and at most.
    """

    def __init__(self, start: int, stop: int, layers: int, *, width: int = 8, seed: int = 0) -> None:
        sample_index = np.random.default_rng(seed)
        parameters = sample_index.standard_normal((layers, 2, width))
        self.activation_bytes = self.gradient_bytes = width * 8
        self.gradients = np.zeros((stop - start, 2, width))
        self.losses: dict[int, float] = {}
        self.kept = self.most_kept = 0
        self._parameters = parameters[start:stop]
        self._first, self._last = start == 0, stop == layers
        self._seed, self._width = seed, width
        self._inputs: dict[int, list[Vector]] = {}  # micro-batch → what each layer was given, and what came of it
        self._targets: dict[int, Vector] = {}

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        assert (inputs is None) == self._first
        assert index not in self._inputs, "a forward came twice"
        x = self._drawn(step, index, 0) if inputs is None else inputs.view(np.float64).copy()
        passed = [x]
        for weight, bias in self._parameters:
            passed.append(np.tanh(weight * np.roll(passed[-1], 1) + bias))
        self._inputs[index] = passed
        self.kept += 1
        self.most_kept = max(self.most_kept, self.kept)
        if not self._last:
            return passed[-1].view(np.uint8)
        self._targets[index] = self._drawn(step, index, 1)
        self.losses[index] = float(np.mean(passed[-1] * self._targets[index]))
        return None

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        assert (gradient is None) == self._last
        passed = self._inputs.pop(index)
        self.kept -= 1
        dy = self._targets.pop(index) / self._width if gradient is None else gradient.view(np.float64).copy()
        for layer in reversed(range(len(self._parameters))):
            weight, _ = self._parameters[layer]
            inside = dy * (1 - passed[layer + 1] ** 2)
            self.gradients[layer, 0] += inside * np.roll(passed[layer], 1)
            self.gradients[layer, 1] += inside
            dy = np.roll(inside * weight, -1)
        return None if self._first else dy.view(np.uint8)

    def _drawn(self, step: int, index: int, what: int) -> Vector:
        return np.random.default_rng([self._seed, step, index, what]).standard_normal(self._width)
