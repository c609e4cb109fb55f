"""The core of a session on one stage of a split model: which forward requests it takes. Pure.

It *checks* a ``ForwardRequest`` before a byte of its payload is allocated, *admits* it when the payload is there, and
drops it if the session's epoch has changed meanwhile. Requests of an older epoch are read off the wire and dropped.
After the chain breaks, a session admits nothing until the client raises the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from p2ptrain.core.activations import IDS, activation_bytes, decode_ids
from p2ptrain.core.errors import ProtocolError, Refused
from p2ptrain.core.serving import BLOCK_POSITIONS, HASH_BYTES, MOST_TOPS, Pass, Preempted, scored_rows
from roles.worker.stage_requests import OpenRequest
from wire.chain_messages import MAX_REQUEST_POSITIONS, MOST_EXTRA_BYTES, ForwardRequest

MOST_QUEUED = 256
"""Requests that a first stage may queue. It never stops reading: the client's other requests use this connection."""
QUEUED_FROM_STAGE, QUEUED_BYTES = 128, 32 << 20
"""Requests and bytes that a client's sessions at a stage queue; beyond, it stops reading from the stage before."""
STALE = "stale-epoch"


def batch_sizes_untrusted(
    requests: Sequence[ForwardRequest], sessions: Sequence[StageSession | None], width: int
) -> list[int]:
    """Check requests that came in one message, and return the size of each one's payload. Allocates nothing.

    Args:
        sessions: of the requests; None: it is not open (it may have been closed just before).
        width: elements of the hidden states; 0: the requests come from the client.

    Raises:
        ProtocolError: no correct peer sends these requests.
    """
    sizes = list[int]()
    for work, session in zip(requests, sessions, strict=True):
        if session is not None:
            sizes.append(session.payload_bytes_untrusted(work))
        elif (work.encoding == IDS) == bool(width):
            raise ProtocolError(f"an invalid request of session {work.session[:64]!r}, which is not open here")
        else:
            sizes.append(activation_bytes(work.encoding, work.count, width) + work.extra_bytes)
    if sum(work.count for work in requests) > MAX_REQUEST_POSITIONS:
        raise ProtocolError(f"requests of more than {MAX_REQUEST_POSITIONS} positions in one message")
    if sum(work.extra_bytes for work in requests) > MOST_EXTRA_BYTES:
        raise ProtocolError(f"requests with more than {MOST_EXTRA_BYTES} bytes beside the positions in one message")
    return sizes


