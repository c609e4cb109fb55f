"""What ``generate`` and ``chat`` share: options, the checkpoint that is meant, and text on a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.runtime import ask
from p2ptrain.core.errors import StorageError, UserError

if TYPE_CHECKING:
    from p2ptrain.compute.text import ModelText

CheckpointOption = Annotated[
    Path | None,
    typer.Option("--checkpoint", "-c", metavar="DIR", help="A checkpoint, or a directory to find the newest in."),
]
JobOption = Annotated[str, typer.Option("--job", metavar="JOB", help="Use the newest checkpoint of this job.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(metavar="T", min=0.0, help="0: always the likeliest token. Default: what the model says."),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        metavar="K", min=0, help="Draw among the k likeliest tokens; 0: among all. Default: the model's, else 50."
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        min=0.0,
        max=1.0,
        help="Draw among the likeliest tokens that hold this probability. Default: the model's, else 1.",
    ),
]
RandomSeedOption = Annotated[
    int, typer.Option("--random-seed", metavar="N", min=0, max=2**63 - 1, help="The same seed gives the same text.")
]
StopOption = Annotated[
    list[str],
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End before this text; may be repeated. \\n is a new line, \\t a tab, \\\\ a backslash.",
    ),
]
VerifierOption = Annotated[
    str, typer.Option("--verifier", metavar="NAME", help="Have this verifier of the cluster write.")
]
NoSpeculationOption = Annotated[
    bool, typer.Option("--no-speculation", help="Of a verifier: by itself, without drafters. The text is the same.")
]
DeviceOption = Annotated[str, typer.Option(metavar="KIND", help="auto, cpu, cuda, cuda:1, ... or mps.")]

_JOINERS = "\u200c\u200d"  # letters and pictures of several parts are held together by these
_SHOWN = {"n": "\n", "t": "\t", "\\": "\\"}


def no_device(device: str) -> None:
    """Raises ``UserError`` where ``--device`` is given for a model that others compute."""
    if device != "auto":
        text = f"--device {device} means nothing here: a verifier, or workers, compute the model"
        raise UserError(text, remedy="leave it out, and give it to them: p2ptrain join --device ...")


def stop_strings(given: list[str]) -> tuple[str, ...]:
    """What ``--stop`` means: ``\\n``, ``\\t`` and ``\\\\`` are what they stand for. Raises ``UserError``."""
    from p2ptrain.core.stop_strings import StopStrings

    meant = tuple(_unescaped(text) for text in given)
    StopStrings(meant)
    return meant


def _unescaped(text: str) -> str:
    parts, letters = list[str](), iter(text)
    for letter in letters:
        following = next(letters, "") if letter == "\\" else ""
        parts.append(_SHOWN.get(following, letter + following))
    return "".join(parts)


def on_terminal(text: str) -> str:
    """Text of a model, which may write any byte: those that a terminal would obey are shown as �."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" + _JOINERS else "�" for letter in text)


def write(text: str) -> None:
    """Text as it comes, to standard output."""
    sys.stdout.write(on_terminal(text))
    sys.stdout.flush()


def say_unused(text: ModelText) -> None:
    """Tell of what the checkpoint's own settings ask for that is not done."""
    if unused := text.unused_settings():
        said = ", ".join(f"{key} = {value}" for key, value in unused.items())
        typer.echo(f"({text.directory.name}/generation_config.json also says {said}: not applied)", err=True)


def by_verifier(checkpoint: Path | None, job: str, split: int | None, **others: object) -> bool:
    """Whether a verifier of the cluster is to write: no model is named. ``others``: options that mean something with
    a verifier only. Raises ``UserError``: both are named."""
    if checkpoint is None and not job and split is None:
        return True
    if extra := next((name for name, value in others.items() if value), None):
        option = f"--{extra.replace('_', '-')}"
        raise UserError(f"{option} is for text of a verifier", remedy="leave out --checkpoint, --job and --split")
    return False


def one_checkpoint(command: str, checkpoint: Path | None, job: str, seed: str) -> Path:
    """The directory that ``--checkpoint`` or ``--job`` means, on this machine. Raises ``UserError``."""
    check_one(command, checkpoint, job)
    return newest_in(checkpoint) if checkpoint is not None else newest_of_job(seed, job)


def check_one(command: str, checkpoint: Path | None, job: str) -> None:
    """Raises ``UserError`` unless exactly one is given."""
    if (checkpoint is None) == (not job):
        raise UserError(f"{command} needs one checkpoint", remedy="give either --checkpoint DIR or --job JOB")


def newest_in(directory: Path) -> Path:
    """``directory`` where it is a model, else the newest checkpoint below it. Raises ``UserError``."""
    if (directory / "config.json").is_file():
        return _whole(directory)
    manifests = [path for path in directory.rglob("step-*/manifest.json") if path.parent.name[5:].isdigit()]
    if not manifests:
        problem = "holds no checkpoint" if directory.is_dir() else "is not a directory"
        remedy = "name a model as save_pretrained writes it; `p2ptrain checkpoints list` shows where those of jobs lie"
        raise UserError(f"{directory} {problem}", remedy=remedy)
    return _whole(max(manifests, key=lambda path: (path.stat().st_mtime, path.parent.name)).parent)


def newest_of_job(seed: str, job: str) -> Path:
    """The newest checkpoint of a job that lies on this machine. Raises ``UserError``."""
    found = ask(seed, lambda client: client.checkpoints(job))
    here = [item for item in found if Path(item.path, "config.json").is_file()]
    here = [item for item in here if item.stage is None] or here  # of a split model: none that is a part
    if here:
        return _whole(Path(max(here, key=lambda item: item.step).path))
    if not found:
        raise UserError(f"job {job} has no checkpoint yet", remedy=f"p2ptrain jobs save {job}")
    machines = ", ".join(sorted({item.peer_name for item in found}))
    raise UserError(f"no checkpoint of job {job} lies on this machine", remedy=f"they lie on {machines}: run it there")


def _whole(directory: Path) -> Path:
    """``directory``. Raises ``UserError`` where it is the checkpoint of one part of a model."""
    from p2ptrain.core.checkpoint_parts import STAGE, STAGES, is_part
    from p2ptrain.core.checkpoints import read_checkpoint
    from p2ptrain.core.disk import RealDisk

    try:
        entry = read_checkpoint(RealDisk(), directory)
    except StorageError:
        return directory  # of another maker, or damaged: whoever opens it will say so
    if is_part(entry):
        part = f"stage {entry.meta.get(STAGE)} of {entry.meta.get(STAGES)}"
        remedy = "`p2ptrain checkpoints list` shows whole ones; or: p2ptrain checkpoints gather DIR --to MODEL"
        raise UserError(f"{directory} holds only a part of a model ({part})", remedy=remedy)
    return directory
