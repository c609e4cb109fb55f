"""``p2ptrain generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, is_text, run
from p2ptrain.cli.split_options import (
    DryRunOption,
    DtypeOption,
    PositionsOption,
    SplitOption,
    StatsOption,
    WireOption,
    WithBareSplit,
    split_wish,
)
from p2ptrain.cli.text_options import (
    CheckpointOption,
    DeviceOption,
    JobOption,
    NoSpeculationOption,
    RandomSeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    VerifierOption,
    by_verifier,
    check_one,
    no_device,
    one_checkpoint,
    say_unused,
    stop_strings,
    write,
)
from p2ptrain.core.errors import UserError
from p2ptrain.core.serving import SamplingWish

if TYPE_CHECKING:
    from p2ptrain.cli.output import Console
    from p2ptrain.compute.generate import GenerateResult

USUAL_SESSIONS = 4
STDIN = "-"
PROMPTS_BYTES = 1 << 24  # a file that is larger is most likely not one of prompts


app = new_typer()


@app.command("generate", cls=WithBareSplit)
def generate(
    prompt: Annotated[
        str,
        typer.Argument(metavar="[PROMPT]", callback=is_text, help="The text to go on from; -: standard input, whole."),
    ] = "",
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="FILE", help="A file of prompts, one a line; -: standard input.")
    ] = "",
    checkpoint: CheckpointOption = None,
    job: JobOption = "",
    max_new_tokens: Annotated[
        int, typer.Option("--tokens", "-n", metavar="N", min=1, help="Write at most so many tokens.")
    ] = 200,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    stop: StopOption = [],  # noqa: B006 - Typer copies it
    random_seed: RandomSeedOption = 0,
    device: DeviceOption = "auto",
    seed: SeedOption = DEFAULT_SEED,
    verifier: VerifierOption = "",
    no_speculation: NoSpeculationOption = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Of a verifier: write each text also without drafters, and say what they are good for."
        ),
    ] = False,
    split: SplitOption = None,
    sessions: Annotated[
        int,
        typer.Option(
            "--sessions", metavar="N", min=0, help="Of a verifier, or --split: so many prompts at once; 0: up to 4."
        ),
    ] = 0,
    dtype: DtypeOption = "",
    wire: WireOption = "",
    positions: PositionsOption = 0,
    dry_run: DryRunOption = False,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write text with a checkpoint, or with a verifier of the cluster, as it comes.

    Without --checkpoint and --job a verifier writes (p2ptrain join --role verifier): the text is its model's own, and
    comes the sooner the more often its drafters are right.

    Where none of --temperature, --top-k and --top-p is given, the model's generation_config.json decides, as in
    transformers: the likeliest token each time, unless it says do_sample. What is given goes before what it says.

    With --split the model is computed by workers that joined the seed, some layers each, whole on none of them. The
    files of --checkpoint are this machine's and are given to them; those of --job may lie on any of them. The text
    is that of the whole model, greedy and sampled, when the numbers travel as they are computed (no --wire).

    \b
    Examples:
      p2ptrain generate "Once upon a time" --stats
      p2ptrain generate --prompts prompts.txt --compare --json --seed 192.168.1.20
      p2ptrain generate "def main(" --checkpoint ./step-00000400
      p2ptrain generate "import " --job tiny --temperature 0 --tokens 80
      p2ptrain generate "def f(x):" -c ./step-00000400 --stop "\\ndef " --stop "\\nclass "
      p2ptrain generate --prompts prompts.txt -c ./step-00000400 --json
      git diff | p2ptrain generate - -c ./step-00000400
      p2ptrain generate "Once upon a time" --split -c ./Llama-3.1-8B --dtype bf16 --dry-run
      p2ptrain generate "Once upon a time" --split 3 -c ./Llama-3.1-8B --dtype bf16 --stats
      p2ptrain generate --prompts prompts.txt --sessions 4 --split --job tiny --json
    """
    asked = _prompts(prompt, prompts)
    stops = stop_strings(stop)
    wished = SamplingWish(temperature, top_k, top_p, random_seed)
    of_verifiers = {"verifier": verifier, "no_speculation": no_speculation, "compare": compare}
    if by_verifier(checkpoint, job, split, **of_verifiers):
        split_wish(split, dtype, wire, positions, dry_run=dry_run)  # refuses what is only of split models
        no_device(device)
        if compare and no_speculation:
            raise UserError("--compare compares with drafters", remedy="leave out --no-speculation")

        from p2ptrain.cli.verifier_generate import Order as TextOrder
        from p2ptrain.cli.verifier_generate import generate_by_verifier

        wanted = TextOrder(
            seed=seed,
            verifier=verifier,
            prompts=asked,
            is_one=bool(prompt),
            max_new_tokens=max_new_tokens,
            sampling=wished,
            stop=stops,
            sessions=sessions or USUAL_SESSIONS,
            speculate=not no_speculation,
            compare=compare,
            stats=stats,
            as_json=as_json,
        )
        run(generate_by_verifier(wanted))
        return
    wish = split_wish(split, dtype, wire, positions, dry_run=dry_run, stats=stats, sessions=sessions > 0)
    if wish is not None:
        check_one("generate", checkpoint, job)
        no_device(device)

        from p2ptrain.cli.split import Wanted
        from p2ptrain.cli.split_generate import Order, generate_split

        at_once = min(sessions or USUAL_SESSIONS, len(asked))
        order = Order(asked, bool(prompt), max_new_tokens, wished, stops, at_once, dry_run, stats, as_json)
        run(generate_split(Wanted(wish, checkpoint, job, seed), order))
        return
    directory = one_checkpoint("generate", checkpoint, job, seed)

    from p2ptrain.compute.generate import LocalModel
    from p2ptrain.compute.generate import generate as compute

    model = LocalModel(directory, device=device)
    check_prompts(asked, lambda text: model.text.checked(model.text.prompt_ids(text), max_new_tokens))
    shown, settled = Shown(quiet=as_json), model.text.sampling(wished)
    say_unused(model.text)
    results: list[GenerateResult] = []
    try:
        for text in asked:
            shown.begin(text)
            results.append(
                compute(model, text, max_new_tokens=max_new_tokens, sampling=settled, stop=stops, on_text=shown.piece)
            )
            shown.end()
    except BaseException:
        shown.broken()
        raise
    if as_json:
        texts = [{"prompt": text} | asdict(result) for text, result in zip(asked, results, strict=True)]
        print_json({"checkpoint": str(directory)} | (texts[0] if prompt else {"texts": texts}))
        return
    tokens, seconds = sum(result.tokens for result in results), sum(result.seconds for result in results)
    typer.echo(f"({tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s, {directory})", err=True)


