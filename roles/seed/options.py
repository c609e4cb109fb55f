"""How a seed is run: its heartbeats, and who may come in."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.core.ids import new_id
from ring.detector import beat_defaults
from roles.seed.authority import Authority
from roles.seed.store import Records, Store


@dataclass(frozen=True, slots=True)
class Beats:
    """Heartbeat and death in seconds; 0 and 0: from each worker's measured round trip."""

    heartbeat_s: float = 0.0
    death_s: float = 0.0

    def at(self, rtt_ms: float) -> tuple[float, float]:
        return (self.heartbeat_s, self.death_s) if self.heartbeat_s > 0 else beat_defaults(rtt_ms)


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may come in. ``authority``: None on a plain seed; ``ticket_host``: the address that tickets carry."""

    authority: Authority | None = None
    ticket_host: str = "127.0.0.1"


async def cluster_id(store: Store) -> str:
    """The seed's peer id and the cluster's name for programs: made once. Raises ``StorageError``."""
    return await store.call(Records.fact, "cluster-id", new_id)
