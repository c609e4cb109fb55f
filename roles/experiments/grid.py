"""The grid of an experiment: which jobs it consists of. Every cell is validated before anything runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli
from pydantic import Field, ValidationError

from configs.loader import complaint, load_settings, shipped
from configs.schema import Profile, Table, tables
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.texts import seconds_of
from roles.attacker import ATTACKS

MAX_RUNS, MAX_TEXT_BYTES = 2000, 256 << 10
_MACHINES = ("straggler", "attack", "attackers")
_TABLES = frozenset(name for name, _ in tables())


class Grid(Table):
    """The file of an experiment. An axis is a setting with a list of values, or a name with a table of labels, each
    with the settings that it stands for. Besides the settings of profiles there are ``straggler`` (the last worker
    computes so many times slower), ``attack`` and ``attackers`` (the last workers send wrong vectors, as in ``chaos``).
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
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
    """Longest time of a run, from the creation of its job."""
    loss_targets: list[Annotated[float, Field(gt=0)]] = Field(default=[], max_length=8)
    """Validation losses. The results say how long a run took to reach each."""
    gflops: float = Field(default=20.0, gt=0, le=1e6)
    """Simulated runs only: speed of each worker."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The workers that a run needs.

    Attributes:
        link: preset of the emulated link between them; empty: the network as it is.
        straggler: the last one computes so many times slower.
        attack: what the last ``attackers`` do (``roles.attacker``); empty: nothing.
        threads: of each; 0: the machine's cores are shared.
    """

    workers: int
    link: str
    straggler: float
    attack: str
    attackers: int
    threads: int

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
    return plan_of(_read(path), str(path), path.parent)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return document_of(file.read(MAX_TEXT_BYTES + 1), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="see examples/experiments/") from None