class Shown:
    """Texts on standard output, one after the other. A prompt comes with the first piece, so an error stands alone."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._prompt = ""
        self._count = 0
        self._is_open = False

    def begin(self, prompt: str) -> None:
        self._prompt = prompt
        self._is_open = False

    def piece(self, text: str) -> None:
        if self._quiet:
            return
        if not self._is_open:
            text = "\n" * bool(self._count) + self._prompt + text
            self._is_open = True
            self._count += 1
        write(text)

    def end(self) -> None:
        """The text is over, be it that nothing came."""
        self.piece("")
        self.broken()

    def broken(self) -> None:
        """Whatever is said next begins on a line of its own."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            typer.echo()

    def leaving(self, console: Console) -> Callable[[str], None]:
        """How to say that the person wants to leave: below the text, of which no more is shown."""

        def say(text: str) -> None:
            self._quiet = True
            with suppress(BrokenPipeError):  # who reads the text may have left first
                self.broken()
            console.event("info", text)

        return say


def check_prompts(asked: list[str], check: Callable[[str], object]) -> None:
    """Refuse what cannot be before anything is loaded, and say which of several it is. Raises ``UserError``."""
    for number, text in enumerate(asked, start=1):
        try:
            check(text)
        except UserError as error:
            if len(asked) == 1:
                raise
            raise UserError(f"prompt {number}: {error.message}", remedy=error.remedy) from error


def _prompts(prompt: str, file: str) -> list[str]:
    """What to go on from. Raises ``UserError``."""
    if bool(prompt) == bool(file):
        raise UserError("generate needs something to go on from", remedy="give either a PROMPT or --prompts FILE")
    if prompt and prompt != STDIN:
        return [prompt]
    content = _read(file or STDIN)
    lines = [line.removesuffix("\r") for line in content.split("\n") if line.strip()]
    asked = lines if file else [content.removesuffix("\n")]
    if not any(asked):
        raise UserError(f"{_named(file or STDIN)} holds no prompt", remedy="one a line" if file else "")
    return asked


def _read(file: str) -> str:
    try:
        if file == STDIN:
            raw = sys.stdin.buffer.read(PROMPTS_BYTES + 1)
        else:
            with Path(file).open("rb") as handle:
                raw = handle.read(PROMPTS_BYTES + 1)
        if len(raw) > PROMPTS_BYTES:
            raise UserError(f"{_named(file)} has more than {PROMPTS_BYTES >> 20} MiB", remedy="is it the right file?")
        return raw.decode()
    except OSError as error:
        raise UserError(f"cannot read {_named(file)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{_named(file)} is not UTF-8 text (byte {error.start})") from error


def _named(file: str) -> str:
    return "standard input" if file == STDIN else file
