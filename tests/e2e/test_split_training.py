"""A model in parts with real processes: one is killed, what is saved becomes one model, and `up` does it all."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_training import done, history, undisturbed

pytestmark = pytest.mark.slow

SPLIT = ["--set", "job.strategy=pipeline", "--set", "pipeline.stages=2"]


async def test_a_stage_dies_with_its_disk_and_a_spare_takes_it_out_of_what_another_has(machine: Any) -> None:
    steps = 40
    sets = machine.settings(job__steps=steps, job__workers=2, checkpoint__every=10, checkpoint__copies=1)
    await machine.seed(*sets, *SPLIT)
    workers = {name: await machine.join("--name", name) for name in ("one", "two", "three")}
    whole = [asyncio.create_task(worker.until(r"assembled a checkpoint of step \d+: ")) for worker in workers.values()]
    await asyncio.wait(whole, return_when=asyncio.FIRST_COMPLETED)
    for waiting in whole:
        waiting.cancel()
    began = await machine.job_until(lambda item: item["step"] > 0)
    kept = (await machine.ask("checkpoints.list", job=began["id"]))["checkpoints"]
    victim = next(item for item in kept if item["peer_id"] == began["members"][1])
    await workers[victim["peer_name"]].kill()
    shutil.rmtree(machine.root / Path(victim["path"]).relative_to(machine.root).parts[0])
    ended = await machine.job_until(done)
    assert ended["generation"] > began["generation"]
    seen = await history(machine, ended["id"], "loss")
    assert sorted(seen) == list(range(1, steps + 1)), "every step is there exactly once"
    assert list(seen.values()) == pytest.approx(undisturbed(machine.settings(job__steps=steps), steps), abs=1e-5)
    where = ("--seed", f"127.0.0.1:{machine.port}")
    code, told = await machine.run("jobs", "audit", ended["id"], *where)
    assert code == 0, told
    code, told = await machine.run("generate", "def ", "--job", ended["id"], "--tokens", "4", "--json", *where)
    assert code == 0, told
    assert f"/jobs/{ended['id']}/checkpoints/step-{steps:08d}" in told


async def test_up_trains_a_split_model_stops_and_goes_on(machine: Any) -> None:
    steps = 60
    arguments = ["up", "--plain", "--state", str(machine.root), *machine.settings(job__steps=steps), *SPLIT]
    first = await machine.start(*arguments)
    await first.until(r"step +[2-5]\d/60 ")
    assert await first.interrupt() == 130
    code, said = await machine.run(*arguments)
    assert code == 0, said
    assert "from its last checkpoint" in said
    assert re.search(rf"step +{steps} of {steps}\n", said)
    command = next(line for line in said.splitlines() if "try it:" in line).split("p2ptrain ")[1]
    code, said = await machine.run(*shlex.split(command), "--tokens", "4")
    assert code == 0, said
