"""A peer as a script writes it: the seed reaches it back, it says what a test lets it say, and hands out what it
hears."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import Network
from wire.connection import Connection
from wire.handshake import PeerServer, dial, local_hello, local_welcome, serve
from wire.job_messages import Assign, Hold, Report, ViewAnnounced
from wire.messages import EventNotice, Heartbeat, HeartbeatAck, Hello, Message, Scalar, Welcome

HOST, DEADLINE_S = "127.0.0.1", 10.0
M = TypeVar("M", bound=Message)


def lineage_of(step: int) -> str:
    """What all scripted workers hold at a step."""
    return f"{step:032x}"


def ignore_problem(problem: P2PTrainError, address: tuple[str, int]) -> None: ...


class ScriptedPeer:
    def __init__(self, network: Network, seed: tuple[str, int], peer_id: str, roles: tuple[str, ...] = ("worker",)):
        self.network, self.seed, self.id, self.roles = network, seed, peer_id, roles
        self.job, self.view = "", ViewAnnounced("", 0, 0, "", ())
        self.connection: Connection
        self.welcome: Welcome
        self.server: PeerServer

    async def listen(self) -> None:
        async def decide(hello: Hello, connection: Connection) -> Welcome:
            return local_welcome(peer_id=self.id, name=self.id, wall=0.0)

        async def hang_up(connection: Connection, hello: Hello) -> None: ...

        self.server = await serve(self.network, HOST, 0, decide=decide, serve=hang_up, on_problem=ignore_problem)

    async def join(self, *, name: str = "", port: int | None = None, job: str = "", generation: int = 0,
                   capabilities: dict[str, Scalar] | None = None) -> None:  # fmt: skip
        port = self.server.address[1] if port is None else port
        about = {"device": "cpu"} | (capabilities or {})
        hello = local_hello(peer_id=self.id, name=name or f"name-{self.id}", roles=self.roles, purpose="peer", job=job,
                            generation=generation, port=port, capabilities=about)  # fmt: skip
        self.connection, self.welcome = await dial(self.network, *self.seed, hello, timeout_s=DEADLINE_S)

    def say(self, message: Message) -> None:
        self.connection.send(message)

    async def hear(self, kind: type[M]) -> M:
        """The next message, which must be a ``kind``: echoes of beats, holds of a ring that stops anyway, and what is
        for the person at its terminal, aside."""
        while True:
            message = (await self.connection.receive(timeout_s=DEADLINE_S)).message
            if isinstance(message, kind):
                return message
            assert isinstance(message, HeartbeatAck | Hold | EventNotice), (
                f"{self.id} waits for {kind.__name__} and hears {message}"
            )

    async def say_and_wait(self, message: Message) -> None:
        """Say it, and wait until it was heard."""
        self.say(message)
        await self.beaten("idle")

    async def beaten(self, state: str = "training") -> None:
        """A beat, and its echo: all said before it has been read by then."""
        self.say(Heartbeat(1, 1, 1, state, {"tokens_per_s": 5.0, "memory_bytes": 7.0}))
        await self.hear(HeartbeatAck)

    def report(self, status: str, applied: int = 0, *, lineage: str = "", **more: Any) -> None:
        generation = 0 if status == "ready" else self.view.generation
        more = {"corpus": "c0ffee", **more}
        self.say(Report(self.job, generation, status, applied, applied, lineage or lineage_of(applied), **more))

    async def assigned(self, applied: int = 0) -> Assign:
        """Take the job and be ready for it."""
        assign = await self.hear(Assign)
        self.job = assign.job
        self.report("ready", applied)
        return assign

    async def viewed(self) -> ViewAnnounced:
        self.view = await self.hear(ViewAnnounced)
        return self.view

    async def close(self) -> None:
        if hasattr(self, "connection"):
            await self.connection.close()
        await self.server.close()


@asynccontextmanager
async def scripted_peer(
    network: Network, seed: tuple[str, int], peer_id: str, *roles: str
) -> AsyncIterator[ScriptedPeer]:
    """A peer that has joined."""
    peer = ScriptedPeer(network, seed, peer_id, roles)
    await peer.listen()
    try:
        await peer.join(name=peer_id)
        yield peer
    finally:
        await peer.close()
