"""``p2ptrain evaluate``: how well a checkpoint predicts a text."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import DownloadOption, JsonOption, option
from p2ptrain.cli.text_options import DtypeOption, check_dtype, newest_in
from p2ptrain.cli.tokenizer import FORMATS, DataOption, FormatOption, TextKeyOption, progress_of
from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.texts import check_one_of, printable

USUAL_WINDOW = 1024
_SHOWN = 20


def evaluate(
    checkpoint: Annotated[Path, option("--checkpoint -c DIR", "A checkpoint or adapter, or a directory with some.")],
    data: DataOption,
    window: Annotated[
        int, option("--window N", "Tokens of a window; 0: as the job trained, else the context, at most 1,024.", min=0)
    ] = 0,
    stride: Annotated[
        int | None,
        option("--stride N", "Move the window by N tokens; what it had before is context. Documents alone.", min=1),
    ] = None,
    form: FormatOption = "auto",
    text_key: TextKeyOption = "",
    device: Annotated[str, option("--device KIND", "auto, cpu, cuda, cuda:1, ... or mps.")] = "auto",
    dtype: DtypeOption = "",
    download: DownloadOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how well a model predicts a text: loss and perplexity of a token, bits of a byte, of each document and
    of all. The model is loaded whole, on this machine.

    The windows are those of training, without text left over. With --stride they overlap, so tokens have more context
    and the loss is lower; it takes longer. Of conversations (--format chat) only the answers count, and only their
    total is shown.

    \b
    Examples:
      p2ptrain up --state ./run && p2ptrain evaluate -c ./run --data stdlib/json
      p2ptrain evaluate -c ./run --data stdlib --format chat
      p2ptrain evaluate -c ./SmolLM2-135M --data "books/*.txt" --window 2048 --stride 512 --json
    """
    check_one_of("--format", form, FORMATS)
    check_dtype(dtype)
    if stride is not None and form == "chat":
        raise UserError("--stride is not for conversations", remedy="leave it out: each one is in a window")
    directory, console = newest_in(checkpoint, download=download), Console(quiet=as_json)
    with console.during(lambda: "starting"):
        from p2ptrain.compute.data import DataSpec
        from p2ptrain.compute.evaluation import Evaluation
        from p2ptrain.compute.text import ModelText

        text = ModelText(directory)
    width = window or trained_window(directory) or min(text.context or USUAL_WINDOW, USUAL_WINDOW)
    if stride is not None and stride > width:
        raise UserError(
            f"--stride {stride} would leave out tokens between windows of {width}", remedy=f"give at most {width}"
        )
    spec = DataSpec(data, width, form, text_key)
    with console.during(lambda: f"loading {directory}"):
        found = Evaluation(directory, text.tokenizer, spec, stride=stride, device=device, dtype=dtype)
    began = time.monotonic()

    def progress() -> str:
        return f"scoring {progress_of(found.done_bytes, found.total_bytes, time.monotonic() - began)}"

    with console.during(progress):
        ThreadPoolExecutor(1).submit(found.run).result()  # not on this thread, so that Ctrl+C ends the command
    for note in found.notes:
        console.event("warning", note)
    documents = [score.to_map() for score in found.documents]
    total = found.total.to_map()
    if as_json:
        facts = {"checkpoint": str(directory), "data": data, "window": width, "stride": stride, "dtype": found.dtype}
        print_json({**facts, "total": total, "documents": documents, "notes": found.notes})
        return
    shown = sorted(documents, key=lambda item: -(item["loss"] or 0.0))[:_SHOWN] if len(documents) > 1 else []
    if len(documents) > _SHOWN:
        typer.echo(f"the {_SHOWN} documents of {len(documents):,} with the highest loss (--json has all)", err=True)
    columns = ("DOCUMENT", "LOSS", "PERPLEXITY", "BITS/BYTE", "TOKENS", "BYTES")
    rows = [_row(item) for item in (*shown, total)]
    print_table(columns, rows, right=columns[1:], cut=("DOCUMENT",))


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    keys, digits = ("loss", "perplexity", "bits_a_byte"), (4, 2, 4)
    figures = ("-" if item[key] is None else f"{item[key]:.{count}f}" for key, count in zip(keys, digits, strict=True))
    return printable(item["name"]), *figures, f"{item['tokens']:,}", f"{item['bytes']:,}"


def trained_window(directory: Path) -> int:
    """``data.sequence_tokens`` of the job that wrote a checkpoint; 0 if it is not known."""
    from p2ptrain.core.checkpoints import read_checkpoint
    from p2ptrain.core.disk import RealDisk

    try:
        found = read_checkpoint(RealDisk(), directory).meta.get("sequence_tokens")
    except StorageError:
        return 0  # of another program
    return found if isinstance(found, int) and 0 < found <= 1 << 20 else 0
