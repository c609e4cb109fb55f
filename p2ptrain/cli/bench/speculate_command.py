"""The command line of ``p2ptrain bench speculate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.bench.options import CsvTo, JsonTo, carry_out, checked, leave
from p2ptrain.core.errors import UserError

ALPHAS = "0,.3,.6,.8,.9,1"


def speculate(
    alpha: Annotated[
        str, typer.Option("--alpha", metavar="LIST", help="How often a draft is right where all before it are.")
    ] = ".8",
    rtt: Annotated[
        str, typer.Option("--rtt", metavar="LIST", help="Emulated round trips to the drafter, in milliseconds.")
    ] = "0,20,80,200",
    depth: Annotated[
        str,
        typer.Option(
            "--depth",
            metavar="LIST",
            help="The most drafts that a pass may take, such as 1,2,4,8,16,auto: each is measured for itself, with "
            "--sweep at each alpha.",
        ),
    ] = "auto",
    sweep: Annotated[
        bool, typer.Option("--sweep", help=f"--alpha {ALPHAS}: half an hour, with --virtual a minute.")
    ] = False,
    virtual: Annotated[
        bool,
        typer.Option("--virtual", help="On virtual time, in one process: quick, and the same on every machine."),
    ] = False,
    jitter_ms: Annotated[
        float | None,
        typer.Option(
            "--jitter-ms",
            metavar="MS",
            min=0,
            max=1000,
            help="A message is later by up to that; default: 0, with --exact a tenth of the round trip.",
        ),
    ] = None,
    pass_ms: Annotated[
        float, typer.Option("--pass-ms", metavar="MS", min=0.5, max=10_000, help="A pass of the verifier takes.")
    ] = 50.0,
    growth: Annotated[
        float, typer.Option("--growth", metavar="SHARE", min=0, max=1, help="Of a pass, that each draft adds to it.")
    ] = 0.0,
    draft_ms: Annotated[
        float, typer.Option("--draft-ms", metavar="MS", min=0.1, max=10_000, help="A draft takes.")
    ] = 5.0,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", "-t", metavar="N", min=0, max=10_000, help="New ones of a text; 0: 512, of real models 64."
        ),
    ] = 0,
    texts: Annotated[
        int, typer.Option("--texts", metavar="N", min=0, max=1000, help="Of each setting; 0: 2, with --exact 100.")
    ] = 0,
    chain: Annotated[
        bool, typer.Option("--chain", help="The verifier is split: a chain of 2 real stages on a ring of 80 ms.")
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the drafter in the midst of a text as well.")] = False,
    verifier: Annotated[
        Path | None, typer.Option("--verifier", metavar="DIR", help="A real model; with --drafter.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="A smaller one of the same tokenizer.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="One a line, for real models.")
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Of a real pair: is every text the verifier's own, token for token, while its drafter is killed and "
            "comes back? In virtual time.",
        ),
    ] = False,
    random_seed: Annotated[
        int, typer.Option("--random-seed", metavar="N", min=0, help="With --exact: of draws, jitter and deaths.")
    ] = 0,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, max=1024, help="CPU threads of each real model.")
    ] = 1,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
) -> None:
    """Speculative decoding with a drafter that is far away.

    A verifier and a drafter as join starts them, in processes of their own, over a link that is made as slow as a far
    one. Their models only take time, and the drafter is right as often as it is told to be. Beside it: the verifier
    alone, a protocol that waits for each answer, the same rules in a simulation, and the formulas. With --depth, the
    same with fewer drafts in a pass than it would take by itself. With --verifier and
    --drafter a real pair, beside transformers' assisted generation. Every text is compared with the verifier's own.

    \b
    Examples:
      p2ptrain bench speculate
      p2ptrain bench speculate --alpha .6,.9 --rtt 40 --growth .02 --json speculate.json
      p2ptrain bench speculate --depth 1,2,4,8,16,auto --sweep --virtual
      p2ptrain bench speculate --chain --kill
      p2ptrain bench speculate --verifier big/ --drafter small/ --rtt 0,20 --threads 1
      p2ptrain bench speculate --verifier big/ --drafter small/ --exact --texts 100 --json exact.json
    """
    from p2ptrain.cli.bench import plan as plans
    from p2ptrain.cli.bench.machine import circumstances
    from p2ptrain.cli.bench.speculate import SpeculateBench
    from p2ptrain.cli.bench.speculate_exact import ExactBench, ExactPlan, exact_prompts
    from p2ptrain.cli.bench.speculate_pair import PairBench, PairPlan, prompts_of
    from p2ptrain.cli.bench.speculate_rows import Plan
    from p2ptrain.cli.bench.trial import conduct

    targets = checked(json_to, csv_to)
    round_trips_ms = plans.milliseconds_of(rtt)
    if 0 < tokens < 8:
        raise UserError(f"--tokens {tokens} is too short a text to measure", remedy="give at least 8")
    if (verifier is None) != (drafter is None):
        raise UserError("a real pair has two models", remedy="give both --verifier DIR and --drafter DIR")
    if exact and verifier is None:
        raise UserError("--exact is for a real pair", remedy="give --verifier DIR and --drafter DIR")
    if virtual and verifier is not None:
        raise UserError("real models take real time", remedy="leave out --virtual; --exact is on virtual time")
    depths = plans.depths_of(depth)
    noted = [] if exact or virtual else circumstances()  # nothing of those depends on how fast the machine is
    work: ExactBench | PairBench | SpeculateBench
    if verifier is not None and drafter is not None and exact:
        wanted = exact_prompts(texts or 100, None if prompts is None else prompts_of(prompts))
        times_s = (pass_ms / 1e3, draft_ms / 1e3)
        work = ExactBench(
            ExactPlan(
                str(verifier),
                str(drafter),
                wanted,
                tokens or 64,
                round_trips_ms,
                jitter_ms,
                *times_s,
                seed=random_seed,
                threads=threads,
            )
        )
    elif verifier is not None and drafter is not None:
        pair, wanted = (str(verifier), str(drafter)), prompts_of(prompts)
        work = PairBench(PairPlan(*pair, wanted, tokens or 64, round_trips_ms, jitter_ms or 0.0, threads, depths))
    else:
        alphas = plans.shares_of(ALPHAS if sweep else alpha)
        stand_ins = (pass_ms / 1e3, growth, draft_ms / 1e3)
        work = SpeculateBench(
            Plan(
                alphas,
                round_trips_ms,
                jitter_ms or 0.0,
                *stand_ins,
                tokens or 512,
                texts or 2,
                chain=chain,
                kill=kill,
                threads=threads,
                depths=depths,
                virtual=virtual,
            )
        )
    complete = carry_out(work, conduct(work.measure), targets, noted)
    if not isinstance(work, SpeculateBench):
        work.check()
    leave(complete)
