"""Jobs whose model is split, under seeded faults: the parts of every state fit together, or the run says why not."""

from __future__ import annotations

import os
from functools import cache

import pytest

from p2ptrain.lab.sim import run
from p2ptrain.lab.sim.run import replay, run_batch, run_schedule
from p2ptrain.lab.sim.watching import STAGED

RUNS = int(os.environ.get("P2PTRAIN_SIM_RUNS", "6")) // 3


@pytest.mark.parametrize(("stages", "peers"), [(2, 2), (2, 4), (3, 5)])  # a replica, two replicas, a replica and spares
def test_a_batch_violates_nothing(first: int, stages: int, peers: int) -> None:
    summary = run_batch(range(first, first + RUNS), peers=peers, stages=stages)
    told = [f"{v.text}\n  → {replay(v, peers=peers, stages=stages)}" for v in summary.violations]
    assert not told, "\n".join(told)
    assert all(summary.checks[name] for name in ("same bits", "exactly once", "no fork", "ledger", "one cut"))


# Name → a schedule that shows it, and by which invariant.
FOUND = {
    "stage": (7, "same bits"),
    "back": (14, "no further back"),
    "files": (14, "no further back"),
    "joined": (23, "same bits"),
    "alike": (5, "progress"),
}
WITHIN = 60
"""Schedules within which each of them is found, from any number on; searched where the product has moved on."""


@cache
def clean(number: int, kinds: tuple[str, ...]) -> bool:
    return not run_schedule(number, kinds=kinds, stages=2).violated


@pytest.mark.parametrize("name", STAGED)
def test_what_is_missing_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CALM_S", 100.0)  # soon enough to see that without "alike" a job goes in circles
    kinds = STAGED[name][1]
    number, invariant = FOUND[name]
    for tried in (number, *range(WITHIN)):
        verdict = run_schedule(tried, kinds=kinds, mutation=name, stages=2)
        if verdict.violated:
            break
    assert verdict.violated, f"{WITHIN} schedules without {name} show nothing"
    assert verdict.violated == invariant or tried != number
    assert clean(tried, kinds)
