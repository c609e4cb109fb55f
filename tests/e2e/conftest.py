"""Real processes, as a person starts them, on free ports of the loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.core.errors import P2PTrainError
from wire.client import SeedClient
from wire.records import ServingInfo
from wire.transport import TcpNetwork

DEADLINE_S = 120.0
ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "job.steps": 40,
    "model.hidden_size": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.intermediate_size": 64,
    "data.limit_bytes": 300_000,
    "data.sequence_tokens": 32,
    "batch.micro_batches": 8,
    "batch.micro_batch_sequences": 2,
    "optimizer.warmup_steps": 5,
    "validation.every": 20,
    "validation.batches": 4,
    "checkpoint.every": 10,
    "device.threads": 1,
}
"""A model that a step takes milliseconds of."""


class Process:
    """One running ``p2ptrain``, and every line it said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.out: list[str] = []  # those of standard output
        self._news = asyncio.Condition()
        self._ended = 0  # of its two streams
        readers = ((process.stdout, self.out), (process.stderr, list[str]()))
        self._readers = [asyncio.create_task(self._read(*reader)) for reader in readers]

    async def _read(self, stream: asyncio.StreamReader | None, kept: list[str]) -> None:
        assert stream is not None
        while line := await stream.readline():
            async with self._news:
                kept.append(line.decode(errors="replace").rstrip())
                self.lines.append(kept[-1])
                self._news.notify_all()
        self._ended += 1
        async with self._news:
            self._news.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, pattern: str) -> re.Match[str]:
        """The first line that matches, as soon as it is there."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        try:
            async with asyncio.timeout(DEADLINE_S), self._news:
                while (match := found()) is None:
                    assert self._ended < 2, f"it ended without {pattern!r}:\n{self.text}"
                    await self._news.wait()
                return match
        except TimeoutError:
            raise AssertionError(f"no line like {pattern!r} in:\n{self.text}") from None

    async def end(self) -> int:
        """The exit code, once the process ended by itself and all it said was read."""
        async with asyncio.timeout(DEADLINE_S):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
        return code

    async def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return await self.end()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.end()


class Machine:
    """Where processes are started: one state directory, one environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[Process] = []
        self.port = 0

    @staticmethod
    def settings(**changes: Any) -> list[str]:
        """``--set`` arguments: ``SMALL`` with changes, written ``job__steps=10``."""
        values = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
        return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]

    async def start(self, *arguments: str, network: str = "", **environment: str) -> Process:
        """Start ``p2ptrain`` with arguments; it is killed at the end of the test if it still runs.

        Args:
            network: name of the network namespace that it lives in; empty: this one.
        """
        process = await asyncio.create_subprocess_exec(
            *(["ip", "netns", "exec", network] if network else []),
            sys.executable,
            "-m",
            "p2ptrain",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.root,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        )
        self.processes.append(Process(process))
        return self.processes[-1]

    async def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Exit code and output of a command that ends by itself."""
        process = await self.start(*arguments, **environment)
        return await process.end(), process.text

    async def seed(self, *arguments: str) -> Process:
        """A seed on a free port, or, the second time, on the same one."""
        where = ["--port", str(self.port), "--state", str(self.root), "--json"]
        process = await self.start("seed", *where, *arguments)
        ready = await process.until(r'"event": "ready"')
        self.port = int(json.loads(ready.string)["port"])
        return process

    async def join(self, *arguments: str) -> Process:
        return await self.start("join", f"127.0.0.1:{self.port}", "--state", str(self.root), *arguments)

    def said(self) -> str:
        """Everything that every process said, for the message of a failed test."""
        return "\n\n".join(process.text for process in self.processes)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        client = await SeedClient.connect(TcpNetwork(), "127.0.0.1", self.port, name="test")
        try:
            return await client.request(method, params)
        finally:
            await client.close()

    async def job_until(self, fits: Callable[[dict[str, Any]], bool], job: str = "") -> dict[str, Any]:
        """A job's record as soon as it fits: that of ``job``, or of the only one."""
        last: dict[str, Any] = {}
        client = await SeedClient.connect(TcpNetwork(), "127.0.0.1", self.port, name="test")
        try:
            async with asyncio.timeout(DEADLINE_S):
                await client.request("subscribe")
                async for update in client.updates():
                    for item in update.items if update.topic == "jobs" else []:
                        if job and item["id"] != job:
                            continue
                        last = item
                        if fits(item):
                            return item
                        assert item["state"] not in ("done", "failed", "cancelled"), (item, self.said())
        except TimeoutError:
            raise AssertionError(f"the job never got there: {last}\n{self.said()}") from None
        finally:
            await client.close()
        raise AssertionError("the updates ended")

    async def served_until(self, fits: Callable[[list[ServingInfo]], bool]) -> list[ServingInfo]:
        """What is served, as soon as it fits."""
        known: dict[str, ServingInfo] = {}
        client = await SeedClient.connect(TcpNetwork(), "127.0.0.1", self.port, name="test")
        try:
            async with asyncio.timeout(DEADLINE_S):
                async for records in client.news():
                    known |= {info.id: info for info in records if isinstance(info, ServingInfo)}
                    if fits(list(known.values())):
                        return list(known.values())
        except (TimeoutError, P2PTrainError) as error:
            raise AssertionError(f"{known}\n{self.said()}") from error
        finally:
            await client.close()
        raise AssertionError("the updates ended")


async def gone(processes: list[psutil.Process]) -> bool:
    """Whether all end by themselves."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    return not alive


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process needs to load the backend as if this tree were installed."""
    place = tmp_path_factory.mktemp("installed")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    installed = place / "p2ptrain_tested-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: p2ptrain-tested\nVersion: 0\n")
    lines = "\n".join(f"{name} = {target}" for name, target in points.items())
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{lines}\n")
    paths = [str(ROOT), str(place), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.processes:
        await process.kill()
