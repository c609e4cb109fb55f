"""Runs of an experiment on processes of this machine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from p2ptrain.cluster.local_cluster import LocalCluster, own_texts, threads_each
from p2ptrain.core.errors import JobFailed
from p2ptrain.lab.experiments.grid import GridPlan, GridRun, RunMachine
from p2ptrain.lab.experiments.results import DONE, Result
from p2ptrain.lab.experiments.run import Show, failure, measure


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
            result = await LocalCluster.while_alive(self._measured(self._cluster, run, show), needed=needed)
        except JobFailed as error:  # a process ended; the end of the seed is no result
            if self._cluster.seed.process.returncode is not None:
                raise
            result = Result(failure(error.message), error.with_remedy)
        if result.state != DONE:
            await self.end()
        return result

    async def _measured(self, cluster: LocalCluster, run: GridRun, show: Show) -> Result:
        async with cluster.operator() as client:
            return await measure(client, run, self._plan, show)

    async def _begin(self, run: GridRun) -> None:
        self._cluster, self._machine = LocalCluster(self._root), run.machine
        machine, texts = run.machine, own_texts(run.profile, run.machine.workers, [])
        options = ["--threads", str(machine.threads or threads_each(machine.workers))]
        options += ["--link", machine.link] * bool(machine.link)
        await self._cluster.start_seed()
        await self._cluster.start_workers(
            machine.workers, *options, straggler=machine.straggler, texts=texts, attacks=machine.attacks
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
