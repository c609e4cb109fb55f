"""Carries out runs of an experiment: on processes of this machine, or on virtual time.

A simulated run has the real seed and real workers, with stand-ins for their models. A worker takes 6 operations for
each parameter and token, at the grid's ``gflops``. All its connections have the preset of the run's link. Nothing else
takes time, nothing fails, and stand-ins learn no text: so there are times, bytes and recoveries, but no losses.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

from configs.schema import Profile
from p2ptrain.cluster.local_cluster import LocalCluster, own_texts
from p2ptrain.core.errors import JobFailed
from p2ptrain.core.footprint import llama_sizes
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import Network, World
from p2ptrain.lab.experiments.grid import GridPlan, GridRun, RunMachine
from p2ptrain.lab.experiments.results import DONE, Result
from p2ptrain.lab.experiments.run import Show, failure, measure
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.sim.cluster import SimClock
from p2ptrain.lab.sim.machine import MachineDisk, Process
from p2ptrain.lab.stand_in import FastStandIn
from roles.engine import Stage
from roles.member import MemberOptions, claim
from roles.seed.run import serving_seed
from roles.worker.worker import Worker
from wire.client import SeedClient
from wire.emulate import EmulatedNetwork, preset_named

SEED, PORT, VOCAB = "127.0.0.1", 7700, 256


class LocalWorkers:
    """Carries out runs on a seed and workers of this machine. They stay as long as the next run needs the same ones and
    nothing went wrong."""

    def __init__(self, plan: GridPlan, root: Path) -> None:
        """``root``: directory of the processes' state."""
        self._plan, self._root = plan, root.absolute()
        self._cluster: LocalCluster | None = None
        self._machine: RunMachine | None = None

    async def __call__(self, run: GridRun, show: Show) -> Result:
        if self._cluster is None or self._machine != run.machine:
            await self.end()
            show("workers start")
            await self._begin(run)
        assert self._cluster is not None
        needed = [self._cluster.seed, *self._cluster.peers.values()]
        try:
            result = await LocalCluster.while_alive(self._measure(self._cluster, run, show), needed=needed)
        except JobFailed as error:  # a process ended; the end of the seed is no result
            if self._cluster.seed.process.returncode is not None:
                raise
            result = Result(failure(error.message), error.with_remedy)
        if result.state != DONE:
            await self.end()
        return result

    async def _measure(self, cluster: LocalCluster, run: GridRun, show: Show) -> Result:
        async with cluster.operator() as client:
            return await measure(client, run, self._plan, show)

    async def _begin(self, run: GridRun) -> None:
        self._cluster, self._machine = LocalCluster(self._root), run.machine
        machine, texts = run.machine, own_texts(run.profile, run.machine.workers, [])
        await self._cluster.start_seed()
        await self._cluster.start_workers(
            machine.workers,
            threads=machine.threads,
            link=machine.link,
            straggler=machine.straggler,
            texts=texts,
            attacks=machine.attacks,
        )
        await self._cluster.wait_until_joined(list(self._cluster.peers))

    async def end(self) -> None:
        """End the processes, and delete what they kept but for their logs."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.end()
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        for path in self._root.iterdir() if self._root.is_dir() else ():
            if path.name != "logs":
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


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

        def engine(profile: Profile, stage: Stage) -> FastStandIn:
            sizes = llama_sizes(profile.model, VOCAB)
            numel = sizes.weights_bytes(0, sizes.layers) // 4
            tokens = profile.batch.micro_batch_sequences * profile.data.sequence_tokens
            slower = run.machine.straggler if number == run.machine.workers else 1.0
            seconds = slower * 6 * numel * tokens / (plan.grid.gflops * 1e9)

            def compute(step: int, index: int) -> None:
                threads.taken_s += seconds

            return FastStandIn(profile, numel=numel, on_micro_batch=compute, stage=stage)

        here = world(linked, threads)
        await Worker(
            here,
            claim(here.disk, Path("/state"), role="worker", slot=number, name=f"worker-{number}"),
            MemberOptions("worker", (SEED, PORT), (SEED, 0), ("", 0), {}),
            build_engine=engine,
        ).run(stop)

    stop, own = asyncio.Event(), world(network, LoopThreads())
    async with serving_seed(own, state_dir=Path("/state"), host=SEED, port=PORT, name="seed"):
        workers = [asyncio.create_task(worker(number)) for number in range(1, run.machine.workers + 1)]
        client = await SeedClient.connect(network, SEED, PORT, name="experiment")
        try:
            result = await measure(client, run, plan, lambda text: show(text.partition("  loss")[0]))  # of a stand-in
        finally:
            await client.close()
            stop.set()
            await asyncio.gather(*workers, return_exceptions=True)
    unknown = re.compile("loss|memory|seconds_to|bytes_to")
    figures = {name: value for name, value in result.figures.items() if not unknown.search(name)}
    return replace(result, figures=figures, curve=[(*point[:-2], None, None) for point in result.curve])
