"""The short version of ``python -m tests.fuzz``: seconds, with a seed that is told and may be given."""

from __future__ import annotations

import os

import pytest

from .engine import TARGETS, Tally, Target, run
from .targets import parsers

SEED = int(os.environ.get("P2PTRAIN_FUZZ_SEED", "1"))
EXAMPLES = 60
ROUNDS = 4
"""Rounds in which all parsers of a target must be reached. What is drawn depends on the imported modules, too."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_but_the_documented_error_and_bounded_memory(target: Target):
    tally = Tally()
    examples = min(EXAMPLES, target.weight)
    for seed in range(SEED, SEED + ROUNDS):
        if not run(target, examples=examples, seed_number=seed, tally=tally, watch=True):
            pytest.fail(f"{tally.failure!r}\nminimal case: {tally.minimal!r}\nP2PTRAIN_FUZZ_SEED={seed}")
        if tally.called.issuperset(target.parsers):
            return
    pytest.fail(f"not all that it lists were called; P2PTRAIN_FUZZ_SEED={SEED}")


def test_every_parser_has_a_target():
    assert parsers() == {name for target in TARGETS for name in target.parsers}
