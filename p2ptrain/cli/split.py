"""A model whose layers are on several workers, for commands: find the workers, plan, load, and report figures."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from p2ptrain.cli.model_sizes import check_stages, config_text
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.placement import placement_map, print_placement
from p2ptrain.cli.text_options import SplitOptions
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.operator import open_operator, operator_name
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.compute.text import TEXT_FILES, ModelText
from p2ptrain.core.activations import IDS, activation_bytes
from p2ptrain.core.errors import UserError
from p2ptrain.core.ids import new_id
from p2ptrain.core.texts import human_bytes, layers_text
from p2ptrain.core.world import real_world
from roles.serving.chain import LoadProgress, StageChain
from roles.serving.worker_peer import ClientContext
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

    async def load(self) -> StageChain:
        return await load(self.pool, self.model, self.plan, self.console, self.text.context, self.options.encodings)


@asynccontextmanager
async def planned(
    options: SplitOptions,
    checkpoint: Path | None,
    job: str,
    seed: str,
    needs: Callable[[ModelText], int],
    console: Console,
) -> AsyncIterator[PlannedSplit]:
    """Plan which worker holds which layers. At the end the workers are disconnected and keep what they loaded.

    Args:
        checkpoint: a model on this machine; None: the newest one of ``job``, which may be on any worker.
        needs: returns the cache positions of all sessions together.

    Raises:
        P2PTrainError: there is no seed, worker or model, or too little memory; it has the numbers and the remedy.
    """
    directory = checkpoint
    text = None if directory is None else ModelText(directory)  # fail before connecting
    config = "" if directory is None else config_text(directory, options.stages)
    access, client = await open_operator(seed)
    try:
        await access.freshen(client.request)
        context = ClientContext(
            world=real_world(access.network),
            peer_id=access.peer_id or new_id(),
            name=operator_name(),
            seed_host=access.host,
            state=default_state_dir() / "operator",
            notify=lambda level, _, text: console.event(level, text),
        )
        held = await _held_by_job(client, job) if directory is None else []
        workers = await workers_of(client.request)
    finally:
        await client.close()
    if not workers:
        raise UserError(
            "no worker has joined to hold a part of the model",
            remedy="start some: p2ptrain join, or all on this machine: p2ptrain up --split 2 --checkpoint DIR",
        )
    pool = await WorkerPool.connect(context, workers)
    try:
        with tempfile.TemporaryDirectory(prefix="p2ptrain-text-") as directory_of_text:
            if directory is not None:
                await measured(pool, config, options)  # fail before hashing
                console.progress(f"reading the files of {directory}")  # the first time it hashes them
                model = await model_of_directory(context, directory)
            else:
                model = await _model_of_worker(pool, held)
                text = await _text_of(pool, model, Path(directory_of_text))
            assert text is not None
            plan = await plan_on(pool, model, options, options.positions or needs(text))
            console.clear()
            label = str(directory) if directory is not None else model.name
            yield PlannedSplit(label, text, model, plan, options, pool, console)
    finally:
        console.clear()
        await within(LEAVE_S, pool.close())


async def measured(pool: WorkerPool, config: str, options: SplitOptions) -> ModelMeasurement:
    """Raises as ``WorkerPool.measured``; ``ConfigError`` for more stages than layers."""
    found = await pool.measured(config, options.dtype)
    check_stages(found.sizes.layers, options.stages)
    return found


async def plan_on(pool: WorkerPool, model: ModelReference, options: SplitOptions, positions: int) -> ChainPlan:
    """Raises as ``measured`` and ``WorkerPool.plan``."""
    found = await measured(pool, model.config, options)
    return await pool.plan(
        model,
        found.sizes,
        positions=positions,
        dtype=options.dtype,
        activation_bytes=activation_bytes(options.encodings[0] or found.dtype, 1, found.width),
        stages=options.stages,
    )


async def load(
    pool: WorkerPool,
    model: ModelReference,
    plan: ChainPlan,
    console: Console,
    context: int | None,
    encodings: tuple[str, str],
) -> StageChain:
    """Have the workers load their parts, and show the progress. Raises as ``StageChain.load``."""
    show = (lambda _: None) if plan.loaded else LoadingLine(plan, console).show
    try:
        return await StageChain.load(pool, model, plan, context=context, encodings=encodings, on_progress=show)
    finally:
        console.clear()


def conversation_positions(text: ModelText) -> int:
    return min(text.context or TYPICAL_POSITIONS, TYPICAL_POSITIONS)


async def within(seconds: float, farewell: Any) -> None:
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
        text = f"no worker has the checkpoints of all parts of job {job} in one directory yet"
        raise UserError(text, remedy=f"p2ptrain jobs save {job}: its workers then collect them")
    return sorted(whole, key=lambda item: -item.step)


async def _model_of_worker(pool: WorkerPool, held: list[CheckpointInfo]) -> ModelReference:
    for item in held:
        if item.peer_id in pool.peers:
            return await pool.model_at(item.path, worker=item.peer_id)
    names = ", ".join(sorted({item.peer_name for item in held}))
    raise UserError(f"workers with checkpoints of job {held[0].job} are away: {names}", remedy="start them again")


async def _text_of(pool: WorkerPool, model: ModelReference, directory: Path) -> ModelText:
    """Fetch a model's tokenizer and settings, a few small files, from a worker. Raises ``P2PTrainError``."""
    for name, content in (await pool.files(model, TEXT_FILES)).items():
        if name in TEXT_FILES:
            (directory / name).write_bytes(content)
    return ModelText(directory)


