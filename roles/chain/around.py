"""Where an operator, or a verifier, stands that uses a split model, and the values that the package's parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.world import World
from wire.address import is_loopback

NEAR_SILENCE_S = 2.0
"""Silence of a stage that counts as its death, where everybody is near."""
Notify = Callable[[str, str, str], None]
"""(level, kind, text) for the person: ``info`` or ``warning``; what was lost, replaced, mended."""


@dataclass(frozen=True, slots=True)
class Around:
    """Where this operator stands.

    Attributes:
        world: its network is the operator's own: over TLS in an encrypted cluster (``cli.access.Access.network``).
        peer_id: whom the operator's certificate names; any id in a plain cluster.
        name: for people.
        seed_host: the host under which this operator dials the seed; peers on the seed's own machine are there.
        state: a directory for digests of model files; None: they are not kept.
        notify: told of what happens to the chain.
        silence_s: after which a peer that says nothing counts as dead; grows with the longest round trip.
        role: that it calls workers as: ``operator`` or ``verifier``.
    """

    world: World
    peer_id: str
    name: str
    seed_host: str
    state: Path | None = None
    notify: Notify = lambda level, kind, text: None
    silence_s: float = NEAR_SILENCE_S
    role: str = "operator"


@dataclass(frozen=True, slots=True)
class WorkerAt:
    """A worker that may hold a stage. ``host`` is as the seed sees it."""

    peer_id: str
    name: str
    host: str
    port: int
    device: str = ""

    def dialled(self, seed_host: str) -> str:
        """The host at which this operator dials it: a loopback address of the seed's means the seed's machine."""
        return seed_host if is_loopback(self.host) else self.host

    def seen_from(self, other: WorkerAt) -> str:
        """The host that ``other`` is told: empty means the seed's machine."""
        return "" if is_loopback(self.host) and not is_loopback(other.host) else self.host


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the loading of a part is.

    Attributes:
        index: of the stage. name: of the peer that loads it.
        received_bytes: that came over the wire; known at the end only.
    """

    index: int
    name: str
    done_bytes: int
    total_bytes: int
    ready: bool = False
    received_bytes: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Token:
    """One new token.

    Attributes:
        number: of the generation's new tokens, from 0.
        stages_us: microseconds that each stage computed on the work that picked it, in order.
        took_s: from the moment at which that work was sent to the arrival of the token: computing, hops and mending.
        mended: a stage was lost and replaced meanwhile.
    """

    id: int
    number: int
    stages_us: tuple[int, ...]
    took_s: float
    mended: bool = False

    @property
    def compute_s(self) -> float:
        """Of all stages together; the rest of ``took_s`` is the way and the waiting."""
        return sum(self.stages_us) / 1e6
