"""What people and programs are shown of the plan for a split job, before and when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.explain import shape_here
from p2ptrain.cli.placement import describe_plan, describe_prediction
from p2ptrain.core.errors import Refused, ResourceError
from p2ptrain.lab.explain.predictions import equal_members, method_of
from ring.planning.pipeline import TrainingPlan, plan_pipeline
from ring.planning.prediction import Calibration, predict
from ring.planning.workloads import ModelShape
from wire.records import ClusterInfo

from .conftest import Command

SPLIT = ("--set", "job.strategy=pipeline", "--set", "pipeline.stages=2")
PROFILE = Profile.model_validate({"job": {"strategy": "pipeline", "workers": 2}, "pipeline": {"stages": 2}})
MIB = 1 << 20


def plan_of(link: str = "") -> TrainingPlan:
    """As a seed with three workers makes it."""
    there = equal_members(3, 64 * MIB, 1e9, link)
    made = predict(method_of(PROFILE, shape_here(PROFILE), 3), there, Calibration(0.1, 0.01, 1e9)).plan
    assert made is not None
    return made


def answer_of(link: str = "") -> dict[str, Any]:
    info, stages = plan_of(link)
    return {"plan": info.to_map(), "stages": [stage.to_map() for stage in stages]}


def test_a_dry_run_shows_who_trains_what_and_makes_nothing(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.plan"] = answer_of(link="wan")
    outcome = command("jobs", "create", *SPLIT, "--dry-run")
    assert outcome.code == 0
    header, first, last, *told = outcome.out.splitlines()
    assert header.split()[:5] == ["STAGE", "PEER", "LAYERS", "WEIGHTS", "TRAINING"]
    assert first.split()[:3] == ["0", "worker-1", "0–1"]
    assert "64.0 MiB" in first
    assert last.split()[:3] == ["1", "worker-2", "2–3"]
    assert told[0].startswith("1 replica of 2 stages, 8 micro-batches a step, predicted: ")
    assert "bubble" in told[0]
    assert told[1] == "more replicas of the job, or spares: worker-3"
    ((method, params),) = fake_seed.asked
    assert method == "jobs.plan"
    assert ModelShape.from_map_untrusted(params["shape"]).sizes.layers == 4
    shown = command("jobs", "create", *SPLIT, "--dry-run", "--json").json
    assert shown == fake_seed.answers["jobs.plan"]
    assert {name for name, _ in fake_seed.asked} == {"jobs.plan"}


def test_a_job_that_is_made_is_placed_and_the_plan_is_told_beside(command: Command, fake_seed: Any) -> None:
    fake_seed.answers |= {"jobs.plan": answer_of(), "jobs.create": {"job": "3f9a"}}
    outcome = command("jobs", "create", *SPLIT)
    assert (outcome.code, outcome.out) == (0, "3f9a\n")
    assert outcome.err.startswith("plan: layers 0–1 worker-1, layers 2–3 worker-2; ")
    (_, asked), (method, made) = fake_seed.asked
    assert (method, made["shape"], made["spec"]) == ("jobs.create", asked["shape"], asked["spec"])
    assert command("jobs", "create", *SPLIT, "--json").json.keys() == {"job", "plan", "stages"}


def test_what_does_not_fit_is_refused_and_not_made(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.plan"] = Refused("does-not-fit", "w1 has 1 MiB, and needs 2 MiB", remedy="start another")
    for more in ((), ("--dry-run",)):
        outcome = command("jobs", "create", *SPLIT, *more)
        assert (outcome.code, outcome.out) == (6, "")
        assert outcome.err == "error: w1 has 1 MiB, and needs 2 MiB\n  → start another\n"
    assert [method for method, _ in fake_seed.asked] == ["jobs.plan"] * 2


def test_workers_that_are_not_here_yet_are_no_reason_to_refuse_a_job(command: Command, fake_seed: Any) -> None:
    fake_seed.answers |= {"jobs.plan": Refused("too-few", "1 of 2 are free"), "jobs.create": {"job": "3f9a"}}
    outcome = command("jobs", "create", *SPLIT)
    assert (outcome.code, outcome.out, outcome.err) == (
        0, "3f9a\n", "no plan yet: 1 of 2 are free\nwatch it with: p2ptrain jobs watch 3f9a\n",
    )  # fmt: skip
    assert command("jobs", "create", *SPLIT, "--dry-run").code == 4


def test_without_the_model_it_says_that_there_is_no_plan(command: Command, fake_seed: Any) -> None:
    fake_seed.answers["jobs.create"] = {"job": "3f9a"}
    elsewhere = ClusterInfo("c", "attic", "0", "192.168.1.20:7337", 0.0, 0, 0)
    fake_seed.answers["cluster.info"] = {"cluster": elsewhere.to_map()}
    away = (*SPLIT, "--set", "model.path=/nowhere")
    assert "not known here" in command("jobs", "create", *away, "--dry-run").err
    assert {method for method, _ in fake_seed.asked} == {"cluster.info"}
    assert command("jobs", "create", *away).err.startswith("no plan: the sizes of /nowhere")
    assert "shape" not in fake_seed.asked[-1][1]


@pytest.mark.parametrize("answer", [{}, {"plan": {}, "stages": []}, {"plan": 1, "stages": 2}])
def test_a_plan_that_is_none_is_refused(command: Command, fake_seed: Any, answer: dict[str, Any]) -> None:
    fake_seed.answers["jobs.plan"] = answer
    assert command("jobs", "create", *SPLIT, "--dry-run").code == 4


@pytest.mark.usefixtures("measured_at_once")
def test_up_divides_this_machine_and_starts_nothing(command: Command, give_parts: Callable[[int], None]) -> None:
    give_parts(128)
    shown = command("up", "--workers", "2", *SPLIT, "--dry-run", "--json").json
    assert [stage["limit_bytes"] for stage in shown["stages"]] == [64 * MIB] * 2
    assert shown["plan"]["tokens_per_s"] > 0
    assert command("up", "--workers", "2", *SPLIT, "--dry-run").out.startswith("STAGE  PEER")
    give_parts(8)
    for more in (("--dry-run",), ()):
        outcome = command("up", "--workers", "2", *SPLIT, *more)
        assert (outcome.code, outcome.out) == (ResourceError.exit_code, "")
        assert "worker-1 4.0 MiB, worker-2 4.0 MiB" in outcome.err


def test_without_speeds_nothing_is_predicted() -> None:
    made = plan_pipeline(method_of(PROFILE, shape_here(PROFILE), 2).training, equal_members(2, 0).members)
    assert describe_prediction(made[0]) == [
        "1 replica of 2 stages: no worker has reported its speed, so nothing is predicted"
    ]
    assert describe_plan(*made) == "plan: layers 0–1 worker-1, layers 2–3 worker-2"
