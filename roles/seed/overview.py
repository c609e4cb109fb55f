"""What people see of a cluster: a record for each peer, job, checkpoint, part and serving peer, and their changes.

Nothing is stored here. A record is made when somebody asks for it. Ages are announced once a second, and less often if
there are very many peers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from p2ptrain import __version__
from p2ptrain.core.texts import printable
from ring.view import TERM_BITS
from roles.seed.events import Map, Subscription
from roles.seed.job_table import JobTable
from roles.seed.jobs import JobPorts
from roles.seed.peers import BEATS_PER_S, NAME_CHARS, ConnectedPeer, clip, whole
from roles.seed.pool import Pool
from wire.address import format_address
from wire.records import CheckpointInfo, ClusterInfo, JobInfo, PartInfo, PeerInfo, ServingInfo

LOST_SHOWN_S = 60.0
"""How long people see a lost peer."""
_STATES = frozenset({
    "joining", "idle", "building", "waiting", "healing", "following", "training", "held", "failed", "leaving",
    "serving", "drafting",
})  # fmt: skip
"""Valid values of ``Heartbeat.state``."""
_FIGURES = ("in_bps", "out_bps", "tokens_per_s", "staleness")
_COUNTS = ("memory_bytes", "memory_total_bytes", "accepted", "refused", "most_staleness", "sent_bytes")
"""Figures of a heartbeat that people see: rates and means, and whole numbers."""


@dataclass(frozen=True, slots=True)
class SeedIdentity:
    """A seed in its cluster. ``cluster_id`` is also the seed's peer id. ``term`` rises with each restore."""

    cluster_id: str
    name: str
    term: int

    @property
    def minted_below(self) -> int:
        """Generations up to this one may be of an earlier term."""
        return self.term << TERM_BITS