@dataclass(slots=True, eq=False)
class StageSession:
    """One session on one stage.

    Attributes:
        width: elements of the hidden state of one position.
        client: the client's peer id.
        epoch: set by the client; requests of an older epoch are dropped.
        position: length of the history; the next request may keep at most this much.
        broken: the session admits nothing until the client raises the epoch.
        preempted: the engine dropped its positions, and it has not got others since.
        is_writing: its prompt is computed, so the person who reads its text waits for each pass.
        queue: admitted requests and their payloads, in order.
    """

    asked: OpenRequest
    width: int
    client: str = ""
    epoch: int = field(init=False)
    position: int = 0
    broken: bool = False
    preempted: bool = False
    is_writing: bool = False
    closed: bool = False
    queue: deque[tuple[ForwardRequest, memoryview]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.epoch = self.asked.epoch

    @property
    def id(self) -> str:
        return self.asked.session

    @property
    def index(self) -> int:
        return self.asked.index

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.asked.stages - 1

    @property
    def queued_bytes(self) -> int:
        return sum(len(payload) for _, payload in self.queue)

    def payload_bytes_untrusted(self, work: ForwardRequest) -> int:
        """Check ``work`` and return its payload's size. Allocates nothing. Raises ``ProtocolError``."""
        if work.keep > self.asked.positions - work.count:
            text = (
                f"a request of {work.count} positions after {work.keep}, but the session is for {self.asked.positions}"
            )
            raise ProtocolError(text)
        if not self.index <= work.last < self.asked.stages:
            raise ProtocolError(
                f"stage {self.index} of {self.asked.stages} received a request that ends at stage {work.last}"
            )
        rows, (targets, rest) = work.count if work.last == self.asked.stages - 1 else 0, divmod(len(work.targets), 4)
        if work.samples > rows or targets > rows or rest:
            raise ProtocolError(f"cannot sample {work.samples} tokens and score {targets} at {rows} positions")
        tops = scored_rows(targets, work.samples, work.tops) * (work.tops or 0)
        if (work.extra_bytes and not work.samples) or tops > MOST_TOPS:
            text = f"{work.extra_bytes} bytes of history and masks and {tops} likeliest tokens"
            raise ProtocolError(f"{text} with {targets} targets and {work.samples} samples")
        if len(work.block_hashes) % HASH_BYTES or len(work.block_hashes) > HASH_BYTES * (
            (work.keep + work.count) // BLOCK_POSITIONS
        ):
            raise ProtocolError(f"{len(work.block_hashes)} bytes of block hashes are not valid")
        if len(work.spent_us) != self.index or work.sample_index > self.asked.positions:
            text = f"{len(work.spent_us)} stage times at stage {self.index}, or an invalid sample index"
            raise ProtocolError(f"{text} {work.sample_index}")
        if self.first and work.encoding != IDS:
            raise ProtocolError(f"the first stage takes token ids, not {work.encoding[:40]!r}")
        if not self.first and work.encoding != self.out_encoding(work):
            raise ProtocolError(f"hidden states in {work.encoding[:40]!r}, expected {self.out_encoding(work)!r}")
        return activation_bytes(work.encoding, work.count, self.width) + work.extra_bytes

    def out_encoding(self, work: ForwardRequest) -> str:
        return self.asked.prefill_encoding if work.prefill else self.asked.encoding

    def admit(self, work: ForwardRequest, payload: memoryview) -> bool:
        """Queue a checked request; False if it is dropped. Raises ``ProtocolError``: unknown epoch, or full queue."""
        if work.epoch > self.epoch:
            raise ProtocolError(f"a request of epoch {work.epoch}, but the session is at epoch {self.epoch}")
        if work.epoch < self.epoch or self.broken or self.closed:
            return False
        if len(self.queue) >= MOST_QUEUED or (self.first and self.queued_bytes > QUEUED_BYTES):
            text = f"more than {MOST_QUEUED} requests, or {QUEUED_BYTES} bytes, wait: the client exceeds its limit"
            raise ProtocolError(text)
        self.queue.append((work, payload))
        return True

    def current(self, work: ForwardRequest) -> bool:
        return work.epoch == self.epoch and not self.broken and not self.closed

    def begin(self, work: ForwardRequest, payload: memoryview) -> Pass:
        """The pass of the engine that computes a request. Raises ``ProtocolError``: it keeps more than there is;
        ``Preempted``: the engine dropped the positions that it keeps, which the client does not know yet."""
        if self.preempted and work.keep:
            raise Preempted("the positions of the session were dropped, because older sessions needed the memory")
        if work.keep > self.position:
            raise ProtocolError(f"the request keeps {work.keep} positions, but the session has {self.position}")
        rows = (work.samples, work.sample_index, decode_ids(work.targets)) if self.last else (0, 0, ())
        # Positions that came in another encoding than those of a prompt are not those that a prompt would have.
        is_same = work.prefill or self.asked.encoding == self.asked.prefill_encoding
        hashes = self.own_hashes(work.block_hashes if is_same else b"")
        size, masks_from = len(payload) - work.extra_bytes, len(payload) - work.mask_bytes
        extras: tuple[int | None, bytes, bytes] = None, b"", b""
        if self.last:
            extras = work.tops, bytes(payload[size:masks_from]), bytes(payload[masks_from:])
        out_encoding = self.out_encoding(work)
        return Pass(work.keep, payload[:size], work.count, work.encoding, out_encoding, *rows, hashes, *extras)

    def own_hashes(self, hashes: bytes) -> tuple[bytes, ...]:
        """The hashes of blocks for the engine: other ones for each client, so that none can give another one false
        blocks, and for each pair of encodings."""
        known = f"{self.client} {self.asked.encoding} {self.asked.prefill_encoding} ".encode()
        each = (hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
        return tuple(blake2b(known + block, digest_size=HASH_BYTES).digest() for block in each)

    def end(self, work: ForwardRequest) -> None:
        self.position = work.keep + work.count
        self.preempted = False
        self.is_writing = bool(work.samples)

    def drop_positions(self) -> None:
        self.preempted, self.position = True, 0

    def fail(self) -> None:
        self.broken = True
        self.queue.clear()

    def close(self) -> None:
        self.closed = True
        self.queue.clear()

    def raise_epoch(self, epoch: int) -> None:
        if epoch <= self.epoch:
            raise Refused(STALE, f"epoch {epoch} is not newer than epoch {self.epoch}")
        self.epoch, self.broken = epoch, False
        self.queue.clear()
