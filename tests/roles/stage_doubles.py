"""Stages without a seed, and a client that says what it is told to say, for tests. Virtual time will do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, Network, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.compute_thread import ComputeThread
from roles.line import Line
from roles.model_directory import DigestCache, ModelDirectory, open_model
from roles.worker.context import PeerContext
from roles.worker.links import Prober, ProbeResponder
from roles.worker.model_loading import give
from roles.worker.stage_links import send_forward
from roles.worker.stage_requests import OpenRequest
from roles.worker.stage_session import StageSession
from roles.worker.stages import Stages
from tests.invariants import check_invariants
from tests.roles.stage_stand_in import WIDTH, StandIns
from wire.chain_messages import ChainBroken, ForwardRequest, PartLoading, PartsHeld, Sampled, SampledBatch
from wire.client import PendingCalls
from wire.connection import Connection
from wire.handshake import PeerServer, dial, local_hello, local_welcome, serve
from wire.messages import Hello, Refuse, Response, Welcome
from wire.schema import instance_untrusted

PORT = 4000


@dataclass
class Stage:
    """One worker, as far as split models go. It goes by its host's name and listens on ``PORT``.

    Attributes:
        host, port: where it listens instead; port 0: any free one.
    """

    name: str
    network: Network
    directory: Path
    stand_ins: Any = field(default_factory=StandIns)
    threads: Any = field(default_factory=LoopThreads)
    told: list[PartsHeld] = field(default_factory=list)
    problems: list[P2PTrainError] = field(default_factory=list)
    sink: ProbeResponder = field(default_factory=ProbeResponder)
    host: str = "0.0.0.0"
    port: int | None = None

    async def start(self) -> None:
        world = World(LoopClock(), self.network, RealDisk(), random.Random(1), self.threads)
        context = PeerContext(
            world=world,
            peer_id=self.name,
            name=self.name,
            seed_at=lambda: "seed",
            compute=ComputeThread(self.threads),
            send=lambda message: self.told.append(message) if isinstance(message, PartsHeld) else None,
        )
        self.stages = Stages(context, self.stand_ins.holding, Prober(context), self.directory, shown="stand-in")
        self._run = asyncio.create_task(self.stages.run(), name=self.name)
        self.server: PeerServer = await serve(
            self.network,
            self.host,
            PORT if self.port is None else self.port,
            decide=self._decide,
            serve=self._serve,
            on_problem=lambda problem, _: self.problems.append(problem),
        )

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        return self.stages.decide(hello) or local_welcome(peer_id=self.name, name=self.name, wall=0.0)

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        if hello.purpose == "probe":
            await self.sink.serve(connection, hello)
        else:
            await self.stages.serve(connection, hello)

    async def stop(self) -> None:
        self._run.cancel()
        result = await asyncio.gather(self._run, return_exceptions=True)
        await self.server.close()
        check_invariants(self.stages.cache)
        unexpected = [item for item in result if not isinstance(item, asyncio.CancelledError)]
        assert not unexpected, unexpected

    @property
    def sessions(self) -> int:
        """Open in its engines."""
        return sum(len(engine.sessions) for engine in self.stand_ins.engines)


class TestClient:
    """A client's connection to one worker. Answers to works are kept in the order in which they came.

    Attributes:
        heard: ``Sampled`` and ``ChainBroken``.
        progress: ``PartLoading``.
    """

    __test__ = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.heard: asyncio.Queue[Sampled | ChainBroken] = asyncio.Queue()
        self.progress: list[PartLoading] = []
        self.sent_bytes = 0
        self._calls = PendingCalls()

    async def ask(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        return await self._calls.ask(self.connection.send, method, params or {}, whom="it", timeout_s=timeout_s)

    def give(self, work: ForwardRequest, payload: bytes) -> None:
        self.give_all([(work, payload)])

    def give_all(self, batch: Sequence[tuple[ForwardRequest, bytes]]) -> None:
        """Give these together."""
        send_forward(self.connection, [(work, memoryview(payload)) for work, payload in batch])

    async def next(self, timeout_s: float = 60.0) -> Sampled | ChainBroken:
        async with asyncio.timeout(timeout_s):
            return await self.heard.get()

    async def listen(self, line: Line) -> None:
        async with line.keep_alive():
            async for message in line.messages():
                if isinstance(message, Response):
                    self._calls.resolve(message)
                elif isinstance(message, PartLoading):
                    self.progress.append(message)
                elif isinstance(message, SampledBatch):
                    for result in message.results:
                        self.heard.put_nowait(result)
                else:
                    assert isinstance(message, ChainBroken), message
                    self.heard.put_nowait(message)
        self._calls.fail_all("it")


@asynccontextmanager
async def client_of(
    network: Network, host: str, port: int = PORT, *, peer_id: str = "client", silence_s: float = 2.0
) -> AsyncIterator[TestClient]:
    """Dial a worker as a client."""
    hello = local_hello(peer_id=peer_id, name=peer_id, roles=[], purpose="chain")
    connection, _ = await dial(network, host, port, hello, timeout_s=5)
    client = TestClient(connection)
    listening = asyncio.create_task(_listening(client, silence_s), name="client")
    try:
        yield client
    finally:
        connection.abort()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _listening(client: TestClient, silence_s: float) -> None:
    try:
        await client.listen(Line(client.connection, silence_s))
    except P2PTrainError as problem:
        client._calls.fail_all(problem.message)


def model_at(directory: Path, cache: Path) -> ModelDirectory:
    return open_model(directory, DigestCache(RealDisk(), cache / "digests.json"))


@asynccontextmanager
async def giving(
    network: Network, host: str, model: ModelDirectory, port: int = PORT, *, peer_id: str = "client"
) -> AsyncIterator[Connection]:
    """Give ``model`` to a worker inside, as its client."""
    hello = local_hello(peer_id=peer_id, name=peer_id, roles=[], purpose="give", job=model.model)
    connection, _ = await dial(network, host, port, hello, timeout_s=5)
    task = asyncio.create_task(give(connection, model, LoopThreads().start("files")))
    try:
        yield connection
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()


def load_params(model: ModelDirectory, start: int, stop: int, layers: int, **changes: Any) -> dict[str, Any]:
    """The parameters of ``part.load`` for a client that gives."""
    return {
        "model": model.model,
        "name": "stand-in",
        "config": model.config,
        "start": start,
        "stop": stop,
        "layers": layers,
        "dtype": "fp32",
        "weights": "",
        "positions": 512,
        "path": "",
        "sender": None,
    } | changes


def open_params(
    session: str, part: str, index: int, stages: int, next_host: str = "", **changes: Any
) -> dict[str, Any]:
    """The parameters of ``session.open``."""
    following = {"peer": next_host, "host": next_host, "port": PORT} if next_host else None
    return {
        "session": session,
        "part": part,
        "index": index,
        "stages": stages,
        "positions": 64,
        "epoch": 0,
        "next": following,
        "encoding": "fp32",
        "prefill_encoding": "int8",
        "sampling": {"temperature": 0.0},
        "silence_s": 2.0,
        "priority": 0,
        "order": 0.0,
        "block_hashes": "",
    } | changes


def session_of(session: str, index: int, *, client: str = "", **changes: Any) -> StageSession:
    """One of three stages' session, of nobody and on no engine."""
    asked = open_params(session, "p1", index, 3, "w1" if index < 2 else "", **changes)
    return StageSession(instance_untrusted(OpenRequest, asked, lenient=True), WIDTH, client)


