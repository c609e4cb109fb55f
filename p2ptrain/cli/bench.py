"""``p2ptrain bench ...``: reads what to measure, has ``p2ptrain.lab.bench`` measure it, and prints the report."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.output import print_json, print_table
from p2ptrain.cli.runtime import JsonOption, LinkOption, ProfileOption, SetOption, option, run
from p2ptrain.core.errors import EXIT_INTERRUPTED, UserError
from p2ptrain.core.texts import check_one_of, human_bytes, human_duration, printable, size_of, three_digits

if TYPE_CHECKING:
    from p2ptrain.lab.bench.report import BenchReport
    from p2ptrain.lab.bench.runner import Bench

app = new_typer(
    help="Measure this machine: its device, the ring, training steps, links, pipelines, and generation, each beside "
    "what it must beat."
)

SIZES, LINK_SIZES = "4K,64K,1M,16M,64M,256M", "64K,1M,4M"
"""Default sizes of the tensor without and with ``--link``. 4M takes about half a second at 100 Mbit/s."""

WorkersOption = Annotated[int, option("--workers -w N", "Number of workers.", min=2, max=16)]
ThreadsOption = Annotated[int, option("--threads N", "CPU threads of each process.", min=1, max=1024)]
CodecOption = Annotated[str, option("--codec NAME", "Encoding of elements: fp32, bf16, fp16, int8, int4, topk.")]
RoundsOption = Annotated[int, option("--rounds N", "Rounds per tensor size; 0: automatic.", min=0, max=10_000)]
RttOption = Annotated[str, option("--rtt LIST", "Emulated round trips between neighbours, in milliseconds.")]
StepsOption = Annotated[int, option("--steps N", "Measured steps of each contender.", min=1, max=100_000)]
DeviceOption = Annotated[str, option("--device KIND", "auto, cpu, cuda, cuda:1, ... or mps.")]
TlsOption = Annotated[bool, option("--tls", "Encrypt all connections, as between different machines.")]


@app.command()
def allreduce(
    workers: WorkersOption = 2,
    sizes: Annotated[str, option("--sizes LIST", f"Tensor sizes; default: {SIZES}, with --link {LINK_SIZES}.")] = "",
    codec: CodecOption = "fp32",
    link: LinkOption = "",
    tls: TlsOption = False,
    rounds: RoundsOption = 0,
    backend: Annotated[
        str, option("--backend NAME", "torch: measure the ring as torch.distributed's backend p2p.")
    ] = "ring",
    as_json: JsonOption = False,
) -> None:
    """Compare the ring with torch's Gloo and with plain sockets.

    They run in the same processes and take turns. The time of an operation is that of the slowest member. GB/s are
    bytes of the tensor. Sockets are the limit: they move the same bytes and do nothing else.

    \b
    Examples:
      p2ptrain bench allreduce
      p2ptrain bench allreduce --workers 4 --sizes 1M,64M
      p2ptrain bench allreduce --codec int8 --link wan
      p2ptrain bench allreduce --backend torch
    """
    from p2ptrain.lab.bench.network import ITEM_BYTES, AllReducePlan, BenchRing, measure_allreduce
    from p2ptrain.lab.bench.runner import MEMBER_BYTES, check_fits

    _check_names(link, codec)
    _check_backend(backend, plain=not (link or tls or codec != "fp32"))
    listed = sizes or (LINK_SIZES if link else SIZES)
    chosen = sorted({size_of(part) for part in listed.split(",") if part.strip()})
    if not chosen or any(size_bytes % ITEM_BYTES for size_bytes in chosen):
        raise UserError(f"--sizes {listed}: a size is no multiple of {ITEM_BYTES} bytes", remedy="such as 64K,1M")
    need_bytes = workers * (MEMBER_BYTES + 3 * chosen[-1])  # a member's own tensor, and two that Gloo keeps
    check_fits(f"{workers} peers with tensors of {chosen[-1] / 2**20:,.0f} MiB", need_bytes)
    ring = BenchRing(link, tls, codec=codec)
    plan = AllReducePlan(workers, chosen, ring, rounds, backend == "torch")
    _measure(plan.report(), lambda bench, report: measure_allreduce(bench, plan, report), as_json)


@app.command()
def step(
    profile: ProfileOption = "tiny",
    workers: WorkersOption = 2,
    threads: ThreadsOption = 1,
    steps: StepsOption = 40,
    device: DeviceOption = "cpu",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    link: LinkOption = "",
    tls: TlsOption = False,
    backend: Annotated[
        str, option("--backend NAME", "torch: also DDP and FSDP2 on torch.distributed's backend p2p.")
    ] = "ring",
    as_json: JsonOption = False,
) -> None:
    """Compare training steps with those of torch's DDP.

    DistributedDataParallel on Gloo and this project take turns block by block, with the same processes, device, model,
    samples, global batch, micro-batches and threads. Results: tokens a second, losses, and the part of communication
    that the backward pass hides.

    \b
    Examples:
      p2ptrain bench step
      p2ptrain bench step --device cuda
      p2ptrain bench step --profile small --steps 20
      p2ptrain bench step --set ring.codec=int8 --link wan
      p2ptrain bench step --backend torch
    """
    from configs.loader import load
    from p2ptrain.lab.bench.network import BenchRing
    from p2ptrain.lab.bench.training import DDP, GROUPED, StepPlan, measure_steps

    _check_device(device)
    loaded = load(profile, os.environ, sets).profile
    codec = loaded.ring.codec.replace("auto", "fp32")  # "auto" needs measured links
    _check_names(link, codec)
    _check_backend(backend, plain=not (link or tls))
    micro_batches = loaded.batch.micro_batches
    if micro_batches < workers:
        remedy = f"give --workers {micro_batches} or less, or --set batch.micro_batches={workers}"
        raise UserError(f"{workers} workers cannot share the {micro_batches} micro-batches of {profile}", remedy=remedy)
    ring = BenchRing(link, tls, max(1, loaded.ring.streams), loaded.ring.sub_chunk_bytes, codec)
    rivals = tuple(GROUPED) if backend == "torch" else (DDP,)
    plan = StepPlan(loaded, Path(profile).stem, workers, threads, steps, ring, rivals, device)
    _measure(plan.report(), lambda bench, report: measure_steps(bench, plan, report), as_json)


@app.command()
def device(
    profile: ProfileOption = "tiny",
    device: DeviceOption = "auto",
    steps: StepsOption = 40,
    no_compiled: Annotated[bool, option("--no-compiled", "Leave out what compiles, which starts slowly.")] = False,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    as_json: JsonOption = False,
) -> None:
    """Compare one worker with the loop that a user of torch writes.

    This worker, alone in its ring, without and with compiled layers, takes turns block by block with a plain loop
    (transformers' model, autocast, clipped gradients, fused AdamW) and with the same loop compiled, on one device, with
    the same weights, samples and precision. Results: tokens a second, the use of the device's peak, and where a step's
    time goes.

    \b
    Examples:
      p2ptrain bench device
      p2ptrain bench device --device cuda --set device.precision=bf16
    """
    from configs.loader import load
    from p2ptrain.lab.bench.network import BenchRing
    from p2ptrain.lab.bench.training import COMPILED, PLAIN, StepPlan, measure_steps

    _check_device(device)
    loaded = load(profile, os.environ, sets).profile
    if loaded.job.strategy != "sync":
        raise UserError(f"{profile} has the strategy {loaded.job.strategy!r}", remedy="add --set job.strategy=sync")
    rivals = (PLAIN,) if no_compiled else (PLAIN, COMPILED)
    threads = loaded.device.threads or os.cpu_count() or 1
    plan = StepPlan(loaded, Path(profile).stem, 1, threads, steps, BenchRing(), rivals, device)
    _measure(plan.report(), lambda bench, report: measure_steps(bench, plan, report), as_json)


@app.command()
def local(
    profile: ProfileOption = "local",
    workers: WorkersOption = 4,
    inner_steps: Annotated[
        int, option("--inner-steps N", "Inner steps of each worker in a step.", min=1, max=10_000)
    ] = 100,
    compute_ms: Annotated[
        float, option("--compute-ms MS", "Time of an inner step; 0: really compute.", min=0, max=60_000)
    ] = 200.0,
    steps: Annotated[int, option("--steps N", "Measured steps.", min=1, max=1000)] = 3,
    codec: CodecOption = "int4",
    link: LinkOption = "80ms-100mbit",
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    as_json: JsonOption = False,
) -> None:
    """Compare the strategy 'local' with 'sync' over a slow link.

    The workers are processes that exchange real bytes over an emulated link. They wait instead of computing, unless
    --compute-ms is 0. A step of sync has one micro-batch of each worker. 'local' takes its turn as it is, and with
    local.overlap. Results: tokens a second, the share of the time in which workers compute, and the bytes that each
    sends in a step.

    \b
    Examples:
      p2ptrain bench local
      p2ptrain bench local --inner-steps 20 --steps 10
      p2ptrain bench local --compute-ms 0 --workers 2 --link wan
    """
    from configs.loader import load
    from p2ptrain.lab.bench.local import LocalPlan, measure_local

    _check_names(link, codec)
    loaded = load(profile, os.environ, [*sets, f"job.workers={workers}"]).profile
    if loaded.job.strategy != "local":
        raise UserError(f"{profile} has the strategy {loaded.job.strategy!r}", remedy="choose --profile local")
    name = Path(profile).stem
    plan = LocalPlan(loaded, name, workers, inner_steps, compute_ms / 1e3, steps, link, codec)
    _measure(plan.report(), lambda bench, report: measure_local(bench, plan, report), as_json)


@app.command()
def link(rounds: RoundsOption = 0, as_json: JsonOption = False) -> None:
    """Measure this machine's sockets, with and without TLS.

    The results are round trips, and bytes a second one way and both ways, by size of buffer.

    \b
    Example:
      p2ptrain bench link
    """
    from p2ptrain.lab.bench.network import link_report, measure_link

    _measure(link_report(), lambda bench, report: measure_link(bench, rounds, report), as_json)


@app.command()
def pipeline(
    stages: Annotated[int, option("--stages N", "Stages of the pipeline.", min=2, max=16)] = 2,
    micro_batches: Annotated[int, option("--micro-batches N", "Micro-batches per step.", min=1, max=1024)] = 16,
    rtt: RttOption = "0,20,80,200",
    forward_ms: Annotated[
        float, option("--forward-ms MS", "Time of a forward pass, in ms.", min=0.1, max=60_000)
    ] = 40.0,
    backward_ms: Annotated[
        float, option("--backward-ms MS", "Time of a backward pass, in ms.", min=0.1, max=60_000)
    ] = 80.0,
    steps: Annotated[int, option("--steps N", "Steps per schedule and round trip.", min=1, max=1000)] = 3,
    payload: Annotated[str, option("--payload SIZE", "Size of a micro-batch's activations or gradients.")] = "1M",
    as_json: JsonOption = False,
) -> None:
    """Compare pipeline schedules over slow links.

    The stages are processes that wait instead of computing. They exchange real payloads over emulated far links. 1F1B
    with a warm-up extended for the links, plain 1F1B and GPipe take turns, step by step. Efficiency is the part of a
    step that a stage computes. The ideal is the efficiency if only computing and links took time.

    \b
    Examples:
      p2ptrain bench pipeline
      p2ptrain bench pipeline --stages 4 --rtt 0,80 --steps 5 --json > pipeline.json
    """
    from p2ptrain.lab.bench.pipeline import PipelinePlan, measure_pipeline
    from p2ptrain.lab.bench.runner import PLAIN_BYTES, check_fits, numbers_of

    payload_bytes, round_trips_ms = size_of(payload), numbers_of(rtt, "--rtt", float, 0, 9999)
    what = f"{stages} stages with {micro_batches} payloads of {human_bytes(payload_bytes)}"
    need_bytes = stages * (PLAIN_BYTES + 2 * micro_batches * payload_bytes)  # all of a step may wait, out and in
    check_fits(what, need_bytes)
    times_s = (forward_ms / 1e3, backward_ms / 1e3)
    plan = PipelinePlan(stages, micro_batches, round_trips_ms, *times_s, steps, payload_bytes)
    _measure(plan.report(), lambda bench, report: measure_pipeline(bench, plan, report), as_json)


@app.command()
def generate(
    verifier: Annotated[Path | None, option("--model DIR", "Verifier's model; default: one that only waits.")] = None,
    drafter: Annotated[Path | None, option("--draft-model DIR", "Drafter's model, with the same tokenizer.")] = None,
    split: Annotated[int, option("--split N", "Workers that hold the verifier's model.", min=0, max=15)] = 0,
    rtt: RttOption = "0,20,80,200",
    alpha: Annotated[str, option("--alpha LIST", "Probability that a draft is right if all before it are.")] = ".8",
    pass_ms: Annotated[float, option("--pass-ms MS", "Time of a verifier's pass, in ms.", min=0.5, max=10_000)] = 50.0,
    draft_ms: Annotated[float, option("--draft-ms MS", "Time of a draft, in ms.", min=0.1, max=10_000)] = 5.0,
    tokens: Annotated[int, option("--tokens -n N", "New tokens per text.", min=8, max=10_000)] = 128,
    texts: Annotated[int, option("--texts N", "Texts per contender.", min=1, max=1000)] = 4,
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure texts with a far drafter, and of a split model.

    Peers run as join starts them, over emulated far links. By default the models only take time, and the drafter is
    right as often as --alpha says. It is compared with the verifier alone. Real models are compared with transformers'
    generate and its assisted generation.

    \b
    Examples:
      p2ptrain bench generate
      p2ptrain bench generate --alpha .6,.9 --rtt 40
      p2ptrain bench generate --split 3 --rtt 0,20
      p2ptrain bench generate --model big/ --draft-model small/ --rtt 0,20
    """
    from p2ptrain.lab.bench.generate import GeneratePlan, check_models, measure_generate
    from p2ptrain.lab.bench.runner import numbers_of

    check_models(verifier, drafter, split)
    plan = GeneratePlan(
        str(verifier.absolute()) if verifier else "",
        str(drafter.absolute()) if drafter else "",
        split,
        numbers_of(rtt, "--rtt", float, 0, 9999),
        numbers_of(alpha, "--alpha", float, 0, 1),
        pass_ms / 1e3,
        draft_ms / 1e3,
        tokens,
        texts,
        threads,
    )
    _measure(plan.report(), lambda bench, report: measure_generate(bench, plan, report), as_json)


@app.command()
def serve(
    model: Annotated[Path | None, option("--model DIR", "A model; default: random ones of --sizes.")] = None,
    sizes: Annotated[str, option("--sizes LIST", "Parameters of random models: 22M, 80M.")] = "22M,80M",
    texts: Annotated[str, option("--at-once LIST", "Texts at a time.")] = "1,2,4,8,16",
    prompt_tokens: Annotated[int, option("--prompt-tokens N", "Tokens of a prompt.", min=1, max=10_000)] = 64,
    tokens: Annotated[int, option("--tokens -n N", "New tokens per text.", min=8, max=10_000)] = 128,
    stages: Annotated[str, option("--splits LIST", "Workers that hold the model; 0: it is whole.")] = "0,2,3",
    rtt: Annotated[float, option("--round-trip MS", "Emulated round trip between workers.", min=0, max=9999)] = 20.0,
    threads: Annotated[int, option("--threads N", "CPU threads in all; 0: all cores.", min=0, max=1024)] = 0,
    rounds: Annotated[int, option("--rounds N", "Measured rounds.", min=1, max=1000)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure many texts at a time, of a whole and of a split model.

    Peers run as join starts them. Texts are requested over HTTP and compared with those of the model alone.
    transformers' padded batch and its continuous batching take turns with the whole model.

    \b
    Examples:
      p2ptrain bench serve
      p2ptrain bench serve --sizes 22M --splits 0 --at-once 1,8
      p2ptrain bench serve --splits 2,3 --round-trip 20 --json > split.json
      p2ptrain bench serve --model runs/tiny/checkpoints/step-100 --at-once 1,4
    """
    from p2ptrain.lab.bench.generate import check_models
    from p2ptrain.lab.bench.runner import numbers_of
    from p2ptrain.lab.bench.serve import RANDOM_MODELS, ServePlan, measure_serve

    check_models(model, None, 0)
    chosen = [size.strip() for size in sizes.split(",")]
    for size in chosen:
        check_one_of("--sizes", size, list(RANDOM_MODELS))
    numbers, stage_numbers = numbers_of(texts, "--at-once", int, 1, 64), numbers_of(stages, "--splits", int, 0, 15)
    at, cores = str(model.absolute()) if model else "", threads or os.cpu_count() or 1
    shape = (numbers, prompt_tokens, tokens, stage_numbers)
    plan = ServePlan(at, chosen, *shape, rtt, cores, rounds)
    _measure(plan.report(), lambda bench, report: measure_serve(bench, plan, report), as_json)


@app.command(hidden=True)
def member(rank: int, size: int) -> None:
    """One process of a benchmark: carries out the orders on its standard input."""
    from p2ptrain.lab.bench.member import run_member

    run(run_member(rank, size))


def _measure(
    report: BenchReport,
    work: Callable[[Bench, BenchReport], Coroutine[Any, Any, None]],
    as_json: bool,
) -> None:
    from p2ptrain.lab.bench.runner import conduct

    run(conduct(report, lambda bench: work(bench, report)), children=True)
    print_json(report.to_json()) if as_json else print_report(report)
    if not report.complete:
        raise typer.Exit(EXIT_INTERRUPTED)


def _check_names(link: str, codec: str) -> None:
    from ring.codecs import codec_named
    from wire.emulate import preset_named

    codec_named(codec)
    if link:
        preset_named(link)


def _check_device(device: str) -> None:
    """Raises ``UserError``, ``ConfigError``: this machine does not have the device, or there is no such kind."""
    if device not in ("auto", "cpu"):
        from p2ptrain.compute.device import pick_device

        pick_device(device)


def _check_backend(backend: str, *, plain: bool) -> None:
    check_one_of("--backend", backend, ["ring", "torch"])
    if backend == "torch" and not plain:
        remedy = "leave out --link, --tls and --codec"
        raise UserError("--backend torch measures plain near connections only", remedy=remedy)


def make_table(report: BenchReport) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each contender of each case: its own facts, and in the first row those of the case."""
    heads = [
        "",
        "",
        f"{report.unit.upper()}/S",
        "MEDIAN",
        "P10-P90",
        "N",
        *(head for head, _ in report.columns.values()),
    ]
    rows = []
    for case in report.cases:
        label, common, absent = case.label, case.facts, "-"
        for contender in case.contenders.values():
            if contender.seconds:
                found = {name: (common | contender.facts).get(name) for name in report.columns}
                facts = [
                    absent if found[name] is None else shown(found[name]) for name, (_, shown) in report.columns.items()
                ]
                spread = human_spread(contender.quantile_s(0.1), contender.quantile_s(0.9))
                rate = report.rate(case.amount / contender.median_s)
                row = [
                    label,
                    contender.title,
                    rate,
                    human_duration(contender.median_s),
                    spread,
                    str(len(contender.seconds)),
                ]
                rows.append(row + facts)
                label, common, absent = "", {}, ""
    return heads, rows


def print_report(report: BenchReport) -> None:
    typer.secho(report.title, bold=True)
    from p2ptrain.lab.bench.report import origin

    made = origin()
    torch = f" · torch {report.torch}" if report.torch else ""
    typer.echo(f"{made['cores']} cores · {made['system']} · Python {made['python']} ({made['loop']}){torch}")
    typer.echo(printable(f"{made['date']} · {made['command']}"))
    if not report.complete:
        typer.secho("interrupted: this is what was measured until then", fg="yellow")
    heads, rows = make_table(report)
    if rows:
        typer.echo()
        print_table(heads, rows, right=heads[2:])
    for note in report.notes:
        for line in textwrap.wrap(note, screen_columns() - 2, initial_indent="· ", subsequent_indent="  "):
            typer.echo(line)


def screen_columns() -> int:
    """Columns of the terminal, 80 without one."""
    return min(120, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


def human_spread(low_s: float, high_s: float) -> str:
    """Both ends in the unit of the upper one: ``55–80.1 µs``."""
    number, _, unit = human_duration(high_s).partition(" ")
    return f"{three_digits(low_s / {'s': 1.0, 'ms': 1e-3, 'µs': 1e-6}[unit])}–{number} {unit}"
