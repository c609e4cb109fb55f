"""What happens between two commits of the step transaction. Each strategy is one file in this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ring.chain import Chain
from ring.direct import DirectMessages
from ring.links import Topology
from ring.session import RingSession
from ring.view import View
from roles.compute_thread import ComputeThread
from roles.engine import Applied, Engine


@dataclass(frozen=True, slots=True)
class Contribution:
    """A member's summary of a reduced step.

    Attributes:
        digest: of the reduced bytes, 16 bytes.
        part: their squared norm; NaN if a number is not finite.
        own: squared norm of its own contribution; NaN if that was not finite, 0 if it had no share.
        digests: of a split model: the digests of all stages' reduced bytes, concatenated. ``digest`` is made of them
            (``ring.token.joined_digest``). Else empty.
        counts, made_of: of an asynchronous step: as in ``LedgerRow``. Else empty.
    """

    digest: bytes
    part: float
    own: float
    digests: bytes = b""
    counts: bytes = b""
    made_of: bytes = b""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage of a pipeline did in its newest step, for people.

    Attributes:
        start, stop, layers: it holds layers [start, stop) of ``layers``.
        micro_batch_s: forward and backward of one micro-batch; 0 if it had none.
        busy: share of the step's passes in which it computed; the rest is its bubble.
        token_bytes: bytes per token on the hop to the next stage: activations there, gradients back.
        next: peer id of the next stage; empty on the last one.
    """

    start: int
    stop: int
    layers: int
    micro_batch_s: float
    busy: float
    token_bytes: float
    next: str


class Strategy(Protocol):
    """The activities of a step. A broken ring cancels them, except ``commit``, which runs to its end.

    Attributes:
        exposed_s: time that the last step waited for the ring after this member's own share was computed.
        communicating_s: time that its operations were under way, also during the computing.
        scores: what a robust rule made of the vectors of the last step, as in ``wire.job_messages.StepMetrics``.
    """

    exposed_s: float
    communicating_s: float
    scores: dict[str, float]

    async def begin(self, session: RingSession, meet: ConnectPeers) -> None:
        """Begin a view, whose ring is ``session``, and form further connections with ``meet``. Those end with the
        session, and when one breaks, the session breaks. Raises as ``RingSession.form``."""

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        """Compute this member's share of ``step``: micro-batches ``range(first, first + count)``.

        The ring may sum gradients in place at once, so afterwards the buffer holds sums, not contributions. To give a
        step up, close the session first; then compute the step again from zero. ``patience_s``: see
        ``RingSession.submit``.
        """

    async def reduce(self, session: RingSession) -> Contribution:
        """Wait until the members' contributions are reduced. Then all hold the same bytes."""

    async def commit(self, step: int, square_sum: float) -> Applied:
        """Apply the reduced bytes. Must give the same bits on every member."""

    async def validate(self, first: int, count: int) -> tuple[float, int]:
        """Return the sum of the losses (nats) and the number of targets over validation micro-batches [first, first +
        count) of this member's replica. In a split model one stage returns them, and the others return 0."""

    def stage_load(self) -> StageLoad | None:
        """Return None if there is no pipeline, or no step was taken in this view."""


class ConnectPeers(Protocol):
    """Forms further connections between some of a view's members, with the view's heartbeats and link settings. Raises
    as ``RingSession.form`` and ``Chain.form``."""

    async def ring(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        """Form a ring of the members of ``view``."""

    async def chain(
        self, view: View, order: Sequence[str], *, activation_bytes: int, gradient_bytes: int, in_flight: int
    ) -> Chain:
        """See ``Chain.form``."""

    def direct(self, session: RingSession) -> DirectMessages:
        """Messages between any two members of the ring of ``session``, until it ends."""


Factory = Callable[[Engine, ComputeThread, Callable[[], None], int], Strategy]
"""Takes the engine, its thread, a callback for every finished piece of work (heartbeats carry its count, which shows
that a slow peer is not stuck), and the bytes of a bucket (0: automatic)."""
