"""The worker's services that its parts use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Profile
from p2ptrain.core.threads import Thread
from p2ptrain.core.world import World
from ring.links import Inbound
from roles.compute_thread import ComputeThread
from roles.engine import Engine, Stage
from roles.line import DIAL_S
from roles.seed_link import Notify
from roles.strategies.strategy import Factory
from wire.address import advertised_host
from wire.connection import Connection
from wire.handshake import dial, local_hello
from wire.job_messages import MemberRecord
from wire.messages import Hello, Message, Welcome

BuildEngine = Callable[[Profile, Stage], Engine]
"""Builds the engine of a job, for the whole model or a part of it."""


@dataclass(frozen=True, slots=True)
class PeerContext:
    """This worker, for the parts of it that serve other peers and dial them.

    Attributes:
        seed_at: returns the host at which the seed was dialled; members on the seed's machine are dialled there, too.
        send: sends a message to the seed, now or when it is back.
    """

    world: World
    peer_id: str
    name: str
    seed_at: Callable[[], str]
    compute: ComputeThread
    send: Callable[[Message], None]

    @property
    def seed_host(self) -> str:
        return self.seed_at()

    def hello(self, purpose: str, job: str = "", generation: int = 0, **more: Any) -> Hello:
        more |= {"job": job, "generation": generation}
        return local_hello(peer_id=self.peer_id, name=self.name, roles=["worker"], purpose=purpose, **more)

    async def dial(
        self, peer_id: str, host: str, port: int, hello: Hello, *, timeout_s: float = DIAL_S
    ) -> tuple[Connection, Welcome]:
        """Connect to another worker for bulk transfers. An empty ``host``: the seed's. Raises as
        ``wire.handshake.dial``."""
        return await dial(
            self.world.network,
            advertised_host(self.seed_host, host),
            port,
            hello,
            timeout_s=timeout_s,
            expect_peer=peer_id,
            expect_role="worker",
        )


@dataclass(frozen=True, slots=True)
class Context(PeerContext):
    """What a runner needs of its worker.

    Attributes:
        disk: thread for all access to the job's directory.
        notify: shows a text to the person here and at the seed.
        notify_here: shows a text to the person here only, because the seed knows it already.
        build_engine: blocking; called on the compute thread.
        strategies: returns a job's strategy factory (``roles.strategies.strategy_of``).
        on_step: called after every commit with (applied, total, the step's metrics).
        ask_members: asks the seed for the other workers of this worker's job. Raises ``NetworkError``, ``Refused``.
        inputs_dir: where what a job reads is kept, if it came from other workers.
        build_progress: what ``build_engine`` does now and how far it is; empty: nothing that takes long.
    """

    inbound: Inbound
    disk: Thread
    notify: Notify
    notify_here: Notify
    build_engine: BuildEngine
    strategies: Callable[[Profile], Factory]
    on_step: Callable[[int, int, dict[str, float]], None]
    ask_members: Callable[[], Awaitable[Sequence[MemberRecord]]]
    inputs_dir: Callable[[], Path]
    build_progress: Callable[[], str] = str
