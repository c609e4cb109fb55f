"""Parts without torch: one that really computes, so that results can be compared, and one that only takes time."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import ProtocolError
from roles.part_engine import Payload

Vector = npt.NDArray[np.float64]

_STAMP = struct.Struct("!4sqqi")  # kind, step, micro-batch, stage that made it


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
        draw = np.random.default_rng(seed)
        parameters = draw.standard_normal((layers, 2, width))
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


class TimedPart:
    """Takes its time and burns no CPU. Its payloads say what they are, and are checked where they arrive.

    An operation never takes less than it should. A busy machine wakes a sleeper late, and that is not made up for: what
    one operation is shortened by may not be what another one has held up.

    Args:
        stage: this part's, of ``stages``.
        forward_s, backward_s: of one micro-batch.
        sleep, clock: what takes the time, and tells it, in seconds; a test brings its own.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        *,
        forward_s: float,
        backward_s: float,
        activation_bytes: int,
        gradient_bytes: int,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.activation_bytes = max(activation_bytes, _STAMP.size)
        self.gradient_bytes = max(gradient_bytes, _STAMP.size)
        self._stage, self._stages = stage, stages
        self._forward_s, self._backward_s = forward_s, backward_s
        self._sleep, self._clock = sleep, clock
        self._step = 0

    def forward(self, step: int, index: int, inputs: Payload | None) -> Payload | None:
        began, self._step = self._clock(), step
        self._check(inputs, b"acts", index, self._stage - 1)
        made = self._made(b"acts", index, self.activation_bytes) if self._stage < self._stages - 1 else None
        self._take(began, self._forward_s)
        return made

    def backward(self, index: int, gradient: Payload | None) -> Payload | None:
        began = self._clock()
        self._check(gradient, b"grad", index, self._stage + 1)
        made = self._made(b"grad", index, self.gradient_bytes) if self._stage else None
        self._take(began, self._backward_s)
        return made

    def _take(self, began: float, seconds: float) -> None:
        """Until the operation that ``began`` then has had its time, what its payloads took included."""
        self._sleep(max(began + seconds - self._clock(), 0.0))

    def _made(self, kind: bytes, index: int, nbytes: int) -> Payload:
        payload = np.zeros(nbytes, np.uint8)
        _STAMP.pack_into(payload.data, 0, kind, self._step, index, self._stage)
        return payload

    def _check(self, payload: Payload | None, kind: bytes, index: int, stage: int) -> None:
        if payload is None:
            assert not 0 <= stage < self._stages, "nothing came"
            return
        wanted, got = (kind, self._step, index, stage), _STAMP.unpack_from(payload.data)
        if got != wanted:
            raise ProtocolError(f"the payload of another operation: {got}, not {wanted}")
