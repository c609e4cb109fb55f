"""The peers of a benchmark, seen from the command: started, told what to do, and ended with it.

Each is a process of its own (``member``). It gets one line of JSON per order on its standard input and answers with one
on its standard output. All get the same order at the same time, and the next one when all have answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from p2ptrain.cli.local_cluster import Child
from p2ptrain.core.errors import DeadlineExceeded, JobFailed

START_S = 60.0  # a first start of torch, from a cold disk
LEAVE_S = 0.4  # a member has nothing to save: it leaves at once, whatever it is doing
ORDER_S = 60.0
"""For an order beside the time that its bytes take: a process may wait for its turn on a busy machine."""

Answer = dict[str, Any]


class Interrupted(Exception):
    """The person asked to stop; what was measured so far counts."""


class Members:
    """All peers of one benchmark. Made by ``started``."""

    def __init__(self, children: Sequence[Child], stop: asyncio.Event) -> None:
        self._children = children
        self._stop = stop

    def __len__(self) -> int:
        return len(self._children)

    async def all(
        self, do: str, *, each: Sequence[dict[str, Any]] | None = None, seconds: float = 0.0, **arguments: Any
    ) -> list[Answer]:
        """Tell all to ``do`` something with ``arguments``, and what each one answered.

        Args:
            each: further arguments of each member.
            seconds: what the order takes by itself, about.

        Raises:
            Interrupted: the person pressed Ctrl+C.
            JobFailed: a member could not, or is gone; says why.
            DeadlineExceeded: one did not answer.
        """
        orders = [{"do": do, **arguments, **(each[rank] if each else {})} for rank in range(len(self))]
        asking = asyncio.gather(*(self._ask(rank, order) for rank, order in enumerate(orders)))
        stopping = asyncio.ensure_future(self._stop.wait())
        waited: list[asyncio.Future[Any]] = [asking, stopping]
        try:
            async with asyncio.timeout(ORDER_S + 20 * seconds):
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise DeadlineExceeded(f"the members did not {do!r} within {ORDER_S + 20 * seconds:.0f} s") from None
        finally:
            stopping.cancel()
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        if self._stop.is_set():
            raise Interrupted
        return asking.result()

    async def _ask(self, rank: int, order: dict[str, Any]) -> Answer:
        child = self._children[rank]
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        try:
            child.process.stdin.write(json.dumps(order).encode() + b"\n")
            await child.process.stdin.drain()
            line = await child.process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            await child.ended(LEAVE_S)
            raise child.failed(f"{child.name} ended")
        answer: Answer = json.loads(line)
        if "failed" in answer:
            raise JobFailed(f"{child.name}: {answer['failed']}", remedy=answer["remedy"])
        return answer


@asynccontextmanager
async def started(count: int, stop: asyncio.Event, *, threads: int = 1) -> AsyncIterator[Members]:
    """``count`` members, ended with the block: by closing their input, and by force where that does not help.

    Args:
        threads: of each member's CPU kernels.

    Raises:
        Interrupted, JobFailed, DeadlineExceeded, StorageError: see ``Members.all`` and ``Child.start``.
    """
    directory = Path(tempfile.mkdtemp(prefix="p2ptrain-bench-"))
    children: list[Child] = []
    well = False
    try:
        for rank in range(count):
            arguments = ["bench", "member", str(rank), str(count)]
            log = directory / f"member-{rank}.log"
            environment = _environment(threads)
            children.append(await Child.start(f"member {rank}", arguments, log, listen=True, environment=environment))
        members = Members(children, stop)
        await members.all("start", seconds=START_S / 20)
        yield members
        well = True
    except Interrupted:
        well = True
        raise
    finally:
        for child in children:
            child.ask_to_leave()
        await asyncio.gather(*(child.ended(LEAVE_S) for child in children))
        if well:  # else an error names the log
            shutil.rmtree(directory, ignore_errors=True)


def _environment(threads: int) -> dict[str, str]:
    """What the libraries of a member read: equal for all contenders, and nobody burns a core while it waits."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    loopback = next((name for name in names if name.startswith("lo")), "")
    chosen = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    if loopback:  # by itself Gloo takes the interface of the host's name
        chosen["GLOO_SOCKET_IFNAME"] = loopback
    return os.environ | chosen
