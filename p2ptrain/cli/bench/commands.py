"""``p2ptrain bench ...``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from p2ptrain.cli.bench.options import CsvTo, JsonTo, PlotTo, carry_out, checked, leave
from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.runtime import ProfileOption, SetOption, run
from p2ptrain.core.errors import UserError

app = new_typer(
    help="Measure this machine: the ring, training steps, pipelines, links and codecs, each beside what it must beat."
)

ENDLESS_STEPS = 1_000_000  # it trains until enough was seen
SIZES = "4K,64K,1M,16M,64M,256M"
LINK_SIZES = "64K,1M,4M"
"""Over an emulated link: the largest one takes half a second at 100 Mbit/s."""

PIECE_BYTES = 512 << 10
"""Of the plain sockets' sends and receives where no --sub-chunk is given: of those tried, none was faster."""

LinkOption = Annotated[
    str,
    typer.Option(
        "--link",
        metavar="PRESET",
        help="Emulate a link between the peers: lan, wifi, metro, wan, transcontinental, satellite, lossy; or 20ms.",
    ),
]
CodecOption = Annotated[
    str, typer.Option("--codec", metavar="NAME", help="How elements travel: fp32, bf16, fp16, int8, int4, topk.")
]
TlsOption = Annotated[bool, typer.Option("--tls", help="Encrypt, as peers do off the loopback.")]


@app.command()
def allreduce(
    peers: Annotated[int, typer.Option("--peers", "-n", metavar="N", help="Processes, on the loopback.")] = 2,
    sizes: Annotated[
        str,
        typer.Option("--sizes", metavar="LIST", help=f"Of the tensor; by itself {SIZES}, with --link {LINK_SIZES}."),
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="Of the elements.")] = "float32",
    codec: CodecOption = "fp32",
    link: LinkOption = "",
    tls: TlsOption = False,
    streams: Annotated[
        int, typer.Option("--streams", metavar="N", min=1, max=16, help="Connections to each neighbour.")
    ] = 1,
    sub_chunk: Annotated[
        str, typer.Option("--sub-chunk", metavar="SIZE", help="Bytes that travel as one piece. Default: by itself.")
    ] = "",
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=0, max=10_000, help="Of each size; 0: as the time allows.")
    ] = 0,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
    plot_to: PlotTo = "",
) -> None:
    """The ring beside torch's Gloo and plain sockets.

    In the same processes, round by round in turn. The time of an operation is that of the slowest member, GB/s are
    bytes of the tensor. Sockets are the limit: they move the same bytes and do nothing else.

    \b
    Examples:
      p2ptrain bench allreduce
      p2ptrain bench allreduce --peers 4 --sizes 1M,64M --plot ring.svg
      p2ptrain bench allreduce --codec int8 --link wan
    """
    from p2ptrain.cli.bench import plan
    from p2ptrain.cli.bench.allreduce import AllReduce, Plan
    from p2ptrain.cli.bench.conduct import Ring, conduct
    from p2ptrain.cli.bench.machine import available_bytes

    targets = checked(json_to, csv_to, plot_to)
    plan.check_peers(peers)
    _check_link(link)
    _check_codec(codec)
    if dtype not in plan.ITEM_BYTES:
        raise UserError(f"no sum is known for elements of type {dtype!r}", remedy=f"use {', '.join(plan.ITEM_BYTES)}")
    if codec != "fp32" and dtype != "float32":
        raise UserError(f"the codec {codec} is for float32, not {dtype}", remedy="leave out --dtype, or --codec")
    chosen = plan.sizes_of(sizes or (LINK_SIZES if link else SIZES), plan.ITEM_BYTES[dtype])
    sub_chunk_bytes = plan.sub_chunk_of(sub_chunk)
    plan.check_memory(peers, chosen[-1], available_bytes())
    ring = Ring(link, tls, streams, sub_chunk_bytes, codec)
    work = AllReduce(Plan(peers, chosen, dtype, ring, rounds, sub_chunk_bytes or PIECE_BYTES))
    leave(carry_out(work, conduct(peers, 1, work.measure), targets))


