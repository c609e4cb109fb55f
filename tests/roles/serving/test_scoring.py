"""Log-probabilities by chains of real stages: those of one undivided model, whoever is lost, and shared by chains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from p2ptrain.cluster.console import Console
from p2ptrain.cluster.models import SplitOptions
from p2ptrain.cluster.split_model import PlannedSplit
from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.evaluation import Evaluation, score_here
from p2ptrain.compute.served_part import ServedPartBuilder, load_whole, measure_model
from p2ptrain.compute.text import ModelText
from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import NetworkError, UserError
from p2ptrain.core.serving import PartSpec, Pass, Sampling
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock
from roles.compute_thread import ComputeThread
from roles.serving import scoring
from roles.serving.chain import StageChain
from roles.serving.local_model import LocalModel
from roles.serving.model import PassRequest, ServedModel
from roles.serving.scoring import ScoreRequest, score_all, score_ids
from roles.serving.worker_pool import WorkerPool, model_of_directory
from roles.worker.stages import Holding
from tests.compute.families import make_of_bytes
from tests.roles.stage_stand_in import stand_in_part
from tests.run_one import run_one

from .scene import CONFIG, LAYERS, Scene, scene_of

pytestmark = pytest.mark.virtual_time

GREEDY = Sampling(temperature=0)
TEXTS = [[(7 * at * at + number) % 97 for at in range(20 + number)] for number in range(30)]
COMPUTE_S = 0.01
SMALL_BYTES = 50_000  # of a worker, which has room for half of the model


def reference(ids: Sequence[int], first: int) -> list[float]:
    whole = stand_in_part(CONFIG, 0, LAYERS)
    whole.open("s", positions=len(ids), sampling=GREEDY)
    targets = tuple(ids[first:])
    ran = run_one(whole, "s", Pass(0, memoryview(encode_ids(ids[:-1])), len(ids) - 1, "ids", "fp32", targets=targets))
    return [float(score) for score in np.frombuffer(ran.scores, "<f4")]


class Collected:
    """Requests for ``TEXTS``, and the scores that came. ``on_text``: called when a text is taken."""

    def __init__(self, on_text: Any = lambda number: None) -> None:
        self.scores: dict[int, list[list[float]]] = {}
        self._on_text = on_text

    async def requests(self) -> AsyncIterator[ScoreRequest]:
        for number, ids in enumerate(TEXTS):
            self._on_text(number)
            yield ScoreRequest(ids, 1 + number % 3, partial(self._add, number))

    def _add(self, number: int, scores: Any) -> None:
        self.scores.setdefault(number, []).append([float(score) for score in scores])

    def check(self) -> None:
        """Each text was scored once, as by the undivided model."""
        assert self.scores == {number: [reference(ids, 1 + number % 3)] for number, ids in enumerate(TEXTS)}


def slow_down(scene: Scene) -> None:
    for worker in scene.workers.values():
        worker.threads.call_s["compute"] = COMPUTE_S


@pytest.mark.parametrize("stages", [1, 3])
async def test_scores_are_those_of_the_undivided_model(
    scene: Scene, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(5 * at * at) % 97 for at in range(40)]
    async with scene.chain(stages=stages) as chain:
        session = await chain.open(positions=60, sampling=GREEDY, sample_from=1)
        for most, first in ((2048, 1), (2048, 25), (7, 1), (7, 30), (1, 39)):
            monkeypatch.setattr(scoring, "_PASS_LOGITS", most * chain.vocab_size)
            scores = await score_ids(session, ids, first, chain.vocab_size)
            assert [float(score) for score in scores] == reference(ids, first)
        both = await session.append(PassRequest(0, tuple(ids[:9]), samples=2, targets=tuple(ids[1:10])))
        assert [float(score) for score in np.frombuffer(both.scores, "<f4")] == reference(ids[:10], 1)
        assert len(both.tokens) == 2


async def test_a_lost_stage_is_replaced_and_the_scores_are_the_same(scene: Scene) -> None:
    slow_down(scene)
    collected = Collected(lambda number: scene.kill("w1") if number == 15 else None)
    async with scene.chain() as chain:
        await score_all([chain], collected.requests(), 2, 60)
        assert chain.times.mendings
    collected.check()


async def planned(scene: Scene, pool: WorkerPool, stages: int | None) -> PlannedSplit:
    model, text = await scene.model(), cast(ModelText, SimpleNamespace(context=None))
    plan = await scene.plan(pool, model, stages=stages, positions=120)
    return PlannedSplit("model", text, model, plan, SplitOptions(stages, "fp32"), pool, Console(quiet=True))


def names(chains: Sequence[StageChain]) -> list[list[str]]:
    return [[stage.peer.name for stage in chain.plan.stages] for chain in chains]


async def test_chains_share_the_work_and_the_rest_does_what_a_lost_one_had(tmp_path: Path) -> None:
    async with scene_of(tmp_path, limit_bytes=SMALL_BYTES) as scene:
        slow_down(scene)
        pool = await scene.replica()
        chains = await (await planned(scene, pool, 2)).load_all()
        assert names(chains) == [["w0", "w1"], ["w2", "w3"]]
        collected = Collected(lambda number: scene.kill("w3") if number == 15 else None)
        await score_all(chains, collected.requests(), 2, 60)
        collected.check()
        assert chains[1].lacking
        collected = Collected(lambda number: scene.kill("w0") if number == 15 else None)
        with pytest.raises(NetworkError, match="cannot be repaired") as caught:
            await score_all(chains, collected.requests(), 2, 60)
        assert caught.value.remedy
        assert 5 < len(collected.scores) < len(TEXTS)
        await asyncio.gather(*(chain.close() for chain in chains))
        await pool.close()


async def test_an_error_of_the_text_is_no_failure_of_a_model(scene: Scene) -> None:
    def fail(number: int) -> None:
        if number == 4:
            raise UserError("the file is gone")

    async with scene.chain() as chain:
        with pytest.raises(UserError, match="the file is gone"):
            await score_all([chain], Collected(fail).requests(), 3, 60)
        assert not chain.times.mendings
    await asyncio.sleep(1)  # virtual
    assert set(scene.sessions().values()) == {0}


@pytest.mark.parametrize(
    ("workers", "limit_bytes", "stages", "expected"),
    [
        (4, 1 << 30, None, [["w0"], ["w1"], ["w2"], ["w3"]]),
        (4, SMALL_BYTES, None, [["w0", "w1"], ["w2", "w3"]]),
        (3, SMALL_BYTES, None, [["w0", "w1"]]),
        (4, 1 << 30, 3, [["w0", "w1", "w2"]]),
    ],
)
async def test_as_many_chains_are_loaded_as_the_workers_can_hold(
    tmp_path: Path, workers: int, limit_bytes: int, stages: int | None, expected: list[list[str]]
) -> None:
    async with scene_of(tmp_path, names=[f"w{at}" for at in range(workers)], limit_bytes=limit_bytes) as scene:
        pool = await scene.replica()
        chains = await (await planned(scene, pool, stages)).load_all()
        assert names(chains) == expected
        left = {*scene.workers} - {name for chain in expected for name in chain}
        assert all({spare.name for spare in chain.plan.spares} == left for chain in chains)
        await asyncio.gather(*(chain.close() for chain in chains))
        await pool.close()


# ----------------------------------------------------------------------------------------------------------- with torch


class TorchParts:
    """A worker's parts of real models."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.holding = Holding(
            build_part=self._build, measure=measure_model, limit_bytes=1 << 30, stream_bps=lambda: 1e9, device="cpu"
        )

    def _build(self, spec: PartSpec, tensors: tuple[str, ...]) -> ServedPartBuilder:
        return ServedPartBuilder(spec, tensors)


