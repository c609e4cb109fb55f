"""``p2ptrain chat``."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from p2ptrain.cli.lazy import new_typer
from p2ptrain.cli.output import print_json
from p2ptrain.cli.runtime import DEFAULT_SEED, JsonOption, SeedOption, is_text
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
    RandomSeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    check_one,
    one_checkpoint,
    say_unused,
    stop_strings,
)
from p2ptrain.core.errors import EXIT_INTERRUPTED
from p2ptrain.core.serving import SamplingWish

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
    split: SplitOption = None,
    dtype: DtypeOption = "",
    wire: WireOption = "",
    positions: PositionsOption = 0,
    dry_run: DryRunOption = False,
    stats: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Talk with a checkpoint.

    Where none of --temperature, --top-k and --top-p is given, the model's generation_config.json decides, as in
    transformers: the likeliest token each time, unless it says do_sample. What is given goes before what it says.

    Where its tokenizer brings a chat template, that writes the turns; else they are written "User: ..." and
    "Assistant: ...". The oldest turns are dropped, and it is said, when they no longer fit the model's context.

    Ctrl+C cancels an answer and keeps the conversation; a second one leaves, as Ctrl+D and /quit do. /help lists the
    commands. Where standard input is no terminal, each line is a question.

    With --split the model is computed by workers that joined the seed, some layers each, whole on none of them. The
    files of --checkpoint are this machine's and are given to them; those of --job may lie on any of them.

    \b
    Examples:
      p2ptrain chat --checkpoint ./SmolLM2-135M-Instruct
      p2ptrain chat --job tiny --temperature 0 --system "You are brief."
      echo "What is a ring?" | p2ptrain chat -c ./SmolLM2-135M-Instruct
      p2ptrain chat --split -c ./Llama-3.1-8B-Instruct --dtype bf16 --seed 192.168.1.20
      p2ptrain chat --split 3 --job tiny --dry-run
    """
    stops = stop_strings(stop)
    wish = split_wish(split, dtype, wire, positions, dry_run=dry_run, stats=stats)
    sampling = SamplingWish(temperature, top_k, top_p, random_seed)
    check_one("chat", checkpoint, job)

    from p2ptrain.cli.sources import Leaving, LocalSource, TokenSource
    from p2ptrain.cli.talk import Talk
    from p2ptrain.compute.conversation import ChatFormat

    source: TokenSource
    if wish is None:
        source = LocalSource(one_checkpoint("chat", checkpoint, job, seed), device=device)
    else:
        from p2ptrain.cli.split import Wanted
        from p2ptrain.cli.split_chat import ChainSource
        from p2ptrain.cli.split_chat import dry_run as show_plan

        wanted = Wanted(wish, checkpoint, job, seed)
        if dry_run:
            show_plan(wanted, as_json=as_json)
            return
        source = ChainSource(wanted, quiet=as_json)
    try:
        form = ChatFormat(source.text)
        talk = Talk(
            source,
            form,
            system=system,
            max_new_tokens=max_new_tokens,
            sampling=source.text.sampling(sampling),
            stop=stops,
            quiet=as_json,
        )
        say_unused(source.text)
        if sys.stdin.isatty() and not as_json:
            known = "" if source.context is None else f", {source.context} tokens of context"
            turns = "no chat template: plain turns" if form.is_plain else "its own chat template"
            typer.secho(f"({source.label}: {turns}{known}. /help lists commands)", dim=True, err=True)
        talk.run()
        if as_json:
            print_json(talk.document())
        elif stats:
            talk.show_stats()
    except Leaving:
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)  # a kernel may still run; the interpreter's own shutdown would wait for it
    finally:
        source.close()
