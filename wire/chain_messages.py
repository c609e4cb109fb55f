"""Messages of a split model's chain (``roles.chain``, ``roles.worker.stages``), as those of ``wire.messages``.

::

    client  → stage    (purpose ``chain``)  Request → Response: part.offer, part.load, part.free, model.open,
                       session.open, session.resume, session.replay, session.close; meanwhile stage → client PartLoading
    client  → first stage, stage → next stage (purpose ``stage``)   Work, then one bulk frame
    stage at which a Work ends → client     Picked
    stage   → client                        ChainBroken: the next stage is lost
    receiver → sender   (purposes ``model``: the receiver dials; ``give``: the sender dials)
                       TensorsRequest → TensorsPage; RangeRequest → bulk frame | RangeGone
    both ways on every idle one             StillHere, so that silence means death
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from p2ptrain.core.errors import ProtocolError
from wire.messages import Message
from wire.schema import Amount, Bound, Count, IdOrNone, Token

CHAIN_STREAM = 1
"""Stream of the bulk frame behind each ``ForwardRequest``; frames keep their order, so one is enough."""


@dataclass(frozen=True, slots=True)
class ForwardRequest(Message):
    """Take so many more positions of a session; the bulk frame behind it has them.

    Attributes:
        epoch: grows when a chain is mended; what is of an older one is dropped.
        number: of the session's requests, for the client.
        keep: history is cut to its first ``keep`` positions before.
        count: positions in the payload.
        encoding: of the payload (``p2ptrain.core.activations``); ``ids`` (int32, little-endian) to the first stage.
        last: index of the stage at which it ends.
        samples: for so many of the last positions a token is picked; 0 where the work ends before the last stage.
        sample_index: number of the first pick's draw.
        spent_us: microseconds that each stage so far computed, in order.
        prefill: it is of a prompt, whose hidden states travel in the session's ``prefill_encoding``. Only the client
            knows: a draft that is to be verified has several positions, too, and travels as what is decoded does.
    """

    KIND: ClassVar[int] = 38
    session: str
    epoch: int
    number: int
    keep: int
    count: int
    encoding: str
    last: int
    samples: int
    sample_index: int
    spent_us: list[int] = field(default_factory=list)
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Sampled(Message):
    """Stage to client: a ``ForwardRequest`` ended here. ``tokens``: int32, little-endian; none where nothing was to be
    picked."""

    KIND: ClassVar[int] = 39
    session: str
    epoch: int
    number: int
    tokens: bytes
    spent_us: list[int]


@dataclass(frozen=True, slots=True)
class ChainBroken(Message):
    """Stage to client: the session goes no further from here, for the next stage is lost, or this one cannot go on.

    Attributes:
        lost: index of the stage that is meant; that of the sender where its own work failed.
        code, reason, remedy: as of ``Refuse``.
    """

    KIND: ClassVar[int] = 41
    session: str
    epoch: int
    lost: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class PartLoading(Message):
    """Stage to client: how far a ``part.load`` is."""

    KIND: ClassVar[int] = 42
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a model directory, or one of its small files (dtype ``FILE``, shape its bytes).

    Attributes:
        digest: BLAKE2b-256 of each 4 MiB of its bytes, 32 bytes each, one after the other.
    """

    name: str
    dtype: str
    shape: list[int]
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class TensorsRequest(Message):
    """The table of what ``model`` holds, from its entry ``first`` on."""

    KIND: ClassVar[int] = 43
    model: str
    first: int


@dataclass(frozen=True, slots=True)
class TensorsPage(Message):
    """As many entries as fit a frame, of ``total``. ``error`` where there is no such model here."""

    KIND: ClassVar[int] = 44
    total: int
    tensors: list[TensorRecord]
    error: str = ""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One part of a model that a worker holds, for serving or for training.

    Attributes:
        part: its id. model: the model's id, which all parts of it share. name: of the model, for people.
        cache_bytes: that the sessions which are open may grow to, what they keep to replay it included.
        limit_bytes: what this worker gives to parts and their caches.
        sessions: open now.
        compute_ms: that one work takes here, averaged; 0 where it is not known.
        busy: share of the last seconds in which it computed; the rest is its bubble.
        tokens_per_s: positions taken.
        out_position_bytes: bytes that one position takes on the wire to ``next``.
        next: peer id of the next stage; empty on the last one.
    """

    part: Token
    model: Token
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
            raise ProtocolError(f"a part of layers [{self.start}, {self.stop}) of {self.layers}")


@dataclass(frozen=True, slots=True)
class PartsHeld(Message):
    """Worker to seed: all that it holds, when that changes, and once a second while it requests."""

    KIND: ClassVar[int] = 47
    parts: Annotated[list[HeldPart], Bound(0, 16)]

    def check(self) -> None:
        if len({part.part for part in self.parts}) < len(self.parts):
            raise ProtocolError("a worker that holds a part twice")
