"""Messages between members of one job, as those of ``wire.messages``: who is lost, and what one has that another lacks.

::

    member → neighbour    bulk frames only (see ``ring.session``); MemberLost, on the beats' connection
    member → source       (purpose ``heal``)    HealRequest → HealOffer
    source → member       StepLogged, as its ring commits
    member → member       (purpose ``files``)   FilesRequest → FilesOffer
    receiver → source     (these, and those of a model)   RangeRequest → bulk frame | RangeGone
    both ways when idle   StillHere
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wire.messages import Message

RANGE_BYTES = 4 << 20
"""Of what lies on a disk, asked for and sent at a time."""


@dataclass(frozen=True, slots=True)
class MemberLost(Message):
    """To the other neighbour, on the beats' connection, before it ends: the ring is over, for this member is lost.

    Attributes:
        peer_id: who is lost. beside: who saw it, its neighbour; the news may have come a long way.
        reason: what was seen.
    """

    KIND: ClassVar[int] = 56
    peer_id: str
    beside: str
    reason: str


@dataclass(frozen=True, slots=True)
class HealRequest(Message):
    """Bring me to ``job``'s state of ``step`` and ``lineage``; ``step`` -1: as far as the ring is, and on from there.

    Attributes:
        have_step, have_lineage: what the caller holds, -1 and empty where that is nothing: where the donor has kept
            the steps since, it offers those and no state.
        silence_s: after which each side gives the other up; each says something four times as often.
        stage: of a split model: the part that the caller holds, which is the only one it can take.
    """

    KIND: ClassVar[int] = 48
    job: str
    step: int
    lineage: str
    silence_s: float
    have_step: int = -1
    have_lineage: str = ""
    stage: int = 0


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """One named run of bytes of the state, such as the flat parameters or the first Adam moment."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HealOffer(Message):
    """The donor's answer: what there is to fetch. It stays unchanged until the connection ends.

    Attributes:
        step, lineage, square_sum: of the state that is given; without ``blobs``, those that the caller holds.
        blobs: parts of the state; none where the caller needs only the steps after ``step`` (``StepLogged``).
        root: xxh3-128 of the table, which has the xxh3-128 of every chunk; equal for donors that hold the same bits.
    """

    KIND: ClassVar[int] = 49
    step: int
    lineage: str
    blobs: list[BlobRecord]
    chunk_bytes: int
    root: bytes = b""
    square_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class StepLogged(Message):
    """The donor keeps the reduced bytes of a step that its ring committed.

    Attributes:
        step: steps applied with this one included.
        digest: xxh3-128 of the reduced bytes: with the lineage before, it makes the lineage after the step.
        square_sum: the squared gradient norm that it was committed with.
        digests: of a split model: those of all stages' reduced bytes, one after the other, for the lineage is made of
            all of them (``ring.token.joined_digest``); ``digest`` is among them.
    """

    KIND: ClassVar[int] = 52
    step: int
    digest: bytes
    square_sum: float
    size_bytes: int
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class RangeRequest(Message):
    """Send bytes [start, stop) of what the offer calls ``name`` as one bulk frame on ``stream``, or ``RangeGone``.

    Names are those of the state's blobs, of a model's tensors and small files, and of a checkpoint's files. ``#table``
    is a state's table of digests, ``#step 12`` the reduced bytes of step 12.
    """

    KIND: ClassVar[int] = 45
    name: str
    start: int
    stop: int
    stream: int


@dataclass(frozen=True, slots=True)
class RangeGone(Message):
    """Those bytes cannot be given: the file changed, or the log, which is bounded, keeps the step no more."""

    KIND: ClassVar[int] = 46
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class FilesRequest(Message):
    """Which files has ``stage`` of ``stages`` in ``job``'s checkpoint of ``step``? Answered when they are durable.

    Attributes:
        lineage: of the state that it is to hold; empty: whichever.
    """

    KIND: ClassVar[int] = 57
    job: str
    step: int
    lineage: str
    stage: int
    stages: int


@dataclass(frozen=True, slots=True)
class FilesOffer(Message):
    """The answer: a checkpoint's manifest, which names them and their sums; or why there are none.

    ``RangeRequest``s follow.
    """

    KIND: ClassVar[int] = 58
    manifest: bytes
    reason: str = ""
