"""What happens between two commits of the step transaction. Each strategy is one file in this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ring.chain import Chain
from ring.links import Topology
from ring.session import RingSession
from ring.view import View
from roles.compute_thread import ComputeThread
from roles.engine import Applied, Engine


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a member says of a step that was reduced.

    Attributes:
        digest: of the reduced bytes, 16 bytes.
        part: its part of their squared norm. NaN where they are not finite, as far as it looked.
        own: squared norm of what it contributed itself; NaN where that was not finite, 0 where it had no share.
        digests: of a split model: those of all stages' reduced bytes, one after the other; ``digest`` is made of them
            (``ring.token.joined_digest``). Empty where the model is not split.
    """

    digest: bytes
    part: float
    own: float
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage of a pipeline had to do in its newest step, for people.

    Attributes:
        start, stop, layers: it has layers [start, stop) of ``layers``.
        micro_batch_s: forward and backward of one micro-batch; 0 where it had none.
        busy: share of the step's passes in which it computed; the rest is its bubble.
        token_bytes: that a token of the step takes on the hop to the next stage: there, and its gradient back.
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
    """The three activities of a step. Each is cancelled when the ring breaks; only ``commit`` runs to its end.

    Attributes:
        exposed_s: how long the last step waited for the ring after this member's own share was computed.
        communicating_s: how long its operations were under way, behind the computing or not.
    """

    exposed_s: float
    communicating_s: float

    async def begin(self, session: RingSession, meet: ConnectPeers) -> None:
        """A view begins, whose ring is ``session``. Whatever other connections between its members this needs is made
        now; what ``meet`` makes ends with the session, and break it when they break.

        Raises:
            NetworkError, PeerError: as ``RingSession.form``.
        """

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        """This member's share of step ``step``: micro-batches ``range(first, first + count)``.

        What it makes may go into the ring of ``session`` at once, so the buffer holds sums when this returns, not
        contributions; whoever gives the step up closes the session first, and computes it again from zero.

        Args:
            patience_s: see ``RingSession.submit``.
        """

    async def reduce(self, session: RingSession) -> Contribution:
        """Wait until the members' contributions were brought together; then all hold the same bytes."""

    async def commit(self, step: int, square_sum: float) -> Applied:
        """Apply the reduced bytes. Must give the same bits on every member."""

    async def validate(self, first: int, count: int) -> tuple[float, int]:
        """Sum of the losses (nats) and number of targets over validation micro-batches [first, first + count): those of
        this member's replica. Of a split model one of the replica has them, and the others have 0."""

    def stage_load(self) -> StageLoad | None:
        """None where there is no pipeline, or it has not taken a step in this view."""


class ConnectPeers(Protocol):
    """Forms what some of a view's members need beside its ring, with what the view says of beats and carriage. Raises
    as ``RingSession.form`` and ``Chain.form``."""

    async def ring(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        """Of a part of the members: ``view`` is theirs."""

    async def chain(
        self, view: View, order: Sequence[str], *, activation_bytes: int, gradient_bytes: int, in_flight: int
    ) -> Chain:
        """See ``Chain.form``."""


Factory = Callable[[Engine, ComputeThread, Callable[[], None], int], Strategy]
"""From the engine, its thread, what to call after every piece of work (the heartbeat tells a slow peer from a stuck one
by it), and the bytes of a bucket (0: by itself)."""
