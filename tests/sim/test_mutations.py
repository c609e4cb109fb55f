"""Each safeguard switched off must be noticed; with it on, the same schedule is clean."""

from __future__ import annotations

import pytest

from p2ptrain.lab.sim.run import run_schedule
from p2ptrain.lab.sim.watching import MUTATIONS

# Name → a schedule that shows it, and by which invariant. Another one: `p2ptrain sim --without NAME --random-seed 0`.
FOUND = {
    "fence": (3, "generations grow"),
    "digest": (3, "no fork"),
    "norm": (3, "true norm"),
    "stop": (3, "every step"),
    "redo": (24, "same bits"),
    "dir-sync": (3, "durable"),
    "ledger": (3, "ledger"),
    "rows": (22, "ledger"),
    "confirm": (22, "confirmed"),
    "result": (0, "result saved"),
    "term": (3, "generations grow"),
    "adopt": (2, "restored keeps"),
    "turned": (14, "goes on"),
    "check": (18, "goes on"),
    "hang": (9, "goes on"),
}
WITHIN = 60
"""Schedules within which each of them is found, from any number on; searched where the product has moved on."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_missing_shows(name: str) -> None:
    kinds = MUTATIONS[name][1]
    number, invariant = FOUND[name]
    for tried in (number, *range(WITHIN)):
        verdict = run_schedule(tried, kinds=kinds, mutation=name)
        if verdict.violated:
            break
    assert verdict.violated, f"{WITHIN} schedules without {name} show nothing"
    assert verdict.violated == invariant or tried != number
    assert not run_schedule(tried, kinds=kinds).violated
