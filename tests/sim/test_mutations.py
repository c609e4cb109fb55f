"""Each safeguard switched off must be noticed. With it on, the schedules of ``FOUND`` were clean when they were listed;
``test_schedules`` shows that clusters with all safeguards violate nothing."""

from __future__ import annotations

import pytest

from p2ptrain.lab.sim import run
from p2ptrain.lab.sim.run import run_schedule
from tests.sim.mutations import MUTATIONS

# Name → a schedule that shows it, and by which invariant. Another one: `python -m tests.sim.mutations NAME`.
FOUND = {
    "fence": (3, "generations grow"),
    "digest": (3, "no fork"),
    "norm": (16, "true norm"),
    "stop": (1, "every step"),
    "redo": (19, "same bits"),
    "dir-sync": (43, "durable"),
    "ledger": (13, "ledger"),
    "rows": (22, "ledger"),
    "confirm": (22, "confirmed"),
    "result": (0, "result saved"),
    "term": (3, "generations grow"),
    "adopt": (2, "restored keeps"),
    "turned": (25, "goes on"),
    "check": (18, "goes on"),
    "hang": (9, "goes on"),
    # With a split model.
    "stage": (4, "same bits"),
    "back": (15, "no further back"),
    "files": (15, "no further back"),
    "joined": (23, "same bits"),
    "alike": (5, "progress"),
    # With the strategy 'server'.
    "bound": (19, "versions"),
    "weight": (2, "versions"),
    "numbers": (21, "versions"),
    "lost": (4, "nothing saved is taken back"),
    # With a private job.
    "agree": (4, "privacy counted"),
    "count": (14, "privacy counted"),
}
WITHIN = 60
"""Schedules within which each of them is found, from any number on; searched where the product has moved on."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_safeguard_violates_an_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, options = MUTATIONS[name]
    if "stages" in options:
        monkeypatch.setattr(run, "CALM_S", 100.0)  # soon enough to see that without "alike" a job goes in circles
    number, invariant = FOUND[name]
    for tried in (number, *range(WITHIN)):
        verdict = mutation.run(tried, **options)
        if verdict.violated:
            break
    assert verdict.violated, f"{WITHIN} schedules without {name} show nothing"
    if tried == number:
        assert verdict.violated == invariant
    else:
        assert not run_schedule(tried, kinds=mutation.kinds, **options).violated, "with the safeguard, too"
