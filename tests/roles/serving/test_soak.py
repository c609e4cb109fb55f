"""The whole engine under random requests: drafts, cancels, shared beginnings, too little memory, lost stages.

``P2PTRAIN_SOAK=1000`` has it write so many texts.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from p2ptrain.compute.text import ModelText
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.serving import BLOCK_POSITIONS
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock, World
from p2ptrain.lab.memory import MemoryNetwork
from roles.compute_thread import ComputeThread
from roles.serving.chain import StageChain
from roles.serving.local_model import LocalModel, load_local_engine
from roles.serving.model import PassRequest
from tests.compute.families import VOCAB, make
from tests.roles.stage_stand_in import stand_in_part, tokens_of

from .scene import CONFIG, LAYERS, Scene, scene_of
from .soak import Soak, SoakRequest, draw_requests, write_words

pytestmark = pytest.mark.virtual_time

REQUESTS = int(os.environ.get("P2PTRAIN_SOAK", "0"))
CONTEXT = 512
BLOCKS = 6
"""Memory of the whole model: less than two of the longest texts need."""


async def load(directory: Path, threads: LoopThreads, blocks: int = 0) -> LocalModel:
    compute = ComputeThread(threads)
    engine, context = await load_local_engine(directory, compute, device="cpu")
    cache_bytes = blocks * BLOCK_POSITIONS * engine.cache_position_bytes
    return LocalModel(engine, compute, LoopClock(), context=context, cache_bytes=cache_bytes)


async def write_alone(model: LocalModel, text: ModelText, request: SoakRequest) -> list[int]:
    """The text of a model that computes nothing else, and has computed nothing of it before."""
    ids, sampling = list(request.ids), text.sampling(request.sampling)
    session = await model.open(positions=len(ids) + request.tokens, sampling=sampling, sample_from=len(ids))
    work = PassRequest(0, tuple(ids), 1)
    while len(ids) < len(request.ids) + request.tokens:
        ids += (await session.append(work)).tokens
        work = PassRequest(len(ids) - 1, (ids[-1],), 1)
    await session.close()
    return ids[len(request.ids) :]


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
async def test_texts_of_a_whole_model_are_those_that_it_writes_alone(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "model", num_hidden_layers=2, max_position_embeddings=CONTEXT)
    words = write_words(tmp_path / "words", VOCAB, CONTEXT)
    text, rng = ModelText(words), random.Random(family)
    requests = draw_requests(rng, REQUESTS or 24, vocab_size=VOCAB, prefixes=(10, 80, 250))
    threads = LoopThreads()
    threads.call_s["compute"] = 0.01
    alone = await load(tmp_path / "model", threads)
    wanted = {request: await write_alone(alone, text, request) for request in requests}
    await alone.close()
    world = World(LoopClock(), MemoryNetwork(), RealDisk(), random.Random(1), threads)
    model = await load(tmp_path / "model", threads, BLOCKS)
    await write_with_little_memory(Soak(model, world, words, wanted), model, rng, len(wanted))


@pytest.mark.parametrize("seed", range(2))
async def test_texts_of_a_whole_model_are_right_with_little_memory(seed: int, tmp_path: Path) -> None:
    """As the first test, without torch."""
    rng, requests = random.Random(seed), stand_in_requests(tmp_path, random.Random(seed), 40)
    engine, threads = stand_in_part(CONFIG, 0, LAYERS), LoopThreads()
    threads.call_s["compute"] = 0.01
    cache_bytes = BLOCKS * BLOCK_POSITIONS * engine.cache_position_bytes
    model = LocalModel(engine, ComputeThread(threads), LoopClock(), context=CONTEXT, cache_bytes=cache_bytes)
    world = World(LoopClock(), MemoryNetwork(), RealDisk(), random.Random(1), threads)
    soak = Soak(model, world, tmp_path / "words", requests)
    await write_with_little_memory(soak, model, rng, len(requests))


async def write_with_little_memory(soak: Soak, model: LocalModel, rng: random.Random, count: int) -> None:
    """Run the soak of ``count`` texts, and check what came of it."""
    await soak.run(rng, at_a_time=8, pause=lambda: rng.expovariate(20))
    await model.close()
    assert not soak.failed
    assert soak.cached > 0, "texts that begin alike share blocks"
    assert model.preemptions > 0, "there is too little memory for eight texts"
    assert soak.ended > count / 2


@pytest.mark.parametrize("seed", range(2))
async def test_texts_of_a_split_model_are_those_of_one_part(seed: int, tmp_path: Path) -> None:
    """Connections break all the time, and three workers die."""
    rng, requests = random.Random(seed), stand_in_requests(tmp_path, random.Random(seed))
    names = [f"w{number}" for number in range(10)]
    async with scene_of(tmp_path, names=names, delay_s=lambda *_: rng.choice([0.0, 0.001, 0.01])) as scene:
        for worker in scene.workers.values():
            worker.threads.call_s["compute"] = 0.01
        async with scene.chain(stages=3, positions=6000) as chain:
            breaking = asyncio.create_task(break_things(scene, chain, rng))
            soak = Soak(chain, scene.context.world, tmp_path / "words", requests)
            await soak.run(rng, at_a_time=8, pause=lambda: rng.expovariate(20))
            breaking.cancel()
    assert not soak.failed
    assert chain.times.mendings
    assert soak.ended > len(requests) / 2


def stand_in_requests(directory: Path, rng: random.Random, count: int = 24) -> dict[SoakRequest, list[int]]:
    """Requests to a model of stand-ins, each with its text; their words are below ``directory``."""
    text = ModelText(write_words(directory / "words", 97, CONTEXT))
    return {
        request: tokens_of(CONFIG, list(request.ids), request.tokens, text.sampling(request.sampling))
        for request in draw_requests(rng, REQUESTS or count, vocab_size=97, prefixes=(10, 90))
    }


async def break_things(scene: Scene, chain: StageChain, rng: random.Random) -> None:
    """Cut connections for a moment, again and again, and three times kill the holder of a stage."""
    kills = 3
    while True:
        await asyncio.sleep(rng.expovariate(2))
        holders = [seat.peer.name for seat in chain.seats if seat is not None]
        if kills and holders and rng.random() < 0.3:
            kills -= 1
            scene.kill(rng.choice(holders))
        one, other = rng.sample(list(scene.workers), 2)
        scene.network.cut(one, other)
        await asyncio.sleep(rng.choice([0.0, 0.2]))
        scene.network.mend(one, other)
