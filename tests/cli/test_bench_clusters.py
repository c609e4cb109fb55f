"""``p2ptrain bench uneven`` and ``save``: their arithmetic, and what they refuse before anything starts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.bench.machine import origin
from p2ptrain.cli.bench.save import (
    LAYERS,
    STATE_BYTES,
    WARM_STEPS,
    Plan,
    Save,
    Saves,
    Step,
    overlaps,
    settings_for,
)
from p2ptrain.cli.bench.trial import adapted
from p2ptrain.core.errors import ResourceError
from wire.records import CheckpointInfo, MetricRow

Command = Callable[..., Any]


# --------------------------------------------------------------------------------------------------------------- save


def steps_of(seconds: list[float], rest_s: dict[int, float]) -> dict[int, Step]:
    """Steps from 1 on, told as they end; ``rest_s``: by step, 0.1 s else."""
    wall, made = 1000.0, {}
    for number, each_s in enumerate(seconds, 1):
        wall += each_s
        made[number] = Step(number, wall, each_s, rest_s.get(number, 0.1))
    return made


def test_a_save_beside_the_steps_around_it() -> None:
    # 4 steps to warm up, 3 quiet ones, a save of step 7: 8 to 10 overlap it, 11 to 13 are quiet again
    steps = steps_of([9.0] * WARM_STEPS + [1.0] * 3 + [1.6, 1.1, 1.2] + [1.0] * 3, {8: 0.6})
    end_wall = steps[10].wall - 0.5
    (found,) = overlaps(steps, [Save(7, end_wall, 500, 2)])
    assert [step.number for step in found.overlapped] == [8, 9, 10]
    assert [step.number for step in found.quiet] == [5, 6, 7, 11, 12, 13]
    assert found.writing_s == pytest.approx(1.6 + 1.1 + 0.7)
    assert found.pause_s == pytest.approx(0.5)
    assert found.added == pytest.approx(0.3)
    assert found.added_by_writing == pytest.approx(0.4 / 3)
    assert found.added_to_median == pytest.approx(0.2)


def test_saves_in_a_row_share_the_quiet_steps_between_them() -> None:
    steps = steps_of([1.0] * 20, {})
    saves = [Save(12, steps[13].wall + 0.5, 1, 1), Save(7, steps[7].wall + 0.5, 1, 1)]
    first, second = overlaps(steps, saves)
    assert [step.number for step in first.overlapped] == [8]
    assert [step.number for step in first.quiet] == [5, 6, 7, 9, 10, 11, 12]
    assert [step.number for step in second.overlapped] == [13, 14]
    assert [step.number for step in second.quiet] == [9, 10, 11, 12, 15, 16, 17, 18, 19, 20]
    assert first.added == second.added == first.pause_s == 0.0


def test_a_step_that_another_save_disturbs_is_not_quiet() -> None:
    steps = steps_of([1.0] * 12, {})
    first, second = overlaps(steps, [Save(6, steps[9].wall, 1, 1), Save(8, steps[9].wall + 0.5, 1, 1)])
    assert [step.number for step in first.overlapped] == [7, 8, 9]
    assert [step.number for step in first.quiet] == [5, 6]
    assert [step.number for step in second.quiet] == [11, 12]


def test_a_save_without_anything_beside_it_is_none() -> None:
    steps = steps_of([1.0] * 6, {})
    assert overlaps(steps, [Save(4, steps[6].wall, 1, 1)]) == []
    assert overlaps({}, [Save(4, 1.0, 1, 1)]) == []


def test_what_the_seed_tells_becomes_steps_and_saves() -> None:
    row = MetricRow("j", 3, 12.5, step_ms=1000.0, compute_ms=700.0, communicate_ms=100.0, wait_ms=50.0)
    assert Step.of(row) == Step(3, 12.5, 1.0, pytest.approx(0.15))
    told = [
        CheckpointInfo("a", "j", 3, "/", "1", "w", "", 500, 20.0),
        CheckpointInfo("b", "j", 3, "/", "2", "v", "", 500, 21.0),
    ]
    assert Save.of(told) == Save(3, 21.0, 500, 2)


def test_the_report_of_saves_tells_the_first_one_apart() -> None:
    profile = adapted("tiny", [], {"device.threads": 1}, {})
    work = Saves(Plan(profile, 2, 3, 2))
    work.steps = steps_of([1.0] * 7 + [3.0] + [1.0] * 4 + [1.1] + [1.0] * 4 + [1.02] + [1.0] * 3, {})
    work.saves = [Save(step, work.steps[step + 1].wall - 0.1, 500 << 20, 2) for step in (7, 12, 17)]
    report = work.report(origin(), complete=True)
    found = json.loads(json.dumps(report.to_json()))["results"]
    assert [item["added"] for item in found["first"]] == pytest.approx([2.0])
    added = [item["added"] for item in found["saves"]]
    assert added == pytest.approx([0.1, 0.02])
    assert found["added"] == pytest.approx(statistics.median(added))
    assert found["beaten"] is False
    assert "500 MiB" in report.title
    assert "2 threads compute on 2 cores (none is left over)" in " ".join(report.notes)
    assert [sample["step"] for sample in report.samples] == list(range(WARM_STEPS + 1, 22))


def test_a_report_of_saves_without_any() -> None:
    report = Saves(Plan(adapted("tiny", [], {}, {}), 2, 3, 2)).report(origin(), complete=False)
    assert json.loads(json.dumps(report.to_json()))["results"]["added"] is None


@pytest.mark.parametrize("size_bytes", [1 << 20, 100 << 20, 500 << 20, 5 << 30])
def test_a_model_has_about_the_size_that_was_asked_for(size_bytes: int) -> None:
    settings = settings_for(size_bytes)
    model = adapted("tiny", [], settings, {}).model  # which checks that all fit together
    width = model.hidden_size
    layer_numel = 4 * width**2 + 3 * width * model.intermediate_size + 2 * width
    state_bytes = STATE_BYTES * (LAYERS * layer_numel + 257 * width)
    assert state_bytes == pytest.approx(size_bytes, rel=0.1 if size_bytes >= 50 << 20 else 0.5)


# ------------------------------------------------------------------------------------------------------------ profiles


def test_a_person_may_change_what_a_measurement_wants_and_not_what_it_must_have() -> None:
    made = adapted(
        "tiny", ["batch.micro_batches=4"], {"batch.micro_batches": 16, "device.threads": 1}, {"job.steps": 7}
    )
    assert isinstance(made, Profile)
    assert (made.batch.micro_batches, made.device.threads, made.job.steps) == (4, 1, 7)
    assert adapted("tiny", ["job.steps=9"], {}, {"job.steps": 7}).job.steps == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("save", "--size", "much"), "is no size"),
        (("save", "--state", "/nowhere/at/all"), "is no directory"),
        (("save", "--size", "1M", "--set", "no.such=1"), "no.such"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_starts(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    outcome = command("bench", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.out == ""


def test_checkpoints_for_which_there_is_no_room(command: Command, tmp_path: Path) -> None:
    outcome = command("bench", "save", "--size", "900G", "--state", str(tmp_path))
    assert outcome.code == ResourceError.exit_code
    assert "2 workers with checkpoints of 900 GiB need" in outcome.err
    assert list(tmp_path.iterdir()) == []
