"""Where and when a report was made, for whoever compares it with another one."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import p2ptrain

LITTLE_LOAD = 0.3
"""Of a system at rest: processes that run or want to, on average."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Facts at the head of every report. ``torch`` is empty where no member loaded it."""

    date: str
    command: str
    version: str
    cores: int
    processor: str
    memory_gib: float
    system: str
    python: str
    loop: str
    torch: str = ""

    @property
    def machine(self) -> str:
        """One line for people."""
        torch = f" · torch {self.torch}" if self.torch else ""
        return f"{self.cores} cores · {self.system} · Python {self.python} ({self.loop}){torch}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def origin() -> Origin:
    """This machine, now, and the command line that was given."""
    return Origin(
        date=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        command=shlex.join(["p2ptrain", *sys.argv[1:]]),
        version=p2ptrain.__version__,
        cores=os.cpu_count() or 1,
        processor=_processor(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        loop=_loop(),
    )


def circumstances() -> list[str]:
    """What makes a measurement on this machine, now, less than it could be; for people."""
    notes = []
    cores, physical = os.cpu_count() or 1, psutil.cpu_count(logical=False) or 0
    if 0 < physical < cores:
        notes.append(f"the {cores} cores are {physical}, with several hardware threads each")
    if (load := psutil.getloadavg()[0]) > LITTLE_LOAD:
        notes.append(f"other programs ran before it began (load {load:.1f} on {cores} cores): the figures are noisy")
    if hasattr(os, "SCHED_IDLE") and os.sched_getscheduler(0) == os.SCHED_IDLE:
        notes.append("this ran with idle priority, and so did the training: all other programs went first")
    return notes


def available_bytes() -> int:
    """Memory that may be allocated: the machine's, or what a container's limit (cgroup v2) leaves."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or "max": no limit
        return available
    return min(available, left)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _loop() -> str:
    try:
        return f"uvloop {version('uvloop')}"
    except PackageNotFoundError:
        return "asyncio"
