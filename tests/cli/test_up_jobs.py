"""What is said of jobs while they run: each by its name, steps of an earlier start not again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.cli.children import Child
from p2ptrain.cli.console import Console
from p2ptrain.cli.up_jobs import Watcher
from wire.client import SeedClient
from wire.messages import Update


class Seed:
    """What a watcher asks, and the updates that it hears then."""

    def __init__(self, begun: dict[str, int], updates: list[Update]) -> None:
        self._begun, self._updates = begun, updates

    async def request(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return {} if params is None else {"job": {"step": self._begun[params["job"]]}}

    async def updates(self) -> AsyncIterator[Update]:
        for update in self._updates:
            yield update


def alive() -> Child:
    process = SimpleNamespace(wait=asyncio.Event().wait, returncode=None)
    return cast(Child, SimpleNamespace(process=process, name="a process", alive=True))


async def test_each_job_is_told_by_its_name_from_where_this_start_found_it(capsys: pytest.CaptureFixture[str]) -> None:
    updates = [
        Update(topic="jobs", items=[{"id": job, "state": "running", "steps_total": 90} for job in "ab"]),
        Update(topic="metrics", items=[{"job": "a", "step": 7, "loss": 2.5}, {"job": "a", "step": 8, "loss": 1.25}]),
        Update(topic="metrics", items=[{"job": "b", "step": 1, "loss": 3.5}, {"job": "other", "step": 5}]),
        Update(topic="jobs", items=[{"id": job, "state": "done"} for job in "ab"]),
    ]
    clock = iter(range(0, 100, 2))
    client = cast(SeedClient, Seed({"a": 7, "b": 0}, updates))
    console = Console(lambda: float(next(clock)))
    await Watcher(client, {"a": "drafter", "b": "verifier"}, [alive(), alive()], console, quiet=False).run()
    assert capsys.readouterr().err.splitlines() == [
        "drafter   step  8/90  loss 1.2500",
        "verifier  step  1/90  loss 3.5000",
    ]
