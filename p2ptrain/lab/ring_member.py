"""A local worker with a listener, for benchmarks (and tests) of rings and chains over any network."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import LoopClock, Network, World
from ring.chain import Chain
from ring.links import Inbound
from ring.session import RingSession
from ring.view import View
from wire.connection import Connection
from wire.handshake import PeerServer, local_welcome, serve
from wire.job_messages import MemberRecord
from wire.messages import Hello, Refuse, Welcome

HOST = "127.0.0.1"
TIMEOUT_S = 10.0


class LocalMember:
    """The part of a worker that the ring needs: a listener, and an ``Inbound``."""

    def __init__(self, peer_id: str, network: Network, *, seed: int = 0) -> None:
        self.peer_id = self.name = peer_id
        self.seed_host = HOST
        jitter = random.Random(seed)  # noqa: S311 - the World's generator is for jitter only
        self.world = World(clock=LoopClock(), network=network, disk=RealDisk(), random=jitter)
        self.inbound = Inbound()
        self.server: PeerServer | None = None

    async def listen(self, host: str = HOST, port: int = 0) -> int:
        self.server = await serve(
            self.world.network, host, port, decide=self._decide, serve=self.inbound.serve, on_problem=self.on_problem
        )
        return self.server.address[1]

    async def form(self, view: View, *, timeout_s: float = TIMEOUT_S, **settings: Any) -> RingSession:
        """As ``RingSession.form``, with small sub-chunks, so that little data needs many. ``settings``: other fields of
        the view."""
        view = replace(view, **{"sub_chunk_bytes": 64, **settings})
        return await RingSession.form(self, view, timeout_s=timeout_s)

    async def form_chain(self, view: View, *, timeout_s: float = TIMEOUT_S, **options: Any) -> Chain:
        return await Chain.form(self, replace(view, stages=view.size), timeout_s=timeout_s, **options)

    def on_problem(self, problem: P2PTrainError, address: object) -> None:
        """Called with errors of the listener."""

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.inbound.decide(hello) or local_welcome(peer_id=self.peer_id, name=self.peer_id, wall=0.0)


def local_view(ports: dict[str, int]) -> View:
    """A view of the peers that listen on these ports of the seed's host, in this order."""
    return View(
        "job",
        1,
        0,
        "",
        tuple(MemberRecord(peer_id, peer_id, "", port, 0, 0, healthy=True) for peer_id, port in ports.items()),
        heartbeat_s=5.0,
        death_s=15.0,
    )
