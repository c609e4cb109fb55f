"""Starts of ``python -m p2ptrain`` in milliseconds: a process that has imported everything forks for each of them.

Otherwise each start imports torch and transformers, for five seconds of a core. ``install`` has ``subprocess``, and so
asyncio, ask the fork server for each start that it can make; all others are real, and so are all on systems besides
Linux. What is forked is a child of the process that asks, with its own signals, streams, environment, directory and
session, as one that was started. It shares no state with others: the fork server only imports.

What differs: all modules are loaded, sets have the same order in all, and the command line is that of the fork server.
A test of starting asks for the fixture ``real_starts``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

PACKAGES = ("configs", "wire", "ring", "roles", "p2ptrain")
LEFT_OUT = ("p2ptrain.__main__", "p2ptrain.torch_backend", "p2ptrain.lab.experiments.analysis")  # pandas begins threads
STARTERS = ("bench", "chaos", "experiment", "explain", "up")
"""Commands that start processes: each has a fork server of its own, whose orphans become its children."""
READ_AT_START = (
    "CUDA",
    "HF_",
    "LANG",
    "LC_",
    "LD_",
    "MKL",
    "OMP",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS",
    "TZ",
    "XDG_CACHE",
)
"""Beginnings of the names of variables that the interpreter reads, or a library when it is imported."""
UNBUFFERED = "PYTHONUNBUFFERED"
COMMAND = [sys.executable, "-m", "p2ptrain"]
_LENGTH = struct.Struct("!I")
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What a start of ``p2ptrain`` is asked to be, besides its three streams. ``network``: a network namespace."""

    argv: Sequence[str]
    directory: str
    environment: dict[str, str]
    network: str
    new_session: bool


# -------------------------------------------------------------------------------------- in a process that starts others


class ForkServer:
    """The way to the other process. ``enabled``: ask it at all."""

    def __init__(self) -> None:
        self.enabled = True
        self._fork_exec: Any = subprocess._fork_exec  # type: ignore[attr-defined]
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def start(self, *arguments: Any) -> int:
        """Takes the place of ``subprocess._fork_exec``: starts a process and returns its id."""
        with self._lock:
            request = self._request(arguments) if self.enabled else None
            if request is None:
                return int(self._fork_exec(*arguments))
            data = json.dumps(asdict(request)).encode()
            pipes = arguments[6], arguments[9], arguments[11]
            streams = [standard if fd == -1 else fd for standard, fd in enumerate(pipes)]
            assert self._socket is not None
            socket.send_fds(self._socket, [_LENGTH.pack(len(data))], streams)
            self._socket.sendall(data)
            return int.from_bytes(_receive(self._socket, 4), "big")

    def _request(self, arguments: Sequence[Any]) -> ForkRequest | None:
        """None if only a real start can do it."""
        argv, _, close_fds, kept, directory, environment = arguments[:6]
        failure, _, new_session, group, *users, before = arguments[13:22]
        argv, network = [os.fsdecode(argument) for argument in argv], ""
        if argv[:3] == ["ip", "netns", "exec"]:
            network, *argv = argv[3:]
        usual = close_fds and tuple(kept) == (failure,) and before is None
        usual &= all(each in (None, -1) for each in (group, *users))
        if not usual or argv[:3] != COMMAND:
            return None
        if environment is None:
            environment = dict(os.environ)
        else:
            environment = dict(os.fsdecode(item).split("=", 1) for item in environment)
        if self._socket is None:
            self.begin()
        if _read_at_start(environment) != self._environment:
            return None
        return ForkRequest(argv[3:], os.fsdecode(directory or os.getcwd()), environment, network, bool(new_session))

    def begin(self) -> None:
        """Start the fork server."""
        ours, theirs = socket.socketpair()
        self.enabled = False
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.fork_server import main; main({theirs.fileno()})"],
            cwd=Path(__file__).parent.parent,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # which begins its threads when numpy is imported
        )
        self.enabled = True
        theirs.close()
        self.use(ours)

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)

    def use(self, connection: socket.socket) -> None:
        """Ask the fork server at the other end, a child of this process, from now on."""
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError("orphans go to the first process only")
        self._socket, self._environment = connection, _read_at_start(dict(os.environ))


server = ForkServer()


def install() -> None:
    if sys.platform == "linux":
        subprocess._fork_exec = server.start  # type: ignore[attr-defined]


@contextmanager
def real_starts() -> Iterator[None]:
    server.enabled = False
    yield
    server.enabled = True


def _read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name != UNBUFFERED}


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += (got := connection.recv(size - len(data)))
        if not got:
            raise EOFError("the fork server has ended")
    return data


# --------------------------------------------------------------------------------------------------- in the fork server


def import_all() -> None:
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if module.name not in LEFT_OUT:
                importlib.import_module(module.name)


def serve(connection: socket.socket) -> None:
    """Fork for each request, until the process that asks ends."""
    while True:
        header, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
        if not header:
            return
        request = ForkRequest(**json.loads(_receive(connection, _LENGTH.unpack(header)[0])))
        connection.sendall(fork(connection, request, streams).to_bytes(4, "big"))
        for stream in streams:
            os.close(stream)


def fork(connection: socket.socket, request: ForkRequest, streams: Sequence[int]) -> int:
    """Fork twice and return the id of the second process, which is an orphan as soon as the first one has ended."""
    reading, writing = os.pipe()
    if (first := os.fork()) == 0:
        if second := os.fork():
            os.write(writing, second.to_bytes(4, "big"))
            os._exit(0)
        for each in (reading, writing):
            os.close(each)
        connection.close()
        become(request, streams)
    os.waitpid(first, 0)
    pid = int.from_bytes(os.read(reading, 4), "big")
    for each in (reading, writing):
        os.close(each)
    return pid


def become(request: ForkRequest, streams: Sequence[int]) -> NoReturn:
    """Be ``python -m p2ptrain`` with these arguments, environment and streams."""
    code = 1
    try:
        if request.new_session:
            os.setsid()
        if request.argv and request.argv[0] in STARTERS:
            _fork_server_of_its_own(streams)
        if request.network:
            with Path("/run/netns", request.network).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {request.network}")
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
            os.close(stream)
        _open_streams(unbuffered=bool(request.environment.get(UNBUFFERED)))
        sys.argv = ["p2ptrain", *request.argv]
        sys.path[0] = request.directory
        importlib.import_module("numpy").random.seed()  # the standard library seeds its own generator after a fork
        gc.enable()
        runpy.run_module("p2ptrain", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _fork_server_of_its_own(streams: Sequence[int]) -> None:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        for stream in streams:  # their readers shall see their end
            os.close(stream)
        serve(theirs)
        os._exit(0)
    theirs.close()
    server.use(ours)
    install()


def _open_streams(*, unbuffered: bool) -> None:
    for fd, (name, mode) in enumerate((("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb"))):
        buffer = open(fd, mode, buffering=0 if unbuffered and fd else -1)  # noqa: SIM115 - until the process ends
        lines = fd == 2 or os.isatty(fd)
        errors = "backslashreplace" if fd == 2 else "strict"
        stream = io.TextIOWrapper(buffer, errors=errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    import_all()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    with socket.socket(fileno=descriptor) as connection:
        serve(connection)
