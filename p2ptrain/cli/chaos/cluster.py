"""The processes: a seed and workers, each worker's two links behind proxies, and what can be done to them.

Others reach a worker's data port through its ``data`` proxy; it reaches the seed through its ``control`` proxy. Real
ports lie below those that the system gives to outgoing connections, so that a restarted peer finds its own one free.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from p2ptrain.cli.chaos.proxy import Proxy
from p2ptrain.cli.children import Child, end_all, start_seed_process, until_it_listens
from p2ptrain.core.errors import NetworkError, StorageError, UserError

LOOPBACK = "127.0.0.1"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, EPHEMERAL_DEFAULT = 10_000, 32_768  # Linux's own default of where the range begins
JOINED = b" joined "  # as a worker tells that the seed let it in
LOG_BYTES = 1 << 20
"""A worker whose disk is full may still write so much into its log: what it says is wanted."""


def kinds_here() -> tuple[str, ...]:
    """The faults that this system can do to a process."""
    from p2ptrain.cli.chaos.schedule import BY_NAME, KINDS

    without = {"disk"} if sys.platform != "linux" else set()
    without |= {"freeze"} if not hasattr(signal, "SIGSTOP") else set()
    return tuple(kind for kind in (*KINDS, *BY_NAME) if kind not in without)


@dataclass(slots=True)
class Place:
    """Where a worker runs, again and again: its slot of the state directory, its name, its proxies.

    Attributes:
        child: None while none runs.
        busy: a fault has it.
        ending: its process is expected to end.
        restarting: it could not reach the seed, and is started again when there is one.
    """

    number: int
    data: Proxy
    control: Proxy
    child: Child | None = None
    busy: bool = False
    ending: bool = False
    frozen: bool = False
    restarting: bool = False

    @property
    def gone(self) -> bool:
        """None runs, nor will one."""
        return self.child is None and not self.restarting

    @property
    def name(self) -> str:
        return f"worker-{self.number}"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds."""

    memory_bytes: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Cluster:
    """Made, started by ``start``, ended by ``end``.

    Args:
        root: the state directory of all.
        threads: of each worker.
        on_change: called when a process ended.

    Attributes:
        exits: processes that ended and should not have, in their own words. A worker whose seed dies before they met
            is none of them: it says so and ends, and is started again when the seed is back, as a supervisor would.
        late: workers that did not leave when they were asked.
    """

    root: Path
    workers: int
    threads: int
    tls: bool
    on_change: Callable[[], None]
    port: int = 0
    seed: Child | None = None
    places: dict[int, Place] = field(default_factory=dict)
    exits: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    _seed_ending: bool = False
    _seed_up: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: bool = False
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _sessions: set[int] = field(default_factory=set)

    async def start(self) -> None:
        """The seed. Raises ``JobFailed``, ``UserError``."""
        self.port = free_port()
        await self.start_seed()

    # ------------------------------------------------------------------------------------------------------- the seed

    async def start_seed(self) -> None:
        """Returns when it listens. Raises ``JobFailed``."""
        child = await start_seed_process(self.root, self.port, tls=self.tls)
        self.seed, self._seed_ending = child, False
        self._sessions.add(child.process.pid)
        await until_it_listens(child)
        self._seed_up.set()
        self._watch(child, None)

    async def kill_seed(self) -> None:
        """Returns when it is dead."""
        assert self.seed is not None
        self._seed_ending = True
        self._seed_up.clear()
        self.seed.process.kill()
        await self.seed.process.wait()

    # -------------------------------------------------------------------------------------------------------- workers

    async def place(self, number: int) -> Place:
        """The place of this number, made where there is none yet."""
        if number not in self.places:
            place = Place(number, Proxy((LOOPBACK, 0)), Proxy((LOOPBACK, self.port)))
            await place.data.start()
            await place.control.start()
            self.places[number] = place
        return self.places[number]

    async def start_worker(self, number: int) -> Place:
        """Start the worker of this place, when there is a seed; it joins in its own time.

        Raises ``StorageError``, ``UserError``.
        """
        place = await self.place(number)
        await self._seed_up.wait()
        assert place.child is None
        port = free_port()
        place.data.target = (LOOPBACK, port)
        arguments = ["join", self._target(place), "--state", str(self.root), "--slot", str(number)]
        arguments += ["--name", place.name, "--threads", str(self.threads)]
        arguments += ["--host", LOOPBACK, "--port", str(port), "--advertise", f"{LOOPBACK}:{place.data.address[1]}"]
        child = await Child.start(place.name, arguments, self.root / "logs" / f"{place.name}.log")
        if self._closing:  # told to leave while it was being started
            child.ask_to_leave()
        place.child, place.ending, place.frozen = child, self._closing, False
        self._sessions.add(child.process.pid)
        self._watch(child, place)
        return place

    def _target(self, place: Place) -> str:
        """What this worker joins: its own way to the seed; on an encrypted cluster in a ticket."""
        if not self.tls:
            return f"{LOOPBACK}:{place.control.address[1]}"
        from wire.ticket import Ticket, local_ticket_path

        path = local_ticket_path(self.root, "worker")
        try:
            ticket = Ticket.parse_untrusted(path.read_text().strip())
            mine = path.with_name(f"{place.name}.ticket")
            mine.touch(mode=0o600)
            mine.write_text(str(dataclasses.replace(ticket, port=place.control.address[1])))
        except OSError as error:
            raise StorageError(f"cannot pass on {path}: {error.strerror}", remedy="choose another --state") from error
        return f"@{mine}"

    async def kill(self, place: Place) -> None:
        """SIGKILL; returns when it is dead."""
        assert place.child is not None
        place.ending = True
        child = place.child
        child.process.kill()
        await child.process.wait()
        place.child, place.frozen = None, False

    async def leave(self, place: Place, patience_s: float) -> None:
        """Ask it to leave, and wait; one that does not is noted, and killed."""
        assert place.child is not None
        place.ending = True
        child = place.child
        child.ask_to_leave()
        try:
            async with asyncio.timeout(patience_s):
                await child.process.wait()
        except TimeoutError:
            self.late.append(f"{place.name} did not leave within {patience_s:.0f} s")
            await child.ended(0.0)
        if child.process.returncode and not self._closing:
            self.exits.append(child.failed(f"{place.name} left with exit code {child.process.returncode}").message)
        place.child = None

    def freeze(self, place: Place) -> None:
        assert place.child is not None
        place.frozen = True
        place.child.process.send_signal(signal.SIGSTOP)

    def thaw(self, place: Place) -> None:
        """It goes on; harmless for one that is not frozen."""
        if place.child is not None and place.child.alive and place.frozen:
            place.child.process.send_signal(signal.SIGCONT)
        place.frozen = False

    def fill_disk(self, place: Place) -> int:
        """No file of the worker and its helpers may grow past half its largest one of a checkpoint. That size in bytes.

        It is a limit on files (``RLIMIT_FSIZE``), which needs no rights and spares other processes: a write past it
        fails with EFBIG in the middle of a file, as one on a full disk does with ENOSPC. Shared memory is files, too.
        """
        saved = (path.stat().st_size for path in self._saved_files(place))
        log = (self.root / "logs" / f"{place.name}.log").stat().st_size
        limit_bytes = max(max(saved, default=0) // 2, log + LOG_BYTES)
        self._limit_files(place, limit_bytes)
        return limit_bytes

    def empty_disk(self, place: Place) -> None:
        """Files may grow again."""
        self._limit_files(place, None)

    def _saved_files(self, place: Place) -> Iterator[Path]:
        return (self.root / place.name).glob("jobs/*/checkpoints/step-*/*")

    def _limit_files(self, place: Place, limit_bytes: int | None) -> None:
        if sys.platform != "linux" or place.child is None or not place.child.alive:
            return
        import resource

        try:
            process = psutil.Process(place.child.process.pid)
            for pid in [process.pid, *(child.pid for child in process.children(recursive=True))]:
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if limit_bytes is None else limit_bytes, hard))
        except (psutil.NoSuchProcess, ProcessLookupError):
            return  # it ended by itself, which its watch tells

    def usage(self) -> dict[str, Usage]:
        """What each process holds now."""
        children = [(place.name, place.child) for place in self.places.values()] + [("seed", self.seed)]
        found = {}
        for name, child in sorted(children, key=lambda item: item[0]):
            if child is None or not child.alive:
                continue
            try:
                process = psutil.Process(child.process.pid)
                with process.oneshot():
                    descriptors = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
                    found[name] = Usage(process.memory_info().rss, descriptors, process.num_threads())
            except psutil.NoSuchProcess:
                continue
        return found

    # --------------------------------------------------------------------------------------------------------- the end

    def release(self) -> None:
        """Nobody is frozen, cut off or without a disk any more. Does not wait."""
        for place in self.places.values():
            self.thaw(place)
            place.data.mend()
            place.control.mend()
            self._limit_files(place, None)

    def closing(self) -> None:
        """From now on every end is expected."""
        self._closing = True
        self._seed_up.set()  # who waits for it shall end
        self.release()

    async def end(self) -> None:
        """End all, workers before the seed, so that it hears what they saved. May be called twice."""
        self.closing()
        await end_all([place.child for place in self.places.values() if place.child is not None])
        if self.seed is not None:
            self._seed_ending = True
            await end_all([self.seed])
        for place in self.places.values():
            await place.data.close()
            await place.control.close()
        if self._watches:
            await asyncio.wait(self._watches)

    def orphans(self) -> list[str]:
        """Processes that are still there though they, or who started them, should have ended. They are killed."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in self._sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} ({process.name()}, {process.status()})")
                    process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                continue
        return found

    def _watch(self, child: Child, place: Place | None) -> None:
        async def watch() -> None:
            await child.process.wait()
            expected = self._closing or (place.ending if place else self._seed_ending)
            if not expected:
                joined = place is not None and _joined(child)
                if joined or place is None or child.process.returncode != NetworkError.exit_code:
                    self.exits.append(child.failed(f"{child.name} ended").message)
                if place is not None and place.child is child:
                    place.child = None
                    if joined or child.process.returncode == NetworkError.exit_code:
                        place.restarting = True
                        await self.start_worker(place.number)
                        place.restarting = False
            self.on_change()

        task = asyncio.create_task(watch(), name=f"watch {child.name}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)


def _joined(child: Child) -> bool:
    """Whether this process, of all that wrote into its log, came as far as the seed."""
    with child.log.open("rb") as log:
        log.seek(child.log_start)
        return JOINED in log.read()


def free_port() -> int:
    """A port of the loopback that nobody uses, and that no outgoing connection takes. Raises ``UserError``."""
    try:
        end = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        end = EPHEMERAL_DEFAULT
    first = FIRST_PORT if end > 2 * FIRST_PORT else 1024
    for port in random.sample(range(first, max(end, first + 1)), k=min(64, max(end - first, 1))):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise UserError("no free port on this machine", remedy="end what uses them")
