"""``p2ptrain experiment ...``: trains a grid of settings on this machine, and compares the results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import number, print_json, print_table
from p2ptrain.cli.runtime import JsonOption, option, run
from p2ptrain.cluster.console import Console
from p2ptrain.core.disk import RealDisk, write_atomic
from p2ptrain.core.texts import human_seconds, printable

if TYPE_CHECKING:
    from p2ptrain.lab.experiments.grid import GridRun
    from p2ptrain.lab.experiments.results import Results, Row

app = new_typer(help="Train a grid of settings on this machine, one job after another, and compare the results.")

CLUSTER = "cluster"
"""Directory of the processes' state, below that of the experiment."""


@app.command("run")
def run_grid(
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="The grid, a TOML file; see docs/experiments.md.")],
    directory: Annotated[Path | None, option("--dir DIR", "Where the results go; default: experiments/NAME.")] = None,
    simulated: Annotated[
        bool, option("--simulated", "Simulate the runs: times, bytes and recoveries, but no losses.")
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
    from p2ptrain.lab.experiments.grid import plan_of
    from p2ptrain.lab.experiments.results import Results

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
    x: Annotated[str, option("--x AXIS", "Axis across; default: the second.")] = "",
    y: Annotated[str, option("--y AXIS", "Axis down; default: the first.")] = "",
    output: Annotated[Path | None, option("--output FILE", "The HTML report; default: DIR/report.html.")] = None,
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
    from p2ptrain.lab.experiments.analysis import Analysis, draw_figures, page
    from p2ptrain.lab.experiments.results import load

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
    print_table([column.upper() for column in columns], rows)
    for sentence in analysis.conclusions():
        typer.echo(f"- {printable(sentence)}")
    typer.echo(f"the report is {path}; its figures are also in {place}, as SVG and PNG")


def _carry_out(results: Results, console: Console) -> None:
    """Carry out the runs that are left. Ctrl+C raises ``KeyboardInterrupt``."""
    from p2ptrain.lab.experiments.executors import simulate
    from p2ptrain.lab.experiments.run import carry_out
    from p2ptrain.lab.memory import run_virtual

    def show(text: str, left_s: float | None) -> None:
        console.progress(text + ("" if left_s is None else f"  {human_seconds(left_s)} left"), every_s=5.0)

    def tell(run: GridRun, row: Row) -> None:
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
        from p2ptrain.lab.experiments.executors import LocalWorkers

        local = LocalWorkers(results.plan, results.directory / CLUSTER)
        try:
            await carry_out(results, local, show, tell)
        finally:
            await local.end()

    if results.plan.grid.simulated:
        run_virtual(carry_out(results, partial(simulate, results.plan), show, tell))
    else:
        run(on_local_workers(), children=True)
