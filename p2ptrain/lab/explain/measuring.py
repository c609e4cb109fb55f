"""Trains some steps with each strategy on this machine: the times that ``ring.planning.prediction`` begins with.

The steps are those of real workers, one job after another, so they share cores and memory as in training.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cluster.console import stoppable, unless_stopped
from p2ptrain.cluster.local_cluster import LocalCluster, threads_each
from p2ptrain.core.errors import JobFailed

if TYPE_CHECKING:
    from configs.schema import Profile
    from wire.records import LinkInfo, PeerInfo

STEPS, WARM_STEPS, PASSES, MOST_S = 10, 2, 2, 30.0
"""Of each job: steps, the first of them that a mean leaves out, micro-batches of a worker in a step, longest time."""


@dataclass(frozen=True, slots=True)
class StrategyTimings:
    """What some workers of this machine are, and what a step took them.

    Attributes:
        jobs: strategy → the profile that was trained, and its figures (``p2ptrain.lab.experiments.results.FIGURES``).
    """

    workers: list[PeerInfo]
    links: list[LinkInfo]
    jobs: dict[str, tuple[Profile, dict[str, float]]]


async def measure(profile: Profile, workers: int, strategies: Sequence[str], *, quiet: bool) -> StrategyTimings | None:
    """Train with so many workers; None after Ctrl+C.

    Args:
        strategies: besides ``sync``. One that these workers cannot train is left out.

    Raises:
        P2PTrainError: a process ended, or ``sync`` cannot be trained.
    """
    console, stop = stoppable()
    console.quiet = quiet
    cluster = LocalCluster(Path(tempfile.mkdtemp(prefix="p2ptrain-explain-")))  # kept after a failure, for its logs

    async def work() -> StrategyTimings:
        console.progress(cluster.start_notice(workers))
        await cluster.start_seed()
        threads = profile.device.threads or threads_each(workers)
        await cluster.start_workers(workers, "--threads", str(threads), "--device", profile.device.kind)
        await cluster.wait_until_joined(cluster.peers)
        training = _trained(cluster, profile, workers, strategies, console.progress)
        return await LocalCluster.while_alive(training, needed=[cluster.seed, *cluster.peers.values()])

    try:
        found = await unless_stopped(stop, work())
    finally:
        await cluster.end()
        console.finish()
    await asyncio.to_thread(shutil.rmtree, cluster.root, ignore_errors=True)
    return found


async def _trained(
    cluster: LocalCluster, profile: Profile, workers: int, strategies: Sequence[str], show: Callable[[str], None]
) -> StrategyTimings:
    from pydantic import ValidationError

    from p2ptrain.lab.experiments.grid import Grid, GridPlan, GridRun, RunMachine
    from p2ptrain.lab.experiments.run import measure as run_job

    async with cluster.operator() as client:
        show("the workers measure their speed and their links")
        links = await client.links()
        peers = [peer for peer in await client.peers() if peer.roles == ["worker"]]
    found, machine = StrategyTimings(peers, links, {}), RunMachine(workers=workers, link="", threads=0, private=False)
    for strategy in dict.fromkeys(("sync", *strategies)):
        try:
            brief = short(profile, strategy, workers)
        except ValidationError:  # such as one that needs two workers
            continue
        run = GridRun(strategy, {"strategy": strategy}, {}, 1, brief, machine)
        plan = GridPlan(Grid(name="explain", axes={"strategy": [strategy]}), [run], MOST_S)
        async with cluster.operator() as client:
            result = await run_job(client, run, plan, partial(_show, show, strategy))
        figures = {name: value or 0.0 for name, value in result.figures.items()}
        if strategy == "server" and figures.get("steps", 0) > WARM_STEPS:
            # Its versions come in groups, so a median of their times tells little.
            times_s = [float(point[1] or 0.0) for point in result.curve[WARM_STEPS - 1 :]]
            figures["step_ms"] = 1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        if figures.get("step_ms"):
            found.jobs[strategy] = brief, figures
        elif strategy == "sync":
            text = f"no step of {PASSES} micro-batches could be trained within {MOST_S:g} s: {result.reason}"
            raise JobFailed(text, remedy="close other programs, or set a smaller batch.micro_batch_sequences")
    return found


def short(profile: Profile, strategy: str, workers: int) -> Profile:
    """The profile of a short job of a strategy, without what only some strategies know. Raises ``ValidationError``."""
    tables = profile.model_dump()
    tables["job"] |= {"strategy": strategy, "workers": workers, "exact": False, "steps": STEPS}
    tables["batch"]["micro_batches"] = PASSES * workers
    tables |= {name: {} for name in ("robust", "ring", "federated", "privacy", "track", "link")}
    tables |= {"validation": {"every": 0}, "checkpoint": {"every": 0}}
    tables["data"]["private"] = False
    tables["sharded"]["shards"], tables["server"]["buffer"] = 2, 1
    tables["pipeline"] |= {"stages": 2 if strategy == "pipeline" else 0, "cuts": []}
    return type(profile).model_validate(tables)


def _show(show: Callable[[str], None], strategy: str, text: str) -> None:
    show(f"measuring {strategy}: {text}")
