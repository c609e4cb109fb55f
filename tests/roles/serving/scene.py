"""Workers' real stages over memory and virtual time, and a client of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.serving.chain import StageChain
from roles.serving.worker_peer import ClientContext, WorkerAddress
from roles.serving.worker_pool import ChainPlan, ModelReference, WorkerPool, model_of_directory
from tests.roles.stage_doubles import PORT, Stage
from tests.roles.stage_stand_in import WIDTH, StandIns, stand_in_config, write_model

LAYERS = 6
DEADLINE_S = 300.0
CONTEXT = 6000
NEAR_S = 0.0005
CONFIG = stand_in_config(layers=LAYERS, rows=200, context=CONTEXT)
"""The layers, not the head, decide which worker holds what."""


@dataclass
class Scene:
    """Workers, and a client that knows of all of them.

    Attributes:
        told: of the chain, to the person.
        progress: of loading: stage, bytes that are loaded, and all.
    """

    network: MemoryNetwork
    directory: Path
    workers: dict[str, Stage]
    context: ClientContext
    told: list[tuple[str, str, str]] = field(default_factory=list)
    progress: list[tuple[int, int, int]] = field(default_factory=list)

    def at(self) -> list[WorkerAddress]:
        return [WorkerAddress(name, name, name, PORT) for name in self.workers]

    async def replica(self, without: str = "") -> WorkerPool:
        return await WorkerPool.connect(self.context, [worker for worker in self.at() if worker.name != without])

    async def model(self, config: str = CONFIG) -> ModelReference:
        """One that this client has to give: the workers are told of no directory of theirs."""
        model = await model_of_directory(self.context, write_model(self.directory / "model", config))
        return replace(model, path="")

    async def plan(self, replica: WorkerPool, model: ModelReference, **options: Any) -> ChainPlan:
        options = {"positions": 400, "activation_bytes": 4 * WIDTH, "dtype": "fp32", "stages": 3} | options
        found = await replica.measure_model(model.config, options["dtype"])
        return await replica.plan(model, found.sizes, **options)

    @asynccontextmanager
    async def chain(
        self, *, without: str = "", encodings: tuple[str, str] = ("", ""), **options: Any
    ) -> AsyncIterator[StageChain]:
        """A chain of three stages (workers ``w0`` to ``w2`` where all are alike), loaded."""
        replica = await self.replica(without)
        try:
            model = await self.model()
            plan = await self.plan(replica, model, **options)
            chain = await StageChain.load(
                replica,
                model,
                plan,
                context=CONTEXT,
                encodings=encodings,
                on_progress=lambda *loaded: self.progress.append(loaded),
            )
            try:
                yield chain
            finally:
                await chain.close()
        finally:
            await replica.close()

    def kill(self, name: str) -> None:
        """What a kernel does for a process that is killed."""
        self.network.crash(name)

    def freeze(self, name: str) -> None:
        """It says nothing any more, and nothing reaches it."""
        for other in [*self.workers, "client"]:
            if other != name:
                self.network.silence(name, other)

    def sessions(self) -> dict[str, int]:
        return {name: stage.sessions for name, stage in self.workers.items()}


@asynccontextmanager
async def scene_of(
    directory: Path,
    *,
    names: Sequence[str] = ("w0", "w1", "w2", "w3"),
    delay_s: Callable[[str, str], float] = lambda source, target: NEAR_S,
    stand_ins: Callable[..., Any] = StandIns,
    **holding: Any,
) -> AsyncIterator[Scene]:
    """These workers, and a client. Needs virtual time."""
    network = MemoryNetwork(delay_s=delay_s)
    workers = {name: Stage(name, network.at(name), directory / name, stand_ins(**holding)) for name in names}
    told: list[tuple[str, str, str]] = []
    world = World(LoopClock(), network.at("client"), RealDisk(), random.Random(1), LoopThreads())
    context = ClientContext(
        world, "client", "client", "seed", directory / "client", lambda *notice: told.append(notice)
    )
    for worker in workers.values():
        await worker.start()
    try:
        async with asyncio.timeout(DEADLINE_S):  # virtual ones: beats go on for ever
            yield Scene(network, directory, workers, context, told)
    finally:
        for worker in workers.values():
            await worker.stop()
