"""``p2ptrain generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.output import checked, print_json
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, ask, is_text
from p2ptrain.core.errors import UserError


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", callback=is_text, help="The text to go on from.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", "-c", metavar="DIR", help="A checkpoint, or a directory to find the newest in."),
    ] = None,
    job: Annotated[
        str, typer.Option("--job", metavar="JOB", help="Use the newest checkpoint of this job on this machine.")
    ] = "",
    max_new_tokens: Annotated[
        int, typer.Option("--tokens", "-n", metavar="N", min=1, help="Write at most so many tokens.")
    ] = 200,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[
        int, typer.Option(metavar="K", min=0, help="Choose among the k likeliest tokens; 0: among all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", min=0.0, max=1.0, help="Choose among the likeliest tokens that hold this probability."
        ),
    ] = 0.95,
    random_seed: Annotated[
        int, typer.Option("--random-seed", metavar="N", min=0, max=2**63 - 1, help="The same seed gives the same text.")
    ] = 0,
    device: Annotated[str, typer.Option(metavar="KIND", help="auto, cpu, cuda, cuda:1, ... or mps.")] = "auto",
    seed: SeedOption = DEFAULT_SEED,
    as_json: JsonOption = False,
) -> None:
    """Write text with a checkpoint, as it comes.

    \b
    Examples:
      p2ptrain generate "def main(" --checkpoint ./step-00000400
      p2ptrain generate "import " --job tiny --temperature 0 --tokens 80
    """
    if (checkpoint is None) == (not job):
        raise UserError("generate needs one checkpoint", remedy="give either --checkpoint DIR or --job JOB")
    directory = newest_in(checkpoint) if checkpoint is not None else newest_of_job(seed, job)

    from p2ptrain.compute.generate import generate as compute

    unwritten = iter([prompt])  # written with the first piece, so that an error stands alone

    def show(text: str) -> None:
        if not as_json:
            _write(next(unwritten, "") + text)

    result = compute(
        directory,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=random_seed,
        device=device,
        on_text=show,
    )
    if as_json:
        facts = {"checkpoint": str(directory), "prompt": prompt, "text": result.text}
        print_json(facts | {"tokens": result.tokens, "seconds": result.seconds})
        return
    typer.echo()
    speed = result.tokens / max(result.seconds, 1e-9)
    typer.echo(f"({result.tokens} tokens, {speed:.0f} tokens/s, {directory})", err=True)


def _write(text: str) -> None:
    """Text as it comes. A model may write any byte: those that a terminal would obey are shown as �."""
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
    sys.stdout.write(shown)
    sys.stdout.flush()


def newest_in(directory: Path) -> Path:
    """``directory`` where it is a model, else the newest checkpoint below it. Raises ``UserError``."""
    if (directory / "config.json").is_file():
        return directory
    manifests = [path for path in directory.rglob("step-*/manifest.json") if path.parent.name[5:].isdigit()]
    if not manifests:
        problem = "holds no checkpoint" if directory.is_dir() else "is not a directory"
        raise UserError(f"{directory} {problem}", remedy="`p2ptrain checkpoints list` shows where they lie")
    return max(manifests, key=lambda path: (path.stat().st_mtime, path.parent.name)).parent


def newest_of_job(seed: str, job: str) -> Path:
    """The newest checkpoint of a job that lies on this machine. Raises ``UserError``."""
    from wire.records import CheckpointInfo

    answer = ask(seed, "checkpoints.list", job=job)
    found = [CheckpointInfo.from_map_untrusted(item) for item in checked(answer, "checkpoints", list)]
    here = [item for item in found if Path(item.path, "config.json").is_file()]
    if here:
        return Path(max(here, key=lambda item: item.step).path)
    if not found:
        raise UserError(f"job {job} has no checkpoint yet", remedy=f"p2ptrain jobs save {job}")
    machines = ", ".join(sorted({item.peer_name for item in found}))
    raise UserError(f"no checkpoint of job {job} lies on this machine", remedy=f"they lie on {machines}: run it there")
