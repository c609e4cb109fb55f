"""Messages of a chain: stages (workers) that hold consecutive parts of one model, and the client that writes text with
it (``roles.serving``, ``roles.worker.stages``). The first column is the purpose that the peer that dials names.

::

    chain         client → stage       Request → Response: part.offer, part.load, part.free, model.open,
                                       model.measure, session.open, session.resume, session.close
                  client → first stage ForwardBatch, then one bulk frame
                  stage → client       PartLoading, during part.load; SampledBatch, from the stage at which its requests
                                       end; ChainBroken: the next stage is lost, or this one failed
    stage         stage → next stage   ForwardBatch, then one bulk frame
    model, give   receiver → sender    TensorsRequest → TensorsPage; RangeRequest → bulk frame | RangeGone
                                       (of weights; model: the receiver dials; give: the sender dials)
    all           both ways            KeepAlive while idle, so that silence means that the peer is dead
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Annotated, TypeVar

from p2ptrain.core.activations import ID_BYTES
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import BLOCK_POSITIONS, HASH_BYTES, MOST_TOP_LOGPROBS, MOST_TOPS, TOP_BYTES
from wire.job_messages import MAX_STAGES
from wire.messages import Message
from wire.schema import Amount, Bound, ContentId, Count, Declared, IdOrNone

MAX_REQUEST_POSITIONS = 2048
"""Most positions in one ``ForwardBatch``. Longer prompts come as several requests that flow through the chain."""
MAX_BATCH, BATCH_BYTES = 64, 40 << 10
"""Most requests or results in a message, and the size from which on it takes no further one."""
NEXT_LOST, UNKNOWN_SESSION, UNKNOWN_PART, PREEMPTED = "next-stage", "unknown-session", "unknown-part", "preempted"
"""Codes of refusals and of ``ChainBroken``: the next stage cannot be reached; the session or part is not here; the
session's positions were dropped, because older sessions needed the memory."""
MAX_OPEN_HASHES = 1024
"""Most block hashes with which a session is opened."""
MAX_POSITIONS = 1 << 20
"""Most positions of a session."""
Positions = Annotated[int, Bound(0, MAX_POSITIONS)]
MOST_EXTRA_BYTES = 8 << 20
"""Most bytes of history and masks in a bulk frame."""
CHAIN_STREAM = 1
"""Stream of the bulk frame after each ``ForwardBatch``. Frames stay in order, so one stream is enough."""


