"""``p2ptrain checkpoints ...``: a seed's checkpoints are listed, restored and deleted; adapters are merged here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import number, print_json, print_table
from p2ptrain.cli.runtime import JsonOption, SeedOption, YesOption, ask, confirm, not_empty, option
from p2ptrain.cluster.console import Console
from p2ptrain.core.adapters import is_adapter, read_adapter
from p2ptrain.core.checkpoints import best_step
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import human_bytes, human_time, printable

app = new_typer(help="List, restore, delete and merge checkpoints.")

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="ID", callback=not_empty, help="Id, as `p2ptrain checkpoints list` shows it.")
]


@app.command("list")
def list_checkpoints(
    job: Annotated[str, option("--job JOB", "Only checkpoints of this job.")] = "",
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the checkpoints that exist, and on which machine each one lies. The job's best is marked: that with the
    least validation loss.

    \b
    Examples:
      p2ptrain checkpoints list
      p2ptrain checkpoints list --job tiny --json
    """
    found = ask(seed, lambda client: client.checkpoints(job))
    by_job: dict[str, list[tuple[int, object]]] = {}
    for item in found:
        by_job.setdefault(item.job, []).append((item.step, item.val_loss))
    best = {(name, best_step(losses)) for name, losses in by_job.items()}
    if as_json:
        print_json({"checkpoints": [item.to_map() | {"best": (item.job, item.step) in best} for item in found]})
        return
    rows = [
        (
            item.id,
            str(item.step),
            "whole" if item.stage is None else f"part {item.stage}",
            number(item.val_loss) + " best" * ((item.job, item.step) in best),
            human_bytes(item.size_bytes),
            human_time(item.created_at),
            item.peer_name,
            item.path,
        )
        for item in found
    ]
    print_table(
        ("ID", "STEP", "PART", "VAL LOSS", "SIZE", "CREATED", "ON", "PATH"),
        rows,
        right=("STEP", "VAL LOSS", "SIZE"),
        less=("CREATED", "STEP", "PART", "SIZE", "VAL LOSS", "ON"),
        cut=("PATH",),
    )
    if not found:
        typer.echo("No checkpoints yet: p2ptrain jobs save JOB", err=True)


@app.command()
def restore(
    checkpoint: CheckpointArgument,
    shards: Annotated[int, option("--shards M", "Go on with the model in M shards; 1: unsplit.", min=0, max=256)] = 0,
    yes: YesOption = False,
    seed: SeedOption = "",
    as_json: JsonOption = False,
) -> None:
    """Take a job back to a checkpoint. The steps after it are run again, each with the optimizer settings that it had:
    changes of `jobs set` apply again at their steps. To undo one, set the old value again.

    A job of strategy 'sharded' or 'sync' can go on with another number of shards, from a checkpoint of the whole model.

    \b
    Examples:
      p2ptrain checkpoints restore 3f9a12bc04de@200@5c1be07a9f3d
      p2ptrain checkpoints restore 3f9a12bc04de@200@5c1be07a9f3d --shards 4
    """
    confirm(f"Go back to {checkpoint}? Later steps are run again.", seed, "checkpoints", checkpoint, yes=yes)
    job = ask(seed, lambda client: client.restore(checkpoint, shards))
    print_json({"job": job}) if as_json else typer.echo(f"job {printable(job)} goes back to {checkpoint}")


@app.command()
def delete(
    checkpoint: CheckpointArgument, yes: YesOption = False, seed: SeedOption = "", as_json: JsonOption = False
) -> None:
    """Delete a checkpoint from the machine that holds it.

    \b
    Example:
      p2ptrain checkpoints delete 3f9a12bc04de@200@5c1be07a9f3d --yes
    """
    confirm(f"Delete {checkpoint} for good?", seed, "checkpoints", checkpoint, yes=yes)
    ask(seed, lambda client: client.delete_checkpoint(checkpoint))
    print_json({"deleted": checkpoint}) if as_json else typer.echo(f"{checkpoint} is deleted")


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Directory of a LoRA adapter, or a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it must not exist.")],
    base: Annotated[
        Path | None, option("--base DIR", "The adapter's base model; default: where its config says.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a whole model of a LoRA adapter and its base, in the base's type. No seed is needed.

    generate, chat and verifiers take an adapter as it is. --split, training and other programs need the whole model.

    \b
    Examples:
      p2ptrain checkpoints merge ./checkpoints/step-00000400 ./merged
      p2ptrain checkpoints merge ./adapter ./merged --base ./SmolLM2-135M
    """
    if not is_adapter(adapter):
        remedy = "name a directory with adapter_config.json; `p2ptrain checkpoints list` shows where jobs store theirs"
        raise UserError(f"{adapter} holds no adapter", remedy=remedy)
    found, console = read_adapter(adapter, base), Console(quiet=as_json)
    with console.during(lambda: "starting"):
        from p2ptrain.compute.adapter import write_merged
    try:
        table = write_merged(found, out, console.loading)
    finally:
        console.clear()
    if as_json:
        print_json({"model": str(out), "base": str(found.base), "merged_tensors": len(table.adapted)})
    else:
        typer.echo(f"{printable(str(out))}: {printable(str(found.base))} with {len(table.adapted)} matrices adapted")
