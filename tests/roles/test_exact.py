"""Exact mode: whoever computes what, and however many they are, a run ends with the bits of one member alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from configs.schema import Profile
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from ring.token import first_lineage, next_lineage
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.snapshots import state_digest
from roles.strategies.interface import ConnectPeers, Contribution
from roles.strategies.strategy import Strategy
from roles.worker.build import engine_builder
from tests.ring.local import local_ring
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_strategy import summing

PATIENCE_S = 20.0
MICRO_BATCHES = 4
STEPS = 9


def exact_profile(**tables: Any) -> Profile:
    base: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "exact": True, "workers": 1},
        "batch": {"micro_batches": MICRO_BATCHES, "micro_batch_sequences": 2},
        "data": {"sequence_tokens": 16},
        "model": {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "context": 64},
        "optimizer": {"warmup_steps": 5, "clip_norm": 0.5},
        "validation": {"batches": 2},
        "device": {"kind": "cpu"},
    }
    for name, values in tables.items():
        base[name] = base.get(name, {}) | values
    return Profile.model_validate(base)


@pytest.fixture
def text_profile(tmp_path: Path) -> Profile:
    words = np.random.default_rng(5).choice(["def", "ring", "peer", "seed", "x =", "1"], (500, 9))
    text = tmp_path / "words.txt"
    text.write_text("\n".join(" ".join(row) for row in words.tolist()))
    return exact_profile(data={"path": str(text)})


@pytest.fixture
def threads() -> Iterator[list[ComputeThread]]:
    made: list[ComputeThread] = []
    yield made
    for thread in made:
        thread.close()


@dataclass
class Phase:
    """So many members for so many steps, over rings that cut arrays so."""

    members: int
    steps: int
    sub_chunk_bytes: int = 0
    bucket_bytes: int = 4096
    codec: str = "fp32"


@dataclass
class Ended:
    """What a run came to. ``states`` of all members, SHA-256 after each step."""

    lineage: str
    states: list[str]
    losses: list[float]
    norms: list[float]


def sha256(engine: Engine) -> str:
    return hashlib.sha256(b"".join(bytes(blob.view) for blob in engine.state.blobs())).hexdigest()


def shares_of(members: int, rng: random.Random) -> list[tuple[int, int]]:
    cuts = [0, *sorted(rng.randint(0, MICRO_BATCHES) for _ in range(members - 1)), MICRO_BATCHES]
    return [(start, stop - start) for start, stop in pairwise(cuts)]


async def together(
    profile: Profile, build: Callable[[Profile], Engine], phases: list[Phase], threads: list[ComputeThread]
) -> Ended:
    """Train as the phases say, with other shares in every step; newcomers copy the first member's state."""
    rng = random.Random(3)
    engines = [build(profile)]
    engines[0].state.load_initial()
    lineage = first_lineage("exact", state_digest(engines[0].state.blobs()))
    ended = Ended(lineage, [], [], [])
    step = 0
    for phase in phases:
        rng.shuffle(engines)  # whoever leaves, and whoever is rank 0
        del engines[phase.members :]
        while len(engines) < phase.members:
            engines.append(build(profile))
            for source, target in zip(engines[0].state.blobs(), engines[-1].state.blobs(), strict=True):
                target.view[:] = source.view
            engines[-1].state.refresh(step)
        threads += [ComputeThread() for _ in engines[len(threads) :]]
        async with local_ring(phase.members, MemoryNetwork(), sub_chunk_bytes=phase.sub_chunk_bytes) as ring:
            strategies = [
                summing(engine, thread, phase.bucket_bytes) for engine, thread in zip(engines, threads, strict=False)
            ]
            for member in ring:
                member.session.view = replace(member.session.view, codec=phase.codec)
            for strategy, member in zip(strategies, ring, strict=True):
                await strategy.begin_view(member.session, cast(ConnectPeers, None))
            for _ in range(phase.steps):
                said = await one_step(strategies, step, rng)
                assert len({one.digest for one in said}) == 1
                (square_sum,) = {one.part for one in said}
                applied = [await strategy.commit(step, square_sum) for strategy in strategies]
                step += 1
                ended.lineage = next_lineage(ended.lineage, said[0].digest)
                ended.losses.append(applied[0].loss)
                ended.norms.append(applied[0].grad_norm)
                (state,) = {sha256(engine) for engine in engines}
                ended.states.append(state)
    return ended


async def one_step(strategies: list[Strategy], step: int, rng: random.Random) -> list[Contribution]:
    async def run(strategy: Strategy, first: int, count: int) -> Contribution:
        await strategy.compute(step, first, count, patience_s=PATIENCE_S)
        return await strategy.reduce()

    shares = shares_of(len(strategies), rng)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run(strategy, first, count))
            for strategy, (first, count) in zip(strategies, shares, strict=True)
        ]
    return [task.result() for task in tasks]


CHURN = [
    [Phase(2, STEPS, 64)],
    [Phase(3, STEPS, 0)],
    [Phase(1, 2), Phase(3, 2, 1024), Phase(2, 1, 64, 0), Phase(3, 2, 0, 1 << 20), Phase(1, 1), Phase(2, 1, 4096)],
]


