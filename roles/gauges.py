"""Measurements of a worker for people, cheap enough to be sent with every heartbeat."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil

from p2ptrain.core.footprint import memory_left_bytes
from wire.messages import MAX_GPUS, GpuInfo

GPUS_S = 1.0
"""How long what the GPUs' sensors said is used. Some take milliseconds to answer."""
NAME_CHARS = 64
SMOOTHING_S = 3.0
"""Time constant of averaged rates. A step may take longer than the time between two heartbeats."""


class Rate:
    """Units per second, over the last ``WINDOW_S``."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._events: deque[tuple[float, float]] = deque()

    def add(self, amount: float, now: float) -> None:
        self._events.append((now, amount))
        self._prune(now)

    def per_s(self, now: float) -> float:
        self._prune(now)
        if not self._events:
            return 0.0
        return sum(amount for _, amount in self._events) / max(now - self._events[0][0], 1.0)

    def _prune(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self.WINDOW_S:
            self._events.popleft()


class Gauges:
    """Rates from running totals, memory, and the GPUs. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._process = psutil.Process()
        self._totals: dict[str, tuple[float, float, float]] = {}  # total, time, smoothed rate
        self._read_gpus = _gpu_reader()
        self._gpus: tuple[float, list[GpuInfo]] = (-math.inf, [])

    def rate(self, name: str, total: float) -> float:
        """Units per second by which ``total`` grows: an exponential average over the calls with this name."""
        now = self._now()
        before, then, smoothed = self._totals.get(name, (total, now, 0.0))
        if now > then:
            latest = max(0.0, total - before) / (now - then)
            smoothed += (1 - math.exp((then - now) / SMOOTHING_S)) * (latest - smoothed)
        self._totals[name] = (total, now, smoothed)
        return smoothed

    def machine(self) -> dict[str, float]:
        return {
            "memory_bytes": float(self._process.memory_info().rss),
            "memory_total_bytes": float(psutil.virtual_memory().total),
        }

    def gpus(self) -> list[GpuInfo]:
        """All GPUs of this machine, at most ``GPUS_S`` old."""
        read_at, known = self._gpus
        if self._read_gpus is not None and self._now() - read_at >= GPUS_S:
            self._gpus = self._now(), (known := self._read_gpus())
        return known


def _nvml() -> tuple[Any, list[Any]] | None:
    """NVIDIA's library, and a handle of each GPU; None without either."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        count = min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except pynvml.NVMLError:
        return None
    return (pynvml, handles) if handles else None


def _used_gpu(device: str) -> tuple[Any, Any] | None:
    """NVIDIA's library, and its handle of torch's ``device``; None without one. torch counts the GPUs that
    CUDA_VISIBLE_DEVICES names, by their numbers or (begun) identifiers, and the library counts all."""
    if (found := _nvml()) is None:
        return None
    library, handles = found
    index, visible = device.partition(":")[2], os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(len(handles))] if visible is None else visible.replace(" ", "").split(",")
    with contextlib.suppress(library.NVMLError, IndexError):
        if (name := names[int(index) if index.isdecimal() else 0]).isdecimal():
            return library, handles[int(name)]
        whole = [handle for handle in handles if name and library.nvmlDeviceGetUUID(handle).startswith(name)]
        return library, whole[0] if whole else library.nvmlDeviceGetHandleByUUID(name)  # of a part of a GPU (MIG)
    return None


def gpu_name() -> str:
    found = _used_gpu("cuda")
    return _name_of(*found) if found is not None else ""


def free_memory_bytes(device: str) -> int:
    """Memory that can still be allocated for a model: on the GPU, or else of the machine or container.

    ``device``: as in ``compute.device.pick_device``; empty or ``auto``: the first GPU if there is one.
    """
    found = _used_gpu(device) if device.partition(":")[0] in ("", "auto", "cuda") else None
    if found is not None:
        library, handle = found
        with contextlib.suppress(library.NVMLError):
            return int(library.nvmlDeviceGetMemoryInfo(handle).free)
    return memory_left_bytes(int(psutil.virtual_memory().available))


def _gpu_reader() -> Callable[[], list[GpuInfo]] | None:
    found = _nvml()
    if found is None:
        return None
    library, handles = found
    names = [_name_of(library, handle) for handle in handles]

    def read_one(index: int, handle: Any) -> GpuInfo:
        def ask(sensor: str, *more: Any) -> Any:
            """What it says; None if this GPU lacks it."""
            with contextlib.suppress(library.NVMLError):
                return getattr(library, f"nvmlDeviceGet{sensor}")(handle, *more)
            return None

        # As nvidia-smi, version 2 does not count what the driver reserves as used. Old drivers have only the first.
        rates, memory = ask("UtilizationRates"), ask("MemoryInfo", library.nvmlMemory_v2) or ask("MemoryInfo")
        heat, power_mw = ask("Temperature", library.NVML_TEMPERATURE_GPU), ask("PowerUsage")
        return GpuInfo(
            index,
            names[index],
            None if rates is None else min(float(rates.gpu) / 100, 1.0),
            0 if memory is None else int(memory.used),
            0 if memory is None else int(memory.total),
            None if heat is None else float(heat),
            None if power_mw is None else power_mw / 1e3,
        )

    return lambda: [read_one(index, handle) for index, handle in enumerate(handles)]


def _name_of(library: Any, handle: Any) -> str:
    with contextlib.suppress(library.NVMLError):
        name = library.nvmlDeviceGetName(handle)
        return (name.decode(errors="replace") if isinstance(name, bytes) else str(name))[:NAME_CHARS]
    return ""


FAR_OFF = 4.0
"""A measurement counts as at most this multiple of the average, because outliers do not predict."""
SHORTEST_S = 1e-6


class MovingAverage:
    """Moving average of a time in seconds. ``prior_s`` is its value before the first measurement."""

    def __init__(self, prior_s: float = 0.0, *, weight: float = 0.15) -> None:
        self.seconds = prior_s
        self.count = 0
        self._weight = weight

    def add(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        if self.count:
            seconds = min(seconds, FAR_OFF * self.seconds + SHORTEST_S)
        self.count += 1
        self.seconds += max(self._weight, 1 / self.count) * (seconds - self.seconds)
