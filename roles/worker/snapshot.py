"""Copies of the state at one step, for whoever reads it while training goes on: the writer of checkpoints, and donors.

A step waits for the copying of memory, nothing else. There are at most two copies: the one that was made last, and the
one before it while somebody still reads that. Each takes as much memory as the state (12 bytes a parameter with AdamW)
and is kept for the next copy, because memory that is touched for the first time costs many times the copying.

Counting references is the event loop's business, copying the compute thread's: it alone sees a state that stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from p2ptrain.core.errors import ResourceError
from p2ptrain.core.shared_memory import Memory
from roles.compute_thread import ComputeThread
from roles.engine import Blob, Engine

MOST = 2
_ALIGN_BYTES = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where a blob's copy lies in the snapshot's memory."""

    name: str
    offset: int
    size_bytes: int


class Snapshot:
    """The state at one step, never changed. Whoever has it calls ``release`` once; ``share`` makes one more of them.

    Attributes:
        blobs: as ``Engine.state``, read-only. Not to be touched after the release.
        square_sum: the step's squared gradient norm.
        memory: what the blobs lie in, at ``places``.
    """

    def __init__(self, step: int, lineage: str, square_sum: float, blobs: list[Blob], arena: _Arena) -> None:
        assert arena.memory is not None, "nothing was copied"
        self.step, self.lineage, self.square_sum = step, lineage, square_sum
        self.blobs, self.memory, self.places = blobs, arena.memory, arena.places
        self._arena = arena

    @property
    def size_bytes(self) -> int:
        return sum(blob.view.nbytes for blob in self.blobs)

    def share(self) -> Snapshot:
        """This one, for one more who will release it."""
        assert self._arena.holders, "the snapshot was given up"
        self._arena.holders += 1
        return self

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        assert self._arena.holders, "released once too often"
        self._arena.holders -= 1


@dataclass(slots=True)
class _Arena:
    """The memory of one copy at a time."""

    holders: int = 0
    memory: Memory | None = None
    places: list[Place] = field(default_factory=list)

    def fit(self, state: list[Blob], allocate: Callable[[int], Memory]) -> None:
        """Make the memory right for ``state``, and touch what is new of it."""
        places, offset = [], 0
        for blob in state:
            places.append(Place(blob.name, offset, blob.view.nbytes))
            offset += -(-blob.view.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if places != self.places or self.memory is None:
            self.memory = None  # first, so that there are never both
            self.memory, self.places = allocate(max(offset, 1)), places
            np.frombuffer(self.memory.view, np.uint8)[::_PAGE_BYTES] = 0

    def fill(self, state: list[Blob]) -> list[Blob]:
        """Copy. numpy lets go of the interpreter meanwhile, slices of memoryviews would not: heartbeats go on."""
        assert self.memory is not None, "it was not made to fit"
        copies = []
        for blob, place in zip(state, self.places, strict=True):
            view = self.memory.view[place.offset : place.offset + place.size_bytes]
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(blob.view, np.uint8))
            copies.append(Blob(place.name, view.toreadonly()))
        return copies


class Snapshots:
    """Makes one job's snapshots.

    Args:
        compute: the engine's thread.
        allocate: see ``Saver.allocate``.
    """

    def __init__(self, compute: ComputeThread, allocate: Callable[[int], Memory]) -> None:
        self._compute, self._allocate = compute, allocate
        self._arenas = [_Arena() for _ in range(MOST)]
        self._newest: Snapshot | None = None

    async def take(self, engine: Engine, *, step: int, lineage: str, square_sum: float) -> Snapshot:
        """Copy the state, which is that of ``step``; the caller keeps it from changing until this returns.

        A snapshot of the same state that somebody still has is given again.

        Raises:
            ResourceError: two older ones are still being read, or there is no memory for one.
        """
        newest = self._newest
        if newest is not None and newest._arena.holders and (newest.step, newest.lineage) == (step, lineage):
            return newest.share()
        free = [arena for arena in self._arenas if not arena.holders]
        if not free:
            raise ResourceError(
                f"{MOST} earlier copies of the state are still being read", remedy="raise checkpoint.every"
            )
        arena = max(free, key=lambda arena: arena.memory is not None)
        arena.holders = 1
        try:
            blobs = await self._compute.run(self._copy, arena, engine)
        except BaseException:
            arena.holders = 0  # the copying may go on: the next one runs after it, on the same thread
            raise
        self._newest = Snapshot(step, lineage, square_sum, blobs, arena)
        return self._newest

    def close(self) -> None:
        """Let go of the memory: at once what nobody reads any more, the rest with its last reader."""
        self._newest = None
        self._arenas.clear()

    def _copy(self, arena: _Arena, engine: Engine) -> list[Blob]:
        state = engine.state()
        arena.fit(state, self._allocate)
        return arena.fill(state)
