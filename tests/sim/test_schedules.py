"""Whole clusters under seeded faults: nothing may be violated, and the same number must be the same run.

`P2PTRAIN_SIM_SEED` is the number of a batch's first schedule, `P2PTRAIN_SIM_RUNS` how many it has.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from p2ptrain.lab.sim.cluster import Simulation
from p2ptrain.lab.sim.faults import KINDS, KINDS_OF_PARTS, PHASES, FaultSchedule
from p2ptrain.lab.sim.run import PRIVATE, Summary, _to_the_end, replay, run_batch, run_schedule
from ring.job_member import MemberPhase

FIRST = int(os.environ.get("P2PTRAIN_SIM_SEED", "1"))
RUNS = int(os.environ.get("P2PTRAIN_SIM_RUNS", "6"))


def clean(numbers: Sequence[int], **options: Any) -> Counter[str]:
    """Run schedules that must violate nothing. Returns how often each invariant was checked."""
    summary = Summary()
    for verdict in run_batch(numbers, **options):
        summary.add(verdict)
    told = [f"{verdict.text}\n  → {replay(verdict, **options)}" for verdict in summary.violations]
    assert not told, "\n".join(told)
    assert summary.steps > len(numbers)
    return summary.checks


def test_a_batch_violates_nothing() -> None:
    checks = clean(range(FIRST, FIRST + RUNS))
    assert all(checks[name] for name in ("same bits", "exactly once", "no fork"))


@pytest.mark.parametrize(("stages", "peers"), [(2, 2), (2, 4), (3, 5)])  # a replica, two replicas, a replica and spares
def test_parts_of_every_state_of_a_split_model_fit_together(stages: int, peers: int) -> None:
    checks = clean(range(FIRST, FIRST + RUNS // 3), peers=peers, stages=stages)
    assert all(checks[name] for name in ("same bits", "exactly once", "no fork", "ledger", "one cut"))


@pytest.mark.parametrize(
    ("strategy", "check"),
    [
        ("local", "same bits"),  # with fragments, overlap and samples, and without
        ("federated", "same bits"),
        ("server", "versions"),  # with buffers of 1 and 2, bounds adaptive and fixed
    ],
)
def test_strategy_with_own_copies_violates_nothing(strategy: str, check: str) -> None:
    assert clean(range(FIRST, FIRST + 4), strategy=strategy)[check] > 4


def test_a_robust_rule_leaves_out_the_attacker_in_every_step() -> None:
    assert clean([FIRST], rule="multi_krum")["attacker excluded"] > 4


def test_a_private_job_counts_each_release_and_uses_no_noise_or_mask_twice() -> None:
    checks = clean(range(FIRST, FIRST + 2), strategy=PRIVATE)
    assert checks["used once"] > checks["privacy counted"] > 20


GROUP = 4


async def in_turn(simulation: Simulation, faults: FaultSchedule, rng: random.Random, kinds: Sequence[str]) -> None:
    """Every kind once, soon after one another, each with a newcomer, from a ring that trains on."""
    observer = simulation.observer
    simulation.seed.start()
    await simulation.create_job()
    for machine in simulation.workers[1:]:
        machine.start()
    await faults._until(lambda: len(observer.history.lineages) > 1)
    for kind in kinds:
        assert observer.job_state != "done", f"{kind} has nothing to strike"
        faults.join()
        await faults.strike(kind)
        await asyncio.sleep(rng.choice((0.0, 0.2, 0.5, 1.0)))
    await _to_the_end(simulation, faults)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("at", range(0, len(KINDS | KINDS_OF_PARTS), GROUP))
def test_every_kind_of_fault_strikes_and_is_survived(at: int, stages: int) -> None:
    kinds = [kind for kind in [*KINDS, *KINDS_OF_PARTS][at : at + GROUP] if stages > 1 or kind in KINDS]
    verdict = run_schedule(1 + at // GROUP, peers=4, kinds=kinds, stages=stages, conduct=in_turn)
    timeline = "\n".join(f"{at_s:.2f} {text}" for at_s, text in verdict.timeline)
    assert not verdict.violated, f"{kinds}: {verdict.text}\n{timeline}"


def test_the_same_number_is_the_same_run_in_another_process_too_and_needs_no_torch() -> None:
    code = (
        "import sys, p2ptrain.cli.sim; from p2ptrain.lab.sim.run import run_schedule; "
        "print(run_schedule(5, verbose=True).fingerprint); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # that of this process is another one
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert ran.stdout.strip() == run_schedule(5, verbose=True).fingerprint.encode()


def test_faults_meet_every_phase_of_the_transaction() -> None:
    phases = ("FORMING", "HEALING", "REDUCING", "VOTING", "APPLYING", "BOUNDARY")
    assert {MemberPhase[name] for name in phases} <= set(PHASES)
