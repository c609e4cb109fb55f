"""A simulated machine: processes that can be frozen and killed, threads that take virtual time, and a disk that loses
unflushed writes.

Every callback belongs to the *process* in whose context it was scheduled (``PROCESS``). Tasks and timers inherit the
context, and ``p2ptrain.lab.memory`` separates contexts at its pipes. So a whole process can be frozen, as by SIGSTOP:
its callbacks wait, its timers fire late, and other processes see silence. A *moment* of a process is one callback.

A *power cut* keeps what journalling file systems guarantee, and no more:

- a file's content, if the file was flushed after it was written; else the old content, the new, or part of the new;
- a directory's entries as of its last flush, plus a *prefix* of the changes since, of any length: entries are
  journalled in order, and a rename is one entry of the journal;
- a directory that was made, if its parent kept the entry.

A *kill* loses nothing that a completed call had done. The call in which the process dies may be done in part. A
database (SQLite) keeps what was committed.

``SimEngine`` keeps its files on that disk, and counts its steps.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import hashlib
import itertools
import os
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from configs.schema import Profile
from p2ptrain.core.disk import Disk, Lock, storage_error
from p2ptrain.core.errors import StorageError
from p2ptrain.core.threads import Thread, outcome_of, settle
from p2ptrain.core.training import Applied, Blob, OnFinal, SettingsPeriod
from p2ptrain.lab.memory import VirtualClockLoop
from p2ptrain.lab.stand_in import StandInEngine, StandInState
from roles.engine import Stage


class Process:
    """One run of a program on a machine.

    Attributes:
        alive: False once the process was killed or has ended; then nothing that it does has an effect.
        on_moment: called after each of its callbacks, outside its context.
        hung_until: time before which its compute thread begins no further call.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.alive = True
        self.frozen = False
        self.moments = 0
        self.on_moment: Callable[[], None] | None = None
        self.hung_until = 0.0
        self.waiting: deque[asyncio.Handle] = deque()
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def add(self, task: asyncio.Task[Any]) -> None:
        # forget ended tasks now and then
        if len(self.tasks) >= 256:
            self.tasks = {known: None for known in self.tasks if not known.done()}
        self.tasks[task] = None


@dataclass
class Misconduct:
    """What a worker does wrong.

    Attributes:
        kind: one of ``faults.MISBEHAVIOURS``, now; empty: none of them.
        flips: byte of the reduce buffer in which the next reduction flips a bit; 0: none.
        lies: number of steps to come with a contribution of the kind ``lie``. has_lied: and one was made.
        false_tokens: number of tokens to come with the figures ``falsely``.
    """

    kind: str = ""
    flips: int = 0
    lies: int = 0
    lie: str = ""
    has_lied: bool = False
    false_tokens: int = 0
    falsely: dict[str, Any] = field(default_factory=dict)


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class _Numbered:
    """A task or future whose place in a set does not depend on its address, so that equal runs are equal."""

    _number = 0

    def __hash__(self) -> int:
        if not self._number:
            loop: Any = self.get_loop()  # type: ignore[attr-defined]
            self._number = next(loop.numbers)
        return self._number


class _SimTask(_Numbered, asyncio.Task[Any]):
    pass


class _SimFuture(_Numbered, asyncio.Future[Any]):
    pass


