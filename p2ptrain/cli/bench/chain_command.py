"""The command line of ``p2ptrain bench chain``."""

from __future__ import annotations

from typing import Annotated

import typer

from p2ptrain.cli.bench.options import CsvTo, JsonTo, carry_out, checked, leave
from p2ptrain.core.errors import UserError


def chain(
    stages: Annotated[
        int, typer.Option("--stages", "-n", metavar="N", min=1, max=16, help="Workers, on the loopback.")
    ] = 3,
    rtt: Annotated[
        str, typer.Option("--rtt", metavar="LIST", help="Emulated round trips of each link, in milliseconds.")
    ] = "0,20,80",
    layers: Annotated[int, typer.Option("--layers", metavar="N", min=1, max=256, help="Of the model.")] = 12,
    width: Annotated[int, typer.Option("--width", metavar="N", min=64, max=16384, help="Of the model.")] = 512,
    vocab: Annotated[
        int, typer.Option("--vocab", metavar="N", min=256, max=1 << 20, help="Tokens that the model knows.")
    ] = 4096,
    prompt: Annotated[
        int, typer.Option("--prompt", metavar="N", min=2, max=100_000, help="Positions of a prompt.")
    ] = 256,
    tokens: Annotated[
        int, typer.Option("--tokens", "-t", metavar="N", min=8, max=100_000, help="New ones of a text.")
    ] = 48,
    sessions: Annotated[
        int, typer.Option("--sessions", metavar="N", min=1, max=16, help="Texts at once, beside one alone.")
    ] = 4,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, max=1024, help="CPU threads of each process.")
    ] = 1,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill stages with -9 as well, at each round trip: some minutes each.")
    ] = False,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
) -> None:
    """A model split over workers, link by link.

    A random model lies on real workers with emulated links between all of them and to the client. A token's time is
    divided into computing, links and the rest; beside it stands the whole model in one process. Then several texts at
    once; and with --kill each of the first, the middle and the last stage dies in the midst of a prompt, of an answer
    and between two, with a spare to take its place.

    \b
    Examples:
      p2ptrain bench chain
      p2ptrain bench chain --stages 4 --rtt 0,40 --tokens 200 --json chain.json
      p2ptrain bench chain --rtt 20 --kill
      p2ptrain bench chain --layers 24 --width 1024 --prompt 1024 --threads 2
    """
    from p2ptrain.cli.bench import plan as plans
    from p2ptrain.cli.bench.chain import ChainBench, Plan, check_memory
    from p2ptrain.cli.bench.machine import available_bytes, circumstances
    from p2ptrain.cli.bench.trial import conduct

    targets = checked(json_to, csv_to)
    round_trips_ms = plans.milliseconds_of(rtt)
    if stages > layers:
        raise UserError(f"a model of {layers} layers has no {stages} stages", remedy=f"give --stages 1 to {layers}")
    if width % 64:
        raise UserError(f"--width {width} is no multiple of 64", remedy="heads have 64 elements: such as 512")
    plan = Plan(stages, round_trips_ms, layers, width, vocab, prompt, tokens, sessions, threads, kill)
    check_memory(plan, available_bytes())
    noted = circumstances()
    work = ChainBench(plan)
    leave(carry_out(work, conduct(work.measure), targets, noted))
