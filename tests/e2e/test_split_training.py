"""A model in parts with real processes: one is killed, what is saved becomes one model, and `up` does it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_training import done, history, undisturbed

pytestmark = pytest.mark.slow

SPLIT = ["--set", "job.strategy=pipeline", "--set", "pipeline.stages=2"]


async def test_a_worker_of_two_crews_is_killed_and_a_spare_takes_its_place(machine: Any, tmp_path: Path) -> None:
    steps = 120
    sets = machine.settings(job__steps=steps, job__workers=4)
    await machine.seed(*sets, *SPLIT)
    workers = {name: await machine.join("--name", name) for name in ("one", "two", "three", "four", "five")}
    began = await machine.job_until(lambda item: item["step"] >= 10 and len(item["members"]) == 4)
    listed = (await machine.ask("peers.list"))["peers"]
    names = {item["id"]: item["name"] for item in listed}
    await workers[names[began["members"][2]]].kill()
    await machine.job_until(lambda item: item["generation"] > began["generation"] and len(item["members"]) == 4)
    ended = await machine.job_until(done)
    seen = await history(machine, ended["id"], "loss")
    assert sorted(seen) == list(range(1, steps + 1)), "every step is there exactly once"
    assert list(seen.values())[:50] == pytest.approx(undisturbed(machine.settings(job__steps=steps), 50), abs=1e-5)
    code, said = await machine.run("jobs", "audit", ended["id"], "--seed", f"127.0.0.1:{machine.port}")
    assert code == 0, said
    model = tmp_path / "model"
    code, said = await machine.run("checkpoints", "gather", str(machine.root), "--to", str(model), "--json")
    assert code == 0, said
    assert json.loads(said)["step"] == steps
    code, said = await machine.run("generate", "def ", "--checkpoint", str(model), "--tokens", "4")
    assert code == 0, said


async def test_up_trains_a_split_model_stops_and_goes_on(machine: Any) -> None:
    steps = 120
    arguments = ["up", "--plain", "--state", str(machine.root), *machine.settings(job__steps=steps), *SPLIT]
    first = await machine.start(*arguments)
    await first.until(r"step +[2-9]\d/120 ")
    assert await first.interrupt() == 130
    code, said = await machine.run(*arguments)
    assert code == 0, said
    assert "from its last checkpoint" in said
    assert f"step        {steps} of {steps}" in said
    command = next(line for line in said.splitlines() if "checkpoints gather" in line).split("p2ptrain ")[1].split()
    code, said = await machine.run(*command)
    assert code == 0, said
    assert f"step {steps} is whole" in said
