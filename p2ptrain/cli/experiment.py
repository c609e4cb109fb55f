"""``p2ptrain experiment ...``: trains a grid of settings on this machine, and compares the results."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.runtime import JsonOption, run
from p2ptrain.core.errors import JobFailed

if TYPE_CHECKING:
    from p2ptrain.cluster.console import Console
    from p2ptrain.cluster.local_cluster import LocalCluster
    from roles.experiments.grid import Machine, Plan, Run
    from roles.experiments.results import Result, Results, Row
    from roles.experiments.run import Show

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
    as_json: JsonOption = False,
) -> None:
    """Run a job for every cell of a grid, and write results.csv.

    All cells are validated first. A job that needs too much memory, diverges, takes too long or is refused is a result.
    After Ctrl+C the same command goes on with the runs that have no result yet; values and repeats may be added.

    \b
    Examples:
      p2ptrain experiment run examples/experiments/context-batch.toml
      p2ptrain experiment run examples/experiments/strategies-links.toml
      p2ptrain experiment run grid.toml --simulated --dir simulated
    """
    from configs.loader import read_toml
    from p2ptrain.cli.output import print_json
    from p2ptrain.cluster.console import Console
    from roles.experiments.grid import plan_of
    from roles.experiments.results import Results

    document = read_toml(grid, "grid")[1] | ({"simulated": True} if simulated else {})
    plan = plan_of(document, str(grid), grid.parent)
    directory = directory or Path("experiments") / f"{plan.grid.name}{'-simulated' * plan.grid.simulated}"
    results, console = Results(directory, plan), Console(quiet=as_json)
    try:
        _carry_out(results, console)
    finally:
        console.finish()
        results.close()
    if as_json:
        print_json({"directory": str(directory), "runs": list(results.rows.values())})
    else:
        typer.echo(f"the results are in {directory}; compare them: p2ptrain experiment analyze {directory}")


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

    The report is one HTML file; its figures are also files, as SVG and PNG. This needs the packages of the extra
    `experiments`.

    \b
    Examples:
      p2ptrain experiment analyze experiments/context-batch
      p2ptrain experiment analyze experiments/strategies-links --x link.preset --y strategy
    """
    from p2ptrain.cli.output import print_json, print_table
    from p2ptrain.cluster.console import printable
    from p2ptrain.core.disk import RealDisk, write_atomic
    from roles.experiments.analysis import Analysis, draw_figures, page
    from roles.experiments.results import load

    analysis = Analysis(*load(directory), x, y)
    path, disk = output or directory / "report.html", RealDisk()
    figures, place = draw_figures(analysis, directory), path.with_name(f"{path.stem}-figures")
    disk.make_dir(place)
    for figure in figures:
        for suffix, content in figure.files.items():
            write_atomic(disk, place / f"{figure.name}.{suffix}", content)
    write_atomic(disk, path, page(analysis, figures).encode())
    if as_json:
        print_json(analysis.to_json() | {"report": str(path), "figures": str(place)})
        return
    columns, rows = analysis.table()
    print_table([it.upper() for it in columns], rows)
    for sentence in analysis.conclusions():
        typer.echo(f"- {printable(sentence)}")
    typer.echo(f"the report is {path}; its figures are also in {place}, as SVG and PNG")


def _carry_out(results: Results, console: Console) -> None:
    """Carry out the runs that are left. Ctrl+C raises ``KeyboardInterrupt``."""
    from p2ptrain.cli.output import number
    from p2ptrain.core.texts import human_seconds
    from roles.experiments.run import carry_out
    from roles.experiments.simulated import simulate
    from wire.memory import run_virtual

    def show(text: str, left_s: float | None) -> None:
        console.progress(text + ("" if left_s is None else f"  {human_seconds(left_s)} left"), every_s=5.0)

    def tell(run: Run, row: Row) -> None:
        loss, speed = number(row["val_loss"] or row["loss"]), number(row["tokens_per_s"], ",.0f")
        what = (
            f"{row['state']}, {human_seconds(row['duration_s'] or 0.0)}, {speed} tokens/s, loss {loss}; {row['reason']}"
        )
        if not console.quiet:
            console.event("info" if row["state"] == "done" else "warning", f"{run}, repeat {run.repeat}: {what}")

    left = len(results.missing())
    text = f"{left} of {len(results.plan.runs)} runs are left; they may take"
    show(f"{text} {human_seconds(left * results.plan.limit_s)} by the limit, and the starts of workers", None)

    async def on_local_workers() -> None:
        local = LocalWorkers(results.plan, results.directory / CLUSTER)
        try:
            await carry_out(results, local, show, tell)
        finally:
            await local.end()

    if results.plan.grid.simulated:
        run_virtual(carry_out(results, partial(simulate, results.plan), show, tell))
    else:
        run(on_local_workers(), children=True)


class LocalWorkers:
    """Carries out runs on a seed and workers of this machine. They stay as long as the next run needs the same ones and
    nothing went wrong."""

    def __init__(self, plan: Plan, root: Path) -> None:
        """``root``: directory of the processes' state."""
        self._plan, self._root = plan, root.absolute()
        self._cluster: LocalCluster | None = None
        self._machine: Machine | None = None

    async def __call__(self, run: Run, show: Show) -> Result:
        from p2ptrain.cluster.local_cluster import LocalCluster
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

        async with cluster.operator() as client:
            return await measure(client, run, self._plan, show)

    async def _begin(self, run: Run) -> None:
        from p2ptrain.cli.inputs import own_texts
        from p2ptrain.cluster.local_cluster import LocalCluster, threads_each

        self._cluster, self._machine = LocalCluster(self._root), run.machine
        machine, texts = run.machine, own_texts(run.profile, run.machine.workers, [])
        options = ["--threads", str(machine.threads or threads_each(machine.workers))]
        options += ["--link", machine.link] * bool(machine.link)
        await self._cluster.start_seed()
        await self._cluster.start_workers(
            machine.workers, *options, straggler=machine.straggler, texts=texts, attacks=machine.attacks
        )
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
