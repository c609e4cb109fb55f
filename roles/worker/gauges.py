"""What a person wants to see of a worker, gathered cheaply enough to go out with every beat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psutil


class Gauges:
    """Rates from running totals, and the process' memory.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._process = psutil.Process()
        self._totals: dict[str, tuple[float, float]] = {}
        self._gpu = _gpu_reader()

    def rate(self, name: str, total: float) -> float:
        """Units a second that ``total`` has grown by since the last call under this name."""
        now = self._now()
        before, then = self._totals.get(name, (total, now))
        self._totals[name] = (total, now)
        return max(0.0, total - before) / (now - then) if now > then else 0.0

    def machine(self) -> dict[str, float]:
        """Memory of this process and of the machine, and the load of its GPU where there is one."""
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
    """NVIDIA's management library and the handle of the first GPU, None where there is none."""
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
    """The first NVIDIA GPU's name; empty on machines without one."""
    found = _first_gpu()
    if found is None:
        return ""
    library, handle = found
    name = library.nvmlDeviceGetName(handle)
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _gpu_reader() -> Callable[[], float | None] | None:
    """A reader of the first NVIDIA GPU's load (0 to 1), None on machines without one."""
    found = _first_gpu()
    if found is None:
        return None
    library, handle = found

    def read() -> float | None:
        with contextlib.suppress(library.NVMLError):
            return float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        return None

    return read
