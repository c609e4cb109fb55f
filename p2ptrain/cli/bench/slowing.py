"""One process made slower by a factor: it is stopped and goes on again, many times a second.

In a process of its own, which watches its standard input: it ends, and the slowed one runs on at full speed, when the
command that started it closes that or is killed. How punctual it is woken does not matter: what a stretch was too long,
the next one makes up for, so that in sum the slowed one runs one part of ``factor``.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import typer

from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.children import Child, end_all

PERIOD_S = 0.02
"""Of running and standing still: short beside a micro-batch, long beside what stopping a process costs."""


@dataclass(slots=True)
class DutyCycle:
    """How long to let it run and to have it stand still, from how long it did. Pure.

    Attributes:
        factor: how many times slower than by itself.
        ran_s, stood_s: in all.
    """

    factor: float
    period_s: float = PERIOD_S
    ran_s: float = 0.0
    stood_s: float = 0.0

    @property
    def made(self) -> float:
        """How many times slower it was in sum; 1 where it was never stopped."""
        return 1 + self.stood_s / self.ran_s if self.ran_s else 1.0

    @property
    def run_s(self) -> float:
        """The next stretch of running: longer where it stood still for too long."""
        return max(self.period_s, self.stood_s + self.period_s - self.ran_s * (self.factor - 1)) / self.factor

    @property
    def rest_s(self) -> float:
        """How long it has to stand still now, to have run one part of ``factor`` of the time."""
        return max(0.0, self.ran_s * (self.factor - 1) - self.stood_s)


@asynccontextmanager
async def slowed(child: Child, factor: float, scene: Scene) -> AsyncIterator[DutyCycle]:
    """Slow a peer down while the block runs. After it, what is given has how long the peer ran and stood still.

    Raises ``JobFailed``, ``StorageError``.
    """
    duty = DutyCycle(factor)
    arguments = ["bench", "slow", str(child.process.pid), str(factor)]
    slower = await Child.start("slower", arguments, scene.root / "slower.log", listen=True)
    scene.on_stop.append(slower.ask_to_leave)  # first of all, for the peer itself could not leave
    try:
        yield duty
    finally:
        scene.on_stop.remove(slower.ask_to_leave)
        slower.ask_to_leave()
        assert slower.process.stdout is not None
        line = await slower.process.stdout.readline()
        await end_all([slower])
    if not line:
        raise slower.failed(f"what slows {child.name} down ended")
    told = json.loads(line)
    duty.ran_s, duty.stood_s = told["ran_s"], told["stood_s"]


def slow(pid: int, factor: float) -> None:
    """Until standard input is closed, or the process is gone. Then prints how long it ran and stood still, as JSON."""
    duty = DutyCycle(factor)
    process = psutil.Process(pid)
    try:
        over = False
        while not over:
            process.resume()
            began = time.monotonic()
            over = _closed_within(duty.run_s)
            if over:
                break
            process.suspend()
            stopped = time.monotonic()
            duty.ran_s += stopped - began
            over = _closed_within(duty.rest_s)
            duty.stood_s += time.monotonic() - stopped
    except psutil.NoSuchProcess:
        pass  # its end is the command's business, which sees it, too
    finally:
        if process.is_running():
            process.resume()
    typer.echo(json.dumps({"ran_s": duty.ran_s, "stood_s": duty.stood_s}))


def _closed_within(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])
