"""``p2ptrain up``: what it refuses before it starts anything, and what it says at the end."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.up import _print_next
from p2ptrain.cluster.models import load_for


@pytest.mark.parametrize("more", [(), ("--split", "2", "--checkpoint", "."), ("--profile", "pair", "--http", "here")])
def test_up_starts_nothing_where_nobody_would_answer(command: Any, more: tuple[str, ...]) -> None:
    outcome = command("up", "--http", "127.0.0.1:8000", *more)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--http" in outcome.err


@pytest.mark.parametrize(
    ("sets", "workers", "begins_with"),
    [([], 3, 3), ([], 1, 1), (["job.workers=2"], 3, 2), (["batch.micro_batches=1"], 1, 1)],
)
def test_the_job_begins_with_as_many_workers_as_are_started(sets: list[str], workers: int, begins_with: int) -> None:
    assert load_for(workers, "tiny", sets).job.workers == begins_with


@pytest.mark.parametrize("checkpoint", [None, "/x"])
def test_an_interrupted_run_says_how_to_go_on(capsys: pytest.CaptureFixture[str], checkpoint: str | None) -> None:
    summary = {"state": "interrupted", "checkpoint": checkpoint, "whole": True}
    _print_next(summary, Profile())
    assert "to go on, run the same command again" in capsys.readouterr().out
    _print_next(summary | {"state": "done"}, Profile())
    assert "to go on" not in capsys.readouterr().out
