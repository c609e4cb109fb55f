"""Runs schedules of the simulator: one number decides one schedule. Many run in several processes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from configs.schema import Profile, Robust, RobustRule
from p2ptrain.lab.sim.cluster import Simulation
from p2ptrain.lab.sim.faults import KINDS, KINDS_OF_PARTS, FaultSchedule
from p2ptrain.lab.sim.machine import SimLoop, undisturbed
from p2ptrain.lab.sim.probe import Act
from roles.strategies.federated import LEAST_MASKED

STEPS = 20
CALM_S = 1200.0
"""Virtual time limit from the last fault to the end of the job; ``ring.coordination`` has the waits."""
MOST_PEERS, MOST_FAULTS = 16, 8
_PROFILE: dict[str, Any] = {
    "job": {"steps": STEPS, "workers": 2},
    "batch": {"micro_batches": 8},
    "validation": {"every": 7, "batches": 3},
    "checkpoint": {"every": 4},
    "ring": {"bucket_bytes": 1024},  # two buckets; the first is sent while the step is computed
}
PRIVATE = "private"
"""Strategy 'federated' with masks and a privacy budget."""
_BUDGET = {"epsilon": 3.47, "noise": 6.0, "clip_norm": 1e-3}  # of 24 steps
SETTLE_S = 3.0  # until the last messages have arrived

Conduct = Callable[[Simulation, FaultSchedule, random.Random, Sequence[str]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one schedule.

    Attributes:
        number: number of the schedule.
        violated: name of the violated invariant; empty: none.
        checks: how often each invariant was checked.
        steps: commits, summed over members.
        fingerprint: digest of the timeline and the number of callbacks; equal runs have equal fingerprints.
    """

    number: int
    peers: int
    violated: str
    text: str
    checks: dict[str, int]
    virtual_s: float
    steps: int
    fingerprint: str
    timeline: list[tuple[float, str]] = field(repr=False)


