"""Checkpoints written by a helper process: other cores' time, no turn of this process' interpreter, the least urgency.

The helper starts with the first checkpoint and stays, in a process group of its own, so Ctrl+C is not for it; not in a
session of its own, which Linux would give a share of the processor's time as large as that of all of the training.
``p2ptrain.core.checkpoint_writer`` has the words between the two. It may die at any moment: then the checkpoint is
written from here, as ``DirectSaver`` does, and the next one gets a new helper. So it is where others leave it no time:
beside a program that never rests Linux gave it 0.7 % of a core (1.9 % where it was only nice), which is minutes for
500 MB. It may hang, as a disk may: then it is killed after a while, that checkpoint is given up, and training never
noticed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from p2ptrain.core import checkpoint_writer
from p2ptrain.core.checkpoint_writer import SHARE, URGENT, Order, receive_answer, send_order
from p2ptrain.core.checkpoints import CheckpointEntry, Meta
from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import StorageError
from p2ptrain.core.shared_memory import Memory, SharedMemory
from p2ptrain.core.threads import Thread
from p2ptrain.core.training import FilePlan
from roles.worker.saver import DirectSaver, Saver, Shelf
from roles.worker.snapshot import Snapshot

# Neither site-packages nor the environment nor the current directory: only the standard library and this program.
_ROOT = str(Path(checkpoint_writer.__file__).parents[2])
_START = "import sys; sys.path.append(sys.argv[1]); from p2ptrain.core.checkpoint_writer import main; main()"
HELPER = (sys.executable, "-I", "-S", "-c", _START, _ROOT)

SILENCE_S = 60.0  # twice what Linux gives a disk for one command before it tries again
SLOWEST_BYTES_PER_S = 1e6  # half of what the slowest class of memory cards promises
SLOWER_THAN_EVER = 20.0  # times the slowest that was seen
LOOK_S = 45.0
"""So often it is looked whether the helper gets any time."""
DEATH_S = 1.0  # a killed process is gone in milliseconds, unless it hangs in a system call


def saver_of_this_system(thread: Thread, disk: Disk, tell: Callable[[str, str, str], None]) -> Saver:
    """The best that there is here. Arguments as for ``ProcessSaver``."""
    if hasattr(socket, "send_fds"):
        return ProcessSaver(thread, disk, tell)
    return DirectSaver(thread, disk)


class HelperLost(StorageError):
    """The helper died, or cannot be started. Says nothing of the disk."""


class _Starved(Exception):
    """The helper could go on, and nobody lets it."""


class ProcessSaver:
    """See the module's docstring, and ``Saver``. On systems with Unix sockets.

    Args:
        thread: on which the directory's other users work, too: one at a time.
        disk: for what is written from here.
        tell: (level, kind, text) for people.
        command: starts the helper; tests have others.
    """

    def __init__(
        self, thread: Thread, disk: Disk, tell: Callable[[str, str, str], None], *, command: Sequence[str] = HELPER
    ) -> None:
        self._thread, self._tell, self._command = thread, tell, command
        self._direct = DirectSaver(thread, disk)
        self._helper: _Helper | None = None
        self._least_bytes_per_s = SLOWER_THAN_EVER * SLOWEST_BYTES_PER_S
        self._closed = False

    def allocate(self, size_bytes: int) -> Memory:
        """Memory that the helper can map."""
        return SharedMemory(size_bytes)

    async def save(
        self, snapshot: Snapshot, plan: list[FilePlan], shelf: Shelf, meta: Meta, *, urgent: bool
    ) -> CheckpointEntry:
        """See ``Saver``."""
        lost: list[HelperLost] = []

        def write() -> CheckpointEntry:  # in one go: nothing else may come to the directory in between
            try:
                return self._ordered(snapshot, plan, shelf, meta, urgent=urgent)
            except HelperLost as problem:
                lost.append(problem)
                if self._closed:
                    raise
                return self._direct.write(snapshot, plan, shelf, meta)

        try:
            return await self._thread.submit(write)
        finally:
            for problem in lost:
                text = f"{problem.message}: the checkpoint of step {snapshot.step} is written without it"
                self._tell("warning", "checkpoint-helper", text)

    async def close(self) -> None:
        """Kill the helper. Called on the event loop."""
        self._closed = True
        if (helper := self._helper) is not None:
            helper.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(DEATH_S):
                    await self._thread.submit(helper.reap)

    # ----------------------------------------------------------------------------------------------- the disk's thread

    def _ordered(
        self, snapshot: Snapshot, plan: list[FilePlan], shelf: Shelf, meta: Meta, *, urgent: bool
    ) -> CheckpointEntry:
        places = {place.name: (place.offset, place.size_bytes) for place in snapshot.places}
        memory_bytes = snapshot.memory.view.nbytes
        order = Order(shelf.root, shelf.keep, shelf.spared, snapshot.step, meta, plan, places, memory_bytes)
        size_bytes = sum(file.size_bytes for file in plan)
        patience_s = SILENCE_S + size_bytes / max(SLOWEST_BYTES_PER_S, self._least_bytes_per_s / SLOWER_THAN_EVER)
        helper = self._ready_helper(urgent)
        began = time.monotonic()
        try:
            helper.channel.settimeout(patience_s)
            helper.began()
            send_order(helper.channel, order, snapshot.memory.descriptor)
            helper.await_answer(patience_s)
            entry = receive_answer(helper.channel, order)
        except (TimeoutError, _Starved) as error:
            starved = isinstance(error, _Starved) or helper.starves()  # perhaps it did not even read the order
            self._give_up()
            if starved:
                raise HelperLost("the process that writes checkpoints got no time from this machine") from None
            raise StorageError(
                f"{size_bytes / 1e6:.1f} MB were not written to {shelf.root} in {patience_s:.0f} s",
                remedy="see whether that disk works, or choose another place with --state",
            ) from error
        except OSError as error:
            with suppress(subprocess.TimeoutExpired):  # it closed the socket as it ends
                helper.process.wait(DEATH_S)
            raise HelperLost(f"the process that writes checkpoints {self._give_up()}") from error
        self._least_bytes_per_s = min(self._least_bytes_per_s, size_bytes / (time.monotonic() - began))
        return entry

    def _ready_helper(self, urgent: bool) -> _Helper:
        if self._helper is not None and self._helper.urgent is not urgent:
            self._give_up()  # an ordinary user may not give an idle process its urgency back
        if self._helper is None:
            try:
                self._helper = _Helper(self._command, urgent)
            except OSError as error:
                reason = error.strerror or error
                raise HelperLost(f"the process that writes checkpoints cannot be started ({reason})") from error
        if self._closed:  # perhaps while it was started
            self._helper.kill()
        return self._helper

    def _give_up(self) -> str:
        """Be rid of the helper; how it ended, for people."""
        helper, self._helper = self._helper, None
        assert helper is not None
        was_killed = helper.process.poll() is None
        helper.kill()
        code = helper.reap()
        if code is None:
            return "hangs"
        if code < 0:
            return "stopped answering" if was_killed else f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def is_starved(used_s: float, passed_s: float) -> bool:
    """Whether so much of a processor's time since it had something to do is not even half of what it would take."""
    return used_s < passed_s * SHARE / 2