class Overview:
    """Makes the records that people see. ``address``: of the seed, for other machines. ``http``: of its HTTP server.
    ``watch_link``: opens its web page on other machines, with the key of those who only look, a secret; empty: it has
    none for them."""

    def __init__(self, identity: SeedIdentity, ports: JobPorts, jobs: JobTable, pool: Pool) -> None:
        self.address = self.http = self.watch_link = ""
        self._identity, self._started_at = identity, ports.clock.wall()
        self._ports, self._peers, self._jobs = ports, ports.peers, jobs
        self._pool = pool

    def cluster_info(self) -> ClusterInfo:
        identity, peers, jobs = self._identity, len(self._peers.connected), len(self._jobs.controllers)
        about, pool = (identity.cluster_id, identity.name, __version__, self.address, self._started_at), self._pool
        return ClusterInfo(*about, peers, jobs, pool.policy, pool.moved, self.http)

    def job_infos(self) -> list[JobInfo]:
        return [self._jobs.info(controller) for controller in self._jobs.controllers.values()]

    def peer_infos(self) -> list[PeerInfo]:
        return [self.peer_info(peer) for peer in [*self._peers.connected.values(), *self._peers.lost.values()]]

    def serving_infos(self) -> list[ServingInfo]:
        found = [info for peer in self._peers.connected.values() for info in peer.serving.values()]
        return sorted(found, key=lambda info: (info.role != "verifier", info.name, info.peer))

    def part_infos(self) -> list[PartInfo]:
        found = [part for peer in self._peers.connected.values() for part in peer.parts.values()]
        return sorted(found, key=lambda part: (part.name, part.model, part.start, part.stop, part.id))

    def checkpoint_infos(self) -> list[CheckpointInfo]:
        return list(self._ports.checkpoints.known.values())

    def peer_info(self, peer: ConnectedPeer) -> PeerInfo:
        """A peer, with its place in its job. A stage has the share of its replica's first member."""
        controllers, is_lost = self._jobs.controllers, peer.lost_at is not None
        controller = controllers.get(peer.job)
        if controller is None and is_lost:
            controller = next((item for item in controllers.values() if item.holds(peer.id)), None)
        view = controller.running_view if controller else None
        rank = view.rank_of(peer.id) if view else None
        shares = controller.rows.shares(view) if controller and view else ()
        stage = controller.stage_of(peer.id) if controller else None
        job_state = controller.core.state if controller else ""
        heartbeat = peer.heartbeat
        current = heartbeat if heartbeat and not is_lost else None
        stats = {name: value for name, value in current.stats.items() if math.isfinite(value)} if current else {}
        figures: dict[str, Any] = {name: stats.get(name, 0.0) for name in _FIGURES}
        figures |= {name: whole(stats.get(name)) for name in _COUNTS}
        gpus = list(current.gpus) if current else []
        head = rank - view.stage_of(rank) if view and rank is not None else None
        state = heartbeat.state if heartbeat else "joining"
        if is_lost:
            state = "away" if rank is not None and peer.end == "lost" else peer.end
        else:
            state = state if state in _STATES else "idle"
            state = {("paused", "held"): "paused", ("saving", "idle"): "held"}.get((job_state, state), state)
            kind = peer.task.partition("/")[0] if state == "idle" else ""
            state = {"serve": "serving", "draft": "drafting"}.get(kind, state)
        return PeerInfo(
            id=peer.id,
            name=peer.name,
            roles=[peer.role],
            device=str(peer.hello.capabilities.get("device", ""))[:NAME_CHARS],
            state=state,
            address=format_address(peer.host, peer.port),
            joined_at=peer.joined_at,
            heartbeat_age_s=self._ports.clock.now() - peer.connection.last_heard,
            rtt_ms=stats.get("rtt_ms", peer.rtt_ms),
            gpu_load=gpus[0].load if gpus else None,
            gpus=gpus,
            job=peer.job,
            rank=whole(peer.hello.capabilities.get("rank")) if peer.group else rank,
            group=peer.group,
            generation=view.generation if view and rank is not None else 0,
            step=heartbeat.step if heartbeat else 0,
            share=shares[head] if head is not None and head < len(shares) else 0,
            stage=stage,
            stages=controller.stages if controller and stage is not None else 1,
            fetched_bytes=peer.newest_fetch.fetched_bytes if peer.newest_fetch else 0,
            model=clip(", ".join(info.label for info in peer.serving.values())),
            sessions=sum(info.sessions for info in peer.serving.values()),
            flops=int(peer.flops or 0),
            part_bytes=peer.offer.memory_bytes,
            cores=whole(peer.hello.capabilities.get("cores"), 1 << 16),
            threads=whole(peer.hello.capabilities.get("threads"), 1 << 16),
            router="" if peer.is_dialled else peer.origin,
            ways={target: printable(way) for target, way in current.ways.items()} if current else {},
            **figures,
        )

    @contextmanager
    def watching(self, *, with_events: bool = False) -> Iterator[Subscription]:
        """A subscription to all records of state, and to all changes within the block; ``with_events``: also to the
        newest events."""
        with self._ports.announcements.subscribe() as updates:
            updates.add(self._ports.announcements.recent if with_events else ())
            updates.touch("cluster", [""])
            updates.touch("peers", [*self._peers.connected, *self._peers.lost])
            updates.touch("jobs", self._jobs.controllers)
            updates.touch("checkpoints", self._ports.checkpoints.known)
            updates.touch("parts", [part.id for part in self.part_infos()])
            updates.touch("serving", [info.id for info in self.serving_infos()])
            yield updates

    def render(self, topic: str, item_id: str) -> Map | None:
        """A record as a map; None if it was deleted."""
        if topic == "cluster":
            return self.cluster_info().to_map()
        if topic == "peers":
            peer = self._peers.connected.get(item_id) or self._peers.lost.get(item_id)
            return self.peer_info(peer).to_map() if peer else None
        if topic == "jobs":
            controller = self._jobs.controllers.get(item_id)
            return self._jobs.info(controller).to_map() if controller else None
        holder = self._peers.connected.get(item_id.partition("/")[0])  # the ids of these records begin with a peer's
        if topic == "parts":
            return holder.parts[item_id].to_map() if holder and item_id in holder.parts else None
        if topic == "serving":
            info = holder.serving.get(item_id.partition("/")[2]) if holder else None
            return info.to_map() if info else None
        checkpoint = self._ports.checkpoints.known.get(item_id)
        return checkpoint.to_map() if checkpoint else None

    async def run(self) -> None:
        """Once a second, or as often as very many peers beat, update the ages that people see, and forget peers lost
        ``LOST_SHOWN_S`` ago."""
        while True:
            await asyncio.sleep(max(1.0, len(self._peers.connected) / BEATS_PER_S))
            lost, oldest = self._peers.lost, self._ports.clock.now() - LOST_SHOWN_S
            forgotten = [peer.id for peer in lost.values() if (peer.lost_at or 0.0) < oldest]
            for peer_id in forgotten:
                del lost[peer_id]
            self._ports.announcements.touch("peers", *forgotten, *self._peers.connected)
