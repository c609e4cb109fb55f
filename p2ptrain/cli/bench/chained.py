"""Real workers that hold a split model, and a client of theirs, for ``bench chain``.

Everything a token passes on its way is emulated: the workers send over a link with half of the round trip's delay
(``join --link 20ms``), to one another and to the client, and so does the client. Reading is not delayed: each direction
of a connection is so once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.cli.bench.conduct import Progress
from p2ptrain.cli.chaos.cluster import LOOPBACK, free_port
from p2ptrain.cli.children import Child, end_all, start_seed_process, until_it_listens
from p2ptrain.cli.model_sizes import anatomy
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import DeadlineExceeded, JobFailed
from p2ptrain.core.ids import new_id
from p2ptrain.core.serving import Sampling
from p2ptrain.core.world import Network, real_world
from roles.chain.around import Around, Token
from roles.chain.client import Chain
from roles.chain.models import Model, local_model, tensor_table
from roles.chain.plan import Crew, workers_of
from wire.client import SeedClient
from wire.emulate import EmulatedNetwork
from wire.shaper import preset_named
from wire.transport import TcpNetwork

THERE_S = 180.0
"""Until all workers have joined: they import torch first, on few cores one after the other."""
GONE_S = 30.0
LEAVE_S = 5.0
NAME = "bench"
_GONE = ("lost", "leaving", "away")


@dataclass(slots=True)
class Text:
    """What came of one generation.

    Attributes:
        came_s: when each token came, by ``time.perf_counter``; began_s: when the prompt was sent.
    """

    began_s: float
    tokens: list[Token] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def take(self, token: Token) -> None:
        """It came now."""
        self.tokens.append(token)
        self.came_s.append(time.perf_counter())


def link_name(round_trip_ms: float) -> str:
    """As ``join --link`` takes it; empty for the loopback as it is."""
    return f"{round_trip_ms:g}ms" if round_trip_ms else ""


class Cluster:
    """A seed and workers. Made by ``clustered``.

    Attributes:
        workers: by name.
    """

    def __init__(self, root: Path, port: int, *, threads: int, round_trip_ms: float) -> None:
        self._root, self._port, self._threads = root, port, threads
        self._link = link_name(round_trip_ms)
        self._last = 0
        self.workers: dict[str, Child] = {}

    async def add(self, count: int) -> None:
        """Start more workers, side by side; ``there`` waits for them. Raises ``StorageError``."""
        for _ in range(count):
            self._last += 1
            name = f"worker-{self._last}"
            arguments = ["join", f"{LOOPBACK}:{self._port}", "--state", str(self._root), "--slot", str(self._last)]
            arguments += ["--name", name, "--threads", str(self._threads), "--device", "cpu"]
            arguments += ["--link", self._link] * bool(self._link)
            self.workers[name] = await Child.start(name, arguments, self._root / "logs" / f"{name}.log")

    async def there(self) -> None:
        """Returns when the seed sees all that were started, and none that was killed.

        Raises:
            JobFailed: one ended. DeadlineExceeded: they do not come.
        """
        client = await SeedClient.connect(TcpNetwork(), LOOPBACK, self._port, name=NAME)
        seen: dict[str, str] = {}
        try:
            async with asyncio.timeout(THERE_S):
                await client.request("subscribe")
                async for update in client.updates():
                    for item in update.items if update.topic == "peers" else []:
                        if "worker" in item.get("roles", []) and item.get("state") not in _GONE:
                            seen[item["id"]] = item["name"]
                        else:
                            seen.pop(item["id"], None)
                    if dead := next((child for child in self.workers.values() if not child.alive), None):
                        raise dead.failed(f"{dead.name} ended")
                    if set(seen.values()) == set(self.workers):
                        return
        except TimeoutError:
            missing = ", ".join(sorted(set(self.workers) - set(seen.values())))
            raise DeadlineExceeded(
                f"{missing or 'workers'} did not join within {THERE_S:.0f} s",
                remedy=f"their logs are in {self._root / 'logs'}",
            ) from None
        finally:
            await client.close()

    def kill(self, name: str) -> None:
        """As ``kill -9``."""
        self.workers[name].process.kill()

    async def bury(self, name: str) -> None:
        """Forget one that was killed. Raises ``JobFailed``: it lives."""
        child = self.workers.pop(name)
        try:
            async with asyncio.timeout(GONE_S):
                await child.process.wait()
        except TimeoutError:
            self.workers[name] = child
            raise JobFailed(f"{name} was killed, and lives") from None

    @asynccontextmanager
    async def client(self, directory: Path) -> AsyncIterator[Client]:
        """A client with connections of its own. Raises ``P2PTrainError``."""
        network: Network = TcpNetwork()
        if self._link:
            network = EmulatedNetwork(network, preset_named(self._link), seed=0)
        said: list[str] = []
        around = Around(
            world=real_world(network),
            peer_id=new_id(),
            name=NAME,
            seed_host=LOOPBACK,
            state=self._root / NAME,
            notify=lambda level, kind, text: said.append(text),
        )
        seed = await SeedClient.connect(TcpNetwork(), LOOPBACK, self._port, name=NAME)
        try:
            workers = await workers_of(seed.request)
        finally:
            await seed.close()
        crew = await Crew.meet(around, workers)
        try:
            yield Client(crew, await local_model(around, directory), said)
        finally:
            await _within(LEAVE_S, crew.close())


@dataclass(slots=True)
class Client:
    """Who generates. ``said``: what it was told of the chain."""

    crew: Crew
    model: Model
    said: list[str]

    @asynccontextmanager
    async def chain(self, stages: int, positions: int) -> AsyncIterator[Chain]:
        """The model on so many workers; the others are spares. Raises ``P2PTrainError``."""
        found = anatomy(self.model.config, await tensor_table(self.crew.around, self.model))
        plan = await self.crew.plan(
            self.model,
            found.sizes,
            positions=positions,
            activation_bytes=activation_bytes(found.dtype, 1, found.width),
            stages=stages,
        )
        chain = await Chain.load(self.crew, self.model, plan)
        try:
            yield chain
        finally:
            await _within(LEAVE_S, chain.close())


async def _within(seconds: float, farewell: Awaitable[None]) -> None:
    """Give a goodbye its time; the workers notice by themselves when it was not said."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await farewell


async def written(chain: Chain, ids: Sequence[int], tokens: int, sampling: Sampling) -> Text:
    """One text, undisturbed. Raises ``NetworkError``."""
    session = await chain.generate(ids, max_new_tokens=tokens, sampling=sampling)
    async with session:
        text = Text(time.perf_counter())
        async for token in session:
            text.take(token)
    return text


@asynccontextmanager
async def clustered(
    root: Path, workers: int, *, threads: int, round_trip_ms: float, progress: Progress
) -> AsyncIterator[Cluster]:
    """A seed and workers that have joined; all ended with the block. Raises ``P2PTrainError``."""
    port = free_port()
    cluster = Cluster(root, port, threads=threads, round_trip_ms=round_trip_ms)
    seed: list[Child] = []
    try:
        seed.append(await start_seed_process(root, port))
        await until_it_listens(seed[0])
        progress(f"{round_trip_ms:g} ms: {workers} workers start")
        await cluster.add(workers)
        await cluster.there()
        yield cluster
    finally:
        await end_all(list(cluster.workers.values()))
        await end_all(seed)
