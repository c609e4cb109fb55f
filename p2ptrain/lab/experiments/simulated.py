"""Runs of an experiment on virtual time: the real seed and real workers, with stand-ins for their models.

A worker takes 6 operations for each parameter and token, at the grid's ``gflops``. All its connections have the preset
of the run's link. Nothing else takes time, nothing fails, and stand-ins learn no text: so there are times, bytes and
recoveries, but no losses.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from configs.schema import Profile
from p2ptrain.core.footprint import llama_sizes
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import Network, World
from p2ptrain.lab.experiments.grid import GridPlan, GridRun
from p2ptrain.lab.experiments.results import Result
from p2ptrain.lab.experiments.run import Show, measure
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.sim.cluster import SimClock
from p2ptrain.lab.sim.machine import MachineDisk, Process
from p2ptrain.lab.stand_in import StandInEngine
from roles.engine import Stage
from roles.member import MemberOptions, claim
from roles.seed.run import run_seed
from roles.worker.worker import Worker
from wire.client import SeedClient
from wire.emulate import EmulatedNetwork, preset_named

SEED, PORT, VOCAB = "127.0.0.1", 7700, 256


async def simulate(plan: GridPlan, run: GridRun, show: Show) -> Result:
    """Carry out a run. Must run on a loop of virtual time (``p2ptrain.lab.memory``)."""
    network, rng = MemoryNetwork(), random.Random(run.id)  # noqa: S311 - equal runs
    link = run.machine.link
    linked = EmulatedNetwork(network, preset_named(link), rng.getrandbits(32)) if link else network

    def world(over: Network, threads: LoopThreads) -> World:
        own = random.Random(rng.getrandbits(64))  # noqa: S311
        return World(SimClock(), over, MachineDisk(own).view_for(Process("")), own, threads, own.randbytes)

    async def worker(number: int) -> None:
        threads = LoopThreads()

        def engine(profile: Profile, stage: Stage) -> StandInEngine:
            sizes = llama_sizes(profile.model, VOCAB)
            numel = sizes.weights_bytes(0, sizes.layers) // 4
            tokens = profile.batch.micro_batch_sequences * profile.data.sequence_tokens
            slower = run.machine.straggler if number == run.machine.workers else 1.0
            seconds = slower * 6 * numel * tokens / (plan.grid.gflops * 1e9)

            def compute(step: int, index: int) -> None:
                threads.taken_s += seconds

            return _Engine(profile, numel=numel, on_micro_batch=compute, stage=stage)

        here = world(linked, threads)
        await Worker(
            here,
            claim(here.disk, Path("/state"), role="worker", slot=number, name=f"worker-{number}"),
            MemberOptions("worker", (SEED, PORT), (SEED, 0), ("", 0), {}),
            build_engine=engine,
            warm_up=lambda: None,
            notify=lambda level, kind, text: None,
            on_step=lambda applied, total, values: None,
        ).run(stop)

    ready, stop = asyncio.Event(), asyncio.Event()
    seed = run_seed(
        world(network, LoopThreads()), state_dir=Path("/state"), host=SEED, port=PORT, name="seed",
        on_ready=lambda address: ready.set(), stop=stop,
    )  # fmt: skip
    tasks = [asyncio.create_task(seed)]
    await ready.wait()
    tasks += [asyncio.create_task(worker(number)) for number in range(1, run.machine.workers + 1)]
    client = await SeedClient.connect(network, SEED, PORT, name="experiment")
    try:
        result = await measure(client, run, plan, lambda text: show(text.partition("  loss")[0]))  # of a stand-in
    finally:
        await client.close()
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    figures = {key: it for key, it in result.figures.items() if not re.search("loss|memory|seconds_to|bytes_to", key)}
    return replace(result, figures=figures, curve=[(*point[:-2], None, None) for point in result.curve])


class _Engine(StandInEngine):
    def _target(self, step: int, index: int) -> npt.NDArray[np.float32]:
        return np.ones(1, np.float32)  # random numbers of a real size take long