class SimLoop(VirtualClockLoop):
    def __init__(self) -> None:
        super().__init__()
        self.callbacks = 0
        self.numbers = itertools.count(1)
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def create_future(self) -> asyncio.Future[Any]:
        return _SimFuture(loop=self)

    def run_handle(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None:
            handle._run()
        elif process.frozen:
            process.waiting.append(handle)
        else:
            handle._run()
            self.callbacks += 1
            process.moments += 1
            if process.on_moment is not None:
                process.on_moment()

    def start(self, process: Process, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        return self.create_task(main, name=f"{process.host}", context=context)

    def thaw(self, process: Process) -> None:
        """Resume a frozen process. Its waiting callbacks and overdue timers run at once."""
        process.frozen = False
        self._ready.extend(process.waiting)
        process.waiting.clear()

    def kill(self, process: Process) -> None:
        """End a process without further effects. Its tasks are cancelled, so that nothing is left behind."""
        process.alive, process.on_moment = False, None
        self.thaw(process)
        for task in process.tasks:
            task.cancel()
        process.tasks.clear()


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **settings: Any
) -> asyncio.Task[Any]:
    task = _SimTask(coroutine, loop=loop, **settings)
    context = settings.get("context")
    process = context.get(PROCESS) if context is not None else PROCESS.get()
    if process is not None:
        process.add(task)
    return task


T = TypeVar("T")


class SimThreads:
    """A thread of one process. ``start`` makes others like it.

    Args:
        call_s: mean virtual time of a call on this machine.
    """

    def __init__(self, process: Process, rng: random.Random, call_s: float, name: str = "") -> None:
        self._process, self._random, self._call_s, self._name = process, rng, call_s, name
        self._free_at = 0.0

    def start(self, name: str) -> Thread:
        return SimThreads(self._process, self._random, self._call_s, name)

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._process.alive:
            future.cancel()
            return future
        begin_at = max(loop.time(), self._free_at, self._process.hung_until if self._name == "compute" else 0.0)
        self._free_at = begin_at + self._call_s * (0.5 + self._random.random())
        if begin_at > loop.time():
            loop.call_at(begin_at, self._begin, call, future, self._free_at)
        else:
            self._begin(call, future, self._free_at)
        return future

    def close(self) -> None:
        """Do nothing: there is no real thread."""

    def _begin(self, call: Callable[[], Any], future: asyncio.Future[Any], end_at: float) -> None:
        if future.cancelled():
            return  # cancelled before it began
        loop = asyncio.get_running_loop()
        # The effects appear at the call's begin or at its end; other callbacks run in between.
        if self._random.random() < 0.25:
            loop.call_soon(self._call, call, future, end_at)
        else:
            loop.call_at(end_at, self._call, call, future, end_at)

    def _call(self, call: Callable[[], Any], future: asyncio.Future[Any], end_at: float) -> None:
        if not self._process.alive:
            return
        outcome = outcome_of(call)
        if self._process.alive:
            asyncio.get_running_loop().call_at(end_at, settle, future, *outcome)


Entries = dict[str, "_File | _Dir"]


class Died(BaseException):
    """The process was killed inside this call. Not an ``Exception``, so that no handler catches it."""


@dataclass(eq=False, slots=True)
class _File:
    data: bytes = b""
    flushed: bytes | None = None


@dataclass(eq=False, slots=True)
class _Dir:
    entries: Entries = field(default_factory=dict)
    flushed: Entries = field(default_factory=dict)
    since: list[Callable[[Entries], object]] = field(default_factory=list)  # changes since the flush

    def do(self, change: Callable[[Entries], object]) -> None:
        change(self.entries)
        self.since.append(change)


class _Database(sqlite3.Connection):
    """Outlives the process that uses it. Closing it only rolls back what was not committed."""

    disk: MachineDisk

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if self.disk.full and sql.startswith("COMMIT"):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *values)  # type: ignore[arg-type]


class MachineDisk:
    """The disk of one machine. ``view_for`` gives the view of one process.

    Attributes:
        full: nothing more can be written.
        calls: number of changing calls so far.
        die_in: value of ``calls`` at which the process is killed in the middle of the call.
        killed: called then, before the call raises.
    """

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._root = _Dir()
        self.databases: dict[Path, _Database] = {}
        self.locks: dict[Path, Process] = {}
        self.full = False
        self.calls = 0
        self.die_in: int | None = None
        self.killed: Callable[[], None] = lambda: None

    def view_for(self, process: Process, on_rename: OnRename = lambda disk, source, target: None) -> Disk:
        return ProcessDisk(self, process, on_rename)

    def power_cut(self, directory: _Dir | None = None) -> None:
        directory = directory or self._root
        kept = self._random.randint(0, len(directory.since))
        entries = dict(directory.flushed)
        for change in directory.since[:kept]:
            change(entries)
        directory.entries, directory.flushed, directory.since = entries, dict(entries), []
        for node in entries.values():
            if isinstance(node, _Dir):
                self.power_cut(node)
            elif node.flushed != node.data:
                part = node.data[: self._random.randint(0, len(node.data))]
                torn = part + bytes(len(node.data) - len(part))
                node.data = node.flushed = self._random.choice((node.flushed or b"", node.data, part, torn))

    def close(self) -> None:
        for database in self.databases.values():
            sqlite3.Connection.close(database)
        self.databases.clear()

    # ------------------------------------------------------------------------------------ what the processes' views use

    def database(self, path: Path) -> sqlite3.Connection:
        if path not in self.databases:
            self.databases[path] = sqlite3.connect(":memory:", isolation_level=None, factory=_Database)
            self.databases[path].disk = self
        return self.databases[path]

    def find(self, path: Path) -> _File | _Dir | None:
        node: _File | _Dir | None = self._root
        for part in path.parts[1:] if path.is_absolute() else path.parts:
            node = node.entries.get(part) if isinstance(node, _Dir) else None
        return node

    def dies_now(self) -> bool:
        """Count a changing call. Return whether the process dies in it."""
        self.calls += 1
        if self.die_in is None or self.calls < self.die_in:
            return False
        self.die_in = None
        return True

    def share(self, number: int) -> int:
        return self._random.randint(0, number)