@app.command()
def step(
    profile: ProfileOption = "tiny",
    workers: Annotated[int, typer.Option("--workers", "-n", metavar="N", help="Processes, on the loopback.")] = 2,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, max=1024, help="CPU threads of each worker.")
    ] = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, max=100_000, help="Measured steps of each contender.")
    ] = 40,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    codec: Annotated[
        str, typer.Option("--codec", metavar="NAME", help="How gradients travel; default: the profile's.")
    ] = "",
    link: LinkOption = "",
    tls: TlsOption = False,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
    plot_to: PlotTo = "",
) -> None:
    """Training steps beside torch's own DDP.

    DistributedDataParallel on Gloo and this project train block by block in turn, with the same processes, model,
    samples, global batch, micro-batches and threads: tokens a second, losses, and how much of the communication was
    hidden behind the backward pass.

    \b
    Examples:
      p2ptrain bench step
      p2ptrain bench step --profile small --steps 20
      p2ptrain bench step --codec int8 --link wan
    """
    from configs.loader import load
    from p2ptrain.cli.bench import plan
    from p2ptrain.cli.bench.conduct import Ring, conduct
    from p2ptrain.cli.bench.step import Plan, Steps

    targets = checked(json_to, csv_to, plot_to)
    plan.check_peers(workers, "workers")
    _check_link(link)
    loaded = load(profile, os.environ, sets).profile
    codec = codec or loaded.ring.codec.replace("auto", "fp32")  # "auto" needs measured links
    _check_codec(codec)
    micro_batches = loaded.batch.micro_batches
    if micro_batches < workers:
        raise UserError(
            f"{workers} workers cannot share the {micro_batches} micro-batches of {profile}",
            remedy=f"give --workers {micro_batches} or less, or --set batch.micro_batches={workers}",
        )
    name = Path(profile).stem
    ring = Ring(link, tls, max(1, loaded.ring.streams), loaded.ring.sub_chunk_bytes, codec)
    work = Steps(Plan(loaded.to_spec(), name, workers, threads, steps, ring, loaded.job.exact))
    leave(carry_out(work, conduct(workers, threads, work.measure), targets))


@app.command()
def link(
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=0, max=10_000, help="Of each buffer; 0: as the time allows.")
    ] = 0,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
    plot_to: PlotTo = "",
) -> None:
    """What this machine's sockets reach, TLS or not.

    Round trips, and bytes a second one way and both ways, by size of buffer.

    \b
    Example:
      p2ptrain bench link --plot link.svg
    """
    from p2ptrain.cli.bench.conduct import conduct
    from p2ptrain.cli.bench.link import MEMBERS, Link, Plan

    targets = checked(json_to, csv_to, plot_to)
    work = Link(Plan(rounds))
    leave(carry_out(work, conduct(MEMBERS, 1, work.measure), targets))


@app.command()
def save(
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Of a checkpoint, about: parameters and optimizer.")
    ] = "500M",
    workers: Annotated[
        int, typer.Option("--workers", "-n", metavar="N", min=1, max=16, help="Of one CPU thread each.")
    ] = 2,
    saves: Annotated[int, typer.Option("--saves", metavar="N", min=1, max=1000, help="How many checkpoints.")] = 5,
    quiet: Annotated[
        int, typer.Option("--quiet", metavar="N", min=1, max=1000, help="Undisturbed steps before and after each.")
    ] = 8,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", metavar="DIR", help="Write there, in a directory of its own; default: a temporary one."
        ),
    ] = None,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
) -> None:
    """What a checkpoint adds to the steps it overlaps.

    A cluster of real processes trains a model whose checkpoint has that size, and saves again and again. The steps
    that a save overlaps are compared with the undisturbed ones before and after it. The first save is told apart.

    \b
    Examples:
      p2ptrain bench save
      p2ptrain bench save --size 100M --saves 10 --state /mnt/disk
    """
    from p2ptrain.cli.bench.machine import available_bytes
    from p2ptrain.cli.bench.save import KEPT, Plan, Saves, check_room, settings_for
    from p2ptrain.cli.bench.trial import adapted, conduct
    from p2ptrain.core.texts import size_of

    targets = checked(json_to, csv_to)
    size_bytes = size_of(size)
    check_room(size_bytes, workers, state, available_bytes())
    wanted = settings_for(size_bytes) | {"batch.micro_batches": max(4, workers), "batch.micro_batch_sequences": 1}
    wanted |= {"device.threads": 1, "validation.every": 0, "checkpoint.copies": workers, "checkpoint.keep": KEPT}
    must = {"job.workers": workers, "job.steps": ENDLESS_STEPS, "checkpoint.every": 0}
    profile = adapted("tiny", sets, wanted, must)
    work = Saves(Plan(profile, saves, quiet, os.cpu_count() or 1))
    leave(carry_out(work, conduct(work.measure, state), targets))


