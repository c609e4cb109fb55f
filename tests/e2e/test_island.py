"""A worker of two processes beside one of one process, and the loss of one of the two."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from configs.loader import load
from roles.worker.build import engine_builder
from tests.roles.in_process import train_alone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("P2PTRAIN_LONG" not in os.environ, reason="takes a minute of both cores: P2PTRAIN_LONG=1"),
]


def at(step: int) -> Any:
    return lambda item: item["step"] >= step


async def history(machine: Any, job: str, column: str) -> dict[int, float]:
    """One column of the metrics, by step."""
    rows, after = {}, 0
    while page := (await machine.ask("metrics.history", job=job, after_step=after, limit=200))["rows"]:
        rows |= {row["step"]: row[column] for row in page}
        after = max(rows)
    return rows


async def test_an_island_is_one_worker_leaves_with_a_process_of_it_and_comes_back(machine: Any) -> None:
    sets = machine.settings(job__steps=100_000, validation__every=10)
    await machine.seed(*sets)
    island, other = await machine.join("--name", "island", "--devices", "2"), await machine.join("--name", "other")
    two = await machine.job_until(lambda item: len(item["members"]) == 2 and item["step"] >= 20)
    (child,) = psutil.Process(island.process.pid).children()
    child.kill()
    assert await island.end() == 5
    assert "this worker leaves, because it is not complete: process 1 of this worker ended" in island.text
    assert "it was killed by SIGKILL" in island.text
    await machine.job_until(lambda item: len(item["members"]) == 1 and item["step"] > two["step"] + 2)
    again = await machine.join("--name", "island", "--devices", "2")
    back = await machine.job_until(lambda item: len(item["members"]) == 2 and item["state"] == "running")
    await machine.job_until(at(back["step"] + 10))
    seen, members = await history(machine, two["id"], "loss"), await history(machine, two["id"], "members")
    assert (members[two["step"]], members[back["step"]], members[back["step"] + 10]) == (2, 1, 2)
    alone = engine_builder(threads=1)(load("tiny", {}, [text for text in sets if text != "--set"]).profile)
    assert [seen[step] for step in range(1, 21)] == pytest.approx(train_alone(alone, 20, 8), rel=1e-3)
    peers = (await machine.ask("peers.list"))["peers"]
    assert {peer["device"] for peer in peers if peer["name"] == "island"} == {"2 processes (gloo), cpu"}
    (child,) = psutil.Process(again.process.pid).children()
    assert [await again.interrupt(), await other.interrupt()] == [0, 0]
    assert not psutil.wait_procs([child], timeout=5)[1]
