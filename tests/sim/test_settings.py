"""Settings that a person changes while the job runs: each step is computed with one setting, at every member."""

from __future__ import annotations

import json

import numpy as np
import pytest

from p2ptrain.core.training import SettingsPeriod
from p2ptrain.lab.sim.machine import undisturbed
from p2ptrain.lab.sim.observer import ROUNDING
from tests.sim.played import WORKERS, Played, play, profile_of
from wire.records import JobInfo


async def change(cluster: Played, **values: object) -> None:
    texts = {key.replace("__", "."): json.dumps(value) for key, value in values.items()}
    await cluster.asked("jobs.set", job=cluster.job, values=texts)


async def shown(cluster: Played) -> JobInfo:
    return JobInfo.from_map_untrusted((await cluster.asked("jobs.show", job=cluster.job))["job"])


async def check_states(cluster: Played) -> JobInfo:
    """All members hold the state of one process that changes its settings at the steps on record."""
    await cluster.until(lambda: len(cluster.applied()) == WORKERS and len(cluster.generations()) == 1)
    await cluster.goes_on()
    info = await shown(cluster)
    settings = {"lr": 3e-3}
    periods = [SettingsPeriod(0, dict(settings), 3000)]
    for item in info.changes:
        settings |= {"lr": json.loads(item.value)} if item.key == "optimizer.lr" else {}
        periods.append(SettingsPeriod(item.step, dict(settings), 3000))
    reference = undisturbed(profile_of(), periods)
    for machine in cluster.workers:
        assert machine.worker is not None
        engine, applied = machine.worker._runner.state.engine, engine_step(machine)
        limit = ROUNDING * float(np.max(np.abs(reference[applied])))
        assert float(np.max(np.abs(engine.state.parameters - reference[applied]))) <= limit
    return info


def engine_step(machine: object) -> int:
    return int(machine.worker._runner.state.engine.state.step)  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", range(WORKERS))
def test_setting_changes_at_one_step_at_all_members_though_one_dies_in_it(victim: int) -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        before = (await shown(cluster)).generation
        await change(cluster, optimizer__lr=1e-3)
        await cluster.until(lambda: min(cluster.generations()) > before)
        cluster.workers[victim].kill()
        await cluster.goes_on()
        cluster.workers[victim].start()
        await change(cluster, optimizer__lr=2e-3)
        info = await check_states(cluster)
        assert [(item.value, item.before) for item in info.changes] == [("0.001", "0.003"), ("0.002", "0.001")]

    play(script, states=[])


def test_restored_seed_learns_the_changes_that_its_copy_lacks() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        await cluster.until(lambda: bool(cluster.observer.copies))
        copy = cluster.observer.copies[-1][1]
        before = cluster.generations()
        await change(cluster, optimizer__lr=1e-3, job__steps=2500)
        await cluster.until(lambda: min(cluster.generations()) > max(before))
        await cluster.goes_on()
        cluster.seed.kill()
        cluster.seed.disk = cluster.seed._new_disk()
        cluster.seed.restore(copy)
        await cluster.until(lambda: all(machine.linked for machine in cluster.workers))
        cluster.workers[1].kill()
        await cluster.goes_on()
        cluster.workers[1].start()
        info = await check_states(cluster)
        assert ({item.key for item in info.changes}, info.steps_total) == ({"optimizer.lr", "job.steps"}, 2500)

    play(script, states=[])


def test_change_that_was_asked_of_a_seed_that_dies_is_made() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        await cluster.asked("jobs.pause", job=cluster.job)
        await change(cluster, optimizer__lr=1e-3)
        cluster.seed.kill()
        await cluster.until(lambda: not any(machine.linked for machine in cluster.workers))
        cluster.seed.start()
        await cluster.until(lambda: all(machine.linked for machine in cluster.workers))
        await cluster.asked("jobs.resume", job=cluster.job)
        assert len((await check_states(cluster)).changes) == 1

    play(script, states=[])