class _Helper:
    """The process, and the socket to it. Raises ``OSError`` where it cannot be started."""

    def __init__(self, command: Sequence[str], urgent: bool) -> None:
        self.urgent = urgent
        command = (*command, URGENT) if urgent else command
        self.channel, theirs = socket.socketpair()
        with theirs:
            try:
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0
                )
            except BaseException:
                self.channel.close()
                raise
        self.began()

    def began(self) -> None:
        """It is given an order now."""
        self._began, self._used_s = time.monotonic(), self._cpu_s()

    def await_answer(self, patience_s: float) -> None:
        """Return when there is something to read, or the other end is closed.

        Raises:
            _Starved: it gets no time.
            TimeoutError: it said nothing for so long.
        """
        while (left_s := self._began + patience_s - time.monotonic()) > 0:
            self.channel.settimeout(min(LOOK_S, left_s))
            try:
                self.channel.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                if self.starves():
                    raise _Starved from None
        else:
            raise TimeoutError
        self.channel.settimeout(patience_s)

    def starves(self) -> bool:
        """Whether it could go on, if somebody let it: it does not wait for the disk, and gets next to no time."""
        try:
            runnable = psutil.Process(self.process.pid).status() == psutil.STATUS_RUNNING
            return runnable and is_starved(self._cpu_s() - self._used_s, time.monotonic() - self._began)
        except psutil.Error:
            return False

    def _cpu_s(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def kill(self) -> None:
        """At once, and wake whoever waits for its answer."""
        self.process.kill()
        with suppress(OSError):  # it may have closed its end
            self.channel.shutdown(socket.SHUT_RDWR)

    def reap(self) -> int | None:
        """Wait for its end; its exit code, None where it hangs in the system."""
        self.channel.close()
        try:
            return self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return None
