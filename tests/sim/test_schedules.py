"""Whole clusters under seeded faults: nothing may be violated, and the same number must be the same run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ring.transaction import Phase
from roles.sim.faults import KINDS, PHASES
from roles.sim.run import PRIVATE, replay, run_batch, run_schedule
from roles.sim.watching import PRIVATE as MUTATIONS_OF_PRIVATE

RUNS = int(os.environ.get("P2PTRAIN_SIM_RUNS", "6"))


def test_a_batch_violates_nothing(first: int) -> None:
    summary = run_batch(range(first, first + RUNS))
    assert not summary.violations, "\n".join(f"{v.text}\n  → {replay(v)}" for v in summary.violations)
    assert summary.steps > RUNS
    assert all(summary.checks[name] for name in ("same bits", "exactly once", "no fork"))


@pytest.mark.parametrize("strategy", ["local", "federated"])
def test_members_with_a_copy_of_their_own_violate_nothing(first: int, strategy: str) -> None:
    summary = run_batch(range(first, first + 4), strategy=strategy)  # with fragments, overlap and samples, and without
    assert not summary.violations, "\n".join(
        f"{v.text}\n  → {replay(v, strategy=strategy)}" for v in summary.violations
    )
    assert summary.checks["same bits"] > 4


def test_a_robust_rule_leaves_out_the_attacker_in_every_step(first: int) -> None:
    summary = run_batch([first], rule="multi_krum")
    assert not summary.violations, "\n".join(
        f"{v.text}\n  → {replay(v, rule='multi_krum')}" for v in summary.violations
    )
    assert summary.checks["attacker excluded"] > 4


def test_a_private_job_counts_each_release_and_uses_no_noise_or_mask_twice(first: int) -> None:
    summary = run_batch(range(first, first + 2), strategy=PRIVATE)
    assert not summary.violations, "\n".join(f"{v.text}\n  → {replay(v, strategy=PRIVATE)}" for v in summary.violations)
    assert summary.checks["used once"] > summary.checks["privacy counted"] > 20


@pytest.mark.parametrize(("safeguard", "number"), [("agree", 4), ("count", 14)])
def test_a_count_that_is_not_told_or_kept_shows(safeguard: str, number: int) -> None:
    kinds = MUTATIONS_OF_PRIVATE[safeguard][1]
    assert run_schedule(number, strategy=PRIVATE, kinds=kinds, mutation=safeguard).violated == "privacy counted"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_strikes_and_is_survived(kind: str) -> None:
    verdict = run_schedule(1, peers=4, kinds=[kind, "join"])
    assert not verdict.violated, f"{verdict.text}\n  → {replay(verdict, peers=4, kinds=[kind, 'join'])}"


def test_the_same_number_is_the_same_run_in_another_process_too() -> None:
    code = "from roles.sim.run import run_schedule; print(run_schedule(5, verbose=True).fingerprint)"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {run_schedule(5, verbose=True).fingerprint.encode()}


def test_faults_meet_every_phase_of_the_transaction() -> None:
    assert {Phase.FORMING, Phase.HEALING, Phase.REDUCING, Phase.VOTING, Phase.APPLYING, Phase.BOUNDARY} <= set(PHASES)


def test_torch_is_not_needed() -> None:
    code = "import roles.sim.run, p2ptrain.cli.sim, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
