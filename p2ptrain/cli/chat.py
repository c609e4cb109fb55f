"""``p2ptrain chat``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import failure, print_json
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, is_text
from p2ptrain.cli.split_options import (
    DryRunOption,
    DtypeOption,
    PositionsOption,
    SplitOption,
    SplitWish,
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
)
from p2ptrain.core.errors import EXIT_INTERRUPTED, P2PTrainError
from p2ptrain.core.serving import SamplingWish

if TYPE_CHECKING:
    from p2ptrain.cli.sources import TokenSource
    from p2ptrain.cli.speakers import Speaker

app = new_typer()


@app.command("chat", cls=WithBareSplit)
def chat(
    checkpoint: CheckpointOption = None,
    job: JobOption = "",
    system: Annotated[
        str,
        typer.Option("--system", metavar="TEXT", callback=is_text, help="What the model is told before all else."),
    ] = "",
    max_new_tokens: Annotated[
        int, typer.Option("--tokens", "-n", metavar="N", min=1, help="An answer has at most so many tokens.")
    ] = 512,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    stop: StopOption = [],  # noqa: B006 - Typer copies it
    random_seed: RandomSeedOption = 0,
    device: DeviceOption = "auto",
    seed: SeedOption = DEFAULT_SEED,
    verifier: VerifierOption = "",
    no_speculation: NoSpeculationOption = False,
    split: SplitOption = None,
    dtype: DtypeOption = "",
    wire: WireOption = "",
    positions: PositionsOption = 0,
    dry_run: DryRunOption = False,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Talk with a checkpoint, or with a verifier of the cluster.

    Without --checkpoint and --job a verifier answers (p2ptrain join --role verifier). When it is lost, what it had
    said stays on the screen, and the next question waits for it, an hour at most.

    Where none of --temperature, --top-k and --top-p is given, the model's generation_config.json decides, as in
    transformers: the likeliest token each time, unless it says do_sample. What is given goes before what it says.

    Where its tokenizer brings a chat template, that writes the turns; else they are written "User: ..." and
    "Assistant: ...". The oldest turns are dropped, and it is said, when they no longer fit the model's context.

    Ctrl+C cancels an answer and keeps the conversation; a second one leaves, as Ctrl+D and /quit do. /help lists the
    commands. Where standard input is no terminal, each line is a question or a command; what fails ends the chat, and a
    verifier that was lost between two answers is waited for a minute.

    With --split the model is computed by workers that joined the seed, some layers each, whole on none of them. The
    files of --checkpoint are this machine's and are given to them; those of --job may lie on any of them.

    \b
    Examples:
      p2ptrain chat
      p2ptrain chat --checkpoint ./SmolLM2-135M-Instruct
      p2ptrain chat --job tiny --temperature 0 --system "You are brief."
      echo "What is a ring?" | p2ptrain chat -c ./SmolLM2-135M-Instruct
      p2ptrain chat --split -c ./Llama-3.1-8B-Instruct --dtype bf16 --seed 192.168.1.20
      p2ptrain chat --split 3 --job tiny --dry-run
    """
    stops = stop_strings(stop)
    wished = SamplingWish(temperature, top_k, top_p, random_seed)

    from p2ptrain.cli.sources import Leaving
    from p2ptrain.cli.talk import Talk

    speaker: Speaker
    of_verifiers = {"verifier": verifier, "no_speculation": no_speculation}
    if by_verifier(checkpoint, job, split, **of_verifiers):
        split_wish(split, dtype, wire, positions, dry_run=dry_run)  # refuses what is only of split models
        no_device(device)
        speaker = _verifier(seed, verifier, max_new_tokens, wished, stops, not no_speculation, quiet=as_json)
    else:
        wish = split_wish(split, dtype, wire, positions, dry_run=dry_run, stats=stats)
        check_one("chat", checkpoint, job)
        if wish is not None:
            no_device(device)
        if wish is not None and dry_run:
            from p2ptrain.cli.split import Wanted
            from p2ptrain.cli.split_chat import dry_run as show_plan

            show_plan(Wanted(wish, checkpoint, job, seed), as_json=as_json)
            return
        source = _source(wish, checkpoint, job, seed, device, quiet=as_json)
        speaker = _of_source(source, max_new_tokens, wished, stops)
    try:
        talk = Talk(speaker, system=system, quiet=as_json)
        if sys.stdin.isatty() and not as_json:
            typer.secho(f"({speaker.label}: {speaker.about}. /help lists commands)", dim=True, err=True)
        try:
            talk.run()
        except P2PTrainError as problem:
            if as_json and talk.answers:
                print_json(talk.document() | {"error": failure(problem)})
            raise
        if as_json:
            print_json(talk.document())
        elif stats and talk.answers:
            talk.show_stats()
    except Leaving:
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)  # a kernel may still run; the interpreter's own shutdown would wait for it
    finally:
        speaker.close()


def _source(
    wish: SplitWish | None, checkpoint: Path | None, job: str, seed: str, device: str, *, quiet: bool
) -> TokenSource:
    """The model that is meant, loaded. Raises ``P2PTrainError``."""
    if wish is None:
        from p2ptrain.cli.sources import LocalSource

        return LocalSource(one_checkpoint("chat", checkpoint, job, seed), device=device)
    from p2ptrain.cli.split import Wanted
    from p2ptrain.cli.split_chat import ChainSource

    return ChainSource(Wanted(wish, checkpoint, job, seed), quiet=quiet)


def _of_source(source: TokenSource, max_new_tokens: int, sampling: SamplingWish, stop: tuple[str, ...]) -> Speaker:
    from p2ptrain.cli.speakers import ModelSpeaker
    from p2ptrain.compute.text import ChatFormat

    try:
        say_unused(source.text)
        settled = source.text.sampling(sampling)
        return ModelSpeaker(source, ChatFormat(source.text), max_new_tokens=max_new_tokens, sampling=settled, stop=stop)
    except BaseException:
        source.close()
        raise


def _verifier(
    seed: str,
    name: str,
    max_new_tokens: int,
    sampling: SamplingWish,
    stop: tuple[str, ...],
    speculate: bool,
    *,
    quiet: bool,
) -> Speaker:
    from p2ptrain.cli.verifier_chat import VerifierSpeaker, WantedVerifier
    from roles.verifier.asking import Wish

    wish = Wish(max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, speculate="auto" if speculate else "off")
    at_terminal = sys.stdin.isatty() and not quiet
    return VerifierSpeaker(WantedVerifier(seed, name, wish), at_terminal=at_terminal, quiet=quiet)