OnRename = Callable[["ProcessDisk", Path, Path], None]
"""Takes the disk, the source and the target."""


class ProcessDisk:
    """``core.disk.Disk`` for one process. After the process died every call raises ``Died``. ``on_rename`` is called
    when something is about to be renamed."""

    def __init__(self, machine: MachineDisk, process: Process, on_rename: OnRename) -> None:
        self._machine, self._process, self._on_rename = machine, process, on_rename

    # ---------------------------------------------------------------------------------------------------------- reading

    def read(self, path: Path, *, max_bytes: int) -> bytes:
        data = self._file(path).data
        if len(data) > max_bytes:
            raise StorageError(f"{path} is larger than the {max_bytes} bytes it may have")
        return data

    def read_range(self, path: Path, start: int, stop: int) -> bytes:
        data = self._file(path).data[start:stop]
        if len(data) != stop - start:
            raise StorageError(f"{path} ends {stop - start - len(data)} bytes too early")
        return data

    def hash_file(self, path: Path) -> str:
        return hashlib.sha256(self._file(path).data).hexdigest()

    def list_dir(self, path: Path) -> list[str]:
        self._check()
        node = self._machine.find(path)
        databases = {database.name for database in self._machine.databases if database.parent == path}
        return sorted(databases.union(node.entries)) if isinstance(node, _Dir) else []

    def is_dir(self, path: Path) -> bool:
        self._check()
        return isinstance(self._machine.find(path), _Dir)

    def size(self, path: Path) -> int:
        return len(self._file(path).data)

    def free_bytes(self, path: Path) -> int:
        self._check()
        return 0 if self._machine.full else (1 << 40)

    # --------------------------------------------------------------------------------------------------------- changing

    def write_file(self, path: Path, data: bytes) -> None:
        dies = self._changing()
        directory = self._dir(path.parent)
        if self._machine.full:
            raise _problem(errno.ENOSPC, path)
        data = bytes(data)
        node = directory.entries.get(path.name)
        if not isinstance(node, _File):
            node = _File()
            made = node
            directory.do(lambda entries: entries.__setitem__(path.name, made))
        node.data = data[: self._machine.share(len(data))] if dies else data
        self._die_if(dies)

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        node = self._machine.find(path)
        self.write_file(path, (node.data if isinstance(node, _File) else b"") + bytes(data))

    def truncate(self, path: Path, size_bytes: int) -> None:
        self.write_file(path, self._file(path).data[:size_bytes])

    def set_mode(self, path: Path, mode: int) -> None:
        if not self.is_dir(path):
            self._file(path)

    def sync_file(self, path: Path) -> None:
        self._die_if(self._changing())
        file = self._file(path)
        file.flushed = file.data

    def sync_dir(self, path: Path) -> None:
        self._die_if(self._changing())
        directory = self._dir(path)
        directory.flushed, directory.since = dict(directory.entries), []

    def make_dir(self, path: Path) -> None:
        if isinstance(self._machine.find(path), _Dir):
            self.sync_dir(path.parent)  # its maker may have died before it was durable
            return
        if path.parent != path:
            self.make_dir(path.parent)
        dies = self._changing()
        if self._machine.full:
            raise _problem(errno.ENOSPC, path)
        made = _Dir()
        parent = self._dir(path.parent)
        parent.do(lambda entries: entries.__setitem__(path.name, made))
        if not dies or self._machine.share(1):  # the call returns when the entry is durable
            parent.flushed, parent.since = dict(parent.entries), []
        self._die_if(dies)

    def rename(self, source: Path, target: Path) -> None:
        dies = self._changing()
        directory = self._dir(source.parent)
        node = directory.entries.get(source.name)
        if node is None:
            raise _problem(errno.ENOENT, source)
        if source.parent != target.parent:
            raise NotImplementedError("the simulator cannot rename into another directory")
        self._on_rename(self, source, target)

        def change(entries: Entries) -> None:
            entries.pop(source.name, None)
            entries[target.name] = node

        if not dies or self._machine.share(1):
            directory.do(change)
        self._die_if(dies)

    def remove_tree(self, path: Path) -> None:
        dies = self._changing()
        node = self._machine.find(path)
        if node is None:
            self._die_if(dies)
            return
        if isinstance(node, _Dir):
            names = sorted(node.entries)
            for name in names[: self._machine.share(len(names))] if dies else names:
                node.do(lambda entries, name=name: entries.pop(name, None))  # type: ignore[misc]
        self._die_if(dies)
        self._dir(path.parent).do(lambda entries: entries.pop(path.name, None))

    def fresh_path(self, path: Path) -> Path:
        return path.with_name(f"{path.name}-{self._machine.calls}")

    def try_lock(self, path: Path) -> Lock | None:
        self._check()
        locks = self._machine.locks
        holder = locks.setdefault(path, self._process)
        if holder.alive and holder is not self._process:
            return None
        locks[path], lock = self._process, ExitStack()
        lock.callback(locks.pop, path, None)
        return lock

    def connect(self, path: Path) -> sqlite3.Connection:
        self._check()
        database = self._machine.database(path)
        node = self._machine.find(path)
        if isinstance(node, _File):  # a database file was copied there
            database.deserialize(node.data)
            self._dir(path.parent).do(lambda entries: entries.pop(path.name, None))
        if database.in_transaction:  # a killed process had not committed
            database.rollback()
        return database

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _check(self) -> None:
        if not self._process.alive:
            raise Died

    def _changing(self) -> bool:
        self._check()
        return self._machine.dies_now()

    def _die_if(self, dies: bool) -> None:
        if dies:
            self._machine.killed()
            raise Died

    def _file(self, path: Path) -> _File:
        self._check()
        node = self._machine.find(path)
        if not isinstance(node, _File):
            raise _problem(errno.ENOENT if node is None else errno.EISDIR, path)
        return node

    def _dir(self, path: Path) -> _Dir:
        node = self._machine.find(path)
        if not isinstance(node, _Dir):
            raise _problem(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node


def _problem(code: int, path: Path) -> StorageError:
    return storage_error("use", path, OSError(code, os.strerror(code)))


Buffer = npt.NDArray[Any]

NUMEL = 320
ATTACKER = "w1"
"""In a job with a robust rule this machine sends wrong vectors."""


class SimState(StandInState):
    """A stand-in's state on a simulated disk, with the number of steps that were applied to it."""

    def __init__(self, seed: int, numel: int, stage: Stage, on_change: Callable[[], None]) -> None:
        super().__init__(seed, numel, stage, on_change)
        self.count = np.zeros(1, np.int64)

    def blobs(self) -> list[Blob]:
        return [*super().blobs(), Blob("count", self.count.view(np.uint8).data)]

    def load_initial(self) -> None:
        super().load_initial()
        self.count[:] = 0


class SimEngine(StandInEngine):
    """A stand-in engine whose state counts the steps applied to it, so that a step applied twice is visible.

    Args:
        spoil: called with this member's contribution to each step before it is sent; a faulty member changes it.
    """

    state: SimState
    state_type = SimState

    def __init__(self, profile: Profile, disk: Disk, spoil: Callable[[Buffer], None], stage: Stage) -> None:
        super().__init__(profile, numel=NUMEL, stage=stage)
        self.state.disk, self._spoil = disk, spoil

    @property
    def count(self) -> int:
        return int(self.state.count[0])

    def bits(self) -> bytes:
        return bits_of(b"".join(bytes(blob.view) for blob in self.state.blobs()))

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        super().micro_batch(step, index, None)
        if on_final is not None and self._inner is None:  # last micro-batch of the share; nothing was sent yet
            self._spoil(self.reduce_buffer)
            on_final(self.codec_numel // 2)

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        super().finish_gradients(on_final)
        if self._inner is not None:
            self._spoil(self.reduce_buffer[self._inner.fragment(self._inner.step)])

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        applied = super().apply(step, square_sum, is_own=is_own)
        self.state.count += 1
        return applied


def bits_of(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def undisturbed(profile: Profile, periods: Sequence[SettingsPeriod] = ()) -> list[npt.NDArray[np.float32]]:
    """The parameters after 0, 1, 2, … steps of a single process. ``periods``: if the settings change."""
    engine = StandInEngine(profile, numel=NUMEL)
    if periods:
        engine.use_settings(periods)
    engine.state.load_initial()
    found = [engine.state.parameters.copy()]
    for step in range(profile.job.steps):
        engine.begin_step(step)
        for index in range(profile.batch.micro_batches):
            engine.micro_batch(step, index)
        engine.finish_gradients()
        engine.apply(step, engine.partial_square_sum(0, engine.reduce_buffer.size))
        found.append(engine.state.parameters.copy())
    return found
