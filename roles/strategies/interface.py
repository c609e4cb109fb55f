"""What a way to train is composed of: a work and an exchange (``roles.strategies.strategy`` runs them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.core.training import OnFinal
from ring.chain import Chain
from ring.codecs import Codec
from ring.links import Topology
from ring.session import RingSession
from ring.view import View

Bounds = Sequence[tuple[int, int]]
"""Ranges [start, stop) of the reduce buffer, ascending: the operations of a step, in their order."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A member's summary of a reduced step.

    Attributes:
        digest: of the reduced bytes, 16 bytes.
        part: their squared norm; NaN if a number is not finite.
        own: squared norm of its own contribution; NaN if that was not finite, 0 if it had no share.
        digests: of a split model: the digests of all parts' reduced bytes, concatenated. ``digest`` is made of them
            (``ring.token.joined_digest``). Else empty.
    """

    digest: bytes
    part: float
    own: float
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage of a pipeline did in its newest step, for people.

    Attributes:
        start, stop, layers: it holds layers [start, stop) of ``layers``.
        micro_batch_s: forward and backward of one micro-batch; 0 if it had none.
        busy: share of the step in which it computed; the rest is its bubble.
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


class Work(Protocol):
    """What a member computes in its share of a step, and in which order.

    Attributes:
        unit_s: time for a micro-batch of the newest step; 0: not known, or not needed by the others.
        load: None if there is no pipeline, or no step was taken in this view.
    """

    unit_s: float = 0.0
    load: StageLoad | None = None

    async def begin_view(self, session: RingSession, connect: ConnectPeers) -> None:
        """Begin a view, whose ring is ``session``. Raises as ``ConnectPeers``."""
        return

    async def compute(self, step: int, first: int, count: int, on_final: OnFinal | None, *, patience_s: float) -> None:
        """Compute micro-batches ``range(first, first + count)`` of ``step``, and call ``on_final`` with the last one.
        ``on_final`` is None if the contribution was complete before."""

    async def validate(self, first: int, count: int, *, patience_s: float) -> tuple[float, int]:
        """As ``Strategy.validate``."""

    def on_replica_timed(self, units_s: Sequence[float]) -> None:
        """Take the ``unit_s`` of all members of this member's replica, after a step of a split model."""
        return


@dataclass(frozen=True, slots=True)
class RingPiece:
    """One all-reduce, or all-gather, of a step.

    Attributes:
        array: shape (numel,); the ring reduces it in place.
        residual: this member's error feedback for it, float32, if the codec needs one.
        gathered: ``array`` is all members' (``RingSession.gather``); it is not summed.
    """

    array: npt.NDArray[Any]
    codec: Codec | None = None
    residual: npt.NDArray[np.float32] | None = None
    gathered: bool = False


class Exchange(Protocol):
    """What becomes of the members' contributions. At its end the engine's reduce buffer holds the same at all members.

    Attributes:
        scores: what a robust rule made of the vectors of the last step, as in ``wire.job_messages.StepMetrics``.
        sums_in_place: a piece that is reduced is the end of its range of the reduce buffer: ``finish`` changes nothing.
    """

    scores: dict[str, float]
    sums_in_place: bool = False

    async def begin_view(self, ring: RingSession) -> None:
        """Begin a view. ``ring``: of the members that hold the same part of the model."""

    def begin_step(self, step: int, count: int, bounds: Bounds) -> list[RingPiece]:
        """Begin a step, of which this member computes ``count`` micro-batches: what the ring reduces for each range."""

    def complete(self) -> None:
        """On the compute thread: the whole contribution is in the reduce buffer."""
        return

    def prepare(self, start: int, stop: int) -> float:
        """On the compute thread: a range of the contribution is final, and is sent next. Returns its squared norm."""

    async def finish(self) -> None:
        """Put the result into the reduce buffer. All pieces are reduced."""
        return


class ConnectPeers(Protocol):
    """Forms further connections between some of a view's members, with the view's heartbeats and link settings. They
    end with the view's session, and when one breaks, the session breaks. Raises as ``RingSession.form`` and
    ``Chain.form``."""

    async def ring(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        """Form a ring of the members of ``view``."""

    async def chain(self, view: View, *, activation_bytes: int, gradient_bytes: int) -> Chain:
        """See ``Chain.form``."""


Progress = Callable[[], None]
"""Called for every finished piece of work: heartbeats carry the number of calls, which shows that a slow peer works."""
