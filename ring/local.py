"""A worker as far as rings and chains see it, over any network: for benchmarks and tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import LoopClock, Network, World
from ring.chain import Chain
from ring.links import Inbound
from ring.session import RingSession
from ring.view import View
from wire.connection import Connection
from wire.handshake import Server, local_welcome, serve
from wire.job_messages import MemberRecord
from wire.messages import Hello, Refuse, Welcome

HOST = "127.0.0.1"


class LocalMember:
    """A worker as far as the ring sees it: a listener, an ``Inbound``, and a session or a chain once it is formed.

    Attributes:
        problems: what its listener met with.
    """

    def __init__(self, peer_id: str, network: Network, *, seed: int = 0) -> None:
        self.peer_id = peer_id
        jitter = random.Random(seed)  # noqa: S311 - the World's generator is for jitter only
        self.world = World(clock=LoopClock(), network=network, disk=RealDisk(), random=jitter)
        self.inbound = Inbound()
        self.server: Server | None = None
        self.problems: list[P2PTrainError] = []
        self._session: RingSession | None = None
        self._chain: Chain | None = None

    @property
    def session(self) -> RingSession:
        assert self._session is not None, f"{self.peer_id} is in no ring"
        return self._session

    @property
    def chain(self) -> Chain:
        assert self._chain is not None, f"{self.peer_id} is in no chain"
        return self._chain

    async def listen(self, host: str = HOST, port: int = 0) -> int:
        """Accept ring connections; the port that was bound."""
        self.server = await serve(
            self.world.network,
            host,
            port,
            decide=self._decide,
            serve=self.inbound.offer,
            on_problem=lambda problem, address: self.problems.append(problem),
        )
        return self.server.address[1]

    async def form(
        self,
        view: View,
        *,
        heartbeat_s: float = 5.0,
        death_s: float = 15.0,
        sub_chunk_bytes: int = 64,
        streams: int = 1,
        timeout_s: float = 10.0,
    ) -> RingSession:
        """As ``RingSession.form``, with small sub-chunks, so that little data takes many."""
        self._session = await RingSession.form(
            world=self.world,
            view=view,
            peer_id=self.peer_id,
            name=self.peer_id,
            seed_host=HOST,
            inbound=self.inbound,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            sub_chunk_bytes=sub_chunk_bytes,
            streams=streams,
            timeout_s=timeout_s,
        )
        return self._session

    async def form_chain(
        self,
        view: View,
        *,
        activation_bytes: int,
        gradient_bytes: int,
        in_flight: int = 0,
        order: Sequence[str] = (),
        heartbeat_s: float = 5.0,
        death_s: float = 15.0,
        streams: int = 1,
        timeout_s: float = 10.0,
    ) -> Chain:
        """As ``Chain.form``."""
        self._chain = await Chain.form(
            world=self.world,
            view=view,
            order=order,
            peer_id=self.peer_id,
            name=self.peer_id,
            seed_host=HOST,
            inbound=self.inbound,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
            in_flight=in_flight,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            streams=streams,
            timeout_s=timeout_s,
        )
        return self._chain

    @property
    def _joined(self) -> list[RingSession | Chain]:
        return [joined for joined in (self._session, self._chain) if joined is not None]

    def die(self) -> None:
        """What the kernel does for a process that was killed: every connection is reset, and no word is said."""
        for member in self._joined:
            for neighbour in member.neighbours:
                neighbour.abort()

    async def stop(self) -> None:
        """Leave the ring and the chain, and stop listening."""
        for member in self._joined:
            member.close()
            await member.wait_closed()
        if self.server is not None:
            await self.server.close()

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.inbound.decide(hello) or local_welcome(peer_id=self.peer_id, name=self.peer_id, wall=0.0)


def local_view(ports: dict[str, int], *, generation: int = 1, hosts: bool = False) -> View:
    """A view of the peers that listen on these ports, in this order.

    Args:
        hosts: each peer's host has its name; else they are on the seed's host.
    """
    return View(
        "job",
        generation,
        0,
        "",
        tuple(
            MemberRecord(peer_id, peer_id, peer_id if hosts else "", port, 0, 0, healthy=True)
            for peer_id, port in ports.items()
        ),
    )
