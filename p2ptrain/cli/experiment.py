"""``p2ptrain experiment ...``: trains a grid of settings on this machine, and compares the results."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.runtime import JsonOption, run
from p2ptrain.core.errors import EXIT_INTERRUPTED, JobFailed

if TYPE_CHECKING:
    from p2ptrain.cli.local_cluster import LocalCluster
    from p2ptrain.cli.output import Console
    from roles.experiments.grid import Machine, Plan, Run
    from roles.experiments.results import Result, Results, Row
    from roles.experiments.run import Execute, Show

app = new_typer(help="Train a grid of settings on this machine, one job after another, and compare the results.")

CLUSTER = "cluster"
"""Directory of the processes' state, below that of the experiment."""


@app.command("run")
def run_grid(
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="The grid, a TOML file; see docs/experiments.md.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where the results go; default: experiments/NAME.")
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Simulate the runs: times, bytes and recoveries, but no losses.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the runs, and how long they may take.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a job for every cell of a grid, and write results.csv.

    All cells are validated first. A job that needs too much memory, diverges, takes too long or is refused is a result.
    After Ctrl+C the same command goes on with the runs that have no result yet; values and repeats may be added.

    \b
    Examples:
      p2ptrain experiment run examples/experiments/context-batch.toml --dry-run
      p2ptrain experiment run examples/experiments/strategies-links.toml
      p2ptrain experiment run grid.toml --simulated --dir simulated
    """
    from p2ptrain.cli.output import print_json
    from roles.experiments.grid import read_plan
    from roles.experiments.results import Results

    plan = read_plan(grid)
    if simulated:
        from roles.experiments.simulated import check_plan

        check_plan(plan, str(grid))
    directory = directory or Path("experiments") / f"{plan.grid.name}{'-simulated' * simulated}"
    if dry_run:
        _show_plan(plan, directory, as_json=as_json)
        return
    results = Results(directory, plan, simulated=simulated)
    try:
        complete = run(_conduct(results, simulated=simulated, quiet=as_json), children=True)
    finally:
        results.close()
    if as_json:
        print_json({"directory": str(directory), "complete": complete, "runs": list(results.rows.values())})
    else:
        typer.echo(f"the results are in {directory}; compare them: p2ptrain experiment analyze {directory}")
    if not complete:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def analyze(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of `experiment run`.")],
    x: Annotated[str, typer.Option("--x", metavar="AXIS", help="Axis across; default: the second.")] = "",
    y: Annotated[str, typer.Option("--y", metavar="AXIS", help="Axis down; default: the first.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="The HTML report; default: DIR/report.html.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the results: means over the repeats with 95 % confidence intervals, heatmaps and curves.

    The report is one HTML file. It needs `pip install 'p2ptrain[experiments]'`; without it only the tables are shown.

    \b
    Examples:
      p2ptrain experiment analyze experiments/context-batch
      p2ptrain experiment analyze experiments/strategies-links --x link.preset --y strategy
    """
    from p2ptrain.cli.output import print_json, print_table
    from p2ptrain.core.disk import RealDisk, write_atomic
    from roles.experiments.analysis import Analysis
    from roles.experiments.report import can_draw, page
    from roles.experiments.results import load

    analysis = Analysis.of(load(directory), x, y)
    path, missing = output or directory / "report.html", can_draw()
    if not missing:
        write_atomic(RealDisk(), path, page(analysis).encode())
    if as_json:
        print_json(analysis.to_json() | {"report": None if missing else str(path)})
        return
    columns, rows = analysis.table()
    print_table(columns, rows, right=columns[len(analysis.found.axes) :])
    for sentence in analysis.conclusions():
        typer.echo(f"- {sentence}")
    typer.echo(missing or f"the report is {path}", err=bool(missing))


def _show_plan(plan: Plan, directory: Path, *, as_json: bool) -> None:
    from p2ptrain.cli.output import human_seconds, print_json, print_table
    from roles.experiments.results import GRID, load

    rows = load(directory).rows if (directory / GRID).is_file() else []
    times_s = {row["run"]: row["duration_s"] or 0.0 for row in rows}
    runs: list[dict[str, Any]] = [
        {**run.cell, "repeat": run.repeat, "workers": run.machine.workers, "steps": run.profile.job.steps,
         "tokens": run.step_tokens * run.profile.job.steps}
        for run in plan.runs if run.id not in times_s
    ]  # fmt: skip
    most_s, likely_s = plan.limit_s * len(runs), sum(times_s.values()) / len(rows) * len(runs) if rows else None
    if as_json:
        print_json({"directory": str(directory), "runs": runs, "most_s": most_s, "likely_s": likely_s})
        return
    columns = [name.upper() for name in (*plan.axes, "repeat", "workers", "steps", "tokens")]
    table = [[it if isinstance(it, str) else f"{it:,}" for it in run.values()] for run in runs]
    print_table(columns, table, right=columns[len(plan.axes) :])
    likely = "" if likely_s is None else f"; about {human_seconds(likely_s)} by the mean of the runs before"
    typer.echo(f"{len(runs)} of {len(plan.runs)} runs are left, of {sum(run['tokens'] for run in runs):,} tokens")
    typer.echo(f"they may take {human_seconds(most_s)} by the limit{likely}, and the starts of workers")


