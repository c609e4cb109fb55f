"""An engine without torch: a quadratic function instead of a model.

It keeps every promise of ``roles.engine.Engine`` and costs microseconds. So tests and simulations can run the real seed
with hundreds of real workers.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from configs.schema import Profile
from p2ptrain.compute.gradients import UNIT, InnerSteps, gaussian, to_fixed, to_float
from p2ptrain.core.checkpoints import shard_name
from p2ptrain.core.disk import Disk, RealDisk
from p2ptrain.core.errors import JobFailed, StorageError
from p2ptrain.core.training import Applied, Blob, BlobRange, FilePlan, OnFinal, SettingsPeriod, TrainingData, period_at
from roles.compute_thread import ComputeThread
from roles.engine import WHOLE, Engine, Stage
from roles.strategies import strategy_of
from roles.strategies.interface import Progress
from roles.strategies.parts import PartRings
from roles.strategies.strategy import Factory, Strategy
from roles.strategies.sync import GradientSum, MicroBatches

STATE_BYTES = 64 << 20
"""Largest state of a stand-in on a disk."""


def strategy_of_stand_ins(profile: Profile) -> Factory:
    """Parts of a stand-in need no activations of each other."""

    def of_parts(engine: Engine, compute: ComputeThread, progress: Progress, bucket_bytes: int) -> Strategy:
        work, exchange = MicroBatches(engine, compute, progress), GradientSum(engine, profile.plugins)
        return Strategy(engine, compute, bucket_bytes, work=work, exchange=exchange, parts=PartRings(engine))

    return of_parts if profile.stages > 1 else strategy_of(profile)


class StandInState:
    """The parameters of a stand-in, and their momentum. See ``roles.engine.EngineState``.

    Args:
        numel: parameters of the whole model.
        on_change: called after the state was replaced.

    Attributes:
        file_name: name of the checkpoint's state file; each stage has its own.
        part: the parameters of the whole model that this stage holds. disk: from which it is loaded.
        step: steps applied so far, of a state that was not loaded from a checkpoint.
    """

    def __init__(self, seed: int, numel: int, stage: Stage, on_change: Callable[[], None]) -> None:
        self.file_name = shard_name("state", stage.index, stage.count, ".bin") if stage.split else "state.bin"
        self.part = slice(numel * stage.index // stage.count, numel * (stage.index + 1) // stage.count)
        self.parameters = np.zeros(self.part.stop - self.part.start, np.float32)
        self.momentum = np.zeros_like(self.parameters)
        self.stage, self.step, self.disk = stage, 0, cast(Disk, RealDisk())
        self._seed, self._numel, self._on_change = seed, numel, on_change

    def blobs(self) -> list[Blob]:
        return [
            Blob("parameters", self.parameters.view(np.uint8).data),
            Blob("momentum", self.momentum.view(np.uint8).data),
        ]

    def load_initial(self) -> None:
        self.parameters[:] = self._initial()[self.part]
        self.momentum[:] = 0
        self.refresh(0)

    def refresh(self, step: int) -> None:
        self.step = step
        self._on_change()

    def checkpoint_files(self, step: int) -> list[FilePlan]:
        whole = tuple(BlobRange(blob.name, 0, blob.view.nbytes) for blob in self.blobs())
        notes = json.dumps({"numel": self._numel}).encode()
        of_all = [FilePlan("config.json", (notes,))] if not self.stage.index else []
        return [FilePlan(self.file_name, whole), *of_all]

    def load(self, directory: Path) -> None:
        data = memoryview(self.disk.read(directory / self.file_name, max_bytes=STATE_BYTES))
        blobs = self.blobs()
        if data.nbytes != sum(blob.view.nbytes for blob in blobs):
            raise StorageError(f"{directory / self.file_name} is of another model")
        for blob in blobs:
            blob.view[:] = data[: blob.view.nbytes]
            data = data[blob.view.nbytes :]
        self.refresh(0)

    def digest(self) -> str:
        """SHA-256 of the state, hex. Equal digests mean equal bits."""
        return hashlib.sha256(self.parameters.tobytes() + self.momentum.tobytes()).hexdigest()

    def initial_digest(self) -> bytes:
        return hashlib.blake2b(self._initial().tobytes(), digest_size=16).digest()

    def _initial(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(self._seed).standard_normal(self._numel).astype(np.float32)


class StandInEngine:
    """Minimizes |parameters - target|². The target is a pure function of step and micro-batch.

    With 'local' and 'federated' each member moves a copy of its own, and the members average how far the copies came.

    Args:
        numel: number of parameters of the whole model.
        on_micro_batch: called with (step, index) before each micro-batch, to control a test's clock or to fail.
        stage: the part of the model that it holds, with about 1/``stage.count`` of the parameters. Parts are
            independent of each other, and together equal the whole bit for bit.
    """

    device = "stand-in"
    pipeline = shards = slots = None
    state_type: type[StandInState] = StandInState

    def __init__(
        self,
        profile: Profile,
        *,
        numel: int = 257,
        on_micro_batch: Callable[[int, int], None] = lambda step, index: None,
        stage: Stage = WHOLE,
    ) -> None:
        self.stage, self._numel, self._profile = stage, numel, profile
        self.state = self.state_type(profile.job.seed, numel, stage, self._drop_copy)
        own_numel = self.state.parameters.size
        self._inner = self._inner_steps_of(profile, own_numel)
        self._on_micro_batch = on_micro_batch
        self._own = np.zeros_like(self.state.parameters)  # with 'local' and 'federated': private to this member
        self._losses = np.zeros(2, np.float32)  # their number and their sum, of inner steps that were not sent
        self._noise = (0.0, b"")  # of the next contribution, in a private job
        self.data = TrainingData(
            digest=hashlib.sha256(b"stand-in").hexdigest(),
            note="",
            windows=1 << 16,
            tokens_per_micro_batch=profile.batch.micro_batch_sequences * profile.data.sequence_tokens,
            validation_batches=profile.validation.batches,
        )
        self.exact = profile.job.exact
        self.notices: list[tuple[str, str]] = []
        self.scalars = 3 if self._inner else 1  # weight, number of losses; sum of losses
        self.reduce_buffer: npt.NDArray[Any] = np.zeros(
            own_numel + self.scalars, np.int64 if self.exact else np.float32
        )
        self._fits = True
        self.codec_numel = own_numel
        self._periods: Sequence[SettingsPeriod] = [SettingsPeriod(0, profile.optimizer.model_dump(), profile.job.steps)]

    @staticmethod
    def _inner_steps_of(profile: Profile, numel: int) -> InnerSteps | None:
        if profile.job.strategy == "local":
            return InnerSteps(numel, numel, fragments=profile.local.fragments, overlap=profile.local.overlap)
        return InnerSteps(numel, numel, fragments=1, overlap=False) if profile.job.strategy == "federated" else None

    @property
    def noise(self) -> StandInEngine | None:
        return self if self._profile.privacy.epsilon else None

    def share_cores(self, workers: int) -> None:
        """Does nothing: this engine always uses one core."""

    def use_settings(self, periods: Sequence[SettingsPeriod]) -> None:
        self._periods = periods

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        self.reduce_buffer[:] = 0
        self._fits = True
        if self._inner is None:
            return False
        if self._inner.begin_step(step, has_losses=self._losses[0] > 0):
            self._own[:], self._losses[:] = self.state.parameters, 0
        return self._inner.is_ready

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        self._on_micro_batch(step, index)
        if self._inner is not None:
            difference = self._own - self._target(step, index)
            self._own -= np.float32(0.1) * difference
            self._losses += (1, float(np.add.reduce(difference**2, dtype=np.float64)) / self._numel)
            self._inner.count(1)
            return
        addend: npt.NDArray[Any] = self.contribution(step, index)
        if self.exact:
            addend, fits = to_fixed(addend, self._profile.batch.micro_batches)
            self._fits = self._fits and fits
        middle = addend.size // 2
        self.reduce_buffer[:middle] += addend[:middle]
        if on_final is not None:
            on_final(middle)  # the ring may send the front while the rest is still being added
        self.reduce_buffer[middle:] += addend[middle:]

    def contribution(self, step: int, index: int) -> npt.NDArray[np.float32]:
        """The micro-batch's addend in float32: the gradient of its mean loss / M, then that. Tests override it."""
        difference = self.state.parameters - self._target(step, index)
        divisor = self._numel * self._profile.batch.micro_batches
        gradient = 2 * difference / np.float32(divisor)
        loss = np.add.reduce(difference**2, dtype=np.float64) / divisor
        return np.append(gradient, loss.astype(np.float32))

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        """Complete the contribution of a member with a copy of its own. Else ``micro_batch`` has completed it."""
        if self._inner is None:
            return
        sent, part = self._inner.send(), self._inner.fragment(self._inner.step)
        self.reduce_buffer[:] = 0
        self.reduce_buffer[part] = (self.state.parameters - self._own)[part] * np.float32(sent)
        self.reduce_buffer[-3], self.reduce_buffer[-2:] = sent, self._losses
        if not self._inner.waits:
            self._losses[:] = 0
        if self.noise is not None:
            (std, key), self._noise = self._noise, (0.0, b"")
            if key:
                self.reduce_buffer[part] += gaussian(key, part.stop - part.start, std)
            else:
                self.reduce_buffer[:-2] = 0

    def use_noise(self, std: float, key: bytes) -> None:
        """See ``roles.engine.NoiseInput``; contributions are not clipped, and losses not withheld."""
        self._noise = std, key

    def exchanged(self, step: int) -> list[tuple[int, int]]:
        if self._inner is not None:
            return self._inner.exchanged(step, self.scalars)
        return [(0, self.reduce_buffer.size)]

    def partial_square_sum(self, start: int, stop: int) -> float:
        numel = self.state.parameters.size
        if stop > numel and not (self._fits and math.isfinite(self.reduce_buffer[-1])):
            return math.nan
        part = self.reduce_buffer[start : min(stop, numel)].astype(np.float64)
        total = float(np.add.reduce(np.square(part))) * (UNIT**2 if self.exact else 1.0)
        return total if math.isfinite(total) else math.nan

    contributed_square_sum = partial_square_sum

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        values = to_float(self.reduce_buffer) if self.exact else self.reduce_buffer
        loss, number = float(values[-1]), float(values[-2]) if self._inner else 1.0
        loss = loss / number if number else math.nan
        if not math.isfinite(loss + square_sum):
            raise JobFailed(f"step {step + 1} is not finite: loss {loss}")
        self.state.step = step + 1
        if self._inner is not None:
            self._average(self._inner, step)
            return Applied(step + 1, loss, 1.0, math.sqrt(square_sum))
        self.state.momentum *= np.float32(0.5)
        self.state.momentum += values[:-1]
        lr = 8.0 * period_at(self._periods, step).optimizer["lr"] / self._periods[0].optimizer["lr"]
        self.state.parameters -= np.float32(lr) * self.state.momentum
        return Applied(step + 1, loss, lr, math.sqrt(square_sum))

    def _average(self, inner: InnerSteps, step: int) -> None:
        """Move the shared parameters to the mean of the members' copies, and go on from there."""
        part, weight = inner.fragment(step), self.reduce_buffer[-3]
        if weight:
            self.state.parameters[part] -= self.reduce_buffer[part] / weight
        if inner.take_up(step):
            self._own[part] += np.float32(1 - inner.kept) * (self.state.parameters - self._own)[part]

    def _drop_copy(self) -> None:
        if self._inner is not None:
            self._inner.is_copy_void = True

    def validate(self, index: int) -> tuple[float, int]:
        square = np.sum((self.state.parameters - self._target(-1, index)) ** 2)
        tokens = self.data.tokens_per_micro_batch  # only the first part counts them
        return float(square) / self._numel * tokens, 0 if self.state.part.start else tokens

    def _target(self, step: int, index: int) -> npt.NDArray[np.float32]:
        key = hashlib.blake2b(struct.pack("!qqq", self._profile.job.seed, step, index), digest_size=8).digest()
        noise = np.random.default_rng(int.from_bytes(key, "big")).standard_normal(self._numel, np.float32)
        return np.float32(1.0) + np.float32(0.01) * noise[self.state.part]


class FastStandIn(StandInEngine):
    """A stand-in for a model of a real size: its target is constant, because random numbers would take long."""

    def _target(self, step: int, index: int) -> npt.NDArray[np.float32]:
        return np.ones(1, np.float32)
