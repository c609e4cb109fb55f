"""Runs of an experiment on virtual time: the real seed and real workers, with stand-ins for their models.

A worker takes 6 operations for each parameter and token, at the grid's ``gflops``. All its connections have the preset
of the run's link. Nothing else takes time, nothing fails, and stand-ins learn no text: so there are times, bytes and
recoveries, but no losses.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from configs.schema import Profile
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import LLAMAS, llama_sizes
from p2ptrain.core.threads import Thread, outcome_of, settle
from p2ptrain.core.world import Network, World
from roles.experiments.grid import Plan, Run
from roles.experiments.results import Result
from roles.experiments.run import Execute, Show, measure
from roles.identity import claim
from roles.member import MemberOptions
from roles.seed import run_seed
from roles.sim.cluster import SimClock
from roles.sim.machine import MachineDisk, Process
from roles.stand_in import StandInEngine
from roles.worker.worker import Worker
from wire.client import SeedClient
from wire.emulate import EmulatedNetwork, preset_named
from wire.memory import MemoryNetwork, VirtualClockLoop

T = TypeVar("T")

STRATEGIES = ("sync", "local", "federated", "server")
_SHOWN = {"data": {"sequence_tokens"}} | dict.fromkeys(
    ("batch", "checkpoint", "federated", "job", "link", "local", "membership", "model", "ring", "robust", "server",
     "validation"), True
)  # fmt: skip
"""Settings that may change times or bytes here."""
SEED, PORT, VOCAB = "127.0.0.1", 7700, 256


def check_plan(plan: Plan, place: str) -> None:
    """Raise ``ConfigError`` if an axis varies what a simulation does not show, or a job cannot be simulated."""

    def check(wrong: object, text: str, remedy: str) -> None:
        if wrong:
            raise ConfigError(f"{place}: {text}", remedy=f"{remedy}, or run without --simulated")

    seen = dict[str, Run]()
    for run in plan.runs:
        profile, machine = run.profile, run.machine
        is_known = profile.job.strategy in STRATEGIES and not profile.data.private
        check(not is_known, f"{run}: only {', '.join(STRATEGIES)} are simulated, with shared data", "use one of them")
        is_sized = profile.model.architecture in LLAMAS and not profile.model.path
        check(not is_sized, f"{run}: the size of its model is not known", f"use a new model of {', '.join(LLAMAS)}")
        check(machine.attack, f"{run}: attacks show in losses, which a simulation does not have", "leave them out")
        shown = profile.model_dump_json(include=_SHOWN), machine.straggler
        twin = seen.setdefault(f"{shown}", run)
        check(
            twin is not run, f"{twin} and {run} are the same in a simulation, but for losses", "leave one of them out"
        )


def simulator(plan: Plan) -> Execute:
    async def simulate(run: Run, show: Show) -> Result:
        stopped = threading.Event()

        def say(text: str) -> None:
            if stopped.is_set():
                raise asyncio.CancelledError
            show(text.partition("  loss")[0])  # of a stand-in

        def work() -> Result:
            with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
                return runner.run(_simulated(run, plan, say))

        try:
            return await asyncio.to_thread(work)
        finally:
            stopped.set()

    return simulate


async def _simulated(run: Run, plan: Plan, show: Show) -> Result:
    network, rng = MemoryNetwork(), random.Random(run.id)  # noqa: S311 - equal runs
    linked: Network = network
    if run.machine.link:
        linked = EmulatedNetwork(network, preset_named(run.machine.link), rng.getrandbits(32))

    def world(over: Network) -> World:
        own = random.Random(rng.getrandbits(64))  # noqa: S311
        return World(SimClock(), over, MachineDisk(own).seen_by(Process("")), own, _Thread(), own.randbytes)

    def engine(profile: Profile, slower: float) -> StandInEngine:
        sizes = llama_sizes(profile.model, VOCAB)
        numel = sizes.weights_bytes(0, sizes.layers) // 4
        tokens = profile.batch.micro_batch_sequences * profile.data.sequence_tokens
        seconds = slower * 6 * numel * tokens / (plan.grid.gflops * 1e9)
        return _Engine(profile, numel=numel, on_micro_batch=lambda step, index: _Thread.take(seconds))

    async def worker(number: int) -> None:
        here, slower = world(linked), run.machine.straggler if number == run.machine.workers else 1.0
        await Worker(
            here,
            claim(here.disk, Path("/state"), role="worker", slot=number, name=f"worker-{number}"),
            MemberOptions("worker", (SEED, PORT), (SEED, 0), ("", 0), {}),
            build_engine=lambda profile: engine(profile, slower),
            warm_up=lambda: None,
            notify=lambda level, kind, text: None,
            on_step=lambda applied, total, values: None,
        ).run(stop)

    ready, stop = asyncio.Event(), asyncio.Event()
    seed = run_seed(
        world(network), state_dir=Path("/state"), host=SEED, port=PORT, name="seed",
        on_ready=lambda address: ready.set(), stop=stop,
    )  # fmt: skip
    tasks = [asyncio.create_task(seed)]
    await ready.wait()
    tasks += [asyncio.create_task(worker(number)) for number in range(1, run.machine.workers + 1)]
    client = await SeedClient.connect(network, SEED, PORT, name="experiment")
    try:
        result = await measure(client, run, plan, show)
    finally:
        await client.close()
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    figures = {key: it for key, it in result.figures.items() if not re.search("loss|memory|seconds_to", key)}
    return replace(result, figures=figures, curve=[(*point[:-2], None, None) for point in result.curve])


class _Engine(StandInEngine):
    def _target(self, step: int, index: int) -> npt.NDArray[np.float32]:
        return np.ones(1, np.float32)  # random numbers of a real size take long


class _Thread:
    """Makes threads. Their calls run on the event loop, in order. Each takes what it asks for with ``take``."""

    _asked_s = 0.0  # by the call that runs now

    @classmethod
    def take(cls, seconds: float) -> None:
        cls._asked_s += seconds

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._busy = False

    def start(self, name: str) -> Thread:
        return _Thread()

    def submit(self, call: Callable[[], T], *, idle: bool = False) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if not self._busy:
            self._next()
        return future

    def close(self) -> None:
        """Nothing to release."""

    def _next(self, *outcome: Any) -> None:
        """Settle the call that is over, with its future, result and error, and begin the next one."""
        if outcome:
            settle(*outcome)
        self._busy = bool(self._waiting)
        if self._waiting:
            call, future = self._waiting.popleft()
            _Thread._asked_s = 0.0
            outcome = (None, None) if future.cancelled() else outcome_of(call)
            asyncio.get_running_loop().call_later(_Thread._asked_s, self._next, future, *outcome)
