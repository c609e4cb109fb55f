"""A model whose layers are on several workers, for commands: find the workers, plan who holds what, and load."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2ptrain.cluster.access import open_operator, operator_name
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.local_cluster import LocalCluster, threads_each
from p2ptrain.cluster.models import SplitOptions, check_stages, config_text
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.compute.text import ModelText
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ResourceError, UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.tokenizer_files import TEXT_FILES
from p2ptrain.core.world import real_world
from roles.serving.chain import StageChain
from roles.serving.worker_peer import ClientContext, WorkerAddress
from roles.serving.worker_pool import (
    ChainPlan,
    ModelMeasurement,
    ModelReference,
    WorkerPool,
    model_of_directory,
    workers_of,
)
from wire.client import SeedClient
from wire.records import CheckpointInfo

LEAVE_S = 1.0  # time limit for a goodbye to workers; without one they notice the end themselves
TYPICAL_POSITIONS = 4096
"""Default length of a conversation. Caches for a whole context may be larger than the weights."""


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """A model that is ready to be loaded. ``label``: its name, for people. ``text``: its tokenizer and settings."""

    label: str
    text: ModelText
    model: ModelReference
    plan: ChainPlan
    options: SplitOptions
    pool: WorkerPool
    console: Console

    async def load(self, plan: ChainPlan | None = None, console: Console | None = None) -> StageChain:
        """Have the workers load their parts, and show the progress. Raises as ``StageChain.load``."""
        plan, console, encodings = plan or self.plan, console or self.console, self.options.encodings
        loaded_bytes = [(0, stage.weights_bytes) for stage in plan.placement.stages]

        def show(index: int, done_bytes: int, total_bytes: int) -> None:
            loaded_bytes[index] = done_bytes, total_bytes
            if not plan.loaded:
                console.loading(*map(sum, zip(*loaded_bytes, strict=True)))

        try:
            return await StageChain.load(
                self.pool, self.model, plan, context=self.text.context, encodings=encodings, on_progress=show
            )
        finally:
            console.clear()

    async def load_all(self) -> list[StageChain]:
        """Load as many chains as the workers can hold, to share work; the workers that are left are spares of each.
        Without a number of stages each chain has as few as its workers' memory allows. Raises as ``load``."""
        plans, used, wanted = list[ChainPlan](), set[str](), self.plan.wanted
        sizes: dict[str, Any] = {"positions": wanted.positions, "activation_bytes": wanted.activation_bytes}
        for stages in [self.options.stages] if self.options.stages else range(1, len(self.pool.peers) + 1):
            with suppress(UserError, ResourceError):  # the workers that are left make no such chain
                while True:
                    how = {"dtype": self.plan.dtype, "weights": self.plan.weights}
                    sizes |= how | {"stages": stages, "without": used}
                    plans.append(await self.pool.plan(self.model, wanted.sizes, **sizes))
                    used |= {stage.peer.id for stage in plans[-1].stages}
        plans = [replace(plan, spares=plans[-1].spares) for plan in plans] or [self.plan]
        consoles = [self.console, *(Console(quiet=True) for _ in plans[1:])]  # one of them shows progress
        return await asyncio.gather(*map(self.load, plans, consoles))


@asynccontextmanager
async def plan_split(
    options: SplitOptions,
    checkpoint: Path | None,
    job: str,
    seed: str,
    positions_of: Callable[[ModelText], int],
    console: Console,
) -> AsyncIterator[PlannedSplit]:
    """Plan which worker holds which layers. At the end the workers are disconnected and keep what they loaded.

    Args:
        checkpoint: a model on this machine; None: the newest one of ``job``, which may be on any worker.
        positions_of: returns the cache positions of all sessions together.

    Raises:
        P2PTrainError: there is no seed, worker or model, or too little memory; it has the numbers and the remedy.
    """
    text = None if checkpoint is None else ModelText(checkpoint)  # fail before connecting
    if checkpoint is not None:
        config_text(checkpoint, options.stages)
    access, client = await open_operator(seed)
    try:
        context = ClientContext(
            world=real_world(access.network),
            peer_id=access.peer_id or new_id(),
            name=operator_name(),
            seed_host=access.host,
            state=default_state_dir() / "operator",
            notify=lambda level, _, text: console.event(level, text),
        )
        held = await _held_by_job(client, job) if checkpoint is None else []
        workers = await workers_of(client.request)
    finally:
        await client.close()
    if not workers:
        remedy = "start some: p2ptrain join, or all on this machine: p2ptrain up --split 2 --checkpoint DIR"
        raise UserError("no worker has joined to hold a part of the model", remedy=remedy)
    async with plan_on_workers(context, workers, options, checkpoint or held, text, positions_of, console) as plan:
        yield plan


