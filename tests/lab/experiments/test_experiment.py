"""Runs of an experiment: what is measured, what counts as a result, and how an experiment goes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Profile
from p2ptrain.core.errors import Refused, StorageError, UserError
from p2ptrain.lab.experiments.executors import simulate
from p2ptrain.lab.experiments.grid import GridPlan, GridRun, plan_of
from p2ptrain.lab.experiments.results import Result, Results, load
from p2ptrain.lab.experiments.run import carry_out, measure, members_away
from p2ptrain.lab.memory import run_virtual
from p2ptrain.lab.stand_in import StandInEngine
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_checkpointing import HangingCluster

NUMEL = 64
TABLES: dict[str, Any] = {
    "job": {"steps": 6, "workers": 2},
    "batch": {"micro_batches": 4, "micro_batch_sequences": 1},
    "validation": {"every": 3, "batches": 2},
    "checkpoint": {"every": 0},
    "model": {"hidden_size": 8, "layers": 1, "intermediate_size": 8},
}


def plan(axes: dict[str, Any], **more: Any) -> GridPlan:
    return plan_of({"name": "small", "set": TABLES, "axes": axes, "gflops": 1e-3, **more}, "grid", None)


async def measured(cluster: Cluster, made: GridPlan, build: Callable[[Profile], StandInEngine]) -> Result:
    for _ in range(2):
        await cluster.join(build).joined.wait()
    async with cluster.operator() as client:
        return await measure(client, made.runs[0], made, lambda text: None)


def stand_in(profile: Profile) -> StandInEngine:
    return StandInEngine(profile, numel=NUMEL)


async def test_a_run_measures_its_losses_and_every_byte_that_its_workers_sent(cluster: Cluster) -> None:
    result = await measured(cluster, plan({"job.steps": [6]}, loss_targets=[1e-9, 1e9]), stand_in)
    figures = result.figures
    assert (result.state, figures["steps"], figures["tokens"]) == ("done", 6, 6 * 4 * 128)
    # With two members each sends half of the vector twice in a step. Tokens and headers come on top.
    vectors = 6 * 2 * 4 * (NUMEL + 1)
    assert vectors < figures["sent_bytes"] < vectors + 6 * 2 * 1500
    assert result.curve[-1][3] == figures["sent_bytes"]
    assert [point[0] for point in result.curve] == [1, 2, 3, 4, 5, 6]
    assert [step for step, *_, val_loss in result.curve if val_loss is not None] == [3, 6]
    assert figures["loss"] == result.curve[-1][4]
    assert figures["seconds_to_1e+09"] == result.curve[2][1]
    assert figures["bytes_to_1e+09"] == result.curve[2][3]
    assert (figures["seconds_to_1e-09"], figures["bytes_to_1e-09"]) == (None, None)
    assert (figures["members_mean"], figures["members_min"], figures["generation_changes"]) == (2, 2, 0)


def test_absent_members_are_counted_by_steps() -> None:
    assert members_away([3, 3, 4], 3) == ""
    assert members_away([3, 2, 1, 3], 3) == "2 of 4 steps had fewer than 3 workers, 1 at the least"


async def test_a_run_that_trained_alone_is_not_done(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers leaves for good after the second step."""
    monkeypatch.setattr("p2ptrain.lab.experiments.run.SETTLE_S", 0.2)  # the one that left reports no end
    made, gate = plan({"job.steps": [6]}), Gate(3)

    def gated(profile: Profile) -> StandInEngine:
        return StandInEngine(profile, numel=NUMEL, on_micro_batch=gate.wait)

    workers = [cluster.join(gated) for _ in range(2)]
    for worker in workers:
        await worker.joined.wait()

    async def leave() -> None:
        await workers[1].die()
        gate.away()

    leaving = list[asyncio.Task[None]]()

    def show(text: str) -> None:
        if text.startswith("step 2/"):
            leaving.append(asyncio.create_task(leave()))

    async with cluster.operator() as client:
        result = await measure(client, made.runs[0], made, show)
    assert (result.state, result.figures["members_min"]) == ("alone", 1)
    assert "fewer than 2 workers, 1 at the least" in result.reason


class TooLarge(StandInEngine):
    def micro_batch(self, step: int, index: int, on_final: Any = None) -> None:
        raise MemoryError("no memory for a tensor")


class NotFinite(StandInEngine):
    def contribution(self, step: int, index: int) -> Any:
        return super().contribution(step, index) * np.float32("nan" if step == 2 else 1)


@pytest.mark.parametrize(("build", "state"), [(TooLarge, "out-of-memory"), (NotFinite, "diverged")])
async def test_too_little_memory_and_a_loss_that_is_not_finite_are_results(
    cluster: Cluster, build: type[StandInEngine], state: str
) -> None:
    result = await measured(cluster, plan({"job.steps": [6]}), build)
    events = [event["text"] for event in (await cluster.ask("events.list"))["events"] if event["level"] == "error"]
    assert len(events) == len({*events}) <= 3, "one of each worker, and the job's end"
    assert result.state == state
    assert result.reason
    assert result.figures["steps"] == (2 if state == "diverged" else 0)


