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
from dataclasses import dataclass
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.main import main
from p2ptrain.core.errors import Refused
from p2ptrain.lab.explain.predictions import StrategyTimings, shorten_job
from tests.fake_seed import FakeSeed
from wire.connection import Connection
from wire.handshake import dial, local_hello, local_welcome
from wire.messages import Hello, Leave, Message, Refuse, Request, Welcome
from wire.records import LinkInfo, PeerInfo
from wire.transport import TcpNetwork

DEADLINE_S = 10.0


class JoinedSeed(FakeSeed):
    """A fake seed on a real port that peers can join, too."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[Hello] = []
        self.left: queue.Queue[Leave] = queue.Queue()
        self.refuse_peers: Refuse | None = None
        self.unreached = ""  # what it tells a peer that it dials back
        self.wall_offset_s = 0.0
        self.address = ""

    async def run(self, ready: Callable[[asyncio.Event], None]) -> None:
        stop = asyncio.Event()
        self.address = "{}:{}".format(*await self.start(TcpNetwork(), "127.0.0.1", 0))
        ready(stop)
        await stop.wait()
        await self.stop()

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if hello.purpose == "peer":
            self.joined.append(hello)
        if (hello.purpose == "peer" or hello.port) and self.refuse_peers is not None:
            return self.refuse_peers
        if hello.purpose == "probe" and hello.port:
            back = local_hello(peer_id="5eed", name="fake", roles=["seed"], purpose="probe")
            host = connection.ends.remote[0]
            await (await dial(TcpNetwork(), host, hello.port, back, timeout_s=DEADLINE_S))[0].close()
        more = {"cluster_id": "c1", "wall": time.time(), "unreached": self.unreached if hello.port else ""}
        return local_welcome(peer_id="5eed", name="fake", **more)

    def take(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Leave):
            self.left.put(message)

    def answer_for(self, request: Request) -> dict[str, Any] | Refused:
        if request.method == "probe.clock":
            return {"wall": time.time() + self.wall_offset_s}
        return super().answer_for(request)

    def answer(self, request: Request) -> dict[str, Any] | Refused:
        answer = super().answer(request)
        if not isinstance(answer, Refused) and "after_generation" in request.params:
            after = request.params["after_generation"]
            return {"views": [view for view in answer["views"] if view["generation"] > after]}
        return answer


@pytest.fixture
def fake_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinedSeed]:
    """A running ``JoinedSeed``; commands find it through ``P2PTRAIN_SEED``."""
    seed = JoinedSeed()
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

    def run(*arguments: str, typed: str | None = None, stdin: io.TextIOBase | None = None) -> Outcome:
        capsys.readouterr()
        if typed is not None:
            stdin = Typed(typed)
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        assert isinstance(left.value.code, int)
        return Outcome(left.value.code, *capsys.readouterr())

    return run


CTRL_C = "\x03"


class Typed(io.StringIO):
    """Standard input with a person before it, who presses Ctrl+C where a line is ``CTRL_C``.

    Args:
        then: called before each line, with the number of lines so far.
    """

    def __init__(self, text: str, then: Callable[[int], None] = lambda lines: None) -> None:
        super().__init__(text)
        self._then, self._lines = then, 0

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        self._then(self._lines)
        self._lines += 1
        if (line := super().readline()) == CTRL_C + "\n":
            raise KeyboardInterrupt
        return line


PASS_MS, SHARDED_MS = 50.0, 1000.0
"""What ``measured_at_once`` tells: a micro-batch, and a step of ``sharded``, with 2 micro-batches for each worker."""


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained for a prediction."""

    async def measure(profile: Profile, workers: int, strategies: Sequence[str], *, quiet: bool) -> StrategyTimings:
        sync = {"step_ms": 2 * PASS_MS + 6, "compute_ms": 2 * PASS_MS, "memory_bytes": 500.0 * 2**20}
        jobs = {"sync": (shorten_job(profile, "sync", workers), sync)}
        if workers > 1 and "sharded" in strategies:
            jobs["sharded"] = shorten_job(profile, "sharded", workers), {"step_ms": SHARDED_MS}
        there = [PeerInfo(f"p{n}", "", ["worker"], "cpu", "idle", "", 0.0, flops=5 * 10**10) for n in range(workers)]
        return StrategyTimings(there, [LinkInfo("p0", "p1", 1e-4, 1e10)], jobs)

    monkeypatch.setattr("p2ptrain.lab.explain.predictions.measure", measure)


@pytest.fixture
def give_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on this machine has so many MiB for parts of models."""

    def give(mebibytes: int) -> None:
        for place in ("p2ptrain.cluster.local_cluster", "p2ptrain.cli.up"):
            monkeypatch.setattr(f"{place}.part_bytes", lambda device: mebibytes << 20)

    return give


@pytest.fixture
def free_port() -> int:
    """A port of the loopback on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
