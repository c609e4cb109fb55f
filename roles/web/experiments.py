"""Experiments on the workers of a seed: requests for them, and the task that carries them out, one at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli
from pydantic import Field

from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.errors import ConfigError, P2PTrainError, Refused
from roles.background import Background
from roles.web.endpoints import Call, Endpoint, Given, Page
from roles.web.feed import Connect
from wire.records import ABSENT_STATES
from wire.schema import Record

if TYPE_CHECKING:
    from roles.experiments.grid import Plan, Run
    from roles.experiments.results import Result, Results
    from roles.experiments.run import Progress, Show

REQUEST = "request.json"


@dataclass(frozen=True, slots=True)
class ExperimentInfo(Record):
    """One experiment.

    Attributes:
        id: its name. state: ``running``, ``done``, ``interrupted`` (it goes on when the seed starts again).
        runs: with a result, of ``planned``. text: what it does now, or why it was interrupted.
    """

    id: str
    state: str
    runs: int
    planned: int
    text: str = ""
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """What the results say: by cell, and in words."""

    summary: dict[str, Any]


class Experiments:
    """``root``: a directory for each experiment is made in it. ``connect``: to the seed, as an operator."""

    def __init__(self, root: Path, connect: Connect) -> None:
        self._root, self._connect = root, connect
        self._work = Background()
        self.infos: dict[str, ExperimentInfo] = {}
        self.running = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Go on with what is not done, while the body runs."""
        self._work.start(self._go_on(), "experiments")
        try:
            yield
        finally:
            await self._work.stop()

    def directory(self, name: str) -> Path:
        """Raises ``Refused``."""
        if name not in self.infos:
            raise Refused("unknown-experiment", f"there is no experiment {name[:64]!r}", remedy="list them")
        return self._root / name

    def begin(self, plan: Plan, document: dict[str, Any], workers: int) -> ExperimentInfo:
        """``document``: of the plan. ``workers``: that there are. Raises ``Refused``, ``UserError``."""
        from roles.experiments.results import Results

        for run in plan.runs:
            machine = run.machine
            if machine.link or machine.straggler > 1 or machine.attack:
                text = f"the grid: {run}: links, stragglers and attackers need processes of their own"
                raise ConfigError(text, remedy="run the grid on one machine: p2ptrain experiment run grid.toml")
            if machine.workers > workers:
                text = f"the grid: {run} needs {machine.workers} workers, and there are {workers}"
                raise Refused("too-few", text, remedy="start more with p2ptrain join")
        if self.running:
            raise Refused("busy", f"experiment {self.running} is running", remedy="wait until it is done")
        name = plan.grid.name
        results = Results(self._root / name, plan)
        write_atomic(RealDisk(), self._root / name / REQUEST, json.dumps(document).encode())
        self.infos[name] = ExperimentInfo(name, "running", len(results.rows), len(plan.runs))
        self.running = name
        self._work.start(self._carry_out(results), f"experiment {name}")
        return self.infos[name]

    async def _go_on(self) -> None:
        from roles.experiments.grid import plan_of
        from roles.experiments.results import Results

        disk = RealDisk()
        for name in disk.list_dir(self._root):
            try:
                request = json.loads(disk.read(self._root / name / REQUEST, max_bytes=1 << 20))
                results = Results(self._root / name, await asyncio.to_thread(plan_of, request, name, None))
            except (P2PTrainError, ValueError):
                continue  # not one of ours, or of another release
            self.running = name
            await self._carry_out(results)

    async def _carry_out(self, results: Results) -> None:
        from roles.experiments.run import carry_out, measure

        plan = results.plan
        name, planned = plan.grid.name, len(plan.runs)

        async def execute(run: Run, show: Show) -> Result:
            async with self._connect() as client:
                return await measure(client, run, plan, show)

        def at(now: Progress) -> None:
            text = f"{now.run}, repeat {now.run.repeat}: {now.text}"
            self.infos[name] = ExperimentInfo(name, "running", now.number - 1, planned, text, now.left_s)

        try:
            await carry_out(results, execute, at, lambda row: None)
            self.infos[name] = ExperimentInfo(name, "done", planned, planned)
        except P2PTrainError as error:
            self.infos[name] = ExperimentInfo(name, "interrupted", len(results.rows), planned, error.message)
        finally:
            self.running = ""
            results.close()


# ----------------------------------------------------------------------------------------------------------- endpoints


class ExperimentRequest(Given):
    grid: dict[str, Any] | str = Field(description="The grid, as an object or as the text of a TOML file.")


class Axes(Given):
    x: str = Field(default="", max_length=256, description="Axis of the choice; empty: the second.")
    y: str = Field(default="", max_length=256, description="Axis of the condition; empty: the first.")


async def list_experiments(call: Call) -> Page:
    infos = call.experiments.infos
    return Page([infos[name] for name in sorted(infos)])


async def create_experiment(call: Call) -> ExperimentInfo:
    from roles.experiments.grid import plan_of

    grid, place = call.body.grid, "the grid"
    try:
        document = tomli.loads(grid) if isinstance(grid, str) else grid
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not TOML: {error}", remedy="see https://toml.io for the syntax") from None
    plan = await asyncio.to_thread(plan_of, document, place, None)
    peers = [peer for peer in await call.client.peers() if peer.state not in ABSENT_STATES]
    return call.experiments.begin(plan, document, sum("worker" in peer.roles for peer in peers))


async def get_experiment(call: Call) -> ExperimentInfo:
    call.experiments.directory(call.path["experiment"])
    return call.experiments.infos[call.path["experiment"]]


async def analyze_experiment(call: Call) -> Comparison:
    from roles.experiments.analysis import Analysis
    from roles.experiments.results import load

    directory = call.experiments.directory(call.path["experiment"])
    found = await asyncio.to_thread(load, directory)
    return Comparison(Analysis.of(found, call.body.x, call.body.y).to_json())


_ONE = "experiments/{experiment}"
_BEGINS = (
    "Begin an experiment: a grid of settings, trained one after the other.\n\nOne runs at a time, on the seed's "
    "workers. A grid with the name of an earlier one goes on with it, if it only adds values or repeats."
)
ENDPOINTS = [
    Endpoint("GET", "experiments", "All experiments.", ExperimentInfo, list_experiments, listed=True),
    Endpoint("POST", "experiments", _BEGINS, ExperimentInfo, create_experiment, body=ExperimentRequest, status=201),
    Endpoint("GET", _ONE, "One experiment.", ExperimentInfo, get_experiment),
    Endpoint("POST", f"{_ONE}/analyze", "Compare the results: means with 95 % confidence intervals, and conclusions.",
             Comparison, analyze_experiment, body=Axes),
]  # fmt: skip
