"""What readers of the stream are sent, of a seed that says what a test lets it say."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from p2ptrain.core.errors import ConnectionLost
from roles.http import server
from roles.http.server import serving
from roles.seed import events
from roles.web import app
from roles.web.app import WebApp, follow
from tests.roles.web.demo import FeedSeed
from wire.records import EventInfo, JobInfo, MetricRow, PeerInfo, RecoveryInfo

from .conftest import create

JOB = "job1"
UPGRADE = (
    "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
RUNNING = JobInfo(JOB, "mine", "tiny", "sync", "running", 1.0, 100)
DEADLINE_S = 20.0


class Seed(FeedSeed):
    """A seed, and the requests to it, as far as the stream uses them. ``rows``: the metrics on record."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, MetricRow] = {}
        self.put("jobs", RUNNING.to_map())

    def commit(self, *steps: int, generation: int = 0) -> None:
        """Record these steps, and tell of them."""
        for step in steps:
            self.rows[step] = MetricRow(JOB, step, 0.0, generation=generation)
            self.announcements.add(self.rows[step])

    def tell_peer(self, name: str, step: int = 0) -> None:
        self.put("peers", PeerInfo(name, name, ["worker"], "", "training", "", 0.0, step=step).to_map())

    def forget(self, job: str) -> None:
        del self.records["jobs"][job]
        self.announcements.touch("jobs", job)

    async def job(self, job: str) -> tuple[JobInfo, str]:
        return RUNNING, ""

    async def metrics(self, job: str, after: int, limit: int) -> list[MetricRow]:
        return [self.rows[step] for step in sorted(self.rows) if step > after][:limit]

    async def recoveries(self, job: str, limit: int) -> list[RecoveryInfo]:
        return []

    async def events(self, after: int, limit: int) -> list[EventInfo]:
        return [EventInfo(1, 0.0, "info", "seed-started", "here")] if after < 1 else []


class Reader:
    """A reader of the stream. While ``reading`` is not set it takes nothing."""

    def __init__(self, seed: Any, after_step: int = -1) -> None:
        self.messages: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self._news = asyncio.Event()
        self.task = asyncio.create_task(follow(seed, seed, RUNNING, after_step, self._send))

    async def _send(self, text: str) -> None:
        await self.reading.wait()
        self.messages.append(json.loads(text))
        self._news.set()

    def of(self, topic: str) -> list[dict[str, Any]]:
        return [item for message in self.messages if message["topic"] == topic for item in message["items"]]

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.of("metrics")]

    async def until(self, fits: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not fits():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def following(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Seed, Callable[..., Reader]]]:
    monkeypatch.setattr(events, "INTERVAL_S", 0.0)
    monkeypatch.setattr(app, "PAGE_ROWS", 7)
    seed, readers = Seed(), list[Reader]()

    def reader(after_step: int = -1) -> Reader:
        readers.append(Reader(seed, after_step))
        return readers[-1]

    try:
        yield seed, reader
    finally:
        for task in (each.task for each in readers):
            task.cancel()
            await asyncio.wait({task})


async def test_the_snapshot_then_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(monkeypatch) as (seed, reader):
        seed.commit(1, 2, 3)
        first = reader()
        await first.until(lambda: bool(first.messages) and first.messages[-1]["topic"] == "ready")
        assert [message["topic"] for message in first.messages] == ["jobs", "metrics", "events", "ready"]
        assert (first.steps, first.of("ready")) == ([1, 2, 3], [])
        del first.messages[:]
        seed.announcements.add(MetricRow("another", 9, 0.0))
        for name in ("a", "b"):
            seed.tell_peer(name)
            await first.until(lambda name=name: [peer["id"] for peer in first.of("peers")][-1:] == [name])
        seed.forget(JOB)
        await first.until(lambda: first.of("jobs-gone") != [])
        said = [(message["topic"], [item["id"] for item in message["items"]]) for message in first.messages]
        assert said == [("peers", ["a"]), ("peers", ["b"]), ("jobs-gone", [JOB])]


