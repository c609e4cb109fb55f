"""Compute devices: their selection, free memory, thread settings and measured speed."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from p2ptrain.core.errors import ConfigError, ResourceError, UserError
from p2ptrain.core.footprint import memory_left_bytes
from p2ptrain.core.texts import human_bytes


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """A torch device. ``threads``: configured number of threads of CPU kernels; 0: not configured."""

    torch_device: torch.device
    label: str
    threads: int = 0

    @property
    def kind(self) -> str:
        """``"cpu"``, ``"cuda"`` or ``"mps"``."""
        return self.torch_device.type

    def wait(self) -> None:
        """Wait until it has computed what it was given."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def enter_thread(self) -> None:
        """Let the calling thread, which is new, compute on it."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch_device)


def pick_device(kind: str, threads: int = 0) -> ComputeDevice:
    """Choose the device to compute on, and set torch's thread count for the whole process.

    Args:
        kind: ``"auto"`` (CUDA, then MPS, then the CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
        threads: number of threads of CPU kernels; 0 leaves torch's default (every core).

    Raises:
        ConfigError: ``kind`` is invalid.
        UserError: this machine does not have the device.
    """
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
        return ComputeDevice(torch.device("mps"), f"mps {platform.machine()}")
    count = torch.get_num_threads()
    return ComputeDevice(torch.device("cpu"), f"cpu ({count} thread{'s' * (count != 1)})", threads)


def gpus(kind: str) -> int:
    """GPUs that processes of a worker can have; 0 if it computes on CPUs. ``kind``: as in ``pick_device``, or empty."""
    return torch.cuda.device_count() if kind in ("", "auto", "cuda") and torch.cuda.is_available() else 0


def _cuda(index: int, kind: str) -> ComputeDevice:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        have = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device that this torch can use"
        remedy = (
            f"use cuda:0 to cuda:{count - 1}" if count else "use auto or cpu, or install torch with CUDA and its driver"
        )
        raise UserError(f"device {kind!r} was asked for and this machine has {have}", remedy=remedy)
    return ComputeDevice(torch.device("cuda", index), f"cuda:{index} {torch.cuda.get_device_name(index)}")


def share_cores(device: ComputeDevice, workers: int) -> None:
    """Use 1/``workers`` of the machine's cores, unless the number of threads is configured.

    Twice as many threads as cores are far slower than half as many, because they wait for one another.
    """
    if device.kind == "cpu" and not device.threads:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, workers)))


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat numbers below 1e-38 as zero on the calling thread, and on kernel threads that start inside the block.

    The gradients of a model with confident predictions have many such numbers. A CPU takes a hundred times as long for
    each, which slows training down by half. All members must flush them, or they differ in the last bit.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def constant_arithmetic(threads: int) -> Iterator[None]:
    """Compute with ``threads`` threads, and with deterministic algorithms only. Raises ``ConfigError``: an operation of
    the model has no deterministic algorithm on this device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS does not sum in a fixed order
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(2)  # an operation without a deterministic algorithm is an error
    # Filling is a debugging aid of torch's, and costs a pass over all memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ConfigError(
            f"job.exact = true, but this model on this device is not deterministic: {str(error).splitlines()[0]}",
            remedy="use device.kind = 'cpu', or job.exact = false",
        ) from error
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Make matrix products of fp32 inside the block as ``device.precision`` says: with "tf32" CUDA makes them in TF32,
    which has 11 significant bits."""
    if precision != "tf32":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


SMALLER = "lower batch.micro_batch_sequences and raise batch.micro_batches, or choose a smaller [model]"
"""A remedy for training that does not fit into memory."""


def check_memory(need_bytes: int, device: ComputeDevice, what: str, remedy: str) -> None:
    """Raise ``ResourceError``, which names both numbers, if ``need_bytes`` exceed the free memory. ``what``:
    description of the load, such as ``"training 124 M parameters"``; ``remedy``: the settings that make it smaller."""
    available = available_bytes(device)
    if need_bytes > available:
        raise ResourceError(
            f"{what} needs {human_bytes(need_bytes)} of memory, and {device.label} has {human_bytes(available)} free",
            remedy=f"{remedy}, or close other programs",
        )


def check_limit(need_bytes: int, limit_bytes: int, what: str, remedy: str) -> None:
    """Raise ``ResourceError`` if ``need_bytes`` exceed the operator's limit; 0: there is none."""
    if 0 < limit_bytes < need_bytes:
        text = f"{what} needs about {human_bytes(need_bytes)}, but this worker offers {human_bytes(limit_bytes)}"
        raise ResourceError(text, remedy=remedy)


