"""A model whose layers lie on several workers, for a command: found, planned, loaded, used and left again."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from p2ptrain.cli.model_sizes import Anatomy, anatomy
from p2ptrain.cli.output import Console, print_json
from p2ptrain.cli.placement import placement_map, print_placement
from p2ptrain.cli.runtime import default_state_dir, open_operator, operator_name
from p2ptrain.cli.split_options import SplitWish
from p2ptrain.cli.text_options import newest_in
from p2ptrain.compute.text import TEXT_FILES, ModelText
from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.texts import human_bytes
from p2ptrain.core.world import real_world
from roles.chain.client import Chain, Progress
from roles.chain.peer import Context, WorkerAt
from roles.chain.plan import Model, Plan, WorkerPool, local_model, tensor_table, workers_of
from wire.client import SeedClient
from wire.records import CheckpointInfo

LEAVE_S = 1.0
"""What saying goodbye to workers may take. They notice by themselves when it was not said."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which model, and how: ``checkpoint`` is of this machine, a ``job``'s newest may lie on any worker."""

    wish: SplitWish
    checkpoint: Path | None
    job: str
    seed: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A model that can be loaded.

    Attributes:
        label: which one it is, for people.
        text: its text side.
    """

    label: str
    text: ModelText
    model: Model
    anatomy: Anatomy
    plan: Plan
    wish: SplitWish
    crew: WorkerPool
    console: Console

    async def load(self) -> Chain:
        """Have the workers load their parts, and show how far they are. Raises as ``Chain.load``."""
        progress = LoadingLine(self.plan, self.console)
        show = (lambda _: None) if all(stage.loaded for stage in self.plan.stages) else progress.show
        try:
            return await Chain.load(self.crew, self.model, self.plan, on_progress=show)
        finally:
            self.console.clear()

    @property
    def encoding(self) -> str:
        """Of what travels for one token."""
        return self.wish.encodings[0] or self.anatomy.dtype


@asynccontextmanager
async def planned(wanted: Wanted, needs: Callable[[ModelText], int], console: Console) -> AsyncIterator[Planned]:
    """Find out who holds which layers. Everybody is let go at the end; what they loaded stays for the next one.

    Args:
        needs: positions to have cache for, of all sessions together.

    Raises:
        P2PTrainError: no seed, no worker, no model, or no room for it; it names the numbers and the remedy.
    """
    directory = newest_in(wanted.checkpoint) if wanted.checkpoint is not None else None
    text = None if directory is None else ModelText(directory)  # refused before anybody is asked
    access, client = await open_operator(wanted.seed)
    try:
        await access.freshen(client.request)
        around = Context(
            world=real_world(access.network),
            peer_id=access.peer_id or new_id(),
            name=operator_name(),
            seed_host=access.host,
            state=default_state_dir() / "operator",
            notify=lambda level, _, said: console.event(level, said),
        )
        held = await _held_by_job(client, wanted.job) if directory is None else []
        workers = await workers_of(client.request)
    finally:
        await client.close()
    if not workers:
        raise UserError(
            "no worker is there to hold a part of the model",
            remedy="start some: p2ptrain join, or all on this machine: p2ptrain up --split 2 --checkpoint DIR",
        )
    crew = await WorkerPool.connect(around, workers)
    try:
        with tempfile.TemporaryDirectory(prefix="p2ptrain-text-") as kept:
            if directory is not None:
                console.progress(f"reading the files of {directory}")  # hashed, the first time
                model = await local_model(around, directory)
            else:
                model = await _model_of_worker(crew, workers, held)
                text = await _text_of(crew, model, Path(kept))
            assert text is not None
            found = anatomy(model.config, await tensor_table(around, model), wanted.wish.dtype)
            plan = await crew.plan(
                model,
                found.sizes,
                positions=wanted.wish.positions or needs(text),
                dtype=wanted.wish.dtype,
                activation_bytes=activation_bytes(wanted.wish.encodings[0] or found.dtype, 1, found.width),
                stages=wanted.wish.stages,
            )
            console.clear()
            label = str(directory) if directory is not None else model.name
            yield Planned(label, text, model, found, plan, wanted.wish, crew, console)
    finally:
        console.clear()
        await within(LEAVE_S, crew.close())


async def within(seconds: float, farewell: Any) -> None:
    """Give a goodbye its time, and no more."""
    try:
        async with asyncio.timeout(seconds):
            await farewell
    except TimeoutError:
        return  # the other side notices that we are gone


async def _held_by_job(client: SeedClient, job: str) -> list[CheckpointInfo]:
    """The job's checkpoints, newest first. Raises ``UserError``."""
    found = await client.checkpoints(job)
    if not found:
        raise UserError(f"job {job} has no checkpoint yet", remedy=f"p2ptrain jobs save {job}")
    whole = [item for item in found if item.stage is None]
    if not whole:
        text = f"of job {job} nobody has the checkpoints of all stages in one directory yet"
        raise UserError(text, remedy=f"p2ptrain jobs save {job}, or p2ptrain checkpoints gather where the parts lie")
    return sorted(whole, key=lambda item: -item.step)


async def _model_of_worker(crew: WorkerPool, workers: list[WorkerAt], held: list[CheckpointInfo]) -> Model:
    """The newest checkpoint that somebody who is there can give. Raises ``UserError``, and what the last one said."""
    there = {worker.peer_id for worker in workers}
    for item in held:
        if item.peer_id in there:
            return await crew.model_at(item.path, worker=item.peer_id)
    names = ", ".join(sorted({item.peer_name for item in held}))
    raise UserError(f"who holds checkpoints of job {held[0].job} is away: {names}", remedy="start them again")


async def _text_of(crew: WorkerPool, model: Model, directory: Path) -> ModelText:
    """The text side of a model that lies on a worker: its small files, fetched. Raises ``P2PTrainError``."""
    for name, content in (await crew.files(model, TEXT_FILES)).items():
        if name in TEXT_FILES:
            (directory / name).write_bytes(content)
    return ModelText(directory)


class LoadingLine:
    """How far each stage is, in one line."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._console = console
        self._of = {
            index: Progress(index, stage.peer.name, 0, stage.weights_bytes)
            for index, stage in enumerate(plan.placement.stages)
        }

    def show(self, progress: Progress) -> None:
        self._of[progress.index] = progress
        done = sum(each.done_bytes for each in self._of.values())
        total = sum(each.total_bytes for each in self._of.values())
        stages = "  ".join(f"{each.name} {_far(each)}" for each in self._of.values())
        last = all(each.ready for each in self._of.values())
        self._console.progress(f"loading  {human_bytes(done)} of {human_bytes(total)}  {stages}", last=last)


def show_plan(plan: Planned, *, as_json: bool) -> None:
    """What ``--dry-run`` shows, on standard output."""
    placement, is_loaded = plan.plan.placement, all(stage.loaded for stage in plan.plan.stages)
    if as_json:
        print_json({"checkpoint": plan.label, "loaded": is_loaded, "plan": placement_map(placement)})
        return
    print_placement(placement)
    if is_loaded:
        typer.echo("These parts are loaded there already.")


def _far(progress: Progress) -> str:
    return "ready" if progress.ready else f"{100 * progress.done_bytes // max(1, progress.total_bytes)} %"