@pytest.mark.parametrize("recorded", [0, 5, 30])
@pytest.mark.parametrize("after", [-1, 0, 3, 12, 33])
async def test_no_step_is_left_out_or_repeated(monkeypatch: pytest.MonkeyPatch, recorded: int, after: int) -> None:
    """Steps are on record before a reader comes, and are told of while it reads the record."""
    async with following(monkeypatch) as (seed, reader):
        seed.rows |= {step: MetricRow(JOB, step, 0.0) for step in range(1, recorded + 1)}
        one = reader(after)
        for step in range(recorded + 1, 41):
            seed.commit(step)
            if step % 5 == 0:
                await asyncio.sleep(0)
        await one.until(lambda: one.steps[-1:] == [40])
        assert one.steps == list(range(max(after, 0) + 1, 41))


async def test_a_slow_reader_gets_the_newest_state_and_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(monkeypatch) as (seed, reader):
        slow, fast = reader(), reader()
        await asyncio.gather(*(each.until(lambda each=each: each.of("jobs") != []) for each in (slow, fast)))
        slow.reading.clear()
        for step in range(1, 61):
            seed.tell_peer("p", step)
            seed.commit(step)
            await fast.until(lambda step=step: fast.steps[-1:] == [step])
        assert len(fast.of("peers")) > 30
        assert slow.steps == []
        slow.reading.set()
        await slow.until(lambda: slow.steps[-1:] == [60] and slow.of("peers")[-1]["step"] == 60)
        assert slow.steps == fast.steps == list(range(1, 61))
        assert len(slow.of("peers")) <= 2  # the one that it was being sent, and the newest


async def test_a_job_that_goes_back_repeats_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(monkeypatch) as (seed, reader):
        seed.commit(*range(1, 9), generation=1)
        one = reader()
        await one.until(lambda: one.steps[-1:] == [8])
        seed.commit(5, 6, generation=2)
        await one.until(lambda: one.steps[-1:] == [6])
        assert one.steps == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6]


async def test_a_reader_is_told_when_the_seed_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(monkeypatch) as (seed, reader):
        one = reader()
        await one.until(lambda: one.of("jobs") != [])
        seed.announcements.end(ConnectionLost("the seed is stopping"))
        await asyncio.wait({one.task}, timeout=DEADLINE_S)
        assert "seed" in str(one.task.exception())


async def test_a_reader_that_never_reads_is_cut_off_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.1)
    async with following(monkeypatch) as (seed, _):
        requests = cast(Any, seed)
        app = WebApp(requests, requests, create)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            port, path = listening.getsockname()[1], f"/api/v1/metrics/stream/{JOB}"
            async with (
                asyncio.timeout(DEADLINE_S),
                serving(app, listening, websockets=True),
                connect(f"ws://127.0.0.1:{port}{path}", subprotocols=[Subprotocol("p2ptrain.v1")]) as other,
            ):
                deaf = socket.socket()
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                deaf.connect(("127.0.0.1", port))
                deaf.sendall(UPGRADE.format(path).encode())
                steps, told = list[int](), 0
                while len(seed.announcements._subscriptions) == 2 or told < 1000:  # two of them from the first steps on
                    seed.commit(*range(told + 1, told + 51))
                    told += 50
                    while steps[-1:] != [told]:
                        said = json.loads(await other.recv())
                        steps += [row["step"] for row in said["items"] if said["topic"] == "metrics"]
                assert steps == list(range(1, told + 1))
                deaf.settimeout(DEADLINE_S)
                assert await asyncio.to_thread(_received, deaf) < 1 << 20
                app.stop()
                with pytest.raises(ConnectionClosed) as ended:
                    _ = [text async for text in other]
                assert ended.value.rcvd is not None
                assert (ended.value.rcvd.code, "shutting down" in ended.value.rcvd.reason) == (1013, True)


def _received(deaf: socket.socket) -> int:
    """Bytes until the other side closes."""
    received = 0
    with deaf, suppress(ConnectionResetError):
        while data := deaf.recv(1 << 16):
            received += len(data)
    return received
