"""Runs benchmarks: starts members as processes, sends all of them the same order at once, and samples contenders in
turn.

A member (``member``) reads one line of JSON per order from its standard input, and answers with one on its standard
output.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.cluster.console import Console, run_stoppable
from p2ptrain.cluster.local_cluster import PeerProcess
from p2ptrain.core.errors import DeadlineExceeded, JobFailed, ResourceError, UserError
from p2ptrain.core.threads import OWN_CORES, SHARED_CORES
from p2ptrain.lab.bench.report import BenchReport, Case
from roles.gauges import free_memory_bytes

ORDER_S = 60.0
"""Time limit of an order, besides the time for its bytes: on a busy machine a process may wait for its turn."""
MEMBER_BYTES, PLAIN_BYTES = 400 << 20, 80 << 20
"""Resident memory of a member that has loaded torch, before it holds any tensor; and of one without torch."""

Answer = dict[str, Any]
N = TypeVar("N", int, float)
Sample = Callable[[str], Awaitable[Sequence[float]]]
"""Has a contender work; returns the seconds of one or more samples."""


@dataclass(slots=True)
class Bench:
    """What every benchmark receives. ``root``: temporary directory of the run."""

    console: Console
    root: Path

    @asynccontextmanager
    async def members(self, count: int, *, threads: int = 1) -> AsyncIterator[Members]:
        """Start ``count`` members with ``threads`` CPU threads each; they end with the block.

        Raises ``JobFailed``, ``DeadlineExceeded``, ``StorageError``.
        """
        self.console.progress(f"starting {count} member{'s' * (count != 1)}")
        children: list[PeerProcess] = []
        try:
            for rank in range(count):
                arguments = ["bench", "member", str(rank), str(count)]
                name = f"member {rank}"
                log = self.root / f"{name}-{len(os.listdir(self.root))}.log"
                environment = _environment(threads) | (SHARED_CORES if count > 1 else OWN_CORES)
                children.append(await PeerProcess.start(name, arguments, log, listen=True, environment=environment))
            yield Members(children)
        finally:
            for child in children:
                child.ask_to_leave()
            # A member has nothing to save, so it leaves at once.
            await asyncio.gather(*(child.wait_or_kill(0.4) for child in children))

    async def interleave(
        self, report: BenchReport, case: Case, sample: Sample, *, rounds: int, budget_s: float = 0.0
    ) -> None:
        """Sample all contenders in rounds, but those that have samples. Each round begins with another contender; the
        first round does not count.

        Args:
            rounds: 0: as many as fit into the budget, from 5 to 60.
        """
        names = [name for name, contender in case.contenders.items() if not contender.seconds]
        began = time.monotonic()
        for name in names:
            await sample(name)
        round_s = time.monotonic() - began
        rounds = rounds or max(5, min(60, int(budget_s / max(round_s, 1e-9)) - 1))
        report.cases.append(case)
        for number in range(rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                case.contenders[name].seconds += await sample(name)
            first = case.contenders[names[0]]
            rate = report.rate(case.amount / first.median_s) if first.seconds else "no"
            self.console.progress(f"{case.label}: round {number + 1} of {rounds}, {first.title} {rate} {report.unit}/s")


async def conduct(report: BenchReport, work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    """Do the work, which fills the report. Raises ``P2PTrainError``.

    After Ctrl+C ``report.complete`` is False. After a failure the run's directory is kept.
    """
    root = Path(tempfile.mkdtemp(prefix="p2ptrain-bench-"))

    async def all_of_it(console: Console) -> None:
        await work(Bench(console, root))
        report.complete = True

    await run_stoppable(all_of_it)
    await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


class Members:
    """All member processes of one benchmark."""

    def __init__(self, children: Sequence[PeerProcess]) -> None:
        self._children = children

    def __len__(self) -> int:
        return len(self._children)

    async def all(self, do: str, *, seconds: float = 0.0, **arguments: Any) -> list[Answer]:
        """Send all members an order with ``arguments``; return their answers.

        Args:
            seconds: expected time of the order.

        Raises:
            JobFailed: a member failed or is gone.
            DeadlineExceeded: a member did not answer.
        """
        order, limit_s = {"do": do, **arguments}, ORDER_S + 20 * seconds
        try:
            async with asyncio.timeout(limit_s):
                return list(await asyncio.gather(*(self._ask(child, order) for child in self._children)))
        except TimeoutError:
            raise DeadlineExceeded(f"the members did not {do} within {limit_s:.0f} s") from None

    @staticmethod
    async def _ask(child: PeerProcess, order: dict[str, Any]) -> Answer:
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        try:
            child.process.stdin.write(json.dumps(order).encode() + b"\n")
            await child.process.stdin.drain()
            line = await child.process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            await child.wait_or_kill(1.0)
            raise child.failure()
        answer: Answer = json.loads(line)
        if "failed" in answer:
            raise JobFailed(f"{child.name}: {answer['failed']}", remedy=answer["remedy"])
        return answer


def _environment(threads: int) -> dict[str, str]:
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loopback = next((name for name in names if name.startswith("lo")), "")
    chosen = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if loopback:  # Gloo's default is the interface of the host's name
        chosen["GLOO_SOCKET_IFNAME"] = loopback
    return os.environ | chosen


# ------------------------------------------------------------------------------------------ checks of the options


def numbers_of(text: str, option: str, kind: type[N], least: int, most: int) -> list[N]:
    """Read a list of numbers, with commas between; sorted, each once. Raises ``UserError``."""
    found = set[N]()
    with suppress(ValueError):
        found = {kind(part) for part in text.split(",")}
    if not found or not all(least <= number <= most for number in found):
        what = f"a list of {'whole ' * (kind is int)}numbers, {least} to {most}"
        raise UserError(f"{option} {text!r} is not {what}", remedy=f"such as {option} {least},{most}")
    return sorted(found)


def check_fits(what: str, need_bytes: int) -> None:
    """Raises ``ResourceError`` if so much memory is not free."""
    available_bytes = free_memory_bytes("cpu")
    if need_bytes > available_bytes:
        text = f"{what} need {need_bytes / 2**30:.1f} GiB, {available_bytes / 2**30:.1f} GiB are free"
        raise ResourceError(text, remedy="choose smaller numbers: see --help")


def repeats_for(operation_s: float) -> int:
    """Repetitions of an operation in a sample of at least 5 ms: the clock and the barrier cost some µs."""
    return max(1, min(32, math.ceil(0.005 / max(operation_s, 1e-9))))