async def test_a_result_that_no_disk_takes_ends_its_run_with_the_reason(tmp_path: Path) -> None:
    cluster = HangingCluster(tmp_path)
    cluster.disk.broken = True
    cluster.disk.go.set()
    await cluster.start_seed()
    try:
        made = plan({"job.workers": [1]})
        await cluster.join(stand_in).joined.wait()
        async with cluster.operator() as client:
            result = await measure(client, made.runs[0], made, lambda text: None)
        assert result.state == "failed"
        assert "no checkpoint at step 6: cannot write" in result.reason
        assert result.figures["steps"] == 6
    finally:
        with suppress(StorageError):  # the worker's end says it again
            await cluster.close()


async def test_a_job_whose_workers_do_not_come_ends_the_experiment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.lab.experiments.run.START_S", 0.2)
    with pytest.raises(UserError, match=r"did not begin within 0.2 s: it was waiting"):
        await measured(cluster, plan({"job.workers": [3]}), stand_in)  # the third never comes
    async with cluster.operator() as client:
        assert [job.state for job in await client.jobs()] == ["cancelled"]


def test_the_limit_counts_from_the_first_view() -> None:
    made = plan({"link.preset": ["satellite"]}, limit="8s")  # 4 s until the workers are ready, and 6 s for a step
    result = run_virtual(simulate(made, made.runs[0], lambda text: None))
    assert (result.state, result.reason) == ("time-limit", "it was running after 8 s")
    assert result.figures["steps"] == 1


async def test_a_refused_job_is_a_result(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> str:
        raise Refused("bad-spec", "not this one")

    monkeypatch.setattr("wire.client.SeedClient.create_job", refuse)
    result = await measured(cluster, plan({"job.steps": [6]}), stand_in)
    assert (result.state, result.reason) == ("refused", "not this one")


def test_ctrl_c_ends_a_simulation_at_its_next_step() -> None:
    made, shown = plan({"link.preset": ["lan"]}), list[str]()

    def show(text: str) -> None:
        shown.append(text)
        if text.startswith("step 1/"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(simulate(made, made.runs[0], show))
    assert shown[-1] == "step 1/6"


# ------------------------------------------------------------------------------------------------- the whole experiment


def carried_out(directory: Path, made: GridPlan, *, stop_after: int = 99) -> list[str]:
    """Carry out a plan, simulated; return the runs that ran."""
    ran = list[str]()

    async def execute(run: GridRun, show: Any) -> Result:
        if len(ran) == stop_after:
            raise UserError("interrupted")
        ran.append(f"{run}")
        return await simulate(made, run, show)

    results = Results(directory, made)
    try:
        run_virtual(carry_out(results, execute, lambda text, left_s: None, lambda run, row: None))
    except UserError:
        assert len(ran) == stop_after
    finally:
        results.close()
    return ran


def test_an_experiment_goes_on_with_the_runs_that_it_lacks(tmp_path: Path) -> None:
    def links(*names: str, **more: Any) -> GridPlan:
        return plan({"link.preset": list(names)}, **{"simulated": True, **more})

    made = links("lan", "satellite")
    assert len(carried_out(tmp_path, made, stop_after=1)) == 1
    assert carried_out(tmp_path, made) == ["link.preset = satellite"]
    assert carried_out(tmp_path, links("lan", "satellite", "metro")) == ["link.preset = metro"]
    lines = [line.split(",") for line in (tmp_path / "results.csv").read_text().splitlines()]
    table = "\n".join(",".join([*line[:1], *line[:0:-1]]) for line in [*lines, lines[-1]])  # as a person may edit it
    (tmp_path / "results.csv").write_text(table)
    assert carried_out(tmp_path, links("lan", "satellite", "metro", "wan"))
    near, far, _, _ = load(tmp_path)[1]
    assert far["step_ms"] > near["step_ms"] + 600 > 600  # the satellite's round trip
    assert far["sent_bytes"] == pytest.approx(near["sent_bytes"], rel=0.2)
    assert (near["loss"], near["val_loss"]) == (None, None)
    four = ("lan", "satellite", "metro", "wan")
    for other in (links("lan"), links(*four, simulated=False), links(*four, loss_targets=[2.0])):
        with pytest.raises(UserError, match="not in this grid"):
            Results(tmp_path, other)
    (tmp_path / "results.csv").write_text(table.replace("satellite", "moon"))
    with pytest.raises(StorageError, match="known value"):
        load(tmp_path)


def test_an_axis_must_not_have_the_name_of_a_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a column state"):
        Results(tmp_path, plan({"state": {"a": {}, "b": {"job.steps": 3}}}))
