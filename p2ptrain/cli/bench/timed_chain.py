"""A chain whose stages only take time, for ``bench speculate --chain``: everything else of it is real.

The stages are those of workers, in processes of their own, with the client of split models in front. Between all of
them is TCP over emulated links, each as long as the others: what a token travels is a ring.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.cli.bench.foreseen import CONTEXT, VOCAB, TimedModel
from p2ptrain.core.serving import PartSpec
from p2ptrain.core.threads import RealThreads
from p2ptrain.core.world import Network, World, real_world
from ring.local import HOST
from ring.placement import ModelSizes
from roles.chain.around import Around, WorkerAt
from roles.chain.client import Chain
from roles.chain.models import local_model
from roles.chain.plan import Crew
from roles.stage_engine import StageEngine
from roles.stage_stand_in import StandInBuilder, stand_in_config, write_model
from roles.worker.stage_testing import Stage
from roles.worker.stages import Holding
from wire.emulate import EmulatedNetwork
from wire.shaper import LinkPreset
from wire.transport import TcpNetwork

LIMIT_BYTES = 1 << 30
ACTIVATION_BYTES = 4


def chain_world(stages: int, ring_s: float, seed: int) -> World:
    """Of the client (seed 0) or of a stage: what it sends takes its part of the ring's time."""
    hop_ms = 1e3 * ring_s / (stages + 1)
    network: Network = EmulatedNetwork(TcpNetwork(), LinkPreset("emulated", hop_ms), seed=seed)
    return real_world(network)


class _Builder(StandInBuilder):
    """Loads a part as a stand-in's is, and makes a stage of it that takes time."""

    def __init__(self, spec: PartSpec, names: tuple[str, ...], *, pass_s: float, row_s: float) -> None:
        super().__init__(spec, names)
        # The last one knows how much is verified.
        self._timed = TimedModel(pass_s, row_s=row_s if spec.stop == spec.layers else 0.0, spec=spec)

    def finish(self) -> StageEngine:  # type: ignore[override]
        super().finish()  # the tensors came
        return self._timed


@dataclass
class _Parts:
    """What ``Stage`` wants of its parts."""

    holding: Holding


class StageSide:
    """A worker that holds a part."""

    def __init__(self) -> None:
        self._stage: Stage | None = None

    async def open(
        self, *, number: int, stages: int, ring_s: float, pass_s: float, row_s: float, root: str
    ) -> dict[str, Any]:
        """Listen: its name and port. ``pass_s``: of the whole chain, of which this takes its part."""

        def build(spec: PartSpec, names: tuple[str, ...]) -> _Builder:
            return _Builder(spec, names, pass_s=pass_s / stages, row_s=row_s)

        holding = Holding(build, LIMIT_BYTES, lambda: 1e9, lambda: 2 * LIMIT_BYTES)
        network = chain_world(stages, ring_s, 1 + number).network
        name = f"stage-{number}"
        self._stage = Stage(name, network, Path(root) / name, _Parts(holding), RealThreads(), host=HOST, port=0)
        await self._stage.start()
        return {"name": name, "port": self._stage.server.address[1], "pid": os.getpid()}

    async def close(self) -> dict[str, Any]:
        if self._stage is not None:
            await self._stage.stop()
        return {}


@asynccontextmanager
async def timed_chain(stages: Sequence[dict[str, Any]], *, ring_s: float, root: Path) -> AsyncIterator[Chain]:
    """The client of such stages, that have loaded. Raises ``P2PTrainError``."""
    count = len(stages)
    around = Around(chain_world(count, ring_s, 0), "verifier", "verifier", HOST)
    workers = [WorkerAt(stage["name"], stage["name"], HOST, stage["port"]) for stage in stages]
    config = stand_in_config(layers=count, vocab_size=VOCAB, context=CONTEXT, rows=1)
    crew = await Crew.meet(around, workers)
    try:
        model = await local_model(around, write_model(root / "model", config))
        sizes = ModelSizes((ACTIVATION_BYTES,) * count, (ACTIVATION_BYTES,) * count, 1, 1, 0)
        plan = await crew.plan(
            model, sizes, positions=4 * CONTEXT, activation_bytes=ACTIVATION_BYTES, stages=count, measure_s=0.0
        )
        chain = await Chain.load(crew, model, plan)
        try:
            yield chain
        finally:
            await chain.close()
    finally:
        await crew.close()
