"""The grid of an experiment: which jobs it consists of. Every cell is validated before anything runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from configs.loader import complaint, flatten, load_settings, read_toml
from configs.schema import Profile, Table, tables
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.texts import seconds_of
from roles.attacker import ATTACKS
from roles.experiments.results import FIGURES, KEYS, time_to

T = TypeVar("T", bound=Table)

MAX_RUNS = 2000
_MACHINES = ("straggler", "attack", "attackers")
_TABLES = frozenset(name for name, _ in tables())


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
    axes: dict[str, Any] = Field(min_length=1, max_length=8)
    """What varies: every value of each axis is combined with every value of the others."""
    repeats: int = Field(default=1, ge=1, le=100)
    """Runs of each cell. They differ in job.seed."""
    seed: int = Field(default=1337, ge=0, lt=2**62)
    """job.seed of the first repeat; each further one adds 1."""
    limit: str = Field(default="10m", max_length=32)
    """Longest time of a run, from its job's first view: workers that start and jobs that are queued do not count."""
    loss_targets: list[Annotated[float, Field(gt=0)]] = Field(default=[], max_length=8)
    """Validation losses. The results say how long a run took to reach each."""
    gflops: float = Field(default=20.0, gt=0, le=1e6)
    """Simulated runs only: speed of each worker."""


class Machine(Table):
    """The workers that a run needs."""

    workers: int
    link: str
    """Preset of the emulated link between them; empty: the network as it is."""
    threads: int
    """Of each; 0: the machine's cores are shared."""
    private: bool
    """Whether each has its own text."""
    straggler: float = Field(default=1.0, ge=1, le=100)
    """The last worker computes so many times slower: a number from 1 to 100."""
    attack: str = Field(default="", pattern=f"^({'|'.join(ATTACKS)})?$")
    """What the last workers do: "" for nothing, or sign-flip, scale, noise, alie or label-flip."""
    attackers: int = Field(default=1, ge=0)
    """How many workers attack; at least one does not."""

    def attack_of(self, number: int) -> str:
        return self.attack if number > self.workers - self.attackers else ""


