"""``p2ptrain sim``."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.lab.sim.run import SimulationResult, run_schedule
from tests.sim.mutations import MUTATIONS

from .conftest import Command


def test_it_tells_what_holds(command: Command) -> None:
    told = command("sim", "--schedules", "2", "--random-seed", "5", "--workers", "3", "--json").json
    assert (told["schedules"], told["violations"]) == (2, [])
    shown = command("sim", "--schedules", "1", "--random-seed", "5", "--workers", "3", "--timeline").out
    for part in ("same bits", "schedules/s", "generation 1 from step 0", "everything holds"):
        assert part in shown


def test_ctrl_c_shows_what_was_found_so_far(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_schedule

    def two(number: int, **more: Any) -> SimulationResult:
        if number == 7:
            raise KeyboardInterrupt
        return real(number, **more)

    monkeypatch.setattr("p2ptrain.lab.sim.run.run_schedule", two)
    ended = command("sim", "--schedules", "50", "--random-seed", "5", "--workers", "2")
    assert ended.code == 130
    assert "2 schedules" in ended.out
    assert "interrupted after 2 of 50" in ended.err


def test_unknown_names_are_refused(command: Command) -> None:
    refused = command("sim", "--kinds", "luck")
    assert refused.code == 2
    assert "  → use " in refused.err


def test_violation_has_an_exit_code_and_a_line_to_replay(command: Command) -> None:
    kinds = ",".join(MUTATIONS["confirm"][0].kinds)
    with MUTATIONS["confirm"][0].rules_replaced():
        found = command("sim", "--kinds", kinds, "--strategy", "local", "--schedules", "1", "--random-seed", "5")
    assert found.code == 1
    for part in ("p2ptrain sim --schedules 1 --random-seed", f"--kinds {kinds}", "--strategy local"):
        assert part in found.err
    assert "did you mean local" in command("sim", "--strategy", "lcoal").err
    assert "--stages 2" in command("sim", "--strategy", "local", "--stages", "2").err
    assert "--strategy private" in command("sim", "--strategy", "private", "--rule", "krum").err
    assert "did you mean krum" in command("sim", "--rule", "krumm").err
    assert "give --workers 7" in command("sim", "--rule", "bulyan", "--workers", "6").err
