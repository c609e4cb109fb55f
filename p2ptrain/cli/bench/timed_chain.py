"""A chain whose stages only take time, for ``bench speculate --chain``: everything else of it is real.

The stages are those of workers, in processes of their own, with the client of split models in front. Between all of
them is TCP over emulated links, each as long as the others: what a token travels is a ring.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from p2ptrain.cli.bench.foreseen import CONTEXT, VOCAB, Take, TimedModel
from p2ptrain.cli.bench.place import Place
from p2ptrain.core.serving import PartSpec
from p2ptrain.core.world import World
from ring.placement import ModelSizes
from roles.chain.around import Around, WorkerAt
from roles.chain.client import Chain
from roles.chain.models import local_model
from roles.chain.plan import Crew
from roles.stage_engine import StageEngine
from roles.stage_stand_in import StandInBuilder, stand_in_config, write_model
from roles.worker.stage_testing import Stage
from roles.worker.stages import Holding

LIMIT_BYTES = 1 << 30
ACTIVATION_BYTES = 4


def chain_world(place: Place, stages: int, ring_s: float) -> World:
    """Of the client or of a stage: what it sends takes its part of the ring's time."""
    return place.world(1e3 * ring_s / (stages + 1), 0.0, 0)


class _Builder(StandInBuilder):
    """Loads a part as a stand-in's is, and makes a stage of it that takes time."""

    def __init__(self, spec: PartSpec, names: tuple[str, ...], *, pass_s: float, row_s: float, take: Take) -> None:
        super().__init__(spec, names)
        # The last one knows how much is verified.
        self._timed = TimedModel(pass_s, row_s=row_s if spec.stop == spec.layers else 0.0, spec=spec, take=take)

    def finish(self) -> StageEngine:  # type: ignore[override]
        super().finish()  # the tensors came
        return self._timed


class StageSide:
    """A worker that holds a part."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stage: Stage | None = None

    async def open(
        self, *, number: int, stages: int, ring_s: float, pass_s: float, row_s: float, root: str
    ) -> dict[str, Any]:
        """Listen: its name and port. ``pass_s``: of the whole chain, of which this takes its part."""
        place = self._place

        def build(spec: PartSpec, names: tuple[str, ...]) -> _Builder:
            return _Builder(spec, names, pass_s=pass_s / stages, row_s=row_s, take=place.take)

        parts = SimpleNamespace(holding=Holding(build, LIMIT_BYTES, lambda: 1e9, lambda: 2 * LIMIT_BYTES))
        network = chain_world(place, stages, ring_s).network
        name = f"stage-{number}"
        self._stage = Stage(name, network, Path(root) / name, parts, place.threads, host=place.host, port=0)
        await self._stage.start()
        return {"name": name, "host": place.host, "port": self._stage.server.address[1]}

    async def close(self) -> dict[str, Any]:
        if self._stage is not None:
            await self._stage.stop()
        return {}


@asynccontextmanager
async def timed_chain(
    place: Place, stages: Sequence[dict[str, Any]], *, ring_s: float, root: Path
) -> AsyncIterator[Chain]:
    """The client of such stages, that have loaded. Raises ``P2PTrainError``."""
    count = len(stages)
    around = Around(chain_world(place, count, ring_s), "verifier", "verifier", place.host)
    workers = [WorkerAt(stage["name"], stage["name"], stage["host"], stage["port"]) for stage in stages]
    config = stand_in_config(layers=count, vocab_size=VOCAB, context=CONTEXT, rows=1)
    sizes = ModelSizes((ACTIVATION_BYTES,) * count, (ACTIVATION_BYTES,) * count, 1, 1, 0)
    wanted: dict[str, Any] = {"positions": 4 * CONTEXT, "activation_bytes": ACTIVATION_BYTES, "stages": count}
    async with AsyncExitStack() as stack:
        crew = await Crew.meet(around, workers)
        stack.push_async_callback(crew.close)
        model = await local_model(around, write_model(root / "model", config))
        chain = await Chain.load(crew, model, await crew.plan(model, sizes, measure_s=0.0, **wanted))
        stack.push_async_callback(chain.close)
        yield chain