async def _conduct(results: Results, *, simulated: bool, quiet: bool) -> bool:
    """Carry out the runs that are left. Returns whether all are over; False after Ctrl+C."""
    from p2ptrain.cli.output import human_seconds, number
    from p2ptrain.cli.stopping import stoppable, unless_stopped
    from roles.experiments.run import carry_out
    from roles.experiments.simulated import simulator

    console, stop = stoppable()
    console.quiet = quiet

    def show(text: str, left_s: float | None) -> None:
        console.progress(text + ("" if left_s is None else f"  {human_seconds(left_s)} left"), every_s=5.0)

    def tell(row: Row) -> None:
        cell = ", ".join(f"{axis} = {row[axis]}" for axis in results.plan.axes)
        loss, speed = number(row["val_loss"] or row["loss"]), number(row["tokens_per_s"], ",.0f")
        level, what = "info", f"{human_seconds(row['duration_s'] or 0.0)}, {speed} tokens/s, loss {loss}"
        if row["state"] != "done":
            level, what = "warning", f"{row['state']}: {row['reason']}"
        if not quiet:
            console.event(level, f"{cell}, repeat {row['repeat']:.0f}: {what}")

    local = LocalWorkers(results.plan, results.directory / CLUSTER, console)
    execute: Execute = simulator(results.plan) if simulated else local
    try:
        await unless_stopped(stop, carry_out(results, execute, show, tell))
    finally:
        await local.end()
        console.finish()
    return not results.missing()


class LocalWorkers:
    """Carries out runs on a seed and workers of this machine. They stay as long as the next run needs the same ones and
    nothing went wrong."""

    def __init__(self, plan: Plan, root: Path, console: Console) -> None:
        """``root``: directory of the processes' state."""
        self._plan, self._root, self._console = plan, root.absolute(), console
        self._cluster: LocalCluster | None = None
        self._machine: Machine | None = None

    async def __call__(self, run: Run, show: Show) -> Result:
        from p2ptrain.cli.local_cluster import LocalCluster
        from roles.experiments.results import DONE, Result
        from roles.experiments.run import failure

        if self._cluster is None or self._machine != run.machine:
            await self.end()
            show("workers start")
            await self._begin(run)
        assert self._cluster is not None
        needed = [self._cluster.seed, *self._cluster.peers.values()]
        try:
            result = await LocalCluster.while_alive(self._measured(self._cluster, run, show), needed=needed)
        except JobFailed as error:  # a process ended; the end of the seed is no result
            if self._cluster.seed.process.returncode is not None:
                raise
            result = Result(failure(error.message), f"{error.message}; {error.remedy}")
        if result.state != DONE:
            await self.end()
        return result

    async def _measured(self, cluster: LocalCluster, run: Run, show: Show) -> Result:
        from roles.experiments.run import measure

        client = await cluster.connect()
        try:
            return await measure(client, run, self._plan, show)
        finally:
            await client.close()

    async def _begin(self, run: Run) -> None:
        from p2ptrain.cli.inputs import own_texts
        from p2ptrain.cli.local_cluster import LocalCluster, threads_each

        self._cluster, self._machine = LocalCluster(self._root), run.machine
        machine, texts = run.machine, own_texts(run.profile, run.machine.workers, [])
        await self._cluster.start_seed()
        for number in range(1, machine.workers + 1):
            options = ["--threads", str(machine.threads or threads_each(machine.workers))]
            options += ["--link", machine.link] * bool(machine.link)
            if machine.straggler > 1 and number == machine.workers:
                options += ["--straggler", f"{machine.straggler:g}"]
            options += ["--data", texts[number - 1]] if texts else []
            attack = machine.attack_of(number)
            program = ("p2ptrain.cli.chaos.attacker", attack) if attack else ("p2ptrain",)
            await self._cluster.start_peer(f"worker-{number}", number, *options, program=program)
        await self._cluster.joined(list(self._cluster.peers))

    async def end(self) -> None:
        """End the processes, and delete what they kept but for their logs."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.end()
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        for path in self._root.iterdir() if self._root.is_dir() else ():
            if path.name != "logs":
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
