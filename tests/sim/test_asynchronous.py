"""Clusters with strategy 'server' under seeded faults, and what shows when one of its safeguards is switched off."""

from __future__ import annotations

import pytest

from p2ptrain.lab.sim.run import replay, run_batch, run_schedule
from p2ptrain.lab.sim.watching import ASYNCHRONOUS

# Name → a schedule that shows it, and by which invariant.
FOUND = {
    "bound": (19, "versions"),
    "weight": (2, "versions"),
    "numbers": (21, "versions"),
    "lost": (18, "nothing saved is taken back"),
}
WITHIN = 60


def test_versions_hold_under_faults(first: int) -> None:
    summary = run_batch(range(first, first + 4), strategy="server")  # buffers of 1 and 2, bounds adaptive and fixed
    told = [f"{v.text}\n  → {replay(v, strategy='server')}" for v in summary.violations]
    assert not told, "\n".join(told)
    assert summary.checks["versions"] > 4


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_what_is_missing_shows(name: str) -> None:
    kinds = ASYNCHRONOUS[name][1]
    number, invariant = FOUND[name]
    for tried in (number, *range(WITHIN)):
        verdict = run_schedule(tried, kinds=kinds, mutation=name, strategy="server")
        if verdict.violated:
            break
    assert verdict.violated, f"{WITHIN} schedules without {name} show nothing"
    assert verdict.violated == invariant or tried != number
    assert not run_schedule(tried, kinds=kinds, strategy="server").violated
