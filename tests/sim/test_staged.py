"""Jobs whose model is split, under seeded faults: the parts of every state fit together, or the run says why not."""

from __future__ import annotations

import os

import pytest

from p2ptrain.lab.sim.run import replay, run_batch

RUNS = int(os.environ.get("P2PTRAIN_SIM_RUNS", "6")) // 3


@pytest.mark.parametrize(("stages", "peers"), [(2, 2), (2, 4), (3, 5)])  # a replica, two replicas, a replica and spares
def test_a_batch_violates_nothing(first: int, stages: int, peers: int) -> None:
    summary = run_batch(range(first, first + RUNS), peers=peers, stages=stages)
    told = [f"{v.text}\n  → {replay(v, peers=peers, stages=stages)}" for v in summary.violations]
    assert not told, "\n".join(told)
    assert all(summary.checks[name] for name in ("same bits", "exactly once", "no fork", "ledger", "one cut"))