def ids_work(session: str, ids: Sequence[int], *, keep: int, last: int, **changes: Any) -> tuple[ForwardRequest, bytes]:
    """A work for the first stage, whose last position's token is picked, and its payload. Several are a prompt's."""
    values: dict[str, Any] = {"epoch": 0, "number": 0, "encoding": "ids", "samples": 1, "sample_index": 0} | changes
    values = {"prefill": len(ids) > 1} | values
    work = ForwardRequest(session=session, keep=keep, count=len(ids), last=last, **values)
    return work, np.array(ids, "<i4").tobytes()


@dataclass
class Generation:
    """A session as its client sees it: which work comes next, and what came of it."""

    session: str
    ids: list[int]
    last: int
    keep: int = 0
    epoch: int = 0
    made: list[int] = field(default_factory=list)

    def work(self) -> tuple[ForwardRequest, bytes]:
        sample_index = len(self.made)
        return ids_work(
            self.session,
            self.ids,
            keep=self.keep,
            last=self.last,
            number=sample_index,
            sample_index=sample_index,
            epoch=self.epoch,
        )

    def take(self, picked: Sampled | ChainBroken) -> None:
        assert isinstance(picked, Sampled), picked
        assert (picked.session, picked.number, picked.epoch) == (self.session, len(self.made), self.epoch)
        assert len(picked.spent_us) == self.last + 1
        self.keep += len(self.ids)
        self.ids = np.frombuffer(picked.tokens, "<i4").tolist()
        self.made += self.ids


