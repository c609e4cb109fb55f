"""``p2ptrain data ...``: what a text holds for training, and the tokens that this machine keeps of texts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json, print_pairs, print_table
from p2ptrain.cli.runtime import JsonOption, ProfileOption, SetOption, YesOption, confirm, option
from p2ptrain.cli.tokenizer import FORMATS, TextKeyOption
from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.text_files import TOKENS, kind_of, search_files
from p2ptrain.core.texts import check_one_of, human_bytes, human_time, printable

if TYPE_CHECKING:
    from p2ptrain.compute.data import Corpus
    from p2ptrain.compute.token_store import StoreFacts
    from p2ptrain.compute.tokenizer import Tokenizer

app = new_typer(help="Show what a text holds for training; remove kept tokens.")
SAMPLES, SAMPLE_CHARS = 3, 1200


@app.command()
def show(
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="As data.path; default: the profile's.")] = "",
    form: Annotated[str, option("--format FORMAT", f"As data.format: {', '.join(FORMATS)} or preference.")] = "",
    text_key: TextKeyOption = "",
    tokenizer: Annotated[str, option("--tokenizer PATH", "As model.tokenizer: of a new model.")] = "",
    model: Annotated[str, option("--model DIR", "As model.path: the model whose tokenizer is used.")] = "",
    profile: ProfileOption = "tiny",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    as_json: JsonOption = False,
) -> None:
    """Show what a text holds before anything trains.

    These are files, rows, documents, tokens, sequences, steps of an epoch, what is left out and why, and three samples
    as the model sees them. What is learned is green; what is not is dim.

    The tokens are kept, so that training with the same text, tokenizer and format begins at once.

    \b
    Examples:
      p2ptrain data show
      p2ptrain data show stdlib --format chat --set data.sequence_tokens=256
      p2ptrain data show "~/books/**/*.txt" --tokenizer mine-books
      p2ptrain data show chats.jsonl --format chat --model ./SmolLM2-135M-Instruct
      p2ptrain data show pairs.jsonl --format preference --profile lora --model ./SmolLM2-135M-Instruct
    """
    from configs.loader import load

    if form:
        check_one_of("--format", form, (*FORMATS, "preference"))
    typed = {"data.path": path, "data.format": form, "data.text_key": text_key}
    typed |= {"model.tokenizer": tokenizer, "model.path": model}
    own = load(profile, os.environ, [*sets, *(f"{key}={value}" for key, value in typed.items() if value)]).profile
    files = search_files(own.data.path, own.data.format)[0]  # before torch is loaded, which takes seconds
    console, doing = Console(quiet=as_json), [f"reading {own.data.path}"]

    def on_progress(text: str, share: float) -> None:
        doing[0] = f"{text}: {share:.0%}"

    def work() -> tuple[Corpus, Tokenizer]:
        from p2ptrain.compute.data import load_corpus
        from p2ptrain.compute.recipe import tokenizer_and_config
        from roles.worker.build import training_spec

        spec = training_spec(own)
        used, config = tokenizer_and_config(spec.model)
        known = getattr(config.get_text_config(), "vocab_size", None)
        return load_corpus(spec.data, used, known, on_progress=on_progress), used

    try:
        with console.during(lambda: doing[0]):
            corpus, used = ThreadPoolExecutor(1).submit(work).result()  # so that Ctrl+C ends the command
    except KeyboardInterrupt:
        console.event("info", "stopped; the same command goes on from the tokens that are made")
        raise
    facts = corpus.store.facts
    kinds = Counter("".join(kind_of(file)) or "without a suffix" for file in files)
    sequences = own.batch.micro_batches * own.batch.micro_batch_sequences
    figures: dict[str, Any] = {
        "path": own.data.path,
        "files": dict(kinds.most_common()),
        "file_bytes": sum(file.stat().st_size for file in files),
        "rows": facts.rows["count"],
        "rows_left_out": facts.rows["bad"],
        "documents": facts.documents,
        "text_bytes": facts.text_bytes,
        "tokens": facts.numel,
        "vocabulary": corpus.vocab_size,
        "bytes_per_token": facts.text_bytes / facts.numel,
        "sequence_tokens": corpus.sequence_tokens,
        "training_sequences": len(corpus.training),
        "validation_sequences": len(corpus.validation),
        "steps_per_epoch": len(corpus.training) / sequences,
        "digest": corpus.digest,
        "note": corpus.note,
        "store": str(corpus.store.directory),
        "store_bytes": facts.size_bytes,
    }
    samples = [item for at in range(SAMPLES) for item in _sample(corpus, used, len(corpus.training) * at // SAMPLES)]
    if as_json:
        print_json(figures | {"samples": samples})
        return
    shown = {
        key: f"{value:,.{2 * isinstance(value, float)}f}"
        for key, value in figures.items()
        if type(value) in (int, float)
    }
    names = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    train = "{training_sequences} of {sequence_tokens} tokens, {validation_sequences} held out".format(**shown)
    unit = "sequence" if corpus.sequences == 1 else "pair"
    print_pairs([
        ("files", f"{names}  ({human_bytes(figures['file_bytes'])})"),
        *([("rows", "{rows}, {rows_left_out} left out".format(**shown))] if facts.rows["count"] else []),
        ("documents", "{documents}".format(**shown)),
        ("tokens", "{tokens}: {bytes_per_token} bytes each; the vocabulary has {vocabulary}".format(**shown)),
        (f"{unit}s", train),
        ("epoch", f"{figures['steps_per_epoch']:,.1f} steps of {sequences:,} {unit}s"),
        ("kept", f"{human_bytes(facts.size_bytes)} in {corpus.store.directory}"),
    ])  # fmt: skip
    if corpus.note:
        console.event("warning", corpus.note)
    for sample in samples:
        name = f"{unit} {sample['window']}{sample['answer'] and ', '}{sample['answer']}"
        typer.secho(f"\n{name}: {sample['targets']} targets", bold=True)
        typer.echo(_drawn(sample, used))


def _sample(corpus: Corpus, tokenizer: Tokenizer, position: int) -> Iterator[dict[str, Any]]:
    """The sequence of a training window, of a pair both, without its padding: the tokens, and whether each is
    learned."""
    import numpy as np

    from p2ptrain.compute.data import NO_TARGET

    window = corpus.training[np.array([position])]
    batch = corpus.batch(window)
    for row, ids in enumerate(corpus.window_tokens(window).tolist()):
        learned = [False, *(batch.targets[row] != NO_TARGET).tolist()]
        positions = np.arange(len(ids) - 1) if batch.positions is None else batch.positions[row]
        if corpus.marks is not None:  # padding has the id 0, and nothing behind it is learned
            used = 1 + max(at for at, token in enumerate(ids) if token or learned[at])
            ids, learned, positions = ids[:used], learned[:used], positions[:used]
        texts = [tokenizer.backend.decode([token], skip_special_tokens=False) for token in ids]
        yield {
            "window": int(window[0]), "answer": ("chosen", "rejected")[row] if corpus.sequences == 2 else "",
            "targets": sum(learned), "tokens": ids, "texts": texts, "learned": learned,
            "starts": np.flatnonzero(positions == 0).tolist(),
        }  # fmt: skip


def _drawn(sample: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Runs of tokens that are learned, and of those that are not, in colours; shortened."""
    runs: list[tuple[bool, list[int]]] = []
    for token, learned in zip(sample["tokens"], sample["learned"], strict=True):
        if not runs or runs[-1][0] != learned:
            runs.append((learned, []))
        runs[-1][1].append(token)
    drawn, left = "", SAMPLE_CHARS
    for learned, ids in runs:
        lines = tokenizer.backend.decode(ids, skip_special_tokens=False)[:left].split("\n")
        left -= sum(map(len, lines)) + len(lines) - 1
        text = "⏎\n".join(printable(line, SAMPLE_CHARS) for line in lines)
        drawn += typer.style(text, fg="green") if learned else typer.style(text, dim=True)
        if left <= 0:
            return f"{drawn}…"
    return drawn


