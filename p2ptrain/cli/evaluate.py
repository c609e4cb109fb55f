"""``p2ptrain evaluate``: how well a checkpoint predicts a text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import DownloadOption, JsonOption, SeedOption, SplitOption, WithBareSplit, option, run
from p2ptrain.cli.text_options import DtypeOption, WeightsOption, check_dtype, newest_in
from p2ptrain.cli.tokenizer import FORMATS, DataOption, FormatOption, TextKeyOption, progress_of
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.models import SplitOptions
from p2ptrain.core.checkpoints import read_checkpoint
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.texts import check_one_of, printable

if TYPE_CHECKING:
    from p2ptrain.cluster.split_model import PlannedSplit
    from p2ptrain.compute.evaluation import Evaluation

USUAL_WINDOW = 1024
_SHOWN, _MOST = 20, 1 << 20
_IN_FLIGHT = 8  # windows at a time on a chain of workers; each has a cache there

app = new_typer()


@app.command("evaluate", cls=WithBareSplit)
def evaluate(
    checkpoint: Annotated[Path, option("--checkpoint -c DIR", "A checkpoint or adapter, or a directory with some.")],
    data: DataOption,
    window: Annotated[
        int,
        option("--window N", "Tokens of a window; 0: as trained, or the context, at most 1,024.", min=0, max=_MOST),
    ] = 0,
    stride: Annotated[
        int | None,
        option("--stride N", "Move the window by N tokens; what it had before is context. Documents alone.", min=1),
    ] = None,
    form: FormatOption = "auto",
    text_key: TextKeyOption = "",
    device: Annotated[str, option("--device KIND", "auto, cpu, cuda, cuda:1, ... or mps.")] = "auto",
    dtype: DtypeOption = "",
    weights: WeightsOption = "",
    split: SplitOption = None,
    seed: SeedOption = "",
    download: DownloadOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how well a model predicts a text: loss and perplexity of a token, bits of a byte, of each document and
    of all.

    The windows are those of training, without text left over. With --stride they overlap, so tokens have more context
    and the loss is lower; it takes longer. A conversation (--format chat) is scored alone, and only its answers count.

    The model is loaded whole, on this machine. With --split, workers that joined the seed compute it: each chain of
    them holds one model, and all chains share the windows. --split 1 is for a model that each worker can hold; --split
    alone makes the shortest chains that have enough memory. If a chain is lost, the others score what it had.

    \b
    Examples:
      p2ptrain up --state ./run && p2ptrain evaluate -c ./run --data stdlib/json
      p2ptrain evaluate -c ./run --data stdlib --format chat
      p2ptrain evaluate -c ./SmolLM2-135M --data "books/*.txt" --window 2048 --stride 512 --json
      p2ptrain evaluate -c ./SmolLM2-135M --data stdlib --split --seed 192.168.1.20
    """
    check_one_of("--format", form, FORMATS)
    check_dtype(dtype, weights)
    if stride is not None and form == "chat":
        raise UserError("--stride is not for conversations", remedy="leave it out: each one is in a window")
    if split is not None and device != "auto":
        problem = f"--device {device} does not apply: workers compute the model"
        raise UserError(problem, remedy="leave it out, and give it to them: p2ptrain join --device ...")
    directory, console = newest_in(checkpoint, download=download), Console(quiet=as_json)
    with console.during(lambda: "starting"):
        from p2ptrain.compute.data import DataSpec
        from p2ptrain.compute.evaluation import Evaluation, score_here
        from p2ptrain.compute.text import ModelText

        text = ModelText(directory)
    width = window or trained_window(directory) or min(text.context or USUAL_WINDOW, USUAL_WINDOW)
    if stride is not None and stride > width:
        problem = f"--stride {stride} would leave out tokens between windows of {width}"
        raise UserError(problem, remedy=f"give at most {width}")
    if text.context is not None and width > text.context:
        problem = f"a window of {width} tokens is more than the model's context of {text.context}"
        raise UserError(problem, remedy=f"give --window {text.context} at most")
    # The options have checked bounds of their own.
    spec = DataSpec.model_construct(path=data, sequence_tokens=width, format=form, text_key=text_key)
    found = Evaluation(text.tokenizer, spec, stride=stride)
    facts = {"checkpoint": str(directory), "data": data, "window": width, "stride": stride}
    if split is not None:
        from p2ptrain.cluster.split_model import plan_split

        positions = min(max(_IN_FLIGHT, split + 1) * width, _MOST)
        options = SplitOptions(split or None, dtype, positions=positions, weights=weights)
        planned = plan_split(options, directory, "", seed, lambda text: 0, console)
        facts |= run(_score_on_workers(found, planned, console))
    else:
        with console.during(partial(_progress, found)):
            thread = ThreadPoolExecutor(1)  # so that Ctrl+C ends the command
            facts["dtype"] = thread.submit(score_here, found, directory, device, dtype, weights).result()
    for note in found.notes:
        console.event("warning", note)
    documents = [score.to_map() for score in found.documents]
    total = found.total.to_map()
    if as_json:
        print_json({**facts, "total": total, "documents": documents, "notes": found.notes})
        return
    shown = sorted(documents, key=lambda item: -(item["loss"] or 0.0))[:_SHOWN] if len(documents) > 1 else []
    if len(documents) > _SHOWN:
        typer.echo(f"the {_SHOWN} documents of {len(documents):,} with the highest loss (--json has all)", err=True)
    columns = ("DOCUMENT", "LOSS", "PERPLEXITY", "BITS/BYTE", "TOKENS", "BYTES")
    rows = [_row(item) for item in (*shown, total)]
    print_table(columns, rows, right=columns[1:], cut=("DOCUMENT",))


