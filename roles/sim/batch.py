"""Many schedules, in as many processes as there are cores to spare, and what came of them all together."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from roles.sim.run import Verdict, run_schedule

CHUNK = 4  # schedules that a process takes at a time


@dataclass
class Summary:
    """Of a batch.

    Attributes:
        checks: how often each invariant was looked at, in all schedules.
        violations: verdicts of the schedules that violated one.
        virtual_s: time that passed in the simulated worlds.
        steps: commits of members, over all schedules.
    """

    schedules: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    violations: list[Verdict] = field(default_factory=list)
    virtual_s: float = 0.0
    real_s: float = 0.0
    steps: int = 0

    def add(self, verdict: Verdict) -> None:
        self.schedules += 1
        self.checks.update(verdict.checks)
        self.virtual_s += verdict.virtual_s
        self.steps += verdict.steps
        if verdict.violated:
            self.violations.append(verdict)


def run_batch(
    numbers: Sequence[int],
    *,
    peers: int = 0,
    kinds: Sequence[str] = (),
    mutation: str = "",
    stages: int = 1,
    jobs: int = 1,
    stop_at_first: bool = False,
    on_verdict: Callable[[Verdict, Summary], None] = lambda verdict, summary: None,
    summary: Summary | None = None,
) -> Summary:
    """Run the schedules of ``numbers``; see ``run_schedule``.

    Args:
        jobs: processes.
        stop_at_first: one violation is enough.
        on_verdict: called after each, in no order that means anything.
        summary: what is returned, for who may be interrupted before.
    """
    summary, began = summary or Summary(), time.perf_counter()
    one = partial(_without_timeline, peers=peers, kinds=tuple(kinds), mutation=mutation, stages=stages)
    with ExitStack() as stack:
        verdicts: Iterator[Verdict]
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=context, initializer=_leave_ctrl_c))
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            verdicts = pool.map(one, numbers, chunksize=CHUNK)
        else:
            verdicts = map(one, numbers)
        for verdict in verdicts:
            summary.add(verdict)
            summary.real_s = time.perf_counter() - began
            on_verdict(verdict, summary)
            if verdict.violated and stop_at_first:
                break
    summary.real_s = time.perf_counter() - began
    return summary


def _leave_ctrl_c() -> None:
    """To the process that gives the work: it goes to all of a terminal's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _without_timeline(number: int, *, peers: int, kinds: Sequence[str], mutation: str, stages: int) -> Verdict:
    """A timeline is long, and the schedule can be run again."""
    return replace(run_schedule(number, peers=peers, kinds=kinds, mutation=mutation, stages=stages), timeline=[])


def replay(verdict: Verdict, *, peers: int = 0, kinds: Sequence[str] = (), mutation: str = "", stages: int = 1) -> str:
    """The command that runs one schedule again and shows what happened."""
    words = [f"p2ptrain sim --schedules 1 --seed {verdict.number} --timeline"]
    words += [f"--peers {peers}"] * bool(peers) + [f"--faults {','.join(kinds)}"] * bool(kinds)
    words += [f"--stages {stages}"] * (stages > 1)
    return " ".join(words + [f"--without {mutation}"] * bool(mutation))