@pytest.mark.parametrize("phases", CHURN)
async def test_a_model_ends_with_the_bits_of_one_member(
    text_profile: Profile, phases: list[Phase], threads: list[ComputeThread]
) -> None:
    build = engine_builder()
    alone = await together(text_profile, build, [Phase(1, STEPS)], threads)
    ended = await together(text_profile, build, phases, threads)
    assert ended == alone
    assert len(set(alone.states)) == STEPS
    assert alone.losses[-1] < alone.losses[0] - 0.5
    assert max(alone.norms) > 0.5, "the clipping was exercised"


@pytest.mark.parametrize("phases", CHURN)
async def test_the_stand_in_ends_with_the_bits_of_one_member(phases: list[Phase], threads: list[ComputeThread]) -> None:
    profile = exact_profile()
    alone = await together(profile, StandInEngine, [Phase(1, STEPS)], threads)
    assert await together(profile, StandInEngine, phases, threads) == alone


async def test_the_job_alone_says_how_many_threads(text_profile: Profile) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        for threads, label in ((0, "cpu (1 thread)"), (2, "cpu (2 threads)")):
            device = text_profile.device.model_copy(update={"threads": threads})
            engine = engine_builder(threads=3)(text_profile.model_copy(update={"device": device}))
            assert engine.device == label
            assert engine.exact
            assert engine.reduce_buffer.dtype == np.int64
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------- own norms


class Spoiling(StandInEngine):
    """Contributes a value that is not finite, or is absurd, in one micro-batch of every step."""

    def __init__(self, profile: Profile, value: float, place: int, index: int) -> None:
        super().__init__(profile)
        self._spoil = value, place, index

    def contribution(self, step: int, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        made = super().contribution(step, index)
        value, place, spoiled = self._spoil
        if index == spoiled:
            made[place] = value
        return made


async def said_by(engines: list[StandInEngine], threads: list[ComputeThread]) -> list[Contribution]:
    """One step of three members, of which the last one has micro-batches 2 and 3, and the second one none."""
    for engine in engines:
        engine.state.load_initial()
        threads.append(ComputeThread())
    async with local_ring(3, MemoryNetwork()) as ring, asyncio.timeout(20):
        strategies = [summing(*pair, 256) for pair in zip(engines, threads, strict=True)]

        async def run(rank: int, first: int, count: int) -> Contribution:
            await strategies[rank].begin_view(ring[rank].session, cast(ConnectPeers, None))
            await strategies[rank].compute(0, first, count, patience_s=PATIENCE_S)
            return await strategies[rank].reduce()

        return list(await asyncio.gather(run(0, 0, 2), run(1, 2, 0), run(2, 2, 2)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("value", "place"), [(math.nan, 0), (math.inf, 130), (-math.inf, 256), (math.nan, -1)])
async def test_a_contribution_that_is_not_finite_is_told_by_whom_it_is(
    exact: bool, value: float, place: int, threads: list[ComputeThread]
) -> None:
    profile = exact_profile(job={"exact": exact})
    engines = [StandInEngine(profile), StandInEngine(profile), Spoiling(profile, value, place, 3)]
    said = await said_by(engines, threads)
    assert [math.isnan(one.own) for one in said] == [False, False, True]
    if not exact:
        assert any(math.isnan(one.part) for one in said), "the sum shows it, too"


# -------------------------------------------------------------------------------------------------- a whole cluster


async def test_a_cluster_with_churn_ends_with_the_bits_of_one_process(cluster: Cluster) -> None:
    """Members die and come while it trains; at the end there are the state and the lineage of a loop of one."""
    profile = exact_profile(job={"steps": 14, "workers": 3}, checkpoint={"every": 5}, validation={"every": 5})
    alone = StandInEngine(profile)
    alone.state.load_initial()
    lineage = first_lineage(profile.to_spec(), state_digest(alone.state.blobs()))
    for step in range(14):
        alone.begin_step(step)
        for index in reversed(range(MICRO_BATCHES)):
            alone.micro_batch(step, index)
        lineage = next_lineage(lineage, xxhash.xxh3_128_digest(alone.reduce_buffer.view(np.uint8).data))
        alone.apply(step, alone.partial_square_sum(0, alone.reduce_buffer.size))

    gate = Gate(3, 7)
    job = await cluster.create(profile)
    peers = [cluster.join(gate.build) for _ in range(3)]
    for step, dying in ((3, 0), (7, 1)):
        await gate.reached(step)
        await peers[dying].die()
        newcomer = cluster.join(gate.build)
        async with asyncio.timeout(20):
            await newcomer.joined.wait()
        gate.on()
    ended = await cluster.job_until(job, lambda item: item["state"] == "done")
    assert ended["step"] == 14
    assert ended["generation"] > 2
    there = [peer for peer in peers if not peer.task.done()]
    there += [peer for peer in cluster.peers[3:] if 14 in peer.steps]  # those that came in time
    ends = [peer.engines[-1] for peer in there]
    assert {sha256(engine) for engine in ends} == {sha256(alone)}
    await cluster.saved(job, 14, writers=1)
    manifests = [json.loads(path.read_text()) for path in cluster.root.rglob("step-*/manifest.json")]
    assert {item["meta"]["lineage"] for item in manifests if item["step"] == 14} == {lineage}