@dataclass
class TestChain:
    """Stages and a client's connection to each, the first stage's first."""

    __test__ = False

    stages: list[Stage]
    clients: list[TestClient]
    parts: list[str]
    model: ModelDirectory

    async def open(self, session: str, **changes: Any) -> None:
        """Open a session on all of them, the last one first."""
        count = len(self.stages)
        for index in reversed(range(count)):
            following = self.stages[index + 1].name if index + 1 < count else ""
            params = open_params(session, self.parts[index], index, count, following, **changes)
            await self.clients[index].ask("session.open", params)

    async def generate(self, session: str, prompt: Sequence[int], tokens: int, *, keep: int = 0) -> list[int]:
        """Tokens, one after the other; nothing else may be under way."""
        generation = Generation(session, list(prompt), len(self.stages) - 1, keep=keep)
        while len(generation.made) < tokens:
            self.clients[0].give(*generation.work())
            generation.take(await self.answer())
        return generation.made

    async def answer(self, timeout_s: float = 20.0) -> Sampled | ChainBroken:
        """The next that any stage has to say."""
        waiting = [asyncio.create_task(client.heard.get()) for client in self.clients]
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            assert done, "no stage says anything"
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()


@asynccontextmanager
async def chain_of(
    network: Any,
    directory: Path,
    model: ModelDirectory,
    cuts: Sequence[int],
    *,
    layers: int = 0,
    client: str = "client",
    stand_ins: Callable[[], Any] = StandIns,
    threads: Callable[[], Any] = LoopThreads,
) -> AsyncIterator[TestChain]:
    """As many stages as ``cuts`` say, with their parts loaded from the client, and the client's connections.

    Args:
        layers: of the model; 0 where the last stage ends it.
    """
    stages = [
        Stage(f"w{index}", network.at(f"w{index}"), directory / f"w{index}", stand_ins(), threads())
        for index in range(len(cuts) - 1)
    ]
    chain = TestChain(stages, [], [], model)
    entered: list[Any] = []
    try:
        for index, stage in enumerate(stages):
            await stage.start()
            context = client_of(network.at(client), stage.name)
            chain.clients.append(await context.__aenter__())
            entered.append(context)
            async with giving(network.at(client), stage.name, model):
                loaded = await chain.clients[-1].ask(
                    "part.load", load_params(model, cuts[index], cuts[index + 1], layers or cuts[-1])
                )
            chain.parts.append(loaded["part"])
        yield chain
    finally:
        for context in entered:
            await context.__aexit__(None, None, None)
        for stage in stages:
            await stage.stop()


async def lost(connection: Connection) -> None:
    """Wait until the worker closed the connection, and told its problem."""
    async with asyncio.timeout(60):
        await connection.closed.wait()
    await asyncio.sleep(0.1)  # virtual


async def as_stage(network: MemoryNetwork, session: str, index: int, *, host: str = "w1") -> Connection:
    """A connection to ``host`` as that of the stage before it."""
    hello = local_hello(peer_id="w9", name="w9", roles=["worker"], purpose="stage", job=session, generation=index)
    return (await dial(network.at("w9"), host, PORT, hello, timeout_s=5))[0]
