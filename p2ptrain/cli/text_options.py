"""The options of ``generate`` and ``chat``: their declaration, checks and meaning."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.output import json_output
from p2ptrain.cli.runtime import (
    DownloadOption,
    DryRunOption,
    JsonOption,
    SeedOption,
    SplitOption,
    ask,
    is_text,
    option,
    option_field,
)
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.jobs import newest_of
from p2ptrain.cluster.models import SplitOptions, model_directory
from p2ptrain.core.adapters import is_model
from p2ptrain.core.checkpoints import STAGE, STAGES, is_part, read_checkpoint
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError, UserError
from p2ptrain.core.serving import QUANTIZED, SamplingOptions, StopStrings
from p2ptrain.core.tensor_files import ADAPTER_CONFIG
from p2ptrain.core.texts import check_one_of, on_terminal, printable

if TYPE_CHECKING:
    from p2ptrain.compute.text import Turn
    from roles.serving.texts import TextRequest

DTYPES = ("fp32", "bf16", "fp16")
WIRES = (*DTYPES, "int8")

CheckpointOption = Annotated[
    Path | None, option("--checkpoint -c DIR", "A checkpoint or adapter, or a directory with some.")
]
DtypeOption = Annotated[str, option("--dtype TYPE", "Compute in fp32, bf16 or fp16; default: the model's type.")]

WeightsOption = Annotated[
    str, option("--weights TYPE", "Hold the weights of linear layers in int8 or int4; default: as --dtype says.")
]

TokensOption = Annotated[int, option("--tokens -n N", "Most tokens to write.", min=1)]

_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The common options of ``generate`` and ``chat``. ``takes_options`` makes each field an option."""

    checkpoint: CheckpointOption = None
    download: DownloadOption = False
    job: str = option_field("--job JOB", "Use the newest checkpoint of this job.", "")
    temperature: float | None = option_field(
        "--temperature T", "Temperature; 0: the likeliest token. Default: the model's.", None, min=0.0
    )
    top_k: int | None = option_field(
        "--top-k K", "Sample from the K likeliest tokens; 0: from all. Default: the model's, else 50.", None, min=0
    )
    top_p: float | None = option_field(
        "--top-p P",
        "Sample from the likeliest tokens with this total probability. Default: the model's, else 1.",
        None,
        min=0.0,
        max=1.0,
    )
    stop: list[str] = option_field(
        "--stop TEXT", "Stop before this text; may be repeated. \\n is a new line, \\t a tab, \\\\ a backslash.", []
    )
    random_seed: int = option_field("--random-seed N", "The same seed gives the same text.", 0, min=0, max=2**63 - 1)
    device: str = option_field("--device KIND", "auto, cpu, cuda, cuda:1, ... or mps.", "auto")
    dtype: DtypeOption = ""
    weights: WeightsOption = ""
    seed: SeedOption = ""
    verifier: str = option_field("--verifier NAME", "Name of the verifier that writes.", "")
    model_name: str = option_field(
        "--model-name NAME", "Name of the verifiers' model that writes.", "", callback=is_text
    )
    no_speculation: bool = option_field(
        "--no-speculation", "With a verifier: use no drafters. The text is the same.", False
    )
    split: SplitOption = None
    wire: str = option_field(
        "--wire TYPE",
        "With --split: send hidden states as fp32, bf16, fp16, or int8 (prompts only); default: as computed.",
        "",
    )
    positions: int = option_field(
        "--positions N", "With --split: size of the caches, in tokens; 0: automatic.", 0, min=0
    )
    dry_run: DryRunOption = False
    stats: bool = option_field("--stats", "Show where a token's time goes.", False)
    as_json: JsonOption = False

    @property
    def by_verifier(self) -> bool:
        return self.checkpoint is None and not self.job and self.split is None

    @property
    def sampling(self) -> SamplingOptions:
        """Raises ``UserError``."""
        return SamplingOptions(self.temperature, self.top_k, self.top_p, self.random_seed)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, unescaped. Raises ``UserError``."""
        texts = tuple(_unescape(text) for text in self.stop)
        StopStrings(texts)
        return texts

    def request(self, max_new_tokens: int, *, prompt: str = "", turns: tuple[Turn, ...] = ()) -> TextRequest:
        """Raises ``UserError``."""
        from roles.serving.texts import TextRequest

        return TextRequest(prompt, turns, max_new_tokens, self.sampling, self.stops, not self.no_speculation)

    @property
    def split_options(self) -> SplitOptions:
        return SplitOptions(self.split or None, self.dtype, self.wire, self.positions, self.weights)

    def check(self, command: str) -> None:
        """Refuse invalid combinations, before anything is read or requested. Raises ``UserError``."""
        _ = self.sampling, self.stops
        check_dtype(self.dtype, self.weights)
        if self.wire:
            check_one_of("--wire", self.wire, WIRES)
        of_split = {"wire": self.wire, "positions": self.positions, "dry-run": self.dry_run}
        of_verifier = {"verifier": self.verifier, "model-name": self.model_name, "no-speculation": self.no_speculation}
        if not self.by_verifier and (extra := next((name for name, value in of_verifier.items() if value), None)):
            remedy = "leave out --checkpoint, --job and --split"
            raise UserError(f"--{extra} does not work with --checkpoint, --job or --split", remedy=remedy)
        if self.split is None and (extra := next((name for name, value in of_split.items() if value), None)):
            raise UserError(f"--{extra} works only with --split", remedy="add --split, or leave it out")
        if not self.by_verifier and (self.checkpoint is None) == (not self.job):
            raise UserError(f"{command} needs one checkpoint", remedy="give either --checkpoint DIR or --job JOB")
        elsewhere = {"dtype": self.dtype, "weights": self.weights} if self.by_verifier else {}
        if self.device != "auto" and (self.by_verifier or self.split is not None):
            elsewhere["device"] = self.device
        for name in (name for name, value in elsewhere.items() if value):
            text = f"--{name} {elsewhere[name]} does not apply: a verifier, or workers, compute the model"
            remedy = f"give it to them: p2ptrain join --{name} ...; or compute it here: --checkpoint DIR"
            raise UserError(text, remedy=remedy)


def check_dtype(dtype: str, weights: str) -> None:
    if dtype:
        check_one_of("--dtype", dtype, DTYPES)
    if weights:
        check_one_of("--weights", weights, QUANTIZED)


def _unescape(text: str) -> str:
    parts, letters = list[str](), iter(text)
    for letter in letters:
        following = next(letters, "") if letter == "\\" else ""
        parts.append(_ESCAPED.get(following, letter + following))
    return "".join(parts)


def write(text: str) -> None:
    """Write a model's text to standard output at once: as it is, or, on a terminal, with � for control characters."""
    sys.stdout.flush()
    shown = on_terminal(text) if sys.stdout.isatty() else text
    sys.stdout.buffer.write(shown.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


# ------------------------------------------------------------------------------------------------------- checkpoints


def newest_in(directory: Path, *, download: bool = False) -> Path:
    """``directory`` if it is a model, else the newest model in it or checkpoint below it, which is said.

    Raises ``UserError``, and as ``model_directory``.
    """
    quiet = json_output.wanted
    directory = model_directory(str(directory), download=download, quiet=quiet)
    if is_model(directory):
        return _check_whole(directory)
    with Console(quiet=quiet).during(lambda: f"looking for checkpoints in {directory}"):
        found = [path for path in directory.rglob("step-*/manifest.json") if path.parent.name[5:].isdigit()]
        configs = (*directory.glob("*/config.json"), *directory.glob(f"*/{ADAPTER_CONFIG}"))
        found += [path for path in configs if not (path.parent / "manifest.json").is_file()]
    if not found:
        remedy = "name a model as save_pretrained writes it; `p2ptrain checkpoints list` shows where jobs store theirs"
        raise UserError(f"{directory} holds no checkpoint", remedy=remedy)
    newest = max(found, key=lambda path: (path.stat().st_mtime, path.parent.name)).parent
    return _check_whole(newest, len(found))


def newest_of_job(seed: str, job: str) -> Path:
    """The newest checkpoint of a job on this machine. Raises ``UserError``."""
    found = ask(seed, lambda client: client.checkpoints(job))
    if newest := newest_of(here := [item for item in found if is_model(item.path)]):
        return _check_whole(Path(newest.path), len(here))
    if not found:
        raise UserError(f"job {job} has no checkpoint yet", remedy=f"p2ptrain jobs save {job}")
    machines = ", ".join(sorted({item.peer_name for item in found}))
    raise UserError(f"no checkpoint of job {job} lies on this machine", remedy=f"they lie on {machines}: run it there")


def _check_whole(directory: Path, count: int = 0) -> Path:
    """Return ``directory``, and say so if it was chosen from ``count``. Raises ``UserError`` if it is one part's."""
    if count and not json_output.wanted:
        others = f", the newest of {count}; to use another: --checkpoint DIR" if count > 1 else ""
        typer.echo(f"(the model is {printable(str(directory))}{others})", err=True)
    try:
        entry = read_checkpoint(RealDisk(), directory)
    except StorageError:
        return directory  # from another program, or damaged; loading it reports that
    if is_part(entry):
        part = f"part {entry.meta.get(STAGE)} of {entry.meta.get(STAGES)}"
        remedy = "`p2ptrain checkpoints list` shows whole ones; `p2ptrain jobs save JOB` has the workers make one"
        raise UserError(f"{directory} holds only a part of a model ({part})", remedy=remedy)
    return directory
