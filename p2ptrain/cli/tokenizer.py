"""``p2ptrain tokenizer ...``: makes a vocabulary of one's own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json
from p2ptrain.cli.runtime import JsonOption, not_empty, option
from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import check_one_of, human_bytes, printable, size_of, time_left

app = new_typer(help="Make a tokenizer of your own text.")

DataOption = Annotated[
    str, option("--data PATH", "The text: a file, a directory, a glob, or stdlib, as data.path.", callback=not_empty)
]
FormatOption = Annotated[str, option("--format FORMAT", "As data.format: auto, text, jsonl, csv, parquet or chat.")]
TextKeyOption = Annotated[str, option("--text-key KEY", "As data.text_key: where a row has its text.")]
FORMATS = ("auto", "text", "jsonl", "csv", "parquet", "chat")


@app.callback()
def group() -> None:
    pass


@app.command()
def train(
    data: DataOption,
    vocab: Annotated[int, option("--vocab N", "Tokens of the vocabulary.", min=1, max=1 << 20)] = 8192,
    out: Annotated[Path, option("--out DIR", "Directory to write; it must not exist.")] = Path("tokenizer"),
    chat: Annotated[
        str, option("--chat KIND", "Add a chat template: plain, or tokens: with a special token for each role.")
    ] = "",
    form: FormatOption = "auto",
    text_key: TextKeyOption = "",
    sample: Annotated[
        str, option("--sample SIZE", "Use so much of the text at most, in pieces from all of it. Memory grows with it.")
    ] = "100MiB",
    as_json: JsonOption = False,
) -> None:
    """Make a byte-level BPE tokenizer for a new model (model.tokenizer). It has no unknown token: any text is some of
    its tokens. AutoTokenizer opens the directory.

    \b
    Examples:
      p2ptrain tokenizer train --data stdlib --vocab 8192 --out mine && p2ptrain up --set model.tokenizer=mine
      p2ptrain tokenizer train --data stdlib --format chat --chat tokens --out mine-chat
      p2ptrain tokenizer train --data "~/books/**/*.txt" --vocab 8192 --out mine-books
    """
    check_one_of("--format", form, FORMATS)
    if chat:
        check_one_of("--chat", chat, ("plain", "tokens"))
    limit_bytes, console, began = size_of(sample), Console(quiet=as_json), time.monotonic()
    if out.exists():
        raise UserError(f"{out} exists", remedy="name a directory that does not exist yet: --out DIR")
    with console.during(lambda: "starting"):
        from p2ptrain.compute.tokenizer import Tokenizer
        from p2ptrain.compute.tokenizer_training import SampledText, save_new, train_vocabulary
    text, read = SampledText(data, form, text_key, limit_bytes), threading.Event()

    def progress() -> str:
        if read.is_set():
            return f"merging the {vocab:,} tokens of {human_bytes(text.sample_bytes)} of text"
        return f"reading {progress_of(text.done_bytes, text.total_bytes, time.monotonic() - began)}"

    def work() -> Any:
        return train_vocabulary(text, vocab, chat=chat, on_read=read.set)

    with console.during(progress):
        backend = ThreadPoolExecutor(1).submit(work).result()  # not on this thread, so that Ctrl+C ends the command
        save_new(backend, out, chat=chat)
        made = Tokenizer.of_directory(out)
    size = made.backend.get_vocab_size()
    figures = {"tokens": size, "text_bytes": text.done_bytes, "sample_bytes": text.sample_bytes}
    notes = [note for note in (text.note, text.rows.counts.note(1)) if note]
    if size < vocab:
        notes.append(f"the text gives only {size:,} of {vocab:,} tokens")
    for note in notes:
        console.event("warning", note)
    if as_json:
        print_json({"tokenizer": str(out), **figures, "seconds": time.monotonic() - began, "notes": notes})
        return
    of = f"{human_bytes(text.sample_bytes)} of {human_bytes(text.done_bytes)}"
    typer.echo(f"{printable(str(out))}: {size:,} tokens, made from {of} of text")
    settings = {"model.tokenizer": str(out), "data.path": data, "data.format": form, "data.text_key": text_key}
    sets = [f"--set {key}={quote(value)}" for key, value in settings.items() if value not in ("", "auto")]
    typer.echo(f"train with it: p2ptrain up {' '.join(sets)}", err=True)


def progress_of(done: int, total: int, spent_s: float) -> str:
    """How much of a work's bytes are done, and when the rest is, at the speed so far."""
    return f"{human_bytes(done)} of {human_bytes(total)}{time_left(done / max(total, 1), spent_s)}"
