"""What a verifier's session needs of whatever drafts for it. ``roles.verifier.drafters`` is the one over the network.

A session opens with the drafters that there are, and with those that come later; it knows each by a number that is
never used again in this session. What a drafter does reaches the session as the events of its core
(``roles.speculation.verifying``), called on the event loop, never from within ``open`` or ``tell``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.core.serving import Sampling
from roles.speculation.events import DrafterState, Tell


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session begins with.

    Attributes:
        ids: all that is known. A drafter that comes later begins with the same ids, and is told by its first verdict
            what was verified since.
        prompt: the pick at this position has sample index 0. positions: that the session may grow to.
        depth: drafts beyond what is verified, until a verdict says otherwise.
    """

    ids: tuple[int, ...]
    prompt: int
    positions: int
    sampling: Sampling
    depth: int


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter of one session, for people and programs.

    Attributes:
        drafter: its number in the session's events. model: what it drafts with. latency_s: one way.
        bytes_in, bytes_out: of message bodies of this session, from and to it.
    """

    drafter: int
    peer_id: str
    name: str
    model: str
    latency_s: float
    bytes_in: int
    bytes_out: int

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
    """A drafter to which there is a connection. ``alpha``: acceptance; None before any draft was compared."""

    peer_id: str
    alpha: float | None
    latency_s: float


class Drafting(Protocol):
    """Drafters at work for one session. Nothing here blocks or raises."""

    def tell(self, tell: Tell) -> None:
        """Give a verdict to the drafter that it is for. One that is gone hears no more: its ``DrafterLost`` comes."""
        ...

    def drop(self, drafter: int, reason: str) -> None:
        """This drafter said what no correct one says. It loses this session and all others."""
        ...

    def facts(self) -> list[DrafterFacts]:
        """Of every drafter that became ready in this session, also of those that were lost, and after ``close``."""
        ...

    def close(self) -> None:
        """The session is over: every drafter is told, and no event comes any more. May be called twice."""
        ...


class DrafterSource(Protocol):
    """Where drafters come from."""

    def open(self, opening: Opening, on_event: Callable[[DrafterState], None]) -> Drafting:
        """Have drafters take in what a session begins with, and tell when each is ready. Waits for none."""
        ...

    def connected(self) -> list[Connected]:
        """The drafters that there are, whether or not a text needs them now."""
        ...
