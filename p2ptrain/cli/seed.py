"""``p2ptrain seed``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from p2ptrain.cli.console import Console
from p2ptrain.cli.runtime import (
    DEFAULT_PORT,
    STATE_DEFAULT,
    SetOption,
    default_state_dir,
    is_name,
    operator_name,
    run,
)
from p2ptrain.core.errors import P2PTrainError
from wire.records import FINISHED_STATES
from wire.transport_base import is_loopback


def seed(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Listen here; 0.0.0.0: for other machines too.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Listen on this port; 0: any free one.")
    ] = DEFAULT_PORT,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help=f"Where jobs and metrics are kept. {STATE_DEFAULT}")
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name", metavar="NAME", callback=is_name, help="What to call this cluster; default: the machine's name."
        ),
    ] = "",
    job: Annotated[
        str,
        typer.Option(
            "--job", "-j", metavar="NAME|PATH", help="Profile of the job to begin with, where there is none yet."
        ),
    ] = "tiny",
    no_job: Annotated[
        bool, typer.Option("--no-job", help="Begin with no job; `p2ptrain jobs create` makes one.")
    ] = False,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one line of JSON when it listens: event, host, port.")
    ] = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Start a seed: the place where workers meet. It keeps the record and never computes.

    Stopping it harms nothing: workers go on, and find it again when it is back.

    \b
    Examples:
      p2ptrain seed
      p2ptrain seed --host 0.0.0.0 --job small --set job.steps=2000
      p2ptrain seed --no-job --port 9000
    """
    root = (state or default_state_dir()).absolute() / "seed"
    run(_serve(root, host, port, name, None if no_job else job, sets, as_json, with_parent))


async def _serve(
    state_dir: Path, host: str, port: int, name: str, job: str | None, sets: list[str], as_json: bool, with_parent: bool
) -> None:
    from p2ptrain.cli.children import leave_with_parent
    from p2ptrain.cli.stopping import stop_on_signals
    from p2ptrain.core.world import real_world
    from roles.seed import run_seed
    from wire.transport import TcpNetwork

    console, stop = Console(), asyncio.Event()
    stop_on_signals(stop, lambda text: console.event("info", text))
    if with_parent:
        leave_with_parent(stop)
    address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    spec = _spec(job, sets) if job is not None else None
    cluster = name or operator_name().removeprefix("cli@")
    world = real_world(TcpNetwork())
    serving = asyncio.create_task(
        run_seed(
            world, state_dir=state_dir, host=host, port=port, name=cluster, on_ready=address.set_result, stop=stop
        ),
        name="serve",
    )
    try:
        first: set[asyncio.Future[Any]] = {serving, address}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if address.done():
            try:
                await _announce(address.result(), job, spec, console, as_json=as_json)
            except P2PTrainError:
                if not stop.is_set():  # else it was told to stop meanwhile, and let us go like everybody else
                    stop.set()
                    await serving  # where it failed itself, its reason is the one to tell
                    raise
        await serving
    finally:
        stop.set()
        await asyncio.wait({serving})


async def _announce(
    address: tuple[str, int], job: str | None, spec: str | None, console: Console, *, as_json: bool
) -> None:
    if spec is not None and job is not None:
        await _first_job(*address, job, spec, console)
    _tell(console, *address, as_json)


def _spec(profile: str, sets: list[str]) -> str:
    import os

    from configs.loader import load

    return load(profile, os.environ, sets).profile.to_spec()


async def _first_job(host: str, port: int, profile: str, spec: str, console: Console) -> None:
    """Create the job to begin with, unless this seed already has jobs."""
    from wire.client import SeedClient
    from wire.transport import TcpNetwork

    dial_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    client = await SeedClient.connect(TcpNetwork(), dial_host, port, name=operator_name())
    try:
        jobs = (await client.request("jobs.list", {}))["jobs"]
        unfinished = [item for item in jobs if item["state"] not in FINISHED_STATES]
        if unfinished:
            console.event(
                "info",
                f"going on with job {unfinished[0]['name']} ({unfinished[0]['id']}), step {unfinished[0]['step']}",
            )
        elif not jobs:
            name = Path(profile).stem
            created = await client.request("jobs.create", {"name": name, "profile": profile, "spec": spec})
            console.event("info", f"created job {name} ({created['job']}) from profile {profile}")
    finally:
        await client.close()


def _tell(console: Console, host: str, port: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"event": "ready", "host": host, "port": port}))
        return
    suffix = "" if port == DEFAULT_PORT else f":{port}"
    shown = _own_address() if host in ("0.0.0.0", "::") else host  # noqa: S104
    console.event("info", f"the seed listens on {host}:{port}")
    console.event("info", f"join with:  p2ptrain join {shown}{suffix}")
    console.event("info", f"watch with: p2ptrain tui {shown}{suffix}")
    if not is_loopback(host):
        console.event("warning", "connections are not encrypted yet: use this only on a network that you trust")


def _own_address() -> str:
    """The address of this machine that the default route leaves from; nothing is sent to find it."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 of RFC 5737: a UDP connect sends no packet
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
