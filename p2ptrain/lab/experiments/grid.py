"""The grid of an experiment: which jobs it consists of. Every cell is validated before anything runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from configs.loader import flatten, load_settings, read_toml, validated
from configs.schema import Profile, Table
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.footprint import LLAMAS
from p2ptrain.core.texts import seconds_of
from p2ptrain.lab.attacker import ATTACKS, check_attackable

MAX_RUNS = 2000
SIMULATED = ("sync", "local", "federated", "server")
"""Strategies that can be simulated."""


class Grid(Table):
    """The file of an experiment. An axis is a setting with a list of values, or a name with a table of labels, each
    with the settings that it stands for. Besides the settings of profiles there are ``straggler`` (the last worker
    computes so many times slower), ``attack`` and ``attackers`` (the last workers send wrong vectors, as in ``chaos``).
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,49}$")
    """Name of the experiment, and the beginning of its jobs' names."""
    base: str = Field(default="tiny", max_length=1024)
    """The profile that all runs begin with: one that ships, or the path of a TOML file, relative to this one."""
    set: dict[str, Any] = Field(default={})
    """Settings of all runs."""
    axes: dict[Annotated[str, Field(min_length=1)], Any] = Field(min_length=1, max_length=8)
    """What varies: a setting with its values, such as "job.steps" = [4, 8], or a name with a table of settings for each
    label. Every value of each axis is combined with every value of the others."""
    repeats: int = Field(default=1, ge=1, le=100)
    """Runs of each cell. The first has the job.seed of the settings; it is one more for each further one."""
    limit: str = Field(default="10m", max_length=32)
    """Longest time of a run, from its job's first view: workers that start and jobs that are queued do not count."""
    loss_targets: list[Annotated[float, Field(gt=0)]] = Field(default=[], max_length=8)
    """Validation losses. The results say how long a run took to reach each."""
    simulated: bool = False
    """Simulate the runs: times, bytes and recoveries, but no losses."""
    gflops: float = Field(default=20.0, gt=0, le=1e6)
    """Simulated runs only: speed of each worker, in GFLOP/s."""

    @field_validator("axes")
    @classmethod
    def _labelled(cls, axes: dict[str, Any]) -> dict[str, Any]:
        """Each axis as a table of labels, each with a table of settings by dotted key."""
        found = dict[str, Any]()
        for name, values in axes.items():
            is_dotted = isinstance(values, dict) and any(isinstance(value, list) for value in values.values())
            found |= {f"{name}.{key}": value for key, value in values.items()} if is_dotted else {name: values}
        for axis, values in found.items():
            if isinstance(values, list) and values:
                found[axis] = {_label(value): {axis: value} for value in values}
                if len(found[axis]) < len(values):
                    raise ValueError(f"{axis} has a value twice; use repeats for more runs")
            elif isinstance(values, dict) and values and all(isinstance(value, dict) for value in values.values()):
                found[axis] = {label: dict(flatten(settings)) for label, settings in values.items()}
            else:
                raise ValueError(f"{axis} is neither a list of values nor a table of tables")
        return found

    @property
    def planned(self) -> int:
        """Number of runs."""
        return math.prod(map(len, self.axes.values())) * self.repeats


class RunMachine(Table):
    """The worker processes that a run needs, which the next run uses again if it needs equal ones. ``link``,
    ``threads``, ``private``: as in its profile."""

    workers: int
    link: str
    threads: int
    private: bool
    straggler: float = Field(default=1.0, ge=1, le=100)
    """The last worker computes so many times slower: a number from 1 to 100."""
    attack: str = Field(default="", pattern=f"^({'|'.join(ATTACKS)})?$")
    """What the last workers do: "" for nothing, or sign-flip, scale, noise, alie or label-flip."""
    attackers: int = Field(default=1, ge=0)
    """How many workers attack; at least one does not."""

    @property
    def attacks(self) -> list[str]:
        """Of each worker; "" for nothing."""
        return [self.attack if self.workers - rank <= self.attackers else "" for rank in range(self.workers)]


