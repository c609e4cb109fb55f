"""A client's connection to one worker: requests and answers, forward requests, and messages of the worker's stages.

There is one per worker, for all of its stages and sessions. A worker that stays silent on it counts as dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.core.background import Background
from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, NetworkError, P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import World
from roles.line import DIAL_S, QUIET_S, Line
from roles.worker.stage_links import send_forward
from wire.address import advertised_host
from wire.chain_messages import ChainBroken, ForwardRequest, PartLoading, Sampled, SampledBatch
from wire.client import PendingCalls
from wire.connection import Connection, Received
from wire.handshake import dial, local_hello
from wire.messages import Refuse, Response
from wire.text_messages import DrafterAddress

LOADING_QUIET_S = 240.0
"""Longest time without progress while a part is loaded. Another client's load may come first, a disk may be slow, and
the load ends with a self-test of the architecture."""
OnBytes = Callable[[int, int], None]
"""Callback (done, total) with the progress of a load."""
Notify = Callable[[str, str, str], None]
"""Callback (level, kind, text) with news for people: what was lost, replaced or mended. Level: ``info`` or
``warning``."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    """Identity and settings of the client of a chain: an operator or a verifier.

    Attributes:
        world: its network is the client's own, with TLS in an encrypted cluster (``p2ptrain.cluster.access``).
        peer_id: the peer that the client's certificate names; any id in a plain cluster.
        seed_host: host at which this client dials the seed, and peers on the seed's machine.
        state: directory for digests of model files; None: they are not kept.
        notify: receives news about the chain.
        silence_s: silence after which a peer counts as dead; it grows with the longest round trip.
        role: role towards workers: ``operator`` or ``verifier``.
    """

    world: World
    peer_id: str
    name: str
    seed_host: str
    state: Path | None = None
    notify: Notify = lambda level, kind, text: None
    silence_s: float = 2.0
    role: str = "operator"

    async def dial(
        self, at: WorkerAddress | DrafterAddress, purpose: str, *, role: str = "worker", job: str = ""
    ) -> Connection:
        """Connect to another peer. A loopback address means the seed's machine. Raises as ``wire.handshake.dial``."""
        hello = local_hello(peer_id=self.peer_id, name=self.name, roles=[self.role], purpose=purpose, job=job)
        host = advertised_host(self.seed_host, at.host)
        connection, _ = await dial(
            self.world.network, host, at.port, hello, timeout_s=DIAL_S, expect_peer=at.peer_id, expect_role=role
        )
        return connection


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker that may hold a stage. ``host`` is its host as the seed sees it."""

    peer_id: str
    name: str
    host: str
    port: int
    device: str = ""

    def to_map(self) -> dict[str, Any]:
        """As requests have it."""
        return {"peer": self.peer_id, "host": self.host, "port": self.port}


class WorkerPeer:
    """See the module's docstring.

    Attributes:
        latency_s: shortest one-way latency so far; 0 before ``measure``.
        problem: why the connection ended; None while it lives.
        on_lost: called once, with the reason, when the connection ends other than by ``close``.
        listeners: by session id, for messages of its stages. load_lock: held while a part is loaded.
    """

    def __init__(self, context: ClientContext, worker: WorkerAddress, connection: Connection) -> None:
        self.worker = worker
        self.latency_s = 0.0
        self.problem: P2PTrainError | None = None
        self.on_lost: list[Callable[[WorkerPeer, P2PTrainError], None]] = []
        self.listeners: dict[str, Callable[[WorkerPeer, Sampled | ChainBroken], None]] = {}
        self._context = context
        self._line = Line(connection, QUIET_S, beat_s=context.silence_s / 4)
        self._calls = PendingCalls()
        self._loading: tuple[OnBytes, asyncio.Timeout] | None = None  # of the load under way; when it is too slow
        self.load_lock = asyncio.Lock()
        self._outgoing: list[tuple[ForwardRequest, memoryview]] = []
        self._tasks = Background()
        self._receiving = self._tasks.start(self._line.run(self._take_untrusted, self._end), f"peer {worker.name}")

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def lost(self) -> bool:
        return self.problem is not None

    def watch_closely(self) -> None:
        """From now on a short silence counts as death."""
        silence_s = max(self._context.silence_s, 16 * self.latency_s)
        self._line.silence_s = min(self._line.silence_s, silence_s)

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises ``Refused``, ``DeadlineExceeded``, ``ConnectionLost``, each
        naming the worker."""
        if self.problem is not None:
            raise ConnectionLost(f"{self.name} is lost: {self.problem.message}", remedy=self.problem.remedy)
        return await self._calls.ask(self._line.connection.send, method, params, whom=self.name, timeout_s=timeout_s)

    async def measure(self) -> float:
        """Measure the one-way latency in seconds. Raises as ``ask``."""
        for _ in range(3):
            began = self._context.world.clock.now()
            with suppress(Refused):  # a refusal of an unknown method takes as long
                await self.ask("probe.clock", {}, timeout_s=QUIET_S)
            took_s = (self._context.world.clock.now() - began) / 2
            self.latency_s = min(self.latency_s or took_s, took_s)
        return self.latency_s

    async def load(self, params: dict[str, Any], on_bytes: OnBytes) -> dict[str, Any]:
        """Send ``part.load``. The caller holds ``load_lock``. ``on_bytes`` is called with (done, total).

        Raises:
            DeadlineExceeded: no progress for ``LOADING_QUIET_S``. Refused, ConnectionLost: as ``ask``.
        """
        assert self.load_lock.locked()
        try:
            async with asyncio.timeout(LOADING_QUIET_S) as limit:
                self._loading = on_bytes, limit
                return await self.ask("part.load", params, timeout_s=24 * 3600.0)
        except TimeoutError:
            text = f"{self.name} loads a part and made no progress for {LOADING_QUIET_S:.0f} s"
            raise DeadlineExceeded(text, remedy="check its disk and its connection to the model's sender") from None
        finally:
            self._loading = None

    def send_forward(self, work: ForwardRequest, payload: bytes) -> None:
        """Send a forward request, in one message with those of other sessions in the same turn of the loop."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._send_outgoing)
        self._outgoing.append((work, memoryview(payload)))

    def _send_outgoing(self) -> None:
        work, self._outgoing = self._outgoing, []
        with suppress(ConnectionLost):
            send_forward(self._line.connection, work)

    def ask_later(self, method: str, params: dict[str, Any]) -> None:
        """Send a request whose answer does not matter. Never raises."""

        async def ask() -> None:
            with suppress(NetworkError, Refused):
                await self.ask(method, params, timeout_s=QUIET_S)

        self._tasks.start(ask(), method)

    async def close(self) -> None:
        """Disconnect. Its sessions end there, its parts stay loaded. Never raises; may be called twice."""
        self.on_lost.clear()
        await self._tasks.settle(timeout_s=0.2, but=self._receiving)  # wait for the last requests
        await self._line.connection.close(timeout_s=0.5)
        await self._tasks.stop()

    def _end(self, problem: P2PTrainError) -> None:
        if self.problem is not None:
            return
        self.problem = problem
        self._line.connection.abort(problem)
        self._calls.fail_all(self.name)
        for notify in list(self.on_lost):
            notify(self, problem)

    def _take_untrusted(self, received: Received) -> None:
        """Raises ``ProtocolError``: no correct worker sends this."""
        match message := received.message:
            case Response():
                self._calls.resolve(message)
            case SampledBatch(results):
                for result in results:
                    self._notify(result)
            case ChainBroken():
                self._notify(message)
            case PartLoading(done_bytes, total_bytes):
                if self._loading is not None and not self._loading[1].expired():
                    on_bytes, limit = self._loading
                    limit.reschedule(asyncio.get_running_loop().time() + LOADING_QUIET_S)
                    on_bytes(done_bytes, total_bytes)
            case Refuse():
                raise Refused(message.code, f"{self.name}: {message.message}", remedy=message.remedy)
            case _:
                raise ProtocolError(f"{self.name} sent an unexpected {type(message).__name__}")

    def _notify(self, message: Sampled | ChainBroken) -> None:
        listener = self.listeners.get(message.session)
        if listener is not None:  # otherwise the session was closed just now
            listener(self, message)
