"""The stand-in engine on a simulated machine: its files are on that machine's disk, and it counts its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from configs.schema import Profile
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import StorageError
from roles.engine import WHOLE, Applied, Blob, OnFinal, Stage
from roles.stand_in import StandInEngine

Buffer = npt.NDArray[Any]

NUMEL = 320


class SimEngine(StandInEngine):
    """Keeps, as a part of its state, how many steps went into it: so a step that is applied twice shows.

    Args:
        spoil: called with this member's contribution to every step before it goes out: what a liar does to it.
    """

    def __init__(self, profile: Profile, disk: Disk, spoil: Callable[[Buffer], None], stage: Stage = WHOLE) -> None:
        super().__init__(profile, numel=NUMEL, stage=stage)
        self._disk = disk
        self._count = np.zeros(1, np.int64)
        self._spoil = spoil

    @property
    def count(self) -> int:
        return int(self._count[0])

    @property
    def part(self) -> slice:
        """Which of the whole model's parameters it has."""
        return self._part

    @property
    def parameters(self) -> npt.NDArray[np.float32]:
        return self._parameters

    def bits(self) -> bytes:
        """Digest of the whole state: what ``state_file`` of a checkpoint of it would have, too."""
        return bits_of(b"".join(bytes(blob.view) for blob in self.state()))

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        super().micro_batch(step, index, None)
        if on_final is not None:  # the last one of this member's share, and nothing of it has gone out yet
            self._spoil(self.reduce_buffer)
            on_final(self.exact_from // 2)

    def apply(self, step: int, square_sum: float) -> Applied:
        applied = super().apply(step, square_sum)
        self._count += 1
        return applied

    def state(self) -> list[Blob]:
        return [*super().state(), Blob("count", self._count.view(np.uint8).data)]

    def load_initial(self) -> None:
        super().load_initial()
        self._count[:] = 0

    def load(self, directory: Path) -> None:
        data = memoryview(self._disk.read(directory / self.state_file, max_bytes=1 << 20))
        blobs = self.state()
        if data.nbytes != sum(blob.view.nbytes for blob in blobs):
            raise StorageError(f"{directory / self.state_file} is of another model")
        for blob in blobs:
            blob.view[:] = data[: blob.view.nbytes]
            data = data[blob.view.nbytes :]


def bits_of(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def undisturbed(profile: Profile) -> list[npt.NDArray[np.float32]]:
    """The parameters after 0, 1, 2, … steps of one process alone."""
    engine = StandInEngine(profile, numel=NUMEL)
    engine.load_initial()
    found = [engine._parameters.copy()]
    for step in range(profile.job.steps):
        engine.begin_step(step)
        for index in range(profile.batch.micro_batches):
            engine.micro_batch(step, index)
        engine.finish_gradients()
        engine.apply(step, engine.partial_square_sum(0, engine.reduce_buffer.size))
        found.append(engine._parameters.copy())
    return found
