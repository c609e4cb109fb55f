"""The helper process that writes checkpoints, and the words between it and the worker that started it.

One order at a time goes over a Unix socket: the descriptor of the memory with the state, what the files are made of,
and the bytes that stand for themselves. The answer comes when the checkpoint is durable, or cannot be. Standard library
only: no torch, no numpy, no asyncio, so that it starts in a blink and stays small.

It ends with its worker, however that ends: the closed socket wakes it, and in the middle of a write it looks after
every piece, and before the rename that makes it a checkpoint.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.core.checkpoints import CheckpointEntry, CheckpointStore, Meta
from p2ptrain.core.disk import Disk, RealDisk
from p2ptrain.core.errors import P2PTrainError, ResourceError, StorageError
from p2ptrain.core.shared_memory import attached
from p2ptrain.core.training import BlobRange, FilePlan

LEAST_URGENT = 19  # of nice; Linux derives the urgency of reading and writing from it, too
SHARE = 1 / 8  # of one core: even idle time is not free, for cores share their way to the memory
URGENT = "urgent"
_HEAD = struct.Struct("!IQ")  # bytes of JSON, bytes that stand for themselves
_ERRORS = {kind.__name__: kind for kind in (ResourceError, StorageError)}


@dataclass(frozen=True, slots=True)
class Order:
    """One checkpoint to write.

    Attributes:
        places: of each blob in the memory: name → (offset, bytes).
        memory_bytes: of all of it.
    """

    root: Path
    keep: int
    spared: frozenset[int]
    step: int
    meta: Meta
    files: list[FilePlan]
    places: dict[str, tuple[int, int]]
    memory_bytes: int


# ---------------------------------------------------------------------------------------------------------- the worker


def send_order(channel: socket.socket, order: Order, descriptor: int) -> None:
    """Raises ``OSError``: the helper is gone."""
    literals: list[bytes] = []
    files = []
    for file in order.files:
        parts: list[object] = []
        for part in file.parts:
            if isinstance(part, BlobRange):
                parts.append([part.blob, part.start, part.stop])
            else:
                parts.append(len(part))
                literals.append(part)
        files.append([file.name, parts])
    said = {
        "root": str(order.root),
        "keep": order.keep,
        "spared": sorted(order.spared),
        "step": order.step,
        "meta": order.meta,
        "files": files,
        "places": order.places,
        "memory_bytes": order.memory_bytes,
    }
    encoded, raw = json.dumps(said).encode(), b"".join(literals)
    socket.send_fds(channel, [_HEAD.pack(len(encoded), len(raw))], [descriptor])
    channel.sendall(encoded)
    channel.sendall(raw)


def receive_answer(channel: socket.socket, order: Order) -> CheckpointEntry:
    """Wait for what became of ``order``.

    Raises:
        StorageError, ResourceError: as raised while it was written.
        OSError: the helper is gone, or silent for longer than the socket's time-out (``TimeoutError``).
    """
    (size_bytes,) = struct.unpack("!I", _read(channel, 4))
    said: dict[str, Any] = json.loads(_read(channel, size_bytes))
    if "error" in said:
        raise _ERRORS.get(said["error"], StorageError)(said["message"], remedy=said["remedy"])
    files = {name: (size, digest) for name, (size, digest) in said["files"].items()}
    return CheckpointEntry(order.step, Path(said["path"]), said["size_bytes"], said["digest"], order.meta, files)


# ---------------------------------------------------------------------------------------------------------- the helper


class LeashedDisk(RealDisk):
    """The disk of a process that is to stop when the other end of ``channel``, which says nothing, is closed.

    Args:
        share: of one core's time that the process may take while it writes; the rest it pauses.
    """

    def __init__(self, channel: socket.socket, share: float) -> None:
        self._channel, self._share = channel, share
        self._used_s = 0.0

    def write_file(self, path: Path, data: bytes) -> None:
        self._used_s = time.process_time()
        super().write_file(path, data)

    def append_file(self, path: Path, data: bytes | memoryview) -> None:
        super().append_file(path, data)
        used_s = time.process_time() - self._used_s
        self._look(pause_s=used_s / self._share - used_s)
        self._used_s += used_s

    def rename(self, source: Path, target: Path) -> None:
        self._look()
        super().rename(source, target)

    def _look(self, *, pause_s: float = 0.0) -> None:
        if select.select([self._channel], [], [], pause_s)[0]:
            raise SystemExit


def serve(channel: socket.socket, disk: Disk) -> None:
    """Write what is ordered, until the other end is closed."""
    while (received := _receive_order(channel)) is not None:
        order, descriptor = received
        try:
            answer = _carried_out(order, descriptor, disk)
        finally:
            os.close(descriptor)
        encoded = json.dumps(answer).encode()
        channel.sendall(struct.pack("!I", len(encoded)) + encoded)


def main() -> None:
    """The process: its standard input is the socket. Ctrl+C is the worker's business.

    With ``URGENT`` as its last argument it has the urgency of any process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    urgent = sys.argv[-1] == URGENT
    if not urgent:
        _give_way()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as channel, suppress(ConnectionError):
        serve(channel, LeashedDisk(channel, 1.0 if urgent else SHARE))


def _give_way() -> None:
    """Take only the time that nobody else wants.

    Being nice is not enough on Linux: the threads of a step wait for the one that was not let in at once, which made
    steps half as long again on two cores. An idle process is put out as soon as somebody else can run.
    """
    os.nice(LEAST_URGENT)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a sandbox may forbid it: then it is only nice
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _carried_out(order: Order, descriptor: int, disk: Disk) -> Mapping[str, object]:
    try:
        memory = attached(descriptor, order.memory_bytes)
        blobs = {name: memory[offset : offset + size] for name, (offset, size) in order.places.items()}
        store = CheckpointStore(disk, order.root, order.keep, spared=order.spared)
        entry = store.write(order.step, order.files, blobs, order.meta)
    except P2PTrainError as problem:
        return {"error": type(problem).__name__, "message": problem.message, "remedy": problem.remedy}
    return {
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "digest": entry.digest,
        "files": entry.files,
    }


def _receive_order(channel: socket.socket) -> tuple[Order, int] | None:
    """The next order with its descriptor; None where the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, _HEAD.size, 1)
    if not head:
        return None
    json_bytes, raw_bytes = _HEAD.unpack(head + _read(channel, _HEAD.size - len(head)))
    said: dict[str, Any] = json.loads(_read(channel, json_bytes))
    raw = memoryview(_read(channel, raw_bytes))
    files, start = [], 0
    for name, said_parts in said["files"]:
        parts: list[bytes | BlobRange] = []
        for part in said_parts:
            if isinstance(part, int):
                parts.append(bytes(raw[start : start + part]))
                start += part
            else:
                parts.append(BlobRange(*part))
        files.append(FilePlan(name, tuple(parts)))
    places = {name: (offset, size) for name, (offset, size) in said["places"].items()}
    root, numbers = Path(said["root"]), (said["keep"], frozenset(said["spared"]), said["step"])
    return Order(root, *numbers, said["meta"], files, places, said["memory_bytes"]), descriptors[0]


def _read(channel: socket.socket, size_bytes: int) -> bytes:
    """Raises ``ConnectionError`` where the other end closes before."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = channel.recv(min(size_bytes - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other end closed")
        data += piece
    return bytes(data)