@asynccontextmanager
async def plan_on_workers(
    context: ClientContext,
    workers: Sequence[WorkerAddress],
    options: SplitOptions,
    place: Path | list[CheckpointInfo],
    text: ModelText | None,
    positions_of: Callable[[ModelText], int],
    console: Console,
) -> AsyncIterator[PlannedSplit]:
    """Connect these workers for the block, and plan which of them holds which layers. Raises ``P2PTrainError``.

    ``place``: directory of the model here, with its ``text``; or checkpoints, one of which a worker has.
    """
    pool = await WorkerPool.connect(context, workers)
    try:
        with tempfile.TemporaryDirectory(prefix="p2ptrain-text-") as directory_of_text:
            if isinstance(place, Path):
                # The first worker that can be used says whether the model splits; only then its files are hashed.
                found = await _measure_model(pool, config_text(place), options)
                if (here := len(pool.peers)) < (options.stages or 1):
                    refused = "".join(f"; {name}: {reason}" for name, reason in pool.refused.items())
                    there = f"{here} of {options.stages} workers joined to hold a part of the model{refused}"
                    raise UserError(there, remedy="start another: p2ptrain join")
                console.progress(f"reading the files of {place}")  # the first time it hashes them
                model, label = await model_of_directory(context, place), str(place)
            else:
                model = await _model_of_worker(pool, place)
                text, label = await _text_of(pool, model, Path(directory_of_text)), model.name
                found = await _measure_model(pool, model.config, options)
            assert text is not None
            plan = await pool.plan(
                model,
                found.sizes,
                positions=options.positions or positions_of(text),
                dtype=options.dtype,
                weights=options.weights,
                activation_bytes=activation_bytes(options.encodings[0] or found.dtype, 1, found.width),
                stages=options.stages,
            )
            console.clear()
            yield PlannedSplit(label, text, model, plan, options, pool, console)
    finally:
        console.clear()
        await within(LEAVE_S, pool.close())


async def _measure_model(pool: WorkerPool, config: str, options: SplitOptions) -> ModelMeasurement:
    """Raises as ``WorkerPool.measure_model``; ``ConfigError`` for more stages than layers."""
    found = await pool.measure_model(config, options.dtype, options.weights)
    check_stages(found.sizes.layers, options.stages)
    return found


def conversation_positions(text: ModelText) -> int:
    return min(text.context or TYPICAL_POSITIONS, TYPICAL_POSITIONS)


async def within(seconds: float, farewell: Any) -> None:
    with suppress(TimeoutError):  # the other side notices that we are gone
        async with asyncio.timeout(seconds):
            await farewell


async def _held_by_job(client: SeedClient, job: str) -> list[CheckpointInfo]:
    """The job's checkpoints, newest first. Raises ``UserError``."""
    found = await client.checkpoints(job)
    if not found:
        raise UserError(f"job {job} has no checkpoint yet", remedy=f"p2ptrain jobs save {job}")
    whole = [item for item in found if item.stage is None]
    if not whole:
        text = f"no worker has the checkpoints of all parts of job {job} in one directory yet"
        raise UserError(text, remedy=f"p2ptrain jobs save {job}: its workers then collect them")
    return sorted(whole, key=lambda item: -item.step)


async def _model_of_worker(pool: WorkerPool, held: list[CheckpointInfo]) -> ModelReference:
    for item in held:
        if item.peer_id in pool.peers:
            return await pool.model_at(item.path, item.peer_id)
    names = ", ".join(sorted({item.peer_name for item in held}))
    raise UserError(f"workers with checkpoints of job {held[0].job} are away: {names}", remedy="start them again")


async def _text_of(pool: WorkerPool, model: ModelReference, directory: Path) -> ModelText:
    """Fetch a model's tokenizer and settings, a few small files, from a worker. Raises ``P2PTrainError``."""
    for name, content in (await pool.files(model, TEXT_FILES)).items():
        if name in TEXT_FILES:
            (directory / name).write_bytes(content)
    return ModelText(directory)


# ------------------------------------------------------------------------------------------- workers of this machine


async def hold_model(
    cluster: LocalCluster,
    checkpoint: Path,
    split: SplitOptions,
    workers: int,
    console: Console,
    on_loaded: Callable[[StageChain], object],
    *,
    memory: str,
    link: str,
) -> None:
    """Start a seed and workers, load the model, and wait until cancelled. Raises ``P2PTrainError``.

    Args:
        workers: more than there are stages: spares, which replace workers that die.
        memory, link: of each worker, as ``join`` takes them; empty: not set.
    """
    try:
        await cluster.start_seed()
        if cluster.url:
            console.event("info", f"watch in a browser: {cluster.url}")
        threads = threads_each(split.stages or workers)  # stages compute at once; a spare only in place of a lost one
        await cluster.start_workers(workers, threads=threads, memory=memory, link=link)
        console.event("info", cluster.start_notice(workers))
        await cluster.wait_until_joined(list(cluster.peers))
        peers = list(cluster.peers.values())
        found = plan_split(split, checkpoint, "", cluster.address, conversation_positions, console)
        async with found as plan:
            chain = await cluster.while_alive(plan.load(), needed=[cluster.seed, *peers])
            try:
                on_loaded(chain)
                await cluster.while_alive(
                    asyncio.Event().wait(),
                    needed=[cluster.seed],
                    others=peers,
                    least=1,
                    on_end=lambda child: console.event("warning", child.failure().message),
                )
            finally:
                await within(LEAVE_S, chain.close())
    finally:
        console.finish()
        await cluster.end()