@dataclass(frozen=True, slots=True)
class Run:
    """One job of the experiment.

    Attributes:
        id: digest of everything that decides its result.
        cell: axis → label. settings: every setting that the grid changes, with its value in this run.
        repeat: from 1.
    """

    id: str
    cell: dict[str, str]
    settings: dict[str, Any]
    repeat: int
    profile: Profile
    machine: Machine

    @property
    def step_tokens(self) -> int:
        batch = self.profile.batch
        return batch.micro_batches * batch.micro_batch_sequences * self.profile.data.sequence_tokens

    def __str__(self) -> str:
        return ", ".join(f"{axis} = {label}" for axis, label in self.cell.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """All runs of a grid, in the order in which they run. ``axes``: axis → its labels."""

    grid: Grid
    axes: dict[str, list[str]]
    runs: list[Run]
    limit_s: float


def read_plan(path: Path) -> Plan:
    """Read and validate the grid of a file. Raises ``UserError``."""
    return plan_of(read_toml(path, "grid")[1], str(path), path.parent)


def plan_of(document: Mapping[str, Any], place: str, root: Path | None) -> Plan:
    """Validate a grid and all its cells.

    ``root``: directory of the paths of base profiles; None: only profiles that ship are allowed.

    Raises:
        UserError: with ``place``, and the cell that is wrong.
    """
    grid = _valid(Grid, document, place)
    limit_s = seconds_of(grid.limit, f"{place}: limit")
    base: str | dict[str, Any] = grid.base
    if root is not None and grid.base.endswith(".toml"):
        base = read_toml(root / grid.base)[1]
    axes, fixed, targets = dict(_axes(grid.axes, place)), dict(flatten(grid.set)), set(map(time_to, grid.loss_targets))
    by = {"job.seed": "seed and repeats"}  # setting → what varies it
    _refuse(place, "set job.seed is varied by seed and repeats", "leave it out", "job.seed" in fixed)
    _refuse(place, "limit is 0 s", "write 60s, 30m, 12h or 7d", not limit_s)
    _refuse(place, "two loss_targets are the same", "leave one out", len(targets) < len(grid.loss_targets))
    _refuse(place, "there are no axes", "name a setting and its values", not axes)
    for axis, values in axes.items():
        _refuse(place, f"axis {axis}: results have such a column", "rename it", axis in {*KEYS, *FIGURES, *targets})
        wrong = next((text for text in (axis, *values) if not (text and text.isprintable())), None)
        _refuse(place, f"axis {axis!r}: {wrong!r} is no name", "use printable characters", wrong is not None)
        for key in sorted({key for settings in values.values() for key in settings}):
            other = by.setdefault(key, axis)
            _refuse(place, f"axis {axis}: {key} is varied by {other}", "leave it out here", other != axis)
    runs_planned = math.prod(map(len, axes.values())) * grid.repeats
    _refuse(place, f"more than {MAX_RUNS} runs", "take fewer values or repeats", runs_planned > MAX_RUNS)
    runs = dict[str, Run]()
    keys = [*fixed, *(key for key in by if key != "job.seed" and key not in fixed)]
    for repeat, labels in itertools.product(range(1, grid.repeats + 1), itertools.product(*axes.values())):
        cell, settings = dict(zip(axes, labels, strict=True)), dict(fixed)
        for axis, label in cell.items():
            settings |= axes[axis][label]
        run = _run(grid, base, cell, settings, repeat, keys, place)
        twin = runs.setdefault(run.id, run)
        _refuse(place, f"the cells {twin} and {run} are the same job", "leave one of them out", twin is not run)
    # Runs with the same workers follow each other.
    ordered = sorted(runs.values(), key=lambda run: (run.repeat, str(run.machine)))
    return Plan(grid, {axis: list(values) for axis, values in axes.items()}, ordered, limit_s)


def _valid(kind: type[T], given: Mapping[str, Any], place: str) -> T:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        details: Any = error.errors(include_url=False)[0]
        key = ".".join(map(str, details["loc"]))
        field = kind.model_fields.get(key.partition(".")[0])
        about = "a grid has " + ", ".join(kind.model_fields) if field is None else field.description or ""
        raise ConfigError(f"{place}: {key}: {complaint(details)}", remedy=" ".join(about.split())) from None


def _refuse(place: str, text: str, remedy: str, wrong: bool) -> None:
    if wrong:
        raise ConfigError(f"{place}: {text}", remedy=remedy)


def _run(
    grid: Grid,
    base: str | dict[str, Any],
    cell: dict[str, str],
    settings: Mapping[str, Any],
    repeat: int,
    keys: Iterable[str],
    place: str,
) -> Run:
    where = f"{place}: {', '.join(f'{axis} = {label}' for axis, label in cell.items())}"
    _refuse(where, "base is no setting", "name it outside of [set] and [axes]", "base" in settings)
    own = {key: settings[key] for key in _MACHINES if key in settings}
    values = {key: value for key, value in settings.items() if key not in own}
    try:
        profile = load_settings(base, values | {"job.seed": grid.seed + repeat - 1}).alone()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", remedy=error.remedy) from None
    job, is_timed = profile.job, bool(grid.loss_targets)
    remedy = "set validation.every, or leave loss_targets out"
    _refuse(
        where, "loss_targets are of validations, and there are none", remedy, is_timed and not profile.validation.every
    )
    given = {"workers": job.workers, "link": profile.link.preset, "threads": profile.device.threads}
    given |= {"private": profile.data.private}
    machine = _valid(Machine, given | own | ({} if own.get("attack") else {"attackers": 0}), where)
    remedy = f"job.workers = {job.workers}: at most {job.workers - 1}, so that one is honest"
    _refuse(where, f"attackers = {machine.attackers}", remedy, machine.attackers >= job.workers)
    is_attacked = job.strategy in ("sync", "local", "federated") and not job.exact
    remedy = "use the strategy sync, local or federated, and no exact mode"
    text = "attacks change whole vectors of floating-point numbers"
    _refuse(where, text, remedy, bool(machine.attack) and not is_attacked)
    decisive = json.dumps([profile.to_spec(), machine.model_dump(), grid.gflops], sort_keys=True)
    shown = {key: getattr(machine, key) if key in _MACHINES else profile.value(key) for key in keys}
    return Run(hashlib.sha256(decisive.encode()).hexdigest()[:12], cell, shown, repeat, profile, machine)


def _axes(axes: Mapping[str, Any], place: str) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """(axis, label → settings) of each axis."""
    for name, values in axes.items():
        if isinstance(values, dict) and name in _TABLES and all(isinstance(it, list) for it in values.values()):
            yield from _axes(dict(flatten({name: values})), place)  # an unquoted dotted key
        elif isinstance(values, list) and values:
            labelled = {_label(value): {name: value} for value in values}
            twice = len(labelled) < len(values)
            _refuse(place, f"axis {name} has a value twice", "use repeats for more runs", twice)
            yield name, labelled
        elif isinstance(values, dict) and values and all(isinstance(it, dict) for it in values.values()):
            yield name, {label: dict(flatten(settings)) for label, settings in values.items()}
        else:
            remedy = f'write "{name}" = [4, 8], or a table with a table of settings for each label'
            _refuse(place, f"axis {name} is neither a list nor a table of tables", remedy, True)


def _label(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
