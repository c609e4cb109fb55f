"""A seed that answers with what it was told, on a real port, in a thread of its own; and a way to run one command."""

from __future__ import annotations

import asyncio
import io
import json
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.main import main
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, Refused
from p2ptrain.lab.explain.measuring import StrategyTimings, short
from wire.connection import Connection
from wire.handshake import dial, local_hello, local_welcome, serve
from wire.messages import Hello, Leave, Message, Refuse, Request, Response, Welcome
from wire.records import LinkInfo, PeerInfo
from wire.transport import TcpNetwork

DEADLINE_S = 10.0


@dataclass
class FakeSeed:
    """Answers requests with ``answers[method]`` (a map, or an error to answer with) and keeps what it was asked."""

    answers: dict[str, dict[str, Any] | Refused] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    joined: list[Hello] = field(default_factory=list)
    left: queue.Queue[Leave] = field(default_factory=queue.Queue)
    problems: list[P2PTrainError] = field(default_factory=list)
    refuse_peers: Refuse | None = None
    wall_offset_s: float = 0.0
    address: str = ""

    async def run(self, ready: Callable[[asyncio.Event], None]) -> None:
        server = await serve(
            TcpNetwork(),
            "127.0.0.1",
            0,
            decide=self._decide,
            serve=self._serve,
            on_problem=lambda error, _: self.problems.append(error),
        )
        stop = asyncio.Event()
        self.address = "{}:{}".format(*server.address)
        ready(stop)
        await stop.wait()
        await server.close()

    async def _decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if hello.purpose == "peer":
            self.joined.append(hello)
            if self.refuse_peers is not None:
                return self.refuse_peers
        if hello.purpose == "probe" and hello.port:
            if self.refuse_peers is not None:
                return self.refuse_peers
            back = local_hello(peer_id="5eed", name="fake", roles=["seed"], purpose="probe")
            host = connection.ends.remote[0]
            await (await dial(TcpNetwork(), host, hello.port, back, timeout_s=DEADLINE_S))[0].close()
        return local_welcome(peer_id="5eed", name="fake", cluster_id="c1", wall=time.time())

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        while True:
            try:
                message: Message = (await connection.receive(timeout_s=DEADLINE_S)).message
            except ConnectionLost:
                return
            if isinstance(message, Leave):
                self.left.put(message)
            if isinstance(message, Request):
                self.asked.append((message.method, message.params))
                connection.send(await self._answer(connection, message))

    async def _answer(self, connection: Connection, request: Request) -> Response:
        answer = self.answers.get(request.method)
        try:
            if answer is None and request.method == "probe.clock":
                answer = {"wall": time.time() + self.wall_offset_s}
        except Refused as error:
            answer = error
        if isinstance(answer, Refused):
            return Response(request.id, {}, answer.code, answer.message, answer.remedy)
        if answer is not None and "after_generation" in request.params:
            after = request.params["after_generation"]
            answer = {"views": [view for view in answer["views"] if view["generation"] > after]}
        if answer is None:
            return Response(request.id, {}, "unknown-method", f"no answer for {request.method}")
        return Response(request.id, answer)


@pytest.fixture
def fake_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSeed]:
    """A running ``FakeSeed``; commands find it through ``P2PTRAIN_SEED``."""
    seed = FakeSeed()
    ready = threading.Event()
    handle: dict[str, Any] = {}

    def is_ready(stop: asyncio.Event) -> None:
        handle.update(loop=asyncio.get_running_loop(), stop=stop)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(seed.run(is_ready)), name="fake-seed")
    thread.start()
    assert ready.wait(DEADLINE_S)
    monkeypatch.setenv("P2PTRAIN_SEED", seed.address)
    yield seed
    handle["loop"].call_soon_threadsafe(handle["stop"].set)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@dataclass(frozen=True)
class Outcome:
    """What one command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON document, and nothing else."""
        return json.loads(self.out)


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run ``p2ptrain ARGUMENTS`` in this process, through the real entry point.

    A command's event loop leaves its signal handlers behind, for a process ends with its command: they are put back.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str, typed: str | None = None) -> Outcome:
        capsys.readouterr()
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", _Terminal(typed))
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        assert isinstance(left.value.code, int)
        return Outcome(left.value.code, *capsys.readouterr())

    return run


class _Terminal(io.StringIO):
    """Standard input with a person before it."""

    def isatty(self) -> bool:
        return True


PASS_MS, SHARDED_MS = 50.0, 1000.0
"""What ``measured_at_once`` tells: a micro-batch, and a step of ``sharded``, with 2 micro-batches for each worker."""


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained for a prediction."""

    async def measure(profile: Profile, workers: int, strategies: Sequence[str], *, quiet: bool) -> StrategyTimings:
        sync = {"step_ms": 2 * PASS_MS + 6, "compute_ms": 2 * PASS_MS, "memory_bytes": 500.0 * 2**20}
        jobs = {"sync": (short(profile, "sync", workers), sync)}
        if workers > 1 and "sharded" in strategies:
            jobs["sharded"] = short(profile, "sharded", workers), {"step_ms": SHARDED_MS}
        there = [PeerInfo(f"p{n}", "", ["worker"], "cpu", "idle", "", 0.0, flops=5 * 10**10) for n in range(workers)]
        return StrategyTimings(there, [LinkInfo("p0", "p1", 1e-4, 1e10)], jobs)

    monkeypatch.setattr("p2ptrain.lab.explain.predictions.measure", measure)


@pytest.fixture
def free_port() -> int:
    """A port of the loopback on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