@app.command()
def pipeline(
    stages: Annotated[
        int, typer.Option("--stages", "-n", metavar="N", min=2, max=16, help="Processes, on the loopback.")
    ] = 2,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", metavar="N", min=1, max=1024, help="Of a step.")
    ] = 16,
    rtt: Annotated[
        str, typer.Option("--rtt", metavar="LIST", help="Emulated round trips of each hop, in milliseconds.")
    ] = "0,20,80,200",
    forward_ms: Annotated[
        float, typer.Option("--forward-ms", metavar="MS", min=0.1, max=60_000, help="A stage takes for a forward.")
    ] = 40.0,
    backward_ms: Annotated[
        float, typer.Option("--backward-ms", metavar="MS", min=0.1, max=60_000, help="And for a backward.")
    ] = 80.0,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, max=1000, help="Of each schedule, at each round trip.")
    ] = 3,
    payload: Annotated[
        str, typer.Option("--payload", metavar="SIZE", help="Of a micro-batch's activations, and of its gradients.")
    ] = "1M",
    max_in_flight: Annotated[
        int,
        typer.Option(
            "--max-in-flight", metavar="N", min=0, help="Kept by a stage at once, except by GPipe; 0: no bound."
        ),
    ] = 0,
    json_to: JsonTo = "",
    csv_to: CsvTo = "",
    plot_to: PlotTo = "",
) -> None:
    """A pipeline's schedules over slow links.

    Stages that only take time, in processes of their own, with real payloads over TCP that is made as slow as a far
    link. 1F1B with its warm-up extended by what the links cost, plain 1F1B and GPipe take turns, step by step, over the
    same connections. Efficiency is the part of a step that a stage computes; beside each stands what the schedule can
    reach where nothing but computing and links takes time.

    \b
    Examples:
      p2ptrain bench pipeline
      p2ptrain bench pipeline --stages 4 --rtt 0,80 --steps 5 --json pipeline.json
      p2ptrain bench pipeline --rtt 200 --max-in-flight 3
    """
    from p2ptrain.cli.bench import plan
    from p2ptrain.cli.bench.conduct import conduct
    from p2ptrain.cli.bench.machine import available_bytes
    from p2ptrain.cli.bench.pipeline import Pipeline, Plan, check_memory
    from p2ptrain.core.texts import size_of

    targets = checked(json_to, csv_to, plot_to)
    payload_bytes = size_of(payload)
    check_memory(stages, micro_batches, payload_bytes, available_bytes())
    round_trips_ms = plan.milliseconds_of(rtt)
    times_s = (forward_ms / 1e3, backward_ms / 1e3)
    work = Pipeline(Plan(stages, micro_batches, round_trips_ms, *times_s, steps, payload_bytes, max_in_flight))
    leave(carry_out(work, conduct(stages, 1, work.measure), targets))


@app.command(hidden=True)
def member(
    rank: int,
    size: int,
    with_parent: Annotated[bool, typer.Option("--with-parent")] = False,
) -> None:
    """One process of a benchmark: carries out what it is told on standard input."""
    from p2ptrain.cli.bench.member import run_member

    run(run_member(rank, size))


def _check_link(name: str) -> None:
    if name:
        from wire.emulate import preset_named

        preset_named(name)


def _check_codec(name: str) -> None:
    from ring.codecs import codec_named

    codec_named(name)
