"""What is observed of a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.cluster.jobs import JobObserver
from p2ptrain.core.errors import ConnectionLost, Refused
from wire.records import JobInfo, MetricRow
from wire.schema import Record

JOB = JobInfo("j1", "tiny", "tiny", "sync", "running", 0.0, 9, step=3, members=["a"])


class Client:
    """A seed's connection: it knows a job, reports once, and is lost. ``jobs``: what it answers, one after another."""

    def __init__(self, *jobs: JobInfo | Refused) -> None:
        self.jobs = list(jobs)

    async def job(self, job: str) -> tuple[JobInfo, str]:
        answer = self.jobs.pop(0)
        if isinstance(answer, Refused):
            raise answer
        return answer, ""

    async def news(self) -> AsyncIterator[list[Record]]:
        yield [MetricRow("j1", step, 0.0) for step in (3, 4, 4)]
        raise ConnectionLost("the seed left")

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Any]:
        yield self


async def test_observation_outlives_the_seed_and_ends_without_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.cluster.jobs.AGAIN_S", 0.0)
    client, steps, away = Client(JOB, replace(JOB, step=5), Refused("unknown-job", "no such job")), [], []
    observer = JobObserver("tiny", on_step=lambda row: steps.append(row.step))

    async def observe() -> None:
        async for _ in observer.run(client.operator, away.append):
            pass

    observing = asyncio.create_task(observe())
    with pytest.raises(Refused, match="no such job"):
        await observer.until(lambda: observer.step > 9, 10.0)
    with pytest.raises(Refused):
        await observing
    assert (observer.job, steps, len(away)) == ("j1", [4], 2), "steps that were done before are no news"


def test_job_that_ends_while_it_saves_is_lost() -> None:
    observer = JobObserver("j1")
    for state in ("running", "saving", "cancelled"):
        observer.take(replace(JOB, state=state))
    assert (observer.is_finished, observer.is_lost, observer.members) == (True, True, ())
