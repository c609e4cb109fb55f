"""A cluster on this machine: a seed and other peers as processes of their own, for ``up``, ``chaos`` and ``bench``.

Peers are told to leave by closing their standard input. So they also leave when this process is killed, on every
operating system, and Ctrl+C at the terminal reaches this process alone, which then ends the peers in order.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    JobFailed,
    NetworkError,
    P2PTrainError,
    StorageError,
    UserError,
)
from wire.records import FINISHED_STATES, CheckpointInfo, EventInfo, JobInfo, MetricRow, PeerInfo, ServingInfo
from wire.schema import Record

if TYPE_CHECKING:
    from wire.client import SeedClient

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
LEAVE_S = 3.0  # a worker leaves within two seconds
SEED_READY_S = 20.0
THERE_S = 180.0
"""Until all peers have joined: they import torch first, on few cores one after the other."""
DEATH_KNOWN_S = 2.0  # from the end of a process' connections to the end of the process
AGAIN_S = 0.1
"""Between two tries to reach a seed that is down: what is measured after its return is as exact as that."""
LINE_BYTES = 64 << 20
"""The longest line of a child's output: the texts of a benchmark come in one."""


@dataclass(slots=True)
class Child:
    """A peer process. What it says goes to ``log``, behind ``log_start`` bytes of earlier processes."""

    name: str
    process: Process
    log: Path
    log_start: int

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        listen: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start ``p2ptrain``; ``listen`` keeps its standard output readable. Raises ``StorageError``.

        Args:
            environment: the child's, whole; None for this process' own.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("ab")
            log_start = sink.tell()  # opened for appending: its end
        except OSError as error:
            raise StorageError(f"cannot write {log}: {error.strerror}", remedy="choose another --state") from error
        with sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "p2ptrain", *arguments, "--with-parent"),
                stdin=PIPE,
                stdout=PIPE if listen else DEVNULL,
                stderr=sink,
                start_new_session=True,
                env=environment,
                limit=LINE_BYTES,
            )
        return cls(name, process, log, log_start)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        await self.process.wait()

    def ask_to_leave(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def ended(self, timeout_s: float = LEAVE_S) -> bool:
        """Wait for the end. After ``timeout_s`` kill the process, and return False."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    def failed(self, what: str = "") -> JobFailed:
        """The error that says why it ended: its own last words with their remedy, or the signal that killed it.

        Args:
            what: happened, such as ``"the seed did not start"``; empty: that it ended.
        """
        what = what or f"{self.name} ended"
        reason, remedy = self._last_words()
        code = self.process.returncode
        if code is not None and code < 0 and os.name == "posix":
            reason, remedy = f"it was killed by {signal.Signals(-code).name}", ""
            if -code == signal.SIGKILL:
                remedy = "the machine may have run out of memory"
        text = f"{what}: {reason}" if reason else what
        return JobFailed(text, remedy=f"{remedy}; its log is {self.log}".removeprefix("; "))

    def _last_words(self) -> tuple[str, str]:
        """The last error in its part of the log with its remedy, as ``p2ptrain.cli.main`` writes them; else the last
        line."""
        try:
            with self.log.open("rb") as handle:
                handle.seek(max(self.log_start, self.log.stat().st_size - 4096))
                lines = handle.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return "", ""
        for number in reversed(range(len(lines))):
            if lines[number].startswith("error: "):
                follows = lines[number + 1] if number + 1 < len(lines) else ""
                remedy = follows.removeprefix("  → ") if follows.startswith("  → ") else ""
                return lines[number].removeprefix("error: "), remedy
        return (lines[-1] if lines else ""), ""


async def end_all(children: Sequence[Child]) -> None:
    """Ask all to leave, then wait for all."""
    for child in children:
        child.ask_to_leave()
    await asyncio.gather(*(child.ended() for child in children))


class LocalCluster:
    """A seed and peers whose state is below ``root``. ``end`` ends all of them.

    Attributes:
        peers: the processes besides the seed, by name.
    """

    def __init__(self, root: Path, port: int = 0, *, tls: bool = False) -> None:
        self.root, self.port, self.tls = root, port or free_port(), tls
        self._seed: Child | None = None
        self.peers: dict[str, Child] = {}

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def seed(self) -> Child:
        assert self._seed is not None, "the seed was not started"
        return self._seed

    async def start_seed(self) -> Child:
        """Start a seed without a job; returns when it listens. Raises ``JobFailed``, ``StorageError``."""
        arguments = ["seed", "--no-job", "--json", "--host", LOOPBACK, "--port", str(self.port)]
        arguments += ["--state", str(self.root), *["--tls"] * self.tls]
        seed = self._seed = await Child.start("seed", arguments, self.logs / "seed.log", listen=True)
        assert seed.process.stdout is not None
        try:
            async with asyncio.timeout(SEED_READY_S):
                ready = await seed.process.stdout.readline()
        except TimeoutError:
            ready = b""
        if not ready:
            await end_all([seed])
            raise seed.failed("the seed did not start")
        return seed

    async def start_peer(self, name: str, slot: int, *options: str, target: str = "") -> Child:
        """Start a peer that joins in its own time. Raises ``StorageError``.

        Args:
            slot: of the state directory.
            options: further ones of ``join``.
            target: what it joins; empty: the seed's address.
        """
        arguments = ["join", target or self.address, "--state", str(self.root), "--slot", str(slot), "--name", name]
        child = await Child.start(name, [*arguments, *options], self.logs / f"{name}.log")
        self.peers[name] = child
        return child

    async def connect(self) -> SeedClient:
        """An operator's connection, for its caller to close. Raises ``P2PTrainError``."""
        from p2ptrain.cli.runtime import open_operator

        return (await open_operator((LOOPBACK, self.port), state=self.root))[1]

    async def joined(self, names: Sequence[str]) -> None:
        """Returns when the seed sees these peers. Raises ``JobFailed``: they do not come, or a process ended."""
        there = set[str]()

        def take(item: Record) -> None:
            if isinstance(item, PeerInfo):
                (there.discard if item.state in ("lost", "leaving", "away") else there.add)(item.name)

        await self._told(take, lambda: sorted(set(names) - there), "join")

    async def serving(self, roles: Collection[str]) -> dict[str, ServingInfo]:
        """What is served in these roles, once all are, by role. Raises ``JobFailed``: it does not come to that."""
        there = dict[str, ServingInfo]()

        def take(item: Record) -> None:
            if isinstance(item, ServingInfo):
                there[item.role] = item

        await self._told(take, lambda: [f"the {role}" for role in sorted(set(roles) - there.keys())], "serve")
        return there

    async def _told(self, take: Callable[[Record], None], missing: Callable[[], list[str]], what: str) -> None:
        async def work() -> None:
            client = await self.connect()
            try:
                async with asyncio.timeout(THERE_S):
                    async for records in client.news():
                        for item in records:
                            take(item)
                        if not missing():
                            return
                    raise ConnectionLost("the seed ended")
            except TimeoutError:
                text = f"{' and '.join(missing())} did not {what} within {THERE_S:.0f} s"
                raise JobFailed(text, remedy=f"the logs in {self.logs} say what is waited for") from None
            finally:
                await client.close()

        await self.while_alive(work(), needed=[self.seed, *self.peers.values()])

    async def while_alive(
        self,
        work: Coroutine[Any, Any, T],
        *,
        needed: Sequence[Child],
        others: Sequence[Child] = (),
        least: int = 0,
        on_end: Callable[[Child], None] = lambda child: None,
    ) -> T:
        """The result of ``work``, as long as the processes live that it needs.

        Args:
            needed: the end of each of them ends the work.
            others: ``on_end`` is told of their ends, as long as ``least`` of them live.

        Raises:
            JobFailed: too few live, with the last words of the one that ended.
        """
        task = asyncio.ensure_future(work)
        ends = {asyncio.create_task(child.process.wait()): child for child in [*needed, *others]}
        living = len(others)
        try:
            while True:
                await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if task.done() and isinstance(task.exception(), NetworkError):
                    # A process that dies closes its connections first. That it died, and why, says more.
                    await asyncio.wait(ends, timeout=DEATH_KNOWN_S, return_when=asyncio.FIRST_COMPLETED)
                for end in [end for end in ends if end.done()]:
                    child = ends.pop(end)
                    living -= child in others
                    if child in needed or living < least:
                        raise child.failed()
                    on_end(child)
                if task.done():
                    return task.result()
        finally:
            for end in ends:
                end.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def end(self) -> None:
        """End all: the seed last, so that it hears what the others saved. May be called twice."""
        await end_all(list(self.peers.values()))
        await end_all([self._seed] if self._seed is not None else [])


# ------------------------------------------------------------------------------------------------------- what it tells


@dataclass(frozen=True, slots=True)
class Row:
    """A committed step, as it arrived here. ``at_s`` is monotonic."""

    at_s: float
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The members of a running view, as they arrived here."""

    at_s: float
    generation: int
    members: tuple[str, ...]


class JobObserver:
    """Follows a job across restarts of the seed, and keeps what is told with the time of its arrival.

    Args:
        connect: opens a connection of an operator.

    Attributes:
        rows, views, told: in order of arrival; a row that is told again is not kept again.
        saved: checkpoints by id.
        joined_rtt_ms: the first round trip that was told of each worker's connection: most likely the one that the seed
            measured as it joined, from which its deadlines follow.
    """

    def __init__(self, connect: Callable[[], Awaitable[SeedClient]]) -> None:
        self.job: JobInfo | None = None
        self.rows: list[Row] = []
        self.views: list[Seen] = []
        self.told: list[tuple[float, EventInfo]] = []
        self.saved: dict[str, CheckpointInfo] = {}
        self.names: dict[str, str] = {}
        self.joined_rtt_ms: dict[tuple[str, float], float] = {}
        self._connect = connect
        self._client: SeedClient | None = None
        self._seen_rows: set[tuple[int, int]] = set()
        self._last_event = 0
        self._news = asyncio.Event()

    @property
    def step(self) -> int:
        return self.rows[-1].step if self.rows else 0

    @property
    def generation(self) -> int:
        return self.job.generation if self.job else 0

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.job.members) if self.job and self.job.state == "running" else ()

    @property
    def finished(self) -> bool:
        return self.job is not None and self.job.state in FINISHED_STATES

    def id_of(self, name: str) -> str:
        return next((peer for peer, known in self.names.items() if known == name), "")

    def holders(self, step: int) -> set[str]:
        return {info.peer_name for info in self.saved.values() if info.step == step}

    async def until(self, test: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it became true in time. Looked at whenever something is told."""
        try:
            async with asyncio.timeout(timeout_s):
                while not test():
                    await self._news.wait()
        except TimeoutError:
            return test()
        return True

    def wake(self) -> None:
        """Have all who wait look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A request over the present connection. Raises ``P2PTrainError``, ``DeadlineExceeded`` where there is none."""
        if self._client is None:
            raise DeadlineExceeded("the seed is away")
        return await self._client.request(method, params)

    async def run(self, job: str) -> None:
        while True:
            try:
                client = await self._connect()
            except P2PTrainError:
                await asyncio.sleep(AGAIN_S)
                continue
            self._client = client
            try:
                async for records in client.news():
                    for item in records:
                        self.take(job, item, time.monotonic())
                    self.wake()
            except P2PTrainError:
                await asyncio.sleep(AGAIN_S)
            finally:
                self._client = None
                await client.close()

    def take(self, job: str, item: Record, now: float) -> None:
        match item:
            case JobInfo() if item.id == job:
                self.job = item
                view = self.job.generation, tuple(self.job.members)
                if self.members and (not self.views or (self.views[-1].generation, self.views[-1].members) != view):
                    self.views.append(Seen(now, *view))
            case MetricRow() if item.job == job:
                key = (item.step, item.generation or 0)
                if key not in self._seen_rows:
                    self._seen_rows.add(key)
                    self.rows.append(Row(now, *key))
            case EventInfo():
                if item.id > self._last_event:
                    self._last_event = item.id
                    self.told.append((now, item))
            case PeerInfo():
                self.names[item.id] = item.name
                self.joined_rtt_ms.setdefault((item.id, item.joined_at), item.rtt_ms or 0.0)
            case CheckpointInfo() if item.job == job:
                self.saved.setdefault(item.id, item)  # what came first has the time of its end


def free_port() -> int:
    """A port of the loopback that nobody uses, and that the system gives to no outgoing connection: a peer that is
    started again finds its own one free. Raises ``UserError``."""
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        end = 32_768  # Linux's own default
    first = 10_000 if end > 20_000 else 1024
    for port in random.sample(range(first, max(end, first + 1)), k=min(64, max(end - first, 1))):
        if is_free(port):
            return port
    raise UserError("no free port on this machine", remedy="end what uses them")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
