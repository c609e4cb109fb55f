"""Experiments on the workers of a seed: requests for them, and the task that carries them out, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from configs.loader import parse_toml
from p2ptrain.core.background import Background
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConfigError, P2PTrainError, Refused
from roles.web.app import Connect
from roles.web.endpoints import Call, Endpoint, Fields, Page
from wire.schema import Record

if TYPE_CHECKING:
    from p2ptrain.lab.experiments.grid import GridPlan, GridRun
    from p2ptrain.lab.experiments.results import Result, Results
    from p2ptrain.lab.experiments.run import Show


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


class Comparison(Record):
    """What the results say: by cell, and in words."""

    summary: dict[str, Any]


class ExperimentRequest(Fields):
    grid: dict[str, Any] | str = Field(description="The grid, as an object or as the text of a TOML file.")


class Axes(Fields):
    x: str = Field(default="", max_length=256, description="Axis of the choice; empty: the second.")
    y: str = Field(default="", max_length=256, description="Axis of the condition; empty: the first.")


_ONE = "experiments/{experiment}"
_COMPARES = "Compare the results: means with 95 % confidence intervals, and conclusions."
_BEGINS = (
    "Begin an experiment: a grid of settings, trained one after the other.\n\nOne runs at a time, on the seed's "
    "workers. A grid with the name of an earlier one goes on with it, if it only adds values or repeats."
)


class Experiments:
    """``root``: a directory for each experiment is made in it. ``connect``: to the seed, as an operator."""

    def __init__(self, root: Path, connect: Connect) -> None:
        self._root, self._connect = root, connect
        self._work = Background()  # one task at most
        self.infos: dict[str, ExperimentInfo] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Go on with what is not done, while the body runs."""
        self._work.start(self._go_on(), "experiments")
        try:
            yield
        finally:
            await self._work.stop()

    def find(self, name: str) -> tuple[ExperimentInfo, Path]:
        """An experiment and its directory. Raises ``Refused``."""
        if name not in self.infos:
            raise Refused("unknown-experiment", f"there is no experiment {name[:64]!r}", remedy="list them")
        return self.infos[name], self._root / name

    def begin(self, plan: GridPlan) -> ExperimentInfo:
        """Raises ``Refused``, ``UserError``."""
        from p2ptrain.lab.experiments.results import Results

        machines = (run.machine for run in plan.runs)
        if plan.grid.simulated or any(machine.link or machine.straggler > 1 or machine.attack for machine in machines):
            text = "the grid: links, stragglers, attackers and simulations need processes of their own"
            raise ConfigError(text, remedy="run the grid on one machine: p2ptrain experiment run grid.toml")
        if self._work:
            raise Refused("busy", "another experiment is running", remedy="wait until it is done")
        results = Results(self._root / plan.grid.name, plan)
        info = self._tell(results, "running")
        self._work.start(self._carry_out(results), f"experiment {info.id}")
        return info

    async def _go_on(self) -> None:
        from p2ptrain.lab.experiments.grid import plan_of
        from p2ptrain.lab.experiments.results import Results, load

        unfinished = []
        for name in RealDisk().list_dir(self._root):
            with suppress(P2PTrainError):  # another directory
                grid, rows = load(self._root / name)
                info = ExperimentInfo(grid.name, "done", len(rows), grid.planned)
                if info.runs < info.planned:
                    info = replace(info, state="interrupted", text="it waits for its turn")
                    unfinished.append(grid)
                self.infos[info.id] = info
        for grid in unfinished:
            try:
                plan = await asyncio.to_thread(plan_of, grid.model_dump(), grid.name, None)
                results = Results(self._root / grid.name, plan)
            except P2PTrainError as error:  # such as a grid of another release
                self.infos[grid.name] = replace(self.infos[grid.name], text=error.message)
                continue
            await self._carry_out(results)

    async def _carry_out(self, results: Results) -> None:
        from p2ptrain.lab.experiments.run import carry_out, measure

        async def execute(run: GridRun, show: Show) -> Result:
            async with self._connect() as client:
                return await measure(client, run, results.plan, show)

        state, why = "interrupted", "it ended unexpectedly; see the log of the seed"
        try:
            await carry_out(results, execute, partial(self._tell, results, "running"), lambda run, row: None)
            state, why = "done", ""
        except P2PTrainError as error:
            why = error.with_remedy
        finally:
            self._tell(results, state, why)
            results.close()

    def _tell(self, results: Results, state: str, text: str = "", left_s: float | None = None) -> ExperimentInfo:
        name, planned = results.plan.grid.name, len(results.plan.runs)
        info = self.infos[name] = ExperimentInfo(name, state, len(results.rows), planned, text, left_s)
        return info

    # ------------------------------------------------------------------------------------------------------ endpoints

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "experiments", "All experiments.", ExperimentInfo, self.list_experiments, listed=True),
            Endpoint(
                "POST",
                "experiments",
                _BEGINS,
                ExperimentInfo,
                self.create_experiment,
                body=ExperimentRequest,
                status=201,
            ),
            Endpoint("GET", _ONE, "One experiment.", ExperimentInfo, self.get_experiment),
            Endpoint("POST", f"{_ONE}/analyze", _COMPARES, Comparison, self.analyze_experiment, body=Axes),
        ]

    async def list_experiments(self, call: Call) -> Page:
        return Page([info for _, info in sorted(self.infos.items())])

    async def create_experiment(self, call: Call) -> ExperimentInfo:
        from p2ptrain.lab.experiments.grid import plan_of

        grid, place = call.body.grid, "the grid"
        document = await asyncio.to_thread(parse_toml, grid, place) if isinstance(grid, str) else grid
        return self.begin(await asyncio.to_thread(plan_of, document, place, None))

    async def get_experiment(self, call: Call) -> ExperimentInfo:
        return self.find(call.path["experiment"])[0]

    async def analyze_experiment(self, call: Call) -> Comparison:
        _, directory = self.find(call.path["experiment"])
        return await asyncio.to_thread(_compare, directory, call.body.x, call.body.y)  # imports pandas


def _compare(directory: Path, x: str, y: str) -> Comparison:
    from p2ptrain.lab.experiments.analysis import Analysis
    from p2ptrain.lab.experiments.results import load

    return Comparison(Analysis(*load(directory), x, y).to_json())
