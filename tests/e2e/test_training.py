"""Training with real processes: workers come, are killed, and everything is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def at(step: int) -> Any:
    return lambda item: item["step"] >= step


def done(item: dict[str, Any]) -> bool:
    return bool(item["state"] == "done")


async def history(machine: Any, job: str, column: str) -> dict[int, float]:
    """One column of the metrics, by step."""
    rows, after = {}, 0
    while page := (await machine.ask("metrics.history", job=job, after_step=after, limit=200))["rows"]:
        rows |= {row["step"]: row[column] for row in page}
        after = max(rows)
    return rows


def undisturbed(sets: list[str], steps: int) -> list[float]:
    """The losses of one process alone, with the same settings."""
    from configs.loader import load
    from roles.worker.build import engine_builder

    engine = engine_builder(threads=1)(load("tiny", {}, [text for text in sets if text != "--set"]).profile)
    engine.state.load_initial()
    result = []
    for step in range(steps):
        engine.begin_step(step)
        for index in range(8):
            engine.micro_batch(step, index)
        engine.finish_gradients()
        result.append(engine.apply(step, engine.partial_square_sum(0, engine.reduce_buffer.size)).loss)
    return result


async def test_workers_join_and_are_killed_in_mid_run_and_no_step_is_lost(machine: Any) -> None:
    steps = 140
    await machine.seed(*machine.settings(job__steps=steps))
    first, second = await machine.join("--name", "one"), await machine.join("--name", "two")
    await machine.job_until(at(10))
    third = await machine.join("--name", "three")
    three = await machine.job_until(lambda item: len(item["members"]) == 3 and item["state"] == "running")
    before = await machine.job_until(at(three["step"] + 20))
    await second.kill()
    ended = await machine.job_until(done)
    assert (ended["step"], ended["steps_total"]) == (steps, steps)
    assert ended["generation"] > before["generation"]
    seen, members = await history(machine, ended["id"], "loss"), await history(machine, ended["id"], "members")
    assert (members[1], members[before["step"]], members[steps]) == (2, 3, 2)
    assert sorted(seen) == list(range(1, steps + 1)), "every step is there exactly once"
    assert [await first.interrupt(), await third.interrupt()] == [0, 0]


async def test_everything_killed_at_once_goes_on_from_the_newest_good_checkpoint(machine: Any) -> None:
    sets = machine.settings(job__steps=1000)
    processes = [await machine.seed(*sets), await machine.join(), await machine.join()]

    def saved_by(slot: int) -> list[Path]:
        return sorted(machine.root.glob(f"worker-{slot}/jobs/*/checkpoints/step-*"))

    await machine.job_until(lambda item: len(saved_by(1)) >= 2 and len(saved_by(2)) >= 2)
    for process in processes:
        process.process.kill()
    for process in processes:
        await process.end()
    for slot in (1, 2):  # where writing takes longer than from one to the next, one is left out
        saved = saved_by(slot)
        weights = saved[-1] / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        if slot == 1:
            older, newest = (int(path.name.removeprefix("step-")) for path in saved[-2:])
    await machine.seed(*sets)
    again = [await machine.join("--slot", "1"), await machine.join("--slot", "2")]
    warning = await again[0].until("is damaged")
    assert f"step-{newest:08d}" in warning.string
    line = await again[0].until(r"resuming from .*\(step (\d+)\)")
    assert int(line[1]) == older
    ended = await machine.job_until(at(newest + 20))
    seen = await history(machine, ended["id"], "loss")
    alone = dict(enumerate(undisturbed(sets, newest + 10), start=1))
    for step in range(newest - 9, newest + 10):
        assert seen[step] == pytest.approx(alone[step], rel=1e-3), "the data position is the same"


async def test_a_worker_leaves_on_ctrl_c_and_the_seed_too(machine: Any) -> None:
    seed = await machine.seed(*machine.settings(job__steps=100_000))
    workers = [await machine.join(), await machine.join()]
    await machine.job_until(at(3))
    assert await workers[0].interrupt() == 0, workers[0].text
    await machine.job_until(lambda item: len(item["members"]) == 1 and item["state"] == "running")
    assert await seed.interrupt() == 0
    await workers[1].until("lost the seed")
    await machine.seed()
    await machine.job_until(lambda item: item["state"] == "running")
    assert await workers[1].interrupt() == 0
