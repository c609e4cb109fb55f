"""A grid: which runs it means, and what is refused before anything runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli

from configs.loader import read_toml
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.lab.experiments.grid import plan_of

EXAMPLES = Path("examples/experiments")


def plan(text: str, **more: Any) -> Any:
    return plan_of({"name": "g", **tomli.loads(text), **more}, "g.toml", None)


def test_every_value_meets_every_other_and_repeats_differ_in_their_seed() -> None:
    made = plan("""
        repeats = 2
        [set]
        job = { steps = 7, seed = 5 }
        [axes]
        batch.micro_batch_sequences = [2, 4]
        "link.preset" = ["", "wan"]
        [axes.strategy]
        sync = {}
        server = { job = { strategy = "server", workers = 3 } }
    """)
    assert {axis: list(labels) for axis, labels in made.grid.axes.items()} == {
        "batch.micro_batch_sequences": ["2", "4"], "link.preset": ["none", "wan"], "strategy": ["sync", "server"]
    }  # fmt: skip
    assert len({run.id for run in made.runs}) == len(made.runs) == made.grid.planned == 2 * 2 * 2 * 2
    assert [run.profile.job.seed for run in made.runs] == [5] * 8 + [6] * 8
    assert {run.profile.job.steps for run in made.runs} == {7}
    assert made.runs[-1].settings.items() >= {"job.steps": 7, "job.strategy": "server", "job.workers": 3}.items()
    found = {(run.cell["strategy"], run.cell["link.preset"]): run.machine for run in made.runs}
    assert (found["server", "wan"].workers, found["server", "wan"].link) == (3, "wan")
    assert (found["sync", "none"].workers, found["sync", "none"].link) == (2, "")
    machines = [run.machine for run in made.runs if run.repeat == 1]
    assert sum(one != other for one, other in pairwise(machines)) == 3  # few starts of workers


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[axes]\nbatch.micro_batchs = [1]", "did you mean batch.micro_batches"),
        ("[axes]\n'data.sequence_tokens' = [64, 512]", "data.sequence_tokens = 512"),  # model.context = 256
        ("[axes]\n'job.steps' = [1, 1]", "twice"),
        ("[axes]\n'job.steps' = 3", "a setting with its values"),
        ("[axes]\n'job.steps' = [3]\n[axes.long]\nyes = {'job.steps' = 9}", "two axes vary job.steps"),
        ("[axes.a]\none = {}\ntwo = {}", "are the same job"),
        ("repeats = 99\n[axes]\n'job.steps' = [" + ",".join(map(str, range(1, 99))) + "]", "more than"),
        ("repeat = 2\n[axes]\n'job.steps' = [3]", "known are name, base"),
        ("base = 'other.toml'\n[axes]\n'job.steps' = [3]", "is not a shipped profile"),
        ("limit = 'long'\n[axes]\n'job.steps' = [3]", "not a duration"),
        ("[axes]\njob = {}", "neither a list"),
        ("set.base = 'tiny'\n[axes]\n'job.steps' = [3]", "base is no setting"),
        ("[axes]\nbase = ['tiny', 'small']", "base is no setting"),
        ("[axes.'']\nb = {}", "at least 1 character"),
        ("[axes]\nstraggler = [0]", "from 1 to 100"),
        ("[axes]\nattack = ['flip']", "sign-flip"),
        ("set.job.exact = true\n[axes]\nattack = ['noise']", "no exact mode"),
    ],
)
def test_a_wrong_grid_is_refused_with_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(text)
    assert named in f"{caught.value.message}; {caught.value.remedy}"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text",
    ["[set]\nattack = 'noise'\n[axes]\n'job.steps' = [2]",
     "[axes.s]\np = {job.strategy = 'pipeline', pipeline.stages = 2}"],
)  # fmt: skip
def test_a_simulation_refuses_what_it_cannot_show(text: str) -> None:
    assert plan(text).runs
    with pytest.raises(ConfigError, match="cannot be simulated"):
        plan(text, simulated=True)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_grids_that_ship_are_valid(path: Path) -> None:
    document = read_toml(path)[1]
    assert plan_of(document, str(path), path.parent).runs
    assert plan_of(document | {"simulated": True}, str(path), path.parent).grid.simulated