@lru_cache(maxsize=4)
def _prepared(number: int, steps: int, stages: int, strategy: str, rule: RobustRule) -> tuple[Profile, list[Any]]:
    """The profile of schedule ``number`` (below 4), and what its steps lead to; nothing if that depends on who takes
    part."""
    job: dict[str, Any] = {**_PROFILE["job"], "exact": number % 2 == 0, "steps": steps}
    if strategy == PRIVATE:
        job |= {"exact": False, "strategy": "federated", "workers": LEAST_MASKED}
        private = {"job": job, "data": {"private": True}, "validation": {"every": 0}, "federated": {"secure": True}}
        return Profile.model_validate({**_PROFILE, **private, "privacy": _BUDGET}), []
    if strategy != "sync" or rule:
        varied = 0 if rule else number
        robust = Robust(rule=rule, byzantine=int(rule not in ("", "mean")))
        tables = {
            "job": job
            | {"exact": False, "strategy": strategy, "workers": max(3 if strategy == "server" else 2, robust.least)},
            "local": {"fragments": 1 + varied % 2, "overlap": varied >= 2},
            "federated": {"sample": 2 * (varied % 2)},
            "robust": robust,
            "server": {"buffer": 1 + number % 2, "bound": 3 * (number // 2)},
        }
        return Profile.model_validate(_PROFILE | tables), []
    if stages == 1:
        profile = Profile.model_validate({**_PROFILE, "job": job})
        return profile, undisturbed(profile)
    expected = undisturbed(Profile.model_validate({**_PROFILE, "job": {**job, "exact": False}}))
    job |= {"exact": False, "strategy": "pipeline", "workers": stages}
    return Profile.model_validate({**_PROFILE, "job": job, "pipeline": {"stages": stages}}), expected


def run_schedule(
    number: int,
    *,
    peers: int = 0,
    kinds: Sequence[str] = (),
    verbose: bool = False,
    stages: int = 1,
    strategy: str = "sync",
    rule: RobustRule = "",
    conduct: Conduct | None = None,
    acts: Mapping[str, Act] | None = None,
    steps: int = STEPS,
) -> SimulationResult:
    """Run the schedule of ``number``.

    Args:
        peers: machines for workers; 0: 2 to 16, fewer are likelier.
        kinds: kinds of faults; empty: all.
        stages: parts that the model is split into; 1: it is whole.
        strategy, rule: of a whole model, or ``PRIVATE``; with a robust rule one worker attacks (``machine.ATTACKER``).
        conduct: decides the events instead of the random generator.
        acts: of a test, by name of the event or the point of the probe.
    """
    kinds = kinds or list(KINDS if stages == 1 else KINDS | KINDS_OF_PARTS)
    profile, expected = _prepared(number % 4, steps, stages, strategy, rule)
    rng = random.Random(f"schedule {number}")  # noqa: S311
    if stages > 1:
        peers = peers or stages * rng.choice((1, 2, 2, 3)) + rng.choice((0, 0, 1, 2))
    least = profile.job.workers
    if rule or strategy == PRIVATE:  # each member of a step has a micro-batch
        peers = peers or rng.randint(least, profile.batch.micro_batches)
    peers = peers or min(rng.randint(least, MOST_PEERS), rng.randint(least, MOST_PEERS), rng.randint(least, MOST_PEERS))
    loop = SimLoop()
    simulation = Simulation(loop, profile, expected, number, peers=peers, verbose=verbose, acts=acts)
    loop.set_exception_handler(simulation.complaint)
    gc.disable()  # for speed; and a collection at an arbitrary moment would not be reproducible
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_simulate(simulation, rng, kinds, conduct or _conduct))
    finally:
        gc.enable()
    name, text = simulation.observer.report.violation or ("", "")
    timeline = simulation.observer.report.timeline
    fingerprint = hashlib.sha256(repr((timeline, loop.callbacks)).encode()).hexdigest()[:16]
    return SimulationResult(
        number,
        peers,
        name,
        text,
        simulation.observer.report.checks,
        loop.time(),
        simulation.observer.commits,
        fingerprint,
        timeline,
    )


async def _simulate(simulation: Simulation, rng: random.Random, kinds: Sequence[str], conduct: Conduct) -> None:
    faults, observer, check = FaultSchedule(simulation), simulation.observer, simulation.observer.report.check
    try:
        await conduct(simulation, faults, rng, kinds)
    except TimeoutError:
        check("progress", False, f"the job is {observer.job_state} after {CALM_S:g} s without a fault")
    else:
        await asyncio.sleep(SETTLE_S)
        if not observer.report.violation:  # else the seed may be gone
            await simulation.audit()
        newest, steps = observer.history.newest_step, simulation.profile.job.steps
        is_done = observer.job_state == "done"
        whole = newest == steps or simulation.profile.privacy.epsilon > 0 or not is_done
        kept = observer.history.saved_step == newest or not is_done
        check("result saved", kept, f"no disk has step {newest}, and the job is done")
        check("every step", whole, f"the job ended after step {newest} of {steps}")
    finally:
        faults.cancel()
        simulation.close()
        await asyncio.sleep(1)  # killed tasks are unwound
    check("progress", observer.job_state == "done", f"the job is {observer.job_state}")
    check("nothing unexpected", not simulation.complaints, "; ".join(simulation.complaints[:3]))


async def _conduct(simulation: Simulation, faults: FaultSchedule, rng: random.Random, kinds: Sequence[str]) -> None:
    observer = simulation.observer
    simulation.seed.start()
    await simulation.create_job()
    few = simulation.least if simulation.profile.stages == 1 else min(2, len(simulation.workers))
    for machine in rng.sample(simulation.workers, rng.randint(few, len(simulation.workers))):
        machine.start()
    observer.report.tell(f"begin with {[machine.host for machine in simulation.live]}")
    weights = [(KINDS | KINDS_OF_PARTS)[kind] for kind in kinds]
    for _ in range(rng.randint(2, MOST_FAULTS)):
        await _wait(simulation, rng.choice((0.0, 0.2, 0.5, 1.0, 3.0)))
        if observer.report.violation or observer.job_state in ("done", "failed", "cancelled"):
            break
        await faults.strike(rng.choices(kinds, weights)[0])
    await _to_the_end(simulation, faults)


async def _to_the_end(simulation: Simulation, faults: FaultSchedule) -> None:
    observer = simulation.observer
    await faults.calm(simulation.least)
    async with asyncio.timeout(CALM_S):
        while observer.job_state not in ("done", "failed", "cancelled") and not observer.report.violation:
            if observer.job_state != "running":  # it may be paused, and a restarted seed forgets to say
                await simulation.ask("jobs.resume", job=simulation.job)
            await _wait(simulation, 30.0)
        # A worker that lost the seed reports what it knows when it reconnects.
        while not observer.report.violation and not all(machine.linked for machine in simulation.live):
            await _wait(simulation, 1.0)


async def _wait(simulation: Simulation, seconds: float) -> None:
    simulation.observer.job_changed.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await simulation.observer.job_changed.wait()


@dataclass
class Summary:
    """Sums over a batch of schedules.

    Attributes:
        checks: how often each invariant was checked.
        violations: verdicts of the schedules that violated one.
        virtual_s: virtual time of all schedules.
        steps: commits, summed over members.
    """

    schedules: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    violations: list[SimulationResult] = field(default_factory=list)
    virtual_s: float = 0.0
    real_s: float = 0.0
    steps: int = 0

    def add(self, verdict: SimulationResult) -> None:
        self.schedules += 1
        self.checks.update(verdict.checks)
        self.virtual_s += verdict.virtual_s
        self.steps += verdict.steps
        if verdict.violated:
            self.violations.append(verdict)


def run_batch(numbers: Sequence[int], *, jobs: int = 1, **options: Any) -> Iterator[SimulationResult]:
    """Run the schedules of ``numbers`` in so many processes; yields their results in this order. ``options``: see
    ``run_schedule``."""
    run = partial(_run_one, options=options)
    if jobs == 1:
        yield from map(run, numbers)
        return
    context = multiprocessing.get_context("spawn")
    ignore_ctrl_c = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=ignore_ctrl_c)
    try:
        yield from pool.map(run, numbers, chunksize=4)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_one(number: int, *, options: dict[str, Any]) -> SimulationResult:
    verdict = run_schedule(number, **options)
    return verdict if options.get("verbose") else replace(verdict, timeline=[])


_FLAGS: dict[str, tuple[str, Any]] = {
    "peers": ("workers", 0), "kinds": ("kinds", ()), "stages": ("stages", 1), "strategy": ("strategy", "sync"),
    "rule": ("rule", ""),
}  # fmt: skip
"""Option of ``run_schedule`` → that of the command line, and the usual value."""


def replay(verdict: SimulationResult, **options: Any) -> str:
    """The command line of this schedule with these options of ``run_schedule``."""
    words = [f"p2ptrain sim --schedules 1 --random-seed {verdict.number} --timeline"]
    for name, (flag, usual) in _FLAGS.items():
        if (value := options.get(name)) and value != usual:
            words.append(f"--{flag} {','.join(value) if name == 'kinds' else value}")
    return " ".join(words)
