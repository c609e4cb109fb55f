"""A cluster on this machine, for ``up``, ``chaos``, ``bench`` and programs: a seed and other peers, each a process.

A peer leaves when its standard input is closed. So peers also leave if this process is killed, on every operating
system. Ctrl+C at the terminal reaches only this process, which then ends the peers in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from p2ptrain.cluster.access import operator
from p2ptrain.cluster.client import AsyncClient, Client
from p2ptrain.cluster.loops import ServiceThread
from p2ptrain.cluster.running import announce_seed
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConnectionLost, JobFailed, NetworkError, StorageError, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.text_files import STDLIB, STDLIB_PARTS, find_files
from wire.address import DEFAULT_PORT, format_address
from wire.records import ABSENT_STATES, PeerInfo, ServingInfo
from wire.transport import TcpNetwork

if TYPE_CHECKING:
    from configs.schema import Profile
    from wire.client import SeedClient

T = TypeVar("T")
R = TypeVar("R", PeerInfo, ServingInfo)

LOOPBACK = "127.0.0.1"
LEAVE_S = 3.0  # a worker leaves within two seconds
READY_S = 180.0
"""Time limit for the seed to listen, and for all peers to join or serve: imports are slow if many share few cores."""
EXIT_AFTER_CLOSE_S = 2.0  # a dying process ends at most so long after its connections
LINE_BYTES = 64 << 20
"""The longest line of a child's output. A benchmark sends all its texts in one line."""