class ForwardRequest(Declared):
    """Compute more positions of a session. They follow in the bulk frame of the request's ``ForwardBatch``.

    Attributes:
        epoch: rises when the chain is repaired; a stage drops requests of an older epoch.
        number: rises with every request that the client sends, also if it sends one again. ``Sampled`` repeats it.
        keep: before computing, each stage forgets the session's positions from this one on, such as rejected drafts.
        count: positions in the bulk frame.
        encoding: of these (``p2ptrain.core.activations``); to the first stage ``ids`` (int32, little-endian).
        last: index of the stage at which the request ends.
        samples: the last stage samples a token after each of this many last positions; 0 if the request ends earlier.
        sample_index: number of the first of these samples in its text; with the session's seed it gives the noise.
        spent_us: microseconds of computing at each stage so far, in order.
        prefill: the positions are of a prompt and travel in the session's ``prefill_encoding``; drafts do not.
        targets: token ids, as in ``Sampled.tokens``: the last stage scores one after each of this many last positions.
        block_hashes: of the last blocks of the text that are full after this request, joined
            (``p2ptrain.core.serving.hash_blocks``). A later session of the client that begins alike has them at once.
        tops: as of ``p2ptrain.core.serving.Pass``, for the last stage. history, mask_bytes: ids of its ``history``, and
            bytes of its ``masks``. Both follow the request's positions in the bulk frame, in this order.
    """

    session: str
    epoch: int
    number: Count
    keep: Positions
    count: Annotated[int, Bound(1, MAX_REQUEST_POSITIONS)]
    encoding: str
    last: int
    samples: Annotated[int, Bound(0, MAX_REQUEST_POSITIONS)]
    sample_index: Positions
    spent_us: Annotated[list[Count], Bound(0, MAX_STAGES)] = field(default_factory=list)
    prefill: bool = False
    targets: Annotated[bytes, Bound(0, 4 * MAX_REQUEST_POSITIONS)] = b""
    block_hashes: Annotated[bytes, Bound(0, HASH_BYTES * (MAX_REQUEST_POSITIONS // BLOCK_POSITIONS + 1))] = b""
    tops: Annotated[int, Bound(0, MOST_TOP_LOGPROBS)] | None = None
    history: Positions = 0
    mask_bytes: Annotated[int, Bound(0, MOST_EXTRA_BYTES - ID_BYTES * MAX_POSITIONS)] = 0

    @property
    def encoded_bytes(self) -> int:
        """About the size in a message."""
        return 320 + 9 * len(self.spent_us) + len(self.targets) + len(self.block_hashes)

    @property
    def extra_bytes(self) -> int:
        """Bytes that follow the positions in the bulk frame."""
        return ID_BYTES * self.history + self.mask_bytes


class ForwardBatch(Message, kind=38):
    """Client or stage to the next stage: requests of one client's sessions at this stage. One bulk frame follows with
    the positions of all of them, in this order."""

    requests: Annotated[list[ForwardRequest], Bound(1, MAX_BATCH)]


class Sampled(Declared):
    """A ``ForwardRequest`` ended here. ``tokens``: int32, little-endian; empty without samples. ``scores``, ``tops``:
    as of ``p2ptrain.core.serving.Ran``."""

    session: str
    epoch: int
    number: int
    tokens: Annotated[bytes, Bound(0, 4 * MAX_REQUEST_POSITIONS)]
    spent_us: Annotated[list[Count], Bound(0, MAX_STAGES)]
    scores: Annotated[bytes, Bound(0, 4 * MAX_REQUEST_POSITIONS)] = b""
    tops: Annotated[bytes, Bound(0, TOP_BYTES * MOST_TOPS)] = b""

    def check(self) -> None:
        if len(self.tokens) % 4 or len(self.scores) % 4 or len(self.tops) % TOP_BYTES:
            raise ProtocolError(f"{len(self.tokens)} bytes of token ids and {len(self.scores)} of scores are not valid")

    count = extra_bytes = 0  # no positions follow

    @property
    def encoded_bytes(self) -> int:
        return 128 + 9 * len(self.spent_us) + len(self.tokens) + len(self.scores) + len(self.tops)


class SampledBatch(Message, kind=39):
    """Stage to client: requests of its sessions ended here."""

    results: Annotated[list[Sampled], Bound(1, MAX_BATCH)]


B = TypeVar("B", ForwardRequest, Sampled)


def split_batch(items: Iterable[B]) -> Iterator[list[B]]:
    """Divide requests or results, in order, into as few lists as fit a message each."""
    batch, batch_bytes, positions, extra_bytes = list[B](), 0, 0, 0
    for item in items:
        full = len(batch) == MAX_BATCH or batch_bytes + item.encoded_bytes > BATCH_BYTES
        full = full or extra_bytes + item.extra_bytes > MOST_EXTRA_BYTES
        if batch and (full or positions + item.count > MAX_REQUEST_POSITIONS):
            yield batch
            batch, batch_bytes, positions, extra_bytes = [], 0, 0, 0
        batch.append(item)
        batch_bytes, positions = batch_bytes + item.encoded_bytes, positions + item.count
        extra_bytes += item.extra_bytes
    if batch:
        yield batch


class ChainBroken(Message, kind=41):
    """Stage to client: the session cannot go on at this stage.

    Attributes:
        lost: index of the next stage if that is lost, or of the sender if its own computation failed.
        code, reason, remedy: as in ``Refuse``.
    """

    session: str
    epoch: int
    lost: int
    code: str
    reason: str
    remedy: str = ""


class PartLoading(Message, kind=42):
    """Stage to client: progress of a ``part.load``."""

    done_bytes: Count
    total_bytes: Count

    def check(self) -> None:
        if self.done_bytes > self.total_bytes:
            raise ProtocolError(f"{self.done_bytes} of {self.total_bytes} bytes as loaded")


class TensorRecord(Declared):
    """A tensor of a model directory, or one of its small files (dtype ``FILE``, shape its bytes).

    Attributes:
        digest: BLAKE2b-256 of each 4 MiB of its bytes, 32 bytes each, joined.
    """

    name: str
    dtype: str
    shape: list[int]
    size_bytes: int
    digest: bytes


class TensorsRequest(Message, kind=43):
    """Receiver to sender: send the records of ``model`` from number ``first`` on."""

    model: str
    first: int


class TensorsPage(Message, kind=44):
    """As many records as fit a frame, of ``total``. ``error`` is set if the sender does not have the model."""

    total: int
    tensors: list[TensorRecord]
    error: str = ""


class HeldPart(Declared):
    """One part of a model that a worker holds, for serving or for training.

    Attributes:
        part: the part's id.
        model: the model's id, shared by all its parts.
        name: of the model, for display.
        start, stop: it has the model's layers [start, stop), of ``layers``.
        cache_bytes: memory for the caches of all sessions together.
        limit_bytes: bytes that this worker allows for parts and their caches.
        compute_ms: average time of one forward request, or of one micro-batch in training; 0 if unknown.
        busy: share of the last seconds in which it computed; the rest it waited (the bubble).
        sessions: number of open sessions.
        tokens_per_s: positions computed per second.
        out_position_bytes: bytes that one position takes on the wire to ``next``.
        next: peer id of the next stage; empty at the last one.
    """

    part: ContentId
    model: ContentId
    name: str
    start: Count
    stop: Count
    layers: Annotated[int, Bound(1, 4096)]
    dtype: str = ""
    weights_bytes: Count = 0
    cache_bytes: Count = 0
    limit_bytes: Count = 0
    sessions: Count = 0
    compute_ms: Amount = 0.0
    busy: Amount = 0.0
    tokens_per_s: Amount = 0.0
    out_position_bytes: Amount = 0.0
    next: IdOrNone = ""

    def check(self) -> None:
        if not self.start < self.stop <= self.layers:
            raise ProtocolError(f"invalid part: layers [{self.start}, {self.stop}) of {self.layers}")


class PartsHeld(Message, kind=47):
    """Worker to seed: all parts that it holds; sent when they change, and once a second while it computes."""

    parts: Annotated[list[HeldPart], Bound(0, 16)]

    def check(self) -> None:
        if len({part.part for part in self.parts}) < len(self.parts):
            raise ProtocolError("the list of held parts names a part twice")
