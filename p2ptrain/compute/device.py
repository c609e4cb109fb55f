"""Where tensors live: found by itself or as asked, its memory checked before it is filled, its speed measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from p2ptrain.core.container import memory_left_bytes
from p2ptrain.core.errors import ConfigError, ResourceError, UserError


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device, and its name for people, such as ``"cpu (2 threads)"`` or ``"cuda:0 NVIDIA H100"``.

    Attributes:
        threads: of CPU kernels, as a person asked for; 0 where nobody did.
    """

    torch_device: torch.device
    label: str
    threads: int = 0

    @property
    def kind(self) -> str:
        """``"cpu"``, ``"cuda"`` or ``"mps"``."""
        return self.torch_device.type


def pick_device(kind: str, threads: int = 0) -> Device:
    """The device to compute on. Sets torch's thread count for the whole process.

    Args:
        kind: ``"auto"`` (CUDA, then MPS, then the CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
        threads: of CPU kernels; 0 leaves the choice to torch (every core).

    Raises:
        UserError: a device was named that this machine does not have.
    """
    if threads < 0 or threads > 1024:
        raise ConfigError(
            f"device.threads = {threads} is not a number of threads", remedy="use 0 to 1024; 0 is all cores"
        )
    if threads:
        torch.set_num_threads(threads)
    name, _, index = kind.partition(":")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and (index.isdecimal() or not index):
        return _cuda(int(index or 0), kind)
    if index or name not in ("cpu", "mps"):
        raise ConfigError(f"device.kind = {kind!r} is not a device", remedy="use auto, cpu, cuda, cuda:0, ... or mps")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("this machine has no MPS device (Apple GPU)", remedy="use auto or cpu")
        return Device(torch.device("mps"), f"mps {platform.machine()}")
    count = torch.get_num_threads()
    return Device(torch.device("cpu"), f"cpu ({count} thread{'s' * (count != 1)})", threads)


def _cuda(index: int, kind: str) -> Device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        have = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device that this torch can use"
        remedy = (
            f"use cuda:0 to cuda:{count - 1}" if count else "use auto or cpu, or install torch with CUDA and its driver"
        )
        raise UserError(f"device {kind!r} was asked for and this machine has {have}", remedy=remedy)
    return Device(torch.device("cuda", index), f"cuda:{index} {torch.cuda.get_device_name(index)}")


def share_cores(device: Device, workers: int) -> None:
    """Take this process' part of the cores that ``workers`` processes compute on, unless a person chose the threads.

    Twice as many threads as cores are far slower than half as many: they wait for one another's turn.
    """
    if device.kind == "cpu" and not device.threads:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, workers)))


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat numbers below 1e-38 as zero on the calling thread, and on the kernels' threads that it starts meanwhile.

    The gradients of a model that becomes sure of itself are full of them, and a CPU takes a hundred times as long for
    each: training slows down by half. Members that flush and members that do not would differ in the last bit.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let CPU kernels run on the calling thread alone meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_memory(need_bytes: int, device: Device, what: str) -> None:
    """Refuse a load that does not fit, before anything is allocated.

    Args:
        what: is about to be loaded, such as ``"training 124 M parameters"``.

    Raises:
        ResourceError: with both numbers.
    """
    available = available_bytes(device)
    if need_bytes > available:
        raise ResourceError(
            f"{what} needs {need_bytes / 2**30:.2f} GiB and {device.label} has {available / 2**30:.2f} GiB free",
            remedy="use a smaller model, micro-batch or corpus, close other programs, or use a larger device",
        )


def available_bytes(device: Device) -> int:
    """That may still be allocated there."""
    return int(torch.cuda.mem_get_info(device.torch_device)[0]) if device.kind == "cuda" else _host_available()


def _host_available() -> int:
    """Bytes that may be allocated: the machine's, or what a container's limit (cgroup v2) leaves."""
    available, left = int(psutil.virtual_memory().available), memory_left_bytes()
    return available if left is None else min(available, left)


HOST = Device(torch.device("cpu"), f"this machine ({os.cpu_count()} cores)")
"""The host's memory, whatever the device of the computation."""


# --------------------------------------------------------------------------------------------------------------- speed


def compute_flops(kind: str, threads: int = 0) -> float:
    """Multiplications and additions of fp32 per second in a product of square matrices, at best: what bounds training.

    On a CPU it is that of one thread, by the time that it had a core, times the threads. With all of them at once, and
    by the clock, it would depend on who else computes at that moment: of alike workers that started together on two
    cores one had twice the speed of another, and a model was cut 3 to 1 between them.

    Args:
        kind, threads: as of ``pick_device``.

    Raises:
        UserError: there is no such device. RuntimeError: too little memory, as torch says it.
    """
    device = pick_device(kind, threads).torch_device
    if device.type != "cpu":  # wide enough to fill an accelerator
        return _flops(device, 4096, time.perf_counter)
    threads = torch.get_num_threads()
    with one_thread():  # as wide as a layer of a small model
        return threads * _flops(device, 384, time.thread_time)


def _flops(device: torch.device, rows: int, clock: Callable[[], float]) -> float:
    one = torch.ones(rows, rows, dtype=torch.float32, device=device)
    return 2 * rows**3 / _best_s(lambda: (one @ one)[0, 0], clock, least_s=0.1)


def stream_bps(kind: str, *, size_bytes: int = 256 << 20) -> float:
    """Bytes of weights per second that a matrix-vector product reads, at best: what bounds the decoding of one token.

    Args:
        kind: as of ``pick_device``.
        size_bytes: of the matrix: more than any cache holds.

    Raises:
        UserError: there is no such device. RuntimeError: too little memory, as torch says it.
    """
    device = pick_device(kind).torch_device
    matrix = torch.ones(4096, size_bytes // (4 * 4096), dtype=torch.float32, device=device)
    vector = torch.ones(matrix.shape[1], dtype=torch.float32, device=device)
    return size_bytes / _best_s(lambda: (matrix @ vector)[0], time.perf_counter, least_s=0.0)


def _best_s(operate: Callable[[], Tensor], clock: Callable[[], float], *, least_s: float) -> float:
    """The shortest of some passes, for ``least_s`` at least, in seconds of ``clock``."""
    best_s, until_s = float("inf"), time.perf_counter() + least_s
    for number in range(200):
        began = clock()
        float(operate())  # which waits for the device
        if number:  # the first one pays for the start of kernels and pages
            best_s = min(best_s, clock() - began)
            if number >= 3 and time.perf_counter() >= until_s:
                break
    return max(best_s, 1e-9)
