"""What healing gives: a state cut into chunks, with the digest of each, and the reduced bytes of the steps since."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import xxhash

from p2ptrain.core.errors import ProtocolError
from roles.engine import Blob, Engine
from roles.worker.checkpoint_store import Snapshot
from wire.heal_messages import ChunkRequest, StepLogged

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 16
ANSWER_S = 15.0
"""To a dial and to the first word: the far-peer death interval. From then on the silence that was agreed on counts."""
SHORTEST_SILENCE_S, LONGEST_SILENCE_S = 0.1, 600.0
BEATS = 4
"""In a silence: so often each side says something."""
LOG_STEPS = 2
LOG_LEAST_BYTES = 16 << 20


def log_limit_bytes(state_bytes: int, reduce_bytes: int) -> int:
    """How much of the steps since a snapshot a donor keeps: see ``roles.worker.donor``.

    For a small state, of which round trips take longer than bytes, it is a little memory of a fixed size.
    """
    return max(state_bytes + LOG_STEPS * reduce_bytes, LOG_LEAST_BYTES)


@dataclass(frozen=True, slots=True)
class Chunk:
    blob: Blob
    offset: int
    size_bytes: int

    @property
    def view(self) -> memoryview:
        return self.blob.view[self.offset : self.offset + self.size_bytes]


def chunks_of(blobs: list[Blob], chunk_bytes: int) -> list[Chunk]:
    """All bytes of all blobs, in order, in chunks of at most ``chunk_bytes``."""
    return [
        Chunk(blob, offset, min(chunk_bytes, blob.view.nbytes - offset))
        for blob in blobs
        for offset in range(0, blob.view.nbytes, chunk_bytes)
    ]


@dataclass(slots=True)
class Given:
    """A state that can be given: it does not change while this is used.

    Attributes:
        snapshot: what it is a copy in; None for the live state.
        table: digests of the chunks, 16 bytes each; empty until somebody asked for it.
    """

    step: int
    lineage: str
    square_sum: float
    blobs: list[Blob]
    snapshot: Snapshot | None = None
    table: bytes = b""
    users: int = 0
    making: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def root(self) -> bytes:
        """The table's digest. The chunks are hashed between other turns of the loop, once for all who ask."""
        async with self.making:
            if not self.table:
                digests = []
                for chunk in chunks_of(self.blobs, CHUNK_BYTES):
                    digests.append(xxhash.xxh3_128_digest(chunk.view))
                    await asyncio.sleep(0)
                self.table = b"".join(digests)
        return xxhash.xxh3_128_digest(self.table)


@dataclass(slots=True, eq=False)
class Entry:
    """The reduced bytes of a committed step. ``lineage``: after it; ``users``: those to whom it is being sent;
    ``digests``: of all stages of a split model."""

    step: int
    lineage: str
    digest: bytes
    square_sum: float
    data: memoryview
    users: int = 0
    digests: bytes = b""

    @property
    def news(self) -> StepLogged:
        return StepLogged(self.step, self.digest, self.square_sum, self.data.nbytes, self.digests)


class StepLog:
    """The newest committed steps, without a gap. Bounded in bytes; the oldest go first, but one is always kept.

    Attributes:
        spare: memory of a step that was dropped, for the next one: touching new memory costs many times the copying.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.held_bytes = 0
        self.spare: memoryview | None = None
        self._start = (-1, "")
        self._entries: deque[Entry] = deque()

    def begin(self, step: int, lineage: str) -> None:
        """Forget all; the next entry is that after ``step``."""
        self._entries.clear()
        self.held_bytes, self.spare, self._start = 0, None, (step, lineage)

    def add(self, entry: Entry) -> None:
        assert entry.step == self.newest + 1, "a gap in the log"
        self._entries.append(entry)
        self.held_bytes += entry.data.nbytes
        while self.held_bytes > self.limit_bytes and len(self._entries) > 1:
            oldest = self._entries.popleft()
            self.held_bytes -= oldest.data.nbytes
            self._start = (oldest.step, oldest.lineage)
            if not oldest.users:
                self.spare = oldest.data

    @property
    def newest(self) -> int:
        return self._start[0] + len(self._entries)

    def since(self, step: int, lineage: str) -> list[Entry] | None:
        """What leads on from a state; None where the log does not reach back to it, or knows another of that step."""
        known = self.find(step)
        if (step, lineage) != (self._start if known is None else (known.step, known.lineage)):
            return None
        return [entry for entry in self._entries if entry.step > step]

    def find(self, step: int) -> Entry | None:
        index = step - self._start[0] - 1
        return self._entries[index] if 0 <= index < len(self._entries) else None

    def all(self) -> list[Entry]:
        return list(self._entries)


def copied(engine: Engine, into: memoryview | None) -> memoryview:
    """On the compute thread; numpy lets the event loop run meanwhile."""
    source = engine.reduce_buffer.view(np.uint8).reshape(-1)
    target = np.empty_like(source) if into is None else np.frombuffer(into, np.uint8)
    np.copyto(target, source)
    return target.data


def chunk_untrusted(blobs: list[Blob], wanted: ChunkRequest) -> memoryview:
    """Raises ``ProtocolError`` where there is no such chunk."""
    index = wanted.index
    for blob in blobs if index >= 0 else []:
        number = -(-blob.view.nbytes // CHUNK_BYTES)
        if index < number:
            return blob.view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        index -= number
    raise ProtocolError(f"asked for chunk {wanted.index}, which there is not")