_MACHINE_KEYS = ("straggler", "attack", "attackers")


@dataclass(frozen=True, slots=True)
class GridRun:
    """One job of the experiment.

    Attributes:
        id: digest of everything that decides its result.
        cell: axis → label. settings: of the profile and the machine, besides those of the base.
        repeat: from 1.
    """

    id: str
    cell: dict[str, str]
    settings: dict[str, Any]
    repeat: int
    profile: Profile
    machine: RunMachine

    def __str__(self) -> str:
        return _describe_cell(self.cell)


@dataclass(frozen=True, slots=True)
class GridPlan:
    """All runs of a grid, in the order in which they run."""

    grid: Grid
    runs: list[GridRun]
    limit_s: float


def plan_of(document: Mapping[str, Any], place: str, root: Path | None) -> GridPlan:
    """Validate a grid and all its cells.

    ``root``: directory of the paths of base profiles; None: only profiles that ship are allowed.

    Raises:
        UserError: with ``place``, and the cell that is wrong.
    """
    grid = validated(Grid, document, place)
    limit_s = seconds_of(grid.limit, f"{place}: limit")
    if grid.planned > MAX_RUNS:
        raise ConfigError(f"{place}: {grid.planned} runs, more than {MAX_RUNS}", remedy="take fewer values or repeats")
    base: str | dict[str, Any] = grid.base
    if root is not None and grid.base.endswith(".toml"):
        base = read_toml(root / grid.base)[1]
    runs = dict[str, GridRun]()
    for labels in itertools.product(*grid.axes.values()):
        for run in _make_runs(grid, base, dict(zip(grid.axes, labels, strict=True)), place):
            if (twin := runs.setdefault(run.id, run)) is not run:
                text = f"{place}: the cells {twin} and {run} are the same job"
                raise ConfigError(text, remedy="leave one of them out")
    # Runs with the same workers follow each other.
    ordered = sorted(runs.values(), key=lambda run: (run.repeat, str(run.machine)))
    return GridPlan(grid, ordered, limit_s)


def _make_runs(grid: Grid, base: str | dict[str, Any], cell: dict[str, str], place: str) -> Iterator[GridRun]:
    where, varied = f"{place}: {_describe_cell(cell)}", dict[str, Any]()
    for axis, label in cell.items():
        if twice := varied.keys() & grid.axes[axis][label].keys():
            raise ConfigError(f"{where}: two axes vary {min(twice)}", remedy="leave it out in one of them")
        varied |= grid.axes[axis][label]
    settings = dict(flatten(grid.set)) | varied
    if "base" in settings:
        raise ConfigError(f"{where}: base is no setting", remedy="name it outside of [set] and [axes]")
    own = {key: settings[key] for key in _MACHINE_KEYS if key in settings}
    try:
        first = load_settings(base, {key: value for key, value in settings.items() if key not in own}).alone()
        if own.get("attack"):
            check_attackable(first.job)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", remedy=error.remedy) from None
    job, model, is_private = first.job, first.model, first.data.private
    values = {"workers": job.workers, "link": first.link.preset, "threads": first.device.threads, "private": is_private}
    machine = validated(RunMachine, values | own, where)
    is_llama = model.architecture in LLAMAS and not model.path
    if grid.simulated and (job.strategy not in SIMULATED or is_private or not is_llama or machine.attack):
        remedy = f"what can be: {', '.join(SIMULATED)} with a new model of {', '.join(LLAMAS)}, shared data, no attack"
        raise ConfigError(f"{where}: this job cannot be simulated", remedy=remedy)
    for repeat in range(1, grid.repeats + 1):
        profile = first.model_copy(update={"job": job.model_copy(update={"seed": job.seed + repeat - 1})})
        decisive = [profile.to_spec(), machine.model_dump(), grid.loss_targets, grid.simulated and grid.gflops]
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
        yield GridRun(digest, cell, settings, repeat, profile, machine)


def _describe_cell(cell: Mapping[str, str]) -> str:
    return ", ".join(f"{axis} = {label}" for axis, label in cell.items())


def _label(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
