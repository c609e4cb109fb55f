"""jobs audit and jobs recoveries, against a seed that answers what it was told; and the count of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from configs.loader import load
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.lab import audit as module
from p2ptrain.lab.audit import Epochs
from ring.token import next_lineage
from wire.job_messages import SettingChange
from wire.records import JobInfo, LedgerPage, RecoveryInfo, ViewBegan

Command = Callable[..., Any]
START = "00" * 16
DIGESTS = [bytes([step]) * 16 for step in range(1, 11)]
JOB = JobInfo("3f9a12bc04de", "tiny", "tiny", "sync", "done", 1.7e9, 10, step=10)


def lineage() -> str:
    found = START
    for digest in DIGESTS:
        found = next_lineage(found, digest)
    return found


@pytest.fixture
def answers(fake_seed: Any) -> dict[str, Any]:
    """A sound ledger of ten steps, 8 micro-batches of 4 sequences each, over 64 windows: five whole epochs."""
    head = {"base_step": 0, "base_lineage": START, "step": 10, "lineage": lineage()}
    run = {"first": 1, "generation": 1, "counts": [5, 3], "digests": b"".join(DIGESTS).hex()}
    view = {"generation": 1, "step": 0, "lineage": START, "members": ["a", "b"]}
    made: dict[str, Any] = fake_seed.answers
    made["jobs.show"] = {"job": JOB.to_map(), "spec": load("tiny", {}, []).profile.to_spec()}
    made["jobs.ledger"] = {"head": head, "runs": [run], "windows": 64}
    made["jobs.views"] = {"views": [view]}
    return made


def test_a_sound_ledger_for_people(command: Command, answers: dict[str, Any]) -> None:
    outcome = command("jobs", "audit", "tiny")
    assert outcome.code == 0
    assert "step 10 of 10" in outcome.err
    for part in ("1 to 10", lineage(), "320, each once an epoch; 5 complete epochs of 64", "a 62.5 %, b 37.5 %"):
        assert part in outcome.out
    assert outcome.out.splitlines()[-1].split() == ["verdict", "ok"]


def test_of_a_split_model_each_worker_is_shown_the_share_of_its_replica(
    command: Command, answers: dict[str, Any]
) -> None:
    profile = load("tiny", {}, ["job.strategy=pipeline", "pipeline.stages=2", "job.workers=4"]).profile
    answers["jobs.show"]["spec"] = profile.to_spec()
    answers["jobs.ledger"]["runs"][0]["counts"] = [5, 0, 3, 0]
    answers["jobs.views"]["views"][0]["members"] = ["a", "b", "c", "d"]
    assert "a 62.5 %, b 62.5 %, c 37.5 %, d 37.5 %" in command("jobs", "audit", "tiny").out
    found = command("jobs", "audit", "tiny", "--json").json
    assert (found["computed"], found["layouts"]) == ({"a": 50, "b": 50, "c": 30, "d": 30}, [[0, 2]])


def test_the_samples_of_private_text_are_not_compared(command: Command, answers: dict[str, Any]) -> None:
    answers["jobs.show"]["spec"] = load("tiny", {}, ["data.private=true"]).profile.to_spec()
    outcome = command("jobs", "audit", "tiny")
    assert outcome.code == 0
    assert "not compared: each worker draws them from its own text (data.private)" in outcome.out
    found = command("jobs", "audit", "tiny", "--json").json
    assert (found["private"], found["samples"], found["windows"]) == (True, 0, 0)


def test_a_fault_is_named_and_ends_with_one(command: Command, answers: dict[str, Any]) -> None:
    answers["jobs.ledger"]["runs"][0]["counts"] = [5, 2]
    outcome = command("jobs", "audit", "tiny")
    assert outcome.code == 1
    assert "FAULT at step 1: step 1: the members computed 7 of 8 micro-batches" in outcome.out
    outcome = command("jobs", "audit", "tiny", "--json")
    assert outcome.code == 1
    assert (outcome.json["ok"], outcome.json["fault"]["kind"], outcome.json["fault"]["step"]) == (False, "shares", 1)


def test_steps_that_nobody_told_of_are_a_fault_of_a_job_that_is_over(command: Command, answers: dict[str, Any]) -> None:
    answers["jobs.show"]["job"]["step"] = 12
    outcome = command("jobs", "audit", "tiny")
    assert (outcome.code, "2 newer steps are not on record" in outcome.out) == (1, True)
    answers["jobs.show"]["job"]["state"] = "running"
    outcome = command("jobs", "audit", "tiny", "--json")
    assert (outcome.code, outcome.json["unrecorded"]) == (0, 2)


async def test_a_ledger_that_begins_anew_while_it_is_read_is_read_again(answers: dict[str, Any]) -> None:
    other = {"base_step": 10, "base_lineage": "11" * 16, "step": 10, "lineage": "11" * 16}
    ledger, (first,) = answers["jobs.ledger"], answers["jobs.views"]["views"]
    second = first | {"generation": 2, "step": 10, "lineage": "11" * 16}
    half = ledger["runs"][0] | {"digests": b"".join(DIGESTS[:5]).hex()}
    pages = [ledger | {"runs": [half]}]

    class Seed:
        async def ledger(self, job: str, after_step: int) -> LedgerPage:
            return LedgerPage.from_map_untrusted(pages.pop() if pages else ledger | {"head": other, "runs": []})

        async def views(self, job: str, after_generation: int) -> list[ViewBegan]:
            views = [ViewBegan.from_map_untrusted(view) for view in ([first] if pages else [first, second])]
            return [view for view in views if view.generation > after_generation]

    seed: Any = Seed()
    verdict = await module.audit(seed, JOB.id, load("tiny", {}, []).profile, lambda step, of: None)
    assert (verdict.fault, verdict.first_step, verdict.steps) == (None, 11, 10)


def test_changes_of_settings_lead_to_the_profile_at_steps_where_rings_were_formed(
    command: Command, answers: dict[str, Any]
) -> None:
    profile = load("tiny", {}, ["optimizer.lr=0.3"]).profile
    first = answers["jobs.views"]["views"][0]
    answers["jobs.views"]["views"] += [first | {"generation": 2, "step": 10, "lineage": lineage()}]
    changes = [(0, "0.2", "0.1"), (10, "0.3", "0.2")]

    def audited(changes: list[tuple[int, str, str]]) -> Any:
        made = [SettingChange(step, "optimizer.lr", value, before) for step, value, before in changes]
        answers["jobs.show"] = {"job": replace(JOB, changes=made).to_map(), "spec": profile.to_spec()}
        return command("jobs", "audit", "tiny")

    sound = audited(changes)
    assert sound.code == 0
    assert "optimizer.lr = 0.3 from step 11 on, before 0.2" in sound.out
    for wrong in ([changes[0]], [(0, "0.2", "0.1"), (10, "0.3", "0.25")], [changes[0], (5, "0.3", "0.2")]):
        assert audited(wrong).code == 1


# ------------------------------------------------------------------------------------------------------------- samples


def test_every_epoch_is_counted_whole_wherever_batches_cut_it() -> None:
    epochs = Epochs(WindowSampler(37, 5), batch=8, step=0)
    for steps in (1, 3, 50, 7):
        assert epochs.take(steps) is None
    assert (epochs.samples, epochs.complete) == (61 * 8, 61 * 8 // 37)


def test_an_order_that_repeats_a_sample_is_found() -> None:
    class Repeating(WindowSampler):
        def numbered(self, first: int, count: int) -> Any:
            found = super().numbered(first, count)
            return np.where(np.arange(first, first + count) == 60, super().numbered(41, 1)[0], found)

    fault = Epochs(Repeating(37, 5), batch=8, step=0).take(20)
    assert fault is not None
    assert (fault.kind, "twice in epoch 1" in fault.text) == ("samples", True)


# ---------------------------------------------------------------------------------------------------------- recoveries


def recovery(number: int, total_s: float) -> RecoveryInfo:
    return RecoveryInfo(
        "3f9a12bc04de", number, 1.7e9, "lost", "reset\x1b", "b", 2, 5, 3, 1, 0.1, 0.2, None, None, 0.5, total_s
    )


def test_recoveries_for_people_and_programs(command: Command, fake_seed: Any) -> None:
    found = [recovery(1, 0.8), recovery(2, 1.8)]
    fake_seed.answers["recoveries.list"] = {"recoveries": [item.to_map() for item in found], "total": 2}
    lines = command("jobs", "recoveries", "tiny").out.splitlines()
    assert lines[0].split()[:5] == ["WHEN", "WHAT", "STEP", "GEN", "MEMBERS"]
    assert "0.100" in lines[1]
    assert "reset�" in lines[1]
    assert lines[-2].split() == ["p50", "0.100", "0.200", "-", "-", "0.500", "0.800"]
    assert lines[-1].split()[-1] == "1.800"
    document = command("jobs", "recoveries", "tiny", "--json").json
    assert document["recoveries"] == [item.to_map() for item in found]
    assert document["spread_s"]["total"] == {"p50": 0.8, "p99": 1.8}
