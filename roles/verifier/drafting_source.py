"""What a verifier's session needs of whatever drafts for it, be it far away or in this process.

``roles.verifier.drafters`` is the one over the network. A session opens with all drafters that there are, and with
those that come later; it knows each by a number that is never used again in this session. What a drafter does reaches
the session as the events of its core (``roles.speculation.verifying``), called on the event loop, never from within
``open`` or ``tell``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.core.serving import Sampling
from roles.speculation.events import Drafted, DrafterLost, DrafterReady, Latency, Tell

DraftingEvent = DrafterReady | Drafted | DrafterLost | Latency


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter of one session, for people and programs.

    Attributes:
        drafter: its number in the session's events.
        peer_id: empty for one in this process. model: what it drafts with.
        latency_s: one way.
        bytes_in, bytes_out: of message bodies of this session, from and to it; 0 for one in this process. frames: that
            these came and went in.
    """

    drafter: int
    peer_id: str
    name: str
    model: str
    latency_s: float
    bytes_in: int
    bytes_out: int
    frames: int = 0

    def as_map(self) -> dict[str, Any]:
        return {
            "peer_id": self.peer_id,
            "name": self.name,
            "model": self.model,
            "latency_ms": 1e3 * self.latency_s,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


@dataclass(frozen=True, slots=True)
class Connected:
    """A drafter to which there is a connection.

    Attributes:
        alpha: acceptance, by the last drafts of all sessions; None before there were some.
        latency_s: one way.
    """

    peer_id: str
    alpha: float | None
    latency_s: float


class Drafting(Protocol):
    """Drafters at work for one session."""

    def tell(self, tell: Tell) -> None:
        """Give a verdict to the drafter that it is for. Never blocks nor raises: one that is gone by now hears no
        more, which its ``DrafterLost`` tells, or has told."""
        ...

    def drop(self, drafter: int, reason: str) -> None:
        """This drafter said what none says that is right. It loses its place here and in all other sessions."""
        ...

    def facts(self) -> list[DrafterFacts]:
        """Of every drafter that became ready in this session, those that were lost since too; also after ``close``."""
        ...

    def close(self) -> None:
        """The session is over: every drafter is told, no event comes any more. Never blocks nor raises; may be called
        twice."""
        ...


class DrafterSource(Protocol):
    """Where drafters come from."""

    def open(
        self,
        ids: Sequence[int],
        *,
        prompt: int,
        positions: int,
        sampling: Sampling,
        depth: int,
        on_event: Callable[[DraftingEvent], None],
    ) -> Drafting:
        """Have all drafters take in what a session begins with, and tell when each is ready. Does not wait for any.

        Args:
            ids: all that is known when the session begins. A drafter that comes later begins with the same ids: it is
                told what was verified since by its first verdict.
            prompt: the pick at this position has draw 0.
            positions: that the session may grow to.
            depth: drafts beyond what is verified, until a verdict says otherwise.
        """
        ...

    def connected(self) -> list[Connected]:
        """The drafters that there are, whether or not a text needs them now."""
        ...


class NoDrafters:
    """The verifier by itself: a ``DrafterSource`` and its ``Drafting``."""

    def open(
        self,
        ids: Sequence[int],
        *,
        prompt: int,
        positions: int,
        sampling: Sampling,
        depth: int,
        on_event: Callable[[DraftingEvent], None],
    ) -> NoDrafters:
        return self

    def tell(self, tell: Tell) -> None:
        """Nobody is there to hear it."""

    def drop(self, drafter: int, reason: str) -> None:
        """As ``tell``."""

    def facts(self) -> list[DrafterFacts]:
        return []

    def close(self) -> None:
        """Nothing is open."""

    def connected(self) -> list[Connected]:
        return []