def available_bytes(device: ComputeDevice) -> int:
    """Free memory of a GPU; else of the machine, or of the container (cgroup v2) if that is less."""
    if device.kind == "cuda":
        return int(torch.cuda.mem_get_info(device.torch_device)[0])
    return memory_left_bytes(int(psutil.virtual_memory().available))


HOST = ComputeDevice(torch.device("cpu"), f"this machine ({os.cpu_count()} cores)")
"""The host's memory, for checks that do not depend on the compute device."""


@contextmanager
def translate_out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Translate errors of torch that it has no memory for ``what`` to ``ResourceError``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_plain = not isinstance(error, torch.OutOfMemoryError | MemoryError)
        if is_plain and "can't allocate memory" not in str(error):  # the error of a CPU
            raise
        raise ResourceError(f"too little memory for {what}: {str(error).splitlines()[0]}", remedy=remedy) from error


# --------------------------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """Times the work of a device without waiting for it."""

    device: torch.device

    def mark(self) -> Any:
        """The moment at which the work that was started before is done: a CUDA event, else the host's seconds."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between_s(self, first: Any, second: Any) -> float:
        """Seconds between two marks; call ``ComputeDevice.wait`` before."""
        return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3)


def compute_flops(kind: str, threads: int = 0, *, dtype: torch.dtype = torch.float32, rows: int = 0) -> float:
    """Peak FLOP/s (multiplications and additions) of a product of matrices of ``rows`` rows, which bounds training; 0:
    as many as keep most devices busy.

    On a CPU this is one thread's rate, by its CPU time, times the number of threads. A measurement with all threads and
    by the clock would depend on other processes. Raises ``UserError``: this machine does not have the device;
    ``RuntimeError``: torch's, for too little memory."""
    device = pick_device(kind, threads).torch_device
    on_cpu, threads = device.type == "cpu", torch.get_num_threads()
    rows = rows or (384 if on_cpu else 4096)  # the width of a small model; what keeps an accelerator busy
    generator = torch.Generator(device).manual_seed(0)  # products of equal numbers take a GPU less power and time
    matrix = torch.randn(rows, rows, dtype=dtype, device=device, generator=generator)
    with one_thread():
        clock = time.thread_time if on_cpu else time.perf_counter
        best_s = _best_s(lambda: (matrix @ matrix)[0, 0], clock, least_s=0.1)
    return 2 * rows**3 / best_s * (threads if on_cpu else 1)


def stream_bps(kind: str, *, size_bytes: int = 256 << 20) -> float:
    """Peak bytes per second that a matrix-vector product reads, which bounds decoding. Raises as ``compute_flops``.

    ``size_bytes``: of the matrix, larger than any cache.
    """
    device = pick_device(kind).torch_device
    matrix = torch.ones(4096, size_bytes // (4 * 4096), dtype=torch.float32, device=device)
    vector = torch.ones(matrix.shape[1], dtype=torch.float32, device=device)
    return size_bytes / _best_s(lambda: (matrix @ vector)[0], time.perf_counter, least_s=0.0)


def _best_s(operate: Callable[[], Tensor], clock: Callable[[], float], *, least_s: float) -> float:
    """Shortest time of a call, in seconds of ``clock``. Measures for at least ``least_s``."""
    best_s, until_s = float("inf"), time.perf_counter() + least_s
    for number in range(200):
        began = clock()
        float(operate())  # float() waits for the device
        if number:  # the first call also starts kernels and maps pages
            best_s = min(best_s, clock() - began)
            if number >= 3 and time.perf_counter() >= until_s:
                break
    return max(best_s, 1e-9)
