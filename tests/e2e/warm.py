"""Workers and commands that write text, started warm: forked from a process that has loaded torch and transformers.

Loading them takes five seconds of a processor for every process that a test starts. What is forked is a process like
any other, with a pid, a directory, an environment, streams, signals and an exit code of its own, and runs ``python -m
p2ptrain`` from its first line; only the modules are there before. How a worker starts cold is shown by whoever starts
one through ``up``, ``bench`` or ``chaos``, and where a test says so.

This file is both sides: imported by tests, and run as the process that forks (``python warm.py SOCKET``). One request a
connection: the three streams' descriptors and JSON with arguments, directory, environment and network; answers are two
lines, the pid and, later, what ``waitpid`` said. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "p2ptrain.compute.trainer",
    "p2ptrain.compute.served_part",
    "p2ptrain.cli.join",
    "p2ptrain.cli.generate",
    "roles.worker.worker",
    "roles.verifier.server",
)


class Forked:
    """The part of ``asyncio.subprocess.Process`` that tests use."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *streams: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.stdout, self.stderr = streams
        self._ended = asyncio.create_task(self._end(reader, writer))

    async def _end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        status = int(await reader.readline())
        writer.close()
        await writer.wait_closed()
        return os.waitstatus_to_exitcode(status)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Where processes are forked.

    Args:
        place: of its socket.
    """

    def __init__(self, place: Path) -> None:
        self._path = str(place)
        self._host = subprocess.Popen(
            [sys.executable, __file__, self._path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def start(
        self,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        typed: str = "",
        network: str = "",
    ) -> Forked:
        """``python -m p2ptrain`` with arguments.

        Args:
            typed: its whole input, at most what a pipe holds.
            network: name of the network namespace that it lives in; empty: this one.
        """
        if self._host.stdout is not None:
            await asyncio.to_thread(self._host.stdout.readline)  # it listens
            self._host.stdout.close()
            self._host.stdout = None
        request = json.dumps([list(arguments), str(directory), dict(environment), network]).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        (typed_end, keyboard), (out, out_end), (err, err_end) = os.pipe(), os.pipe(), os.pipe()
        os.write(keyboard, typed.encode())
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [typed_end, out_end, err_end])
        connection.sendall(request)
        for end in (keyboard, typed_end, out_end, err_end):
            os.close(end)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return Forked(int(await reader.readline()), reader, writer, await _reader(out), await _reader(err))

    def run(
        self, arguments: Sequence[str], directory: Path, typed: str = "", *, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """One that ends by itself, for a test without an event loop."""

        async def ended() -> subprocess.CompletedProcess[str]:
            async with asyncio.timeout(timeout_s):
                process = await self.start(arguments, directory, os.environ, typed)
                out, err = await asyncio.gather(process.stdout.read(), process.stderr.read())
                return subprocess.CompletedProcess(arguments, await process.wait(), out.decode(), err.decode())

        return asyncio.run(ended())

    def close(self) -> None:
        """What was forked stays."""
        assert self._host.stdin is not None
        self._host.kill()  # it may still be loading
        self._host.wait()
        self._host.stdin.close()
        if self._host.stdout is not None:
            self._host.stdout.close()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    return reader


@contextmanager
def nursery(place: Path) -> Iterator[Nursery | None]:
    """None where a process with libraries as large may not be forked."""
    if sys.platform != "linux":
        yield None
        return
    made = Nursery(place)
    try:
        yield made
    finally:
        made.close()


# ------------------------------------------------------------------------------------------------ the one that forks


def _run(path: str) -> None:
    """Fork until standard input ends. Comes back in every process that was forked, too, by ``SystemExit``."""
    for module in PRELOADED:
        importlib.import_module(module)

    children: dict[int, socket.socket] = {}

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):  # none is left
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)  # any child: another signal may interrupt this handler
                if not pid:
                    return
                with children.pop(pid) as connection, suppress(ConnectionError):  # the test may be over
                    connection.sendall(b"%d\n" % status)

    signal.signal(signal.SIGCHLD, reap)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    gc.freeze()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        request = connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if pid := os.fork():
            children[pid] = connection
            connection.sendall(b"%d\n" % pid)
            for descriptor in descriptors:
                os.close(descriptor)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            continue
        for each in (listener, connection, *children.values()):
            each.close()
        children.clear()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _become(request, descriptors)


def _become(request: bytes, descriptors: Sequence[int]) -> None:
    """This process is ``python -m p2ptrain`` from now on."""
    arguments, directory, environment, network = json.loads(request)
    if network:
        with open(f"/run/netns/{network}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout, sys.stderr = (  # as PYTHONUNBUFFERED has them
        io.TextIOWrapper(open(number, "wb", 0, closefd=False), "utf-8", write_through=True)  # noqa: SIM115
        for number in (1, 2)
    )
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["p2ptrain", *arguments]
    runpy.run_module("p2ptrain", run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    _run(sys.argv[1])
