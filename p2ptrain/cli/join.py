"""``p2ptrain join``."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.commands import new_typer
from p2ptrain.cli.inputs import DownloadOption
from p2ptrain.cli.output import step_line
from p2ptrain.cli.runtime import (
    DEFAULT_SEED,
    SEED_HELP,
    SEED_VARIABLE,
    STATE_DEFAULT,
    ApiKeyOption,
    HttpOption,
    LinkOption,
    MemberPortOption,
    NameOption,
    SplitOption,
    StragglerOption,
    is_text,
    run,
)
from p2ptrain.cli.text_options import WithBareSplit, check_dtype
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.texts import check_one_of

if TYPE_CHECKING:
    from configs.schema import Profile
    from p2ptrain.cli.island import IslandOptions
    from p2ptrain.cli.joining import Found, JoinOptions, ProcessContext, Running
    from p2ptrain.compute.device import ComputeDevice
    from p2ptrain.compute.island import Island
    from roles.engine import Engine, Stage
    from wire.messages import Scalar

ROLES = ("worker", "verifier", "drafter")

LEAST_MEMORY_BYTES = 64 << 10  # a smaller --memory most likely lacks its unit

app = new_typer()


@app.command("join", cls=WithBareSplit)
def join(
    address: Annotated[str, typer.Argument(envvar=SEED_VARIABLE, metavar="SEED", help=SEED_HELP)] = DEFAULT_SEED,
    also: Annotated[
        list[str],
        typer.Option("--also", metavar="SEED", help="Another address where the seed may be, if it is restored there."),
    ] = [],  # noqa: B006 - Typer copies it
    role: Annotated[
        str,
        typer.Option(
            "--role", metavar="ROLE", help="worker: trains, and holds parts; verifier: writes text; drafter: drafts it."
        ),
    ] = "worker",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="DIR",
            callback=is_text,
            help="For a verifier or drafter: a checkpoint or adapter, or a directory with some.",
        ),
    ] = "",
    download: DownloadOption = False,
    name: NameOption = "",
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help=f"Where checkpoints are kept. {STATE_DEFAULT}")
    ] = None,
    slot: Annotated[
        int | None,
        typer.Option("--slot", metavar="N", min=1, max=64, help="Slot to use in --state; default: the first free one."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Listen here for other members; default: where the seed can reach it."
        ),
    ] = "",
    port: MemberPortOption = None,
    advertise: Annotated[
        str,
        typer.Option("--advertise", metavar="HOST:PORT", help="Address that other peers dial, behind NAT or a proxy."),
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="PATH",
            help="For a worker: its own text, in jobs with data.private = true; default: data.path of the job.",
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="KIND",
            help="auto, cpu, cuda, cuda:1, mps; default: auto, or as the job says.",
        ),
    ] = "",
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            metavar="N|all",
            help="For a worker: compute with so many devices of this machine, each in a process of its own; on CPUs: so"
            " many processes. With torchrun or srun: with all their processes.",
        ),
    ] = "",
    threads: Annotated[
        int,
        typer.Option(
            "--threads",
            metavar="N",
            min=0,
            help="CPU threads for computing; 0: automatic, or as the job says.",
        ),
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory limit for models, their parts and caches, such as 4GiB; default: for a worker 80 % of the "
            "device's free memory, else no limit.",
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="For a verifier or drafter: compute in fp32, bf16 or fp16; default: the model's. In fp32 drafts"
            " hardly ever change a verifier's text, and weights and caches take twice the memory of bf16.",
        ),
    ] = "",
    split: SplitOption = None,
    http: HttpOption = "",
    api_keys: ApiKeyOption = None,
    sessions: Annotated[
        int,
        typer.Option("--sessions", metavar="N", min=0, help="For a verifier or drafter: texts at a time; 0: default."),
    ] = 0,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="Wait so long for a seed that does not answer; 0: not at all; default: until it does.",
        ),
    ] = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    link: LinkOption = "",
    straggler: StragglerOption = 1.0,
) -> None:
    """Join a seed: as a worker, which trains the seed's jobs, or to write text. Ctrl+C leaves.

    A worker leaves after its current step, or within one that takes more than a second. A verifier owns a model and
    writes with it, for `generate`, `chat` and programs (--http). Drafters guess its next tokens with a small model, so
    that it writes faster; its text stays the same.

    On the seed's machine no ticket is needed. On another machine give the seed's ticket; later its address is enough.

    \b
    Examples:
      p2ptrain join
      p2ptrain join 192.168.1.20:7337/AbC…
      p2ptrain join @ticket.txt --name laptop --device cpu --threads 4 --memory 4GiB
      p2ptrain join 192.168.1.20 --devices all
      p2ptrain join 192.168.1.20,192.168.1.21
      p2ptrain join 192.168.1.20 --data ~/letters
      p2ptrain join 192.168.1.20 --role verifier --model models/large --http 127.0.0.1:8000
      p2ptrain join 192.168.1.20 --role verifier --model models/large --split
      p2ptrain join 192.168.1.20 --role verifier --model models/large --dtype fp32
      p2ptrain join 192.168.1.20 --role drafter --model models/small --threads 2
    """
    from p2ptrain.cli.island import follow, island_options
    from p2ptrain.cli.joining import JoinOptions, served
    from p2ptrain.cluster.access import read_targets
    from p2ptrain.core.errors import UserError
    from p2ptrain.core.texts import size_of

    # Workers on one machine share its cores. By default OpenMP's threads spin while they wait, which made a step take
    # ten times as long. This must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_one_of("--role", role, ROLES)
    if devices and role != "worker":
        raise UserError(f"--devices is not for a {role}", remedy="leave it out; --device chooses its device")
    _check_device(device)
    if (island := island_options(devices, device, threads)) is not None and not island.place.leads:
        run(follow(island, with_parent=with_parent))
        return
    targets = [target for text in (address, *also) for target in read_targets(text)]
    check_dtype(dtype)
    memory_bytes = size_of(memory) if memory else 0
    if 0 < memory_bytes < LEAST_MEMORY_BYTES:
        raise UserError(f"--memory {memory} is too small", remedy="add a unit, such as 4GiB")
    options = JoinOptions(
        role=role,
        targets=targets,
        root=(state or default_state_dir()).absolute(),  # other machines show the paths of checkpoints
        name=name,
        slot=slot,
        host=host,
        port=port,
        advertise=host_and_port("--advertise", advertise, "the address that others dial") or ("", 0),
        device=device,
        threads=threads,
        memory_bytes=memory_bytes,
        dtype=dtype,
        link=link,
        straggler=straggler,
        data=data,
        sessions=sessions,
        split=split,
        http=host_and_port("--http", http, "such as 127.0.0.1:8000, where programs reach it"),
        api_keys=api_keys,
        wait_s=math.inf if wait is None else wait,
        with_parent=with_parent,
    )
    options = _checked(options, model, download=download)
    run(_work(options, island) if role == "worker" else served(options), children=island is not None)


def _checked(options: JoinOptions, model: str, *, download: bool) -> JoinOptions:
    """Check the options of the role, and find the model. Raises ``UserError``."""
    from dataclasses import replace

    from p2ptrain.cli.text_options import newest_in
    from p2ptrain.core.errors import UserError

    role = options.role
    of_both = {"--model": bool(model), "--sessions": bool(options.sessions), "--dtype": bool(options.dtype)}
    of_verifiers = {"--split": options.split is not None, "--http": options.http is not None}
    of_verifiers["--api-key-file"] = options.api_keys is not None
    forbidden = of_verifiers if role == "drafter" else of_both | of_verifiers if role == "worker" else {}
    if extra := next((option for option, is_set in forbidden.items() if is_set), None):
        role_for = "verifier" if extra in of_verifiers else "drafter, or verifier"
        raise UserError(f"{extra} is not for a {role}", remedy=f"add --role {role_for}, or leave it out")
    if role == "worker":
        return options
    device, memory_bytes, threads = options.device, options.memory_bytes, options.threads
    of_workers = {"--device": bool(device), "--memory": bool(memory_bytes), "--threads": bool(threads)}
    extra = next((option for option, is_set in of_workers.items() if is_set), None)
    if options.split is not None and extra is not None:
        raise UserError(
            f"{extra} does not apply to a verifier with --split: workers compute its model",
            remedy=f"leave it out, and give it to the workers: p2ptrain join {extra} ...",
        )
    check_http(options.http, options.api_keys)
    if options.api_keys is not None:
        from roles.http.access import read_key

        read_key(options.api_keys, lambda _: None)  # fail early; a warning about its mode comes later
    if not model:
        raise UserError(f"a {role} needs a model", remedy="name its directory with --model")
    return replace(options, model=newest_in(Path(model), download=download))


def _check_device(kind: str) -> None:
    import re

    from configs.schema import DEVICE_KIND
    from p2ptrain.core.errors import UserError

    if kind and not re.fullmatch(DEVICE_KIND, kind):
        raise UserError(f"--device {kind} is not a device", remedy="use auto, cpu, cuda, cuda:1, ... or mps")


def check_http(http: tuple[str, int] | None, api_keys: Path | None) -> None:
    """Raises ``UserError`` for a key without an endpoint."""
    from p2ptrain.core.errors import UserError

    if api_keys is not None and http is None:
        raise UserError("--api-key-file is for an HTTP endpoint", remedy="add --http HOST:PORT, or leave it out")


def host_and_port(option: str, text: str, meaning: str) -> tuple[str, int] | None:
    """Read HOST:PORT; None if ``text`` is empty. Raises ``UserError``."""
    from p2ptrain.core.errors import UserError
    from wire.address import parse_address

    if not text:
        return None
    remedy = f"write HOST:PORT, {meaning}"
    try:
        host, port = parse_address(text, default_port=1)
        named = port == parse_address(text, default_port=2)[1]
    except UserError as problem:
        raise UserError(f"{option}: {problem.message}", remedy=remedy) from None
    if not named:
        raise UserError(f"{option} {text} has no port", remedy=remedy)
    return host, port


async def _work(options: JoinOptions, island: IslandOptions | None) -> None:
    from p2ptrain.cli.island import LeadIsland
    from p2ptrain.cli.joining import member_options, run_member, world_of
    from roles.worker.build import engine_builder, holding, island_builder, warm_up, with_data
    from roles.worker.worker import Worker

    device, threads, memory_bytes = options.device, options.threads, options.memory_bytes
    parts = holding(device=device, threads=threads, memory_bytes=memory_bytes) if island is None else None

    def worker(here: ProcessContext, found: Found, formed: tuple[Island, ComputeDevice] | None = None) -> Running:
        """``formed``: an island, and the device of this process in it."""
        build_engine = engine_builder(device=device, threads=threads, memory_bytes=memory_bytes)
        if formed is not None:
            build_engine = island_builder(*formed, memory_bytes)
        # Only workers of one process hold parts of models: the memory of others for them is too small for any.
        capabilities: dict[str, Scalar] = {
            "parts_memory_bytes": 1 if parts is None else parts.limit_bytes,
            "threads": threads,
        }
        if formed is not None:
            capabilities["device"] = formed[0].label

        def build(profile: Profile, stage: Stage) -> Engine:
            own = with_data(profile, options.data)
            with here.console.during(lambda: f"reading {own.data.path} and building the model"):
                return build_engine(own, stage)

        return Worker(
            world_of(options, found),
            here.identity,
            member_options(options, found, **capabilities),
            build_engine=build,
            warm_up=warm_up,
            notify=here.notify,
            on_step=lambda applied, total, values: here.console.progress(
                step_line(applied, total, values), last=applied == total
            ),
            membership=found.access.member,
            holding=parts,
        ).run

    if island is None:
        await run_member(options, worker)
        return
    lead = LeadIsland(island, options.root / "logs")
    try:
        await run_member(options, lambda here, found: partial(lead.run, here, partial(worker, here, found)))
    finally:
        await lead.close()
