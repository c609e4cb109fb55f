"""Measurements of a worker for people, cheap enough to be sent with every heartbeat."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil

from p2ptrain.core.container import memory_left_bytes

SMOOTHING_S = 3.0
"""Time constant of averaged rates. A step may take longer than the time between two heartbeats."""


class Rate:
    """Units per second, over the last ``WINDOW_S``."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._events: deque[tuple[float, float]] = deque()

    def add(self, amount: float, now: float) -> None:
        self._prune(now)
        self._events.append((now, amount))

    def per_s(self, now: float) -> float:
        self._prune(now)
        if not self._events:
            return 0.0
        return sum(amount for _, amount in self._events) / max(now - self._events[0][0], 1.0)

    def _prune(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self.WINDOW_S:
            self._events.popleft()


class Gauges:
    """Rates from running totals, memory, and the GPU's load. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._process = psutil.Process()
        self._totals: dict[str, tuple[float, float, float]] = {}  # total, time, smoothed rate
        self._gpu = _gpu_reader()

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
        values = {
            "memory_bytes": float(self._process.memory_info().rss),
            "memory_total_bytes": float(psutil.virtual_memory().total),
        }
        if self._gpu is not None:
            load = self._gpu()
            if load is not None:
                values["gpu_load"] = load
        return values


def _first_gpu() -> tuple[Any, Any] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None


def gpu_name() -> str:
    found = _first_gpu()
    if found is None:
        return ""
    library, handle = found
    name = library.nvmlDeviceGetName(handle)
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def free_memory_bytes(device: str) -> int:
    """Memory that can still be allocated for a model: on the first GPU, or else of the machine or container.

    ``device``: as in ``compute.device.pick_device``; empty or ``auto``: the GPU if there is one.
    """
    found = _first_gpu() if device.partition(":")[0] in ("", "auto", "cuda") else None
    if found is not None:
        library, handle = found
        with contextlib.suppress(library.NVMLError):
            return int(library.nvmlDeviceGetMemoryInfo(handle).free)
    available, left = int(psutil.virtual_memory().available), memory_left_bytes()
    return available if left is None else min(available, left)


def _gpu_reader() -> Callable[[], float | None] | None:
    found = _first_gpu()
    if found is None:
        return None
    library, handle = found

    def read() -> float | None:
        with contextlib.suppress(library.NVMLError):
            return float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        return None

    return read