def document_of(text: bytes, place: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ConfigError``."""
    if len(text) > MAX_TEXT_BYTES:
        raise ConfigError(f"{place} has more than {MAX_TEXT_BYTES} bytes", remedy="is this the right file?")
    try:
        return tomli.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not TOML: {error}", remedy="see https://toml.io for the syntax") from None


def plan_of(document: Mapping[str, Any], place: str, root: Path | None) -> Plan:
    """Validate a grid and all its cells.

    ``root``: directory of the paths of base profiles; None: only profiles that ship are allowed.

    Raises:
        UserError: with ``place``, and the cell that is wrong.
    """
    try:
        grid = Grid.model_validate(document)
    except ValidationError as error:
        details: Any = error.errors(include_url=False)[0]
        key = ".".join(map(str, details["loc"]))
        field = Grid.model_fields.get(key.partition(".")[0])
        about = "a grid has " + ", ".join(Grid.model_fields) if field is None else field.description or ""
        raise ConfigError(f"{place}: {key}: {complaint(details)}", remedy=" ".join(about.split())) from None
    limit_s = seconds_of(grid.limit, f"{place}: limit")
    base = _base(grid.base, place, root)
    axes = dict(_axes(grid.axes, place))
    if math.prod(map(len, axes.values())) * grid.repeats > MAX_RUNS:
        raise ConfigError(f"{place}: more than {MAX_RUNS} runs", remedy="take fewer values or repeats")
    by = {"job.seed": "seed and repeats"}  # setting → what varies it
    for axis, values in axes.items():
        for key in sorted({key for settings in values.values() for key in settings}):
            if (other := by.setdefault(key, axis)) != axis:
                raise ConfigError(f"{place}: axis {axis}: {key} is varied by {other}", remedy="leave it out here")
    fixed, runs = _flat(grid.set), dict[str, Run]()
    keys = [*fixed, *(key for key in by if key != "job.seed" and key not in fixed)]
    for repeat, labels in itertools.product(range(1, grid.repeats + 1), itertools.product(*axes.values())):
        cell, settings = dict(zip(axes, labels, strict=True)), dict(fixed)
        for axis, label in cell.items():
            settings |= axes[axis][label]
        run = _run(grid, base, cell, settings, repeat, keys, place)
        if (twin := runs.setdefault(run.id, run)) is not run:
            raise ConfigError(f"{place}: the cells {twin} and {run} are the same job", remedy="leave one of them out")
    # Runs with the same workers follow each other.
    ordered = sorted(runs.values(), key=lambda run: (run.repeat, [str(it) for it in asdict(run.machine).values()]))
    return Plan(grid, {axis: list(values) for axis, values in axes.items()}, ordered, limit_s)


def _base(base: str, place: str, root: Path | None) -> str | dict[str, Any]:
    if base in shipped():
        return base
    if root is None or not base.endswith(".toml"):
        more = "" if root is None else ", or give the path of a TOML file"
        raise ConfigError(f"{place}: base = {base!r} does not ship", remedy=f"use one of {', '.join(shipped())}{more}")
    return _read(root / base)


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
    values = {key: value for key, value in settings.items() if key not in _MACHINES}
    try:
        profile = load_settings(base, values | {"job.seed": grid.seed + repeat - 1}).alone()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", remedy=error.remedy) from None
    if grid.loss_targets and not profile.validation.every:
        remedy = "set validation.every, or leave loss_targets out"
        raise ConfigError(f"{where}: loss_targets are of validations, and validation.every = 0", remedy=remedy)
    machine = _machine(settings, profile, where)
    decisive = json.dumps([profile.to_spec(), asdict(machine), grid.gflops], sort_keys=True)
    shown = {key: getattr(machine, key) if key in _MACHINES else profile.value(key) for key in keys}
    return Run(hashlib.sha256(decisive.encode()).hexdigest()[:12], cell, shown, repeat, profile, machine)


def _machine(own: Mapping[str, Any], profile: Profile, place: str) -> Machine:
    straggler, attack, workers = own.get("straggler", 1.0), own.get("attack", ""), profile.job.workers
    attackers = own.get("attackers", 1) if attack else 0
    if type(straggler) not in (int, float) or not 1 <= straggler <= 100:
        raise ConfigError(f"{place}: straggler = {straggler} is no number from 1 to 100", remedy="1: as fast as it can")
    if attack not in ("", *ATTACKS):
        raise ConfigError(f"{place}: attack = {attack!r}", remedy=f'use {", ".join(ATTACKS)}, or "" for none')
    if type(attackers) is not int or not 0 <= attackers < workers:
        remedy = f"job.workers = {workers}: at most {workers - 1}, so that one is honest"
        raise ConfigError(f"{place}: attackers = {attackers!r}", remedy=remedy)
    if attack and (profile.job.exact or profile.job.strategy not in ("sync", "local", "federated")):
        remedy = "use the strategy sync, local or federated, and no exact mode"
        raise ConfigError(f"{place}: attacks change whole vectors of floating-point numbers", remedy=remedy)
    return Machine(workers, profile.link.preset, float(straggler), attack, attackers, profile.device.threads)


def _axes(axes: Mapping[str, Any], place: str) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """(axis, label → settings) of each axis."""
    for name, values in axes.items():
        if isinstance(values, dict) and name in _TABLES and all(isinstance(it, list) for it in values.values()):
            yield from _axes({f"{name}.{key}": them for key, them in values.items()}, place)  # an unquoted dotted key
        elif isinstance(values, list) and values:
            labelled = {_label(value): {name: value} for value in values}
            if len(labelled) < len(values):
                raise ConfigError(f"{place}: axis {name} has a value twice", remedy="use repeats for more runs")
            yield name, labelled
        elif isinstance(values, dict) and values and all(isinstance(it, dict) for it in values.values()):
            yield name, {label: _flat(settings) for label, settings in values.items()}
        else:
            remedy = f'write "{name}" = [4, 8], or a table with a table of settings for each label'
            raise ConfigError(f"{place}: axis {name} is neither a list nor a table of tables", remedy=remedy)


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, whether the keys were quoted or not."""
    flat = dict[str, Any]()
    for key, value in given.items():
        is_table = key in _TABLES and isinstance(value, dict)
        flat |= {f"{key}.{name}": it for name, it in value.items()} if is_table else {key: value}
    return flat


def _label(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
