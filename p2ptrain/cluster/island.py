"""``p2ptrain join --devices``: a worker that is several processes (``p2ptrain.compute.island``).

On one machine this process leads, and starts the others: ``p2ptrain join --devices`` with the environment variables
that tell a process its place (``p2ptrain.core.island``). torchrun and SLURM start all of them, on several machines.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from p2ptrain.cluster.console import Console, stoppable, unless_stopped
from p2ptrain.cluster.local_cluster import LOOPBACK, LocalCluster, PeerProcess, end_all
from p2ptrain.core.errors import ConnectionLost, JobFailed, P2PTrainError, UserError
from p2ptrain.core.island import MOST_PROCESSES, IslandPlace, place_in
from p2ptrain.core.threads import RealThreads

if TYPE_CHECKING:
    from p2ptrain.compute.device import ComputeDevice
    from p2ptrain.compute.island import Island

FormedIsland: TypeAlias = "tuple[Island, ComputeDevice]"
"""An island, and the device of this process in it."""
MakeIslandWorker: TypeAlias = "Callable[[FormedIsland], Callable[[asyncio.Event], Coroutine[Any, Any, None]]]"
"""Makes what runs the worker until the event is set."""

FOLLOW_S = 8.0
"""How long a follower that is told to leave waits for its leader to end the island."""


@dataclass(frozen=True, slots=True)
class IslandOptions:
    """What ``join`` says about an island.

    Attributes:
        place: of this process; its port is not known yet if it is ``ours``.
        kind: of the device, as in ``compute.device.pick_device``; empty: not given. threads: of each process.
        ours: this process leads and starts the others.
    """

    place: IslandPlace
    kind: str
    threads: int
    ours: bool

    def pick(self) -> ComputeDevice:
        """The device of this process. Raises ``UserError``."""
        from p2ptrain.compute.device import gpus, pick_device

        count, rank = gpus(self.kind), self.place.local_rank
        return pick_device(f"cuda:{rank}" if count else "cpu", self.threads)


def island_options(devices: str, kind: str, threads: int) -> IslandOptions | None:
    """Read ``--devices``. None if the worker is one process. Raises ``UserError``."""
    if not devices:
        return None
    from p2ptrain.compute.device import gpus

    if kind not in ("", "auto", "cpu", "cuda"):
        raise UserError(f"--device {kind} is one device", remedy="leave it out, or write --device cuda with --devices")
    if devices != "all" and not (devices.isascii() and devices.isdecimal() and 0 < int(devices) <= MOST_PROCESSES):
        raise UserError(f"--devices {devices} is not a number of devices", remedy="use all, or a number such as 2")
    if (place := place_in()) is not None:
        return IslandOptions(place, kind, threads, ours=False)
    count = gpus(kind)
    if devices == "all" and not count:
        raise UserError("--devices all: no GPU that this torch can use", remedy="give a number of processes on CPUs")
    size = count if devices == "all" else int(devices)
    if count and size > count:
        raise UserError(f"--devices {size}: this machine has {count} GPUs", remedy=f"use at most {count}, or all")
    return IslandOptions(IslandPlace(0, size, 0, size, LOOPBACK, 0), kind, threads, ours=True) if size > 1 else None


class LeadIsland:
    """The island that this process leads. It forms once, at the first ``run``; ``close`` ends its processes.

    Args:
        logs: directory for what the other processes say.
    """

    def __init__(self, options: IslandOptions, logs: Path) -> None:
        self._options, self._logs = options, logs
        self._children: list[PeerProcess] = []
        self._formed: FormedIsland | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, name: str, console: Console, make: MakeIslandWorker, stop: asyncio.Event) -> None:
        """Be the worker of ``make`` until ``stop`` is set, while all processes live. Raises ``P2PTrainError``."""
        form: Callable[[], FormedIsland] = partial(self._form_island, self._options.place, None)
        if self._options.ours and not self._children:
            form = await self._start(name, console)

        async def work() -> None:
            self._formed = self._formed or await unless_stopped(stop, RealThreads().start("island").submit(form))
            if self._formed is None:
                return
            running = asyncio.ensure_future(make(self._formed)(stop))
            try:
                await asyncio.wait({running, self._lost}, return_when=asyncio.FIRST_COMPLETED)
                if self._lost.done():
                    self._lost.result()
                running.result()
            finally:
                running.cancel()
                await asyncio.wait({running})

        try:
            await LocalCluster.while_alive(work(), needed=self._children)
        except JobFailed as ended:  # a process, in most cases killed
            ended.message = f"this worker leaves, because it is not complete: {ended.message}"
            raise

    async def _start(self, worker: str, console: Console) -> Callable[[], FormedIsland]:
        """Start the other processes. They meet where no other machine can."""
        options, size = self._options, self._options.place.size
        listener = socket.create_server((LOOPBACK, 0))
        place = IslandPlace(0, size, 0, size, LOOPBACK, listener.getsockname()[1])
        if sys.platform == "linux":
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        arguments = ["join", "--with-parent", "--devices", str(size), "--threads", str(options.threads)]
        arguments += ["--device", options.kind] if options.kind else []
        for rank in range(1, size):
            log = self._logs / f"{worker}-process-{rank}.log"
            environment = os.environ | place.environment(rank)
            name = f"process {rank} of this worker"
            self._children.append(await PeerProcess.start(name, arguments, log, environment=environment))
        console.event("info", f"{size - 1} more process{'es' * (size > 2)} of this worker; logs: {self._logs}")
        return partial(self._form_island, place, listener)

    def _form_island(self, place: IslandPlace, listener: socket.socket | None) -> FormedIsland:
        from p2ptrain.compute.island import Island, meet

        device = self._options.pick()
        return Island(place, device, meet(place, device, listener), self._report_lost), device

    def _report_lost(self, problem: P2PTrainError) -> None:
        def tell() -> None:
            if not self._lost.done():
                self._lost.set_exception(problem)

        self._lost.get_loop().call_soon_threadsafe(tell)

    async def close(self) -> None:
        if self._formed is not None and not self._lost.done():
            await RealThreads().start("island").submit(self._formed[0].end)
        await end_all(self._children)


async def follow(options: IslandOptions, *, with_parent: bool) -> None:
    """Be a process of an island that another process leads, until it ends. Raises ``P2PTrainError``."""
    console, stop = stoppable(with_parent=with_parent)
    place = options.place

    def work() -> None:
        from configs.schema import Profile
        from p2ptrain.compute.island import Island, meet
        from roles.worker.build import island_trainer

        device = options.pick()
        island = Island(place, device, meet(place, device))
        console.event("info", f"process {place.rank} of a worker with {island.label}, on {device.label}")
        island.follow(lambda spec: island_trainer(Profile.from_spec_untrusted(spec), island, device))

    following = RealThreads().start("compute").submit(work)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not following.done():  # the leader was told to leave as well, and needs this process until it does
        await asyncio.wait({following}, timeout=FOLLOW_S)
    if not following.done():
        text = "this process was told to end, and the first one of its worker was not"
        raise ConnectionLost(text, remedy="end that one: it ends all of them")
    following.result()
    console.event("info", "left")
