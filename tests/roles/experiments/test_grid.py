"""A grid: which runs it means, and what is refused before anything runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli

from p2ptrain.core.errors import ConfigError, UserError
from roles.experiments.grid import plan_of, read_plan
from roles.experiments.simulated import check_plan

EXAMPLES = Path("examples/experiments")


def plan(text: str, **more: Any) -> Any:
    return plan_of({"name": "g", **tomli.loads(text), **more}, "g.toml", None)


def test_every_value_meets_every_other_and_repeats_differ_in_their_seed() -> None:
    made = plan("""
        repeats = 2
        seed = 5
        [set]
        job.steps = 7
        [axes]
        batch.micro_batch_sequences = [2, 4]
        "link.preset" = ["", "wan"]
        [axes.strategy]
        sync = {}
        server = { job = { strategy = "server", workers = 3 } }
    """)
    assert made.axes == {
        "batch.micro_batch_sequences": ["2", "4"], "link.preset": ["none", "wan"], "strategy": ["sync", "server"]
    }  # fmt: skip
    assert len({run.id for run in made.runs}) == len(made.runs) == 2 * 2 * 2 * 2
    assert [run.profile.job.seed for run in made.runs] == [5] * 8 + [6] * 8
    assert {run.profile.job.steps for run in made.runs} == {7}
    assert made.runs[0].settings.keys() >= {"job.steps", "job.strategy", "job.workers"}
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
        ("[axes]\n'job.seed' = [1]", "seed and repeats"),
        ("[axes]\n'job.steps' = [1, 1]", "twice"),
        ("[axes]\n'job.steps' = 3", "neither a list nor a table"),
        ("[axes]\n'job.steps' = [3]\n[axes.long]\nyes = {'job.steps' = 9}", "varied by job.steps"),
        ("[axes.a]\none = {}\ntwo = {}", "are the same job"),
        ("repeats = 99\n[axes]\n'job.steps' = [" + ",".join(map(str, range(1, 99))) + "]", "more than"),
        ("repeat = 2\n[axes]\n'job.steps' = [3]", "a grid has name, base"),
        ("base = 'other.toml'\n[axes]\n'job.steps' = [3]", "is not a shipped profile"),
        ("limit = 'long'\n[axes]\n'job.steps' = [3]", "not a duration"),
        ("loss_targets = [2]\n[axes]\n'validation.every' = [0]", "there are none"),
        ("loss_targets = [2, 2.0000001]\n[axes]\n'job.steps' = [3]", "the same"),
        ("limit = '0s'\n[axes]\n'job.steps' = [3]", "limit is 0 s"),
        ("set.job.seed = 4\n[axes]\n'job.steps' = [3]", "seed and repeats"),
        ("[axes]\njob = {}", "no axes"),
        ("set.base = 'tiny'\n[axes]\n'job.steps' = [3]", "base is no setting"),
        ("[axes]\nbase = ['tiny', 'small']", "base is no setting"),
        ("[axes.state]\na = {}\nb = {'job.steps' = 3}", "such a column"),
        ('[axes.a]\n"b\\n" = {}', "printable"),
        ("[axes.'']\nb = {}", "printable"),
        ("[axes]\nstraggler = [0]", "from 1 to 100"),
        ("[axes]\nattack = ['flip']", "sign-flip"),
        ("[set]\nattack = 'noise'\n[axes]\nattackers = [2]", "at most 1"),
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
    with pytest.raises(ConfigError, match="simulat"):
        check_plan(plan(text), "g.toml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_grids_that_ship_are_valid(path: Path) -> None:
    assert read_plan(path).runs
