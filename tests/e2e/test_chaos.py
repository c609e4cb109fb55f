"""``p2ptrain chaos`` against this version: it holds, it says so, and it leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FAULTS = ("--faults", "2", "--kinds", "kill,seed", "--random-seed", "4")  # a worker, and then the seed


def settings(machine: Any) -> list[str]:
    """A small model, and only what the command does not choose itself."""
    wanted = machine.settings(checkpoint__every=40, validation__every=0)
    pairs = list(zip(wanted[::2], wanted[1::2], strict=True))
    return [part for pair in pairs if not pair[1].startswith("job.steps") for part in pair]


async def test_a_cluster_that_is_hurt_holds(machine: Any) -> None:
    state = machine.root / "state"
    process = await machine.start(
        "chaos", "--workers", "2", *FAULTS, "--json", "--state", str(state), *settings(machine)
    )
    code = await process.end()
    assert code == 0, process.text
    report = json.loads("\n".join(process.out))
    assert report["complete"]
    assert [fault["kind"] for fault in report["faults"]] == ["kill", "seed"], process.text
    assert all(fault["recovery_s"] is not None for fault in report["faults"]), process.text
    assert report["goodput"] > 0
    assert report["steps_per_s"]["undisturbed"] > 0
    held = {item["name"]: item["held"] for item in report["invariants"]}
    assert held["the state is equal on all members"] is True
    assert held["no process is left behind"] is True