@app.command()
def clean(
    everything: Annotated[bool, option("--all", "Also the tokens of texts that are there as they were.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the tokens that this machine keeps; remove stale ones.

    Those are of texts that have changed, are gone, or could not be used, and unfinished ones. They are made again when
    a job needs them.

    \b
    Examples:
      p2ptrain data clean
      p2ptrain data clean --all --yes
    """
    with Console(quiet=as_json).during(lambda: "starting"):
        from p2ptrain.compute.token_store import list_stores, read_facts, remove_store

    found = list[dict[str, Any]]()
    for directory in list_stores():
        facts, files = read_facts(directory), [path.stat() for path in directory.iterdir()]
        numbers = {"tokens": facts.numel if facts else 0, "bytes": sum(file.st_size for file in files)}
        used_at = max(file.st_mtime for file in [directory.stat(), *files])
        names = {"directory": str(directory), "path": facts.path if facts else "?", "used_at": used_at}
        found.append(names | numbers | {"state": _state_of(directory, facts)})
    chosen = [entry for entry in found if everything or entry["state"] not in ("current", "fetched")]
    if not as_json:
        rows = [
            (it["path"], it["state"], f"{it['tokens']:,}", human_bytes(it["bytes"]), human_time(it["used_at"]))
            for it in found
        ]
        print_table(("TEXT", "STATE", "TOKENS", "SIZE", "LAST USED"), rows, right=("TOKENS", "SIZE"), cut=("TEXT",))
    size = human_bytes(sum(entry["bytes"] for entry in chosen))
    if chosen:
        confirm(f"Remove the tokens of {len(chosen)} texts, {size}?", yes=yes)
    for entry in found:
        entry["removed"] = entry in chosen and remove_store(Path(entry["directory"]))
    removed = sum(entry["removed"] for entry in found)
    if as_json:
        print_json({"stores": found})
    else:
        being_made = f"; {len(chosen) - removed} are being made" if removed < len(chosen) else ""
        typer.echo(f"{removed} of {len(found)} removed{being_made}", err=True)


def _state_of(directory: Path, facts: StoreFacts | None) -> str:
    """``current``, ``changed`` (the text), ``gone``, ``unfinished``, ``empty``, or ``fetched``: no text."""
    from p2ptrain.compute.token_store import sources_of

    if facts is None or directory.suffix:
        return "unfinished" if directory.suffix or (directory / TOKENS).exists() else "fetched"
    if not facts.digest or not facts.numel:
        return "empty" if facts.digest else "unfinished"
    try:
        files, _ = search_files(facts.path, facts.form)
        return "current" if sources_of(files) == facts.sources else "changed"
    except P2PTrainError:
        return "gone"