async def scored(evaluation: Evaluation, models: Sequence[ServedModel]) -> dict[str, Any]:
    async def requests() -> AsyncIterator[ScoreRequest]:
        for window in evaluation.windows(models[0].vocab_size):
            yield ScoreRequest(window.tokens.tolist(), window.first, partial(evaluation.add, window))

    await score_all(models, requests(), 3, evaluation.width)
    return {"total": evaluation.total.to_map(), "documents": [score.to_map() for score in evaluation.documents]}


@pytest.mark.parametrize("stride", [None, 7])
async def test_an_evaluation_over_stages_is_that_of_one_process(tmp_path: Path, stride: int | None) -> None:
    directory = tmp_path / "model"
    make_of_bytes("llama", directory)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: some text of {name}\n" * 9)
    tokenizer = ModelText(directory).tokenizer

    def evaluation() -> Evaluation:
        return Evaluation(tokenizer, DataSpec(path=str(tmp_path / "*.txt"), sequence_tokens=24), stride=stride)

    whole = LocalModel(load_whole(directory, device="cpu"), ComputeThread(LoopThreads()), LoopClock())
    expected = await scored(evaluation(), [whole])
    await whole.close()
    async with scene_of(tmp_path, stand_ins=TorchParts) as scene:
        pool = await scene.replica()
        model = await model_of_directory(scene.context, directory)
        for stages in (1, 2, 3):
            plan = await scene.plan(pool, model, stages=stages)
            chain = await StageChain.load(pool, model, plan)
            assert await scored(evaluation(), [chain]) == expected, "the same bits"
            await chain.close()
        await pool.close()
    alone = evaluation()
    score_here(alone, directory, "cpu", "")
    assert len(alone.documents) == 2
    for here, there in zip([*alone.documents, alone.total], [*expected["documents"], expected["total"]], strict=True):
        figures = here.to_map()
        assert {key: figures[key] for key in ("name", "tokens", "bytes")}.items() <= there.items()
        assert figures["loss"] == pytest.approx(there["loss"], abs=1e-5)