def _progress(evaluation: Evaluation) -> str:
    done, total, spent_s = evaluation.done_bytes, evaluation.total_bytes, time.monotonic() - evaluation.began
    return f"scoring {progress_of(done, total, spent_s)}" if done else "loading"


async def _score_on_workers(
    evaluation: Evaluation, planned: AbstractAsyncContextManager[PlannedSplit], console: Console
) -> dict[str, Any]:
    """Returns what was computed where, for programs."""
    from p2ptrain.cli.placement import placement_map
    from p2ptrain.cluster.split_model import LEAVE_S, within
    from roles.serving.scoring import ScoreRequest, score_all

    async def requests(vocab_size: int) -> AsyncIterator[ScoreRequest]:
        windows = evaluation.windows(vocab_size)
        while (window := await asyncio.to_thread(next, windows, None)) is not None:
            yield ScoreRequest(window.tokens.tolist(), window.first, partial(evaluation.add, window))

    async with planned as plan:
        chains = await plan.load_all()
        try:
            names = (", ".join(stage.peer.name for stage in chain.plan.stages) for chain in chains)
            console.event("info", f"{len(chains)} chain{'s' * (len(chains) > 1)} of workers: {'; '.join(names)}")
            sessions, width = plan.plan.positions // evaluation.width, evaluation.width
            with console.during(partial(_progress, evaluation)):
                await score_all(chains, requests(chains[0].vocab_size), sessions, width)
            return {"dtype": chains[0].dtype, "split": [placement_map(chain.plan.placement) for chain in chains]}
        finally:
            await within(LEAVE_S, asyncio.gather(*(chain.close() for chain in chains)))


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    keys, digits = ("loss", "perplexity", "bits_a_byte"), (4, 2, 4)
    figures = ("-" if item[key] is None else f"{item[key]:.{count}f}" for key, count in zip(keys, digits, strict=True))
    return printable(item["name"]), *figures, f"{item['tokens']:,}", f"{item['bytes']:,}"


def trained_window(directory: Path) -> int:
    """``data.sequence_tokens`` of the job that wrote a checkpoint; 0 if it is not known."""
    try:
        found = read_checkpoint(RealDisk(), directory).meta.get("sequence_tokens")
    except StorageError:
        return 0  # of another program
    return found if isinstance(found, int) and 0 < found <= 1 << 20 else 0
