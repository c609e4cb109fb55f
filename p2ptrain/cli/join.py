"""``p2ptrain join``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p2ptrain.cli.console import step_line
from p2ptrain.cli.runtime import (
    DEFAULT_SEED,
    SEED_HELP,
    SEED_VARIABLE,
    STATE_DEFAULT,
    default_state_dir,
    is_name,
    run,
)
from wire.transport_base import is_loopback

if TYPE_CHECKING:
    from wire.ticket import Ticket

EVERYWHERE = "0.0.0.0"  # noqa: S104 - members on other machines must reach this one


def join(
    address: Annotated[str, typer.Argument(envvar=SEED_VARIABLE, metavar="SEED", help=SEED_HELP)] = DEFAULT_SEED,
    name: Annotated[
        str,
        typer.Option(
            "--name", metavar="NAME", callback=is_name, help="What to call this worker; default: the machine's name."
        ),
    ] = "",
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help=f"Where checkpoints are kept. {STATE_DEFAULT}")
    ] = None,
    slot: Annotated[
        int | None,
        typer.Option(
            "--slot", metavar="N", min=1, max=64, help="Take this place in --state; default: the first free one."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Listen here for other workers; default: where the seed can reach it."
        ),
    ] = "",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Listen on this port; 0: any free one.")
    ] = 0,
    advertise: Annotated[
        str,
        typer.Option(
            "--advertise", metavar="HOST:PORT", help="The address that others shall dial, behind NAT or a proxy."
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option("--device", metavar="KIND", help="auto, cpu, cuda, cuda:1, mps; default: what the profile says."),
    ] = "",
    threads: Annotated[
        int,
        typer.Option("--threads", metavar="N", min=0, help="CPU threads to compute with; 0: what the profile says."),
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="What parts of split models may take here, such as 4GiB; default: 80 % of what the device has free.",
        ),
    ] = "",
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="PRESET",
            help="Emulate a link: lan, wifi, metro, wan, transcontinental, satellite, lossy; or 20ms.",
        ),
    ] = "",
) -> None:
    """Start a worker that joins a seed and trains what the seed gives it. Ctrl+C leaves after the step under way.

    On the seed's machine no ticket is needed; on another one the seed's ticket, and later its address will do.

    \b
    Examples:
      p2ptrain join
      p2ptrain join 192.168.1.20:7337/AbC…
      p2ptrain join @ticket.txt --name laptop --device cpu --threads 4 --memory 4GiB
      p2ptrain join 192.168.1.20,192.168.1.21
    """
    from p2ptrain.cli.access import read_targets
    from p2ptrain.cli.main import told
    from p2ptrain.cli.sizes import size_of

    # Workers on one machine share its cores. OpenMP's threads spin while they wait, by default, and so take them from
    # one another: a step was seen to take ten times as long. It must be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    targets = read_targets(address)
    advertised = _advertised(advertise)
    memory_bytes = size_of(memory) if memory else 0
    _check_device(device)
    root = (state or default_state_dir()).absolute()  # checkpoints are told to people elsewhere by their paths
    try:
        run(_work(targets, name, root, slot, host, port, advertised, device, threads, memory_bytes, link, with_parent))
        code = 0
    except Exception as error:  # noqa: BLE001 - told as the entry point tells it
        code = told(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # A kernel may still run on the compute thread. The interpreter's own shutdown would wait for it, or end the thread
    # within it, which aborts the process.
    os._exit(code)


def _check_device(kind: str) -> None:
    """Refuse what is no device anywhere; whether this machine has it is known when the model is built."""
    import re

    from configs.schema import DEVICE_KIND
    from p2ptrain.core.errors import UserError

    if kind and not re.fullmatch(DEVICE_KIND, kind):
        raise UserError(f"--device {kind} is not a device", remedy="use auto, cpu, cuda, cuda:1, ... or mps")


def _advertised(text: str) -> tuple[str, int]:
    from p2ptrain.core.errors import UserError
    from wire.client import parse_address

    if not text:
        return ("", 0)
    host, port = parse_address(text, default_port=1)
    if port != parse_address(text, default_port=2)[1]:
        raise UserError(
            f"--advertise {text} names no port", remedy="write HOST:PORT, the address that others shall dial"
        )
    return host, port


async def _work(
    targets: list[Ticket | tuple[str, int]],
    name: str,
    root: Path,
    slot: int | None,
    host: str,
    port: int,
    advertise: tuple[str, int],
    device: str,
    threads: int,
    memory_bytes: int,
    link: str,
    with_parent: bool,
) -> None:
    from p2ptrain.cli.access import MENDED_BY_A_TICKET, Access, Caller, reach_one, shown_address
    from p2ptrain.cli.stopping import stoppable, unless_stopped
    from p2ptrain.core.disk import RealDisk
    from p2ptrain.core.errors import Refused
    from p2ptrain.core.world import real_world
    from roles.identity import claim
    from roles.known_seeds import begun, clusters_in
    from roles.worker.build import capabilities, engine_builder, holding, stage_builder, warm_up
    from roles.worker.saver_process import saver_of_this_system
    from roles.worker.worker import Worker, WorkerOptions
    from wire.emulate import EmulatedNetwork
    from wire.handshake import RefusalCode
    from wire.shaper import preset_named
    from wire.transport import TcpNetwork

    console, stop = stoppable(with_parent=with_parent)
    tcp = TcpNetwork()
    base = EmulatedNetwork(tcp, preset_named(link), os.getpid()) if link else tcp
    identity = claim(RealDisk(), root, role="worker", name=name, slot=slot)

    parts = holding(device=device, threads=threads, memory_bytes=memory_bytes)
    places = [target if isinstance(target, tuple) else (target.host, target.port) for target in targets]
    # Where another seed leads since this worker was here, it knows it.
    known = [place for place in begun(places, clusters_in(RealDisk(), identity.directory)).seeds if place not in places]

    def worker(access: Access, listen: tuple[str, int]) -> Worker:
        return Worker(
            real_world(access.network),
            identity,
            WorkerOptions(
                seed=(access.host, access.port),
                listen=listen,
                advertise=advertise,
                capabilities={**capabilities(device), "parts_memory_bytes": parts.limit_bytes},
                others=tuple(place for place in places if place != (access.host, access.port)),
            ),
            build_engine=engine_builder(device=device, threads=threads),
            build_part=stage_builder(device=device, threads=threads, memory_bytes=memory_bytes),
            warm_up=warm_up,
            notify=lambda level, _, text: console.event(level, text),
            on_step=lambda applied, total, values: console.progress(
                step_line(applied, total, values), last=applied == total
            ),
            saver=saver_of_this_system,
            member=access.member,
            holding=parts,
        )

    console.event("info", f"worker {identity.name} ({identity.peer_id}) joins {', '.join(map(shown_address, targets))}")
    caller = Caller("worker", identity.directory / "credentials", [root, default_state_dir()], identity.peer_id)
    listen_host, afresh = host, False
    try:
        while True:
            access = await unless_stopped(stop, reach_one([*targets, *known], caller, base, afresh=afresh))
            if access is None:
                break
            try:
                await worker(access, (listen_host or _usual_host(access.host), port)).run(stop)
                break
            except Refused as refusal:
                if refusal.code == RefusalCode.LOOPBACK_ONLY and not listen_host:
                    console.event("info", "workers of other machines join this seed: listening on all addresses")
                    listen_host = EVERYWHERE
                elif refusal.code in MENDED_BY_A_TICKET and access.member is not None and not afresh:
                    console.event("info", f"{refusal.message}; joining afresh")
                    afresh = True
                else:
                    raise
    finally:
        console.finish()
        identity.release()
    console.event("info", "left")


def _usual_host(seed: str) -> str:
    """Where to listen when nobody said: other members must reach us, and are elsewhere where the seed is."""
    return "127.0.0.1" if is_loopback(seed) else EVERYWHERE
