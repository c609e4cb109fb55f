"""Copies of a job's state in memory: for checkpoints, for members that heal, and for workers that pull it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from p2ptrain.core.errors import ResourceError
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.training import Blob
from roles.compute_thread import ComputeThread
from roles.engine import Engine

CHUNK_BYTES = 1 << 20


class Snapshot:
    """The state at one step: a copy, or the live state while it does not change. Each holder calls ``release`` once.

    Attributes:
        blobs: as ``EngineState.blobs``; those of a copy are read-only, and invalid after the release.
        square_sum: the step's squared gradient norm.
        table: for healing: the digest of each chunk; empty until it is first asked for.
    """

    def __init__(self, step: int, lineage: str, square_sum: float, blobs: list[Blob]) -> None:
        self.step, self.lineage, self.square_sum, self.blobs = step, lineage, square_sum, blobs
        self.holders = 1
        self.table, self.making = b"", asyncio.Lock()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        assert self.holders, "released once too often"
        self.holders -= 1


class Snapshots:
    """Makes one job's snapshots, at most ``most`` at a time. Reuses their memory: touching new memory costs more than
    copying."""

    def __init__(self, compute: ComputeThread, most: int = 2) -> None:
        self._compute, self._most = compute, most
        self._made: list[Snapshot] = []
        self._copying = 0

    async def take(self, engine: Engine, *, step: int, lineage: str, square_sum: float) -> Snapshot:
        """Copy the state, which is that of ``step``. The caller keeps it from changing until this returns.

        Returns an existing snapshot of the same state if it is still held.

        Raises:
            ResourceError: ``most`` older snapshots are still in use, or memory is short.
        """
        held = [snapshot for snapshot in self._made if snapshot.holders]
        for snapshot in held:
            if (snapshot.step, snapshot.lineage) == (step, lineage):
                snapshot.holders += 1
                return snapshot
        if len(held) + self._copying >= self._most:
            raise ResourceError(
                f"{self._most} earlier copies of the model are still being written or sent",
                remedy="save less often: raise checkpoint.every",
            )
        free = [snapshot.blobs for snapshot in self._made if not snapshot.holders]
        self._made, self._copying = held, self._copying + 1
        try:
            # A cancelled call may still copy. The next call runs after it, on the same thread.
            blobs = await self._compute.run(_copy_state, engine, free)
        finally:
            self._copying -= 1
        taken = Snapshot(step, lineage, square_sum, blobs)
        self._made.append(taken)
        return taken

    def close(self) -> None:
        """Drop the memory: now if it is not in use, else with the last reader."""
        self._made.clear()


def _copy_state(engine: Engine, free: list[list[Blob]]) -> list[Blob]:
    """Copy the state into the memory of ``free`` if it fits, else into new memory. numpy releases the GIL meanwhile."""
    state = engine.state.blobs()
    sizes = [blob.view.nbytes for blob in state]
    memory = next((blobs for blobs in free if [blob.view.nbytes for blob in blobs] == sizes), None)
    free.clear()
    try:
        targets: list[npt.NDArray[np.uint8]] = (
            [cast("npt.NDArray[np.uint8]", blob.view.obj) for blob in memory]  # read-only only as views
            if memory
            else [np.empty(size, np.uint8) for size in sizes]
        )
    except MemoryError:
        raise ResourceError(
            f"there is no memory for a copy of the model and the optimizer's state, {human_bytes(sum(sizes))}",
            remedy="close other programs, or choose a smaller [model]",
        ) from None
    for target, blob in zip(targets, state, strict=True):
        np.copyto(target, np.frombuffer(blob.view, np.uint8))
    return [Blob(blob.name, target.data.toreadonly()) for blob, target in zip(state, targets, strict=True)]


def state_bytes(state: Sequence[Blob]) -> int:
    return sum(blob.view.nbytes for blob in state)


def digest_of(data: memoryview) -> bytes:
    """xxh3-128 of ``data``, 16 bytes; of more than a chunk, that of the table of its chunks' digests. So chunks can be
    hashed at different times."""
    if data.nbytes <= CHUNK_BYTES:
        return xxhash.xxh3_128_digest(data)
    starts = range(0, data.nbytes, CHUNK_BYTES)
    return digest_of_chunks([xxhash.xxh3_128_digest(data[start : start + CHUNK_BYTES]) for start in starts])


def digest_of_chunks(digests: Sequence[bytes]) -> bytes:
    """``digest_of`` data whose chunks have these digests."""
    return digests[0] if len(digests) == 1 else digest_of(memoryview(b"".join(digests)))


def state_digest(state: list[Blob]) -> bytes:
    """xxh3-128 over all blobs, 16 bytes. Equal digests mean equal bits."""
    digest = xxhash.xxh3_128()
    for blob in state:
        digest.update(blob.view)
    return digest.digest()
