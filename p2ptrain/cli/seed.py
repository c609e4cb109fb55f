"""``p2ptrain seed``."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain.cli.runtime import DEFAULT_PORT, STATE_DEFAULT, NameOption, SetOption, option, run
from p2ptrain.cluster.access import addresses_for_others, operator, operator_name, shown_host
from p2ptrain.cluster.console import Console
from p2ptrain.cluster.jobs import create_job
from p2ptrain.cluster.running import announced, default_state_dir
from p2ptrain.core.errors import P2PTrainError, UserError
from wire.address import EVERYWHERE, format_address, is_loopback, to_dial
from wire.records import FINISHED_STATES

if TYPE_CHECKING:
    from configs.schema import Profile
    from roles.seed.server import Seed
    from roles.web.serving import Web, WebOptions
    from wire.address import Ticket
    from wire.client import SeedRequests


def seed(
    host: Annotated[str, option("--host ADDRESS", "Listen here; 0.0.0.0: for other machines too.")] = "127.0.0.1",
    port: Annotated[
        int, option("--port PORT", "Listen on this port; 0: any free one.", min=0, max=65535)
    ] = DEFAULT_PORT,
    state: Annotated[Path | None, option("--state DIR", f"Where jobs and metrics are kept. {STATE_DEFAULT}")] = None,
    name: NameOption = "",
    profile: Annotated[
        str, option("--profile -p NAME|PATH", "Profile of the first job, if there is no job yet.")
    ] = "tiny",
    no_job: Annotated[bool, option("--no-job", "Begin with no job; `p2ptrain jobs create` makes one.")] = False,
    sets: SetOption = [],  # noqa: B006 - Typer copies it
    tls: Annotated[bool, option("--tls", "Also encrypt the loopback; all else is always encrypted.")] = False,
    as_json: Annotated[
        bool, option("--json", "Write one line of JSON when it listens: event, host, port, tls, http.")
    ] = False,
    backup: Annotated[
        Path | None, option("--backup DIR", "Directory for a copy of the seed's data, on another disk.")
    ] = None,
    restore: Annotated[
        Path | None, option("--restore DIR", "Directory with the copy of a lost seed to start from.")
    ] = None,
    http: Annotated[str, option("--http HOST:PORT", "Address of the web page and the HTTP API; default: none.")] = "",
    http_cert: Annotated[
        Path | None, option("--http-cert FILE", "With --http: a certificate (PEM); default: its own.")
    ] = None,
    http_cert_key: Annotated[Path | None, option("--http-cert-key FILE", "The key of that certificate (PEM).")] = None,
    http_read_key: Annotated[
        Path | None, option("--http-read-key FILE", "With --http: file with the key of those who only look.")
    ] = None,
    http_operator_key: Annotated[
        Path | None, option("--http-operator-key FILE", "With --http: file with the key of operators.")
    ] = None,
    with_parent: Annotated[bool, option("--with-parent", hidden=True)] = False,
) -> None:
    """Start a seed: the place where workers meet. It keeps the records and never computes.

    With --host it serves other machines, and everything is encrypted. It prints a ticket, with which they join.
    Stopping it harms nothing: workers go on, and find it again when it is back. With --backup the seed copies its
    records every minute and after each change of members. If its machine is lost, --restore starts from that copy
    anywhere. Workers find the new seed among the addresses that they were given (`p2ptrain join A --also B`).

    With --http it shows a web page and answers an HTTP API. Elsewhere than on the loopback both are encrypted, and need
    a key; the seed makes two of them, and names their files.

    \b
    Examples:
      p2ptrain seed
      p2ptrain seed --backup /mnt/other-disk/seed
      p2ptrain seed --restore /mnt/other-disk/seed --host 0.0.0.0
      p2ptrain seed --host 0.0.0.0 --profile small --set job.steps=2000
      p2ptrain seed --no-job --port 9000
      p2ptrain seed --http 127.0.0.1:8080
      p2ptrain seed --host 0.0.0.0 --http 0.0.0.0:8443
    """
    root = (state or default_state_dir()).absolute()
    encrypted = tls or not is_loopback(host)
    first_job = None if no_job or restore is not None else (profile, _loaded(profile, sets))
    if restore is not None:
        encrypted = _restore(restore.absolute(), root, encrypted=encrypted)
    copies = backup.absolute() if backup is not None else None
    web = _web_options(http, [http_cert, http_cert_key, http_read_key, http_operator_key])
    run(_serve(root, host, port, name, first_job, encrypted, copies, web, as_json, with_parent))


def _web_options(http: str, files: list[Path | None]) -> WebOptions | None:
    """Raises ``UserError`` for a bad address, or a file without one."""
    from p2ptrain.cli.runtime import WEB_EXAMPLE, host_and_port

    place = host_and_port("--http", http, WEB_EXAMPLE)
    if place is None:
        if any(files):
            text = "--http-cert, --http-cert-key, --http-read-key and --http-operator-key are for an HTTP address"
            raise UserError(text, remedy="add --http HOST:PORT, or leave them out")
        return None
    from roles.web.serving import WebOptions

    return WebOptions(*place, *files)


def _restore(directory: Path, root: Path, *, encrypted: bool) -> bool:
    """Restore the copy; return whether the seed is encrypted. Raises ``UserError``, ``StorageError``."""
    from datetime import datetime

    from p2ptrain.core.disk import RealDisk
    from roles.seed.run import restore

    found = restore(RealDisk(), directory, root / "seed")
    made = datetime.fromtimestamp(found.wall).astimezone().isoformat(sep=" ", timespec="seconds")
    typer.echo(
        f"restored the copy of {made}; the seed leads in term {found.term}\n"
        "running workers report what happened after that, except evictions, revocations and tickets:"
        " repeat those that you made since",
        err=True,
    )
    return encrypted or found.encrypted


async def _serve(
    root: Path,
    host: str,
    port: int,
    name: str,
    first_job: tuple[str, Profile] | None,
    encrypted: bool,
    backup_dir: Path | None,
    web: WebOptions | None,
    as_json: bool,
    with_parent: bool,
) -> None:
    from p2ptrain.cluster.console import stoppable, unless_stopped
    from p2ptrain.core.world import real_world
    from roles.seed.run import run_seed
    from wire.transport import TcpNetwork

    console, stop = stoppable(with_parent=with_parent)
    tickets: list[Ticket] = []
    seeds: list[Seed] = []
    address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        run_seed(
            real_world(TcpNetwork()),
            state_dir=root / "seed",
            host=host,
            port=port,
            name=name or operator_name().removeprefix("cli@"),
            ticket_host=shown_host(host) if encrypted else "",
            on_ticket=tickets.append,
            backup_dir=backup_dir,
            tracker_environ=os.environ,
            on_seed=seeds.append,
            on_ready=address.set_result,
            on_alarm=partial(console.event, "error"),
            stop=stop,
        ),
        name="serve",
    )
    try:
        first: set[asyncio.Future[Any]] = {serving, address}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if address.done():
            bound, port = address.result()
            near = to_dial(bound), port
            async with AsyncExitStack() as stack:
                if not with_parent:
                    stack.enter_context(announced(near, root))
                try:
                    shown = None
                    if web is not None:
                        shown = await stack.enter_async_context(_web(web, seeds[0], bound, near, root, console))
                    _tell(console, bound, port, root, tickets, shown, as_json)
                    if tickets:
                        _tell_of_addresses(console, host, bound)
                    await unless_stopped(stop, _first_job(near, root, first_job, console))
                except P2PTrainError:
                    if not stop.is_set():  # otherwise the seed was stopping, and disconnected us
                        stop.set()
                        await serving  # if the seed failed, this raises its own error
                        raise
                await serving
        await serving
    finally:
        stop.set()
        await asyncio.wait({serving})


@asynccontextmanager
async def _web(
    options: WebOptions, seed: Seed, bound: str, near: tuple[str, int], root: Path, console: Console
) -> AsyncIterator[Web]:
    import socket

    from p2ptrain.lab.experiments.endpoints import Experiments
    from roles.web.serving import serving_web

    names = [name for name in (shown_host(options.host), options.host, socket.gethostname()) if name not in EVERYWHERE]
    names = list(dict.fromkeys([*names, "localhost", "127.0.0.1"]))
    experiments = Experiments(root / "seed" / "experiments", partial(operator, near, state=root))
    warn = partial(console.event, "warning")
    web = serving_web(
        options,
        names,
        root / "seed",
        seed,
        partial(_create_checked, bound, console),
        experiments.endpoints(),
        warn=warn,
    )
    async with web as served, experiments.serving():
        yield served


async def _create_checked(
    bound: str, console: Console, client: SeedRequests, name: str, label: str, profile: Profile
) -> str:
    """Create a job for the HTTP API of a seed that listens on ``bound``."""
    from p2ptrain.cluster.models import resolve_inputs

    if is_loopback(bound):  # otherwise each worker reads its own disk
        profile = await asyncio.to_thread(resolve_inputs, profile)
    return await create_job(client, name, label, profile, console)


def _loaded(profile: str, sets: list[str]) -> Profile:
    from configs.loader import load

    loaded = load(profile, os.environ, sets).profile
    if loaded.drafter.layers:
        more = f"p2ptrain jobs create --profile {profile} --drafter"
        typer.echo(f"--profile {profile} creates the main model's job only; for the drafter's: {more}", err=True)
    return loaded


async def _first_job(
    near: tuple[str, int], root: Path, first_job: tuple[str, Profile] | None, console: Console
) -> None:
    if first_job is None:
        return
    async with operator(near, state=root) as client:
        jobs = await client.jobs()
        unfinished = [job for job in jobs if job.state not in FINISHED_STATES]
        if unfinished:
            going = unfinished[0]
            _, spec = await client.job(going.id)
            own = "" if spec == first_job[1].to_spec() else ", with the settings that it began with"
            console.event("info", f"going on with job {going.name} ({going.id}), step {going.step}{own}")
        elif not jobs:
            await create_job(client, Path(first_job[0]).stem, *first_job, console)
        else:
            text = f"job {jobs[-1].name} ({jobs[-1].id}) is {jobs[-1].state} at step {jobs[-1].step:,}"
            console.event("info", f"{text}: `p2ptrain jobs create` starts another one")


def _tell_of_addresses(console: Console, host: str, bound: str) -> None:
    """Warn if no other machine can use the ticket, and name the other addresses that one may use."""
    others, remedy = addresses_for_others(), "see `p2ptrain ticket new --host`"
    if is_loopback(bound) and not is_loopback(host):
        text = f"{host} is {bound} here, which only this machine reaches: restart the seed with --host 0.0.0.0"
        console.event("warning", text)
    elif bound in EVERYWHERE and not others:
        console.event("warning", f"this machine has no address that other machines can use: connect it, or {remedy}")
    elif bound in EVERYWHERE and len(others) > 1:
        console.event("info", f"other addresses of this machine: {', '.join(others[1:])}; for a ticket {remedy}")


def _tell(
    console: Console,
    host: str,
    port: int,
    root: Path,
    tickets: list[Ticket],
    web: Web | None,
    as_json: bool,
) -> None:
    if as_json:
        more = {"http": web.url, "http_keys": [str(path) for path in web.key_files]} if web is not None else {}
        typer.echo(json.dumps({"event": "ready", "host": host, "port": port, "tls": bool(tickets)} | more))
        return
    here, how = format_address(shown_host(host), port), ", encrypted" if tickets else ""
    everywhere = f", on all addresses of port {port}" if host in EVERYWHERE else ""
    console.event("info", f"the seed listens on {here}{everywhere}{how}")
    if web is not None:
        console.event("info", f"in a browser, watch at:      {web.url}")
        if web.key_files:
            files = ", ".join(map(str, web.key_files))
            console.event("info", f"its keys, one to read and one for operators, are in: {files}")
        if web.own_certificate:
            console.event("info", f"its certificate is signed by: {root / 'seed' / 'authority' / 'ca.pem'}")
    only = "" if root == default_state_dir().absolute() else quote(f"@{root}")
    console.event("info", f"on this machine, watch with: p2ptrain tui {only}".rstrip())
    console.event("info", f"on this machine, join with:  p2ptrain join {here}")
    if not is_loopback(host):
        ticket = "p2ptrain ticket new --operator" + f" --seed {only}" * bool(only)
        console.event("info", f"elsewhere, watch with:       p2ptrain tui TICKET   (`{ticket}`, here, prints one)")
        console.event("info", "elsewhere, join with this line, which holds a ticket for workers and is a secret:")
    if tickets:
        typer.echo(f"p2ptrain join {tickets[0]}", err=True)
