"""Engines without torch: a quadratic function instead of a model, and parts that only take time.

The quadratic engine keeps every promise of ``roles.engine.Engine`` and costs microseconds. So tests and simulations can
run the real seed with hundreds of real workers. With 'local' and 'federated' each member moves a copy of its own, as in
``p2ptrain.compute.local``.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.schema import Local, Profile
from p2ptrain.compute.gradients import UNIT, to_fixed, to_float
from p2ptrain.compute.noise import gaussian
from p2ptrain.core.checkpoint_parts import shard_name
from p2ptrain.core.errors import JobFailed, ProtocolError, StorageError
from p2ptrain.core.training import Applied, Blob, BlobRange, FilePlan
from roles.engine import WHOLE, OnFinal, Payload, Stage

_STAMP = struct.Struct("!4sqqi")  # kind, step, micro-batch, sending stage


class StandInEngine:
    """Minimizes |parameters - target|². The target is a pure function of step and micro-batch.

    Args:
        numel: number of parameters of the whole model.
        corpus: stands for the data; members must agree on it.
        on_micro_batch: called with (step, index) before each micro-batch, to control a test's clock or to fail.
        stage: the part of the model that it holds, with about 1/``stage.count`` of the parameters. Parts are
            independent of each other, and together equal the whole bit for bit.

    Attributes:
        state_file: name of the checkpoint's state file; each stage has its own.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        numel: int = 257,
        corpus: str = "stand-in",
        on_micro_batch: Callable[[int, int], None] = lambda step, index: None,
        stage: Stage = WHOLE,
    ) -> None:
        self._whole, self.stage = numel, stage
        self.state_file = shard_name("state", stage.index, stage.count, ".bin") if stage.split else "state.bin"
        self._part = slice(numel * stage.index // stage.count, numel * (stage.index + 1) // stage.count)
        numel = self._part.stop - self._part.start
        self._profile = profile
        self._seed = profile.job.seed
        self._micro_batches = profile.batch.micro_batches
        self._local = {
            "local": profile.local,
            "federated": Local(outer_lr=1.0, outer_momentum=0.0),
        }.get(profile.job.strategy)
        self._on_micro_batch = on_micro_batch
        self._parameters = np.zeros(numel, np.float32)
        self._momentum = np.zeros(numel, np.float32)
        self._own: npt.NDArray[np.float32] | None = None  # with 'local' and 'federated': private to this member
        self._noise: tuple[float, bytes] | None = None  # of the next contribution, in a private job
        self.data_note = ""
        self.corpus_digest = hashlib.sha256(corpus.encode()).hexdigest()
        self.tokens_per_micro_batch = profile.batch.micro_batch_sequences * profile.data.sequence_tokens
        self.device = "stand-in"
        self.exact = profile.job.exact
        self.scalars = 3 if self._local else 1  # weight, number of losses; sum of losses
        self.reduce_buffer: npt.NDArray[Any] = np.zeros(numel + self.scalars, np.int64 if self.exact else np.float32)
        self._fits = True
        self._step = -1
        self.exact_from = numel
        self.windows = 1 << 16

    def share_cores(self, workers: int) -> None:
        """Does nothing: this engine always uses one core."""

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        self.reduce_buffer[:] = 0
        self._fits = True
        if self._local is None:
            return False
        fragments, overlap = self._local.fragments, self._local.overlap
        if self._own is None or not (overlap or fragments > 1):
            self._own, self._loss = self._parameters.copy(), np.zeros(2, np.float32)
            self._taken, self._sent = [0] * fragments, 0
        self._step = step
        self._waits = overlap and not (self._taken[step % fragments] and self._loss[0])
        return overlap and not self._waits

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        self._on_micro_batch(step, index)
        if self._local is not None:
            self._inner_step(step, index)
            return
        addend: npt.NDArray[Any] = self.contribution(step, index)
        if self.exact:
            addend, fits = to_fixed(addend, self._micro_batches)
            self._fits = self._fits and fits
        middle = addend.size // 2
        self.reduce_buffer[:middle] += addend[:middle]
        if on_final is not None:
            on_final(middle)  # the ring may send the front while the rest is still being added
        self.reduce_buffer[middle:] += addend[middle:]

    def contribution(self, step: int, index: int) -> npt.NDArray[np.float32]:
        """The micro-batch's addend in float32: the gradient of its mean loss / M, then that. Tests override it."""
        difference = self._parameters - self._target(step, index)
        gradient = 2 * difference / np.float32(self._whole * self._micro_batches)
        loss = np.add.reduce(difference**2, dtype=np.float64) / (self._whole * self._micro_batches)
        return np.append(gradient, loss.astype(np.float32))

    def _inner_step(self, step: int, index: int) -> None:
        assert self._own is not None
        difference = self._own - self._target(step, index)
        self._own -= np.float32(0.05) * difference
        self._loss += (1, float(np.add.reduce(difference**2, dtype=np.float64)) / self._whole)
        self._taken = [taken + 1 for taken in self._taken]

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Complete the contribution of a member with a copy of its own. Else ``micro_batch`` has completed it."""
        if self._local is None or self._own is None:
            return
        fragment, self.reduce_buffer[:] = self._fragment(self._step), 0
        self._sent = 0 if self._waits else self._taken[self._step % self._local.fragments]
        self.reduce_buffer[fragment] = (self._parameters - self._own)[fragment] * np.float32(self._sent)
        self.reduce_buffer[-3], self.reduce_buffer[-2:] = self._sent, self._loss
        if not self._waits:
            self._loss[:] = 0
        if self._noise is not None:
            (std, key), self._noise = self._noise, (0.0, b"")
            if key:
                self.reduce_buffer[fragment] += gaussian(key, fragment.stop - fragment.start, std)
            else:
                self.reduce_buffer[:-2] = 0

    def use_noise(self, std: float, key: bytes) -> None:
        """See ``roles.engine.PrivateEngine``; contributions are not clipped, and losses not withheld."""
        self._noise = std, key

    def exchanged(self, step: int) -> list[tuple[int, int]]:
        size, fragment = self.reduce_buffer.size, self._fragment(step)
        whole = fragment.stop == self._parameters.size
        return [(fragment.start, size)] if whole else [(fragment.start, fragment.stop), (self._parameters.size, size)]

    def _fragment(self, step: int) -> slice:
        numel, fragments = self._parameters.size, self._local.fragments if self._local else 1
        index = step % fragments
        return slice(numel * index // fragments, numel * (index + 1) // fragments)

    def partial_square_sum(self, start: int, stop: int) -> float:
        numel = self._parameters.size
        if stop > numel and not (self._fits and math.isfinite(self.reduce_buffer[-1])):
            return math.nan
        part = self.reduce_buffer[start : min(stop, numel)].astype(np.float64)
        total = float(np.add.reduce(np.square(part))) * (UNIT**2 if self.exact else 1.0)
        return total if math.isfinite(total) else math.nan

    def apply(self, step: int, square_sum: float) -> Applied:
        if self._local is not None:
            return self._outer_step(step, square_sum)
        values = to_float(self.reduce_buffer) if self.exact else self.reduce_buffer
        loss = float(values[-1])
        if not math.isfinite(loss + square_sum):
            raise JobFailed(f"step {step + 1} is not finite: loss {loss}")
        self._momentum *= np.float32(0.5)
        self._momentum += values[:-1]
        self._parameters -= np.float32(8.0) * self._momentum
        return Applied(step + 1, loss, 8.0, math.sqrt(square_sum))

    def _outer_step(self, step: int, square_sum: float) -> Applied:
        assert self._local is not None
        weight, losses, total = self.reduce_buffer[-3:]
        loss = float(total) / float(losses) if losses else math.nan
        if not math.isfinite(loss + square_sum):
            raise JobFailed(f"step {step + 1} is not finite: loss {loss}")
        fragment, options = self._fragment(step), self._local
        if weight:
            gradient = self.reduce_buffer[fragment] / weight
            self._momentum[fragment] = np.float32(options.outer_momentum) * self._momentum[fragment] + gradient
            gradient += np.float32(options.outer_momentum) * self._momentum[fragment]
            self._parameters[fragment] -= np.float32(options.outer_lr) * gradient
        if self._step != step:
            self._own = None
        if self._own is not None:
            kept = np.float32(0.5 if options.overlap else 0.0)
            self._own[fragment] = kept * self._own[fragment] + (1 - kept) * self._parameters[fragment]
            self._taken[step % options.fragments] -= self._sent
            self._sent = 0
        return Applied(step + 1, loss, options.outer_lr, math.sqrt(square_sum))

    def validate(self, first: int, count: int) -> tuple[float, int]:
        squares = [np.sum((self._parameters - self._target(-1, index)) ** 2) for index in range(first, first + count)]
        targets = 0 if self._part.start else count * self.tokens_per_micro_batch  # only the first part counts them
        return float(np.sum(squares)) / self._whole * self.tokens_per_micro_batch, targets

    def validation_batches(self) -> int:
        return self._profile.validation.batches

    def state(self) -> list[Blob]:
        return [
            Blob("parameters", self._parameters.view(np.uint8).data),
            Blob("momentum", self._momentum.view(np.uint8).data),
        ]

    def load_initial(self) -> None:
        self._parameters[:] = self._initial()[self._part]
        self._momentum[:] = 0
        self._own = None

    def state_loaded(self, step: int) -> None:
        self._own = None

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        whole = tuple(BlobRange(blob.name, 0, blob.view.nbytes) for blob in self.state())
        notes = json.dumps({"numel": self._whole}).encode()
        of_all = [] if self.stage.index else [FilePlan("config.json", (notes,))]
        return [FilePlan(self.state_file, whole), *of_all]

    def load(self, directory: Path) -> None:
        data = (directory / self.state_file).read_bytes()
        if len(data) != 2 * self._parameters.nbytes:
            raise StorageError(f"{directory / self.state_file} is of another model")
        values = np.frombuffer(data, np.float32)
        self._parameters[:], self._momentum[:] = np.split(values, 2)
        self._own = None

    def digest(self) -> str:
        """SHA-256 of the state, hex. Equal digests mean equal bits."""
        return hashlib.sha256(self._parameters.tobytes() + self._momentum.tobytes()).hexdigest()

    def _target(self, step: int, index: int) -> npt.NDArray[np.float32]:
        key = hashlib.blake2b(struct.pack("!qqq", self._seed, step, index), digest_size=8).digest()
        noise = np.random.default_rng(int.from_bytes(key, "big")).standard_normal(self._whole, np.float32)
        return np.float32(1.0) + np.float32(0.01) * noise[self._part]

    def initial_digest(self) -> bytes:
        return hashlib.blake2b(self._initial().tobytes(), digest_size=16).digest()

    def _initial(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(self._seed).standard_normal(self._whole).astype(np.float32)


class TimedPart:
    """Sleeps instead of computing. Its payloads carry a stamp, which the receiving stage checks.

    An operation takes at least the configured time. A busy machine may wake it late. Later operations are not shortened
    in return, because they need not be the ones that the delay held up.

    Args:
        stage: index of this part, of ``stages``.
        forward_s, backward_s: duration for one micro-batch.
        sleep, clock: in seconds; tests pass their own.
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
        self._sleep(max(began + seconds - self._clock(), 0.0))

    def _made(self, kind: bytes, index: int, nbytes: int) -> Payload:
        payload = np.zeros(nbytes, np.uint8)
        _STAMP.pack_into(payload.data, 0, kind, self._step, index, self._stage)
        return payload

    def _check(self, payload: Payload | None, kind: bytes, index: int, stage: int) -> None:
        if payload is None:
            assert not 0 <= stage < self._stages, "no payload arrived"
            return
        wanted, got = (kind, self._step, index, stage), _STAMP.unpack_from(payload.data)
        if got != wanted:
            raise ProtocolError(f"the payload is of operation {got}, expected {wanted}")