class LoadingLine:
    """The loading progress of all stages, in one line."""

    def __init__(self, plan: ChainPlan, console: Console) -> None:
        self._console = console
        self._of = {
            index: LoadProgress(index, stage.peer.name, 0, stage.weights_bytes)
            for index, stage in enumerate(plan.placement.stages)
        }

    def show(self, progress: LoadProgress) -> None:
        self._of[progress.index] = progress
        done = sum(each.done_bytes for each in self._of.values())
        total = sum(each.total_bytes for each in self._of.values())
        stages = "  ".join(
            f"{each.name} {'ready' if each.ready else f'{100 * each.done_bytes // max(1, each.total_bytes)} %'}"
            for each in self._of.values()
        )
        last = all(each.ready for each in self._of.values())
        self._console.loading(done, total, f"  {stages}", last=last)


def show_plan(plan: PlannedSplit, *, as_json: bool) -> None:
    """Print the plan, for ``--dry-run``."""
    placement, is_loaded = plan.plan.placement, plan.plan.loaded
    if as_json:
        print_json({"checkpoint": plan.label, "loaded": is_loaded, "plan": placement_map(placement)})
        return
    print_placement(placement)
    if is_loaded:
        typer.echo("The workers have these parts loaded already.")


# ------------------------------------------------------------------------------------------------------ the figures


def split_facts(chain: StageChain) -> dict[str, Any]:
    """What each stage holds, and where a token's time goes, for programs. Times are per token; None before the first
    token.

    ``rest_ms`` is neither computing nor measured links: it is queueing, event loops of the stages, and this program.
    """
    times = chain.times
    tokens = times.tokens
    compute_ms = sum(times.stages_us) / 1e3 / tokens if tokens else None
    token_ms = 1e3 * times.took_s / tokens if tokens else None
    placement = chain.plan.placement
    link_ms = 1e3 * (placement.client_hop_s + sum(stage.hop_s for stage in placement.stages))
    stages = []
    for index, (stage, loaded) in enumerate(zip(chain.plan.stages, chain.loaded, strict=True)):
        is_last = index == len(chain.plan.stages) - 1
        stages.append(
            {
                "stage": index,
                "peer": stage.peer.id,
                "name": stage.peer.name,
                "device": loaded.device,
                "start": stage.start,
                "stop": stage.stop,
                "read_bytes": loaded.read_bytes,
                "received_bytes": loaded.received_bytes,
                "weights_bytes": loaded.weights_bytes,
                "resident_bytes": loaded.resident_bytes,
                "compute_ms": times.stages_us[index] / 1e3 / tokens if tokens else None,
                "wire_bytes": activation_bytes(IDS if is_last else chain.encodings[0] or chain.dtype, 1, loaded.width),
            }
        )
    return {
        "stages": stages,
        "token_ms": token_ms,
        "compute_ms": compute_ms,
        "link_ms": link_ms,
        "rest_ms": None if token_ms is None or compute_ms is None else token_ms - compute_ms - link_ms,
        "prompt_ms": 1e3 * times.prompt_s / times.prompts if times.prompts else None,
        "mendings": [{"lost": name, "seconds": seconds} for name, seconds in times.mendings],
    }


def print_split_facts(facts: dict[str, Any]) -> None:
    """Print these facts: a table of 80 columns, and a line. ``WIRE``: bytes of one token's hop."""
    columns = ["PEER", "LAYERS", "READ", "RECEIVED", "WEIGHTS", "MEMORY", "MS/TOKEN", "WIRE"]
    rows = [
        [
            stage["name"],
            layers_text(stage["start"], stage["stop"]),
            *(human_bytes(stage[f"{kind}_bytes"]) for kind in ("read", "received", "weights", "resident")),
            _ms(stage["compute_ms"]),
            human_bytes(stage["wire_bytes"]),
        ]
        for stage in facts["stages"]
    ]
    if facts["compute_ms"] is None:
        columns.remove("MS/TOKEN")
        rows = [[*row[:6], row[7]] for row in rows]
    print_table(columns, rows, right=columns[2:])
    if facts["token_ms"] is not None:
        typer.echo(
            f"a token took {_ms(facts['token_ms'])} ms: {_ms(facts['compute_ms'])} computing"
            f" + {_ms(facts['link_ms'])} on the way + {_ms(facts['rest_ms'])} the rest;"
            f" a prompt {_ms(facts['prompt_ms'])} ms"
        )
    for mending in facts["mendings"]:
        typer.echo(f"{mending['lost']} was lost; the text went on {mending['seconds']:.2f} s later")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