@dataclass(slots=True)
class PeerProcess:
    """A peer process. Its messages are appended to ``log``, after ``log_start`` bytes of earlier processes.

    ``was_killed``: by this command.
    """

    name: str
    process: Process
    log: Path
    log_start: int
    was_killed: bool = False

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        listen: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> PeerProcess:
        """Start ``p2ptrain``; ``listen`` captures its standard output. Raises ``StorageError``.

        ``arguments``: ``--with-parent`` among them has it leave with this process. ``environment``: the child's whole
        environment; None: that of this process.
        """
        try:
            RealDisk().make_dir(log.parent)
            sink = log.open("ab")
            log_start = sink.tell()  # the end of the file
        except OSError as error:
            raise StorageError(f"cannot write {log}: {error.strerror}", remedy="choose another --state") from error
        with sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "p2ptrain", *arguments),
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
        self.was_killed = True
        with suppress(ProcessLookupError):  # it has just ended
            self.process.kill()
        await self.process.wait()

    def ask_to_leave(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def wait_or_kill(self, timeout_s: float = LEAVE_S) -> None:
        """Wait for the end; after ``timeout_s`` kill the process."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            await self.kill()

    def failure(self, what: str = "") -> JobFailed:
        """The error that explains the end: the process's last error with its remedy and exit code, or the signal that
        killed it.

        ``what`` is what happened, such as ``"the seed did not start"``; empty: the process ended.
        """
        what = what or f"{self.name} ended"
        reason, remedy = self._last_words()
        code = self.process.returncode
        if code is not None and code < 0 and os.name == "posix":
            reason, remedy = f"it was killed by {signal.Signals(-code).name}", ""
            if -code == signal.SIGKILL:
                remedy = "the machine may have run out of memory"
        text = f"{what}: {reason}" if reason else what
        error = JobFailed(text, remedy=f"{remedy}; its log is {self.log}".removeprefix("; "))
        if code is not None and code > 1 and reason:
            error.exit_code = code
        return error

    def _last_words(self) -> tuple[str, str]:
        """The last error in its part of the log with its remedy, as written by ``p2ptrain.cli.main``; else the last
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


async def end_all(children: Sequence[PeerProcess]) -> None:
    for child in children:
        child.ask_to_leave()
    await asyncio.gather(*(child.wait_or_kill() for child in children))


class LocalCluster:
    """A seed and peers with their state below ``root``.

    A command starts and ends them one by one. A program uses ``with`` or ``async with``: within the block the seed and
    ``workers`` run, and ``client`` or ``async_client`` is connected. The end of the block ends them in order, also
    after Ctrl+C.

    Args:
        root: directory; None: a new one in ``p2ptrain-runs``.
        workers: of the block. model: directory of a checkpoint that a verifier serves in the block; empty: none.
        port: of the seed; 0: a free one, or, with ``announce``, the usual one if it is free when the seed starts.
        web: where the seed answers HTTP, as ``up --web`` says; None: nowhere.
        announce: let commands of this user find the seed.

    Attributes:
        peers: the processes besides the seed, by name; of each name the newest one.
        started: all processes so far.
        url: of the seed's page, once it is started.
        client, async_client: of the block of ``with``, or of ``async with``.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        port: int = 0,
        *,
        workers: int = 2,
        model: str | Path = "",
        tls: bool = False,
        web: tuple[str, int] | None = None,
        announce: bool = False,
    ) -> None:
        self.root = new_run_directory("cluster") if root is None else Path(root).absolute()
        self.tls, self.web, self.url = tls, web, ""
        self.port = port or (0 if announce else free_port())
        self._announcement = ExitStack() if announce else None
        self._seed: PeerProcess | None = None
        self.peers: dict[str, PeerProcess] = {}
        self.started: list[PeerProcess] = []
        self._workers, self._model = workers, model and str(Path(model).absolute())
        self._block, self._async_block = ExitStack(), AsyncExitStack()

    def __enter__(self) -> Self:
        thread = ServiceThread("local cluster", children=True)
        with ExitStack() as stack:
            stack.callback(thread.close)
            stack.callback(lambda: thread.call(self.end()))
            thread.call(self.start())
            self.client = stack.enter_context(Client(self.address, state=self.root))
            self._block = stack.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._block.close()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.end)
            await self.start()
            self.async_client = await stack.enter_async_context(AsyncClient(self.address, state=self.root))
            self._async_block = stack.pop_all()
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self._async_block.aclose()

    async def start(self) -> None:
        """Start the seed, the workers and the verifier of the block, and wait until all are ready. Raises
        ``P2PTrainError``."""
        await self.start_seed()
        if self._workers:
            await self.start_workers(self._workers)
        if self._model:
            await self.start_peer("verifier", 1, "--role", "verifier", "--model", self._model)
            await self.wait_until_serving({"verifier"})
        await self.wait_until_joined(set(self.peers))

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def seed_option(self) -> str:
        """The option by which another command finds its seed; empty if the command needs none."""
        return f" --seed {self.address}" * (self.port != DEFAULT_PORT)

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def start_notice(self, count: int) -> str:
        return f"{count} worker{'s start' if count > 1 else ' starts'}; logs are in {self.logs}"

    @property
    def seed(self) -> PeerProcess:
        assert self._seed is not None, "the seed was not started"
        return self._seed

    async def start_seed(self) -> PeerProcess:
        """Start a seed without a job and wait until it listens. Raises ``UserError`` if the address of ``web`` is in
        use, ``JobFailed``, ``StorageError``."""
        if self.web is not None:
            (await TcpNetwork().bound(*self.web, option="--web")).close()
        arguments = ["seed", "--no-job", "--json", "--host", LOOPBACK, "--state", str(self.root), "--with-parent"]
        arguments += [*["--tls"] * self.tls, *(["--http", format_address(*self.web)] if self.web else [])]
        for port in [self.port] if self.port else [DEFAULT_PORT, 0]:
            port_option = ["--port", str(port)]
            seed = self._seed = await PeerProcess.start(
                "seed", [*arguments, *port_option], self.logs / "seed.log", listen=True
            )
            self.started.append(seed)
            assert seed.process.stdout is not None
            try:
                async with asyncio.timeout(READY_S):
                    ready = await seed.process.stdout.readline()
            except TimeoutError:
                ready = b""
            if b'"ready"' in ready:
                break
            await end_all([seed])  # it said nothing, or the document of an error, which the log has too
            failure = seed.failure("the seed did not start")
            if port == self.port or failure.exit_code != UserError.exit_code:  # else that port may be in use
                raise failure
        ready_event = json.loads(ready)
        self.port, self.url = int(ready_event["port"]), str(ready_event.get("http", ""))
        if self._announcement is not None:
            self._announcement.enter_context(announce_seed((LOOPBACK, self.port), self.root))
        return seed

    async def start_peer(self, name: str, slot: int, *options: str, target: str = "") -> PeerProcess:
        """Start a peer; returns before it has joined. Raises ``StorageError``.

        Args:
            slot: slot of the state directory. options: further options of ``join``.
            target: the seed to join; empty: this cluster's.
        """
        arguments = ["join", target or self.address, "--state", str(self.root), "--slot", str(slot)]
        arguments += ["--name", name, "--wait", "0", "--with-parent"]
        child = await PeerProcess.start(name, [*arguments, *options], self.logs / f"{name}.log")
        self.peers[name] = child
        self.started.append(child)
        return child

    async def start_workers(
        self,
        count: int,
        *,
        threads: int = 0,
        straggler: float = 1.0,
        texts: Sequence[str] = (),
        attacks: Sequence[str] = (),
        **options: str,
    ) -> None:
        """Start workers; returns before they have joined. Raises ``StorageError``.

        Args:
            threads: of each; 0: they share the cores.
            straggler: the last one computes so many times slower.
            texts, attacks: of each worker, for private data and as in ``p2ptrain.lab.attacker``; empty: none.
            options: further options of ``join``, by name; an empty one is left out.
        """
        options = {"threads": str(threads or threads_each(count))} | options
        for number in range(1, count + 1):
            own = options | {"straggler": f"{straggler:g}" * (straggler > 1 and number == count)}
            own |= {"data": texts[number - 1] if texts else "", "attack": attacks[number - 1] if attacks else ""}
            words = [word for name, value in own.items() if value for word in (f"--{name}", value)]
            await self.start_peer(f"worker-{number}", number, *words)

    def failures(self) -> list[str]:
        """Why processes have ended that nobody ended."""
        return [child.failure().message for child in self.started if not child.alive and not child.was_killed]

    def operator(self) -> AbstractAsyncContextManager[SeedClient]:
        return operator((LOOPBACK, self.port), state=self.root)

    async def wait_until_joined(self, names: Collection[str]) -> None:
        """Wait until the seed lists these peers. Raises ``JobFailed`` after a time limit, or if a process ends."""
        await self._until_listed(
            PeerInfo, lambda peer: "" if peer.state in ABSENT_STATES else peer.name, set(names), "join"
        )

    async def wait_until_serving(self, roles: Collection[str]) -> dict[str, Any]:
        """Wait until each of these roles is served; return its ``ServingInfo`` by role. Raises as the above."""
        return await self._until_listed(
            ServingInfo, lambda info: info.role if info.is_ready else "", set(roles), "serve"
        )

    async def _until_listed(self, kind: type[R], key: Callable[[R], str], wanted: set[str], what: str) -> dict[str, R]:
        newest, listed = dict[str, R](), dict[str, R]()  # by id, and by key

        async def work() -> dict[str, R]:
            nonlocal listed
            try:
                async with asyncio.timeout(READY_S), self.operator() as client:
                    async for records in client.news():
                        newest.update({item.id: item for item in records if isinstance(item, kind)})
                        listed = {key(item): item for item in newest.values()}
                        if wanted <= listed.keys():
                            return listed
                    raise ConnectionLost("the seed ended")
            except TimeoutError:
                text = f"{' and '.join(sorted(wanted - listed.keys()))} did not {what} within {READY_S:.0f} s"
                raise JobFailed(text, remedy=f"see the logs in {self.logs}") from None

        return await self.while_alive(work(), needed=[self.seed, *self.peers.values()])

    @staticmethod
    async def while_alive(
        work: Coroutine[Any, Any, T],
        *,
        needed: Sequence[PeerProcess],
        others: Sequence[PeerProcess] = (),
        least: int = 0,
        on_end: Callable[[PeerProcess], None] = lambda child: None,
    ) -> T:
        """Run ``work`` as long as the processes live that it needs, and return its result.

        Args:
            needed: the end of any of these ends the work.
            others: their ends are passed to ``on_end``, as long as ``least`` of them live.

        Raises:
            JobFailed: too few processes live; it has the last words of the one that ended.
        """
        task = asyncio.ensure_future(work)
        ends = {asyncio.create_task(child.process.wait()): child for child in [*needed, *others]}
        living = len(others)
        try:
            while True:
                await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if ends and task.done() and isinstance(task.exception(), NetworkError):
                    # A dying process closes its connections first. Its own end explains more than the network error.
                    await asyncio.wait(ends, timeout=EXIT_AFTER_CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
                for end in [end for end in ends if end.done()]:
                    child = ends.pop(end)
                    living -= child in others
                    if child in needed or living < least:
                        raise child.failure()
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
        """End all processes, the seed last, so that it records what the others saved. May be called twice."""
        await end_all(list(self.peers.values()))
        await end_all([self._seed] if self._seed is not None else [])
        if self._announcement is not None:
            self._announcement.close()


def new_run_directory(name: str) -> Path:
    """A directory for a run of a program, which does not exist yet."""
    return Path("p2ptrain-runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{new_id()[:4]}").absolute()


def own_texts(profile: Profile, workers: int, data: list[str]) -> tuple[str, ...]:
    """The text of each worker, if each has its own. Private data of 'stdlib' is a package of it for each worker."""
    if not profile.data.private:
        if data:
            raise UserError("--data is for private data", remedy="add --set data.private=true, or set data.path")
        return ()
    if not data and profile.data.path == STDLIB:
        data = [f"{STDLIB}/{STDLIB_PARTS[index % len(STDLIB_PARTS)]}" for index in range(workers)]
    if len(data) not in (0, workers):
        remedy = f"give --data {workers} times, or not at all"
        raise UserError(f"{workers} workers and {len(data)} texts", remedy=remedy)
    for path in data:
        find_files(path, profile.data.format)  # fail here, not in each worker
    return tuple(data)


def part_bytes(device: str) -> int:
    """Memory that the workers of this machine may use, all together, for parts of split models."""
    from roles.gauges import free_memory_bytes
    from roles.worker.build import FREE_SHARE

    return int(FREE_SHARE * free_memory_bytes(device))


def threads_each(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def free_port() -> int:
    """Find a free loopback port below those that Linux gives to outgoing connections: it is still free when its peer is
    started again. Raises ``UserError``."""
    for port in random.sample(range(10_000, 32_768), k=64):
        with socket.socket() as probe, suppress(OSError):
            if sys.platform != "win32":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            return port
    raise UserError("no free port on this machine", remedy="stop programs that use them")
