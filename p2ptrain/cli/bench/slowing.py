"""One process made slower by a factor: it is stopped and goes on again, many times a second.

In a process of its own, which watches its standard input: it ends, and the slowed one runs on at full speed, when the
command that started it closes that or is killed. How punctual it is woken does not matter: what a stretch was too long,
the next one makes up for, so that in sum the slowed one runs one part of ``factor``.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil
import typer

from p2ptrain.cli.bench.trial import Scene
from p2ptrain.cli.children import Child, end_all

PERIOD_S = 0.02
"""Of running and standing still: short beside a micro-batch, long beside what stopping a process costs."""
WORD_S = 60.0  # for its start, and its last word, on a busy machine


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


class Slower:
    """The process that slows ``child`` down. Made by ``slowing``.

    Attributes:
        duty: how long the child ran and stood still, known when this one has ended.
    """

    def __init__(self, child: Child, process: Child, duty: DutyCycle) -> None:
        self.duty = duty
        self._child, self._process = child, process

    async def begin(self) -> None:
        """From now on. Raises ``JobFailed``."""
        await self._line()
        assert self._process.process.stdin is not None
        self._process.process.stdin.write(b"begin\n")

    async def end(self) -> None:
        """The child runs at its own speed. Raises ``JobFailed``."""
        self._process.ask_to_leave()
        told = json.loads(await self._line())
        self.duty.ran_s, self.duty.stood_s = told["ran_s"], told["stood_s"]

    async def _line(self) -> bytes:
        assert self._process.process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(WORD_S):
                line = await self._process.process.stdout.readline()
        if not line:
            raise self._process.failed(f"what slows {self._child.name} down ended, or is silent")
        return line


@asynccontextmanager
async def slowing(child: Child, factor: float, scene: Scene) -> AsyncIterator[Slower]:
    """What can slow a peer down while the block runs. Raises ``StorageError``."""
    arguments = ["bench", "slow", str(child.process.pid), str(factor)]
    process = await Child.start("slower", arguments, scene.root / "slower.log", listen=True)
    scene.on_stop.append(process.ask_to_leave)  # first of all, for the peer itself could not leave
    try:
        yield Slower(child, process, DutyCycle(factor))
    finally:
        scene.on_stop.remove(process.ask_to_leave)
        await end_all([process])


def slow(pid: int, factor: float) -> None:
    """From the first word on standard input until its end, or that of the process.

    Says when it is ready, and in the end how long the process ran and stood still, as JSON.
    """
    duty = DutyCycle(factor)
    process = psutil.Process(pid)
    typer.echo("ready")
    over = not os.read(0, 64)
    try:
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
        with suppress(psutil.NoSuchProcess):
            process.resume()
    typer.echo(json.dumps({"ran_s": duty.ran_s, "stood_s": duty.stood_s}))


def _closed_within(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])
